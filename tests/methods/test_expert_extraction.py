"""The numerical core of FedSEE against known optima, independent solvers and hand-worked numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor

from fedprism.methods.expert_extraction import PublicLosses, extract, split_rows, warm_start
from fedprism.methods.simplex import (
    SERVER,
    balanced_quadratic,
    client_mass,
    column_residual,
    project_simplex,
    project_transport,
    simplex_quadratic,
    sinkhorn,
)
from fedprism.models.interface import Outputs
from tests.tiny import Linear, TinyRows


def quadratic_tasks(
    n_tasks: int = 3, mixtures: Tensor | None = None, seed: int = 0, d: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """Task optima (M, d), uploads alpha @ optima (P, d), and the curvature Phi (d, d)."""
    g = torch.Generator().manual_seed(seed)
    optima = torch.randn(n_tasks, d, generator=g, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    curvature = basis @ torch.diag(torch.linspace(1, 2, d, dtype=torch.float64)) @ basis.T
    assert mixtures is not None
    return optima, mixtures.double() @ optima, curvature


def test_simplex_projection_by_hand_and_against_the_optimality_conditions() -> None:
    # (0.9, 0.6, -1): threshold t with (0.9 - t) + (0.6 - t) = 1 is 0.25
    assert project_simplex(torch.tensor([0.9, 0.6, -1.0])).tolist() == pytest.approx([0.65, 0.35, 0.0])
    v = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    w = project_simplex(v)
    assert float((w.sum(1) - 1).abs().max()) < 1e-12 and float(w.min()) >= 0
    for row, value in zip(w, v, strict=True):  # active entries share one threshold, others lie below it
        t = (value - row)[row > 0]
        assert float(t.max() - t.min()) < 1e-12
        assert bool((value[row == 0] <= t[0] + 1e-12).all())


def test_fista_agrees_with_an_independent_solver() -> None:
    g = torch.Generator().manual_seed(3)
    X = torch.randn(6, 9, generator=g, dtype=torch.float64)
    G, b = X.T @ X, torch.randn(9, generator=g, dtype=torch.float64)
    ours = simplex_quadratic(G, b)
    Gn, bn = G.numpy(), b.numpy()
    ref = minimize(
        lambda w: w @ Gn @ w - 2 * bn @ w, np.full(9, 1 / 9), jac=lambda w: 2 * (Gn @ w - bn), method="SLSQP",
        bounds=[(0, 1)] * 9, constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert ours.converged
    assert float(ours.weights @ G @ ours.weights - 2 * b @ ours.weights) <= ref.fun + 1e-7


def test_the_published_interior_solution() -> None:
    # FedSEE spec T10: M=4, curvature (1,100,1,1), uploads .8e0+.2e1, .5e0+.5e2, .3e0+.7e3, target e0
    uploads = torch.tensor([[0.8, 0.2, 0, 0], [0.5, 0, 0.5, 0], [0.3, 0, 0, 0.7]]).double()
    curvature = torch.diag(torch.tensor([1.0, 100.0, 1.0, 1.0]).double())
    target = torch.tensor([1.0, 0, 0, 0]).double()
    solution = simplex_quadratic(uploads @ curvature @ uploads.T, uploads @ curvature @ target)
    assert solution.weights.tolist() == pytest.approx([0.0846, 0.7437, 0.1717], abs=2e-4)
    error = uploads.T @ solution.weights - target
    assert float(error @ curvature @ error) == pytest.approx(0.440387, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 1000))
def test_sinkhorn_meets_both_marginals(n_tasks: int, n_clients: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    owner = [k for k in range(n_clients) for _ in range(1 + (k + seed) % 2)]
    omega = sinkhorn(torch.rand(n_tasks, len(owner), generator=g) + 0.02, owner, 60)
    assert float((omega.sum(1) - 1).abs().max()) < 1e-12
    totals = client_mass(omega, owner, range(n_clients)).sum(0)
    assert float((totals - n_tasks / n_clients).abs().max()) < 1e-3


def transport(kernel: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """POT's scaling of a kernel to rows of sum 1 and the given column sums."""
    plan = ot.sinkhorn(np.ones(len(kernel)), columns, -np.log(kernel), 1.0, stopThr=1e-13, numItermax=20_000)
    return np.asarray(plan)


@pytest.mark.parametrize(
    ("n_tasks", "n_clients", "smallest"),
    [(1, 4, 0.05), (3, 6, 0.05), (4, 3, 0.05), (6, 12, 1e-3), (3, 5, 1e-10)],
)
def test_sinkhorn_is_the_entropic_transport_plan_of_pot(
    n_tasks: int, n_clients: int, smallest: float
) -> None:
    g = torch.Generator().manual_seed(n_tasks)
    omega = smallest + torch.rand(n_tasks, n_clients, generator=g, dtype=torch.float64)
    omega[-1, : n_clients // 2] = smallest  # a row with next to nothing for half of the clients
    plan = transport(omega.numpy(), np.full(n_clients, n_tasks / n_clients))
    assert sinkhorn(omega, range(n_clients), 500).numpy() == pytest.approx(plan, abs=1e-9)


def test_a_zeroed_weight_is_scaled_as_one_of_1e_12() -> None:
    omega = torch.tensor([[0.0, 0.7, 0.3], [0.5, 0.0, 0.5]], dtype=torch.float64)
    plan = transport(omega.clamp_min(1e-12).numpy(), np.full(3, 2 / 3))
    assert sinkhorn(omega, range(3), 500).numpy() == pytest.approx(plan, abs=1e-9)


def test_sinkhorn_is_the_plan_between_tasks_and_clients_where_clients_sent_several_uploads() -> None:
    owner, g = torch.tensor([0, 0, 1, 2, 2, 2]), torch.Generator().manual_seed(5)
    omega = 0.02 + torch.rand(4, 6, generator=g, dtype=torch.float64)
    ours = sinkhorn(omega, owner.tolist(), 200)
    group = (owner[:, None] == torch.arange(3)).double()
    plan = transport((omega @ group).numpy(), np.full(3, 4 / 3))
    assert (ours @ group).numpy() == pytest.approx(plan, abs=1e-9)
    split = omega / (omega @ group @ group.T)  # how a client's weight is shared among its uploads: as before
    assert ours.numpy() == pytest.approx((torch.from_numpy(plan) @ group.T * split).numpy(), abs=1e-9)


def test_beside_the_servers_entry_sinkhorn_is_the_plan_to_the_clients_equal_shares() -> None:
    omega = 0.05 + torch.rand(3, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    ours = sinkhorn(omega, [0, 1, 2, 3, SERVER], 200).numpy()
    servers = ours[:, -1].sum()
    assert 0.1 < servers < 2
    plan = transport(omega.numpy(), np.r_[np.full(4, (3 - servers) / 4), servers])
    assert ours == pytest.approx(plan, abs=1e-9)


def test_sinkhorn_keeps_the_ratio_between_the_uploads_of_a_client() -> None:
    omega = sinkhorn(torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.1, 0.6]]), [0, 0, 1], 50)
    assert (omega[:, 0] / omega[:, 1]).tolist() == pytest.approx([3.0, 3.0])


def test_a_server_owned_entry_is_exempt_from_the_column_constraint() -> None:
    omega = sinkhorn(torch.tensor([[0.4, 0.4, 0.2], [0.1, 0.3, 0.6]]), [0, 1, -1], 200)
    assert float((omega.sum(1) - 1).abs().max()) < 1e-12
    assert float(omega[:, 0].sum()) == pytest.approx(float(omega[:, 1].sum()), abs=1e-6)
    assert float(omega[:, 2].sum()) > 0.1


def test_zero_steps_return_the_mean_of_the_pool_and_uniform_contributions() -> None:
    pool = torch.randn(6, 5)
    keys = [(i, -1) for i in range(6)]
    omega = warm_start(keys, 3, [], None)
    result = extract(lambda m, v: (0.0, v), pool, [k[0] for k in keys], omega, steps=0)
    assert torch.allclose(result.experts, pool.mean(0).expand(3, -1), atol=1e-6)
    assert torch.allclose(client_mass(result.omega, range(6), range(6)), torch.full((3, 6), 1 / 6).double())


def test_the_row_is_the_gradient_through_the_combination() -> None:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(4, 7, generator=g, dtype=torch.float64)
    target = torch.randn(7, generator=g, dtype=torch.float64)
    omega = torch.rand(1, 4, generator=g, dtype=torch.float64)
    leaf = omega.clone().requires_grad_(True)
    ((leaf[0] @ pool - target) ** 2).sum().backward()
    seen = {}

    def gradient(m: int, expert: Tensor) -> tuple[float, Tensor]:
        seen["grad"] = 2 * (expert - target)
        return 0.0, seen["grad"]

    start = project_simplex(omega)
    leaf = start.clone().requires_grad_(True)
    ((leaf[0] @ pool - target) ** 2).sum().backward()
    step = 1e-3
    out = extract(gradient, pool, range(4), omega, steps=1, lr=step, block_clip=None, row_clip=None,
                  reg="none", projection="independent")  # fmt: skip
    assert leaf.grad is not None
    assert torch.allclose(out.omega, project_simplex(start - step * leaf.grad), atol=1e-12)


def run_quadratic(
    mixtures: Tensor, owner: list[int], steps: int = 300, projection: str = "balanced", lr: float = 0.02
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    optima, pool, curvature = quadratic_tasks(mixtures.shape[1], mixtures)
    M = len(optima)

    def gradient(m: int, expert: Tensor) -> tuple[float, Tensor]:
        error = expert - optima[m]
        return float(error @ curvature @ error), 2 * curvature @ error

    omega = warm_start([(o, k) for k, o in enumerate(owner)], M, [], None)
    out = extract(gradient, pool, owner, omega, steps=steps, lr=lr, block_clip=None, row_clip=None,
                  reg="none", projection=projection, every=1)  # fmt: skip
    G = (pool @ curvature @ pool.T).expand(M, -1, -1)
    b = optima @ curvature @ pool.T
    exact = balanced_quadratic(G, b, owner)
    return out.experts, exact @ pool, optima, exact


def test_two_pure_anchors_per_task_make_extraction_exact() -> None:
    mixtures = torch.eye(3).repeat(2, 1)
    found, exact, optima, _ = run_quadratic(mixtures, list(range(6)))
    assert float((exact - optima).norm(dim=1).max()) < 1e-9
    assert float((found - optima).norm(dim=1).max()) < 1e-6


def test_extraction_agrees_with_the_exact_balanced_program_and_obeys_the_coupling_bound() -> None:
    # one pure anchor per task and three mixed clients: an anchor may give at most M / N = 1/2 of its expert
    mixtures = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0], [0.2, 0.3, 0.5], [0.4, 0.2, 0.4]]
    )
    optima, _, curvature = quadratic_tasks(3, mixtures)
    found, exact, _, omega = run_quadratic(mixtures, list(range(6)))
    assert float((omega.sum(1) - 1).abs().max()) < 1e-9
    assert float((omega.sum(0) - 0.5).abs().max()) < 1e-9
    # scaling by Sinkhorn is no Euclidean projection: where an optimum lies inside the polytope, the fixed
    # point of gradient step and scaling has g = omega (a_m + b_p) instead of g = a_m + b_p, so agreement is
    # to about one percent of the experts' diameter and does not improve with more steps
    diameter = float(torch.cdist(optima, optima).max())
    assert float((found - exact).norm(dim=1).max()) < 1e-2 * diameter
    # Prop 11 at eps = 0: |theta_m - theta*_m|^2 <= (L_m(balanced) - L_m(independent)) / sigma_min; here
    # sigma_min = 1, and the independent program reaches 0: its pool holds the anchors
    error = exact - optima
    excess = ((error @ curvature) * error).sum(1)
    assert float(excess.max()) > 1e-3
    assert bool((error.square().sum(1) <= excess + 1e-9).all())


def test_independent_extraction_recovers_anchored_experts_without_the_constraint() -> None:
    mixtures = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0], [0.2, 0.3, 0.5], [0.4, 0.2, 0.4]]
    )
    found, _, optima, _ = run_quadratic(mixtures, list(range(6)), projection="independent")
    assert float((found - optima).norm(dim=1).max()) < 1e-6


def test_the_balanced_program_agrees_with_slsqp() -> None:
    mixtures = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    optima, pool, curvature = quadratic_tasks(2, mixtures)
    G, b = pool @ curvature @ pool.T, optima @ curvature @ pool.T
    ours = balanced_quadratic(G.expand(2, -1, -1), b, [0, 1, 2])
    Gn, bn = G.numpy(), b.numpy()

    def value(flat: np.ndarray) -> float:
        w = flat.reshape(2, 3)
        return float(sum(w[m] @ Gn @ w[m] - 2 * bn[m] @ w[m] for m in range(2)))

    ref = minimize(
        value, np.full(6, 1 / 3), method="SLSQP", bounds=[(0, 1)] * 6,
        constraints={"type": "eq",
                     "fun": lambda f: np.r_[f.reshape(2, 3).sum(1) - 1, f.reshape(2, 3).sum(0) - 2 / 3]},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert value(ours.numpy().ravel()) <= ref.fun + 1e-7


def marginals(n_tasks: int, owner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Constraints A w = a of the transport polytope on the flattened (M, P) weights."""
    P, clients = len(owner), sorted(set(owner))
    rows = np.kron(np.eye(n_tasks), np.ones(P))
    columns = np.tile((np.array(clients)[:, None] == np.array(owner)[None, :]).astype(float), n_tasks)
    return np.vstack([rows, columns]), np.r_[np.ones(n_tasks), np.full(len(clients), n_tasks / len(clients))]


@pytest.mark.parametrize("owner", [[0, 1, 2, 3], [0, 0, 1, 2, 2, 2, 3], [0, 0, 0]])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0, 1e4])
def test_no_feasible_point_lies_nearer_than_the_transport_projection(size: float, owner: list[int]) -> None:
    group = (torch.tensor(owner)[None, :] == torch.tensor(owner).unique()[:, None]).double()
    v = size * torch.randn(3, len(owner), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = project_transport(v, group)
    A, a = marginals(3, owner)
    assert float(w.min()) >= 0 and np.abs(A @ w.numpy().ravel() - a).max() < 1e-12
    # w is the projection exactly if <v - w, z> over the polytope is largest at z = w
    best = linprog(-(v - w).numpy().ravel(), A_eq=A, b_eq=a)
    assert -best.fun == pytest.approx(float(((v - w) * w).sum()), abs=1e-9 * max(1.0, size))
    assert torch.allclose(project_transport(w, group), w, atol=1e-12)


def test_the_transport_projection_is_feasible_however_early_it_stops() -> None:
    owner = [0, 0, 1, 2, 2, 3]
    group = (torch.tensor(owner)[None, :] == torch.arange(4)[:, None]).double()
    A, a = marginals(3, owner)
    for seed in range(20):
        v = 50 * torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for steps in (0, 1, 2):
            w = project_transport(v, group, steps=steps)
            assert float(w.min()) >= 0 and np.abs(A @ w.numpy().ravel() - a).max() < 1e-12


@pytest.mark.parametrize(("n_tasks", "n_clients"), [(2, 3), (3, 6)])
def test_uploads_that_nearly_coincide_do_not_break_the_balanced_constraints(
    n_tasks: int, n_clients: int
) -> None:
    g = torch.Generator().manual_seed(0)
    centre, spread, optima = (torch.randn(k, 6, generator=g).double() for k in (1, n_clients, n_tasks))
    pool = 1e-5 * centre + 1e-6 * spread
    b = optima @ pool.T
    w = balanced_quadratic((pool @ pool.T).expand(n_tasks, -1, -1), b, range(n_clients)).numpy().ravel()
    A, a = marginals(n_tasks, list(range(n_clients)))
    assert w.min() >= 0 and np.abs(A @ w - a).max() < 1e-12
    # beside optima a million spreads away the quadratic term vanishes: a corner of the polytope is best
    corner = linprog(-b.numpy().ravel() / 1e-6, A_eq=A, b_eq=a)
    assert w == pytest.approx(corner.x, abs=1e-9)


def test_warm_start_moves_mass_with_the_client() -> None:
    old = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    old_keys = [(0, 1), (1, 0), (2, 2)]
    # client 0 uploads another expert; client 1 keeps its key and adds one; client 3 is new; client 2 is gone
    keys = [(0, 2), (1, 0), (1, 1), (3, 0)]
    omega = warm_start(keys, 1, old_keys, old)
    assert omega[0].tolist() == pytest.approx([0.5, 0.15, 0.15, 1 / 3])


def test_relabelling_clients_permutes_columns_and_relabelling_tasks_permutes_rows() -> None:
    optima, pool, curvature = quadratic_tasks(2, torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))

    def solve(pool: Tensor, optima: Tensor) -> Tensor:
        def gradient(m: int, expert: Tensor) -> tuple[float, Tensor]:
            return 0.0, 2 * curvature @ (expert - optima[m])

        return extract(gradient, pool, range(3), torch.full((2, 3), 1 / 3), steps=40).omega

    plain, order = solve(pool, optima), [2, 0, 1]
    assert torch.allclose(solve(pool[order], optima), plain[:, order], atol=1e-9)
    assert torch.allclose(solve(pool, optima.flip(0)), plain.flip(0), atol=1e-9)


def test_column_residual_and_bad_words() -> None:
    assert column_residual(torch.tensor([[0.75, 0.25]]), [0, 1]) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="projection is 'both'"):
        extract(lambda m, v: (0.0, v), torch.zeros(2, 3), [0, 1], torch.ones(1, 2), projection="both")
    with pytest.raises(ValueError, match="2 uploads"):
        extract(lambda m, v: (0.0, v), torch.zeros(2, 3), [0, 1], torch.ones(1, 3))


# ---- experts that may leave the hull -------------------------------------------------------------


class Watched(Linear):
    """Remembers which rows were seen with gradients and which without, and counts them."""

    def __init__(self) -> None:
        super().__init__(3, loss="square")
        self.seen: dict[bool, set[int]] = {True: set(), False: set()}
        self.rows = 0

    def per_example_loss(self, outputs: Outputs, batch: Any) -> Tensor:
        self.seen[torch.is_grad_enabled()] |= set(batch["row"].tolist())
        self.rows += len(batch["row"])
        return super().per_example_loss(outputs, batch)


def public_rows(n: int, first: int, seed: int = 0) -> TinyRows:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=g), torch.randn(n, 2, generator=g)
    return TinyRows(x=x, y=y, label=torch.zeros(n), row=torch.arange(first, first + n))


def public_losses(size: int, hold_out: float = 0.25, steps: int = 0) -> tuple[Watched, PublicLosses]:
    """Two tasks of 12 and 8 public rows, numbered 0 to 11 and 12 to 19."""
    model, rows = Watched(), [public_rows(12, 0), public_rows(8, 12, 1)]
    g = torch.Generator().manual_seed(4)
    like = {"lora_B.p": torch.zeros(2, 3)}
    return model, PublicLosses(
        model, {}, {}, like, rows, size=size, chunk=5, steps=steps, generator=g, hold_out=hold_out
    )


def row_numbers(rows: TinyRows) -> list[int]:
    return list(rows.columns["row"].tolist())


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.99])
def test_what_is_held_out_and_what_is_fitted_are_disjoint_and_complete(fraction: float) -> None:
    for n in (2, 3, 12):
        fit, held = split_rows(public_rows(n, 5), fraction, torch.Generator().manual_seed(0))
        assert len(held) == min(max(1, round(fraction * n)), n - 1)  # neither part is ever empty
        assert sorted(row_numbers(fit) + row_numbers(held)) == list(range(5, 5 + n))
    drawn = {
        tuple(row_numbers(split_rows(public_rows(12, 0), 0.25, torch.Generator().manual_seed(s))[1]))
        for s in range(5)
    }
    assert len(drawn) > 1  # drawn, not the first rows
    with pytest.raises(ValueError, match="got 1 public rows, needs at least 2; use hull = 'convex'"):
        split_rows(public_rows(1, 0), 0.25, torch.Generator())


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("hull", ["affine", "auto", "posterior"])
def test_gradients_never_see_the_rows_that_choose(size: int, hull: str) -> None:
    model, losses = public_losses(size, steps=2 + 6 * 3)
    fitted = [row_numbers(part) for part in losses.fit]
    held = [row_numbers(part) for part in losses.held]
    assert [len(part) for part in held] == [3, 2]
    pool = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    out = extract(
        losses.gradient, pool, range(4), torch.full((2, 4), 0.25), steps=2, hull=hull,
        held_out=losses.held_out, sizes=[len(part) for part in losses.fit], outside_steps=3,
    )  # fmt: skip
    assert model.seen[False] == {row for part in held for row in part}
    assert model.seen[True] == {row for part in fitted for row in part}
    assert not model.seen[True] & model.seen[False]
    assert out.outside is not None
    assert torch.equal(out.experts, out.outside.experts)
    assert losses.examples == model.rows  # what a run reports as public examples


def test_the_held_out_loss_is_the_mean_over_the_rows_held_out() -> None:
    _, losses = public_losses(0)
    vector = torch.arange(6.0) / 3
    for m, part in enumerate(losses.held):
        x, y = part.columns["x"], part.columns["y"]
        assert losses.held_out(m, vector) == pytest.approx(
            float(((x @ vector.view(2, 3).T - y) ** 2).sum() / len(part)), rel=1e-6
        )
    whole = public_losses(0, hold_out=0.0)[1]  # nothing held out: the same rows fit and choose
    assert [row_numbers(part) for part in whole.held] == [row_numbers(part) for part in whole.fit]
    assert whole.held_out(0, vector) == pytest.approx(whole.gradient(0, vector)[0], rel=1e-6)


def test_a_convex_hull_gives_the_same_bits_whatever_the_new_arguments() -> None:
    pool = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    outs = []
    for more in (
        {}, {"hull": "convex", "held_out": lambda m, theta: 1 / 0, "sizes": [1, 2], "outside_steps": 7}
    ):  # fmt: skip
        losses = public_losses(4, hold_out=0.0, steps=6)[1]
        outs.append(extract(losses.gradient, pool, range(4), torch.full((2, 4), 0.25), steps=6, **more))
    assert torch.equal(outs[0].omega, outs[1].omega)
    assert torch.equal(outs[0].experts, outs[1].experts)
    assert torch.equal(outs[0].losses, outs[1].losses)
    assert outs[1].outside is None
    assert torch.equal(outs[0].experts, outs[0].omega.to(pool.dtype) @ pool)


def test_weights_and_contributions_stay_those_of_the_convex_program() -> None:
    optima, pool, curvature = quadratic_tasks(2, torch.tensor([[0.7, 0.3], [0.3, 0.7], [0.5, 0.5]]))

    def gradient(m: int, expert: Tensor) -> tuple[float, Tensor]:
        error = expert - optima[m]
        return float(error @ curvature @ error), 2 * curvature @ error

    def solve(**more: Any) -> Any:
        return extract(gradient, pool, range(3), torch.full((2, 3), 1 / 3), steps=40, **more)

    convex = solve()
    affine = solve(
        hull="affine", held_out=lambda m, theta: gradient(m, theta)[0], sizes=[1000, 1000],
        outside_steps=300,
    )  # fmt: skip
    assert torch.equal(convex.omega, affine.omega)
    assert float((convex.experts - optima).norm(dim=1).min()) > 0.5
    assert float((affine.experts - optima).norm(dim=1).max()) < 0.05  # optima lie outside the hull
    assert affine.outside.chosen == ("affine 100", "affine 100")


def test_hull_words_and_missing_parts_are_refused_in_one_line() -> None:
    def attempt(**given: Any) -> str:
        with pytest.raises(ValueError) as fault:
            extract(lambda m, v: (0.0, v), torch.zeros(2, 3), [0, 1], torch.ones(1, 2), **given)
        return str(fault.value)

    words = "extract: hull is 'round', needs one of convex, affine, auto, posterior"
    assert attempt(hull="round") == words
    assert attempt(hull="affine") == "extract: hull 'affine' needs held_out and 1 sizes, got 0"
    assert attempt(hull="auto", sizes=[3]) == "extract: hull 'auto' needs held_out and 1 sizes, got 1"
    held = "extract: hull 'posterior' needs held_out and 1 sizes, got 2"
    assert attempt(hull="posterior", held_out=lambda m, theta: 0.0, sizes=[3, 3]) == held
