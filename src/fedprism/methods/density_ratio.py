"""Density ratios between client components: the numerical core of FedSPM, in the log domain throughout.

Pure functions of features and tables; they know no model, no client and no round, and the theory calls the
same ones. m is the number of clients, C of components, d of routing features, n of rows (not all of one
client's unless said), K of classes. gamma (m, C) and xi (m, C, d) are the tables of all clients,
tau (m, C) the responsibility totals, whose rows sum to the clients' sizes. Any float dtype.
Sources: FedSPM Sec. 2.3 and App. B, spec sections 2 to 5, 7 and 8.3.

*Deviations.*
- A total below 1e-6 of its client's size counts as that much, a mixing weight below 1e-6 as 1e-6, in every
  logarithm: zero would be absorbing. The two floors agree, so the routing posterior stays the softmax of the
  loss (spec 7, row 4).
- Ties of classes, votes and clients go to the lowest index.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import ClusterError, kmeans2
from scipy.optimize import linear_sum_assignment
from torch import Tensor

FLOOR = 1e-6  # smallest mixing weight inside a logarithm
ROW_TOLERANCE = 1e-2  # how far a row of responsibilities may be from 1: what bfloat16 loses


def tilt(gamma: Tensor, xi: Tensor, h: Tensor) -> Tensor:
    """Log density ratios gamma_ic + xi_ic . h_c(x), (n, m, C) (spec 1.2).

    gamma: (m, C). xi: (m, C, d). h: (n, d) from a shared encoder, or (n, C, d) from one per component. Raises
    ValueError, one line, if the shapes do not fit."""
    m, C, d = xi.shape if xi.ndim == 3 else (-1, -1, -1)
    if gamma.shape != (m, C) or h.shape[1:] not in ((d,), (C, d)):
        shapes = f"gamma {tuple(gamma.shape)}, xi {tuple(xi.shape)}, h {tuple(h.shape)}"
        raise ValueError(f"tilt: got {shapes}; needs (m, C), (m, C, d), and (n, d) or (n, C, d)")
    return gamma + torch.einsum("nd,icd->nic" if h.ndim == 2 else "ncd,icd->nic", h, xi)


def own_rows(tilts: Tensor, owner: Tensor | int) -> Tensor:
    """Each example's entries of its own client, (n, C). tilts: (n, m, C). owner: (n,) clients, or one."""
    n, _, C = tilts.shape
    place = torch.as_tensor(owner, device=tilts.device).expand(n)
    return tilts.gather(1, place[:, None, None].expand(n, 1, C)).squeeze(1)


def floored_totals(tau: Tensor, *, check: bool = True) -> Tensor:
    """tau with entries below 1e-6 of their row's sum raised to it, (m, C): what may stand in a logarithm.

    check: look at the values; impossible inside `vmap`. Raises ValueError, one line, for a negative entry or
    a row without a positive, finite sum."""
    size = tau.sum(-1, keepdim=True)
    if check:
        if bool((tau < 0).any()):
            raise ValueError(f"totals: smallest is {float(tau.min()):g}, needs >= 0; sum responsibilities")
        wrong = ~(torch.isfinite(size) & (size > 0))
        if bool(wrong.any()):
            row = int(wrong.reshape(-1).nonzero()[0])
            raise ValueError(
                f"totals: client {row} has {float(size.reshape(-1)[row]):g} in all, needs a positive finite "
                "sum; leave clients without examples out"
            )
    return tau.maximum(FLOOR * size)


def mixing_weights(tau: Tensor) -> Tensor:
    """pi_ic = tau_ic / n_i, unfloored, (m, C); rows sum to 1 (Eq. 9). Raises as `floored_totals` does."""
    floored_totals(tau)
    return tau / tau.sum(-1, keepdim=True)


def log_mixing(pi: Tensor) -> Tensor:
    """log pi with pi floored at 1e-6, any shape."""
    return pi.clamp_min(FLOOR).log()


def responsibilities(label_log_probs: Tensor, own_tilt: Tensor, pi: Tensor) -> Tensor:
    """E-step: w_jc proportional to pi_c exp(tilt_jc) P_c(y_j | x_j), rows sum to 1, (n, C) (Eq. 7, spec 2.2).

    label_log_probs: (n, C) log P_c(y_j | x_j) in nats. own_tilt: (n, C), see `own_rows`. pi: (C,) of one
    client, or (n, C). Raises ValueError, one line, where a row has no finite term."""
    w = torch.softmax(log_mixing(pi) + own_tilt + label_log_probs, dim=1)
    lost = ~torch.isfinite(w).all(1)
    if bool(lost.any()):
        raise ValueError(
            f"responsibilities: {int(lost.sum())} of {len(w)} rows are not numbers, needs a finite "
            "log-probability in each; lower the learning rate"
        )
    return w


def pair_logits(tilts: Tensor, tau: Tensor, *, check: bool = True) -> Tensor:
    """s_ic(x) = log tau_ic + tilt, (n, m, C): logits of a softmax over client-component pairs (spec 2.3)."""
    return floored_totals(tau, check=check).log() + tilts


def drm_loss(tilts: Tensor, owner: Tensor | int, w: Tensor, tau: Tensor, *, check: bool = True) -> Tensor:
    """Negative surrogate per example, (n,), in nats: log sum_i'c tau_i'c e_i'c(x) - sum_c w_c log e_ic(x).

    Its mean over all rows is -Q2~ / n (Sec. 2.3). tilts: (n, m, C). owner: (n,) clients, or one for all
    rows. w: (n, C), rows sum to 1. tau: (m, C), constant. check: look at w and tau; impossible inside `vmap`.
    Raises ValueError, one line, for rows of w that do not sum to 1 and as `floored_totals` does."""
    if check:
        off = (w.detach().sum(1) - 1).abs()
        if not bool((off <= ROW_TOLERANCE).all()):
            row = int((~(off <= ROW_TOLERANCE)).nonzero()[0])
            raise ValueError(
                f"drm_loss: row {row} of w sums to {float(w[row].sum()):g}, needs 1; use `responsibilities`"
            )
    everyone = pair_logits(tilts, tau, check=check).flatten(1).logsumexp(1)
    return everyone - (w * own_rows(tilts, owner)).sum(1)


def monitor(tilts: Tensor, owner: Tensor | int, label_log_probs: Tensor, tau: Tensor) -> Tensor:
    """Negative log-probability of (owner, label) given the features, per example, (n,), nats; its mean is J
    (spec 2.5), which EM drives down. Arguments as in `drm_loss` and `responsibilities`."""
    s = pair_logits(tilts, tau)
    return s.flatten(1).logsumexp(1) - (own_rows(s, owner) + label_log_probs).logsumexp(1)


# ---- inference (spec 4) --------------------------------------------------------------------------


def routing_scores(
    tilts: Tensor, pi: Tensor, rho: Tensor, prior: Literal["fraction", "uniform"] = "fraction"
) -> Tensor:
    """log rho_i + log sum_c pi_ic e_ic(x), (n, m); without log rho for the uniform prior (Eq. 10, spec 4).

    tilts: (n, m, C). pi: (m, C). rho: (m,) training fractions, > 0. Raises ValueError for another prior."""
    if prior not in ("fraction", "uniform"):
        raise ValueError(f"routing: prior is '{prior}', needs 'fraction' or 'uniform'")
    scores = (log_mixing(pi) + tilts).logsumexp(2)
    return scores + rho.log() if prior == "fraction" else scores


def routing_posterior(scores: Tensor) -> Tensor:
    """P(client | x), rows sum to 1, (n, m). scores: (n, m) of `routing_scores`.

    With the fraction prior it is the softmax of `pair_logits`, summed over components (spec 2.3)."""
    return scores.softmax(1)


def first_argmax(scores: Tensor) -> Tensor:
    """Index of the largest entry along the last dimension, the lowest among ties, (...).

    scores: (..., k). Raises ValueError, one line, if an entry is not a number."""
    if bool(scores.isnan().any()):
        raise ValueError(f"first_argmax: {int(scores.isnan().sum())} scores are not numbers, needs none")
    k = scores.shape[-1]
    place = torch.arange(k, device=scores.device)
    return place.where(scores == scores.amax(-1, keepdim=True), k).amin(-1)


def component_weights(own_tilt: Tensor, pi: Tensor) -> Tensor:
    """q_c(x) proportional to pi_c e_c(x), rows sum to 1, (n, C): a client's components given features alone.

    own_tilt: (n, C). pi: (C,) of the client, or (n, C)."""
    return (log_mixing(pi) + own_tilt).softmax(1)


def mix_predictions(q: Tensor, class_log_probs: Tensor) -> Tensor:
    """log sum_c q_c(x) P_c(k | x), (n, K): probabilities are mixed, not logits (spec 4).

    q: (n, C), rows sum to 1. class_log_probs: (n, C, K)."""
    return (q.log()[:, :, None] + class_log_probs).logsumexp(1)


def majority_vote(votes: Tensor, n_classes: int) -> Tensor:
    """The class with most votes, the lowest among ties, (n,) (spec 5). votes: (n, m) classes, 0 <= . < K."""
    return first_argmax(torch.nn.functional.one_hot(votes, n_classes).sum(1))


# ---- scale of the ratios (spec 2.4, 8.3) ---------------------------------------------------------


def log_pair_sums(tilts: Tensor, tau: Tensor) -> Tensor:
    """log sum_j softmax_ic(s(x_j)) over the given rows, (m, C): one client's part of a calibration sweep.

    tilts: (n, m, C). tau: (m, C) of all clients."""
    s = pair_logits(tilts, tau)
    return (s - s.flatten(1).logsumexp(1)[:, None, None]).logsumexp(0)


def calibrate_gamma(gamma: Tensor, tau: Tensor, parts: Tensor) -> Tensor:
    """One sweep towards constraints that hold: gamma + log tau_ic - log sum_ij softmax_ic(s(x_ij)), (m, C).

    parts: (k, m, C), the clients' `log_pair_sums` for this gamma. Totals are normalised on both sides, so
    that scaling tau moves nothing and the sweep has a fixed point in spite of the floor."""
    wanted, found = floored_totals(tau).log(), parts.logsumexp(0)
    return gamma + (wanted - wanted.logsumexp((0, 1))) - (found - found.logsumexp((0, 1)))


def log_inverse_sum(tilts: Tensor, tau: Tensor) -> Tensor:
    """log sum_j 1 / den_j with den_j = sum_ic tau_ic e_ic(x_j), scalar: one client's part of the shift.

    The floored totals are scaled to the sum of tau, the number of all rows; else a calibrated gamma could not
    meet the ratio constraints and sum_ij 1 / den_ij = 1 together. Arguments as in `log_pair_sums`."""
    scale = floored_totals(tau).sum().log() - tau.sum().log()
    return (scale - pair_logits(tilts, tau).flatten(1).logsumexp(1)).logsumexp(0)


def canonical_shift(gamma: Tensor, parts: Tensor) -> Tensor:
    """gamma + a with sum_ij 1 / den_ij = 1 afterwards, (m, C): the gauge in which the baseline's masses
    1 / den_ij sum to 1 (spec 2.4). parts: (k,), the clients' `log_inverse_sum` for this gamma."""
    return gamma + parts.logsumexp(0)


# ---- first responsibilities from k-means (spec 10b) ----------------------------------------------


def _spread_seeds(rows: NDArray[np.float64], C: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """C different rows, each drawn with probability as its squared distance from those before (k-means++)."""
    if not 1 <= C <= len(rows):
        raise ValueError(f"k-means: C is {C} for {len(rows)} rows, needs 1 to that many; lower C")
    seeds = rows[[rng.integers(len(rows))]]
    far = ((rows - seeds[0]) ** 2).sum(1)
    while len(seeds) < C:
        if not far.any():
            raise ValueError(
                f"k-means: C is {C} for {len(seeds)} different rows, needs at most as many; lower C"
            )
        seeds = np.vstack([seeds, rows[rng.choice(len(rows), p=far / far.sum())]])
        far = np.minimum(far, ((rows - seeds[-1]) ** 2).sum(1))
    return seeds


def kmeans_responsibilities(
    x: Tensor, C: int, rng: np.random.Generator, *, restarts: int = 5, iterations: int = 50
) -> tuple[Tensor, Tensor]:
    """Hard responsibilities (n, C) from k-means on one client's rows, and the centroids (C, p).

    Components are numbered by falling size, equal sizes by their first row. x: (n, ...) pixels or features,
    flattened to p numbers a row. rng: the only randomness (k-means++ starts). The start with the smallest
    within-cluster sum of squares wins. Raises ValueError, one line, for fewer different rows than components
    and if every start loses a cluster."""
    rows = x.detach().flatten(1).cpu().double().numpy()
    best: tuple[float, NDArray[np.intp], NDArray[np.float64]] | None = None
    for _ in range(restarts):
        seeds = _spread_seeds(rows, C, rng)
        try:
            centroids, label = kmeans2(rows, seeds, iter=iterations, minit="matrix", missing="raise")
        except ClusterError:  # a cluster ran empty: this start is out
            continue
        spread = float(((rows - centroids[label]) ** 2).sum())
        if best is None or spread < best[0]:
            best = spread, label, centroids
    if best is None:
        raise ValueError(f"k-means: none of {restarts} starts kept {C} clusters, needs one; lower C")
    _, label, centroids = best
    size = np.bincount(label, minlength=C)
    order = sorted(range(C), key=lambda c: (-int(size[c]), int(np.argmax(label == c))))
    w = torch.from_numpy((label[:, None] == np.array(order)[None]).astype(np.float64))
    return w.to(x), torch.from_numpy(centroids[order]).to(x)


def match_centroids(local: Tensor, reference: Tensor) -> Tensor:
    """Order (C,) of the local components that brings them closest to the reference.

    local[order[c]] belongs to reference[c], with the smallest sum of squared distances over all matchings.

    local, reference: (C, p). For encoders per component, whose index must mean the same everywhere."""
    if local.shape != reference.shape:
        raise ValueError(
            f"centroids: got {tuple(local.shape)} and {tuple(reference.shape)}, needs equal shapes; use one C"
        )
    cost = torch.cdist(reference.double(), local.double()).square().cpu().numpy()
    return torch.as_tensor(linear_sum_assignment(cost)[1], device=local.device)
