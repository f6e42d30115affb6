"""FedSPM's exact and statistical statements as checks that can fail (spec 2, 8 and 11).

A check draws a small problem or a sample of the Gaussian world from a seed, lets the shipped functions of
`methods.density_ratio` and the solvers of `profile_likelihood` act on it, and compares with an answer found
another way: automatic or numerical derivatives, SciPy, a brute-force count, the closed form. `run_checks`
runs them all. Verdicts are `recovery_bounds.Check`: value <= bound in the worst case.

*Deviations.*
- Spec 11 asks for J to fall and allows single rises (2.5). With full batches, no momentum and gamma
  calibrated every round it must not rise at all, and that is what F15 asks.
- Where the statement is an equality the bound is the rounding or the solver error that is allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from fedprism.methods import density_ratio as ratio
from fedprism.theory import profile_likelihood as exact
from fedprism.theory.mixture_geometry import Floats
from fedprism.theory.profile_likelihood import (
    BridgeErrors,
    Feasible,
    Infeasible,
    Ints,
    Model,
    Sample,
    Scores,
    Solution,
    Tables,
    Training,
    as_tensor,
)
from fedprism.theory.recovery_bounds import Check, Side, judge

EQUAL = 1e-10  # what float64 may add to an equality of a small problem
CLASSES = 3


@dataclass(frozen=True, eq=False)
class Problem:
    """Random rows, tables, heads and weights. sample: n rows. model: tables and heads. w: (n, C) drawn, not
    posterior. tau: (m, C) its totals."""

    sample: Sample
    model: Model
    w: Floats
    tau: Floats

    @property
    def h(self) -> Floats:
        return self.sample.x

    @property
    def owner(self) -> Ints:
        return self.sample.owner

    @property
    def labels(self) -> Floats:
        """(n, C) label log-probabilities."""
        return self.model.label_log_probs(self.sample)


def draw_problem(seed: int, *, sizes: Sequence[int] = (40, 50, 60), C: int = 2, d: int = 2) -> Problem:
    """A small problem whose features come from Gaussians, one per pair. sizes: rows of each client, >= 1."""
    rng = np.random.default_rng([seed, 1])
    m, n = len(sizes), sum(sizes)
    owner, component = np.repeat(np.arange(m), sizes), rng.integers(C, size=n)
    x = rng.standard_normal((m, C, d))[owner, component] + rng.standard_normal((n, d))
    sample = Sample(x, rng.integers(CLASSES, size=n), owner, component)
    tables = Tables(0.3 * rng.standard_normal((m, C)), 0.5 * rng.standard_normal((m, C, d)))
    pi = rng.dirichlet([3.0] * C, m)
    heads = rng.standard_normal((m, C, CLASSES)), rng.standard_normal((m, C, CLASSES, d))
    w = rng.dirichlet([1.0] * C, n)
    return Problem(sample, Model(tables, pi, *heads), w, exact.totals(w, owner, m))


def largest(*differences: ArrayLike) -> float:
    """Largest absolute entry of several arrays."""
    return max(float(np.abs(a).max()) for a in differences)


def surrogate_optimum(problem: Problem) -> Tables:
    """Tables that maximise the surrogate: BFGS, then Newton, on the shipped loss.

    Derivatives are automatic. Newton steps are the smallest ones, since the loss is flat along the gauges."""
    m, C, d = problem.model.tables.xi.shape
    h, owner, w, tau = (as_tensor(a) for a in (problem.h, problem.owner, problem.w, problem.tau))

    def loss(flat: torch.Tensor) -> torch.Tensor:
        tilts = ratio.tilt(flat[: m * C].view(m, C), flat[m * C :].view(m, C, d), h)
        return ratio.drm_loss(tilts, owner, w, tau, check=False).mean()

    def slope(flat: Floats) -> Floats:
        out: Floats = torch.autograd.functional.jacobian(loss, as_tensor(flat)).numpy()
        return out

    start = np.concatenate([problem.model.tables.gamma.ravel(), problem.model.tables.xi.ravel()])
    flat = minimize(lambda v: float(loss(as_tensor(v))), start, jac=slope, method="BFGS").x
    for _ in range(3):
        bend = torch.autograd.functional.hessian(loss, as_tensor(flat)).numpy()
        flat = flat - np.linalg.lstsq(bend, slope(flat), rcond=1e-10)[0]
    return Tables(flat[: m * C].reshape(m, C), flat[m * C :].reshape(m, C, d))


def feasible_point(problem: Problem, *, size: float = 0.05) -> Tables:
    """Tables off the optimum at which multipliers exist: calibrated, shifted, then moved in gamma.

    size: first move; halved until there is a solution with multipliers below 1, well inside the region where
    there is one: at its edge they run to infinity and no numerical derivative can be trusted. Raises
    ValueError, one line, if the calibrated point has no solution either."""
    centre = exact.calibrate(problem.model.tables, problem.h, problem.tau)[0]
    move = np.random.default_rng(problem.owner.size).standard_normal(centre.gamma.shape)
    while size > 1e-6:
        tables = replace(centre, gamma=centre.gamma + size * move)
        found = exact.solve_multipliers(tables.tilts(problem.h), problem.tau)
        if isinstance(found, Feasible) and largest(found.multipliers) < 1:
            return tables
        size /= 2
    raise ValueError("multipliers: got none near the calibrated point, needs some; check the canonical shift")


def solved(tables: Tables, problem: Problem) -> tuple[Floats, Floats]:
    """Tilts and multipliers at a feasible point; raises ValueError, one line, elsewhere."""
    T = tables.tilts(problem.h)
    found = exact.solve_multipliers(T, problem.tau)
    if isinstance(found, Infeasible):
        raise ValueError(f"multipliers: {found.reason}; needs a feasible point, calibrate gamma")
    return T, found.multipliers


def central_difference(f: Callable[[Tables], float], tables: Tables, step: float = 1e-5) -> Tables:
    """Numerical derivatives of f by gamma and xi, fourth order, in the shapes of the tables."""

    def along(name: str) -> Floats:
        base: Floats = getattr(tables, name)
        out = np.empty_like(base)
        for k in np.ndindex(base.shape):
            values = []
            for way in (-2, -1, 1, 2):
                moved = base.copy()
                moved[k] += way * step
                values.append(f(replace(tables, **{name: moved})))
            out[k] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
        return out

    return Tables(along("gamma"), along("xi"))


def observables(problem: Problem) -> dict[str, Floats]:
    """What no gauge may change: surrogate, its derivatives by the tables, responsibilities, J, routing."""
    T, pi = problem.model.tables.tilts(problem.h), as_tensor(problem.model.pi)
    pull = exact.surrogate_pull(T, problem.owner, problem.w, problem.tau)
    grad = exact.gradient(pull, problem.model.tables, problem.h)
    rho = as_tensor(problem.tau.sum(1) / problem.tau.sum())
    return {
        "surrogate": np.array(exact.surrogate(T, problem.owner, problem.w, problem.tau)),
        "gradient": np.concatenate([grad.gamma.ravel(), grad.xi.ravel()]),
        "responsibilities": exact.expectation_step(problem.labels, T, problem.owner, problem.model.pi),
        "J": np.array(exact.mean_monitor(T, problem.owner, problem.labels, problem.tau)),
        "routing": ratio.routing_posterior(ratio.routing_scores(as_tensor(T), pi, rho)).numpy(),
    }


def predictions(model: Model, x: Floats) -> Floats:
    """(n, m, K) log-probabilities of every client's predictor."""
    T, classes = model.tables.tilts(x), model.class_log_probs(x)
    each = []
    for i in range(T.shape[1]):
        q = ratio.component_weights(as_tensor(T[:, i]), as_tensor(model.pi[i]))
        each.append(ratio.mix_predictions(q, as_tensor(classes[:, i])).numpy())
    return np.stack(each, axis=1)


# ---- F1 to F3: the surrogate ---------------------------------------------------------------------


def check_gauge(seed: int) -> Check:
    """F1: adding a number to gamma, or a vector to xi with a shared encoder, changes nothing (spec 2.4)."""
    problem = draw_problem(seed)
    rng = np.random.default_rng([seed, 2])
    tables, before = problem.model.tables, observables(problem)
    moved = {
        "gamma": replace(tables, gamma=tables.gamma + 3 * rng.standard_normal()),
        "xi": replace(tables, xi=tables.xi + rng.standard_normal(tables.xi.shape[2])),
    }
    sides = []
    for name, other in moved.items():
        after = observables(replace(problem, model=replace(problem.model, tables=other)))
        sides += [Side(f"{key}, {name} moved", largest(after[key] - before[key]), 1e-9) for key in before]
    return judge("F1", "gauge invariances", sides)


def check_cross_entropy(seed: int) -> Check:
    """F2: the loss is soft cross-entropy over pairs, and its automatic gradients, by tables and by features,
    are responsibilities less the softmax (spec 2.3)."""
    problem = draw_problem(seed)
    n, (m, C) = len(problem.w), problem.tau.shape
    gamma, xi, h = (
        as_tensor(a).clone().requires_grad_()
        for a in (problem.model.tables.gamma, problem.model.tables.xi, problem.h)
    )
    tau, owner = as_tensor(problem.tau), as_tensor(problem.owner)
    tilts = ratio.tilt(gamma, xi, h)
    loss = ratio.drm_loss(tilts, owner, as_tensor(problem.w), tau)
    loss.sum().backward()
    target = np.zeros((n, m, C))
    target[np.arange(n), problem.owner] = problem.w
    logits = (tau.log() + tilts).detach().reshape(n, -1)
    soft = torch.nn.functional.cross_entropy(logits, as_tensor(target.reshape(n, -1)), reduction="sum")
    constant = float((problem.tau * np.log(problem.tau)).sum())
    T = tilts.detach().numpy()
    pull = exact.surrogate_pull(T, problem.owner, problem.w, problem.tau)
    closed = exact.gradient(pull, problem.model.tables, problem.h)
    sides = [Side("value", abs(float(loss.detach().sum()) - float(soft) - constant), 1e-9)]
    for name, leaf in (("gamma", gamma), ("xi", xi), ("h", h)):
        assert leaf.grad is not None
        sides.append(Side(f"gradient, {name}", largest(leaf.grad.numpy() + getattr(closed, name)), 1e-9))
    return judge("F2", "surrogate is soft cross-entropy", sides)


def check_central_step(seed: int) -> Check:
    """F3: one full-batch step on every client, whole tables averaged by size, is one step on -Q2~ / n of all
    rows (spec 3). The central gradient is automatic, of the shipped loss."""
    problem, rate = draw_problem(seed), 0.3
    rows = exact.client_rows(problem.owner, len(problem.tau))
    draws = exact.batches(rows, None, np.random.default_rng(0))
    found = exact.fit_tables(
        problem.model.tables, problem.sample, problem.w, problem.tau, draws, 1, rate, 0.9
    )
    rho = np.array([len(r) for r in rows]) / len(problem.w)
    federated = exact.average_tables(found, rho)
    gamma, xi = (
        as_tensor(a).clone().requires_grad_() for a in (problem.model.tables.gamma, problem.model.tables.xi)
    )
    tilts = ratio.tilt(gamma, xi, as_tensor(problem.h))
    owner, w, tau = as_tensor(problem.owner), as_tensor(problem.w), as_tensor(problem.tau)
    ratio.drm_loss(tilts, owner, w, tau).mean().backward()
    assert gamma.grad is not None and xi.grad is not None
    sides = [
        Side("gamma", largest(federated.gamma - (gamma - rate * gamma.grad).detach().numpy()), EQUAL),
        Side("xi", largest(federated.xi - (xi - rate * xi.grad).detach().numpy()), EQUAL),
    ]
    return judge("F3", "one federated full-batch step is one central step", sides)


# ---- F4 to F7: the exact objective ---------------------------------------------------------------


def check_multiplier_derivative(seed: int) -> Check:
    """F4: dQ2 / d gamma = tau - n lambda off the optimum; the derivative is numerical, of the objective with
    the multipliers solved anew at every point (spec 8.1)."""
    problem = draw_problem(seed)
    tables = feasible_point(problem)
    _, lam = solved(tables, problem)

    def objective(moved: Tables) -> float:
        return exact.drm_objective(*_with_owner(problem, solved(moved, problem)))

    slope = central_difference(objective, tables).gamma
    wanted = problem.tau - len(problem.w) * lam
    side = Side("derivative by gamma", largest(slope - wanted), 1e-5 * max(1.0, largest(wanted)))
    distance = largest(wanted) / len(problem.w)
    note = f"lambda off tau / n by {distance:.2g}"
    return judge("F4", "dQ2/dgamma = tau - n lambda", [side], note, ok=distance > 1e-3)


def _with_owner(problem: Problem, found: tuple[Floats, Floats]) -> tuple[Floats, Ints, Floats, Floats]:
    """The arguments of `drm_objective`, from tilts and multipliers."""
    return found[0], problem.owner, problem.w, found[1]


def judge_optimum(solution: Solution, tau: Floats, slope: float, tolerance: float) -> Check:
    """lambda = tau / n at a critical point of the surrogate in the canonical gauge (spec 2.3).

    tau: (m, C). slope: |grad Q2| per sample there. tolerance: of both."""
    wanted = tau / tau.sum()
    sides = [
        Side("multipliers", largest(solution.multipliers - wanted), tolerance),
        Side("gradient of Q2", slope, tolerance),
    ]
    ok = isinstance(solution, Feasible)
    note = "feasible" if isinstance(solution, Feasible) else solution.reason
    return judge("F5", "lambda = tau / n at the surrogate's optimum", sides, note, ok=ok)


def check_optimum(seed: int) -> Check:
    """F5 at the optimum that BFGS finds, after the canonical shift."""
    problem = draw_problem(seed)
    tables = exact.shift(surrogate_optimum(problem), problem.h, problem.tau)
    T = tables.tilts(problem.h)
    found = exact.solve_multipliers(T, problem.tau)
    pull = exact.exact_pull(T, problem.owner, problem.w, found.multipliers)
    slope = exact.gradient(pull, tables, problem.h).squared_norm(len(problem.w)) ** 0.5
    return judge_optimum(found, problem.tau, slope, 1e-5)


def check_values(seed: int) -> Check:
    """F6: Q2 = Q2~ + n log n where gamma is optimal, for any xi, and differs elsewhere (spec 2.3)."""
    problem = draw_problem(seed)
    n = len(problem.w)

    def gap(tables: Tables) -> float:
        T, lam = solved(tables, problem)
        near = exact.surrogate(T, problem.owner, problem.w, problem.tau) + n * float(np.log(n))
        return abs(exact.drm_objective(T, problem.owner, problem.w, lam) - near)

    away = gap(feasible_point(problem))
    sides = [
        Side("at the optimum", gap(exact.shift(surrogate_optimum(problem), problem.h, problem.tau)), 1e-8),
        Side("calibrated", gap(exact.calibrate(problem.model.tables, problem.h, problem.tau)[0]), 1e-9),
    ]
    return judge("F6", "Q2 = surrogate + n log n", sides, f"off the optimum {away:.2g}", ok=away > 1e-6)


def check_fisher(seed: int) -> Check:
    """F7: with posterior responsibilities the gradient of Q2 at fixed multipliers is that of the profile
    likelihood; the latter is numerical, with the multipliers solved anew (envelope and Fisher, spec 8.1)."""
    problem = draw_problem(seed)
    tables = feasible_point(problem)
    T, lam = solved(tables, problem)
    labels, pi, owner = problem.labels, problem.model.pi, problem.owner

    def likelihood(moved: Tables) -> float:
        tilts, multipliers = solved(moved, problem)
        return exact.profile_log_likelihood(tilts, owner, labels, pi, multipliers)

    w = exact.expectation_step(labels, T, owner, pi)
    closed = exact.gradient(exact.exact_pull(T, owner, w, lam), tables, problem.h)
    slope = central_difference(likelihood, tables)
    sides = [
        Side("gamma", largest(slope.gamma - closed.gamma), 1e-5 * max(1.0, largest(closed.gamma))),
        Side("xi", largest(slope.xi - closed.xi), 1e-5 * max(1.0, largest(closed.xi))),
    ]
    return judge("F7", "gradient of the profile likelihood (Fisher identity)", sides)


# ---- F8 to F11: symmetries of components ---------------------------------------------------------


def check_symmetric_start(seed: int) -> Check:
    """F8: components that start equal stay equal, w = 1 / C (spec 7, row 2)."""
    world = exact.gaussian_world()
    settings = Training(rounds=20, identical=True, rate=0.05)
    run = exact.train(world.draw(seed), settings, seed, n_classes=CLASSES)
    tables = run.model.tables
    sides = [
        Side("responsibilities", largest(run.w - 0.5), EQUAL),
        Side("tables", largest(tables.xi[:, 0] - tables.xi[:, 1], np.ptp(tables.gamma, axis=1)), EQUAL),
    ]
    moved = largest(tables.xi)
    return judge(
        "F8", "identical components stay identical", sides, f"largest xi {moved:.3g}", ok=moved > 0.1
    )


def check_one_component(seed: int) -> Check:
    """F9: with C = 1 the loss is cross-entropy of a softmax classifier of clients, plus log n_i;
    responsibilities are 1 and routing is that classifier (spec 1.2)."""
    problem = draw_problem(seed, C=1)
    T, size = as_tensor(problem.model.tables.tilts(problem.h)), problem.tau[:, 0]
    owner, w = as_tensor(problem.owner), as_tensor(problem.w)
    loss = ratio.drm_loss(T, owner, w, as_tensor(problem.tau))
    logits = T[:, :, 0] + as_tensor(np.log(size))
    classifier = torch.nn.functional.cross_entropy(logits, owner, reduction="none")
    run = exact.train(problem.sample, Training(components=1, rounds=3, batch=16), seed, n_classes=CLASSES)
    scores = ratio.routing_scores(T, torch.ones(len(size), 1).double(), as_tensor(size / size.sum()))
    sides = [
        Side("loss", largest((loss - classifier).numpy() - np.log(size)[problem.owner]), EQUAL),
        Side("responsibilities", largest(run.w - 1, run.model.pi - 1), EQUAL),
        Side("routing", largest((ratio.routing_posterior(scores) - logits.softmax(1)).numpy()), EQUAL),
    ]
    return judge("F9", "one component is a softmax classifier of clients", sides)


def relabel(problem: Problem, client: int, order: Ints) -> Problem:
    """The problem with one client's components renamed; order: (C,) a permutation."""

    def renamed(table: Floats) -> Floats:
        out = table.copy()
        out[client] = out[client][order]
        return out

    model = problem.model
    tables = Tables(renamed(model.tables.gamma), renamed(model.tables.xi))
    other = Model(tables, renamed(model.pi), renamed(model.intercepts), renamed(model.slopes))
    w, mine = problem.w.copy(), problem.owner == client
    w[mine] = w[mine][:, order]
    return replace(problem, model=other, w=w, tau=renamed(problem.tau))


def check_relabelling(seed: int) -> Check:
    """F10: renaming the components of one client permutes its responsibilities and changes nothing else, with
    shared encoders (spec 2.4)."""
    problem, order, client = draw_problem(seed, C=3), np.array([2, 0, 1]), 1
    other = relabel(problem, client, order)
    before, after = observables(problem), observables(other)
    mine = problem.owner == client
    w = before["responsibilities"].copy()
    w[mine] = w[mine][:, order]
    guesses = predictions(other.model, problem.h) - predictions(problem.model, problem.h)
    sides = [Side(k, largest(after[k] - before[k]), 1e-9) for k in ("surrogate", "J", "routing")]
    sides += [
        Side("responsibilities", largest(after["responsibilities"] - w), EQUAL),
        Side("predictions", largest(guesses), EQUAL),
    ]
    changed = largest(after["responsibilities"] - before["responsibilities"])
    return judge(
        "F10", "renaming one client's components", sides, f"w moved by {changed:.2g}", ok=changed > 0
    )


def check_split(seed: int) -> Check:
    """F11: splitting a component's mixing weight between two identical copies changes no routing posterior
    and no prediction (spec 11)."""
    problem = draw_problem(seed)
    share = np.random.default_rng([seed, 3]).uniform(0.1, 0.9, len(problem.tau))

    def doubled(table: Floats) -> Floats:
        return np.concatenate([table, table[:, :1]], axis=1)

    model = problem.model
    pi = doubled(model.pi)
    pi[:, 0] *= share
    pi[:, -1] *= 1 - share
    tables = Tables(doubled(model.tables.gamma), doubled(model.tables.xi))
    other = Model(tables, pi, doubled(model.intercepts), doubled(model.slopes))
    rho = as_tensor(problem.tau.sum(1) / problem.tau.sum())
    posterior = [
        ratio.routing_posterior(
            ratio.routing_scores(as_tensor(one.tables.tilts(problem.h)), as_tensor(one.pi), rho)
        ).numpy()
        for one in (model, other)
    ]
    guesses = predictions(other, problem.h) - predictions(model, problem.h)
    sides = [
        Side("routing", largest(posterior[0] - posterior[1]), EQUAL),
        Side("predictions", largest(guesses), EQUAL),
    ]
    return judge("F11", "splitting a component changes no prediction", sides)


# ---- F12 to F14: votes, momentum, solvers --------------------------------------------------------


def check_votes(seed: int) -> Check:
    """F12: majority votes against a count, ties to the lowest class (spec 5)."""
    rng = np.random.default_rng([seed, 4])
    votes = rng.integers(CLASSES, size=(200, 4))
    wanted, ties = [], 0
    for ballot in votes.tolist():
        count = Counter(ballot)
        most = max(count.values())
        leaders = sorted(k for k, v in count.items() if v == most)
        ties += len(leaders) > 1
        wanted.append(leaders[0])
    found = ratio.majority_vote(as_tensor(votes), CLASSES).numpy()
    wrong = Side("ballots that differ", float((found != np.array(wanted)).sum()), 0.0)
    return judge("F12", "majority vote, ties to the lowest class", [wrong], f"{ties} ties", ok=ties > 0)


def check_momentum_constants(seed: int) -> Check:
    """F13: closed forms of a_E and s_E against the solver's recursion, driven by a unit gradient at one step
    at a time (spec 8.1)."""
    rng = np.random.default_rng([seed, 5])
    sides = []
    for mu in (0.0, 0.3, 0.9, 0.95, 0.99):
        E = int(rng.integers(1, 25))
        effects = []  # displacement by a unit gradient at step s alone
        for s in range(E):
            speed = place = 0.0
            for step in range(E):
                speed = mu * speed + (step == s)
                place += speed
            effects.append(place)
        a, b = exact.momentum_constants(E, mu)
        total, squares = sum(effects), sum(e**2 for e in effects)
        sides.append(Side(f"a_E, mu {mu:g}", abs(a - total) / total, EQUAL))
        sides.append(Side(f"s_E, mu {mu:g}", abs(b - squares) / squares, EQUAL))
    return judge("F13", "momentum constants", sides)


def judge_traps(found: Sequence[tuple[str, Solution]]) -> Check:
    """Solvers' answers to systems without a solution must be rejected, and at least one must have tempted: a
    residual below the tolerance (spec 8.2). found: (who, answer)."""
    accepted = sum(isinstance(answer, Feasible) for _, answer in found)
    tempting = [who for who, answer in found if answer.residual < exact.RESIDUAL]
    note = "tempting: " + (", ".join(sorted(set(tempting))) or "none")
    side = Side("answers accepted", float(accepted), 0.0)
    return judge("F14", "multipliers of systems without a solution", [side], note, ok=bool(tempting))


def check_traps(seed: int) -> Check:
    """F14 on systems that provably have no solution, and on feasible ones where all solvers must agree.

    At the surrogate's optimum with gamma raised until e^a den > 1 everywhere every admissible equation is
    positive: hybr runs to infinity. Of one ratio with values 2 and 3 the equation has the root -3/4, with
    denominators 1/4 and -1/2 and masses that sum to 1: hybr and trf find it."""
    problem = draw_problem(seed)
    centre = exact.calibrate(problem.model.tables, problem.h, problem.tau)[0]
    T, start = centre.tilts(problem.h), problem.tau / problem.tau.sum()
    den = (np.exp(T) * start).sum((1, 2))
    raised = T - np.log(den.min()) + 0.5
    two = np.log(np.array([2.0, 3.0])).reshape(2, 1, 1)
    trial: list[tuple[str, Solution]] = [("Newton", exact.solve_multipliers(raised, problem.tau))]
    trial.append(("Newton", exact.solve_multipliers(two, np.ones((1, 1)))))
    for method in ("hybr", "trf"):
        trial.append((f"{method}, not shifted", exact.solve_with_scipy(raised, start, method)))
        trial.append((f"{method}, negative", exact.solve_with_scipy(two, np.full((1, 1), -0.72), method)))
    check = judge_traps(trial)
    good = feasible_point(problem).tilts(problem.h)
    newton = exact.solve_multipliers(good, problem.tau)
    others = [exact.solve_with_scipy(good, start, "hybr"), exact.solve_with_scipy(good, start, "trf")]
    apart = [
        largest(newton.multipliers - o.multipliers)
        for o in others
        if isinstance(o, Feasible)  # hybr may miss a solution near the edge
    ]
    agree = isinstance(newton, Feasible) and bool(apart) and max(apart) < 1e-5
    tempted = all(any(who.startswith(k) for k in ("hybr", "trf")) for who in (trial[-1][0], trial[-2][0]))
    note = f"{check.note}; {len(apart)} of 2 agree on a feasible system"
    return replace(check, ok=check.ok and agree and tempted, note=note)


# ---- F15 to F17: runs ----------------------------------------------------------------------------


def check_descent(seed: int) -> Check:
    """F15: with full batches, no momentum and gamma calibrated every round J never rises (spec 2.5)."""
    world = exact.gaussian_world()
    settings = Training(
        rounds=25, batch=None, drm_momentum=0.0, supervised_momentum=0.0, rate=0.05, schedule="constant",
        calibrate=1, drm_steps=5, supervised_steps=5,
    )  # fmt: skip
    J = exact.train(world.draw(seed), settings, seed, n_classes=CLASSES).monitor[1:]
    fall = float(J[0] - J[-1])
    side = Side("largest rise", max(0.0, float(np.diff(J).max())), 1e-9)
    return judge("F15", "EM drives J down", [side], f"fell by {fall:.2g} nats", ok=fall > 0.05)


def judge_ground_truth(
    bayes: Scores, one: Scores, two: Scores, J_one: float, J_start: float, J_end: float
) -> Check:
    """C = 2 routes within .01 of Bayes and at least .015 better than C = 1; J falls by at least .5 nats and
    ends below its value for C = 1 (spec 11). one, two: scores by the number of components."""
    sides = [
        Side("routing below Bayes", max(0.0, bayes.routing - two.routing), 0.01),
        Side("gain over C = 1 missing", 0.015, max(0.0, two.routing - one.routing)),
        Side("fall of J missing", 0.5, max(0.0, J_start - J_end)),
        Side("J", J_end, J_one),
    ]
    note = (
        f"routing {two.routing:.4f} of {bayes.routing:.4f}, C = 1 {one.routing:.4f}; "
        f"KL {two.divergence:.4f}, C = 1 {one.divergence:.4f}; "
        f"average {two.average:.3f} of {bayes.average:.3f}"
    )
    return judge("F16", "Gaussian ground truth", sides, note)


def check_ground_truth(seed: int) -> Check:
    """F16 on a sample of the Gaussian world, 120 rounds at five times the published rate."""
    world = exact.gaussian_world()
    sample, fast = world.draw(seed), Training(rounds=120, rate=0.05)
    runs = [exact.train(sample, replace(fast, components=C), seed, n_classes=CLASSES) for C in (1, 2)]
    scores = [exact.population_scores(world, run.model) for run in runs]
    bayes = exact.population_scores(world, world.truth())
    J = [run.monitor for run in runs]
    return judge_ground_truth(bayes, scores[0], scores[1], float(J[0][-1]), float(J[1][0]), float(J[1][-1]))


def judge_bridge(errors: BridgeErrors, n: int) -> Check:
    """In calibrated mode every round is feasible, lambda = tau / n, Gamma2 = 1, and epsilon and delta vanish
    (spec 8.3). n: rows; the tolerances are those of calibration to 1e-12."""
    sides = [
        Side("lambda off tau / n", errors.distance, 1e-8),
        Side("Gamma2 off 1", abs(errors.Gamma2 - 1), 1e-5),
        Side("epsilon", errors.epsilon, 1e-7),
        Side("delta", errors.delta, 1e-10),
    ]
    note = f"{len(errors.rounds)} rounds, |grad F|^2 ends at {errors.profile[-1]:.2g}"
    return judge("F17", "bridge errors, calibrated", sides, note, ok=errors.feasible_fraction == 1)


def check_bridge(seed: int) -> Check:
    """F17 along a run of the Gaussian world with the published momentum; the note has the feasible share of
    the same rounds as trained and shifted."""
    world = exact.gaussian_world()
    sample = world.draw(seed)
    run = exact.train(sample, Training(rounds=40, keep=8), seed, n_classes=CLASSES)
    check = judge_bridge(exact.bridge_errors(run.rounds, sample.x, sample.owner), len(sample.y))
    modes: list[exact.Mode] = ["raw", "shift"]
    shares = [
        f"{mode} {exact.bridge_errors(run.rounds, sample.x, sample.owner, mode).feasible_fraction:.0%}"
        for mode in modes
    ]
    return replace(check, note=f"{check.note}; feasible without calibration: {', '.join(shares)}")


# ---- all of them ---------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[int], Check]] = {
    "F1": check_gauge, "F2": check_cross_entropy, "F3": check_central_step,
    "F4": check_multiplier_derivative, "F5": check_optimum, "F6": check_values, "F7": check_fisher,
    "F8": check_symmetric_start, "F9": check_one_component, "F10": check_relabelling, "F11": check_split,
    "F12": check_votes, "F13": check_momentum_constants, "F14": check_traps, "F15": check_descent,
    "F16": check_ground_truth, "F17": check_bridge,
}  # fmt: skip


def run_checks(
    seeds: Iterable[int],
    *,
    ids: Sequence[str] | None = None,
    on_done: Callable[[str], None] | None = None,
) -> list[Check]:
    """Run the checks and keep, per check, the worst case over the seeds.

    seeds: at least one. ids: of CHECKS, all unless given. on_done: told a check's id when it is through with
    all seeds. Raises ValueError, one line, without seeds and for unknown ids."""
    seeds = list(seeds)
    wanted = list(CHECKS) if ids is None else list(ids)
    if not seeds:
        raise ValueError("checks: got no seeds, needs at least one")
    for name in wanted:
        if name not in CHECKS:
            raise ValueError(f"checks: unknown check '{name}', needs one of {', '.join(CHECKS)}")
    results = []
    for name in wanted:
        found = [replace(c, note=f"{c.note}; seed {s}") for s in seeds for c in [CHECKS[name](s)]]
        worst = max(found, key=lambda check: (not check.ok, check.ratio))
        results.append(replace(worst, ok=all(check.ok for check in found)))
        if on_done is not None:
            on_done(name)
    return results
