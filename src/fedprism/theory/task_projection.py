"""FedTAR's server step as checks that can fail (spec 5, 7.3 and 12), and what to ask of a run's data (10).

A check draws updates, coordinates and features from a seed, lets the shipped functions of `methods` act on
them and compares with an answer found another way: explicit d x d formulas, limits, counts of rank, a known
grouping. Verdicts are `recovery_bounds.Check`: value <= bound in the worst case. Where the statement is an
equality the bound is the rounding that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from fedprism.methods.task_coefficients import MapSettings, augmented, fedtar_coefficients
from fedprism.methods.task_space import Floats, Ints, TaskSpace, cluster, group_weights
from fedprism.methods.update_gram import blocks, combine, grams
from fedprism.theory.recovery_bounds import Check, Side, judge
from fedprism.theory.recovery_tables import Table, Tolerance
from fedprism.theory.recovery_tables import judge as row

EQUAL = 1e-9  # of float64 against explicit matrices, spec 12
PROJECTIONS = ("affine", "literal", "augmented", "none")


@dataclass(frozen=True, eq=False)
class World:
    """Clients of some task groups. delta: (d, N) updates. features: (N, F). truth: (N,) groups."""

    delta: Floats
    features: Floats
    truth: Ints

    @property
    def gram(self) -> Floats:
        """(N, N) inner products of the updates."""
        G: Floats = self.delta.T @ self.delta
        return G


def draw_world(
    seed: int, *, sizes: Sequence[int] = (5, 3, 2), d: int = 60, shared: float = 1.0, noise: float = 0.1
) -> World:
    """Groups with orthogonal unit update directions, a shared direction times `shared`, and noise of that
    norm; features are unit vectors near a common one, moved by 0.05 towards the group's own (spec P1, P3)."""
    rng = np.random.default_rng([seed, 7])
    truth = np.repeat(np.arange(len(sizes)), sizes)
    n, axes = len(truth), np.linalg.qr(rng.standard_normal((d, len(sizes) + 1)))[0]
    delta = axes[:, truth + 1] + shared * axes[:, :1] + noise / np.sqrt(d) * rng.standard_normal((d, n))
    own = np.abs(rng.standard_normal((len(sizes), 30)))
    features = 1 + 0.05 * own[truth] + 0.005 * rng.standard_normal((n, 30))
    return World(delta, features / np.linalg.norm(features, axis=1, keepdims=True), truth)


def explicit_step(delta: Floats, Z: Floats, a: Floats, cfg: MapSettings) -> Floats:
    """(d,) B_g by the formulas of spec 5.1 with d x d matrices, equal client weights. a: (N,) weights of the
    clustered average.  The oracle of the coefficient form; for small d alone."""
    mean, clustered = delta.mean(1), delta @ a
    if cfg.projection == "none":
        return clustered
    if cfg.projection == "augmented":
        Z = augmented(Z)
    if cfg.r_upd:
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        delta = u[:, : cfg.r_upd] * s[: cfg.r_upd] @ vt[: cfg.r_upd]
    r, relative = len(Z), cfg.lambda_mode == "relative"
    ridge = cfg.rho_z * np.trace(Z @ Z.T) / r if relative else cfg.lambda_
    M = delta @ Z.T @ np.linalg.inv(Z @ Z.T + ridge * np.eye(r))
    ridge = cfg.rho_p * np.trace(M.T @ M) / r if relative else cfg.lambda_
    projector = M @ np.linalg.inv(M.T @ M + ridge * np.eye(r)) @ M.T
    centre = mean if cfg.projection == "affine" else 0 * mean
    step: Floats = centre + projector @ (clustered - centre)
    return step


def _placed(world: World, r: int = 3, groups: int = 3, **how: Any) -> tuple[Floats, Ints]:
    space = TaskSpace.fit(world.features, r, **how)
    return space.z.T, cluster(space.z, groups)[0]


def _length(values: Floats) -> float:
    return float(np.linalg.norm(values))


# ---- checks --------------------------------------------------------------------------------------


def check_coefficients(seed: int) -> Check:
    """A1: coefficients times updates are the explicit step, for all projections, ridges and r_upd."""
    world = draw_world(seed, noise=0.5)
    Z, labels = _placed(world)
    a, sides = group_weights(Z.T, labels)[1], []
    for projection in PROJECTIONS:
        errors = []
        for r_upd in (0, 2, 5):
            for mode in ("relative", "absolute"):
                cfg = MapSettings(projection=projection, r_upd=r_upd, lambda_mode=mode)  # type: ignore[arg-type]
                beta = fedtar_coefficients(world.gram, Z, labels, cfg)[0]
                expected = explicit_step(world.delta, Z, a, cfg)
                errors.append(_length(world.delta @ beta - expected) / _length(world.delta @ a))
        sides.append(Side(projection, max(errors), EQUAL))
    return judge("A1", "coefficient form = explicit form", sides)


def check_sums(seed: int) -> Check:
    """A2: literal coefficients sum to 0 and so lose what clients share; affine ones sum to 1."""
    world = draw_world(seed, noise=0.5)
    Z, labels = _placed(world)
    same = np.repeat(world.delta[:, :1], len(labels), 1)
    sums, kept = {}, {}
    for projection in ("literal", "affine"):
        cfg = MapSettings(projection=projection)
        sums[projection] = fedtar_coefficients(world.gram, Z, labels, cfg)[0].sum()
        kept[projection] = same @ fedtar_coefficients(same.T @ same, Z, labels, cfg)[0]
    sides = [
        Side("literal sum", abs(sums["literal"]), EQUAL),
        Side("affine sum off 1", abs(sums["affine"] - 1), EQUAL),
        Side("literal, identical clients", _length(kept["literal"]), 1e-6),
        Side("affine, identical clients", _length(kept["affine"] - same[:, 0]), 1e-6),
    ]
    return judge("A2", "sums of coefficients; identical clients", sides)


def check_invariance(seed: int) -> Check:
    """A3: signs and rotations of z, the clients' order and the scale of the updates change nothing."""
    world = draw_world(seed, noise=0.5)
    Z, labels = _placed(world)
    rng = np.random.default_rng(seed)
    turn, order = np.linalg.qr(rng.standard_normal((3, 3)))[0], rng.permutation(len(labels))
    errors: dict[str, list[float]] = {"rotation": [], "order": [], "scale": [], "groups": [0.0]}
    moved = cluster(Z.T[order], 3)[0]
    errors["groups"] = [1 - adjusted_rand(moved, labels[order])]
    for projection in PROJECTIONS:
        cfg = MapSettings(projection=projection, r_upd=4)  # type: ignore[arg-type]
        beta = fedtar_coefficients(world.gram, Z, labels, cfg)[0]
        G = world.gram[np.ix_(order, order)]
        errors["rotation"].append(_length(fedtar_coefficients(world.gram, turn @ Z, labels, cfg)[0] - beta))
        errors["order"].append(
            _length(fedtar_coefficients(G, Z[:, order], labels[order], cfg)[0] - beta[order])
        )
        for scale in (1e-6, 1e6):
            found = fedtar_coefficients(world.gram * scale**2, Z, labels, cfg)[0]
            errors["scale"].append(_length(found - beta))
    return judge("A3", "invariance", [Side(name, max(e), 1e-8) for name, e in errors.items()])


def check_limits(seed: int) -> Check:
    """A4: limits that are the plain mean: tau = 0 with sizes, one group, no clustering, a huge ridge."""
    world = draw_world(seed, noise=0.5)
    Z, labels = _placed(world)
    none, n = MapSettings(projection="none"), len(labels)
    cases: dict[str, tuple[Ints | None, MapSettings]] = {
        "tau = 0 by size": (labels, replace(none, tau=0.0, size_aware=True)),
        "Q = 1": (labels * 0, none),
        "no clustering, affine": (None, MapSettings()),
        "huge rho_p": (labels, MapSettings(rho_p=1e14)),
    }
    sides = [
        Side(name, _length(fedtar_coefficients(world.gram, Z, groups, cfg)[0] - 1 / n), EQUAL)
        for name, (groups, cfg) in cases.items()
    ]
    return judge("A4", "limits that are the mean", sides)


def check_rank(seed: int) -> Check:
    """A5: N - 1 coordinates without ridges filter nothing (P4); the updates' map has rank r_task at most."""
    world = draw_world(seed, noise=0.5)
    n = len(world.truth)
    free = MapSettings(rho_z=0.0, rho_p=0.0)
    Z, labels = _placed(world, n - 1)
    a = group_weights(Z.T, labels)[1]
    whole = _length(fedtar_coefficients(world.gram, Z, labels, free)[0] - a)
    Z, _ = _placed(world)
    literal, rng = replace(free, projection="literal"), np.random.default_rng(seed)
    steps = []
    for _ in range(8):  # whatever the groups, the steps stay in the span of M
        groups = np.concatenate([[0, 1, 2], rng.integers(3, size=n - 3)])
        steps.append(world.delta @ fedtar_coefficients(world.gram, Z, groups, literal)[0])
    values = np.linalg.svd(np.stack(steps), compute_uv=False)
    return judge(
        "A5", "limits of the rank",
        [Side("N - 1 coordinates", whole, 1e-7), Side("beyond r_task", values[3] / values[0], 1e-9)],
    )  # fmt: skip


RETAINED = (0.0, 1.0, 3.0, 10.0)  # shared component over the groups' own, spec P1


def retained(seed: int, shared: float) -> dict[str, float]:
    """|B_g| over the clustered average's norm, by form, for groups of weights .5, .3, .2 with a shared
    component of norm `shared` and orthogonal ones of norm 1."""
    world, found = draw_world(seed, d=5000, shared=shared), {}  # in few dimensions noise meets anything
    for name in ("affine", "augmented", "literal", "uncentred"):
        uncentred = name == "uncentred"  # the paper's basis, which holds the mean, besides two directions
        how: dict[str, Any] = {"basis": "uncentred", "coordinates": "uncentred"} if uncentred else {}
        Z, labels = _placed(world, 3 if uncentred else 2, **how)
        projection: Any = "literal" if uncentred else name
        cfg = MapSettings(projection=projection, tau=0.0, size_aware=True)
        found[name] = fedtar_coefficients(world.gram, Z, labels, cfg)[1]["retained_cluster"]
    return found


def retained_table(seeds: Sequence[int]) -> Table:
    """T1: the literal step's retained norm against its closed form without noise and ridge, the length of
    (.5, .3, .2) without its mean over sqrt(shared^2 + .38), and the affine one's (P1)."""
    rows, own = [], np.array([0.5, 0.3, 0.2])
    for shared in RETAINED:
        runs = [retained(seed, shared) for seed in seeds]
        expected = float(np.sqrt(((own - own.mean()) ** 2).sum() / (shared**2 + (own**2).sum())))
        literal = [run["literal"] for run in runs]
        rows.append(row(f"literal, shared {shared:g}", literal, Tolerance(absolute=0.02), expected=expected))
        affine = [run["affine"] for run in runs]
        rows.append(row(f"affine, shared {shared:g}", affine, Tolerance(absolute=0.02), expected=1.0))
    return Table("T1", "norm left of the clustered average (P1)", "share", tuple(seeds), tuple(rows))


def check_retained(seed: int) -> Check:
    """A6: the literal step shrinks as clients agree more, to under a tenth at 10; the others keep it."""
    kept = [retained(seed, shared) for shared in RETAINED]
    literal = np.array([k["literal"] for k in kept])
    sides = [
        Side("literal falls", literal[1:], literal[:-1]),
        Side("literal at 10", literal[-1], 0.1),
        Side("affine", 0.9, [k["affine"] for k in kept]),
        Side("augmented", 0.9, [k["augmented"] for k in kept]),
        Side("uncentred", 0.74, [k["uncentred"] for k in kept]),  # spec P1: 0.74 to 1
    ]
    return judge("A6", "what is left of the clustered average (P1)", sides)


def check_basis(seed: int) -> Check:
    """A7: two centred directions find three groups; the uncentred basis spends its first on the mean (P3)."""
    world = draw_world(seed)
    centred, uncentred = (TaskSpace.fit(world.features, 2, basis=b) for b in ("centred", "uncentred"))
    found = adjusted_rand(cluster(centred.z, 3)[0], world.truth)
    energy = (uncentred.z**2).sum(0)
    spread = np.linalg.svd(world.features - world.features.mean(0), compute_uv=False) ** 2
    total, best = spread.sum(), spread[2:].sum()  # no two directions miss less
    sides = [
        Side("centred basis: 1 - ARI", 1 - found, 1e-9),
        Side("energy that 2 centred directions miss", total - (centred.z**2).sum(), best, 1e-12),
        Side("first uncentred row", energy[0], 0.02 * energy[1]),
    ]
    lost = adjusted_rand(cluster(uncentred.z, 3)[0], world.truth)
    return judge("A7", "basis of the coordinates (P3)", sides, f"ARI {found:.2f}, uncentred {lost:.2f}")


def check_noise(seed: int) -> Check:
    """A8: noise of norm 3 leaves affine coefficients and G's off-diagonal entries, not literal ones; taking
    d s^2 off the diagonal mends those (7.3)."""
    d, world = 20_000, draw_world(seed, shared=1.0)
    std = 3 / np.sqrt(d)
    clean = np.vstack([world.delta, np.zeros((d - len(world.delta), len(world.truth)))])
    noisy = clean + std * np.random.default_rng(seed).standard_normal(clean.shape)
    G, Z_labels = noisy.T @ noisy, _placed(world, 2)

    def error(cfg: MapSettings) -> float:
        truth = clean @ fedtar_coefficients(world.gram, *Z_labels, replace(cfg, debias=0.0))[0]
        signal = clean @ fedtar_coefficients(G, *Z_labels, cfg, d=d)[0]
        return _length(signal - truth) / _length(truth)

    literal = MapSettings(projection="literal")
    plain, mended = error(literal), error(replace(literal, debias=std**2))
    off = ~np.eye(len(G), dtype=bool)
    sides = [
        Side("affine signal", error(MapSettings()), 0.05),
        Side("diagonal off d s^2", abs(np.diag(G - world.gram).mean() / (d * std**2) - 1), 0.05),
        Side("off-diagonal", np.abs((G - world.gram)[off]).mean(), 0.1 * d * std**2),
        Side("mended", mended, plain / 2),
    ]
    return judge("A8", "noise on the updates (7.3)", sides, f"literal {plain:.3f}, mended {mended:.3f}")


def check_streaming(seed: int) -> Check:
    """A9: float32 blocks with float64 sums give the step of float64 matrices in memory (6)."""
    world = draw_world(seed, d=30_000, noise=0.5)
    Z, labels = _placed(world)
    shapes = {"lora_B.0.down": (100, 100), "lora_B.1.down": (20_000,)}
    updates = []
    for column in world.delta.T:
        parts = torch.from_numpy(column.copy()).float().split([10_000, 20_000])
        updates.append({name: p.view(s) for (name, s), p in zip(shapes.items(), parts, strict=True)})
    (G,) = grams(blocks(updates, 4096), len(labels)).values()
    sides = []
    for projection in PROJECTIONS:
        cfg = MapSettings(projection=projection)  # type: ignore[arg-type]
        beta = fedtar_coefficients(G, Z, labels, cfg)[0]
        tree = combine(blocks(updates, 1000), updates[0], lambda name, beta=beta: beta)  # type: ignore[misc]
        found = torch.cat([v.flatten() for v in tree.values()]).double().numpy()
        expected = world.delta @ fedtar_coefficients(world.gram, Z, labels, cfg)[0]
        sides.append(Side(projection, _length(found - expected) / _length(expected), 1e-5))
    return judge("A9", "streamed = in memory", sides)


CHECKS: dict[str, Callable[[int], Check]] = {
    "A1": check_coefficients, "A2": check_sums, "A3": check_invariance, "A4": check_limits,
    "A5": check_rank, "A6": check_retained, "A7": check_basis, "A8": check_noise, "A9": check_streaming,
}  # fmt: skip


def run_checks(
    seeds: Iterable[int], *, on_done: Callable[[str], None] = lambda name: None
) -> list[Check]:  # fmt: skip
    """Per check the worst case over the seeds, at least one. on_done: told each check's id."""
    seeds, results = list(seeds), []
    if not seeds:
        raise ValueError("checks: got no seeds, needs at least one")
    for name, check in CHECKS.items():
        found = [replace(c, note=f"{c.note}; seed {s}") for s in seeds for c in [check(s)]]
        worst = max(found, key=lambda c: (not c.ok, c.ratio))
        results.append(replace(worst, ok=all(c.ok for c in found)))
        on_done(name)
    return results


# ---- curves for figures --------------------------------------------------------------------------


def retained_curve(seeds: Sequence[int]) -> dict[str, Any]:
    """Mean retained norm by form against the shared component."""
    x = [0.0, 0.3, 1.0, 3.0, 10.0]
    runs = [[retained(seed, shared) for seed in seeds] for shared in x]
    return {"x": x, **{name: [float(np.mean([r[name] for r in at])) for at in runs] for name in runs[0][0]}}


def ridge_curve(seeds: Sequence[int]) -> dict[str, Any]:
    """Retained norm of the literal step against an absolute lambda, for updates of three scales; with
    relative ridges one number serves all (P2)."""
    world = draw_world(seeds[0], noise=0.5)
    Z, labels = _placed(world)
    x = [10.0**k for k in range(-8, 3)]
    curve: dict[str, Any] = {"x": x, "scales": {}}
    for scale in (1.0, 1e-2, 1e-4):
        settings = [MapSettings(projection="literal", lambda_mode="absolute", lambda_=value) for value in x]
        curve["scales"][f"{scale:g}"] = [
            fedtar_coefficients(world.gram * scale**2, Z, labels, cfg)[1]["retained_cluster"]
            for cfg in settings
        ]
    relative = fedtar_coefficients(world.gram, Z, labels, MapSettings(projection="literal"))[1]
    curve["relative"] = relative["retained_cluster"]
    return curve


def beta_curve(seeds: Sequence[int]) -> dict[str, Any]:
    """Coefficients of every client under each projection, with the true groups."""
    world = draw_world(seeds[0], noise=0.5)
    Z, labels = _placed(world)
    forms = {
        name: fedtar_coefficients(world.gram, Z, labels, MapSettings(projection=name))[0].tolist()  # type: ignore[arg-type]
        for name in PROJECTIONS
    }
    return {"groups": world.truth.tolist(), "beta": forms}


CURVES = {
    "retained_norm": retained_curve,
    "ridge_against_scale": ridge_curve,
    "client_coefficients": beta_curve,
}
SEEDS, QUICK_SEEDS = range(9), range(2)


# ---- what to ask of a run ------------------------------------------------------------------------


def adjusted_rand(a: Ints, b: Ints) -> float:
    """Adjusted Rand index of two groupings: 1 the same, about 0 by chance (Hubert and Arabie 1985)."""
    table = np.zeros((int(a.max()) + 1, int(b.max()) + 1))
    np.add.at(table, (a, b), 1)

    def pairs(counts: Floats) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, first, second = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    chance = first * second / max(pairs(np.array([float(len(a))])), 1.0)
    most = (first + second) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def distances(G: Floats) -> Floats:
    """(N, N) distances of vectors with inner products G."""
    square = np.diag(G)[:, None] + np.diag(G)[None] - 2 * G
    found: Floats = np.sqrt(square.clip(0))
    return found


def distance_correlation(
    first: Floats, second: Floats, *, permutations: int = 999, seed: int = 0
) -> tuple[float, float]:
    """Spearman correlation of two (N, N) distance matrices over pairs and its one-sided p-value, from
    relabelling one of them (Mantel's test). Of coordinates against updates it tells whether clients with like
    routing move alike. nan and 1 where one matrix is constant. Raises ValueError for fewer than 3 clients."""
    n = len(first)
    if n < 3 or first.shape != second.shape:
        raise ValueError(
            f"distances: got {first.shape} and {second.shape}, needs the same (N, N) with N >= 3"
        )
    pairs, rng = np.triu_indices(n, 1), np.random.default_rng(seed)
    x, y = first[pairs], second[pairs]
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan"), 1.0
    found = float(spearmanr(x, y).statistic)
    reached = 1
    for _ in range(permutations):
        order = rng.permutation(n)
        reached += float(spearmanr(x, second[np.ix_(order, order)][pairs]).statistic) >= found - 1e-12
    return found, reached / (permutations + 1)


def usage_divergence(p: Floats, reference: Floats) -> tuple[float, float]:
    """Mean over layers of KL(reference || p) and KL(p || reference), in nats. p, reference: (L, K) shares of
    the experts, >= 0; 1e-8 is added and rows are normalised (spec 10)."""
    a, b = (rows + 1e-8 for rows in (reference, p))
    a, b = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)
    log = np.log(a / b)
    return float((a * log).sum(1).mean()), float(-(b * log).sum(1).mean())
