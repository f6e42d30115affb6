"""Gram matrices and combinations by blocks, in memory and from files, against plain products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedprism.methods.update_gram import BLOCK, GramAccumulator, StoredUpdates, blocks, combine, grams

N = 5


def updates(dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes = {"lora_B.1.down": (3, 7, 11), "lora_B.0.down": (301, 2), "lora_B.0.gate_up": (5,)}
    return [{k: torch.randn(s, generator=g).to(dtype) for k, s in shapes.items()} for _ in range(N)]


def flat(trees: list[dict[str, torch.Tensor]]) -> np.ndarray:
    return np.stack([torch.cat([v.reshape(-1) for v in t.values()]).double().numpy() for t in trees])


@pytest.mark.parametrize("columns", [1, 7, BLOCK])
def test_blocks_in_memory_give_the_plain_products(columns: int) -> None:
    trees = updates()
    (G,) = grams(blocks(trees, columns), N).values()
    np.testing.assert_allclose(G, flat(trees) @ flat(trees).T, rtol=1e-5, atol=1e-4)
    assert (G == G.T).all()
    beta = np.array([0.5, -1.0, 0.0, 2.0, 0.25])
    result = combine(blocks(trees, columns), trees[0], lambda name: beta)
    np.testing.assert_allclose(flat([result])[0], beta @ flat(trees), atol=1e-5)
    assert {k: v.shape for k, v in result.items()} == {k: v.shape for k, v in trees[0].items()}


def test_groups_of_tensors_add_up_to_the_whole() -> None:
    trees = updates(torch.float64)
    layers = grams(blocks(trees), N, lambda name: name.split(".")[1])
    assert list(layers) == ["1", "0"]
    np.testing.assert_allclose(layers["0"] + layers["1"], flat(trees) @ flat(trees).T, atol=1e-10)
    own = {"0": np.eye(N)[2], "1": np.eye(N)[4]}
    result = combine(blocks(trees), trees[0], lambda name: own[name.split(".")[1]])
    assert torch.equal(result["lora_B.1.down"], trees[4]["lora_B.1.down"])
    assert torch.equal(result["lora_B.0.gate_up"], trees[2]["lora_B.0.gate_up"])


def test_float64_sums_over_blocks() -> None:
    n, accumulator = 3 * BLOCK, GramAccumulator(2)
    values = torch.rand(1, n, generator=torch.Generator().manual_seed(0)).expand(2, n)
    accumulator.add_block(values)
    exact = float(values[0].double().square().sum())
    np.testing.assert_allclose(accumulator.matrix(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_files_give_what_memory_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    trees = updates(dtype)
    paths = [tmp_path / f"{k}.safetensors" for k in range(N)]
    for tree, path in zip(trees, paths, strict=True):
        save_file(tree, path, metadata={"client": path.stem})
    stored = StoredUpdates(paths)
    assert len(stored) == N
    ordered = [{name: tree[name] for name in stored.like} for tree in trees]
    (G,), (expected,) = grams(stored.blocks(64), N).values(), grams(blocks(ordered, 64), N).values()
    assert np.array_equal(G, expected)
    beta = np.linspace(-1, 1, N)
    result = combine(stored.blocks(64), stored.like, lambda name: beta)
    again = combine(blocks(ordered, 64), ordered[0], lambda name: beta)
    for name, value in again.items():
        assert (
            torch.equal(result[name], value) and value.dtype == dtype and value.shape == trees[0][name].shape
        )


def test_updates_that_do_not_fit_are_named(tmp_path: Path) -> None:
    trees = updates()
    del trees[3]["lora_B.0.gate_up"]
    with pytest.raises(ValueError, match="send the same tensors"):
        list(blocks(trees))
    paths = [tmp_path / f"{k}.safetensors" for k in (2, 3)]
    for path, tree in zip(paths, trees[2:4], strict=True):
        save_file(tree, path)
    with pytest.raises(ValueError, match=r"3\.safetensors has other tensors than 2\.safetensors"):
        StoredUpdates(paths)
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, paths[0])
    with pytest.raises(ValueError, match=r"got types \['I64'\]"):
        StoredUpdates(paths[:1])
    with pytest.raises(ValueError, match="got no files"):
        StoredUpdates([])
    with pytest.raises(ValueError, match=r"needs \(3, k\)"):
        GramAccumulator(3).add_block(torch.zeros(2, 5))
