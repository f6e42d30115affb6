"""Numerical core of FedSEE: experts as convex combinations of uploads under a transport constraint.

Pure functions without a model, a client or a file; the theory checks call the same ones. Throughout, M is the
number of tasks (experts), P the number of uploads in the pool, N the number of clients and D the number of
entries of one upload. Omega (M, P) holds the combination weights; `owner` (P,) says whose upload a column is.
Sources: FedSEE spec sections 2.3, 6.3 and A1, A2, A5, A20, A32, A33.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SERVER = -1  # owner of an entry that no client uploaded; exempt from the column constraint
Gradient = Callable[[int, Tensor], tuple[float, Tensor]]


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
    """weights: minimiser. iterations: used. gap: Frank-Wolfe gap at the end. converged: gap within tolerance."""

    weights: Tensor
    iterations: int
    gap: float
    converged: bool


def simplex_quadratic(G: Tensor, b: Tensor, *, tolerance: float = 1e-10, limit: int = 20_000) -> QuadraticSolution:
    """Minimise w'Gw - 2b'w over the simplex by accelerated projected gradient with restart (spec 2.3).

    G: (n, n) positive semidefinite. b: (n,). Stops when the Frank-Wolfe gap <grad, w> - min grad is at most
    tolerance * max(1, |objective|), or after `limit` iterations; `converged` says which."""
    G, b = G.double(), b.double()
    n = len(b)
    top = float(torch.linalg.eigvalsh(G)[-1])
    step = 1.0 / (2.0 * max(top, 1e-300))
    w = torch.full((n,), 1.0 / n, dtype=torch.float64)
    y, t, gap = w, 1.0, float("inf")
    for k in range(limit):
        gradient = 2.0 * (G @ w - b)
        objective = float(w @ (G @ w) - 2.0 * b @ w)
        gap = float(gradient @ w - gradient.min())
        if gap <= tolerance * max(1.0, abs(objective)):
            return QuadraticSolution(w, k, gap, True)
        following = project_simplex(y - step * 2.0 * (G @ y - b))
        if float((y - following) @ (following - w)) > 0:
            t = 1.0  # momentum points uphill: restart
        t_next = (1.0 + (1.0 + 4.0 * t * t) ** 0.5) / 2.0
        y = following + (t - 1.0) / t_next * (following - w)
        w, t = following, t_next
    return QuadraticSolution(w, limit, gap, False)


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


def warm_start(
    keys: Sequence[tuple[int, Hashable]], n_tasks: int, old_keys: Sequence[tuple[int, Hashable]], old: Tensor | None
) -> Tensor:
    """Omega before extraction (A2). keys: (owner, what) of each pool entry; stable identities.

    Without an old Omega: every client has mass 1/N, shared equally among its entries. Otherwise a surviving
    key keeps its weights; a new key of a client already present shares that client's mass equally with its
    other keys; a new client gets 1/N. Returns (M, P) float64, not yet projected."""
    owners = [owner for owner, _ in keys]
    share = {owner: 1.0 / len(set(owners)) for owner in owners}
    count = {owner: owners.count(owner) for owner in owners}
    omega = torch.zeros(n_tasks, len(keys), dtype=torch.float64)
    place = {key: column for column, key in enumerate(old_keys)}
    old_mass: dict[int, Tensor] = {}
    if old is not None:
        for (owner, _), column in zip(old_keys, range(old.shape[1]), strict=True):
            old_mass[owner] = old_mass.get(owner, torch.zeros(n_tasks, dtype=torch.float64)) + old[:, column]
    for owner in set(owners):
        columns = [k for k, key in enumerate(keys) if key[0] == owner]
        if old is None or owner not in old_mass:
            omega[:, columns] = share[owner] / count[owner]
            continue
        kept = [k for k in columns if keys[k] in place]
        fresh = [k for k in columns if keys[k] not in place]
        for k in kept:
            omega[:, k] = old[:, place[keys[k]]]
        kept_mass = omega[:, kept].sum(1) if kept else torch.zeros(n_tasks, dtype=torch.float64)
        mass = old_mass[owner]
        if fresh:
            portion = mass / len(columns)
            omega[:, fresh] = portion[:, None]
            remaining = mass - portion * len(fresh)
            if kept:
                factor = torch.where(kept_mass > 0, remaining / kept_mass.clamp_min(1e-300), torch.zeros_like(mass))
                omega[:, kept] *= factor[:, None]
        elif kept:  # entries that vanished leave their mass to the client's others
            factor = torch.where(kept_mass > 0, mass / kept_mass.clamp_min(1e-300), torch.ones_like(mass))
            omega[:, kept] *= factor[:, None]
    return omega


@dataclass(frozen=True)
class Extraction:
    """omega: (M, P) weights, rows sum to 1. experts: (M, D) combinations of the pool. losses: (steps, M) public
    loss at each step (not of convex combinations between projections). residual: column residual at the end.
    gradient_norms, row_norms: means before clipping."""

    omega: Tensor
    experts: Tensor
    losses: Tensor
    residual: float
    gradient_norms: float = 0.0
    row_norms: float = 0.0


def _shrink(vector: Tensor, limit: float | None) -> tuple[Tensor, float]:
    length = float(vector.norm())
    return (vector * (limit / length) if limit is not None and length > limit else vector), length


def extract(
    gradient: Gradient,
    pool: Tensor,
    owner: Sequence[int],
    omega: Tensor,
    *,
    steps: int = 50,
    lr: float = 0.1,
    block_clip: float | None = 0.1,
    row_clip: float | None = 0.1,
    reg: str = "ridge",
    reg_strength: float = 0.01,
    projection: str = "balanced",
    every: int = 5,
    iterations: int = 20,
) -> Extraction:
    """Find one convex combination of the pool per task by projected gradient on the public losses (spec 6.3).

    gradient(m, expert) -> (loss, d loss / d expert) for task m at a (D,) expert. pool: (P, D) flattened
    uploads. owner: client of each upload, `SERVER` for entries outside the column constraint. omega: (M, P)
    start. projection: "balanced" (Sinkhorn with equal client totals after every `every` steps) or
    "independent" (each row onto the simplex after every step). reg: "ridge" rho/2 |w|^2, "entropy"
    rho sum w log w, or "none". Clips of None are off. With 0 steps the start is projected and returned.
    Raises ValueError for unknown words or shapes that do not fit."""
    if projection not in ("balanced", "independent"):
        raise ValueError(f"extract: projection is '{projection}', needs 'balanced' or 'independent'")
    if reg not in ("ridge", "entropy", "none"):
        raise ValueError(f"extract: reg is '{reg}', needs 'ridge', 'entropy' or 'none'")
    if omega.shape[1] != len(pool) or len(owner) != len(pool):
        raise ValueError(
            f"extract: {len(pool)} uploads, but omega has {omega.shape[1]} columns and owner {len(owner)} entries"
        )

    def project(value: Tensor) -> Tensor:
        return sinkhorn(value, owner, iterations) if projection == "balanced" else project_simplex(value)

    omega = project(omega)
    losses = torch.zeros(steps, omega.shape[0], dtype=torch.float64)
    grad_norms, row_norms, fresh = 0.0, 0.0, True
    for step in range(steps):
        rows = torch.zeros_like(omega)
        for m in range(omega.shape[0]):
            loss, g = gradient(m, omega[m].to(pool.dtype) @ pool)
            losses[step, m] = loss
            g, length = _shrink(g, block_clip)
            row = (pool @ g).double()  # chain rule: d loss / d omega_mp = <B_p, g>
            if reg == "ridge":
                row = row + reg_strength * omega[m]
            elif reg == "entropy":
                row = row + reg_strength * (omega[m].clamp_min(1e-12).log() + 1.0)
            rows[m], row_length = _shrink(row, row_clip)
            grad_norms, row_norms = grad_norms + length, row_norms + row_length
        omega = omega - lr * rows
        if projection == "independent":
            omega, fresh = project_simplex(omega), True
        else:
            omega, fresh = omega.clamp_min(0.0), (step + 1) % every == 0
            if fresh:
                omega = sinkhorn(omega, owner, iterations)
    if not fresh:
        omega = project(omega)
    calls = max(1, steps * omega.shape[0])
    residual = column_residual(omega, owner) if projection == "balanced" else 0.0
    experts = omega.to(pool.dtype) @ pool
    return Extraction(omega, experts, losses, residual, grad_norms / calls, row_norms / calls)


def project_transport(omega: Tensor, group: Tensor, *, sweeps: int = 500, tolerance: float = 1e-12) -> Tensor:
    """Euclidean projection onto {Omega >= 0, rows sum to 1, every client's total is M / N}, by Dykstra.

    omega: (M, P). group: (N, P) of 0 and 1, which client owns a column. Returns float64, both constraints
    within about `tolerance`^(1/2) when `sweeps` suffice."""
    omega = omega.double()
    target = omega.shape[0] / group.shape[0]
    entries = omega.shape[0] * group.sum(1)  # entries of each client's group
    x, p = omega, torch.zeros_like(omega)
    for _ in range(sweeps):
        y = project_simplex(x + p)
        p = x + p - y
        shortfall = (target - group @ y.sum(0)) / entries  # affine set: no Dykstra correction needed
        x_next = y + shortfall @ group
        if float((x_next - y).abs().max()) < tolerance:
            return y
        x = x_next
    return project_simplex(x + p)


def balanced_quadratic(
    G: Tensor, b: Tensor, owner: Sequence[int], *, limit: int = 3000, tolerance: float = 1e-10
) -> Tensor:
    """Exact balanced program for quadratic losses: minimise sum_m w_m'G_m w_m - 2 b_m'w_m over the transport
    polytope, by accelerated projected gradient with `project_transport`.

    G: (M, P, P) positive semidefinite. b: (M, P). owner: client of each column. Returns Omega (M, P)."""
    G, b = G.double(), b.double()
    owner_index = torch.as_tensor(list(owner))
    group = (owner_index[None, :] == owner_index.unique()[:, None]).double()
    step = 1.0 / (2.0 * float(torch.linalg.eigvalsh(G)[:, -1].max()))
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
