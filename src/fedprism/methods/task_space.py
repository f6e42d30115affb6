"""Task coordinates of clients, their groups, and the weights of a clustered average (FedTAR, spec 5).

All in float64 and NumPy; N clients are rows. P holds the first r left singular vectors of the features
(centred or not), z_i = P^T (c_i - mean). Groups come from k-means on z, a_i = w_q(i) p_i / p(G_q(i)).

Deviations: basis centred by default (the uncentred one wastes its first direction on the mean); tau is
relative to the groups' mean squared distance; a group may weigh by its size; labels are in the order of each
group's first client. Rows enter k-means by distance to their mean, so neither the clients' order nor signs or
rotations of the coordinates change the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESTARTS = 20  # of k-means, spec P8
MOST_LLOYD_STEPS = 300
ENERGY = 0.95  # of the centred features, kept by the automatic rank
LARGEST_RANK = 4  # of the automatic choice, spec P4
NO_ENERGY = 1e-10  # singular values below this part of the features' largest are rounding
SAME = 1e-9  # coordinates closer than this part of the largest are one point
MOST_GROUPS = 8  # of the automatic choice, spec P8


@dataclass(frozen=True, eq=False)
class TaskSpace:
    """z: (N, r) coordinates. basis: (F, r) orthonormal P. spectrum: singular values of the centred features,
    falling. Signs: the entry of largest magnitude in each column of P is positive."""

    z: Floats
    basis: Floats
    spectrum: Floats

    @property
    def rank(self) -> int:
        """r."""
        return int(self.z.shape[1])

    @staticmethod
    def fit(
        features: ArrayLike,
        rank: int = 0,
        *,
        basis: Literal["centred", "uncentred", "full"] = "centred",
        coordinates: Literal["centred", "uncentred"] = "centred",
        p: ArrayLike | None = None,
    ) -> TaskSpace:
        """The space of (N, F) features. rank: r, 1..N-1; 0 = the smallest that holds 95 % of the centred
        energy, at most min(4, N - 2). basis: "full" keeps every centred direction. p: (N,) client weights
        of the mean, equal unless given. Raises ValueError, one line, for a rank out of range or N < 2."""
        c = np.asarray(features, dtype=np.float64)
        n = len(c)
        if n < 2:
            raise ValueError(f"task space: got {n} clients, needs at least 2")
        if rank > n - 1 or rank < 0:
            raise ValueError(
                f"task space: got r_task = {rank}, needs at most N - 1 = {n - 1} for N = {n} clients; lower "
                "r_task or set it to 0"
            )
        centred = c - shares(p, n) @ c
        _, spectrum, directions = np.linalg.svd(centred, full_matrices=False)
        solid = max(1, int((spectrum > NO_ENERGY * np.linalg.norm(c, 2)).sum()))
        if basis == "full":
            r = solid
        elif rank:
            r = rank
        else:
            energy = np.cumsum(spectrum**2) / max(float((spectrum**2).sum()), np.finfo(float).tiny)
            r = max(1, min(LARGEST_RANK, n - 2, solid, int(np.searchsorted(energy, ENERGY) + 1)))
        if basis == "uncentred":
            directions = np.linalg.svd(c, full_matrices=False)[2]
        axes = directions[: min(r, len(directions))].T
        axes = axes * np.where(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
        return TaskSpace((centred if coordinates == "centred" else c) @ axes, axes, spectrum)


def shares(p: ArrayLike | None, n: int) -> Floats:
    """(n,) weights that sum to 1; equal without p. Raises ValueError unless p is positive."""
    if p is None:
        return np.full(n, 1 / n)
    given = np.asarray(p, dtype=np.float64)
    if given.shape != (n,) or not (given > 0).all():
        raise ValueError(f"client weights: got {given.tolist()}, needs {n} positive numbers")
    normalised: Floats = given / given.sum()
    return normalised


# ---- groups --------------------------------------------------------------------------------------


def canonical(labels: Ints) -> Ints:
    """Labels renumbered in the order in which they first occur."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    renumbered: Ints = order[inverse.reshape(labels.shape)]
    return renumbered


def _squared(a: Floats, b: Floats) -> Floats:
    """(len(a), len(b)) squared distances."""
    distances: Floats = ((a[:, None] - b[None]) ** 2).sum(2)
    return distances


def n_distinct(z: Floats) -> int:
    """Number of distinct rows, up to rounding."""
    limit = (SAME * float(np.abs(z - z.mean(0)).max(initial=0.0))) ** 2
    kept: list[Floats] = []
    for row in z:
        if all(((row - other) ** 2).sum() > limit for other in kept):
            kept.append(row)
    return len(kept)


def inertia(z: Floats, labels: Ints, p: Floats) -> float:
    """Weighted sum of squared distances to the groups' weighted means."""
    total = 0.0
    for q in np.unique(labels):
        mine = labels == q
        total += float(p[mine] @ ((z[mine] - np.average(z[mine], 0, p[mine])) ** 2).sum(1))
    return total


def cluster(z: ArrayLike, groups: int, seed: int = 0, *, p: ArrayLike | None = None) -> tuple[Ints, str]:
    """k-means: (N,) canonical labels and a note, empty where `groups` groups were found.

    k-means++ starts, 20 of them, Lloyd's steps, the best kept. groups: Q >= 1, lowered to the number of
    distinct coordinates; 0 = the number in 2..min(8, N / 2) with the best silhouette. No group is empty."""
    at = np.asarray(z, dtype=np.float64)
    n = len(at)
    weight, distinct = shares(p, n), n_distinct(at)
    if groups == 0:
        choices = range(2, min(MOST_GROUPS, n // 2, distinct) + 1)
        found = [_kmeans(at, q, seed, weight) for q in choices]
        if not found:
            return np.zeros(n, dtype=np.int64), f"clusters: too few distinct clients to choose, one of {n}"
        return found[int(np.argmax([silhouette(at, labels) for labels in found]))], ""
    note = (
        f"clusters: {groups} asked for, {distinct} distinct task coordinates of {n} clients; used {distinct}"
    )
    return _kmeans(at, min(groups, distinct), seed, weight), note if groups > distinct else ""


def _kmeans(z: Floats, groups: int, seed: int, p: Floats) -> Ints:
    """Best of `RESTARTS` runs; groups at most the number of distinct rows."""
    n = len(z)
    order = np.argsort(((z - p @ z) ** 2).sum(1), kind="stable")  # neither ids nor rotations matter
    rows, weight, rng = z[order], p[order], np.random.default_rng(seed)
    best, least = np.zeros(n, dtype=np.int64), np.inf
    for _ in range(RESTARTS if groups > 1 else 1):
        labels = _lloyd(rows, _plus_plus(rows, groups, weight, rng), weight)
        value = inertia(rows, labels, weight)
        if value < least * (1 - 1e-12):
            best, least = labels, value
    back = np.empty(n, dtype=np.int64)
    back[order] = best
    return canonical(back)


def _plus_plus(z: Floats, groups: int, p: Floats, rng: np.random.Generator) -> Floats:
    """(groups, r) starting centres: rows drawn by p times squared distance to the nearest one so far."""
    chosen = [int(rng.choice(len(z), p=p))]
    while len(chosen) < groups:
        mass = p * _squared(z, z[chosen]).min(1)
        chosen.append(int(rng.choice(len(z), p=mass / mass.sum())))
    return z[chosen]


def _lloyd(z: Floats, centres: Floats, p: Floats) -> Ints:
    """Labels where Lloyd's steps stop; a group that empties takes the row farthest from its centre."""
    labels = np.full(len(z), -1)
    for _ in range(MOST_LLOYD_STEPS):
        distances = _squared(z, centres)
        new = distances.argmin(1)
        for q in range(len(centres)):
            if not (new == q).any():
                spare = np.bincount(new, minlength=len(centres))[new] > 1
                new[np.where(spare, distances[np.arange(len(z)), new], -1.0).argmax()] = q
        if (new == labels).all():
            break
        labels = new
        centres = np.stack([np.average(z[labels == q], 0, p[labels == q]) for q in range(len(centres))])
    return labels.astype(np.int64)


def silhouette(z: Floats, labels: Ints) -> float:
    """Mean silhouette: (b - a) / max(a, b), a and b mean distances to the own and the next group; 0 alone."""
    distances, total = np.sqrt(_squared(z, z)), 0.0
    for i, own in enumerate(labels):
        mine = labels == own
        if mine.sum() == 1:
            continue
        a = distances[i, mine].sum() / (mine.sum() - 1)
        b = min(distances[i, labels == q].mean() for q in np.unique(labels) if q != own)
        total += (b - a) / max(a, b, np.finfo(float).tiny)
    return float(total / len(z))


def group_weights(
    z: ArrayLike,
    labels: Ints,
    tau: float = 1.0,
    *,
    mode: Literal["relative", "absolute"] = "relative",
    size_aware: bool = False,
    p: ArrayLike | None = None,
) -> tuple[Floats, Floats]:
    """(Q,) weights of the groups, w_q ~ exp(-tau |z_q - z_center|^2), and (N,) weights a of the clients.

    tau >= 0; relative: divided by the mean squared distance of the groups. size_aware: times the group's
    share of p. Both results sum to 1 (spec 5.1, P6, P7)."""
    at = np.asarray(z, dtype=np.float64)
    weight = shares(p, len(at))
    groups = int(labels.max()) + 1
    size = np.bincount(labels, weight, groups)
    centres = np.stack([np.average(at[labels == q], 0, weight[labels == q]) for q in range(groups)])
    away = ((centres - weight @ at) ** 2).sum(1)
    if mode == "relative":
        away = away / away.mean() if away.mean() > 0 else away * 0
    score = -tau * away + (np.log(size) if size_aware else 0.0)
    w = np.exp(score - score.max())
    w /= w.sum()
    return w, w[labels] * weight / size[labels]
