"""FedSEE's extraction: experts as convex combinations of uploads, guided by losses on public sets.

Throughout, M is the number of tasks (experts), P the number of uploads in the pool and D the number of
entries of one upload. Omega (M, P) holds the combination weights; `owner` (P,) says whose upload a column is.
The theory checks call the same functions. Sources: FedSEE spec section 6.3, A1, A2, A16, A20 and A35.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedprism.methods.beyond_hull import DESCENTS, Outside, leave_hull
from fedprism.methods.simplex import column_residual, project_simplex, sinkhorn
from fedprism.models.interface import Bank, Batch, Model
from fedprism.trees import Tree, unflatten

Gradient = Callable[[int, Tensor], tuple[float, Tensor]]


class PublicLosses:
    """Losses of single experts on the public sets: the expert alone on a base, no router or dropout (A3).

    model: frozen. base: always-on pair and head. down: shared A. like: names and shapes of one expert. rows:
    the tasks' public rows, in expert order. size: fresh examples per call and task, 0 = the whole set. chunk:
    rows per forward pass of a whole set. steps: calls per task to prepare for. hold_out: share of each task's
    rows that `gradient` never sees and `held_out` reads. `examples` counts the rows seen."""

    def __init__(
        self, model: Model, base: Tree, down: Tree, like: Tree, rows: Sequence[Any], *, size: int, chunk: int,
        steps: int, generator: torch.Generator, hold_out: float = 0.0,
    ) -> None:  # fmt: skip
        self.model, self.base, self.down, self.like = model, base, down, like
        self.rows, self.fit, self.held, self.chunk = rows, list(rows), list(rows), chunk
        if hold_out:
            parts = [split_rows(r, hold_out, generator) for r in rows]
            self.fit, self.held = [fit for fit, _ in parts], [held for _, held in parts]
        self.streams = (
            [r.batches(size, steps=steps, generator=generator) for r in self.fit] if size and steps else []
        )
        self.examples = 0

    def total(self, expert: Tree, batch: Batch) -> Tensor:
        """Summed loss of a batch under one expert with weight 1."""
        bank = Bank(self.down, {0: expert}, weights=torch.ones(1))
        return self.model.per_example_loss(self.model.apply(self.base, batch, bank=bank), batch).sum()

    def gradient(self, m: int, vector: Tensor) -> tuple[float, Tensor]:
        """Mean loss of task m at the flattened expert `vector` (D,), and its gradient: one leaf for any P."""
        leaf = vector.detach().requires_grad_(True)
        batches = [next(self.streams[m])] if self.streams else list(self.fit[m].batches(self.chunk))
        rows, value = sum(len(batch["label"]) for batch in batches), 0.0
        for batch in batches:
            part = self.total(unflatten(leaf, self.like), batch) / rows
            part.backward()
            value += float(part.detach())
        self.examples += rows
        return value, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)

    @torch.no_grad()
    def held_out(self, m: int, vector: Tensor) -> float:
        """Mean loss of task m over the rows held out, at the flattened expert `vector` (D,)."""
        expert, rows = unflatten(vector, self.like), self.held[m]
        self.examples += len(rows)
        return sum(float(self.total(expert, batch)) for batch in rows.batches(self.chunk)) / len(rows)

    @torch.no_grad()
    def table(self, experts: Mapping[int, Tree], rows_per_task: int) -> Tensor:
        """(M, M) mean loss of expert m (row) on task k (column), on each task's first rows."""
        table = torch.zeros(len(experts), len(self.rows))
        for k, all_rows in enumerate(self.rows):
            rows = all_rows.select(torch.arange(min(len(all_rows), rows_per_task)))
            for m, expert in experts.items():
                table[m, k] = sum(
                    float(self.total(expert, batch)) for batch in rows.batches(self.chunk)
                ) / len(rows)
        return table


def split_rows(task: Any, fraction: float, generator: torch.Generator) -> tuple[Any, Any]:
    """Split a task's public rows at random: a part to fit, and about `fraction`, in (0, 1), to choose by.

    Raises ValueError for fewer than two rows."""
    if len(task) < 2:
        raise ValueError(f"public rows: got {len(task)} public rows, needs at least 2; use hull = 'convex'")
    n = min(max(1, round(fraction * len(task))), len(task) - 1)
    order = torch.randperm(len(task), generator=generator)
    return task.select(order[n:].sort().values), task.select(order[:n].sort().values)


def warm_start(
    keys: Sequence[tuple[int, Hashable]],
    n_tasks: int,
    old_keys: Sequence[tuple[int, Hashable]],
    old: Tensor | None,
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
                factor = torch.where(
                    kept_mass > 0, remaining / kept_mass.clamp_min(1e-300), torch.zeros_like(mass)
                )
                omega[:, kept] *= factor[:, None]
        elif kept:  # entries that vanished leave their mass to the client's others
            factor = torch.where(kept_mass > 0, mass / kept_mass.clamp_min(1e-300), torch.ones_like(mass))
            omega[:, kept] *= factor[:, None]
    return omega


@dataclass(frozen=True)
class Extraction:
    """omega: (M, P) weights, rows sum to 1. experts: (M, D) combinations of the pool. losses: (steps, M)
    public loss at each step (not of convex combinations between projections). residual: column residual at
    the end. gradient_norms, row_norms: means before clipping. outside: how the experts were found where they
    may lie outside the uploads' convex hull."""

    omega: Tensor
    experts: Tensor
    losses: Tensor
    residual: float
    gradient_norms: float = 0.0
    row_norms: float = 0.0
    outside: Outside | None = None


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
    hull: str = "convex",
    held_out: Callable[[int, Tensor], float] | None = None,
    sizes: Sequence[int] = (),
    outside_steps: int = 50,
    outside_lr: float = 0.1,
) -> Extraction:
    """Find one convex combination of the pool per task by projected gradient on the public losses (spec 6.3).

    gradient(m, expert) -> (loss, d loss / d expert) for task m at a (D,) expert. pool: (P, D) flattened
    uploads. owner: client of each upload, `SERVER` for entries outside the column constraint. omega: (M, P)
    start. projection: "balanced" (Sinkhorn with equal client totals after every `every` steps) or
    "independent" (each row onto the simplex after every step). reg: "ridge" rho/2 |w|^2, "entropy"
    rho sum w log w, or "none". Clips of None are off. With 0 steps the start is projected and returned.
    hull: "convex", or "affine", "auto", "posterior" for experts that may leave the uploads' convex hull
    (`beyond_hull`; omega and the contributions stay those of the convex program). These need held_out(m,
    expert), the loss on public rows that `gradient` never sees, and sizes, the rows it sees per task;
    outside_steps, outside_lr: their descents. Raises ValueError for unknown words or shapes that don't
    fit."""
    if projection not in ("balanced", "independent"):
        raise ValueError(f"extract: projection is '{projection}', needs 'balanced' or 'independent'")
    if reg not in ("ridge", "entropy", "none"):
        raise ValueError(f"extract: reg is '{reg}', needs 'ridge', 'entropy' or 'none'")
    if hull not in DESCENTS:
        raise ValueError(f"extract: hull is '{hull}', needs one of {', '.join(DESCENTS)}")
    if hull != "convex" and (held_out is None or len(sizes) != len(omega)):
        raise ValueError(f"extract: hull '{hull}' needs held_out and {len(omega)} sizes, got {len(sizes)}")
    if omega.shape[1] != len(pool) or len(owner) != len(pool):
        raise ValueError(
            f"extract: {len(pool)} uploads, but omega has {omega.shape[1]} columns, owner {len(owner)}"
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
    if projection == "balanced" and column_residual(omega, owner) > 1e-4:
        omega = sinkhorn(omega, owner, 50 * iterations)  # sparse weights converge slowly (spec 13)
    calls = max(1, steps * omega.shape[0])
    residual = column_residual(omega, owner) if projection == "balanced" else 0.0
    experts, outside = omega.to(pool.dtype) @ pool, None
    if hull != "convex" and held_out is not None:
        outside = leave_hull(
            gradient, held_out, pool, experts, hull=hull, sizes=sizes, steps=outside_steps, lr=outside_lr
        )
        experts = outside.experts
    return Extraction(omega, experts, losses, residual, grad_norms / calls, row_norms / calls, outside)


def smooth_contributions(C: Tensor | None, new: Tensor, columns: Sequence[int], rate: float) -> Tensor:
    """Smoothed contributions (spec 6): C <- (1 - rate) C + rate C* in the columns of who took part.

    C: (M, N) so far, None before the first. new: (M, N_t), the raw C*. columns: where its columns stand in C.
    rate: weight of the new matrix, lambda."""
    if C is None:
        return new
    smoothed = C.clone()
    smoothed[:, columns] = (1 - rate) * smoothed[:, columns] + rate * new
    return smoothed
