"""FedTAR's server step as one coefficient per client (spec 5.2): B_g = Delta beta, no d x d object anywhere.

Delta (d x N) holds the clients' updates as columns, G = Delta^T Delta, Z (r x N) their task coordinates. With
W = Z^T (Z Z^T + lambda_z I)^-1 the map from coordinates to updates is M = Delta W, and

    B_g = M (M^T M + lambda_p I)^-1 M^T Delta a,   beta = W (W^T G W + lambda_p I)^-1 W^T G a.

Deviations: "affine" (the default) fits a free intercept, the mean, and filters only the deviation from it: as
coordinates are centred, M of the paper's form ("literal") sees differences between clients alone, the
coefficients sum to 0 and what all clients agree on is lost. "augmented" appends a constant coordinate, "none"
projects nothing. Ridges are relative to the traces; literal ones are absolute. With client weights p the
ridge is weighted by N p, so that sums of coefficients stay exact (P7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import ArrayLike

from fedprism.methods.task_space import Floats, Ints, group_weights, shares

CUT_OFF = 1e-10  # directions whose eigenvalue plus ridge is below this part of the largest are left out
ROUNDING = 1e-13  # of float64, relative, in M^T M where the clients' updates are equal
FEEBLE = 0.1  # part of the mean's norm below which a step deserves a warning


@dataclass(frozen=True)
class MapSettings:
    """How coordinates, groups and updates become coefficients."""

    tau: Annotated[float, Ge(0)] = 1.0  # how fast a group's weight falls with its distance from the centre
    tau_mode: Literal["relative", "absolute"] = "relative"  # relative: to the groups' mean squared distance
    size_aware: bool = False  # a group weighs by its share of the clients as well
    projection: Literal["affine", "literal", "augmented", "none"] = "affine"  # of the clustered average
    r_upd: Annotated[int, Ge(0)] = 0  # directions of the updates that the map is fitted to; 0 = all
    lambda_mode: Literal["relative", "absolute"] = "relative"  # relative: rho_z, rho_p; absolute: lambda_
    rho_z: Annotated[float, Ge(0)] = 1e-2  # ridge on Z Z^T, in units of its mean eigenvalue
    rho_p: Annotated[float, Ge(0)] = 1e-3  # ridge on M^T M, in units of its mean eigenvalue
    lambda_: Annotated[float, Ge(0)] = 1e-3  # both ridges where lambda_mode is absolute
    debias: Annotated[float, Ge(0)] = 0.0  # noise variance per value, d times which leaves the diagonal of G
    adaptive: bool = False  # take the mean where the map predicts a left-out client worse than the mean


def ridge_inverse(square: Floats, ridge: float, rounding: float = 0.0) -> Floats:
    """(A + ridge I)^-1 of a symmetric A >= 0 by its eigenvalues, without the vanishing directions.

    rounding: eigenvalues up to it are taken for rounding and left out as well."""
    values, vectors = np.linalg.eigh((square + square.T) / 2)
    values = values.clip(0)
    solid = (values + ridge > CUT_OFF * values.max(initial=0.0)) & (values + ridge > 0)
    solid &= values > rounding if rounding else True
    inverse: Floats = (vectors[:, solid] / (values[solid] + ridge)) @ vectors[:, solid].T
    return inverse


def _ridge(square: Floats, cfg: MapSettings, rho: float) -> float:
    """lambda: absolute, or rho times the mean eigenvalue."""
    return cfg.lambda_ if cfg.lambda_mode == "absolute" else rho * float(np.trace(square)) / len(square)


def map_weights(Z: Floats, cfg: MapSettings, p: Floats) -> Floats:
    """(N, r) W = D Z^T (Z D Z^T + lambda_z I)^-1 with D = N diag(p), so that M = Delta W. Z: (r, N)."""
    weighted = Z * (len(p) * p)
    square = weighted @ Z.T
    W: Floats = weighted.T @ ridge_inverse(square, _ridge(square, cfg, cfg.rho_z))
    return W


def augmented(Z: Floats) -> Floats:
    """Z (r, N) with a constant row sqrt(|Z|_F^2 / (r N)) below (P1)."""
    r, n = Z.shape
    return np.vstack([Z, np.full((1, n), np.sqrt((Z**2).sum() / (r * n)))])


def leading(G: Floats, r_upd: int) -> Floats:
    """(N, N) projector V V^T on the r_upd leading eigenvectors of G."""
    top = np.linalg.eigh(G)[1][:, ::-1][:, :r_upd]
    projector: Floats = top @ top.T
    return projector


def project(G: Floats, Z: Floats, a: Floats, cfg: MapSettings, p: Floats) -> Floats:
    """(N,) beta of the clustered average with weights a (N,); G (N, N), Z (r, N), p (N,) sums to 1."""
    if cfg.projection == "none":
        return a
    W = map_weights(augmented(Z) if cfg.projection == "augmented" else Z, cfg, p)
    if cfg.r_upd:
        W = leading(G, cfg.r_upd) @ W
    square = W.T @ G @ W  # M^T M
    rounding = ROUNDING * float(np.trace(G)) * float((W**2).sum())  # what cancels in W^T G W leaves this much
    inverse = ridge_inverse(square, _ridge(square, cfg, cfg.rho_p), rounding)
    mean = p if cfg.projection == "affine" else np.zeros_like(p)
    beta: Floats = mean + W @ (inverse @ (W.T @ (G @ (a - mean))))
    return beta


def leave_one_out_r2(G: Floats, Z: Floats, cfg: MapSettings, p: Floats) -> float:
    """1 - sum_i |Delta_i - fit_i|^2 / sum_i |Delta_i - mean_i|^2: fit_i, mean_i without client i.

    The fit has a free intercept. nan for two clients or fewer, or where clients do not differ."""
    n, missed, spread = len(p), 0.0, 0.0
    if n < 3:
        return float("nan")
    for i in range(n):
        rest = np.arange(n) != i
        q = p[rest] / p[rest].sum()
        centre = Z[:, rest] @ q
        W = map_weights(Z[:, rest] - centre[:, None], cfg, q)
        off = np.zeros(n)
        off[i], off[rest] = 1.0, -q
        spread += p[i] * float(off @ G @ off)
        off[rest] -= W @ (Z[:, i] - centre)
        missed += p[i] * float(off @ G @ off)
    return 1 - missed / spread if spread > 0 else float("nan")


def _length(G: Floats, c: Floats) -> float:
    return float(np.sqrt(max(float(c @ G @ c), 0.0)))


def fedtar_coefficients(
    G: Floats,
    Z: Floats,
    labels: Ints | None,
    cfg: MapSettings,
    p: ArrayLike | None = None,
    *,
    d: int = 0,
) -> tuple[Floats, dict[str, Any]]:
    """(N,) beta with B_g = sum_i beta_i Delta_i, and what happened, JSON-ready.

    G: (N, N) inner products of the updates. Z: (r, N) coordinates. labels: (N,) groups 0..Q-1; None: no
    clustering, the average is the mean. p: (N,) client weights, equal unless given. d: values of an update,
    for `cfg.debias`. Facts: beta, beta_sum, retained_mean (|B_g| / |mean|), retained_cluster (|B_g| /
    |clustered average|), cosine_mean, loo_r2, labels, group_weights, spectrum of G, fallback, notes.
    Norms and cosine are 0 where there is nothing to divide by. Raises ValueError for shapes that differ."""
    n = len(G)
    if G.shape != (n, n) or Z.ndim != 2 or Z.shape[1] != n:
        raise ValueError(
            f"coefficients: got G of shape {G.shape} and Z of shape {Z.shape}, needs (N, N) and (r, N)"
        )
    if not (np.isfinite(G).all() and np.isfinite(Z).all()):
        raise ValueError("coefficients: G or Z holds values that are not finite; lower the learning rate")
    weight = shares(p, n)
    notes: list[str] = []
    G = (G + G.T) / 2 - d * cfg.debias * np.eye(n)
    if cfg.debias:  # what is left must stay a Gram matrix
        values, vectors = np.linalg.eigh(G)
        G = (vectors * values.clip(0)) @ vectors.T
    w, a = np.ones(1), weight
    if labels is not None:
        w, a = group_weights(
            Z.T, labels, cfg.tau, mode=cfg.tau_mode, size_aware=cfg.size_aware, p=weight
        )  # fmt: skip
    beta = project(G, Z, a, cfg, weight)
    r2 = leave_one_out_r2(G, Z, cfg, weight)
    fallback = bool(cfg.adaptive and r2 < 0)
    if fallback:
        beta = weight
        notes.append(f"map: leave-one-out R^2 is {r2:.2f}, the mean was taken")
    size, mean, clustered = (_length(G, c) for c in (beta, weight, a))
    if size < FEEBLE * mean:
        notes.append(
            f"projection: {size / mean:.1%} of the mean's norm is left; "
            'set projection = "affine", or basis and coordinates to "uncentred"'
        )
    facts = {
        "beta": beta.tolist(),
        "beta_sum": float(beta.sum()),
        "retained_mean": size / mean if mean else 0.0,
        "retained_cluster": size / clustered if clustered else 0.0,
        "cosine_mean": float(beta @ G @ weight) / (size * mean) if size * mean else 0.0,
        "loo_r2": None if np.isnan(r2) else r2,
        "labels": [0] * n if labels is None else labels.tolist(),
        "group_weights": w.tolist(),
        "spectrum": np.linalg.eigvalsh(G)[::-1].clip(0).tolist(),
        "fallback": fallback,
        "notes": notes,
    }
    return beta, facts
