"""FedSEE's synthetic tables T1 to T19 beside the published and the reference values (spec 4).

An experiment is a function of seeds that returns a Table; each seed is one world of `mixture_geometry`, and
the rows of a table share its tasks. "published" is the paper's number, from draws that are not known;
"expected" is the reference computation, a mean over eight seeds of its own, or a closed form. A row passes
when the mean over our seeds lies within the row's tolerance of "expected".

*Deviations.*
- Fewer than eight seeds: a tolerance grows by two standard errors of the mean, from the reference's spread of
  one seed, or from the sample's where the reference states none. `quick` leaves out samples above 20 000.
- The reference states its tolerances for a mean over eight seeds. The full run takes 24: seeds 0 to 7 miss
  three tolerances of 4 % by draw, T1 at n_i = 1000 (-4.6 %) and 20 000 (-4.3 %) and T4 at eps = .2 (-4.4 %),
  and over seeds 0 to 63 the same rows lie at -2.7, -1.4 and -2.5 %.
- T2, closed form per seed: a drawn client that is purer than the anchor of the worst task lowers the error,
  so with all twelve clients the closed form holds on some seeds only. It is judged with the anchors alone;
  the share of seeds where it holds with everybody is shown.
- T8: with the anchors alone the error does not depend on kappa and equals the closed form. With drawn clients
  random experts are judged by their change with kappa alone; for experts on eigendirections a client without
  the steepest task opens a face (the effect of T9) from about kappa = 64 on: shown and not judged.
- Rows for which the reference states no tolerance are shown, not judged (tolerance "shown").
- T15 to T17 use the population's public loss: with 1000 public examples per task the anchored error could
  not fall to .03. The ratios of T7 get the tolerance of T1's.
- T19: each seed has six clients that are no anchor. The paper's 24 are those of four seeds; ours are the
  six of every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import minimize

from fedprism.methods.simplex import simplex_quadratic
from fedprism.theory.mixture_geometry import (
    Floats,
    Instance,
    cluster_centres,
    constant_router_excess,
    diameter,
    distances,
    estimate_mixtures,
    identity_error,
    make_instance,
    phi_norm2,
    public_moments,
    sample_uploads,
    successive_projection,
    upload_programs,
    vertex_set_error,
)

FULL_SEEDS = tuple(range(24))
REFERENCE_SEEDS = 8  # the reference's tolerances are for a mean over so many
QUICK_SEEDS = 3
QUICK_SAMPLES = 20_000
IMPURITIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
TASKS = 6
INPUTS = 16  # features r, the levels of the spectrum
SPREAD_KAPPAS = (1, 16, 256, 1024)
FACE_KAPPAS = (1, 16, 256, 4096)
FEDERATION_SIZES = (12, 24, 36, 60)
ANCHORED_SAMPLES = (500, 4000, 16_000, 32_000)
ROUTER_STEPS = (0.2, 0.4, 0.6, 0.8, 1.0)
POOL_METHODS = ("supervised", "SPA", "clustering")


@dataclass(frozen=True)
class Row:
    """One number of a table.

    setting: what the row varies, "n_i = 200". published: the paper's value. expected: the reference's or the
    closed form's. ours: mean over the seeds, or the worst seed where the setting says "largest". sd: sample
    standard deviation over the seeds, 0 for one. tolerance: "±8 %", "±.02", "shown". ok: within it."""

    setting: str
    published: float | None
    expected: float | None
    ours: float
    sd: float
    tolerance: str
    ok: bool


@dataclass(frozen=True)
class Table:
    """id: "T1". unit: of every row unless its setting names another. seeds: one world each, () for none."""

    id: str
    title: str
    unit: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Every row lies within its tolerance."""
        return all(row.ok for row in self.rows)


class Experiment(Protocol):
    """A function of seeds; quick leaves out the largest samples."""

    def __call__(self, seeds: Sequence[int], quick: bool = False) -> Table: ...


# ---- verdicts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """Where a mean may lie: within absolute + relative * |expected| of it, or between low and high. Neither:
    the row is shown and not judged. published: furthest the published value may lie, if it is judged too."""

    relative: float | None = None
    absolute: float | None = None
    between: tuple[float, float] | None = None
    published: float | None = None

    def text(self, slack: float = 0.0) -> str:
        """The tolerance in words; slack: what few seeds add to it."""
        if self.between is not None:
            words = "{:g} to {:g}".format(*self.between)
        elif self.relative is not None:
            words = f"±{100 * self.relative:g} %" if self.relative >= 1e-6 else f"±{self.relative:g} relative"
        elif self.absolute is not None:
            words = f"±{self.absolute:g}"
        else:
            return "shown"
        if self.published is not None:
            words += f", published ±{self.published:g}"
        return f"{words} + {slack:.2g}" if slack else words

    def accepts(
        self, ours: float, expected: float | None, published: float | None = None, slack: float = 0.0
    ) -> bool:
        """Whether `ours` passes. A value that is not finite never does. Raises ValueError if the tolerance
        compares with an expected or a published value and there is none."""
        if not np.isfinite(ours):
            return False
        if self.between is not None:
            low, high = self.between
            return low - slack <= ours <= high + slack
        if self.relative is None and self.absolute is None:
            return True
        if expected is None or (self.published is not None and published is None):
            raise ValueError(f"tolerance: {self.text()} got no value to compare with, needs one; give it")
        room = (self.absolute or 0.0) + (self.relative or 0.0) * abs(expected) + slack
        near = abs(ours - expected) <= room
        if self.published is not None and published is not None:
            near = near and abs(ours - published) <= self.published
        return near


SHOWN = Tolerance()


def judge(
    setting: str,
    values: Sequence[float] | Floats,
    tolerance: Tolerance = SHOWN,
    *,
    expected: float | None = None,
    published: float | None = None,
    reference_sd: float | None = None,
) -> Row:
    """The row of one value per seed, judged by its mean.

    values: (S,). reference_sd: spread of one seed in the reference; with fewer than eight seeds the tolerance
    grows by two standard errors of it, or of the values' own where it is None."""
    per_seed = np.asarray(values, dtype=np.float64)
    count = len(per_seed)
    mean, sd = float(per_seed.mean()), float(per_seed.std(ddof=1)) if count > 1 else 0.0
    slack = 0.0
    if 1 <= count < REFERENCE_SEEDS and tolerance != SHOWN:
        slack = 2 * (sd if reference_sd is None else reference_sd) / count**0.5
    ok = tolerance.accepts(mean, expected, published, slack)
    return Row(setting, published, expected, mean, sd, tolerance.text(slack), ok)


def judge_largest(setting: str, deviations: Floats, limit: float) -> Row:
    """The row of an exact claim: the largest of the deviations, of any shape, must be at most `limit`."""
    worst = float(np.abs(deviations).max())
    return Row(setting, None, 0.0, worst, 0.0, f"at most {limit:g}", bool(worst <= limit))


# ---- pools and their recovery --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pool:
    """What the server sees: uploads (N, l, r) and the public moments S (M, r, r), C (M, l, r)."""

    instance: Instance
    uploads: Floats
    S: Floats
    C: Floats


def draw_pool(
    instance: Instance, n_i: int | None, n_m: int | None, local: list[int], public: list[int]
) -> Pool:
    """Uploads from n_i samples and moments from n_m public ones; None for the population.

    local, public: seeds of the two streams. Samples of a client >= r, of a public set >= 1."""
    uploads = instance.optima
    if n_i is not None:
        uploads = sample_uploads(instance, n_i, np.random.default_rng(local))
    S, C = public_moments(instance, n_m, np.random.default_rng(public))
    return Pool(instance, uploads, S, C)


def recover(pools: Sequence[Pool], tolerance: float = 1e-10) -> tuple[Floats, Floats, str]:
    """Extraction for pools of equal size, solved side by side: weights (K, M, N), experts (K, M, l, r) and a
    note, empty if every program converged. The programs are those of `mixture_geometry.extract`."""
    programs = [upload_programs(pool.uploads, pool.S, pool.C) for pool in pools]
    G, b = (np.stack([program[k] for program in programs]) for k in range(2))
    found = simplex_quadratic(torch.from_numpy(G), torch.from_numpy(b), tolerance=tolerance)
    weights = found.weights.numpy()
    experts = np.einsum("kmi,kiab->kmab", weights, np.stack([pool.uploads for pool in pools]))
    note = (
        ""
        if found.converged
        else f"The solver stopped at {found.iterations} iterations, gap {found.gap:.1e}."
    )
    return weights, experts, note


def recovery_errors(grid: Sequence[Sequence[Pool]]) -> tuple[Floats, str]:
    """(R, S) largest expert distance of each setting and seed, for R settings of S pools; and the note."""
    pools = [pool for row in grid for pool in row]
    _, experts, note = recover(pools)
    errors = [
        identity_error(found, pool.instance.experts) for found, pool in zip(experts, pools, strict=True)
    ]
    return np.array(errors).reshape(len(grid), -1), note


def anchor_gaps(experts: Floats) -> Floats:
    """(M,) distances of each task optimum from the mean of the others: an anchor of impurity eps lies eps
    times that far from its task. experts: (M, l, r), M >= 2."""
    M = len(experts)
    return distances(experts, experts.mean(0)) * M / (M - 1)


def eigendirection_experts(instance: Instance, size: float = 6.0) -> Instance:
    """The same clients with task optima on eigendirections of Phi, all `size` apart, the flattest and the
    steepest direction among them: the Gram matrix in mixture coordinates has condition number kappa (spec 4).
    Needs at least as many outputs and features as tasks."""
    M, l, r = instance.experts.shape  # noqa: E741
    directions = np.linalg.eigh(instance.phi)[1]
    experts = np.zeros((M, l, r))
    for m, level in enumerate(np.linspace(0, r - 1, M).round().astype(int)):
        experts[m, m] = directions[:, level] * size / np.sqrt(2)
    return replace(instance, experts=experts)


def _allowed(sizes: Iterable[int], quick: bool) -> list[int]:
    return [n for n in sizes if not quick or n <= QUICK_SAMPLES]


def _notes(*notes: str) -> str:
    return " ".join(note for note in notes if note)


def _ratio_rows(
    sizes: Sequence[int], values: Floats, shown: Sequence[float | None], expected: Callable[[int, int], float]
) -> list[Row]:
    """Successive ratios per seed; values: (R, S). shown: published value of every size."""
    rows = []
    for k in range(len(sizes) - 1):
        first, second = shown[k], shown[k + 1]
        rows.append(
            judge(
                f"ratio, n_i = {sizes[k]:g} to {sizes[k + 1]:g}",
                values[k] / values[k + 1],
                Tolerance(relative=0.06),
                expected=expected(sizes[k], sizes[k + 1]),
                published=None if first is None or second is None else first / second,
            )
        )
    return rows


# ---- T1: clients' optima are barycentres -------------------------------------------------------


def barycentric_error(seeds: Sequence[int], quick: bool = False) -> Table:
    """T1: mean distance of twelve clients' estimates from their barycentres falls as n^(-1/2) (Theorem 1)."""
    reference = {
        200: (0.801, 0.827, 0.039, 0.08),
        1000: (0.366, 0.369, 0.012, 0.04),
        5000: (0.166, 0.161, 0.005, 0.04),
        20_000: (0.083, 0.081, 0.003, 0.04),
        100_000: (0.036, 0.036, 0.001, 0.04),
    }
    sizes = _allowed(reference, quick)
    instances = [make_instance(seed) for seed in seeds]
    values = np.array(
        [
            [
                distances(
                    sample_uploads(world, n, np.random.default_rng([seed, 100 + k])), world.optima
                ).mean()
                for seed, world in zip(seeds, instances, strict=True)
            ]
            for k, n in enumerate(sizes)
        ]
    )
    rows = []
    for n, per_seed in zip(sizes, values, strict=True):
        published, expected, sd, room = reference[n]
        rows.append(
            judge(
                f"n_i = {n:g}",
                per_seed,
                Tolerance(relative=room),
                expected=expected,
                published=published,
                reference_sd=sd,
            )
        )
    rows += _ratio_rows(sizes, values, [reference[n][0] for n in sizes], lambda a, b: (b / a) ** 0.5)
    return Table(
        "T1", "Distance of clients' estimates from the barycentre", "norm", tuple(seeds), tuple(rows)
    )


# ---- T2 to T5: recovery against the impurity of the anchors ------------------------------------


def _impurity_rows(
    values: Floats,
    published: Sequence[float],
    expected: Sequence[float],
    room: float,
    spreads: Sequence[float | None],
) -> list[Row]:
    return [
        judge(
            f"ε = {eps:g}",
            values[k],
            Tolerance(relative=room) if expected[k] > 0 else Tolerance(absolute=1e-3),
            expected=expected[k],
            published=published[k],
            reference_sd=spreads[k],
        )
        for k, eps in enumerate(IMPURITIES)
    ]


def exact_recovery(seeds: Sequence[int], quick: bool = False) -> Table:
    """T2: largest expert error from exact uploads is eps times a distance of the task optima (Theorem 2)."""
    published = (0.0, 0.228, 0.455, 0.911, 1.366, 1.821)
    worlds = [[make_instance(seed, eps=eps) for seed in seeds] for eps in IMPURITIES]
    gaps = np.array([[anchor_gaps(world.experts).max() for world in row] for row in worlds])
    closed = np.array(IMPURITIES)[:, None] * gaps
    errors, note = recovery_errors([[_population(world) for world in row] for row in worlds])
    alone, other_note = recovery_errors(
        [[_population(world.with_mixtures(world.alpha[:TASKS])) for world in row] for row in worlds]
    )
    rows = _impurity_rows(errors, published, published, 0.03, [0.017 * value for value in published])
    rows.append(judge_largest("largest distance from the closed form, anchors alone", alone - closed, 1e-3))
    holds = (np.abs(errors - closed) <= 1e-3).all(0)
    rows.append(judge("share of seeds at the closed form, all clients", holds.astype(float), expected=0.875))
    purer = "A drawn client purer than the worst task's anchor lowers the error below the closed form"
    found = ", ".join(str(seed) for seed, ok in zip(seeds, holds, strict=True) if not ok)
    where = f"{purer}: seeds {found}." if found else ""
    return Table(
        "T2",
        "Recovery from exact uploads against the anchors' impurity",
        "norm",
        tuple(seeds),
        tuple(rows),
        _notes(where, note, other_note),
    )


def _population(world: Instance) -> Pool:
    return Pool(world, world.optima, *public_moments(world, None))


def _sampled_recovery(
    id: str,
    seeds: Sequence[int],
    n_i: int,
    published: Sequence[float],
    expected: Sequence[float],
    room: float,
    spreads: Sequence[float | None],
) -> Table:
    stream = 100 * int(id[1:])
    errors, note = recovery_errors(
        [
            [draw_pool(make_instance(seed, eps=eps), n_i, None, [seed, stream + k], [seed, stream + 50])
             for seed in seeds]
            for k, eps in enumerate(IMPURITIES)
        ]
    )  # fmt: skip
    rows = _impurity_rows(errors, published, expected, room, spreads)
    title = f"Recovery from n_i = {n_i:g} against the anchors' impurity"
    return Table(id, title, "norm", tuple(seeds), tuple(rows), note)


def recovery_from_1000(seeds: Sequence[int], quick: bool = False) -> Table:
    """T3: largest expert error from 1000 samples per client, population's public loss."""
    published = (0.167, 0.380, 0.596, 1.041, 1.574, 1.980)
    expected = (0.174, 0.368, 0.589, 1.029, 1.489, 1.989)
    return _sampled_recovery(
        "T3", seeds, 1000, published, expected, 0.08, (0.01, None, None, None, None, 0.08)
    )


def recovery_from_16000(seeds: Sequence[int], quick: bool = False) -> Table:
    """T4: largest expert error from 16 000 samples per client, population's public loss."""
    published = (0.044, 0.242, 0.483, 0.930, 1.387, 1.836)
    expected = (0.043, 0.244, 0.474, 0.939, 1.385, 1.827)
    return _sampled_recovery("T4", seeds, 16_000, published, expected, 0.04, (None,) * len(IMPURITIES))


def recovery_bound(seeds: Sequence[int], quick: bool = False) -> Table:
    """T5: the bound sqrt(kappa) * eps * diam of Theorem 2, from the drawn worlds."""
    published = (0.0, 0.600, 1.200, 2.400, 3.600, 4.800)
    rows = []
    for eps, bound in zip(IMPURITIES, published, strict=True):
        worlds = [make_instance(seed, eps=eps) for seed in seeds]
        values = [float(np.sqrt(world.kappa)) * eps * diameter(world.experts) for world in worlds]
        rows.append(
            judge(
                f"ε = {eps:g}",
                values,
                Tolerance(absolute=1e-9),
                expected=bound,
                published=bound,
                reference_sd=0.0,
            )
        )
    return Table("T5", "Bound on the recovery error", "norm", tuple(seeds), tuple(rows))


# ---- T6, T7: public and local samples ------------------------------------------------------------


def public_samples(seeds: Sequence[int], quick: bool = False) -> Table:
    """T6: recovery error against the public examples of a task, exact anchors, n_i = 20 000
    (Proposition 3)."""
    reference = {
        100: (0.087, 0.076, 0.02, Tolerance(absolute=0.02)),
        400: (None, 0.047, None, SHOWN),
        1600: (None, 0.041, None, SHOWN),
        6400: (None, 0.040, None, SHOWN),
        16_000: (0.039, 0.039, None, Tolerance(absolute=0.002)),
    }
    worlds = [make_instance(seed, eps=0.0) for seed in seeds]
    errors, note = recovery_errors(
        [[draw_pool(world, 20_000, n, [seed, 600], [seed, 650 + k])
          for seed, world in zip(seeds, worlds, strict=True)] for k, n in enumerate(reference)]
    )  # fmt: skip
    rows = [
        judge(f"n_m = {n:g}", values, room, expected=expected, published=published, reference_sd=sd)
        for values, (n, (published, expected, sd, room)) in zip(errors, reference.items(), strict=True)
    ]
    title = "Recovery against public examples, ε = 0, n_i = 20000"
    return Table("T6", title, "norm", tuple(seeds), tuple(rows), note)


def local_samples(seeds: Sequence[int], quick: bool = False) -> Table:
    """T7: recovery error halves when clients hold four times the samples, exact anchors, n_m = 16 000."""
    reference = {250: (0.352, 0.354), 1000: (None, 0.176), 4000: (None, 0.086), 16_000: (0.043, 0.043)}
    worlds = [make_instance(seed, eps=0.0) for seed in seeds]
    errors, note = recovery_errors(
        [[draw_pool(world, n, 16_000, [seed, 700 + k], [seed, 750])
          for seed, world in zip(seeds, worlds, strict=True)] for k, n in enumerate(reference)]
    )  # fmt: skip
    rows = [
        judge(f"n_i = {n:g}", values, Tolerance(relative=0.05), expected=expected, published=published)
        for values, (n, (published, expected)) in zip(errors, reference.items(), strict=True)
    ]
    rows += _ratio_rows(list(reference), errors, [None] * len(reference), lambda a, b: (b / a) ** 0.5)
    title = "Recovery against local samples, ε = 0, n_m = 16000"
    return Table("T7", title, "norm", tuple(seeds), tuple(rows), note)


# ---- T8 to T10: conditioning ---------------------------------------------------------------------


def spread_impurity(seeds: Sequence[int], quick: bool = False) -> Table:
    """T8: with evenly spread impurity the error does not depend on kappa and the anchor has weight 1."""
    rows: list[Row] = []
    notes = []
    for kind in ("random", "eigendirection"):
        drawn = [make_instance(seed, eps=0.2, kappa=kappa) for kappa in SPREAD_KAPPAS for seed in seeds]
        if kind == "eigendirection":
            drawn = [eigendirection_experts(world) for world in drawn]
        for clients, pool in ((TASKS, "anchors alone"), (None, "all clients")):
            worlds = [world.with_mixtures(world.alpha[:clients]) for world in drawn]
            weights, experts, note = recover([_population(world) for world in worlds])
            notes.append(note)
            apart = np.stack([distances(found, world.experts)
                              for found, world in zip(experts, worlds, strict=True)])  # fmt: skip
            errors = apart.max(1).reshape(len(SPREAD_KAPPAS), -1)
            expected: float | None = 0.2 * float(
                np.mean([anchor_gaps(world.experts).max() for world in worlds])
            )
            if clients:
                worst = apart.argmax(1)
                off = weights[np.arange(len(worst)), worst, worst] - 1.0
            elif kind == "random":
                expected = None  # a drawn client may be purer than the anchor: no closed form
            for k, kappa in enumerate(SPREAD_KAPPAS):
                room = Tolerance(absolute=1e-3) if clients else SHOWN
                setting = f"{kind} experts, {pool}, κ = {kappa:g}"
                rows.append(judge(setting, errors[k], room, expected=expected, reference_sd=0.0))
            if clients or kind == "random":
                setting = f"{kind} experts, {pool}, largest change with κ of a seed"
                rows.append(judge_largest(setting, errors - errors[0], 1e-3))
        rows.append(judge_largest(f"{kind} experts, anchors alone, largest missing weight", off, 1e-3))
    note = (
        "Expected: the closed form, which does not depend on κ. Of all clients a drawn one may be purer than "
        "the worst task's anchor; so random experts have no closed form with them and are judged by their "
        "change with κ. With experts on eigendirections a drawn client without the steepest task opens a "
        "face of the pool."
    )
    title = "Recovery against conditioning, impurity ε = 0.2 spread evenly"
    return Table("T8", title, "norm", tuple(seeds), tuple(rows), _notes(note, *notes))


def face_world(levels: Sequence[float] | Floats, shares: Sequence[Sequence[float]], size: float) -> Instance:
    """A world whose task optima lie on eigendirections of Phi: task k is size / sqrt(2) times a unit matrix
    on the eigenvalue levels[k], so a combination c has squared norm size^2 / 2 * sum c_k^2, and size^2 / 2 *
    sum c_k^2 levels[k] in the risk metric.

    levels: (M,), positive. shares: (N, M) mixtures of the clients (spec 4)."""
    eigenvalues = np.asarray(levels, dtype=np.float64)
    experts = np.zeros((len(eigenvalues), len(eigenvalues), len(eigenvalues)))
    tasks = np.arange(len(eigenvalues))
    experts[tasks, tasks, tasks] = size / np.sqrt(2)
    return Instance(np.diag(np.sqrt(eigenvalues)), experts, np.asarray(shares, dtype=np.float64), 0.5)


def face_optimum(seeds: Sequence[int] = (), quick: bool = False) -> Table:
    """T9: impurity on the steepest direction and clients free of it: the error of task 0 rises with kappa.
    Deterministic; the seeds are not used."""
    reference = {1: (1.200, 1.200, 1.0), 16: (1.894, 1.901, 0.675), 256: (3.679, 3.662, 0.516),
                 4096: (4.194, 4.184, 0.527)}  # fmt: skip
    shares = ((0.8, 0.2, 0, 0, 0, 0), (0.05, 0, 0, 0, 0.95, 0), (0.3, 0, 0, 0, 0, 0.7))
    rows, notes = [], []
    for kappa in FACE_KAPPAS:
        published, expected, largest = reference[kappa]
        spectrum = np.geomspace(1.0, kappa, INPUTS)
        world = face_world(spectrum[[0, -1, 1, 2, 3, 4]], shares, 6.0)
        weights, experts, note = recover([_population(world)], 1e-13)
        notes.append(note)
        error = float(distances(experts[0, :1], world.experts[:1])[0])
        room = Tolerance(absolute=1e-3, published=0.02)
        rows.append(judge(f"κ = {kappa:g}", [error], room, expected=expected, published=published))
        share = float(weights[0, 0].max())
        rows.append(
            judge(f"κ = {kappa:g}, largest weight", [share], Tolerance(absolute=1e-3), expected=largest)
        )
    note = "The clients are a reconstruction: the published list is not known."
    title = "Recovery against conditioning, optimum on a face"
    return Table("T9", title, "norm", (), tuple(rows), _notes(note, *notes))


def independent_solver(seeds: Sequence[int] = (), quick: bool = False) -> Table:
    """T10: an optimum on a face, against SciPy's SLSQP. Deterministic; the seeds are not used."""
    shares = ((0.8, 0.2, 0, 0), (0.5, 0, 0.5, 0), (0.3, 0, 0, 0.7))
    world = face_world((1.0, 100.0, 1.0, 1.0), shares, float(np.sqrt(2)))
    weights, experts, note = recover([_population(world)], 1e-13)
    ours = weights[0, 0]

    def risk(expert: Floats) -> float:
        return float(phi_norm2(expert - world.experts[0], world.phi))

    optima = world.optima

    def objective(w: Floats) -> float:
        return risk(np.einsum("i,iab->ab", w, optima))

    other = minimize(
        objective,
        np.full(3, 1 / 3),
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    rows = [
        judge(f"weight {k + 1}", [ours[k]], Tolerance(absolute=2e-4, published=1e-3), expected=expected,
              published=published)
        for k, (published, expected) in enumerate(((0.085, 0.0846), (0.744, 0.7437), (0.172, 0.1717)))
    ]  # fmt: skip
    rows.append(
        judge("risk at the optimum", [risk(experts[0, 0])], Tolerance(absolute=1e-6), expected=0.440387,
              published=0.4404)
    )  # fmt: skip
    rows.append(
        judge(
            "risk at the anchor", [risk(optima[0])], Tolerance(absolute=1e-6), expected=4.04, published=4.04
        )
    )
    rows.append(judge_largest("largest weight difference from SLSQP", ours - other.x, 2e-4))
    gap = np.array([risk(experts[0, 0]) - other.fun])
    rows.append(judge_largest("largest risk difference from SLSQP", gap, 1e-6))
    return Table("T10", "An optimum off the vertices", "weight or risk", (), tuple(rows), note)


# ---- T11 to T14: which task an expert belongs to ---------------------------------------------------


def identity_pools(seeds: Sequence[int], *, anchors: bool) -> list[Pool]:
    """Twelve clients, n_i = 4000, n_m = 1000: with anchors of impurity .05, or every client uniform."""
    if anchors:
        worlds, stream = [make_instance(seed) for seed in seeds], 1100
    else:
        worlds, stream = [make_instance(seed, anchors=False, gamma=1.0) for seed in seeds], 1400
    return [
        draw_pool(world, 4000, 1000, [seed, stream], [seed, stream + 50])
        for seed, world in zip(seeds, worlds, strict=True)
    ]


def set_and_identity(method: str, seeds: Sequence[int], pools: Sequence[Pool]) -> tuple[Floats, Floats]:
    """(S,) vertex-set errors and (S,) task-identity errors of a method of POOL_METHODS."""
    if method == "supervised":
        found = list(recover(pools)[1])
    elif method == "SPA":
        found = [successive_projection(pool.uploads, TASKS) for pool in pools]
    else:
        found = [
            cluster_centres(pool.uploads, TASKS, np.random.default_rng([seed, 1399]))
            for seed, pool in zip(seeds, pools, strict=True)
        ]
    pairs = list(zip(found, pools, strict=True))
    return (
        np.array([vertex_set_error(experts, pool.instance.experts) for experts, pool in pairs]),
        np.array([identity_error(experts, pool.instance.experts) for experts, pool in pairs]),
    )


def _identity_rows(
    method: str,
    errors: tuple[Floats, Floats],
    published: tuple[float, float],
    expected: tuple[float, float],
    rooms: tuple[float, float],
    spreads: tuple[float, float],
) -> list[Row]:
    return [
        judge(
            f"{method}, {kind}",
            errors[k],
            Tolerance(absolute=rooms[k]),
            expected=expected[k],
            published=published[k],
            reference_sd=spreads[k],
        )
        for k, kind in enumerate(("vertex set", "task identity"))
    ]


def supervised_identity(seeds: Sequence[int], quick: bool = False) -> Table:
    """T11: public data give the experts their names: set and identity errors are equal (Theorem 3)."""
    errors = set_and_identity("supervised", seeds, identity_pools(seeds, anchors=True))
    rows = _identity_rows("supervised", errors, (0.287, 0.287), (0.270, 0.270), (0.03, 0.03), (0.013, 0.013))
    rows.append(judge_largest("largest difference, identity from set", errors[1] - errors[0], 1e-9))
    return Table("T11", "Supervised recovery with anchors", "norm", tuple(seeds), tuple(rows))


def projection_identity(seeds: Sequence[int], quick: bool = False) -> Table:
    """T12: successive projection finds the set of experts and not their names (Theorem 3)."""
    pools = identity_pools(seeds, anchors=True)
    errors = set_and_identity("SPA", seeds, pools)
    rows = _identity_rows("SPA", errors, (0.287, 5.658), (0.270, 5.64), (0.03, 0.25), (0.013, 0.2))
    supervised = set_and_identity("supervised", seeds, pools)[0]
    apart = np.abs(errors[0] - supervised)
    near = Tolerance(absolute=5e-4)
    rows.append(judge("vertex set, distance from supervised", apart, near, expected=0.0, reference_sd=0.0))
    return Table("T12", "Successive projection with anchors", "norm", tuple(seeds), tuple(rows))


def clustering_identity(seeds: Sequence[int], quick: bool = False) -> Table:
    """T13: cluster centres are neither the set of experts nor their names."""
    errors = set_and_identity("clustering", seeds, identity_pools(seeds, anchors=True))
    rows = _identity_rows("clustering", errors, (1.877, 5.507), (2.09, 5.54), (0.4, 0.3), (0.38, 0.27))
    return Table("T13", "Clustering with anchors", "norm", tuple(seeds), tuple(rows))


def identity_without_anchors(seeds: Sequence[int], quick: bool = False) -> Table:
    """T14: with every client uniform no method finds the experts (Theorem 4)."""
    reference = {
        "supervised": ((3.760, 3.760), (3.756, 3.756)),
        "SPA": ((3.770, 3.818), (3.766, 3.813)),
        "clustering": ((3.780, 3.815), (3.768, 3.813)),
    }
    pools = identity_pools(seeds, anchors=False)
    rows = []
    for method, (published, expected) in reference.items():
        errors = set_and_identity(method, seeds, pools)
        rows += _identity_rows(method, errors, published, expected, (0.08, 0.08), (0.07, 0.07))
    return Table("T14", "Three methods without anchors", "norm", tuple(seeds), tuple(rows))


# ---- T15 to T17: what more data do not mend --------------------------------------------------------


def unanchored_floor(seeds: Sequence[int], quick: bool = False) -> Table:
    """T15: without anchors more samples do not lower the error (Theorem 4); twenty uniform clients."""
    published, expected = (3.754, 3.789, 3.813, 3.816), (3.691, 3.756, 3.769, 3.775)
    sizes = _allowed(ANCHORED_SAMPLES, quick)
    worlds = [make_instance(seed, N=20, anchors=False, gamma=1.0) for seed in seeds]
    errors, note = recovery_errors(
        [[draw_pool(world, n, None, [seed, 1500 + k], [seed, 1550])
          for seed, world in zip(seeds, worlds, strict=True)] for k, n in enumerate(sizes)]
    )  # fmt: skip
    rows = [
        judge(f"n_i = {n:g}", errors[k], Tolerance(absolute=0.08), expected=expected[k],
              published=published[k], reference_sd=0.06)
        for k, n in enumerate(sizes)
    ]  # fmt: skip
    step = float(np.diff(errors.mean(1)).min())
    rows.append(Row("smallest step of the mean", None, None, step, 0.0, "at least 0", step >= 0))
    return Table("T15", "Floor without anchors, N = 20", "norm", tuple(seeds), tuple(rows), note)


def anchored_recovery(seeds: Sequence[int], quick: bool = False) -> Table:
    """T16: with exact anchors the error falls as n^(-1/2); twenty clients."""
    published, expected = (0.251, None, None, 0.033), (0.245, 0.088, 0.043, 0.031)
    sizes = _allowed(ANCHORED_SAMPLES, quick)
    worlds = [make_instance(seed, N=20, eps=0.0) for seed in seeds]
    errors, note = recovery_errors(
        [[draw_pool(world, n, None, [seed, 1600 + k], [seed, 1650])
          for seed, world in zip(seeds, worlds, strict=True)] for k, n in enumerate(sizes)]
    )  # fmt: skip
    rooms = (*[Tolerance(relative=0.06)] * 3, Tolerance(absolute=0.003))
    rows = [
        judge(f"n_i = {n:g}", errors[k], rooms[k], expected=expected[k], published=published[k])
        for k, n in enumerate(sizes)
    ]  # fmt: skip
    return Table("T16", "Recovery from exact anchors, N = 20", "norm", tuple(seeds), tuple(rows), note)


def floor_against_clients(seeds: Sequence[int], quick: bool = False) -> Table:
    """T17: without anchors more clients do not lower the error (Theorem 4); n_i = 4000."""
    expected = (3.752, 3.747, 3.739, 3.720)
    rows, notes = [], []
    for k, N in enumerate(FEDERATION_SIZES):
        pools = []
        for seed in seeds:
            world = make_instance(seed, N=N, anchors=False, gamma=1.0)
            pools.append(draw_pool(world, 4000, None, [seed, 1700 + k], [seed, 1750]))
        errors, note = recovery_errors([pools])
        notes.append(note)
        rows.append(judge(f"N = {N}", errors[0], expected=expected[k]))
    means = [row.ours for row in rows]
    spread = max(means) - min(means)
    rows.append(Row("spread of the means", None, None, spread, 0.0, "below 0.08", spread < 0.08))
    title = "Floor without anchors against the number of clients"
    return Table("T17", title, "norm", tuple(seeds), tuple(rows), _notes(*notes))


# ---- T18, T19: routing ---------------------------------------------------------------------------


def centre_cost(experts: Floats, A: Floats) -> Floats:
    """(M,) q of Corollary 5, tr(C A A' C') with C the task optimum less the mean of all, by a sum over pairs
    of features and over their entries in A: the routed risk's own functions have no part in it.

    experts: (M, l, r). A: (r, d)."""
    apart = experts - sum(experts) / len(experts)
    q = np.zeros(len(experts))
    for b, left in enumerate(A):
        for c, right in enumerate(A):
            q += float((left * right).sum()) * (apart[:, :, b] * apart[:, :, c]).sum(1)
    return q


def uniform_router(seeds: Sequence[int], quick: bool = False) -> Table:
    """T18: a uniform constant router costs a client (1 - tau) u + tau e_m exactly q tau^2 (Corollary 5), q
    the squared distance of task m from the centre in the risk metric; mean over tasks."""
    published = (1.053, 4.212, 9.477, 16.847, 26.324)
    worlds = [make_instance(seed) for seed in seeds]
    q = np.array([centre_cost(world.experts, world.A) for world in worlds])  # (S, M)
    uniform = np.full(TASKS, 1 / TASKS)
    rows, off = [], []
    for k, tau in enumerate(ROUTER_STEPS):
        clients = (1 - tau) * uniform + tau * np.eye(TASKS)
        excess = np.array([constant_router_excess(world.with_mixtures(clients), uniform) for world in worlds])
        off.append(excess / (q * tau**2) - 1)
        rows.append(
            judge(f"τ = {tau:g}", excess.mean(1), Tolerance(relative=1e-9), published=published[k],
                  expected=float(q.mean() * tau**2), reference_sd=0.0)
        )  # fmt: skip
    rows.append(judge_largest("largest relative distance from q τ²", np.array(off), 1e-9))
    room = Tolerance(between=(20, 36))  # of one world's q
    rows.append(judge("q", q.mean(1), room, expected=28.3, published=published[-1], reference_sd=0.0))
    note = f"q of single tasks: {q.min():.1f} to {q.max():.1f}."
    return Table("T18", "Cost of a uniform router", "risk", tuple(seeds), tuple(rows), note)


def whole_pipeline(seeds: Sequence[int], quick: bool = False) -> Table:
    """T19: uploads, extraction, mixture estimates and constant routers over the true experts, on the six
    clients of each world that are no anchor (eps = .05, n_i = 4000, n_m = 1000)."""
    worlds = [make_instance(seed) for seed in seeds]
    pools = [draw_pool(world, 4000, 1000, [seed, 1900], [seed, 1950])
             for seed, world in zip(seeds, worlds, strict=True)]  # fmt: skip
    _, experts, note = recover(pools)
    mistakes, estimated, uniform = [], [], []
    for found, pool in zip(experts, pools, strict=True):
        rest = pool.instance.with_mixtures(pool.instance.alpha[TASKS:])
        mixtures = estimate_mixtures(pool.uploads[TASKS:], found, rest.phi)
        mistakes.append(np.abs(mixtures - rest.alpha).sum(1).mean())
        estimated.append(constant_router_excess(rest, mixtures).mean())
        uniform.append(constant_router_excess(rest, np.full(TASKS, 1 / TASKS)).mean())
    rows = [
        judge("mixture error, sum of absolutes", mistakes, Tolerance(absolute=0.012), expected=0.056,
              published=0.056, reference_sd=0.009),
        judge("risk of routing by the estimate", estimated, Tolerance(absolute=0.012), expected=0.031,
              published=0.031, reference_sd=0.010),
        judge("risk of uniform routing", uniform, Tolerance(between=(4, 11)), expected=6.88,
              published=7.526, reference_sd=1.6),
    ]  # fmt: skip
    return Table("T19", "The whole pipeline", "risk; the first row a share", tuple(seeds), tuple(rows), note)


# ---- all tables ----------------------------------------------------------------------------------

EXPERIMENTS: dict[str, Experiment] = {
    "T1": barycentric_error,
    "T2": exact_recovery,
    "T3": recovery_from_1000,
    "T4": recovery_from_16000,
    "T5": recovery_bound,
    "T6": public_samples,
    "T7": local_samples,
    "T8": spread_impurity,
    "T9": face_optimum,
    "T10": independent_solver,
    "T11": supervised_identity,
    "T12": projection_identity,
    "T13": clustering_identity,
    "T14": identity_without_anchors,
    "T15": unanchored_floor,
    "T16": anchored_recovery,
    "T17": floor_against_clients,
    "T18": uniform_router,
    "T19": whole_pipeline,
}


def run_tables(
    seeds: Sequence[int] = FULL_SEEDS,
    *,
    ids: Sequence[str] | None = None,
    quick: bool = False,
    on_done: Callable[[str], None] | None = None,
) -> list[Table]:
    """The tables of spec 4, in the order of EXPERIMENTS.

    seeds: whole numbers >= 0, at least one, each once. ids: which tables, all by default. quick: the first
    three seeds, samples up to 20 000. on_done: called with a table's id when it is computed. Raises
    ValueError for unknown ids and for seeds that are missing, negative or repeated."""
    used = list(seeds)[:QUICK_SEEDS] if quick else list(seeds)
    if not used or min(used) < 0 or len(set(used)) < len(used):
        raise ValueError(f"tables: seeds are {used}, needs different whole numbers of at least 0; give some")
    unknown = sorted(set(ids or ()) - EXPERIMENTS.keys())
    if unknown:
        raise ValueError(f"tables: got {', '.join(unknown)}, needs ids from T1 to T{len(EXPERIMENTS)}")
    tables = []
    for name, experiment in EXPERIMENTS.items():
        if ids is None or name in ids:
            tables.append(experiment(used, quick=quick))
            if on_done is not None:
                on_done(name)
    return tables


# ---- data of the figures -------------------------------------------------------------------------

Curve = dict[str, Any]  # JSON-ready: lists of numbers or words, or dicts of them


def _pick(tables: Iterable[Table], *ids: str) -> list[Table]:
    by_id = {table.id: table for table in tables}
    missing = [name for name in ids if name not in by_id]
    if missing:
        raise ValueError(f"curve: got no {', '.join(missing)}, needs {', '.join(ids)}; run those tables")
    return [by_id[name] for name in ids]


def _series(table: Table, settings: Mapping[float, str] | Mapping[int, str]) -> Curve:
    """The rows with these settings as lists; settings maps x to a row's setting, absent rows are left out."""
    by_setting = {row.setting: row for row in table.rows}
    found = [(x, by_setting[setting]) for x, setting in settings.items() if setting in by_setting]
    return {
        "x": [x for x, _ in found],
        "ours": [row.ours for _, row in found],
        "sd": [row.sd for _, row in found],
        "expected": [row.expected for _, row in found],
        "published": [row.published for _, row in found],
    }


def recovery_against_impurity(tables: Iterable[Table]) -> Curve:
    """Recovery error over the anchors' impurity: exact uploads, two sample sizes and the bound (T2 to T5).

    Each series holds lists x, ours, sd, expected, published of one length. Raises ValueError if a table is
    missing; so do the other curves."""
    settings = {eps: f"ε = {eps:g}" for eps in IMPURITIES}
    names = ("exact", "n_1000", "n_16000", "bound")
    found = _pick(tables, "T2", "T3", "T4", "T5")
    return {name: _series(table, settings) for name, table in zip(names, found, strict=True)}


def identity_against_set_error(tables: Iterable[Table]) -> Curve:
    """Vertex-set and task-identity error of three methods, with and without anchors (T11 to T14).

    Lists of one length: method, anchors (bool), set, identity, published_set, published_identity."""
    *with_anchors, without = _pick(tables, "T11", "T12", "T13", "T14")
    points: list[tuple[str, bool, Row, Row]] = []
    for anchors, sources in ((True, with_anchors), (False, [without] * len(POOL_METHODS))):
        for method, table in zip(POOL_METHODS, sources, strict=True):
            by_setting = {row.setting: row for row in table.rows}
            points.append(
                (method, anchors, by_setting[f"{method}, vertex set"], by_setting[f"{method}, task identity"])
            )
    return {
        "method": [method for method, _, _, _ in points],
        "anchors": [anchors for _, anchors, _, _ in points],
        "set": [row.ours for _, _, row, _ in points],
        "identity": [row.ours for _, _, _, row in points],
        "published_set": [row.published for _, _, row, _ in points],
        "published_identity": [row.published for _, _, _, row in points],
    }


def nonidentifiability_against_size(tables: Iterable[Table]) -> Curve:
    """Recovery error over samples per client without and with anchors, and over clients (T15 to T17).

    Series as in `recovery_against_impurity`."""
    floor, anchored, clients = _pick(tables, "T15", "T16", "T17")
    sizes = {n: f"n_i = {n:g}" for n in ANCHORED_SAMPLES}
    return {
        "without_anchors": _series(floor, sizes),
        "with_anchors": _series(anchored, sizes),
        "clients": _series(clients, {N: f"N = {N}" for N in FEDERATION_SIZES}),
    }


def uniform_routing_cost(tables: Iterable[Table]) -> Curve:
    """Excess risk of a uniform router over tau, with q tau^2 as expected (T18). A series as in
    `recovery_against_impurity`, starting at the uniform client, whose cost is 0 by definition."""
    (table,) = _pick(tables, "T18")
    series = _series(table, {tau: f"τ = {tau:g}" for tau in ROUTER_STEPS})
    return {name: [0.0, *values] for name, values in series.items()}


CURVES: dict[str, Callable[[Iterable[Table]], Curve]] = {
    "recovery_against_impurity": recovery_against_impurity,
    "identity_against_set_error": identity_against_set_error,
    "nonidentifiability_against_size": nonidentifiability_against_size,
    "uniform_routing_cost": uniform_routing_cost,
}
