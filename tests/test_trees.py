"""Arithmetic on named tensors, worked by hand."""

from __future__ import annotations

import pytest
import torch

from fedprism import trees
from fedprism.protocol import sample_clients


def test_mean_by_hand_and_wide_sums() -> None:
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
    assert trees.mean([a, b])["w"].tolist() == [2.0, 4.0]
    assert trees.mean([a, b], [1, 3])["w"].tolist() == [2.5, 5.0]
    half = {"w": torch.full((1,), 0.1, dtype=torch.float16)}
    assert trees.mean([half] * 64)["w"].dtype == torch.float16
    assert float(trees.mean([half] * 64)["w"]) == float(half["w"])
    assert (
        int(trees.mean([{"n": torch.tensor(3)}, {"n": torch.tensor(5)}])["n"]) == 5
    )  # counters take the maximum


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0], [float("nan"), 1.0]])
def test_mean_refuses_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="mean"):
        trees.mean([{"w": torch.ones(1)}] * 2, weights)


def test_names_and_shapes_are_compared_never_positions() -> None:
    with pytest.raises(ValueError, match=r"only in the first: \['a'\], only in the second: \['b'\]"):
        trees.add({"a": torch.ones(1)}, {"b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'a' has shapes \(1,\) and \(2,\)"):
        trees.sub({"a": torch.ones(1)}, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="tree 0 and tree 1"):
        trees.mean([{"a": torch.ones(1)}, {"a": torch.ones(2)}])
    with pytest.raises(ValueError, match="no trees"):
        trees.mean([])


def test_join_and_flatten_undo() -> None:
    parts = {"pair": {"lora_A.0": torch.ones(2, 3)}, "3": {"lora_B.0": torch.zeros(4)}, "empty": {}}
    back = trees.split(trees.join(parts), parts)
    assert back.keys() == parts.keys() and torch.equal(back["pair"]["lora_A.0"], parts["pair"]["lora_A.0"])
    tree = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    vector = trees.flatten(tree)
    assert all(torch.equal(v, tree[k]) for k, v in trees.unflatten(vector, tree).items())
    with pytest.raises(ValueError, match="got 3 entries, needs 8"):
        trees.unflatten(torch.ones(3), tree)
    with pytest.raises(KeyError, match="part 'x'"):
        trees.split({"x:a": torch.ones(1)}, ["pair"])


def test_scalars_of_a_tree() -> None:
    tree = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert trees.norm(tree) == 5.0 and trees.count(tree) == 2
    assert trees.norm(trees.zeros(tree)) == 0.0
    assert trees.scale(tree, 2.0)["a"].item() == 6.0 and tree["a"].item() == 3.0
    with pytest.raises(KeyError, match="no \\['c'\\]"):
        trees.select(tree, ["c"])


@pytest.mark.parametrize(
    ("n", "fraction", "asked"), [(100, 0.07, 7), (25, 0.28, 7), (10, 1.0, 10), (3, 0.01, 1), (10, 0.11, 2)]
)
def test_the_number_of_clients_asked(n: int, fraction: float, asked: int) -> None:
    chosen = sample_clients(range(n), fraction, 0, 5)
    assert len(chosen) == asked == len(set(chosen)) and chosen == sorted(chosen)
    assert sample_clients(range(n), fraction, 0, 5) == chosen
