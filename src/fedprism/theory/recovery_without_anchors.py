"""Recovery where no client is nearly pure: convex, affine, auto and posterior experts beside the public set
alone.

Beyond the FedSEE paper. One cell of the study is a kind of pool, a client sample size n_i and a public size
n_m; an estimate's error is the largest Frobenius distance to an expert over tasks, as everywhere in the
laboratory. The estimates are the shipped ones (`methods.affine_span`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedprism.methods.affine_span import HULLS, PublicMoments, merge, public_least_squares, recover
from fedprism.theory.mixture_geometry import Instance, identity_error, make_instance, sample_uploads

ESTIMATES = (*HULLS, "public only")
RIVALS = ("convex", "affine", "public only")  # what the posterior is held against
POOLS: Mapping[str, Mapping[str, Any]] = {
    "pure anchors": {"eps": 0.0},
    "anchors, impurity .2": {"eps": 0.2},
    "interior, gamma .1": {"anchors": False, "gamma": 0.1},
    "interior, gamma .5": {"anchors": False, "gamma": 0.5},
    "interior, gamma .9": {"anchors": False, "gamma": 0.9},
}
CLIENT_SIZES = (500, 20_000)
PUBLIC_SIZES = (8, 20, 50, 100, 1000)


def public_folds(
    instance: Instance, n: int, rng: np.random.Generator, *, folds: int = 5
) -> list[list[PublicMoments]]:
    """Per task a public set of n examples in `folds` nearly equal parts (fewer if n is smaller).

    Features phi ~ N(0, Phi), labels less the base map's output y = theta*_m phi + sigma noise. n >= 2."""
    if n < 2:
        raise ValueError(f"public_folds: got n = {n}, needs at least 2 examples to hold one out")
    half = np.linalg.cholesky(instance.phi)
    sets = []
    for expert in instance.experts:
        parts = []
        for size in (len(part) for part in np.array_split(np.arange(n), min(folds, n))):
            phi = half @ rng.standard_normal((len(half), size))
            y = expert @ phi + instance.sigma * rng.standard_normal((len(expert), size))
            parts.append(
                PublicMoments(phi @ phi.T / size, y @ phi.T / size, float((y**2).sum()) / size, size)
            )
        sets.append(parts)
    return sets


@dataclass(frozen=True)
class Cell:
    """pool: a key of `POOLS`. n_i, n_m: samples per client, public examples per task. errors: estimate -> per
    seed the largest error over tasks. chosen: how often each estimate was taken by "auto" and "posterior"."""

    pool: str
    n_i: int
    n_m: int
    errors: Mapping[str, tuple[float, ...]]
    chosen: Mapping[str, int]

    def mean(self, estimate: str) -> float:
        """Mean error over seeds."""
        return float(np.mean(self.errors[estimate]))

    @property
    def best_rival(self) -> str:
        """The one of convex, affine and public only with the least mean error."""
        return min(RIVALS, key=self.mean)

    @property
    def excess(self) -> tuple[float, float]:
        """Posterior's error less the best rival's: mean and standard error over seeds (0 for one seed)."""
        gap = np.array(self.errors["posterior"]) - np.array(self.errors[self.best_rival])
        return float(gap.mean()), float(gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else 0.0

    @property
    def holds(self) -> bool:
        """Whether the posterior is at least as good as the best rival within two standard errors or 5 %."""
        mean, error = self.excess
        return mean <= max(2 * error, 0.05 * self.mean(self.best_rival))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with means, best rival, excess and verdict."""
        mean, error = self.excess
        return {
            **asdict(self),
            "means": {name: self.mean(name) for name in ESTIMATES},
            "best_rival": self.best_rival,
            "excess": mean,
            "excess_standard_error": error,
            "holds": self.holds,
        }


def study_cell(pool: str, n_i: int, n_m: int, seeds: Sequence[int], **instance: Any) -> Cell:
    """One cell over seeds. pool: a key of `POOLS`. instance: further arguments of `make_instance`."""
    if pool not in POOLS:
        raise ValueError(f"study: got pool '{pool}', needs one of {', '.join(POOLS)}")
    errors: dict[str, list[float]] = {name: [] for name in ESTIMATES}
    chosen: dict[str, int] = {}
    for seed in seeds:
        world = make_instance(seed, **{**POOLS[pool], **instance})
        uploads = sample_uploads(world, n_i, np.random.default_rng([seed, 101, n_i]))
        tasks = public_folds(world, n_m, np.random.default_rng([seed, 102, n_m]))
        for name in HULLS:
            found = [recover(uploads, folds, name) for folds in tasks]
            errors[name].append(identity_error(np.stack([f.expert for f in found]), world.experts))
            if name in ("auto", "posterior"):
                for f in found:
                    key = f.chosen if name == "posterior" else f"auto: {f.chosen}"
                    chosen[key] = chosen.get(key, 0) + 1
        alone = np.stack([public_least_squares(merge(folds)) for folds in tasks])
        errors["public only"].append(identity_error(alone, world.experts))
    return Cell(pool, n_i, n_m, {name: tuple(values) for name, values in errors.items()}, chosen)


def study(
    seeds: Sequence[int],
    *,
    pools: Sequence[str] = tuple(POOLS),
    client_sizes: Sequence[int] = CLIENT_SIZES,
    public_sizes: Sequence[int] = PUBLIC_SIZES,
    on_done: Callable[[str], None] | None = None,
) -> list[Cell]:
    """All cells of the grid. on_done: told the name of every finished cell."""
    cells = []
    for pool in pools:
        for n_i in client_sizes:
            for n_m in public_sizes:
                cells.append(study_cell(pool, n_i, n_m, seeds))
                if on_done is not None:
                    on_done(f"{pool}, n_i = {n_i}, n_m = {n_m}")
    return cells
