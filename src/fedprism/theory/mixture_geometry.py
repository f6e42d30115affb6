"""Quadratic tasks with known optima: FedSEE's world in which every claim can be computed (spec 1 and 2).

N clients, M tasks, features phi = A x in R^r, outputs in R^l. A task's optimum is a matrix (l, r), a client's
optimum under squared loss and shared Phi = A A' is the barycentre of the task optima with its mixture.
Squared loss is |y - yhat|^2 without a factor 1/2, so L_m(theta) - L_m(theta*_m) = |theta - theta*_m|_Phi^2.

Everything is NumPy, float64 and a pure function of its arguments; randomness comes from the generator passed
in. The programs over the simplex are the ones that FedSEE ships (`methods.simplex`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from fedprism.methods.simplex import simplex_quadratic

Floats = NDArray[np.float64]
SPECTRA = ("geometric", "linear")


@dataclass(frozen=True, eq=False)
class Instance:
    """One world of linear tasks.

    A: (r, d) feature map, Phi = A A' positive definite. experts: (M, l, r) task optima. alpha: (N, M) client
    mixtures, rows sum to 1. sigma: noise of a label's entries, > 0."""

    A: Floats
    experts: Floats
    alpha: Floats
    sigma: float

    @cached_property
    def phi(self) -> Floats:
        """(r, r) second moment of the features."""
        return self.A @ self.A.T

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue of Phi."""
        values = np.linalg.eigvalsh(self.phi)
        return float(values[0]), float(values[-1])

    @property
    def kappa(self) -> float:
        """Condition number of Phi."""
        return self.spectrum[1] / self.spectrum[0]

    @cached_property
    def optima(self) -> Floats:
        """(N, l, r) client optima, the barycentres of the task optima."""
        optima: Floats = np.einsum("nm,mij->nij", self.alpha, self.experts)
        return optima

    @property
    def centre(self) -> Floats:
        """(l, r) mean of the task optima."""
        mean: Floats = self.experts.mean(0)
        return mean

    def with_mixtures(self, alpha: Floats) -> Instance:
        """The same tasks with other clients. alpha: (N, M)."""
        return replace(self, alpha=np.asarray(alpha, dtype=np.float64))


def make_instance(
    seed: int,
    *,
    d: int = 60,
    r: int = 16,
    l: int = 12,  # noqa: E741  the paper's letter
    M: int = 6,
    N: int = 12,
    kappa: float = 4.0,
    diam: float = 6.0,
    sigma: float = 0.5,
    eps: float = 0.05,
    conc: float = 0.5,
    anchors: bool = True,
    gamma: float | None = None,
    spectrum: str = "geometric",
) -> Instance:
    """Draw an instance (spec 2.1).

    d, r, l: inputs, features (r <= d), outputs. M tasks, N clients. kappa in [1, 1e8]: condition number of
    Phi, the smallest eigenvalue being 1. diam in [1e-6, 1e6]: largest Frobenius distance of two task optima.
    sigma in [1e-6, 1e6]: noise. eps in [0, 1/2): impurity of the anchors, client m < M has share 1 - eps of
    task m. conc in [1e-3, 1e6]: Dirichlet concentration of the other clients. anchors: False for a pool in
    which every client is drawn. gamma in [0, 1]: pull of every drawn client towards the uniform mixture
    (needs anchors=False); 1 makes all of them uniform. spectrum: spacing of the singular values of A,
    "geometric" or "linear".
    Feature map, task optima and mixtures have streams of their own: an instance with another eps or gamma has
    the same tasks. Raises ValueError, one line, for values out of range."""
    _check_sizes(seed=seed, d=d, r=r, l=l, M=M, N=N)
    _check_ranges(kappa=kappa, diam=diam, sigma=sigma, eps=eps, conc=conc, gamma=gamma)
    if r > d:
        raise ValueError(f"instance: r is {r}, needs at most d = {d}; lower r or raise d")
    if spectrum not in SPECTRA:
        raise ValueError(f"instance: spectrum is '{spectrum}', needs one of {', '.join(SPECTRA)}")
    if not isinstance(anchors, bool):
        raise ValueError(f"instance: anchors is {anchors!r}, needs true or false")
    if anchors and N < M:
        raise ValueError(f"instance: N is {N} with anchors, needs at least M = {M}; raise N or anchors=false")
    if anchors and gamma is not None:
        raise ValueError("instance: gamma needs anchors=false; an anchor has share 1 - eps of its task")
    map_rng, expert_rng, mixture_rng = (np.random.default_rng([seed, k]) for k in range(3))
    top = np.sqrt(kappa)
    s = np.geomspace(top, 1.0, r) if spectrum == "geometric" else np.linspace(top, 1.0, r)
    U = np.linalg.qr(map_rng.standard_normal((r, r)))[0]
    V = np.linalg.qr(map_rng.standard_normal((d, r)))[0]
    experts = expert_rng.standard_normal((M, l, r))
    experts -= experts.mean(0)
    if M > 1:
        experts *= diam / diameter(experts)
    if anchors:
        impurity = eps / (M - 1) if M > 1 else 0.0
        pure = np.full((M, M), impurity) + np.eye(M) * (1 - M * impurity)
        alpha = np.concatenate([pure, _dirichlet(conc, N - M, M, mixture_rng)])
    else:
        pull = 0.0 if gamma is None else gamma
        alpha = pull / M + (1 - pull) * _dirichlet(conc, N, M, mixture_rng)
    return Instance((U * s) @ V.T, experts, alpha, sigma)


def _dirichlet(conc: float, n: int, M: int, rng: np.random.Generator) -> Floats:
    return rng.dirichlet(np.full(M, conc), size=n) if n else np.zeros((0, M))


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 0 if name == "seed" else 1
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise ValueError(f"instance: {name} is {value!r}, needs a whole number of at least {least}")


def _check_ranges(
    *, kappa: float, diam: float, sigma: float, eps: float, conc: float, gamma: float | None
) -> None:
    ranges = {
        "kappa": (kappa, 1.0, 1e8, "at least 1 and at most 1e8"),
        "diam": (diam, 1e-6, 1e6, "at least 1e-6 and at most 1e6"),
        "sigma": (sigma, 1e-6, 1e6, "at least 1e-6 and at most 1e6"),
        "eps": (eps, 0.0, np.nextafter(0.5, 0), "at least 0 and less than 1/2"),
        "conc": (conc, 1e-3, 1e6, "at least 1e-3 and at most 1e6"),
        "gamma": (0.0 if gamma is None else gamma, 0.0, 1.0, "at least 0 and at most 1"),
    }
    for name, (value, low, high, needs) in ranges.items():
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not number or not np.isfinite(value) or not low <= value <= high:
            raise ValueError(f"instance: {name} is {value!r}, needs a number of {needs}")


# ---- data and estimators -------------------------------------------------------------------------


def sample_moments(
    instance: Instance, counts: Sequence[int], rng: np.random.Generator, *, law: str = "wishart"
) -> tuple[Floats, Floats]:
    """Sums S = sum phi phi' (r, r) and C = sum (y - W0 x) phi' (l, r) over samples of the tasks (spec 2.2).

    counts: samples of each task, (M,). law: "wishart" draws S of a task with at least r samples from its
    Wishart law (Bartlett's decomposition), the same law at a cost that does not grow with the count; "direct"
    draws features and noise one by one. The base map W0 cancels, so it does not occur."""
    _, l, r = instance.experts.shape  # noqa: E741
    if law not in ("wishart", "direct"):
        raise ValueError(f"sample_moments: law is '{law}', needs 'wishart' or 'direct'")
    half = np.linalg.cholesky(instance.phi)
    S, C = np.zeros((r, r)), np.zeros((l, r))
    for m, n in enumerate(np.asarray(counts, dtype=int).tolist()):
        if n == 0:
            continue
        if law == "wishart" and n >= r:
            T = np.tril(rng.standard_normal((r, r)), -1)
            T[np.diag_indices(r)] = np.sqrt(rng.chisquare(n - np.arange(r)))
            root = half @ T
            S_m = root @ root.T
            noise = rng.standard_normal((l, r)) @ root.T
        else:
            phi = half @ rng.standard_normal((r, n))
            S_m = phi @ phi.T
            noise = rng.standard_normal((l, n)) @ phi.T
        S += S_m
        C += instance.experts[m] @ S_m + instance.sigma * noise
    return S, C


def sample_uploads(instance: Instance, n: int, rng: np.random.Generator, *, law: str = "wishart") -> Floats:
    """(N, l, r) clients' least-squares estimates from n samples each (spec 2.2), n >= r. Raises ValueError
    if n is smaller: plain least squares is not defined then."""
    r = instance.phi.shape[0]
    if n < r:
        raise ValueError(f"uploads: got {n} samples per client, needs at least r = {r}")
    uploads = []
    for mixture in instance.alpha:
        counts = rng.multinomial(n, mixture / mixture.sum()).tolist()
        S, C = sample_moments(instance, counts, rng, law=law)
        uploads.append(np.linalg.solve(S, C.T).T)
    return np.stack(uploads)


def public_moments(
    instance: Instance, n: int | None, rng: np.random.Generator | None = None, *, law: str = "wishart"
) -> tuple[Floats, Floats]:
    """Second moments (M, r, r) and cross moments (M, l, r) of the tasks' public sets, as averages.

    n: examples of each task, >= 1, drawn from rng; None for the population (S = Phi, C = theta*_m Phi)."""
    M = len(instance.experts)
    if n is None:
        return np.broadcast_to(instance.phi, (M, *instance.phi.shape)), instance.experts @ instance.phi
    if n < 1 or rng is None:
        raise ValueError(f"public_moments: got n = {n}, needs at least 1 and a generator, or n = None")
    one = np.eye(M, dtype=int) * n
    moments = [sample_moments(instance, row.tolist(), rng, law=law) for row in one]
    return np.stack([S for S, _ in moments]) / n, np.stack([C for _, C in moments]) / n


# ---- programs over the simplex -------------------------------------------------------------------


def upload_programs(uploads: Floats, S: Floats, C: Floats) -> tuple[Floats, Floats]:
    """(K, N, N) G and (K, N) b of the programs min w'Gw - 2b'w over weights of the uploads (spec 2.3).

    uploads: (N, l, r). S: (K, r, r) second moments. C: (K, l, r) cross moments."""
    G = np.einsum("iab,kbc,jac->kij", uploads, S, uploads, optimize=True)
    return (G + G.transpose(0, 2, 1)) / 2, np.einsum("iab,kab->ki", uploads, C)


@dataclass(frozen=True, eq=False)
class Recovered:
    """weights: (M, N), rows on the simplex. experts: (M, l, r). iterations: of the solver. converged: whether
    every program reached its tolerance."""

    weights: Floats
    experts: Floats
    iterations: int
    converged: bool


def extract(
    uploads: Floats, S: Floats, C: Floats, *, tolerance: float = 1e-10, limit: int = 20_000
) -> Recovered:
    """Experts as the best convex combinations of the uploads on each task's squared loss (spec 2.3).

    Arguments as in `upload_programs`. tolerance, limit: of `simplex_quadratic`. Experts are unique where S is
    positive definite; weights may not be."""
    G, b = upload_programs(uploads, S, C)
    found = simplex_quadratic(torch.from_numpy(G), torch.from_numpy(b), tolerance=tolerance, limit=limit)
    weights = found.weights.numpy()
    return Recovered(weights, np.einsum("mi,iab->mab", weights, uploads), found.iterations, found.converged)


def estimate_mixtures(uploads: Floats, experts: Floats, phi: Floats) -> Floats:
    """(N, M) barycentric mixture estimates argmin_a |theta_i - sum_m a_m theta_m|_Phi over the simplex
    (spec 2.4). uploads: (N, l, r). experts: (M, l, r). phi: (r, r)."""
    every = np.broadcast_to(phi, (len(uploads), *phi.shape))
    G, b = upload_programs(experts, every, uploads @ phi)
    weights: Floats = simplex_quadratic(torch.from_numpy(G), torch.from_numpy(b)).weights.numpy()
    return weights


# ---- estimators that see the pool alone ----------------------------------------------------------


def successive_projection(uploads: Floats, M: int, *, lift: bool = True) -> Floats:
    """(M, l, r) uploads chosen as vertices of the pool, in the order found (spec 2.5).

    lift: append a constant coordinate of the mean upload norm, without which centred experts are linearly
    dependent and the last vertex is noise. Raises ValueError if there are fewer uploads than M."""
    if len(uploads) < M:
        raise ValueError(f"successive projection: got {len(uploads)} uploads, needs at least M = {M}")
    rows = uploads.reshape(len(uploads), -1)
    if lift:
        rows = np.concatenate([rows, np.full((len(rows), 1), np.linalg.norm(rows, axis=1).mean())], 1)
    chosen = []
    for _ in range(M):
        norms = np.linalg.norm(rows, axis=1)
        best = int(norms.argmax())
        chosen.append(best)
        direction = rows[best] / max(float(norms[best]), 1e-300)
        rows = rows - np.outer(rows @ direction, direction)
    return uploads[chosen]


def cluster_centres(uploads: Floats, M: int, rng: np.random.Generator, *, restarts: int = 10) -> Floats:
    """(M, l, r) centres of k-means with k-means++ starts, the best of `restarts` (spec 2.5).

    Raises ValueError for fewer than M distinct uploads and for values that are not finite."""
    rows = uploads.reshape(len(uploads), -1)
    if not np.isfinite(rows).all():
        raise ValueError("cluster centres: got uploads that are not finite, needs finite numbers; drop those")
    distinct = len(np.unique(rows, axis=0))
    if distinct < M:
        raise ValueError(f"cluster centres: got {distinct} distinct uploads, needs at least M = {M}")
    best, least = rows[:M], np.inf
    for _ in range(restarts):
        centres, labels = kmeans2(rows, M, minit="++", rng=rng, iter=100)
        cost = float(((rows - centres[labels]) ** 2).sum())
        if cost < least:
            best, least = centres, cost
    return best.reshape(M, *uploads.shape[1:])


# ---- errors --------------------------------------------------------------------------------------


def identity_error(found: Floats, experts: Floats) -> float:
    """max_m |found_m - theta*_m|_F in the order given (spec 2.6). Both (M, l, r)."""
    return float(distances(found, experts).max())


def vertex_set_error(found: Floats, experts: Floats) -> float:
    """min over matchings of the largest |found_pi(m) - theta*_m|_F (spec 2.6). Both (M, l, r)."""
    return bottleneck(np.linalg.norm(found[:, None] - experts[None], axis=(2, 3)))


def bottleneck(cost: Floats) -> float:
    """Smallest t such that the entries <= t of the (M, M) matrix hold a perfect matching: bottleneck
    assignment, exact, by bisection over the entries with a bipartite matching each."""
    levels = np.unique(cost)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        match = maximum_bipartite_matching(csr_matrix(cost <= levels[middle]), perm_type="column")
        low, high = (low, middle) if (match >= 0).all() else (middle + 1, high)
    return float(levels[low])


def distances(left: Floats, right: Floats) -> Floats:
    """Frobenius distances of matched matrices: (K, l, r) and (K, l, r) or (l, r) -> (K,)."""
    norms: Floats = np.linalg.norm(left - right, axis=(-2, -1))
    return norms


def phi_norm2(C: Floats, phi: Floats) -> Floats:
    """|C|_Phi^2 = tr(C Phi C'), the risk metric. C: (..., l, r). Returns (...)."""
    values: Floats = np.einsum("...ab,bc,...ac->...", C, phi, C)
    return values


# ---- geometry ------------------------------------------------------------------------------------


def pairwise(experts: Floats) -> Floats:
    """(M(M-1)/2,) Frobenius distances between task optima."""
    return np.array([np.linalg.norm(a - b) for a, b in combinations(experts, 2)])


def diameter(experts: Floats) -> float:
    """Largest distance between two task optima; 0 with fewer than two."""
    return float(pairwise(experts).max(initial=0.0))


def separation(experts: Floats) -> float:
    """Smallest distance between two task optima; infinite with fewer than two."""
    return float(pairwise(experts).min(initial=np.inf))


def affine_height(experts: Floats) -> float:
    """h = min_m of the distance from theta*_m to the affine hull of the others (spec 2.7); needs M >= 2."""
    flat = experts.reshape(len(experts), -1)
    heights = []
    for m in range(len(flat)):
        others = np.delete(flat, m, axis=0)
        spread, gap = (others[1:] - others[0]).T, flat[m] - others[0]
        weights = np.linalg.lstsq(spread, gap, rcond=None)[0]
        heights.append(float(np.linalg.norm(gap - spread @ weights)))
    return min(heights)


def mixing_gaps(instance: Instance) -> Floats:
    """(N,) G_i = sum_m alpha_im |theta*_i - theta*_m|_Phi^2: what one model loses to an oracle (spec 1)."""
    spread = phi_norm2(instance.optima[:, None] - instance.experts[None], instance.phi)
    gaps: Floats = (instance.alpha * spread).sum(1)
    return gaps


def constant_router_excess(instance: Instance, p: Floats, experts: Floats | None = None) -> Floats:
    """(N,) risk above the client's optimum of routing every query with fixed weights p over the experts.

    p: (N, M) or (M,). experts: (M, l, r), the true ones unless given."""
    used = instance.experts if experts is None else experts
    mixed = np.einsum("...m,mij->...ij", p, used)
    return phi_norm2(mixed - instance.optima, instance.phi)


def relative_dispersion(second_moments: Floats) -> float:
    """rho_Phi = max |Phi_m - Phi_m'|_2 / min_m sigma_min(Phi_m): how far tasks are from sharing one second
    moment; a client's optimum lies within rho_Phi diam of its barycentre (spec 1). second_moments: (M, r, r).
    Infinite if one of them is singular to working precision."""
    values = [np.linalg.eigvalsh(S) for S in second_moments]
    floor, top = min(float(v[0]) for v in values), max(float(v[-1]) for v in values)
    gap = max((float(np.linalg.norm(a - b, 2)) for a, b in combinations(second_moments, 2)), default=0.0)
    return gap / floor if floor > 1e-12 * top else float("inf")
