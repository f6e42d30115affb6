"""Experts outside the hull by gradients, against dense closed forms and losses worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedprism.methods.beyond_hull import (
    DESCENTS,
    OFFS,
    SPANS,
    leave_hull,
    penalised_descent,
    span_directions,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_directions_by_hand_and_their_outer_products_are_the_covariance() -> None:
    # (1, 0), (-1, 0), (0, 2), (0, -2): mean 0, covariance diag(2, 8) / 4
    pool = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    directions = span_directions(pool + torch.tensor([5.0, -7.0]))
    assert (directions.T @ directions).tolist() == [
        pytest.approx([0.5, 0.0], abs=1e-6), pytest.approx([0.0, 2.0], abs=1e-6)
    ]  # fmt: skip
    pool = normal(5, 9)
    directions = span_directions(pool)
    covariance = torch.cov(pool.T, correction=0)
    assert directions.shape == (4, 9)  # P - 1
    assert torch.allclose(directions.T @ directions, covariance, atol=1e-10)
    crossed = directions @ directions.T
    assert torch.allclose(crossed, torch.diag(crossed.diag()), atol=1e-10)  # principal: orthogonal rows
    assert span_directions(pool[[0, 1, 0, 1, 1]]).shape == (1, 9)  # two distinct uploads span a line
    assert span_directions(torch.ones(3, 4)).shape == (0, 4)


def bowl(target: Tensor, seed: int = 3) -> tuple[Callable[[Tensor], tuple[float, Tensor]], Tensor]:
    """Loss and gradient of (theta - target)' H (theta - target) / 2, and H with eigenvalues 0.5 to 2."""
    basis = torch.linalg.qr(normal(len(target), len(target), seed=seed)).Q
    H = basis @ torch.diag(torch.linspace(0.5, 2, len(target), dtype=torch.float64)) @ basis.T

    def gradient(theta: Tensor) -> tuple[float, Tensor]:
        gap = theta - target
        return float(gap @ H @ gap) / 2, H @ gap

    return gradient, H


def dense_minimum(
    H: Tensor, target: Tensor, centre: Tensor, pool: Tensor, span: float, off: float, n: int
) -> Tensor:
    """Minimiser of the penalised loss with theta itself as the unknown: its prior covariance is span times
    the uploads' plus off times their mean variance per entry."""
    covariance = torch.cov(pool.T, correction=0)
    D = len(target)
    prior = span * covariance + off * covariance.trace() / D * torch.eye(D, dtype=torch.float64)
    moved = torch.linalg.solve(torch.eye(D, dtype=torch.float64) + n * prior @ H, n * prior @ H)
    return centre + moved @ (target - centre)


@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize(("span", "off"), [(1.0, 0.0), (10.0, 0.0), (1.0, 0.3), (30.0, 1.0)])
def test_the_descent_settles_at_the_dense_minimum(span: float, off: float, n: int) -> None:
    pool, target = normal(4, 7), normal(7, seed=1) * 2
    gradient, H = bowl(target)
    centre = pool.mean(0) + 0.1
    found = penalised_descent(
        gradient, centre, span_directions(pool), span=span, off=off, n=n, steps=1200, lr=0.1
    )
    assert torch.allclose(found, dense_minimum(H, target, centre, pool, span, off, n), atol=1e-3)
    assert float((found - centre).norm()) > 0.1


def test_without_off_the_expert_stays_in_the_affine_span_and_outside_the_hull_if_need_be() -> None:
    pool = normal(3, 7)
    target = pool.T @ torch.tensor([3.0, -1.0, -1.0]).double()  # weights of sum 1, far outside the hull
    gradient, _ = bowl(target)
    given = {"span": 100.0, "n": 1000, "steps": 300, "lr": 0.1}
    found = penalised_descent(gradient, pool.mean(0), span_directions(pool), off=0.0, **given)
    system = torch.cat([pool.T, torch.ones(1, 3, dtype=torch.float64)])
    one = torch.cat([found, torch.ones(1, dtype=torch.float64)])
    weights = torch.linalg.lstsq(system, one[:, None]).solution[:, 0]
    assert float((system @ weights - one).norm()) < 1e-9
    assert weights.tolist() == pytest.approx([3, -1, -1], abs=0.05)
    out = penalised_descent(gradient, pool.mean(0), span_directions(pool), off=1.0, **given)
    assert torch.allclose(out, target, atol=1e-2)


@pytest.mark.parametrize(("span", "moved"), [(1.0, 0.25), (4.0, 0.5)])
def test_the_rate_falls_to_zero_along_a_slope(span: float, moved: float) -> None:
    # a constant gradient: Adam's steps are the rates .1 (1, 3/4, 2/4, 1/4), times t along the direction
    found = penalised_descent(
        lambda theta: (0.0, torch.ones(1)), torch.zeros(1), torch.ones(1, 1), span=span, off=0.0, n=10**9,
        steps=4, lr=0.1,
    )  # fmt: skip
    assert float(found) == pytest.approx(-moved, rel=1e-5)


def test_equal_uploads_leave_the_descent_where_it_began() -> None:
    pool = torch.ones(3, 4)
    for off in (0.0, 0.1):
        found = penalised_descent(
            lambda theta: (0.0, theta),
            pool[0],
            span_directions(pool),
            span=1.0,
            off=off,
            n=5,
            steps=3,
            lr=0.1,
        )
        assert torch.equal(found, pool[0])


def test_single_precision_experts_stay_single_and_arguments_stay_as_they_are() -> None:
    pool = normal(4, 7).float()
    centre, directions = pool.mean(0), span_directions(pool)
    kept = [pool.clone(), centre.clone(), directions.clone()]
    found = penalised_descent(
        lambda theta: (0.0, theta), centre, directions, span=1.0, off=0.1, n=5, steps=3, lr=0.1
    )
    assert (directions.dtype, found.dtype) == (torch.float32, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(kept, (pool, centre, directions), strict=True))


class Tasks:
    """Quadratic losses, one bowl per task; `held_out` has bowls of its own. Counts who was asked what."""

    def __init__(self, fitted: list[Tensor], held: list[Tensor]) -> None:
        self.bowls, self.held = [bowl(target)[0] for target in fitted], held
        self.descents: dict[int, int] = {}

    def gradient(self, m: int, theta: Tensor) -> tuple[float, Tensor]:
        self.descents[m] = self.descents.get(m, 0) + 1
        return self.bowls[m](theta)

    def held_out(self, m: int, theta: Tensor) -> float:
        return float((theta - self.held[m]).square().sum())


POOL = normal(3, 6, seed=8)
OUTSIDE = POOL.T @ torch.tensor([2.5, -0.5, -1.0]).double()  # in the span, outside the hull
INSIDE = POOL.T @ torch.tensor([0.6, 0.3, 0.1]).double()
BESIDE = INSIDE + 2 * torch.linalg.svd(POOL)[2][-1]  # off the span: orthogonal to every upload


def test_the_held_out_loss_chooses_affine_convex_or_posterior_per_task() -> None:
    fitted = [OUTSIDE, OUTSIDE, BESIDE]  # task 1's fitted examples mislead: what is held out lies inside
    tasks = Tasks(fitted, [OUTSIDE, INSIDE, BESIDE])
    convex = torch.stack([POOL[0], INSIDE, INSIDE])
    found = {
        hull: leave_hull(
            tasks.gradient, tasks.held_out, POOL, convex, hull=hull, sizes=[500] * 3, steps=200, lr=0.1
        )
        for hull in ("affine", "auto", "posterior")
    }
    words = {hull: [name.split()[0] for name in out.chosen] for hull, out in found.items()}
    assert words["affine"] == ["affine"] * 3
    assert words["auto"] == ["affine", "convex", "convex"]
    assert words["posterior"][1:] == ["convex", "posterior"]
    assert torch.equal(found["auto"].experts[1], INSIDE)
    assert torch.allclose(found["auto"].experts[0], OUTSIDE, atol=0.05)
    assert torch.allclose(found["posterior"].experts[2], BESIDE, atol=0.05)
    assert float((found["affine"].experts[2] - BESIDE).norm()) > 1.9  # cannot leave the span
    for hull, out in found.items():
        for m, (theta, name, losses) in enumerate(zip(out.experts, out.chosen, out.held_out, strict=True)):
            assert losses[name] == min(losses.values()) == pytest.approx(tasks.held_out(m, theta))
            estimates = len(SPANS) + (hull != "affine") + (len(OFFS) if hull == "posterior" else 0)
            assert len(losses) == estimates


@pytest.mark.parametrize("hull", ["affine", "auto", "posterior"])
def test_a_task_takes_as_many_descents_as_declared(hull: str) -> None:
    tasks = Tasks([OUTSIDE, INSIDE], [OUTSIDE, INSIDE])
    leave_hull(tasks.gradient, tasks.held_out, POOL, POOL[:2], hull=hull, sizes=[5, 5], steps=4)
    assert tasks.descents == {0: 4 * DESCENTS[hull], 1: 4 * DESCENTS[hull]}


def test_a_tie_goes_to_the_convex_expert() -> None:
    out = leave_hull(
        lambda m, theta: (0.0, theta), lambda m, theta: 1.0, POOL, POOL[:1], hull="auto", sizes=[5], steps=2
    )
    assert out.chosen == ("convex",)
    assert torch.equal(out.experts, POOL[:1])


def test_the_span_of_a_posterior_is_the_one_that_did_best_without_off() -> None:
    # shrunk towards the centre by span 1 and few examples, which what is held out asks for
    shrunk = dense_minimum(bowl(OUTSIDE)[1], OUTSIDE, POOL.mean(0), POOL, 1.0, 0.0, 1)
    tasks = Tasks([OUTSIDE], [shrunk])
    out = leave_hull(tasks.gradient, tasks.held_out, POOL, POOL[:1], hull="posterior", sizes=[1], steps=300)
    assert out.chosen == ("affine 1",)
    assert [name for name in out.held_out[0] if name.startswith("posterior")] == [
        f"posterior 1, {off:g}" for off in OFFS
    ]


@pytest.mark.parametrize("centre", ["affine 100", "convex"])
def test_the_posterior_is_centred_on_the_better_of_span_and_hull(centre: str) -> None:
    target = OUTSIDE + BESIDE - INSIDE  # partly along the span, partly off it
    convex = target + 0.3 if centre == "convex" else POOL[0]
    tasks = Tasks([target], [target])
    out = leave_hull(
        tasks.gradient, tasks.held_out, POOL, convex[None], hull="posterior", sizes=[2], steps=300
    )
    (losses,) = out.held_out
    assert min((name for name in losses if "posterior" not in name), key=losses.get) == centre  # type: ignore[arg-type]
    assert out.chosen == ("posterior 100, 1",)
    H = bowl(target)[1]
    start = convex if centre == "convex" else dense_minimum(H, target, POOL.mean(0), POOL, 100.0, 0.0, 2)
    expected = dense_minimum(H, target, start, POOL, 100.0, 1.0, 2)
    assert torch.allclose(out.experts[0], expected, atol=1e-2)
    assert float((expected - start).norm()) > 0.1


def test_few_examples_keep_a_task_nearer_to_the_centre_than_many() -> None:
    tasks = Tasks([OUTSIDE, OUTSIDE], [OUTSIDE, OUTSIDE])
    out = leave_hull(
        tasks.gradient, tasks.held_out, POOL, POOL[:2], hull="affine", sizes=[1, 1000], steps=300
    )
    assert out.chosen == ("affine 100", "affine 100")
    for theta, n in zip(out.experts, (1, 1000), strict=True):
        expected = dense_minimum(bowl(OUTSIDE)[1], OUTSIDE, POOL.mean(0), POOL, 100.0, 0.0, n)
        assert torch.allclose(theta, expected, atol=1e-3)
    assert float((out.experts[0] - out.experts[1]).norm()) > 5e-3


@pytest.mark.parametrize("hull", ["convex", "conical"])
def test_other_words_are_refused_in_one_line(hull: str) -> None:
    with pytest.raises(ValueError, match=f"hull: got '{hull}', needs 'affine', 'auto' or 'posterior'$"):
        leave_hull(lambda m, t: (0.0, t), lambda m, t: 0.0, POOL, POOL[:1], hull=hull, sizes=[5])
