"""Products of low-rank pairs against dense products, and answers worked on paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.methods.low_rank_products import (
    compress,
    no_product,
    product_norm,
    refactorise,
    require_pairs,
    residual,
    widen,
    widths,
)
from tests.tiny import Linear, Quadratic


def pair(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"lora_A.p": a, "lora_B.p": b}


def dense(tree: dict[str, Tensor]) -> Tensor:
    return tree["lora_B.p"].double() @ tree["lora_A.p"].double()


def random_pair(shape: tuple[int, ...], out: int, inner: int, d_in: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return pair(torch.randn(*shape, inner, d_in, generator=g), torch.randn(*shape, out, inner, generator=g))


E = torch.eye(3)


@pytest.mark.parametrize(
    ("weights", "missed"),
    [
        # diag(1/2, 1/2) - (1/2, 1/2)^T (1/2, 1/2) = 1/4 (1 -1; -1 1)
        ([2, 2], [[0.25, -0.25, 0.0], [-0.25, 0.25, 0.0]]),
        # diag(3/4, 1/4) - (3/4, 1/4)^T (3/4, 1/4): 3/4 - 9/16 = 1/4 - 1/16 = 3/16
        ([3, 1], [[0.1875, -0.1875, 0.0], [-0.1875, 0.1875, 0.0]]),
    ],
)
def test_the_residual_of_two_clients_by_hand(weights: list[float], missed: list[list[float]]) -> None:
    """Client 1: e1 e1^T, client 2: e2 e2^T, as 2 x 3 matrices."""
    pairs = [pair(E[:1], E[:2, :1]), pair(E[1:2], E[:2, 1:2])]
    share = torch.tensor(weights) / sum(weights)
    means = {name: share[0] * pairs[0][name] + share[1] * pairs[1][name] for name in pairs[0]}
    found = residual(pairs, weights, means)
    assert torch.allclose(dense(found), torch.tensor(missed).double(), atol=1e-15)
    small = compress(found)
    assert widths(found) == {"p": 2} and widths(small) == {"p": 1}  # rank <= (clients - 1) r
    assert torch.allclose(dense(small), torch.tensor(missed).double(), atol=1e-7)


def test_the_residual_of_a_square_layer_is_not_its_transpose() -> None:
    """One client maps e1 to e2, the other does nothing: 1/2 - 1/4 = 1/4 in the second row, first column."""
    square = torch.eye(2)
    pairs = [pair(square[:1], square[:, 1:]), pair(torch.zeros(1, 2), torch.zeros(2, 1))]
    means = {name: pairs[0][name] / 2 for name in pairs[0]}
    for form in (residual(pairs, [1, 1], means), compress(residual(pairs, [1, 1], means))):
        assert torch.allclose(dense(form), torch.tensor([[0.0, 0.0], [0.25, 0.0]]).double(), atol=1e-8)


@pytest.mark.parametrize(
    ("shape", "out", "width", "d_in"), [((), 5, 3, 4), ((), 4, 9, 6), ((3,), 6, 2, 5), ((3,), 4, 11, 4)]
)
def test_compressing_keeps_products_and_is_never_wider_than_the_matrix(
    shape: tuple[int, ...], out: int, width: int, d_in: int
) -> None:
    wide = random_pair(shape, out, width, d_in, seed=1)
    small = compress(wide, torch.float64)
    assert widths(small)["p"] == min(width, out, d_in)
    assert torch.allclose(dense(small), dense(wide), atol=1e-12)
    doubled = compress(widen(wide, wide), torch.float64)  # 2 B A has the rank of B A
    assert widths(doubled) == widths(small) and torch.allclose(dense(doubled), 2 * dense(wide), atol=1e-12)


def test_nothing_compresses_to_width_zero() -> None:
    empty = no_product(random_pair((2,), 3, 2, 4, seed=0))
    assert widths(empty) == {"p": 0} and not dense(empty).any() and product_norm(empty) == 0.0
    assert widths(compress(empty)) == {"p": 0}
    gone = random_pair((), 3, 2, 4, seed=0)
    gone["lora_B.p"] = gone["lora_B.p"] * 0
    assert widths(compress(gone)) == {"p": 0}


def test_widening_adds_products_and_the_norm_is_that_of_the_dense_matrix() -> None:
    one, two = random_pair((2,), 5, 2, 3, seed=1), random_pair((2,), 5, 4, 3, seed=2)
    both = widen({**one, "head.bias": torch.ones(1)}, two)
    assert torch.allclose(dense(both), dense(one) + dense(two), atol=1e-6) and "head.bias" in both
    assert product_norm(both) == pytest.approx(float(dense(both).norm()), rel=1e-9)


def test_refactorising_by_hand() -> None:
    """B A = 2 e1 e3^T - 6 e2 e1^T: the larger first, rows of A positive, so the sign goes to B."""
    a, b = torch.stack([2 * E[2], -3 * E[0]]), torch.diag(torch.tensor([1.0, 2.0]))
    new, done = refactorise(pair(a, b))
    assert done == 1
    assert torch.allclose(new["lora_A.p"], torch.stack([E[0], E[2]]), atol=1e-7)
    assert torch.allclose(new["lora_B.p"], torch.tensor([[0.0, 2.0], [-6.0, 0.0]]), atol=1e-6)


@pytest.mark.parametrize(("shape", "out", "r", "d_in"), [((), 5, 2, 4), ((), 2, 3, 4), ((4,), 6, 3, 3)])
def test_refactorising_keeps_products_and_makes_rows_orthonormal(
    shape: tuple[int, ...], out: int, r: int, d_in: int
) -> None:
    old = random_pair(shape, out, r, d_in, seed=3)
    new, _ = refactorise(old)
    a, b = (new[name].double() for name in ("lora_A.p", "lora_B.p"))
    assert torch.allclose(dense(new), dense(old), atol=1e-6)
    assert torch.allclose(a @ a.mT, torch.eye(r).double().expand(*shape, r, r), atol=1e-6)
    sizes = b.norm(dim=-2)  # U S: orthogonal columns of falling length, the singular values
    known = torch.linalg.svdvals(dense(old))[..., :r]
    assert torch.allclose(sizes[..., : known.shape[-1]], known, atol=1e-6)
    largest = a.gather(-1, a.abs().argmax(-1, keepdim=True))
    assert bool((largest > 0).all())


def test_directions_without_a_singular_value_continue_the_previous_ones() -> None:
    """A = (2 e1; e1 + e2), B = (b, 0): the first row is e1, then comes e1 + e2 without its part in e1."""
    a = torch.stack([2 * E[0], E[0] + E[1]])
    b = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    new, _ = refactorise(pair(a, b))
    assert torch.allclose(new["lora_A.p"], E[:2], atol=1e-7)
    assert torch.allclose(new["lora_B.p"], torch.tensor([[6.0, 0.0], [8.0, 0.0]]), atol=1e-6)


def test_experts_that_nobody_trained_keep_their_factors() -> None:
    old = random_pair((3,), 4, 2, 5, seed=4)
    old["lora_B.p"][1] = 0.0
    new, done = refactorise(old)
    assert done == 2 and torch.equal(new["lora_A.p"][1], old["lora_A.p"][1]) and not new["lora_B.p"][1].any()
    assert not torch.equal(new["lora_A.p"][0], old["lora_A.p"][0])


def test_models_without_pairs_are_refused_in_one_line() -> None:
    require_pairs("fedsvd", Linear(3, rank=2))
    for model in (Quadratic(), Linear(3)):
        with pytest.raises(ValueError, match=r"^fedsvd: got a model without low-rank pairs.*fedavg"):
            require_pairs("fedsvd", model)
