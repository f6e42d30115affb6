"""Experts outside the uploads' convex hull for any loss, by gradients on the public sets; beyond the paper.

    theta = centre + sum_k z_k d_k + e,    public loss + (|z|^2 / (2 t^2) + |e|^2 / (2 v^2)) / n

d_k are the centred uploads' principal directions times their standard deviation, so z = O(1) inside the cloud
of uploads; e reaches outside their span. "affine" keeps e = 0: weights of the uploads sum to one and may be
negative. "posterior" lets e go. Strengths t and v are chosen per task on held-out public examples. For
squared loss `affine_span` has the exact programs.

M tasks, P uploads of D entries, n public examples of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Gradient = Callable[[int, Tensor], tuple[float, Tensor]]
SPANS = (1.0, 10.0, 100.0)  # t^2
DESCENTS = {"convex": 0, "affine": 3, "auto": 3, "posterior": 6}  # of each task
OFFS = (0.01, 0.1, 1.0)  # v^2 in units of the uploads' mean variance per entry


def span_directions(pool: Tensor) -> Tensor:
    """(q, D) centred uploads' principal directions times their standard deviation; q <= P - 1.

    pool: (P, D). The sum of the outer products of the rows is the uploads' covariance (divided by P)."""
    centred = pool.double() - pool.double().mean(0)
    kernel = centred @ centred.T
    values, vectors = torch.linalg.eigh(kernel)
    kept = values > 1e-12 * values[-1].clamp_min(1e-300)
    directions: Tensor = (vectors[:, kept].T @ centred).to(pool.dtype) / len(pool) ** 0.5
    return directions


def penalised_descent(
    gradient: Callable[[Tensor], tuple[float, Tensor]], centre: Tensor, directions: Tensor, *, span: float,
    off: float, n: int, steps: int, lr: float,
) -> Tensor:  # fmt: skip
    """Minimise the penalised public loss of one task from theta = centre, by Adam with a rate that falls to
    0.

    gradient(theta) -> (loss, d loss / d theta) at a (D,) expert. directions: (q, D). span: t^2 > 0. off: v^2
    in units of the directions' mean variance per entry, 0 keeps e = 0. n: public examples. Returns (D,)."""
    t = span**0.5
    v = (off * float(directions.double().square().sum()) / directions.shape[1]) ** 0.5
    a = torch.zeros(len(directions), dtype=torch.float64)  # z = t a
    b = torch.zeros_like(centre)  # e = v b
    parts = [a, b] if off else [a]
    optimizer = torch.optim.Adam(parts, lr=lr)

    def expert() -> Tensor:
        moved: Tensor = centre + (t * a).to(centre.dtype) @ directions
        return moved + v * b if off else moved

    for step in range(steps):
        _, g = gradient(expert())
        a.grad = t * (directions @ g).double() + a / n
        b.grad = v * g + b / n
        for group in optimizer.param_groups:
            group["lr"] = lr * (1.0 - step / steps)
        optimizer.step()
    return expert()


@dataclass(frozen=True)
class Outside:
    """experts: (M, D). chosen: per task the estimate that was taken, for example "affine 10" or "posterior
    10, 0.1" (span and off). held_out: per task the held-out loss of every estimate."""

    experts: Tensor
    chosen: tuple[str, ...]
    held_out: tuple[dict[str, float], ...]


def leave_hull(
    gradient: Gradient,
    held_out: Callable[[int, Tensor], float],
    pool: Tensor,
    convex: Tensor,
    *,
    hull: str,
    sizes: Sequence[int],
    steps: int = 50,
    lr: float = 0.1,
) -> Outside:
    """Per task the estimate with the least held-out loss.

    gradient(m, theta): on the part of task m's public set that is fitted; held_out(m, theta): mean loss on
    the rest. pool: (P, D) uploads. convex: (M, D) experts that were fitted on the same part. hull: "affine"
    (the best span), "auto" (or the convex expert where that is no worse), "posterior" (or any off on top of
    the better of the two). sizes: fitted examples per task. steps, lr: of each descent, 3 of them for a task,
    6 for "posterior". Raises ValueError for other words."""
    if not DESCENTS.get(hull):
        raise ValueError(f"hull: got '{hull}', needs 'affine', 'auto' or 'posterior'")
    directions = span_directions(pool)
    experts, chosen, scores = [], [], []
    for m, n in enumerate(sizes):

        def descend(centre: Tensor, span: float, off: float, m: int = m, n: int = n) -> Tensor:
            strengths: dict[str, Any] = {"span": span, "off": off, "n": n, "steps": steps, "lr": lr}
            return penalised_descent(partial(gradient, m), centre, directions, **strengths)

        found = {f"affine {span:g}": descend(pool.mean(0), span, 0.0) for span in SPANS}
        losses = {name: held_out(m, theta) for name, theta in found.items()}
        best = min(losses, key=lambda name: losses[name])
        span = SPANS[list(found).index(best)]
        if hull != "affine":
            found["convex"], losses["convex"] = convex[m], held_out(m, convex[m])
            best = "convex" if losses["convex"] <= losses[best] else best
        if hull == "posterior":
            for off in OFFS:
                name = f"posterior {span:g}, {off:g}"
                found[name] = descend(found[best], span, off)
                losses[name] = held_out(m, found[name])
            best = min(losses, key=lambda name: losses[name])
        experts.append(found[best])
        chosen.append(best)
        scores.append(losses)
    return Outside(torch.stack(experts), tuple(chosen), tuple(scores))
