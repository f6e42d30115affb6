"""Programs over the simplex and the transport polytope, the numerical core of FedSEE's extraction.

Pure functions; the theory checks call the same ones. M is the number of tasks (experts), P the number of
uploads in the pool, N the number of clients. Omega (M, P) holds combination weights; `owner` (P,) says whose
upload a column is. Sources: FedSEE spec sections 2.3 and 6.3, A5, A32, A33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SERVER = -1  # owner of an entry that no client uploaded; exempt from the column constraint


def project_simplex(v: Tensor) -> Tensor:
    """Euclidean projection of each row onto the probability simplex, exact, by sorting.

    v: (..., n). Returns float64 of the same shape, rows non-negative with sum 1 within 1e-12."""
    v = v.double()
    n = v.shape[-1]
    ordered = v.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(-1) - 1.0
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    active = (ordered - excess / counts > 0).sum(-1, keepdim=True)
    threshold = excess.gather(-1, active - 1) / active
    w = (v - threshold).clamp_min(0.0)
    return w / w.sum(-1, keepdim=True)


@dataclass(frozen=True)
class QuadraticSolution:
    """weights: (..., n) minimisers. iterations: used. gap: largest Frank-Wolfe gap at the end. converged:
    every gap within tolerance."""

    weights: Tensor
    iterations: int
    gap: float
    converged: bool


def simplex_quadratic(
    G: Tensor, b: Tensor, *, tolerance: float = 1e-10, limit: int = 20_000
) -> QuadraticSolution:
    """Minimise w'Gw - 2b'w over the simplex by accelerated projected gradient with restart (spec 2.3).

    G: (..., n, n) positive semidefinite. b: (..., n). Leading dimensions are independent programs, solved
    side by side. A program stops when its Frank-Wolfe gap <grad, w> - min grad is at most tolerance * max(1,
    |objective|); all stop after `limit` iterations, and `converged` says which."""
    shape = b.shape
    n = shape[-1]
    G, b = G.double().expand(*shape, n).reshape(-1, n, n), b.double().reshape(-1, n)
    w = torch.full_like(b, 1.0 / n)
    out, gaps = w.clone(), torch.zeros(len(b), dtype=torch.float64)
    open_ = torch.arange(len(b))  # programs that still run
    step = 1.0 / (2.0 * torch.linalg.eigvalsh(G)[:, -1:].clamp_min(1e-300))
    y, t, iterations = w, torch.ones(len(b), 1, dtype=torch.float64), 0
    for iterations in range(limit + 1):
        Gw = torch.einsum("kij,kj->ki", G, w)
        gradient = 2.0 * (Gw - b)
        objective = ((Gw - 2.0 * b) * w).sum(1)
        gap = (gradient * w).sum(1) - gradient.amin(1)
        done = gap <= tolerance * objective.abs().clamp_min(1.0)
        if iterations == limit or bool(done.any()):
            out[open_], gaps[open_] = w, gap
            if iterations == limit or bool(done.all()):
                break
            on = ~done
            G, b, w, y, t, step, open_ = G[on], b[on], w[on], y[on], t[on], step[on], open_[on]
        following = project_simplex(y - step * 2.0 * (torch.einsum("kij,kj->ki", G, y) - b))
        uphill = ((y - following) * (following - w)).sum(1, keepdim=True) > 0
        t = torch.where(uphill, 1.0, t)  # momentum points uphill: restart
        t_next = (1.0 + (1.0 + 4.0 * t * t).sqrt()) / 2.0
        y = following + (t - 1.0) / t_next * (following - w)
        w, t = following, t_next
    return QuadraticSolution(out.reshape(shape), iterations, float(gaps.max()), bool(done.all()))


def client_mass(omega: Tensor, owner: Sequence[int], clients: Sequence[int]) -> Tensor:
    """(M, N) contributions: the weights of each task summed over each client's uploads."""
    place = {client: k for k, client in enumerate(clients)}
    mass = torch.zeros(omega.shape[0], len(clients), dtype=torch.float64)
    for column, who in enumerate(owner):
        if who in place:
            mass[:, place[who]] += omega[:, column]
    return mass


def column_residual(omega: Tensor, owner: Sequence[int]) -> float:
    """Largest distance of a client's total contribution from its target, the clients' equal share."""
    clients = sorted({who for who in owner if who != SERVER})
    totals = client_mass(omega, owner, clients).sum(0)
    return float((totals - totals.mean()).abs().max()) if clients else 0.0


def sinkhorn(omega: Tensor, owner: Sequence[int], iterations: int = 20) -> Tensor:
    """Scale Omega towards the transport polytope: rows sum to 1, every client contributes equally.

    Alternates (a) multiplying a client's whole group of entries so that its total is the clients' equal share
    (M / N when no entry is the server's) and (b) dividing each row by its sum; ends on (b), so rows are
    exact and columns close (`column_residual` measures it). Group scaling keeps the ratio between several
    uploads of a client. Entries are floored at 1e-12 first, so that a zeroed client can return. omega: (M, P)
    non-negative. Returns (M, P) float64."""
    omega = omega.double().clamp_min(1e-12)
    owner_index = torch.as_tensor(list(owner))
    clients = owner_index[owner_index != SERVER].unique()
    group = (owner_index[None, :] == clients[:, None]).double()  # (N, P)
    omega = omega / omega.sum(1, keepdim=True)
    for _ in range(iterations):
        totals = group @ omega.sum(0)  # (N,)
        factor = (totals.sum() / len(clients)) / totals
        per_column = torch.ones(omega.shape[1], dtype=torch.float64)
        if len(clients):
            per_column = torch.where(group.sum(0) > 0, factor @ group, per_column)
        omega = omega * per_column
        omega = omega / omega.sum(1, keepdim=True)
    return omega


def _made_feasible(omega: Tensor, group: Tensor) -> Tensor:
    """A point of the transport polytope near `omega` (M, P) >= 0, in closed form, exact up to rounding.

    Rows and then clients above their target are scaled down to it; what rows and clients then lack, equal in
    total, comes back as a product of the two, shared evenly among a client's columns. Source: Altschuler,
    Weed & Rigollet (2017), Algorithm 2. group: (N, P) of 0 and 1."""
    share = omega.shape[0] / len(group)
    omega = omega / omega.sum(1, keepdim=True).clamp_min(1.0)
    omega = omega * (share / (group @ omega.sum(0)).clamp_min(share) @ group)
    rows, clients = 1.0 - omega.sum(1), share - group @ omega.sum(0)  # both >= 0
    columns = (clients / group.sum(1)) @ group
    return omega + rows.clamp_min(0.0)[:, None] * (columns.clamp_min(0.0) / rows.sum().clamp_min(1e-300))


def project_transport(omega: Tensor, group: Tensor, *, steps: int = 100) -> Tensor:
    """Euclidean projection onto {Omega >= 0, rows sum to 1, every client's total is M / N}.

    The projection is max(Omega + r_m + c_i, 0) with one multiplier per row and client, the maximum of a
    concave, piecewise quadratic dual: Newton's method with backtracking, at most `steps` of them. Whatever it
    reached is then made feasible, so the constraints always hold up to rounding. omega: (M, P). group: (N, P)
    of 0 and 1, which client owns a column. Returns float64 (M, P)."""
    omega, group = omega.double(), group.double()
    M, N = len(omega), len(group)
    target = torch.cat([omega.new_ones(M), omega.new_full((N,), M / N)])
    omega = omega - omega.mean(1, keepdim=True)  # a constant per row changes nothing but the size of numbers
    ridge = 1e-9 * torch.eye(M + N, dtype=torch.float64)  # rows up and clients down by one number: no change

    def primal(multipliers: Tensor) -> Tensor:
        return (omega + multipliers[:M, None] + multipliers[M:] @ group).clamp_min(0.0)

    multipliers = target.new_zeros(M + N)
    multipliers[:M] = 1.0 / omega.shape[1]
    x = primal(multipliers)
    for _ in range(steps):
        missing = target - torch.cat([x.sum(1), group @ x.sum(0)])  # the dual's gradient
        if float(missing.abs().max()) <= 1e-14 * max(1.0, float(omega.abs().max())):
            break
        used = (x > 0).double() @ group.T  # (M, N) positive entries of a row in a client's columns
        hessian = ridge + torch.cat([used.sum(1), used.sum(0)]).diag()
        hessian[:M, M:], hessian[M:, :M] = used, used.T
        change, following = torch.linalg.solve(hessian, missing), x
        while float(change.abs().max()) > 1e-15:  # backtrack until the dual rises enough
            following, slope = primal(multipliers + change), float(missing @ change)
            rise = float(target @ change - 0.5 * ((following - x) * (following + x)).sum())
            if rise >= 1e-4 * slope:
                break
            change = change / 2.0
        multipliers, x = multipliers + change, following
    return _made_feasible(x, group)


def balanced_quadratic(
    G: Tensor, b: Tensor, owner: Sequence[int], *, limit: int = 3000, tolerance: float = 1e-10
) -> Tensor:
    """Exact balanced program for quadratic losses: minimise sum_m w_m'G_m w_m - 2 b_m'w_m over the transport
    polytope, by accelerated projected gradient with `project_transport`.

    Rows sum to 1, so only differences between uploads count: G and b are centred first, without which
    uploads that nearly coincide leave steps too short to move. G: (M, P, P) positive semidefinite. b: (M, P).
    owner: client of each column. Returns Omega (M, P), feasible up to rounding whatever `limit` is."""
    G, b = G.double(), b.double()
    owner_index = torch.as_tensor(list(owner))
    group = (owner_index[None, :] == owner_index.unique()[:, None]).double()
    b = b - G.mean(-1)  # with w = 1/P + u, sum u = 0: u'Gu - 2 (b - G 1/P)'u and a constant
    floor = 1e-12 * float(torch.linalg.eigvalsh(G)[:, -1].max())  # below it centring leaves rounding alone
    b, G = b - b.mean(-1, keepdim=True), G - G.mean(-1, keepdim=True)
    G = G - G.mean(-2, keepdim=True)
    step = 1.0 / (2.0 * max(float(torch.linalg.eigvalsh(G)[:, -1].max()), floor, 1e-300))
    omega = sinkhorn(torch.ones(b.shape), owner)
    y, t = omega, 1.0
    for _ in range(limit):
        following = project_transport(y - step * 2.0 * (torch.einsum("mpq,mq->mp", G, y) - b), group)
        if float(((y - following) * (following - omega)).sum()) > 0:
            t = 1.0
        t_next = (1.0 + (1.0 + 4.0 * t * t) ** 0.5) / 2.0
        y = following + (t - 1.0) / t_next * (following - omega)
        moved = float((following - omega).abs().max())
        omega, t = following, t_next
        if moved < tolerance:
            break
    return omega
