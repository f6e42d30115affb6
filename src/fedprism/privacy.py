"""Differential privacy: what Gaussian noise costs, how much noise a budget needs, clipping and noise.

Everything here concerns Gaussian releases. A release is described by its *ratio* m = sensitivity / std (the
inverse of a noise multiplier); ratios of releases of all data compose as m^2 = sum_j m_j^2, and the exact
curve between epsilon and delta is closed (Balle and Wang 2018, Theorem 8). Releases of Poisson samples
(DP-SGD) are composed numerically: by privacy-loss distributions where the package `dp-accounting` is
installed (the extra `privacy`), otherwise by Rényi divergences, whose epsilon is an upper bound.

Units and adjacency (docs/privacy.md). Record: data sets differ by one record that is added or removed, and
the number of records is public; a sum of vectors clipped to C has sensitivity C, their sum divided by the
public n has C / n. Client: one client's whole data is replaced; a vector clipped to C has sensitivity 2 C.
A budget is spent under one of the two.
"""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtri
from torch import Tensor

from fedprism.trees import Tree, norm, scale

PLD_INTERVAL = (
    1e-3  # grid of the privacy loss; rounding is towards more loss, so a coarse grid costs noise only
)
RDP_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 64)) + (80, 128, 256, 512, 1024)
LEAST_NOISE, MOST_NOISE = 0.1, 1e4  # multipliers that the search for a budget's noise tries
SEARCH_ACCURACY = 1e-4  # relative; the multiplier found is at the safe end
SPENT_TOLERANCE = 1e-6  # of epsilon, for rounding in the searches


def gaussian_delta(epsilon: float, ratio: float) -> float:
    """The smallest delta for which a Gaussian release of ratio m is (epsilon, delta) private, exactly.

    epsilon >= 0. ratio: sensitivity / std, >= 0. Phi(m/2 - eps/m) - e^eps Phi(-m/2 - eps/m) (Balle and Wang
    2018, Theorem 8), computed so that small values keep their digits."""
    if ratio == 0:
        return 0.0
    first = float(log_ndtr(ratio / 2 - epsilon / ratio))
    second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    return -math.exp(first) * math.expm1(second - first) if second < first else 0.0


def gaussian_epsilon(delta: float, ratio: float) -> float:
    """The smallest epsilon for which a Gaussian release of ratio m is (epsilon, delta) private, rounded up.

    Raises ValueError for a delta outside (0, 1) or a ratio that is negative or not finite."""
    _check_delta(delta)
    if not 0 <= ratio < math.inf:
        raise ValueError(
            f"privacy: the ratio sensitivity / std is {ratio}, must be >= 0 and finite; add noise"
        )
    if gaussian_delta(0.0, ratio) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, ratio) > delta:
        high *= 2
    return _bisect(lambda epsilon: gaussian_delta(epsilon, ratio) > delta, 0.0, high)[1]


def gaussian_ratio(epsilon: float, delta: float) -> float:
    """The largest ratio m (sensitivity / std) that is (epsilon, delta) private, rounded down.

    The noise multiplier of one release is 1 / m, that of each of T releases sqrt(T) / m. Epsilon 6 and delta
    1e-5 give 1.3095. Raises ValueError for epsilon <= 0 or delta outside (0, 1)."""
    _check_epsilon(epsilon)
    _check_delta(delta)
    high = 1.0
    while gaussian_delta(epsilon, high) <= delta:
        high *= 2
    return _bisect(lambda ratio: gaussian_delta(epsilon, ratio) <= delta, 0.0, high)[0]


def compose_ratios(ratios: Sequence[float]) -> float:
    """The ratio of several Gaussian releases of the same data together: the root of the sum of squares."""
    return math.sqrt(math.fsum(ratio * ratio for ratio in ratios))


@dataclass(frozen=True)
class Release:
    """`count` Gaussian releases. ratio: sensitivity / std of one. rate: probability with which each record
    takes part in one, independently (Poisson sampling); 1: all data."""

    ratio: float
    rate: float = 1.0
    count: int = 1


def accountant() -> str:
    """Who composes sampled releases here: "pld" (tight) with `dp-accounting`, else "rdp" (an upper bound)."""
    return "pld" if importlib.util.find_spec("dp_accounting") else "rdp"


def spent_epsilon(releases: Sequence[Release], delta: float, by: str | None = None) -> float:
    """Epsilon at `delta` of all releases together, adding or removing one record; never below the true one.

    by: "pld" or "rdp" for sampled releases, None takes `accountant()`. Releases of all data alone are
    composed exactly, whatever `by` says. Raises ValueError for a delta outside (0, 1) or an unknown `by`."""
    _check_delta(delta)
    made = [release for release in releases if release.count and release.ratio]
    if all(release.rate >= 1 for release in made):
        return gaussian_epsilon(delta, compose_ratios([r.ratio * math.sqrt(r.count) for r in made]))
    name = by or accountant()
    if name == "pld":
        return _pld_epsilon(made, delta)
    if name == "rdp":
        return _rdp_epsilon(made, delta)
    raise ValueError(f"privacy: got accountant '{by}', needs 'pld' or 'rdp'")


def _pld_epsilon(releases: Sequence[Release], delta: float) -> float:
    if not importlib.util.find_spec("dp_accounting"):
        raise ValueError("privacy: accountant 'pld' needs dp-accounting; pip install 'fedprism[privacy]'")
    import dp_accounting
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    total = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=PLD_INTERVAL
    )
    for release in releases:
        event: Any = dp_accounting.GaussianDpEvent(1 / release.ratio)
        if release.rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(release.rate, event)
        total.compose(event, release.count)
    return float(total.get_epsilon(delta))


def _rdp_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Upper bound from Rényi divergences (Mironov et al. 2019); conversion: Canonne et al. 2020, Prop. 12."""
    best = math.inf
    for order in RDP_ORDERS:
        divergence = math.fsum(r.count * sampled_renyi(order, r.ratio, r.rate) for r in releases)
        epsilon = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        best = min(best, max(epsilon, 0.0))
    return best


def sampled_renyi(order: float, ratio: float, rate: float) -> float:
    """Rényi divergence of a Gaussian release of a Poisson sample, in nats (Mironov et al. 2019, Sec. 3.3).

    order > 1. ratio: sensitivity / std. rate in (0, 1]. log E[(1 - q + q e^(m x - m^2/2))^order] over
    x ~ Normal(0, 1), divided by order - 1; the larger of the two directions. The trapezoidal rule on an
    analytic integrand with Gaussian tails is exact to rounding at this step."""
    if rate >= 1:
        return order * ratio * ratio / 2
    step = min(0.05, 0.25 / ratio)
    x = np.arange(-12.0, order * ratio + 12.0 + step, step)
    odds = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio * x - ratio * ratio / 2)
    log_moment = float(logsumexp(order * odds - x * x / 2)) + math.log(step / math.sqrt(2 * math.pi))
    return max(log_moment, 0.0) / (order - 1)


def noise_for(
    epsilon: float,
    delta: float,
    *,
    rate: float,
    steps: int,
    besides: Sequence[Release] = (),
    by: str | None = None,
) -> float:
    """The noise multiplier (std / clip) of `steps` releases of Poisson samples so that they and `besides`
    together stay within (epsilon, delta); rounded up by at most 1e-4 of itself, never down.

    rate in (0, 1]. by: see `spent_epsilon`. Raises ValueError in one line where no noise can meet epsilon."""
    _check_epsilon(epsilon)
    _check_delta(delta)
    if not 0 < rate <= 1 or steps < 1:
        raise ValueError(f"privacy: got rate {rate} and {steps} steps, needs a rate in (0, 1] and steps >= 1")

    def excess(log_noise: float) -> float:
        noise = Release(math.exp(-log_noise), rate, steps)
        return spent_epsilon([*besides, noise], delta, by) - epsilon

    high = 0.0  # natural logarithms of multipliers
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(MOST_NOISE):
            raise ValueError(
                f"privacy: epsilon {epsilon:g} at delta {delta:g} is out of reach for {steps} steps of rate "
                f"{rate:g} ({by or accountant()} accountant), whatever the noise; raise epsilon"
                + (" or lower the share of the features" if besides else "")
            )
    low = high - math.log(2)
    while low > math.log(LEAST_NOISE) and excess(low) <= 0:
        low, high = low - math.log(2), low
    if low <= math.log(LEAST_NOISE):
        return math.exp(high)
    found = float(brentq(excess, low, high, xtol=SEARCH_ACCURACY / 4, rtol=1e-12))
    while excess(found) > 0:  # the search ends on either side of the crossing
        found += SEARCH_ACCURACY / 4
    return math.exp(found)


@dataclass(frozen=True)
class Budget:
    """What one client may spend, how its releases are made, and what it has spent.

    epsilon, delta: the limit. rate: Poisson rate of one step of the updates. update_ratio, feature_ratio:
    sensitivity / std of one step and of one release of features (0: none are planned). steps, releases: made
    so far, of updates and of features."""

    epsilon: float
    delta: float
    rate: float
    update_ratio: float
    feature_ratio: float = 0.0
    steps: int = 0
    releases: int = 0

    def spent(self) -> float:
        """Epsilon at `delta` of everything released so far, features and updates composed in one account."""
        updates = Release(self.update_ratio, self.rate, self.steps)
        return spent_epsilon([Release(self.feature_ratio, 1.0, self.releases), updates], self.delta)

    def charge(self, *, steps: int = 0, releases: int = 0) -> tuple[Budget, float]:
        """The budget after `steps` more steps and `releases` more features, and the epsilon spent then.

        To be called before the release is made. Raises ValueError where that would pass the limit, or for
        features or updates without a planned ratio."""
        if (steps and not self.update_ratio) or (releases and not self.feature_ratio):
            what = "steps" if steps and not self.update_ratio else "features"
            raise ValueError(f"privacy: the budget plans no {what}; plan them before the first release")
        after = replace(self, steps=self.steps + steps, releases=self.releases + releases)
        spent = after.spent()
        if spent > self.epsilon * (1 + SPENT_TOLERANCE):
            raise ValueError(
                f"privacy: {steps} more steps and {releases} more features would spend epsilon {spent:.4g} "
                f"of {self.epsilon:g} (delta {self.delta:g}); stop here, or plan more rounds from the start"
            )
        return after, spent


def plan(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    rate: float = 1.0,
    releases: int = 0,
    feature_share: float = 0.0,
    by: str | None = None,
) -> Budget:
    """A fresh budget whose noise lets `steps` steps at `rate` and `releases` releases of features just fit.

    feature_share in (0, 1), needed with releases: the features together get the squared ratio
    feature_share * m^2 with m of `gaussian_ratio`; the updates' noise is what the joint account then allows.
    Raises ValueError for values out of range and for an epsilon out of reach."""
    if steps < 1 or not 0 < rate <= 1:
        raise ValueError(f"privacy: got {steps} steps of rate {rate}, needs steps >= 1 and a rate in (0, 1]")
    if releases and not 0 < feature_share < 1:
        raise ValueError(
            f"privacy: feature_share is {feature_share}, must be in (0, 1) where features are sent"
        )
    feature_ratio = 0.0
    if releases:
        feature_ratio = gaussian_ratio(epsilon, delta) * math.sqrt(feature_share / releases)
    if rate >= 1:
        left = gaussian_ratio(epsilon, delta) ** 2 - releases * feature_ratio**2
        return Budget(epsilon, delta, 1.0, math.sqrt(left / steps), feature_ratio)
    besides = [Release(feature_ratio, 1.0, releases)] if releases else []
    noise = noise_for(epsilon, delta, rate=rate, steps=steps, besides=besides, by=by)
    return Budget(epsilon, delta, rate, 1 / noise, feature_ratio)


def noise_to_signal(ratio: float, dimension: int, *, unit_sensitivity: float = 2.0) -> float:
    """Expected norm of the noise on a vector of `dimension` entries over the largest norm that clipping left.

    ratio: sensitivity / std. unit_sensitivity: sensitivity over the clipping norm, 2 where a client's vector
    is replaced. 92 for 3,661 features and 11,400 for 5.6e7 weights at epsilon 6, delta 1e-5, sent once."""
    return unit_sensitivity / ratio * math.sqrt(dimension)


class NoiseSource(Protocol):
    """Where the randomness of a private release comes from."""

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal values, float32, on the CPU."""

    def uniform(self, n: int) -> Tensor:
        """(n,) values uniform in [0, 1), float64, on the CPU."""


class SeededNoise:
    """Reproducible noise from a generator, for simulation alone: whoever knows the seed removes the noise."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal values, float32."""
        return torch.randn(tuple(shape), generator=self._generator)

    def uniform(self, n: int) -> Tensor:
        """(n,) values uniform in [0, 1), float64."""
        return torch.rand(n, generator=self._generator, dtype=torch.float64)


class SecureNoise:
    """Noise from the operating system's randomness, for deployment; no two runs are alike.

    Floating-point numbers are still rounded, which is not defended against (docs/privacy.md)."""

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal values, float32, by the inverse of the distribution function."""
        uniform = self._bits(math.prod(shape)) + 2.0**-53  # middle of a cell: never 0, never 1
        return torch.from_numpy(ndtri(uniform)).to(torch.float32).reshape(tuple(shape))

    def uniform(self, n: int) -> Tensor:
        """(n,) values uniform in [0, 1), float64."""
        return torch.from_numpy(self._bits(n))

    @staticmethod
    def _bits(n: int) -> Any:
        return (np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64) >> np.uint64(12)) * 2.0**-52


def noise_source(kind: str, generator: torch.Generator) -> NoiseSource:
    """ "seeded": from the generator, for simulation; "secure": from the operating system, for deployment."""
    if kind not in ("seeded", "secure"):
        raise ValueError(f"privacy: noise_source is '{kind}', must be 'seeded' or 'secure'")
    return SecureNoise() if kind == "secure" else SeededNoise(generator)


def clip_tree(tree: Tree, limit: float) -> Tree:
    """The tree scaled down so that the norm over all entries is at most `limit` > 0; below it, unchanged.

    Raises FloatingPointError where the norm is not finite: no scaling bounds such a tree."""
    size = norm(tree)
    if not math.isfinite(size):
        raise FloatingPointError("privacy: a gradient or update is not finite; lower the learning rate")
    return scale(tree, limit / size) if size > limit else dict(tree)


def add_noise(tree: Tree, std: float, source: NoiseSource) -> Tree:
    """Independent Normal(0, std^2) noise on every entry, drawn in the order of the sorted names."""
    noisy = {
        name: tree[name] + std * source.normal(tree[name].shape).to(tree[name].device, tree[name].dtype)
        for name in sorted(tree)
    }
    return {name: noisy[name] for name in tree}


def clipped_sum(values: Tensor, limit: float) -> Tensor:
    """The sum over records of their vectors, each scaled down to norm `limit` > 0 where it is longer.

    values: (n, ...) one array per record, its norm taken over all its entries. Returns (...) float64; adding
    or removing a record moves it by at most `limit`. Raises ValueError for values that are not finite."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError("privacy: got feature vectors that are not finite, nothing bounds them; mask them")
    flat = values.flatten(1).double() if values.ndim > 1 else values[:, None].double()
    sizes = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    total: Tensor = (flat * (limit / sizes.clamp_min(limit))).sum(0)
    return total.reshape(values.shape[1:])


def symmetrise(square: Tensor) -> Tensor:
    """(..., K, K) -> the symmetric part, which halves the noise's variance off the diagonal."""
    return (square + square.mT) / 2


def _bisect(lower: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Ends of an interval around the point where `lower` turns false, as close as floats come."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if lower(middle) else (low, middle)
    return low, high


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ValueError(f"privacy: epsilon is {epsilon}, must be > 0 and finite")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"privacy: delta is {delta}, must be in (0, 1); 1e-5 is usual")
