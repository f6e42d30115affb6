"""The exact profile likelihood behind FedSPM's surrogate, and a world whose answers are known.

Central access to all features; NumPy in float64 around the shipped functions of `methods.density_ratio`.
n rows of m clients, C components, d features, K classes; `tilts` (n, m, C) are log density ratios, `owner`
(n,) says whose a row is, w (n, C) are responsibilities, tau (m, C) their totals. "Per sample" means divided
by n. Sources: FedSPM Sec. 2, App. C and D.4; spec sections 2, 8 and 10a.

*Deviations.*
- Bridge errors solve the multipliers at both ends of a round instead of once: where the scale of gamma
  depends on tau (every mode but "raw") the end of a round is not the start of the next.
- The exact gradient |grad F|^2 uses responsibilities recomputed at the evaluated gamma, so that the identity
  of Fisher holds in every mode; |grad f|^2 uses the round's, as defined.
- The Gaussian world has unit covariance and `h` = identity; whitening reaches it from any common covariance.
  Its means and heads are fixed numbers, so that routing by Bayes (0.765) and without components (0.739) are
  close to the reference world's (0.764 and 0.735), which is not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares, root
from scipy.special import log_softmax, logsumexp, rel_entr, softmax
from torch import Tensor

from fedprism.methods import density_ratio as ratio
from fedprism.theory.mixture_geometry import Floats

Ints = NDArray[np.intp]
Mode = Literal["raw", "shift", "calibrated"]

RESIDUAL = 1e-8  # of a Lagrange equation, per sample
MASS = 1e-6  # how far the masses may be from 1
LARGEST = 1e3  # of a multiplier
DIVERGED = 1e6  # multipliers beyond this do not come back: 0 lies outside the hull


def as_tensor(a: ArrayLike) -> Tensor:
    """float64 tensor of an array, integers as int64; shares memory where it can."""
    array = np.ascontiguousarray(a)
    return torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "iu" else np.float64, copy=False))


@dataclass(frozen=True, eq=False)
class Tables:
    """Density-ratio tables. gamma: (m, C). xi: (m, C, d)."""

    gamma: Floats
    xi: Floats

    def tilts(self, h: Floats) -> Floats:
        """(n, m, C) log density ratios at features h, (n, d) or (n, C, d)."""
        out: Floats = ratio.tilt(as_tensor(self.gamma), as_tensor(self.xi), as_tensor(h)).numpy()
        return out


# ---- multipliers ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Feasible:
    """Multipliers that give a distribution. multipliers: (m, C). residual: largest Lagrange equation per
    sample. mass: sum of the baseline's masses. smallest: denominator. iterations: of the solver."""

    multipliers: Floats
    residual: float
    mass: float
    smallest: float
    iterations: int


@dataclass(frozen=True, eq=False)
class Infeasible:
    """No distribution: why, and where the solver stopped (fields as in Feasible)."""

    reason: str
    multipliers: Floats
    residual: float
    mass: float
    smallest: float
    iterations: int


Solution = Feasible | Infeasible


def accept(tilts: Floats, multipliers: Floats, iterations: int = 0) -> Solution:
    """The acceptance rule: multipliers count only with residual < 1e-8 per sample, positive denominators,
    masses that sum to 1 within 1e-6 and entries below 1e3 (spec 8.2).

    tilts: (n, m, C). multipliers: (m, C). A residual alone accepts multipliers at infinity."""
    with np.errstate(all="ignore"):
        excess = np.expm1(tilts).reshape(len(tilts), -1)
        den = 1 + excess @ multipliers.ravel()
        residual = float(np.abs((excess / den[:, None]).sum(0)).max()) / len(tilts)
        mass = float((1 / den).mean())
    largest, smallest = float(np.abs(multipliers).max()), float(den.min())
    rules = [
        (np.isfinite(residual + largest + smallest), "density ratios or multipliers are not finite"),
        (largest < LARGEST, f"multipliers reach {largest:.3g}, 0 is outside the hull of the ratios less 1"),
        (smallest > 0, f"smallest denominator is {smallest:.3g}, not a distribution"),
        (residual < RESIDUAL, f"residual {residual:.3g} per sample"),
        (abs(mass - 1) < MASS, f"masses sum to {mass:.6g}"),
    ]
    for holds, reason in rules:
        if not holds:
            return Infeasible(reason, multipliers, residual, mass, smallest, iterations)
    return Feasible(multipliers, residual, mass, smallest, iterations)


def calibrated_multipliers(tau: Floats) -> Floats:
    """tau / n with the loss's floor, scaled to sum to 1, (m, C): the multipliers where gamma is optimal."""
    floored = ratio.floored_totals(as_tensor(tau))
    out: Floats = (floored / floored.sum()).numpy()
    return out


def solve_multipliers(tilts: Floats, tau: Floats, *, limit: int = 200) -> Solution:
    """Multipliers by damped Newton on the convex D(lambda) = -sum log(1 + sum lambda (e - 1)).

    tilts: (n, m, C). tau: (m, C) >= 0; the start tau / n is always inside the domain. Steps solve a least
    squares problem, the smallest one where components coincide, and are halved until all denominators stay
    positive and D falls. Diverging multipliers mean that no solution exists (spec 8.2)."""
    with np.errstate(over="ignore"):
        excess = np.expm1(tilts).reshape(len(tilts), -1)
    start = calibrated_multipliers(tau).ravel()
    point = start
    if not np.isfinite(excess).all():
        return accept(tilts, start.reshape(tilts.shape[1:]))
    size = np.abs(excess).max(0)
    excess = excess / np.where(size > 0, size, 1.0)  # columns of one size; undone on return
    point = point * size
    den = 1 + excess @ point
    used = 0
    while used < limit:
        used += 1
        rows = excess / den[:, None]
        step = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
        move = excess @ step
        decrement = float(((move / den) ** 2).sum())
        if decrement <= 1e-26 * len(rows):
            break
        t = 1.0
        while t > 1e-12:
            relative = t * move / den
            if relative.min() > -1 and -np.log1p(relative).sum() <= -1e-4 * t * decrement + 1e-15 * len(rows):
                break
            t /= 2
        point = point + t * step
        den = 1 + excess @ point
        if t <= 1e-12 or np.abs(point / np.where(size > 0, size, 1.0)).max() > DIVERGED:
            break
    multipliers = np.where(size > 0, point / np.where(size > 0, size, 1.0), start)
    return accept(tilts, multipliers.reshape(tilts.shape[1:]), used)


def ask_scipy(
    tilts: Floats, start: Floats, method: Literal["hybr", "trf"], *, limit: int = 2000
) -> tuple[Floats, bool, int]:
    """What `scipy.optimize.root` (hybr) or `least_squares` (trf) finds for the same system, whether it calls
    that a success, and its evaluations. They know no positivity: judge by `accept`.

    start: (m, C) multipliers, tau / n for a fair comparison."""
    with np.errstate(all="ignore"):
        excess = np.expm1(tilts).reshape(len(tilts), -1)

        def equations(point: Floats) -> Floats:
            out: Floats = (excess / (1 + excess @ point)[:, None]).mean(0)
            return out

        def slopes(point: Floats) -> Floats:
            rows = excess / (1 + excess @ point)[:, None]
            out: Floats = -(rows.T @ rows) / len(rows)
            return out

        if method == "hybr":
            found = root(equations, np.ravel(start), jac=slopes, method="hybr", options={"maxfev": limit})
        else:
            found = least_squares(
                equations, np.ravel(start), jac=slopes, method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15,
                max_nfev=limit,
            )  # fmt: skip
    return np.asarray(found.x).reshape(tilts.shape[1:]), bool(found.success), int(found.nfev)


def solve_with_scipy(
    tilts: Floats, start: Floats, method: Literal["hybr", "trf"], *, limit: int = 2000
) -> Solution:
    """The answer of `ask_scipy` under the acceptance rule, whatever SciPy says of it."""
    multipliers, _, used = ask_scipy(tilts, start, method, limit=limit)
    return accept(tilts, multipliers, used)


# ---- objectives and gradients --------------------------------------------------------------------


def own(tilts: Floats, owner: Ints) -> Floats:
    """(n, C) entries of a row's own client."""
    out: Floats = ratio.own_rows(as_tensor(tilts), as_tensor(owner)).numpy()
    return out


def expectation_step(label_log_probs: Floats, tilts: Floats, owner: Ints, pi: Floats) -> Floats:
    """Responsibilities (n, C). label_log_probs: (n, C). pi: (m, C)."""
    own_tilt = as_tensor(own(tilts, owner))
    out: Floats = ratio.responsibilities(as_tensor(label_log_probs), own_tilt, as_tensor(pi[owner])).numpy()
    return out


def totals(w: Floats, owner: Ints, m: int) -> Floats:
    """tau (m, C): responsibilities summed over each client's rows."""
    out = np.zeros((m, w.shape[1]))
    np.add.at(out, owner, w)
    return out


def label_objective(label_log_probs: Floats, w: Floats) -> float:
    """Q1 = sum w log P(y | x), nats. label_log_probs, w: (n, C)."""
    return float((w * label_log_probs).sum())


def surrogate(tilts: Floats, owner: Ints, w: Floats, tau: Floats) -> float:
    """Q2~, nats: the shipped loss, summed and negated (spec 2.3)."""
    loss = ratio.drm_loss(as_tensor(tilts), as_tensor(owner), as_tensor(w), as_tensor(tau))
    return -float(loss.sum())


def drm_objective(tilts: Floats, owner: Ints, w: Floats, multipliers: Floats) -> float:
    """Q2, nats, at given multipliers (m, C); without the constant -n log n (spec 2.2)."""
    den = 1 + np.expm1(tilts).reshape(len(tilts), -1) @ multipliers.ravel()
    return float((w * own(tilts, owner)).sum() - np.log(den).sum())


def profile_log_likelihood(
    tilts: Floats, owner: Ints, label_log_probs: Floats, pi: Floats, multipliers: Floats
) -> float:
    """Profile log empirical likelihood, nats, with the masses r* of the multipliers (spec 2.1).

    label_log_probs: (n, C). pi: (m, C), floored as in the E-step."""
    den = 1 + np.expm1(tilts).reshape(len(tilts), -1) @ multipliers.ravel()
    log_pi = ratio.log_mixing(as_tensor(pi)).numpy()[owner]
    mixture = logsumexp(log_pi + own(tilts, owner) + label_log_probs, axis=1)
    return float(mixture.sum() - np.log(den).sum() - len(den) * np.log(len(den)))


def mean_monitor(tilts: Floats, owner: Ints, label_log_probs: Floats, tau: Floats) -> float:
    """J, nats (spec 2.5)."""
    each = ratio.monitor(as_tensor(tilts), as_tensor(owner), as_tensor(label_log_probs), as_tensor(tau))
    return float(each.mean())


def _place(w: Floats, owner: Ints, m: int) -> Floats:
    """(n, m, C): w on the own client's row, zero elsewhere."""
    out = np.zeros((len(w), m, w.shape[1]))
    out[np.arange(len(w)), owner] = w
    return out


def surrogate_pull(tilts: Floats, owner: Ints, w: Floats, tau: Floats) -> Floats:
    """dQ2~ / d tilt, (n, m, C): responsibilities less the softmax over pairs (spec 2.3)."""
    logits = ratio.pair_logits(as_tensor(tilts), as_tensor(tau)).numpy()
    out: Floats = _place(w, owner, tilts.shape[1]) - softmax(logits, axis=(1, 2))
    return out


def exact_pull(tilts: Floats, owner: Ints, w: Floats, multipliers: Floats) -> Floats:
    """dQ2 / d tilt, (n, m, C), with the multipliers held fixed: w - lambda e / den* (spec 8.1).

    With posterior responsibilities it is the derivative of the profile likelihood as well (Fisher)."""
    den = 1 + np.expm1(tilts).reshape(len(tilts), -1) @ multipliers.ravel()
    return _place(w, owner, tilts.shape[1]) - multipliers * np.exp(tilts) / den[:, None, None]


@dataclass(frozen=True, eq=False)
class Gradient:
    """gamma: (m, C). xi: (m, C, d). h: like the features; a linear encoder h = Vx has h' x."""

    gamma: Floats
    xi: Floats
    h: Floats

    def squared_norm(self, n: int) -> float:
        """Squared norm over (gamma, xi) of the gradient per sample."""
        return float((self.gamma**2).sum() + (self.xi**2).sum()) / n**2


def gradient(pull: Floats, tables: Tables, h: Floats) -> Gradient:
    """Chain rule from the derivative by the tilts to tables and features. pull: (n, m, C)."""
    rows = "nd" if h.ndim == 2 else "ncd"
    xi = np.einsum(f"nic,{rows}->icd", pull, h, optimize=True)
    return Gradient(pull.sum(0), xi, np.einsum(f"nic,icd->{rows}", pull, tables.xi, optimize=True))


# ---- the scale of gamma --------------------------------------------------------------------------


def client_rows(owner: Ints, m: int) -> list[Ints]:
    """Row numbers of each client."""
    return [np.flatnonzero(owner == i) for i in range(m)]


def sweep(tables: Tables, h: Floats, rows: Sequence[Ints], tau: Floats) -> Tables:
    """One calibration sweep from the clients' sums, as it would run federated (spec 8.3)."""
    T, total = tables.tilts(h), as_tensor(tau)
    parts = torch.stack([ratio.log_pair_sums(as_tensor(T[r]), total) for r in rows])
    return replace(tables, gamma=ratio.calibrate_gamma(as_tensor(tables.gamma), total, parts).numpy())


def shift(tables: Tables, h: Floats, tau: Floats) -> Tables:
    """Canonical gauge: the masses 1 / den sum to 1 (spec 2.4)."""
    part = ratio.log_inverse_sum(as_tensor(tables.tilts(h)), as_tensor(tau))[None]
    return replace(tables, gamma=ratio.canonical_shift(as_tensor(tables.gamma), part).numpy())


def calibrate(
    tables: Tables, h: Floats, tau: Floats, *, tolerance: float = 1e-12, limit: int = 20_000
) -> tuple[Tables, int]:
    """Tables whose gamma is optimal for its tau and xi, in the canonical gauge, and the sweeps it took.

    There lambda = tau / n exactly (spec 8.3). tolerance: largest change of gamma in a sweep. Raises
    ValueError, one line, when `limit` sweeps do not suffice."""
    everyone = [np.arange(len(h))]
    for used in range(1, limit + 1):
        following = sweep(tables, h, everyone, tau)
        moved = following.gamma - tables.gamma
        tables = following
        if np.abs(moved).max() <= tolerance * max(1.0, np.abs(tables.gamma).max()):
            return shift(tables, h, tau), used
    raise ValueError(
        f"calibrate: moved {np.abs(moved).max():.1e} in sweep {limit}, needs {tolerance:g}; raise limit"
    )


def in_mode(mode: Mode, tables: Tables, h: Floats, tau: Floats) -> Tables:
    """The tables at which exact quantities are evaluated (spec 8.3). Raises ValueError for another mode."""
    if mode == "raw":
        return tables
    if mode == "shift":
        return shift(tables, h, tau)
    if mode == "calibrated":
        return calibrate(tables, h, tau)[0]
    raise ValueError(f"mode is '{mode}', needs 'raw', 'shift' or 'calibrated'")


# ---- bridge errors -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Round:
    """What one round started from and what it did to the tables. index: from 0. tables, following: before and
    after. w: (n, C). tau: (m, C) its totals. pi: (m, C) of the E-step. label_log_probs: (n, C)."""

    index: int
    tables: Tables
    following: Tables
    w: Floats
    tau: Floats
    pi: Floats
    label_log_probs: Floats


@dataclass(frozen=True, eq=False)
class BridgeErrors:
    """Bridge errors of R rounds, per sample; not-a-number where a round is infeasible (spec 8.1).

    rounds: (R,) numbers from 1. exact: |grad f|^2. surrogate: |grad f~|^2. profile: |grad F|^2. delta: of
    Assumption 5. distance: max |lambda - tau / n|, floored. Gamma2: 95 % quantile of exact / surrogate over
    rounds with surrogate > 1e-9, not-a-number without one."""

    rounds: Ints
    exact: Floats
    surrogate: Floats
    profile: Floats
    delta: Floats
    distance: Floats
    Gamma2: float

    @property
    def epsilon(self) -> Floats:
        """max(|grad f|^2 - Gamma2 |grad f~|^2, 0), (R,)."""
        return np.maximum(self.exact - self.Gamma2 * self.surrogate, 0.0)

    @property
    def feasible_fraction(self) -> float:
        """Share of the rounds with multipliers at both ends."""
        return float(np.isfinite(self.delta).mean())

    def curves(self) -> tuple[Floats, Floats, Floats]:
        """(1/t) sum |grad F|^2, (1/sqrt t) sum delta and (1/t) sum epsilon against `rounds`, (R,) each.

        Infeasible rounds are left out. Where only every k-th round was kept it stands for k."""
        gaps = np.diff(self.rounds, prepend=0)

        def running(values: Floats) -> Floats:
            known = np.isfinite(values)
            weight = np.cumsum(np.where(known, gaps, 0))
            total = np.cumsum(np.where(known, values, 0.0) * gaps)
            return total / np.where(weight > 0, weight, np.nan)

        return running(self.profile), running(self.delta) * np.sqrt(self.rounds), running(self.epsilon)


def bridge_errors(
    rounds: Sequence[Round],
    h: Floats,
    owner: Ints,
    mode: Mode = "calibrated",
    *,
    as_trained: bool = False,
) -> BridgeErrors:
    """How far the surrogate is from the exact objective along a run (spec 8.1).

    rounds: at least one, of one run. h: (n, d). mode: the tables used at both ends of every round.
    as_trained: the surrogate, and its gradient, at the tables that training had instead. In mode "calibrated"
    with the same tables for both objectives Q2 and Q2~ differ by a constant: Gamma2 = 1 and epsilon and delta
    vanish whatever the run did. With as_trained they measure how far gamma is from calibrated. Raises
    ValueError, one line, without rounds."""
    if not rounds:
        raise ValueError("bridge errors: got no rounds, needs at least one; keep some while training")
    n, lost = len(owner), float("nan")
    found = []
    for r in rounds:
        trained = (r.tables, r.following)
        ends = [in_mode(mode, tables, h, r.tau) for tables in trained]
        T = [tables.tilts(h) for tables in ends]
        near_ends = trained if as_trained else ends
        near_T = [tables.tilts(h) for tables in near_ends]
        first = solve_multipliers(T[0], r.tau)
        near = gradient(surrogate_pull(near_T[0], owner, r.w, r.tau), near_ends[0], h).squared_norm(n)
        if isinstance(first, Infeasible):
            found.append((lost, near, lost, lost, lost))
            continue
        lam = first.multipliers
        exact = gradient(exact_pull(T[0], owner, r.w, lam), ends[0], h).squared_norm(n)
        posterior = expectation_step(r.label_log_probs, T[0], owner, r.pi)
        profile = gradient(exact_pull(T[0], owner, posterior, lam), ends[0], h).squared_norm(n)
        last, delta = solve_multipliers(T[1], r.tau), lost
        if isinstance(last, Feasible):
            f = [drm_objective(t, owner, r.w, s.multipliers) for t, s in zip(T, (first, last), strict=True)]
            near_f = [surrogate(t, owner, r.w, r.tau) for t in near_T]
            delta = max(0.0, (f[0] - f[1] - near_f[0] + near_f[1]) / n)
        found.append((exact, near, profile, delta, float(np.abs(lam - calibrated_multipliers(r.tau)).max())))
    exact_, near_, profile_, delta_, distance_ = np.array(found, dtype=np.float64).T
    counts = np.isfinite(exact_) & (near_ > 1e-9)
    Gamma2 = float(np.quantile(exact_[counts] / near_[counts], 0.95)) if counts.any() else lost
    numbers = np.array([r.index + 1 for r in rounds], dtype=np.intp)
    return BridgeErrors(numbers, exact_, near_, profile_, delta_, distance_, Gamma2)


def momentum_constants(steps: int, momentum: float) -> tuple[float, float]:
    """a_E and s_E, sums of mu_{E,s} = (1 - mu^(E-s)) / (1 - mu) and of its square over s < E (spec 8.1).

    steps: E >= 0. momentum: mu, 0 <= mu < 1; raises ValueError otherwise. One local round with constant
    gradient g moves the parameters by -rate a_E g."""
    if not 0 <= momentum < 1 or steps < 0:
        raise ValueError(f"momentum is {momentum:g} with {steps} steps, needs 0 <= . < 1 and steps >= 0")
    E, mu = steps, momentum
    once = mu * (1 - mu**E) / (1 - mu)  # sum of mu^k, k = 1..E
    twice = mu**2 * (1 - mu ** (2 * E)) / (1 - mu**2)
    return (E - once) / (1 - mu), (E - 2 * once + twice) / (1 - mu) ** 2


# ---- the Gaussian world --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows sorted by client. x: (n, d) features. y: (n,) labels. owner: (n,). component: (n,) true ones."""

    x: Floats
    y: Ints
    owner: Ints
    component: Ints


@dataclass(frozen=True, eq=False)
class Model:
    """What a run learns, or the truth. tables: m clients, C components. pi: (m, C). intercepts: (m, C, K).
    slopes: (m, C, K, d), of the class logits."""

    tables: Tables
    pi: Floats
    intercepts: Floats
    slopes: Floats

    def class_log_probs(self, x: Floats) -> Floats:
        """(n, m, C, K) log P_ic(k | x) of every client. x: (n, d)."""
        out: Floats = log_softmax(
            self.intercepts + np.einsum("nd,ickd->nick", x, self.slopes, optimize=True), axis=-1
        )
        return out

    def label_log_probs(self, sample: Sample) -> Floats:
        """(n, C) log P(y | x) of each row's own client."""
        slopes = np.einsum("nd,nckd->nck", sample.x, self.slopes[sample.owner], optimize=True)
        logits = log_softmax(self.intercepts[sample.owner] + slopes, axis=-1)
        out: Floats = logits[np.arange(len(sample.y)), :, sample.y]
        return out


@dataclass(frozen=True, eq=False)
class GaussianWorld:
    """Clients that are mixtures of unit-covariance Gaussians with logistic labels: the density-ratio model is
    exact. means: (m, C, 2). mixing: (m, C), rows sum to 1. sizes: (m,) training rows. intercepts, slopes: as
    in Model."""

    means: Floats
    mixing: Floats
    sizes: Ints
    intercepts: Floats
    slopes: Floats

    @property
    def rho(self) -> Floats:
        """(m,) training fractions."""
        return np.asarray(self.sizes / self.sizes.sum())

    def truth(self) -> Model:
        """The model of the world: to a standard normal baseline xi is the mean and gamma -|mean|^2 / 2."""
        tables = Tables(-0.5 * (self.means**2).sum(-1), self.means)
        return Model(tables, self.mixing, self.intercepts, self.slopes)

    def draw(self, seed: int) -> Sample:
        """A training sample of `sizes` rows."""
        rng = np.random.default_rng(seed)
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        component = (rng.random(len(owner)) > self.mixing.cumsum(1)[owner].T).sum(0)
        component = np.minimum(
            component, self.mixing.shape[1] - 1
        )  # the last cumulative sum may round below 1
        x = self.means[owner, component] + rng.standard_normal((len(owner), self.means.shape[2]))
        logits = self.intercepts[owner, component] + np.einsum("nd,nkd->nk", x, self.slopes[owner, component])
        y = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        return Sample(x, y, owner, component)


def gaussian_world() -> GaussianWorld:
    """The world of spec 10a: 4 clients, 2 components, 2 features, 3 classes, 3400 rows."""
    means = [
        [[2.1, 0.4], [-1.8, 1.2]],
        [[1.2, 1.8], [-0.4, 2.1]],
        [[-2.1, -0.4], [-1.2, -1.8]],
        [[0.4, -2.1], [1.8, -1.2]],
    ]
    mixing = [[0.6, 0.4], [0.45, 0.55], [0.5, 0.5], [0.65, 0.35]]
    slopes = [
        [[[2.5, 1.2], [-1.6, -0.3], [-0.5, 3.8]], [[-1.5, 2.2], [0.2, 1.6], [0.0, 0.6]]],
        [[[0.8, 0.2], [1.0, 0.6], [2.0, 2.9]], [[-0.1, -0.3], [0.7, -2.7], [0.5, -0.8]]],
        [[[-1.3, -2.5], [-0.4, 0.8], [-0.8, -1.5]], [[-0.9, -0.2], [-1.9, -0.9], [-1.7, -0.2]]],
        [[[2.8, 0.3], [3.2, -1.1], [-1.8, -0.5]], [[0.1, 0.6], [0.6, -0.5], [1.4, -0.1]]],
    ]
    intercepts = [
        [[1.4, 0.9, 0.5], [0.4, -1.4, 1.1]],
        [[1.2, -1.0, 5.1], [0.3, -2.6, -3.1]],
        [[-1.7, -4.4, 0.8], [-2.1, 0.8, -2.8]],
        [[0.4, 2.2, 1.2], [-3.5, 0.1, -0.7]],
    ]
    sizes = np.array([500, 700, 1000, 1200])
    return GaussianWorld(np.array(means), np.array(mixing), sizes, np.array(intercepts), np.array(slopes))


@dataclass(frozen=True)
class Scores:
    """Population figures of a model, fractions and nats. routing: share of queries sent to their owner.
    divergence: KL of the model's routing posterior from that of Bayes. average: accuracy when the owner is
    known. system: when the query is routed."""

    routing: float
    divergence: float
    average: float
    system: float


def population_scores(
    world: GaussianWorld,
    model: Model,
    *,
    prior: Literal["fraction", "uniform"] = "fraction",
    points: int = 161,
    reach: float = 8.0,
) -> Scores:
    """Scores of a model in a world, by quadrature on a grid: no Monte Carlo error.

    points: per axis. reach: the grid spans [-reach, reach]^2; mass outside is lost."""
    axis = np.linspace(-reach, reach, points)
    x = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    cell = (axis[1] - axis[0]) ** 2
    log_density = -0.5 * ((x[:, None, None] - world.means) ** 2).sum(-1) - np.log(2 * np.pi)
    parts = cell * np.exp(log_density) * world.mixing * world.rho[:, None]  # (g, m, C) masses
    labels = np.einsum("gic,gick->gik", parts, np.exp(world.truth().class_log_probs(x)), optimize=True)
    mass = parts.sum(2)
    T = as_tensor(model.tables.tilts(x))
    scores = ratio.routing_scores(T, as_tensor(model.pi), as_tensor(world.rho), prior)
    route = ratio.first_argmax(scores).numpy()
    bayes = mass / mass.sum(1, keepdims=True)
    guess = ratio.routing_posterior(scores).numpy()
    each = np.arange(len(x))
    classes = model.class_log_probs(x)
    predicted = np.empty(mass.shape, dtype=np.intp)
    for i in range(mass.shape[1]):
        q = ratio.component_weights(T[:, i], as_tensor(model.pi[i]))
        predicted[:, i] = ratio.first_argmax(ratio.mix_predictions(q, as_tensor(classes[:, i]))).numpy()
    chosen = predicted[each, route]
    average = np.take_along_axis(labels, predicted[:, :, None], 2).sum()
    system = labels[each, :, chosen].sum()
    divergence = (mass.sum(1, keepdims=True) * rel_entr(bayes, guess)).sum()
    return Scores(float(mass[each, route].sum()), float(divergence), float(average), float(system))


# ---- federated EM on features --------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Settings of `train`; rates and momenta of the published procedure (spec 6)."""

    components: int = 2  # C, >= 1
    rounds: int = 300  # T, >= 1
    batch: int | None = 128  # rows a step, at most the smallest client's; None: all rows
    supervised_steps: int = 10  # local steps of the heads, >= 0
    supervised_momentum: float = 0.9  # 0 <= . < 1
    drm_steps: int = 15  # local steps of the tables, >= 0
    drm_momentum: float = 0.95  # 0 <= . < 1
    rate: float = 0.01  # of both blocks, > 0
    schedule: Literal["cosine", "constant"] = "cosine"  # per round
    calibrate: int = 0  # calibration sweeps after every round
    identical: bool = False  # all components start equal
    keep: int = 0  # keep every k-th round for `bridge_errors`; 0: none


@dataclass(frozen=True, eq=False)
class Run:
    """model: at the end. monitor: (T + 1,) J before the first and after each round. rounds: those kept.
    w: (n, C) of the last E-step."""

    model: Model
    monitor: Floats
    rounds: list[Round]
    w: Floats


def start_model(m: int, d: int, K: int, settings: Training, rng: np.random.Generator) -> Model:
    """First parameters (spec 7, row 2): gamma = 0, pi = 1/C, xi and heads uniform on +-1/sqrt(d), drawn per
    client and component, or once per client for identical components."""
    C, bound = settings.components, 1 / np.sqrt(d)
    drawn = 1 if settings.identical else C

    def uniform(*shape: int) -> Floats:
        return np.repeat(rng.uniform(-bound, bound, (m, drawn, *shape)), C // drawn, axis=1)

    tables = Tables(np.zeros((m, C)), uniform(d))
    return Model(tables, np.full((m, C), 1 / C), uniform(K), uniform(K, d))


def batches(
    rows: Sequence[Ints], batch: int | None, rng: np.random.Generator
) -> Iterator[tuple[Ints, Floats]]:
    """Without end: row numbers (m, B) of every client's next batch and the weights (m, B) that make means.

    A client walks through permutations of its rows, one after the other; all rows of unequal clients are
    padded with weight 0."""
    if batch is None:
        most = max(map(len, rows))
        index = np.stack([np.resize(r, most) for r in rows])
        weight = np.stack([(np.arange(most) < len(r)) / len(r) for r in rows])
        while True:
            yield index, weight
    weight = np.full((len(rows), batch), 1 / batch)
    queues = [np.empty(0, dtype=np.intp)] * len(rows)
    while True:
        queues = [
            np.concatenate([q, rng.permutation(r)]) if len(q) < batch else q
            for q, r in zip(queues, rows, strict=True)
        ]
        yield np.stack([q[:batch] for q in queues]), weight
        queues = [q[batch:] for q in queues]


def fit_tables(
    tables: Tables, sample: Sample, w: Floats, tau: Floats, draws: Iterator[tuple[Ints, Floats]],
    steps: int, rate: float, momentum: float,
) -> list[Tables]:  # fmt: skip
    """Every client's tables after local SGD on its mean surrogate loss; whole tables, momentum from zero.

    draws: of `batches`. rate > 0. The gradient is that of `surrogate_pull`, for all clients side by side."""
    m, C, d = tables.xi.shape
    gamma, xi = np.tile(tables.gamma.ravel(), (m, 1)), np.tile(tables.xi.reshape(-1, d), (m, 1, 1))
    log_tau = ratio.floored_totals(as_tensor(tau)).log().numpy().ravel()
    speed_gamma, speed_xi = np.zeros_like(gamma), np.zeros_like(xi)
    client = np.arange(m)
    for _ in range(steps):
        index, weight = next(draws)
        x = sample.x[index]  # (m, B, d)
        pull = softmax(x @ xi.transpose(0, 2, 1) + (gamma + log_tau)[:, None], axis=2)
        pull.reshape(m, -1, m, C)[client, :, client] -= w[index]
        pull *= weight[:, :, None]
        speed_gamma = momentum * speed_gamma + pull.sum(1)
        speed_xi = momentum * speed_xi + pull.transpose(0, 2, 1) @ x
        gamma, xi = gamma - rate * speed_gamma, xi - rate * speed_xi
    return [Tables(g.reshape(m, C), v.reshape(m, C, d)) for g, v in zip(gamma, xi, strict=True)]


def fit_heads(
    model: Model, sample: Sample, w: Floats, draws: Iterator[tuple[Ints, Floats]],
    steps: int, rate: float, momentum: float,
) -> Model:  # fmt: skip
    """The model with heads after local SGD on the responsibility-weighted cross-entropy; heads stay local."""
    m, C, K, d = model.slopes.shape
    intercepts, slopes = model.intercepts.reshape(m, -1), model.slopes.reshape(m, -1, d)
    speed_a, speed_b = np.zeros_like(intercepts), np.zeros_like(slopes)
    one = np.eye(K)[sample.y]
    for _ in range(steps):
        index, weight = next(draws)
        x = sample.x[index]
        logits = (x @ slopes.transpose(0, 2, 1) + intercepts[:, None]).reshape(m, -1, C, K)
        pull = (softmax(logits, axis=3) - one[index][:, :, None]) * (w[index] * weight[:, :, None])[..., None]
        flat = pull.reshape(m, -1, C * K)
        speed_a = momentum * speed_a + flat.sum(1)
        speed_b = momentum * speed_b + flat.transpose(0, 2, 1) @ x
        intercepts, slopes = intercepts - rate * speed_a, slopes - rate * speed_b
    return replace(model, intercepts=intercepts.reshape(m, C, K), slopes=slopes.reshape(m, C, K, d))


def average_tables(tables: Sequence[Tables], rho: Floats) -> Tables:
    """Whole tables averaged with weights rho (m,) (Algorithm 1, line 14)."""
    gamma = np.tensordot(rho, np.stack([t.gamma for t in tables]), 1)
    return Tables(gamma, np.tensordot(rho, np.stack([t.xi for t in tables]), 1))


def train(
    sample: Sample, settings: Training, seed: int, *, n_classes: int, start: Model | None = None
) -> Run:
    """Federated EM with g = h = identity on a sample (Algorithm 1; spec 3).

    seed: of start and batches. start: first model instead of a drawn one. Raises ValueError, one line, for a
    batch above the smallest client's rows."""
    rng = np.random.default_rng([seed, 71])
    owner, m = sample.owner, int(sample.owner.max()) + 1
    rows = client_rows(owner, m)
    smallest = min(map(len, rows))
    if settings.batch is not None and settings.batch > smallest:
        raise ValueError(
            f"train: batch is {settings.batch}, needs at most {smallest} rows; lower it or use None"
        )
    rho = np.array([len(r) / len(owner) for r in rows])
    model = start or start_model(m, sample.x.shape[1], n_classes, settings, rng)
    for_tables, for_heads = (batches(rows, settings.batch, g) for g in rng.spawn(2))
    size = rho[:, None] * len(owner)
    labels, T = model.label_log_probs(sample), model.tables.tilts(sample.x)
    monitor, kept, w = [mean_monitor(T, owner, labels, size * model.pi)], [], np.empty(0)
    for t in range(settings.rounds):
        rate = settings.rate
        if settings.schedule == "cosine":
            rate *= (1 + np.cos(np.pi * t / settings.rounds)) / 2
        w = expectation_step(labels, T, owner, model.pi)
        tau = totals(w, owner, m)
        pi = ratio.mixing_weights(as_tensor(tau)).numpy()
        locals_ = fit_tables(
            model.tables, sample, w, tau, for_tables, settings.drm_steps, rate, settings.drm_momentum
        )
        tables = average_tables(locals_, rho)
        if settings.keep and t % settings.keep == 0:
            kept.append(Round(t, model.tables, tables, w, tau, model.pi, labels))
        for _ in range(settings.calibrate):
            tables = sweep(tables, sample.x, rows, tau)
        model = fit_heads(
            model, sample, w, for_heads, settings.supervised_steps, rate, settings.supervised_momentum
        )
        model = replace(model, tables=tables, pi=pi)
        labels, T = model.label_log_probs(sample), tables.tilts(sample.x)
        monitor.append(mean_monitor(T, owner, labels, tau))
    return Run(model, np.array(monitor), kept, w)


@dataclass(frozen=True, eq=False)
class MomentumRow:
    """One momentum of the study. effective_step: rate a_E. noise: s_E. errors: along the run. scores: at the
    end. monitor: J at the end."""

    momentum: float
    effective_step: float
    noise: float
    errors: BridgeErrors
    scores: Scores
    monitor: float


def momentum_study(
    momenta: Sequence[float] = (0.0, 0.3, 0.6, 0.9, 0.95, 0.99),
    *,
    rounds: int = 1000,
    rate: float = 0.01,
    mode: Mode = "calibrated",
    every: int = 20,
    seed: int = 0,
    as_trained: bool = False,
) -> list[MomentumRow]:
    """Momentum of the table's solver at a constant rate, same sample, start and batches (spec 6, 8.1).

    every: rounds between two evaluations of the bridge errors. as_trained: as in `bridge_errors`."""
    world = gaussian_world()
    sample, study = world.draw(seed), []
    for mu in momenta:
        settings = Training(rounds=rounds, rate=rate, schedule="constant", drm_momentum=mu, keep=every)
        run = train(sample, settings, seed, n_classes=world.slopes.shape[2])
        a, s = momentum_constants(settings.drm_steps, mu)
        errors = bridge_errors(run.rounds, sample.x, sample.owner, mode, as_trained=as_trained)
        scores = population_scores(world, run.model)
        study.append(MomentumRow(mu, rate * a, s, errors, scores, float(run.monitor[-1])))
    return study
