"""Experts outside the uploads' convex hull: exact programs for squared loss, beyond the FedSEE paper.

Where no client is nearly pure, no convex combination of uploads reaches an expert, but the uploads still span
the experts' affine hull. For one task with a public set of n examples:

    affine      weights that sum to one and may be negative, with a ridge towards equal weights
    posterior   theta = centre + sum_k z_k d_k + e,  z ~ N(0, t^2 I),  e ~ N(0, v^2 I)
                d_k: centred uploads' principal directions times their standard deviation

v = 0 is the affine program (t is its ridge), v -> infinity least squares on the public set alone. Strengths
are chosen on held-out public examples (affine) or by the marginal likelihood (posterior). Gradient versions
for any loss are in `beyond_hull`.

N uploads (N, l, r), l outputs, r features; NumPy, float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedprism.methods.simplex import simplex_quadratic

Floats = NDArray[np.float64]
HULLS = ("convex", "affine", "auto", "posterior")
RIDGES = tuple(10.0 ** np.arange(-6, 2.01, 0.5))  # relative to the mean curvature along the span


@dataclass(frozen=True, eq=False)
class PublicMoments:
    """What squared loss needs of n public examples of one task: averages of phi phi' (r, r), of y phi' (l, r)
    and of |y|^2, where y is the label less the base map's output."""

    S: Floats
    C: Floats
    energy: float
    n: int

    def loss(self, theta: Floats) -> float:
        """Mean squared loss |y - theta phi|^2 of theta (l, r) on these examples."""
        return float(np.einsum("ab,bc,ac", theta, self.S, theta) - 2 * (theta * self.C).sum() + self.energy)


def merge(parts: Sequence[PublicMoments]) -> PublicMoments:
    """The moments of all parts' examples together. Raises ValueError for none."""
    if not parts:
        raise ValueError("hull: got no public examples, needs at least one")
    n = sum(part.n for part in parts)
    share = [part.n / n for part in parts]
    return PublicMoments(
        np.asarray(sum(w * part.S for w, part in zip(share, parts, strict=True))),
        np.asarray(sum(w * part.C for w, part in zip(share, parts, strict=True))),
        sum(w * part.energy for w, part in zip(share, parts, strict=True)),
        n,
    )


def public_least_squares(public: PublicMoments) -> Floats:
    """(l, r) least squares on the public set alone, of least norm where the examples do not determine it."""
    theta: Floats = public.C @ np.linalg.pinv(public.S, rcond=1e-10, hermitian=True)
    return theta


def _program(uploads: Floats, public: PublicMoments) -> tuple[Floats, Floats]:
    """G (N, N) and b (N,) of the loss w'Gw - 2b'w of a combination w of the uploads."""
    G = np.einsum("iab,bc,jac->ij", uploads, public.S, uploads, optimize=True)
    return (G + G.T) / 2, np.einsum("iab,ab->i", uploads, public.C)


def convex_experts(uploads: Floats, publics: Sequence[PublicMoments]) -> Floats:
    """(K, l, r) best convex combinations of the uploads on each of K public sets: the paper's program (spec
    2.3)."""
    programs = [_program(uploads, public) for public in publics]
    G, b = (torch.from_numpy(np.stack(part)) for part in zip(*programs, strict=True))
    experts: Floats = np.einsum("ki,iab->kab", simplex_quadratic(G, b).weights.numpy(), uploads)
    return experts


def affine_weights(uploads: Floats, public: PublicMoments, ridge: float) -> Floats:
    """(N,) weights of sum 1 that minimise the public loss + ridge s |w - 1/N|^2, s the mean curvature of the
    loss along weights of sum zero. The ridge punishes the uploads' noise, which grows with |w|^2.

    ridge >= 0 (0: the least-norm solution)."""
    N = len(uploads)
    G, b = _program(uploads, public)
    level = np.full(N, 1.0 / N)
    Z = np.linalg.svd(np.ones((1, N)))[2][1:].T  # orthonormal basis of weights of sum zero
    H, h = Z.T @ G @ Z, Z.T @ (b - G @ level)
    s = float(np.trace(H)) / max(N - 1, 1)
    moved = np.linalg.lstsq(H + ridge * s * np.eye(N - 1), h, rcond=1e-12)[0]
    weights: Floats = level + Z @ moved
    return weights


def affine_expert(uploads: Floats, public: PublicMoments, ridge: float) -> Floats:
    """(l, r) combination of the uploads with `affine_weights`."""
    expert: Floats = np.einsum("i,iab->ab", affine_weights(uploads, public, ridge), uploads)
    return expert


@dataclass(frozen=True, eq=False)
class Posterior:
    """expert: (l, r) posterior mean. log_evidence: log marginal likelihood of the public set up to a constant
    that depends on the data alone. noise, span, off: standard deviations sigma, t and v at its maximum."""

    expert: Floats
    log_evidence: float
    noise: float
    span: float
    off: float


def posterior(uploads: Floats, public: PublicMoments, centre: Floats) -> Posterior:
    """Posterior mean of an expert given the public set, prior strengths and noise by maximal evidence.

    Likelihood y ~ N(theta phi, sigma^2 I); prior as in the module's docstring around `centre` (l, r). In the
    eigenbasis of S the observations C q_j / s_j have independent noise sigma^2 / (n s_j), so that e can be
    integrated out entry by entry and z by a system of N - 1 unknowns."""
    l, r = public.C.shape  # noqa: E741
    N = len(uploads)
    s, Q = np.linalg.eigh(public.S)
    seen = s > 1e-9 * s.max()
    s, Q = s[seen], Q[:, seen]
    k = len(s)
    centred = (uploads - uploads.mean(0)).reshape(N, -1)
    _, size, axes = np.linalg.svd(centred, full_matrices=False)
    q = min(N - 1, int((size > 1e-12 * max(float(size[0]), 1e-300)).sum()))
    directions = (size[:q, None] * axes[:q] / np.sqrt(N)).reshape(q, l, r)
    observed = public.C @ Q / s  # (l, k)
    gap = (observed - centre @ Q).reshape(-1)
    D = (directions @ Q).reshape(q, l * k)
    residual = max(public.n * (public.energy - float((observed**2 * s).sum())), 0.0)
    freedom = (public.n - k) * l  # of the residual, which tells the noise
    unit = np.broadcast_to(1.0 / (public.n * s), (l, k)).reshape(-1)

    def solve(logs: Floats) -> tuple[float, Floats, Floats]:
        """Negative log evidence, z and the share of what is left over that e takes, at log variances."""
        noise, span, off = np.exp(logs)
        v = off + noise * unit
        P = np.eye(q) / span + (D / v) @ D.T
        h = (D / v) @ gap
        root = np.linalg.cholesky(P)
        z = np.linalg.solve(P, h)
        value = np.log(v).sum() + 2 * np.log(np.diag(root)).sum() + q * logs[1] + (gap**2 / v).sum() - h @ z
        if freedom:
            value += freedom * logs[0] + residual / noise
        return 0.5 * float(value), z, off / v

    level = residual / freedom if freedom else 0.1 * public.energy / l
    first = np.log(max(level, 1e-12 * max(public.energy, 1e-300)))
    # the scale of e: from nothing to the size of the uploads, or of what they leave open if that is more
    entry = np.log(max(float((uploads**2).mean()), 1e-300))
    top = max(entry + 4.0, np.log(max(float((gap**2).max(initial=0.0)), 1e-300)))
    lowest = first - (3.0 if freedom else 12.0)  # with r examples or fewer no residual tells the noise
    bounds = [(lowest, first + 3.0), (-14.0, 8.0), (entry - 20.0, top)]
    grid = [
        np.array([noise, t, entry + e])
        for noise in np.arange(first, lowest, -4.0)
        for t in (-4.0, -1.0, 2.0, 5.0)
        for e in np.arange(-16.0, top - entry, 4.0)
    ]
    start = min(grid, key=lambda logs: solve(logs)[0])  # the evidence may have several maxima
    best = minimize(lambda logs: solve(logs)[0], start, method="L-BFGS-B", bounds=bounds)
    value, z, share = solve(best.x)
    left = ((gap - z @ D) * share).reshape(l, k)
    expert = centre + np.einsum("q,qab->ab", z, directions) + left @ Q.T
    noise, span, off = np.exp(best.x / 2)
    return Posterior(expert, -value, float(noise), float(span), float(off))


@dataclass(frozen=True, eq=False)
class SpanRecovery:
    """expert: (l, r). chosen: the estimate that was taken, "convex", "affine", or "posterior: mean" and
    "posterior: convex" by their centre. ridge: of the affine program where it was tried, relative to the mean
    curvature. evidence: the posterior where it was tried."""

    expert: Floats
    chosen: str
    ridge: float | None = None
    evidence: Posterior | None = None


def recover(uploads: Floats, folds: Sequence[PublicMoments], hull: str) -> SpanRecovery:
    """Expert of one task from the uploads and a public set that lies in folds.

    hull: "convex"; "affine" (ridge by cross-validation over the folds, then fitted on all of them); "auto"
    (the better of the two by the same held-out loss); "posterior" (around the mean upload or around the
    convex expert, whichever has the larger evidence). Raises ValueError for other words, or fewer than two
    folds where they are needed."""
    if hull not in HULLS:
        raise ValueError(f"hull: got '{hull}', needs one of {', '.join(HULLS)}")
    public = merge(folds)
    convex = convex_experts(uploads, [public])[0]
    if hull == "convex":
        return SpanRecovery(convex, "convex")
    if hull == "posterior":
        tries = {
            "posterior: mean": posterior(uploads, public, uploads.mean(0)),
            "posterior: convex": posterior(uploads, public, convex),
        }
        name = max(tries, key=lambda key: tries[key].log_evidence)
        return SpanRecovery(tries[name].expert, name, evidence=tries[name])
    ridge, affine_loss, convex_loss = choose_ridge(uploads, folds)
    if hull == "auto" and convex_loss <= affine_loss:
        return SpanRecovery(convex, "convex", ridge)
    return SpanRecovery(affine_expert(uploads, public, ridge), "affine", ridge)


def choose_ridge(
    uploads: Floats, folds: Sequence[PublicMoments], grid: Sequence[float] = RIDGES
) -> tuple[float, float, float]:
    """Ridge of the affine program with the least held-out loss, that loss, and the convex program's.

    Losses are means over the examples of all folds, each held out in turn. Raises ValueError with fewer than
    two folds."""
    if len(folds) < 2:
        raise ValueError(f"hull: got {len(folds)} folds of public examples, needs at least 2 to hold one out")
    total = sum(fold.n for fold in folds)
    fits = [merge([fold for j, fold in enumerate(folds) if j != k]) for k in range(len(folds))]
    affine, convex = np.zeros(len(grid)), 0.0
    for held, fit, expert in zip(folds, fits, convex_experts(uploads, fits), strict=True):
        share = held.n / total
        affine += share * np.array([held.loss(affine_expert(uploads, fit, ridge)) for ridge in grid])
        convex += share * held.loss(expert)
    best = int(affine.argmin())
    return float(grid[best]), float(affine[best]), convex
