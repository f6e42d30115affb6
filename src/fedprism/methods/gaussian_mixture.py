"""Mixtures of Gaussians and classifiers over rows that stay apart: responsibilities and merged moments.

Pure functions in float64; they know no model, no client and no round. M Gaussians with full covariances in d
dimensions and M2 classifiers (M is M1 where both occur), n rows, m clients. Sources: FedGMM (Wu et al. 2023),
spec 11.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedprism.methods.density_ratio import kmeans_responsibilities

FLOOR = 1e-8  # smallest mixing weight inside a logarithm


def log_densities(x: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """log N(x; mu_a, Sigma_a) in nats, (n, M), by a Cholesky factor of Sigma and a triangular solve.

    x: (n, d). means: (M, d). covariances: (M, d, d). All float64. Raises ValueError, one line, for a
    covariance that is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(covariances)
    if bool(info.any()):
        wrong = int(info.nonzero()[0])
        raise ValueError(
            f"log_densities: covariance {wrong} is not positive definite, needs that; raise covariance_floor"
        )
    away = (x[None] - means[:, None]).transpose(1, 2)  # (M, d, n)
    squares = torch.linalg.solve_triangular(factor, away, upper=False).square().sum(1)  # (M, n)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    log_n: Tensor = -0.5 * (squares.T + log_det + x.shape[1] * math.log(2 * math.pi))
    return log_n


def log_joint(pi: Tensor, log_n: Tensor, losses: Tensor) -> Tensor:
    """log of pi(a, b) N_a(x_s) exp(-loss_b), (n, M1, M2), up to a constant of the row.

    pi: (M1, M2), floored at 1e-8. log_n: (n, M1). losses: (n, M2) in nats. Densities count relative to the
    row's largest, so that with one Gaussian they leave no trace."""
    relative = log_n - log_n.amax(1, keepdim=True)
    return (pi.clamp_min(FLOOR).log() + relative[:, :, None]) - losses[:, None, :]


def responsibilities(pi: Tensor, log_n: Tensor, losses: Tensor) -> Tensor:
    """q_s(a, b), (n, M1, M2): one softmax over the grid. Arguments as in `log_joint`."""
    joint = log_joint(pi, log_n, losses)
    return joint.flatten(1).softmax(1).view_as(joint)


def classifier_weights(pi: Tensor, log_n: Tensor, *, logarithm: bool = True) -> Tensor:
    """p(b | x), rows sum to 1, (n, M2): sum over a of pi(a, b) N_a(x), normalised.

    Arguments as in `log_joint`. logarithm: False adds pi itself to the log density, a known mistake."""
    relative = log_n - log_n.amax(1, keepdim=True)
    grid = (pi.clamp_min(FLOOR).log() if logarithm else pi) + relative[:, :, None]
    return grid.flatten(1).softmax(1).view_as(grid).sum(1)


def fit_weights(pi: Tensor, log_n: Tensor, losses: Tensor, steps: int, tolerance: float) -> Tensor:
    """EM on pi alone from the given start, at most `steps` times, until no entry changes by more than
    `tolerance`, (M1, M2). Arguments as in `log_joint`."""
    for _ in range(steps):
        before, pi = pi, responsibilities(pi, log_n, losses).mean(0)
        if float((pi - before).abs().max()) <= tolerance:
            break
    return pi


def weighted_moments(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass (M,), means (M, d) and scatter per mass about them (M, d, d) of rows weighted by q.

    x: (n, d). q: (n, M), not negative. Without mass a Gaussian's mean and scatter are zero."""
    mass = q.sum(0)
    share = q / mass.clamp_min(torch.finfo(q.dtype).tiny)
    means = share.T @ x
    away = x[None] - means[:, None]  # (M, n, d)
    return mass, means, torch.einsum("na,and,ane->ade", share, away, away)


def merge_moments(
    mass: Tensor, means: Tensor, covariances: Tensor, *, between: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of all clients' rows together, from each client's: mass (M,), means (M, d), scatter (M, d, d).

    mass: (m, M). means: (m, M, d). covariances: (m, M, d, d) about the client's own means. between: add the
    scatter of the clients' means about the common one; without it the result is too small wherever clients
    differ. A Gaussian without mass gets zeros."""
    total = mass.sum(0)
    share = mass / total.clamp_min(torch.finfo(mass.dtype).tiny)
    centre = torch.einsum("ia,iad->ad", share, means)
    if between:
        away = means - centre
        covariances = covariances + away[..., :, None] * away[..., None, :]
    return total, centre, torch.einsum("ia,iade->ade", share, covariances)


def standardising_map(count: float, total: Tensor, second: Tensor, n_features: int) -> tuple[Tensor, Tensor]:
    """shift (d,) and matrix (d, k) so that (h - shift) @ matrix is standardised and, for k < d, projected on
    the k leading principal axes of the standardised features; signs make each axis' largest entry positive.

    count, total, second: number of rows, sum of h (d,) and of h h^T (d, d), sums over all clients.
    n_features: k; the result has min(k, d). A feature with variance below 1e-10 is centred only."""
    shift = total / count
    covariance = second / count - shift[:, None] * shift[None]
    variance = covariance.diagonal()
    scale = torch.where(variance > 1e-10, variance, 1.0).sqrt()
    basis = torch.eye(len(total), dtype=total.dtype)
    if n_features < len(total):
        correlation = covariance / (scale[:, None] * scale[None])
        basis = torch.linalg.eigh(correlation).eigenvectors.flip(1)[:, :n_features]
        largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
        basis = basis * largest.sign()
    return shift, basis / scale[:, None]


def cluster_centroids(points: Tensor, counts: Tensor, M: int, seed: int) -> Tensor:
    """(M, d) k-means centroids of points (k, d), each counted as often as `counts` (k,) says, largest first.

    Raises ValueError, one line, for fewer different points than M."""
    different = len(points.unique(dim=0))
    if different < M:
        raise ValueError(
            f"fedgmm: clients sent {different} different centroids for {M} Gaussians, needs one each; lower "
            "n_gaussians"
        )
    repeated = points.repeat_interleave(counts.long(), 0)
    return kmeans_responsibilities(repeated, M, np.random.default_rng(seed))[1]
