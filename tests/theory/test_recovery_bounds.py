"""FedSEE's statements as checks: they hold, agree with answers found another way, and can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedprism.methods.simplex import balanced_quadratic, sinkhorn
from fedprism.theory import recovery_bounds as bounds
from fedprism.theory.mixture_geometry import (
    Floats,
    Instance,
    diameter,
    distances,
    extract,
    make_instance,
    mixing_gaps,
    phi_norm2,
    public_moments,
    separation,
    upload_programs,
    vertex_set_error,
)


def line_world(positions: list[float], alpha: list[list[float]], scale: float = 1.0) -> Instance:
    """Task optima that are numbers, Phi = scale^2: l = r = d = 1."""
    experts = np.array(positions, dtype=np.float64).reshape(-1, 1, 1)
    return Instance(np.array([[scale]]), experts, np.array(alpha, dtype=np.float64), 0.5)


def two_points(world: Instance) -> bounds.Population:
    """Inputs -1 and 1, so that Phi = 1 and Q = 1; codes tell the task exactly."""
    M = len(world.experts)
    codes = np.broadcast_to(np.eye(M)[:, None], (M, 2, M)).copy()
    return bounds.Population(world, np.array([[-1.0], [1.0]]), codes, 1.0)


def simplex_slsqp(objective, gradient, n: int) -> Floats:  # type: ignore[no-untyped-def]
    """Minimiser over the simplex, by SciPy."""
    found = minimize(
        objective, np.full(n, 1 / n), jac=gradient, method="SLSQP", bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 500},
    )  # fmt: skip
    return np.asarray(found.x)


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bounds.CHECKS)
def test_the_statement_holds_on_the_default_world(name: str) -> None:
    (check,) = bounds.run_checks([0, 1, 2], ids=[name])
    assert check.id == name
    assert check.ok, check
    assert 0 < check.ratio <= 1 + 1e-9
    assert "seed" in check.note


OTHER_WORLDS: list[dict[str, object]] = [
    {"kappa": 1024.0, "eps": 0.4},
    {"kappa": 1.0, "eps": 0.0},
    {"anchors": False, "gamma": 1.0},
    {"M": 2, "N": 2, "r": 1, "l": 2, "d": 1},
    {"M": 3, "N": 20, "d": 5, "r": 5, "l": 3, "sigma": 3.0},
]


EXTREMES: list[dict[str, object]] = [
    {"kappa": 1e8},
    {"kappa": 1e8, "diam": 1e6, "sigma": 1e-6},
    {"kappa": 1e8, "eps": 0.0, "diam": 1e-6, "sigma": 1e-6},
    {"diam": 1e-6, "sigma": 1e6},
    {"anchors": False, "conc": 1e-3, "kappa": 1e8},
    {"conc": 1e6, "kappa": 1e4},
]


@pytest.mark.slow
@pytest.mark.parametrize("world", EXTREMES, ids=str)
def test_the_statements_hold_at_the_ends_of_the_ranges_in_a_few_seconds(world: dict[str, object]) -> None:
    start = process_time()
    failed = [check for check in bounds.run_checks([0, 1], world) if not check.ok]
    assert not failed
    assert process_time() - start < 2 * 6  # about 1.5 s a seed, and room for a slow processor


@pytest.mark.slow
@pytest.mark.parametrize("world", OTHER_WORLDS, ids=str)
def test_the_statements_hold_in_other_worlds(world: dict[str, object]) -> None:
    failed = [check for check in bounds.run_checks([0, 1], world) if not check.ok]
    assert not failed


def test_ratios_are_those_measured_independently() -> None:
    """The spec's reference computation: B2 0.37 to 0.39 at kappa 4, B3 at most 0.24, B4 at most 0.05."""
    recovery, finite, mixture = bounds.run_checks([0, 1], ids=["B2", "B3", "B4"])
    assert 0.36 < recovery.ratio < 0.40
    assert finite.ratio < 0.24
    assert mixture.ratio < 0.05


def make_instance_of(seed: int, instance: Mapping[str, Any]) -> Instance:
    return make_instance(seed, **instance)


def test_a_run_keeps_the_worst_seed_and_one_failure_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(seed: int, **instance: object) -> bounds.Check:
        return bounds.Check("X", "fake", seed, 10, seed / 10, seed != 2)

    done: list[str] = []
    monkeypatch.setattr(bounds, "CHECKS", {"X": fake, "Y": fake})
    monkeypatch.setattr(bounds, "WORLDS", dict.fromkeys("XY", make_instance_of))
    found = bounds.run_checks([1, 5, 2], on_done=done.append)
    assert done == ["X", "Y"]
    assert [c.value for c in found] == [2, 2]  # the failed one, though 5 has the larger ratio
    assert not found[0].ok
    assert found[0].note.endswith("seed 2")
    kept = bounds.run_checks([1, 5, 3])[0]
    assert kept.ok and kept.value == 5


def test_a_run_is_the_same_twice() -> None:
    assert bounds.run_checks([4], ids=["B6", "B15"]) == bounds.run_checks([4], ids=["B6", "B15"])


def test_what_is_not_a_number_fails() -> None:
    assert not bounds.judge("X", "x", [bounds.Side("a", np.array([0.1, np.nan]), 1.0)]).ok
    assert not bounds.judge("X", "x", [bounds.Side("a", 0.1, np.nan)]).ok
    assert not bounds.judge(
        "X", "x", [bounds.Side("a", -2.0, -1.0)]
    ).ok  # a bound that should not be negative
    assert bounds.judge("X", "x", [bounds.Side("a", 0.0, 0.0)]).ratio == 0


def test_nothing_compared_is_an_error_and_no_success() -> None:
    with pytest.raises(ValueError, match=r"^side 'a': got no cases, needs at least one; leave the side out$"):
        bounds.judge("X", "x", [bounds.Side("a", np.zeros(0), 1.0), bounds.Side("b", 0.0, 1.0)])
    with pytest.raises(ValueError, match=r"^X: got no inequality to judge"):
        bounds.judge("X", "x", [])


WRONG = [
    ({"seeds": []}, "no seeds"),
    ({"ids": ["B99"]}, "unknown check 'B99'"),
    ({"instance": {"kapa": 2.0}}, "did you mean 'kappa'"),
    ({"instance": {"M": 1}}, "M is 1"),
    ({"instance": {"l": 1}, "ids": ["B12"]}, "l is 1"),
    ({"instance": {"l": 1, "r": 2, "M": 4}, "ids": ["B4"]}, r"l \* r = 2"),
    ({"instance": {"anchors": False, "N": 3}, "ids": ["B15"]}, "N is 3 uploads"),
    ({"instance": {"eps": 0.7}}, "eps is 0.7"),
    ({"instance": {"seed": 3}}, "^checks: unknown setting 'seed'"),
    ({"seeds": [0, -1]}, "^checks: seed is -1"),
    ({"seeds": [0.5]}, "^checks: seed is 0.5"),
    ({"instance": {"anchors": False, "gamma": 0.0}}, "^B16: gamma is 0.0, needs more than 0"),
    ({"instance": {"gamma": 0, "anchors": False}, "ids": ["B16"]}, "^B16: gamma is 0, needs more than 0"),
    ({"instance": {"gamma": "abc"}, "ids": ["B16"]}, "gamma is 'abc'"),
    ({"instance": {"l": 1}}, "^B12: l is 1, needs at least 2 classes"),
    ({"instance": {"l": 1, "r": 2, "M": 4}}, r"^B4: M is 4 with l \* r = 2"),
    ({"instance": {"anchors": False, "N": 3}}, "^B15: N is 3 uploads"),
    *(
        ({"instance": {setting: value}, "ids": [name]}, f"^instance: {setting} is ")
        for name, settings in (("B10", "MN"), ("B12", "lr"), ("B13", "lr"))
        for setting in settings
        for value in ("abc", [2, 3], None, 2.5)
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[f"{a}" for a, _ in WRONG])
def test_wrong_arguments_are_named_in_one_line_before_any_check(
    arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(seed: int, **instance: object) -> bounds.Check:
        raise AssertionError("a check ran")

    monkeypatch.setattr(bounds, "CHECKS", dict.fromkeys(bounds.CHECKS, unwanted))
    with pytest.raises(ValueError, match=message) as error:
        bounds.run_checks(**{"seeds": [0], **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# ---- B1 to B5: gap, recovery, mixtures -----------------------------------------------------------


def test_the_gap_of_two_tasks_on_a_line_is_known() -> None:
    """alpha (1 - alpha) Phi |difference|^2 = 3/16 * 4 * 1; both bounds are attained by two tasks."""
    world = line_world([0, 1], [[0.75, 0.25], [1, 0]], scale=2)
    check = bounds.judge_gaps(world, mixing_gaps(world))
    assert check.ok
    assert check.value == pytest.approx(0.75)
    assert check.ratio == pytest.approx(1)
    assert not bounds.judge_gaps(world, mixing_gaps(world) * 1.01).ok
    assert not bounds.judge_gaps(world, mixing_gaps(world) * 0.99).ok


def corner_world() -> Instance:
    """Three task optima 6 apart on the axes of an isotropic feature space, anchors with impurity 0.2."""
    experts = 6 / np.sqrt(2) * np.eye(3)[:, None]
    return Instance(np.eye(3), experts, np.array([[0.8, 0.2, 0], [0, 0.8, 0.2], [0.2, 0, 0.8]]), 0.5)


def test_the_recovery_bound_is_attained_at_an_anchor() -> None:
    """At kappa 1 no mix of these anchors is better than the anchor, at distance 0.2 * 6."""
    world = corner_world()
    found = extract(world.optima, *public_moments(world, None))
    check = bounds.judge_recovery(world, found.experts, 0.2, resolution=1e-5)
    assert bounds.impurity(world.alpha) == pytest.approx(0.2)
    assert check.ok
    assert check.value == pytest.approx(1.2, abs=1e-5)
    assert check.bound == pytest.approx(1.2)
    assert not bounds.judge_recovery(world, found.experts, 0.19, resolution=1e-5).ok


def test_the_measured_recovery_error_is_that_of_scipys_optimum() -> None:
    settings = {"M": 3, "N": 5, "l": 2, "r": 3, "d": 4, "kappa": 50.0, "eps": 0.3}
    world = make_instance(3, **settings)  # type: ignore[arg-type]
    errors = []
    for target in world.experts:

        def objective(w: Floats, target: Floats = target) -> float:
            return float(phi_norm2(np.tensordot(w, world.optima, 1) - target, world.phi))

        def gradient(w: Floats, target: Floats = target) -> Floats:
            off = np.tensordot(w, world.optima, 1) - target
            return np.asarray(2 * np.tensordot(world.optima, off @ world.phi, 2))

        w = simplex_slsqp(objective, gradient, 5)
        errors.append(np.linalg.norm(np.tensordot(w, world.optima, 1) - target))
    check = bounds.check_recovery(3, **settings)
    assert check.value == pytest.approx(max(errors), abs=1e-4)
    assert check.ok


def test_the_certified_distance_covers_weights_that_are_off() -> None:
    world = make_instance(1, M=3, N=4, l=2, r=2, d=2)
    moments = public_moments(world, None)
    best = extract(world.optima, *moments, tolerance=1e-14)
    rng = np.random.default_rng(0)
    for _ in range(20):
        weights = 0.9 * best.weights + 0.1 * rng.dirichlet(np.ones(4), size=3)
        moved = distances(np.einsum("mi,iab->mab", weights, world.optima), best.experts).max()
        assert moved <= bounds.certified_distance(world.optima, *moments, weights) + 1e-6


def test_understated_impurity_is_noticed_on_a_drawn_world() -> None:
    world = make_instance(0)
    found = extract(world.optima, *public_moments(world, None)).experts
    assert bounds.judge_recovery(world, found, 0.05).ok
    assert bounds.judge_recovery(world, found, 0.01).ratio > 1


def test_terms_of_the_finite_sample_bound_by_hand() -> None:
    # 2 (0.05 * 6 + sqrt((0.6 + 0.3) 0.3)) = 2 (0.3 + 0.519615...)
    assert bounds.upload_error_bound(4.0, 0.05, 6.0, 0.3) == pytest.approx(1.63923048)
    assert bounds.upload_error_bound(4.0, 0.0, 6.0, 0.3) == pytest.approx(0.6)  # sqrt(kappa) delta
    # sqrt((9 + 4^2 * 1^2) / 4) sqrt((3 + log 2 / 0.05) / 100) = 2.5 sqrt(6.6888795 / 100)
    scale = bounds.public_error_scale(3.0, 4.0, 0.75, 0.25, 4.0, 3, 100)
    assert float(scale) == pytest.approx(2.5 * np.sqrt(0.066888795), rel=1e-6)


def test_the_public_data_term_has_the_size_of_restricted_least_squares() -> None:
    """With Phi = I and no distance from the pool's face, the mean square error is sigma^2 d_S / n."""
    world = make_instance(0, kappa=1.0, diam=1e-6, N=6, l=3, r=4, d=8)
    errors, risks, d_S = bounds.public_errors(world, np.random.default_rng(0), [500, 4000], draws=40)
    assert d_S == 5
    assert risks == pytest.approx(errors)
    assert errors == pytest.approx(0.5 * np.sqrt(5 / np.array([500, 4000])), rel=0.2)  # 4 standard errors


def test_the_risk_of_the_public_data_term_does_not_depend_on_conditioning() -> None:
    """In risk norm the mean square error is sigma^2 d_S / n at any kappa; in Frobenius norm less."""
    world = make_instance(0, kappa=1e6, diam=1e-6, N=6, l=3, r=4, d=8)
    errors, risks, _ = bounds.public_errors(world, np.random.default_rng(0), [500, 4000], draws=40)
    assert risks == pytest.approx(0.5 * np.sqrt(5 / np.array([500, 4000])), rel=0.2)
    assert (errors < risks).all()


def test_a_cloud_that_spans_everything_lies_around_the_optimum() -> None:
    """l r = 2 below 12 uploads: no direction is left, so the error is that of least squares with d_S = 2."""
    world = make_instance(0, kappa=1.0, diam=100.0, l=1, r=2, d=8)
    errors, _, d_S = bounds.public_errors(world, np.random.default_rng(0), [500, 4000], draws=100)
    assert d_S == 2
    assert errors == pytest.approx(0.5 * np.sqrt(2 / np.array([500, 4000])), rel=0.2)


def test_finite_sample_recovery_fails_for_a_wrong_rate_or_understated_upload_errors() -> None:
    world = make_instance(0, eps=0.0)
    shifted = world.experts + 0.01
    size = 0.01 * np.sqrt(12 * 16)
    assert bounds.judge_finite_sample(world, shifted, 0.0, size / 2, slope=-0.5).ratio == pytest.approx(1)
    assert not bounds.judge_finite_sample(world, shifted, 0.0, size / 3, slope=-0.5).ok
    assert not bounds.judge_finite_sample(world, shifted, 0.0, size, slope=-0.25).ok


def test_the_mixture_bound_by_hand_and_its_failures() -> None:
    assert bounds.mixture_error_bound(2, 2.0, 4.0, 0.1, 0.2) == pytest.approx(2 * (2 * 0.3 + 0.2))
    world = make_instance(0)
    wrong = np.roll(world.alpha, 1, axis=1)
    assert bounds.judge_mixtures(world, wrong, 1.0, 1.0).ok  # large errors allow any mixture
    assert not bounds.judge_mixtures(world, wrong, 1e-3, 1e-3).ok
    with pytest.raises(ValueError, match="h is 0"):
        bounds.mixture_error_bound(2, 0.0, 4.0, 0.1, 0.2)


def test_reconstruction_by_hand_and_its_failure() -> None:
    """Optima 0 and 2, mixture off by 0.1 in l1: 0.1^2 above the best, against ((eta 2) + xi)^2."""
    world = line_world([0, 2], [[0.5, 0.5]])
    mixtures = np.array([[0.45, 0.55]])
    check = bounds.judge_reconstruction(world, mixtures, world.experts, 0.05, 0.0)
    assert check.value == pytest.approx(0.01)
    assert check.bound == pytest.approx((2 * 2 / 2 * 0.05 * 2) ** 2)
    assert check.ok
    assert not bounds.judge_reconstruction(world, mixtures, world.experts, 0.01, 0.0).ok


# ---- B6 to B9, B14: routing ----------------------------------------------------------------------


def test_figures_of_a_router_equal_sums_over_every_point() -> None:
    rng = np.random.default_rng(0)
    population = bounds.draw_population(make_instance(2, M=3, N=4, l=2, r=3, d=5), rng, n=60)
    world, points = population.world, population.features
    n = len(points)
    p = rng.dirichlet(np.ones(3), size=(3, n))
    found = bounds.route(population, p)
    for i, a in enumerate(world.alpha):
        mean = sum(a[m] * p[m, s] / n for m in range(3) for s in range(n))
        spread = sum(a[m] * np.abs(p[m, s] - mean).sum() / n for m in range(3) for s in range(n))
        risk = sum(
            a[m]
            / n
            * np.linalg.norm((np.tensordot(p[m, s], world.experts, 1) - world.experts[m]) @ points[s]) ** 2
            for m in range(3)
            for s in range(n)
        )
        # best static adapter: weighted least squares on all (point, task) pairs
        x = np.concatenate([np.sqrt(a[m] / n) * points for m in range(3)])
        y = np.concatenate([np.sqrt(a[m] / n) * points @ world.experts[m].T for m in range(3)])
        static = ((y - x @ np.linalg.lstsq(x, y, rcond=None)[0]) ** 2).sum()
        assert found.usage[i] == pytest.approx(mean)
        assert found.variation[i] == pytest.approx(spread)
        assert found.above_oracle[i] == pytest.approx(risk)
        assert found.excess[i] == pytest.approx(risk - static)
    constant = np.array([0.2, 0.5, 0.3])
    slow = bounds.route(population, np.broadcast_to(constant, (3, n, 3)))
    assert bounds.route(population, constant).excess == pytest.approx(slow.excess)


def test_features_of_inputs_on_the_sphere_are_bounded_and_have_the_right_second_moment() -> None:
    world = make_instance(0, d=6, r=3, kappa=9.0)
    features = bounds.sphere_features(world, 40_000, np.random.default_rng(0))
    assert np.linalg.norm(features, axis=1).max() <= bounds.feature_bound(world)
    assert features.T @ features / len(features) == pytest.approx(world.phi, abs=0.15)
    square = replace(world, A=np.eye(3))
    lengths = np.linalg.norm(bounds.sphere_features(square, 50, np.random.default_rng(0)), axis=1)
    assert lengths == pytest.approx(np.sqrt(3))


def test_a_router_that_always_errs_uses_three_quarters_of_the_variation_term() -> None:
    """Optima -1 and 1, an even client. Swapped: risk 4 against 1 for the mean, with V = 1 and Q D = 2."""
    population = two_points(line_world([-1, 1], [[0.5, 0.5]]))
    swapped = bounds.route(population, population.codes[:, :, ::-1])
    right = bounds.route(population, population.codes)
    assert swapped.excess == pytest.approx([3])
    assert right.excess == pytest.approx([-1])
    assert swapped.variation == pytest.approx([1])
    assert bounds.judge_routing(population.world, [swapped], 1.0).ratio == pytest.approx(0.75)
    assert bounds.judge_routing(population.world, [right], 1.0).ok
    # features beyond the stated bound: both sides can be broken
    assert not bounds.judge_routing(population.world, [swapped], 0.8).ok
    assert not bounds.judge_routing(population.world, [right], 0.4).ok


def test_constant_routers_attain_both_sides_on_a_line() -> None:
    population = two_points(line_world([-1, 1], [[0.9, 0.1]]))
    even = bounds.route(population, np.array([0.5, 0.5]))
    assert even.excess == pytest.approx([0.64])  # (2 * 0.4)^2
    check = bounds.judge_routing(population.world, [even], 1.0)
    assert check.ok
    assert check.ratio == pytest.approx(1)
    for factor in (0.99, 1.01):
        wrong = replace(even, excess=even.excess * factor)
        assert not bounds.judge_routing(population.world, [wrong], 1.0).ok


def test_usage_and_concentration_by_hand() -> None:
    alpha, usage = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.9, 0.1], [0.2, 0.8]])
    beta = bounds.concentration(alpha, usage, [0, 1])
    assert beta == pytest.approx([0.2, 0.1])  # the second client does not have the second task
    assert bounds.concentration(alpha, usage[:, ::-1], [1, 0]) == pytest.approx([0.2, 0.1])
    means = alpha @ usage  # (0.55, 0.45) and (0.9, 0.1): off by 0.1 and 0.2 against 0.4 and 0.2
    check = bounds.judge_usage(alpha, means[None], beta[None], [0, 1])
    assert check.ok
    assert check.ratio == pytest.approx(1)
    assert bounds.judge_usage(alpha, means[None, :, ::-1], beta[None], [1, 0]).ratio == pytest.approx(1)
    assert not bounds.judge_usage(alpha, means[None], beta[None] * 0.9, [0, 1]).ok


def test_balanced_usage_forbids_concentration() -> None:
    """A pure client used evenly: beta is 1/2 of |alpha - u|_1 = 1; a claim of less fails."""
    alpha, usage = np.array([[1.0, 0.0]]), np.array([[[0.5, 0.5]]])
    check = bounds.judge_usage(alpha, usage, np.array([[0.5]]), [0, 1])
    assert check.ratio == pytest.approx(1)
    assert "uniform usage 1;" in check.note
    assert not bounds.judge_usage(alpha, usage, np.array([[0.45]]), [0, 1]).ok


def test_oracle_risk_is_attained_by_the_wrong_expert_and_fails_for_larger_features() -> None:
    population = two_points(line_world([-1, 1], [[0.5, 0.5]]))
    swapped = bounds.route(population, population.codes[:, :, ::-1])
    beta = bounds.concentration(population.world.alpha, swapped.task_usage, [0, 1])
    assert beta == pytest.approx([1])
    assert swapped.above_oracle == pytest.approx([4])
    check = bounds.judge_oracle_risk(swapped.above_oracle[None], beta[None], 0.0, 2.0, 1.0)
    assert check.ok
    assert check.ratio == pytest.approx(1)
    assert not bounds.judge_oracle_risk(swapped.above_oracle[None], beta[None], 0.0, 2.0, 0.9).ok
    # experts off by xi = 0.5, exact routing: risk xi^2
    off = bounds.route(population, population.codes, population.world.experts + 0.5)
    assert off.above_oracle == pytest.approx([0.25])
    assert bounds.judge_oracle_risk(
        off.above_oracle[None], 0 * beta[None], 0.5, 2.0, 1.0
    ).ratio == pytest.approx(1)


def test_the_cost_of_balanced_usage_is_attained_by_a_pure_client() -> None:
    population = two_points(line_world([-1, 1], [[1, 0]]))
    even = bounds.route(population, np.array([0.5, 0.5]))
    uniform = np.array([[0.5, 0.5]])
    check = bounds.judge_target(population.world, [even], uniform, 1.0)
    assert check.ok
    assert check.value == pytest.approx(1)  # h^2 / 4 with h = 2
    assert check.ratio == pytest.approx(1)
    assert not bounds.judge_target(
        population.world, [replace(even, excess=even.excess * 0.9)], uniform, 1.0
    ).ok


def test_kl_control_by_hand_and_without_its_mixture_term() -> None:
    even, skew = np.array([[0.5, 0.5]]), np.array([[0.9, 0.1]])
    check = bounds.judge_anchoring(even, even, even, skew[None], 0.0)
    assert check.value == pytest.approx(0.8)
    # KL = (log 5/9 + log 5) / 2 = 0.5108256
    assert check.bound == pytest.approx(np.sqrt(2 * 0.5108256), rel=1e-6)
    assert check.ok
    assert bounds.judge_anchoring(even, skew, skew, skew[None], 0.8).ok
    assert not bounds.judge_anchoring(even, skew, skew, skew[None], 0.7).ok


# ---- B10, B11: transport and smoothing -----------------------------------------------------------


def test_two_pure_anchors_per_task_survive_balancing() -> None:
    world = make_instance(0, M=2, N=2, l=2, r=2, d=2, eps=0.0)
    world = world.with_mixtures(np.repeat(np.eye(2), 2, axis=0))
    moments = public_moments(world, None)
    G, b = (torch.from_numpy(a) for a in upload_programs(world.optima, *moments))
    omega = balanced_quadratic(G, b, range(4)).numpy()
    experts = np.einsum("mi,iab->mab", omega, world.optima)
    assert experts == pytest.approx(world.experts, abs=1e-4)
    assert bounds.judge_coupling(world, experts, world.experts, 0.0, gap=1e-9).ok


def test_the_balanced_program_agrees_with_scipy() -> None:
    world = make_instance(5, M=2, N=3, l=1, r=2, d=2, eps=0.1)
    moments = public_moments(world, None)

    def objective(flat: Floats) -> float:
        experts = np.tensordot(flat.reshape(2, 3), world.optima, 1)
        return float(phi_norm2(experts - world.experts, world.phi).sum())

    constraints = [
        {"type": "eq", "fun": lambda flat: flat.reshape(2, 3).sum(1) - 1},
        {"type": "eq", "fun": lambda flat: flat.reshape(2, 3).sum(0)[:2] - 2 / 3},
    ]
    found = minimize(
        objective, np.full(6, 1 / 3), method="SLSQP", bounds=[(0, 1)] * 6, constraints=constraints,
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    G, b = (torch.from_numpy(a) for a in upload_programs(world.optima, *moments))
    omega = balanced_quadratic(G, b, range(3)).numpy()
    assert objective(omega.ravel()) == pytest.approx(found.fun, abs=1e-5)
    assert np.tensordot(omega, world.optima, 1) == pytest.approx(
        np.tensordot(found.x.reshape(2, 3), world.optima, 1), abs=1e-2
    )


def test_the_coupling_check_notices_a_balanced_program_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        bounds, "balanced_quadratic", lambda G, b, *_, **__: torch.full(b.shape, 1 / b.shape[1])
    )
    check = bounds.check_coupling(0)
    assert not check.ok
    assert "two pure anchors" in check.note


def test_the_coupling_check_notices_a_program_of_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(G: torch.Tensor, b: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return balanced_quadratic(G, -b, *args, **named)

    monkeypatch.setattr(bounds, "balanced_quadratic", turned)
    assert not bounds.check_coupling(0).ok


def test_known_balance_and_descent_by_hand() -> None:
    world = line_world([0, 2], [[1, 0], [0, 1]])
    assert bounds.judge_known_balance(world, world.experts + 1.9e-6).ok  # 1e-6 of the diameter 2
    assert not bounds.judge_known_balance(world, world.experts + 2.1e-6).ok
    assert bounds.judge_descent(np.array([3.0, 1.0]), np.array([2.0, 2.0]), 1.0).ratio == pytest.approx(1)
    assert not bounds.judge_descent(np.array([3.0, 1.1]), np.array([2.0, 2.0]), 1.0).ok


def test_the_coupling_excess_by_hand() -> None:
    """Phi = 4, balanced expert off by 1/2: excess 4 / 4, allowed squared error 1 / 4, met exactly."""
    world = line_world([0, 1], [[1, 0], [0, 1]], scale=2)
    check = bounds.judge_coupling(world, world.experts + 0.5, world.experts, 0.0)
    assert check.ok
    assert (check.value, check.bound) == (pytest.approx(0.25), pytest.approx(0.25))


def test_coupling_fails_without_its_excess_or_for_a_negative_one() -> None:
    world = make_instance(0, eps=0.0)
    off = world.experts + 0.1
    check = bounds.judge_coupling(world, off, world.experts, 0.0)
    assert check.ok  # the excess pays for the error
    assert not bounds.judge_coupling(world, off, off, 0.0).ok
    assert not bounds.judge_coupling(world, world.experts, off, 0.4).ok  # better than the independent optimum


def test_sinkhorn_is_the_kl_projection_on_the_marginals() -> None:
    start = np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]])

    def divergence(flat: Floats) -> float:
        return float((flat * np.log(flat / start.ravel())).sum())

    constraints = [
        {"type": "eq", "fun": lambda flat: flat.reshape(2, 3).sum(1) - 1},
        {"type": "eq", "fun": lambda flat: flat.reshape(2, 3).sum(0)[:2] - 2 / 3},
    ]
    found = minimize(
        divergence, np.full(6, 1 / 3), method="SLSQP", bounds=[(1e-6, 1)] * 6, constraints=constraints,
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert sinkhorn(torch.from_numpy(start), range(3), 60).numpy().ravel() == pytest.approx(found.x, abs=1e-5)


def test_smoothing_by_hand() -> None:
    first, new = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    path = bounds.smoothed_path(first, np.stack([new] * 3), 0.5)
    assert path[:, 0, 0] == pytest.approx([1, 0.75, 0.625])
    check = bounds.judge_smoothing(path, np.stack([new] * 3), 0.5)
    assert check.ok
    assert check.value / check.bound == pytest.approx(1)


def test_steady_drift_attains_drift_over_rate() -> None:
    start, end = np.eye(2), np.full((2, 2), 0.5)
    steps = np.linspace(0, 1, 201)[:, None, None]
    raw = (1 - steps) * start + steps * end
    error = np.linalg.norm(bounds.smoothed_path(start, raw, 0.2) - raw, axis=(1, 2))
    assert error[-1] == pytest.approx(np.linalg.norm(end - start) / 200 / 0.2, rel=1e-6)


def test_smoothing_fails_for_another_rate_and_for_broken_marginals() -> None:
    first, new = np.eye(2), np.full((2, 2), 0.5)
    raw = np.stack([new] * 8)
    path = bounds.smoothed_path(first, raw, 0.5)
    assert not bounds.judge_smoothing(bounds.smoothed_path(first, raw, 0.4), raw, 0.5).ok
    path[3] *= 1.001
    assert not bounds.judge_smoothing(path, raw, 0.5).ok


def test_smoothing_fails_for_sums_that_are_not_those_of_contributions() -> None:
    """Inputs as far off as the output do not excuse it: rows within 1e-9, columns within 1e-3."""
    even = np.full((4, 2, 3), 1 / 3)
    assert bounds.judge_smoothing(even, even, 0.5).ok
    for rows in (1 + 2e-9, 1 - 2e-9):
        assert not bounds.judge_smoothing(even * rows, even * rows, 0.5).ok
    for moved, ok in ((0.9e-3, True), (1.1e-3, False)):  # rows stay 1, a column gains 2 * moved / 2
        shifted = even + np.array([moved, -moved, 0]) / 2
        assert bounds.judge_smoothing(shifted, shifted, 0.5).ok is ok


def test_the_smoothing_check_notices_matrices_that_are_not_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "sinkhorn", lambda omega, *_: omega)
    check = bounds.check_smoothing(0)
    assert not check.ok
    assert "sums" in check.note


@pytest.mark.parametrize("broken", ["rate swapped", "no smoothing", "never moves"])
def test_the_smoothing_check_notices_another_smoothing(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    smooth = bounds.smooth_contributions
    changed = {
        "rate swapped": lambda rate: 1 - rate,
        "no smoothing": lambda _: 1.0,
        "never moves": lambda _: 0.0,
    }
    monkeypatch.setattr(
        bounds,
        "smooth_contributions",
        lambda C, new, columns, rate: smooth(C, new, columns, changed[broken](rate)),
    )
    assert not bounds.check_smoothing(0).ok


# ---- B12, B13: general losses --------------------------------------------------------------------


def test_the_general_loss_says_which_conditioning_it_ran_at() -> None:
    assert "kappa 1e+04 (at most 1e4)" in bounds.check_general_loss(0, kappa=1e8).note
    assert "kappa 9 (at most 1e4)" in bounds.check_general_loss(0, kappa=9.0).note


def tiny_tasks(ridge: float = 0.1, seed: int = 0, **settings: int) -> bounds.SoftmaxTasks:
    world = make_instance(seed, **{"M": 3, "N": 4, "l": 3, "r": 2, "d": 2, **settings})
    rng = np.random.default_rng(seed)
    return bounds.draw_softmax_tasks(world, rng, tilt=0.5, ridge=ridge, base=0.5)


def test_gradient_and_hessian_are_those_of_finite_differences() -> None:
    tasks, mixture = tiny_tasks(), np.array([0.2, 0.5, 0.3])
    theta = np.random.default_rng(1).standard_normal(tasks.shape)
    step, columns = 1e-5, []
    for k in range(theta.size):
        move = np.zeros(theta.size)
        move[k] = step
        move = move.reshape(tasks.shape, order="F")
        slope = (tasks.loss(theta + move, mixture) - tasks.loss(theta - move, mixture)) / (2 * step)
        assert tasks.gradient(theta, mixture).ravel(order="F")[k] == pytest.approx(slope, abs=1e-8)
        change = tasks.gradient(theta + move, mixture) - tasks.gradient(theta - move, mixture)
        columns.append(change.ravel(order="F") / (2 * step))
    assert tasks.hessian(theta, mixture) == pytest.approx(np.array(columns), abs=1e-8)


def test_the_loss_is_the_mean_over_points_and_classes() -> None:
    tasks, theta = tiny_tasks(ridge=0.0), np.array([[0.3, -1.0], [0.5, 0.2], [0.0, 0.7]])
    total = 0.0
    for s, x in enumerate(tasks.features):
        z = tasks.base[s] + theta @ x
        p = np.exp(z) / np.exp(z).sum()
        for m, share in enumerate((0.2, 0.5, 0.3)):
            total -= share * tasks.mass[m, s] * float((tasks.labels[m, s] * np.log(p)).sum())
    assert tasks.loss(theta, np.array([0.2, 0.5, 0.3])) == pytest.approx(total)


def test_optima_agree_with_a_descent_on_the_loss() -> None:
    tasks, mixture = tiny_tasks(), np.array([0.2, 0.5, 0.3])
    found = minimize(lambda v: tasks.loss(v.reshape(tasks.shape), mixture), np.zeros(6), tol=1e-12)
    assert tasks.optimum(mixture).ravel() == pytest.approx(found.x, abs=1e-4)


def test_general_extraction_agrees_with_scipy() -> None:
    tasks = tiny_tasks()
    alpha = np.array([[0.7, 0.3, 0], [0, 0.6, 0.4], [0.4, 0, 0.6], [0.3, 0.3, 0.4]])
    uploads = np.stack([tasks.optimum(a) for a in alpha])
    experts, gap = bounds.extract_general(tasks, uploads)
    assert gap <= 1e-11
    for m, one in enumerate(np.eye(3)):

        def objective(w: Floats, one: Floats = one) -> float:
            return tasks.loss(np.tensordot(w, uploads, 1), one)

        def gradient(w: Floats, one: Floats = one) -> Floats:
            return np.asarray(np.tensordot(uploads, tasks.gradient(np.tensordot(w, uploads, 1), one), 2))

        w = simplex_slsqp(objective, gradient, 4)
        assert tasks.loss(experts[m], one) == pytest.approx(objective(w), abs=1e-9)
        assert experts[m] == pytest.approx(np.tensordot(w, uploads, 1), abs=1e-3)


def test_curvature_constants_cover_what_is_met() -> None:
    tasks, rng = tiny_tasks(), np.random.default_rng(2)
    found = bounds.softmax_curvature(tasks, 1.0)
    for _ in range(30):
        theta = 3 * rng.standard_normal(tasks.shape)
        move = 0.1 * rng.standard_normal(tasks.shape)
        H = [tasks.hessian(theta, one) for one in np.eye(3)]
        values = np.linalg.eigvalsh(np.stack(H))
        assert found.mu - 1e-12 <= values.min() and values.max() <= found.L
        assert max(np.linalg.norm(a - b, 2) for a in H for b in H) <= found.dispersion
        change = np.linalg.norm(tasks.hessian(theta + move, np.eye(3)[0]) - H[0], 2)
        assert change <= found.lipschitz * np.linalg.norm(move)


def test_the_perturbed_barycentre_fails_when_curvature_is_understated() -> None:
    tasks = tiny_tasks(ridge=0.5)
    alpha = np.array([[0.95, 0.05, 0], [0, 0.95, 0.05], [0.05, 0, 0.95], [0.3, 0.3, 0.4]])
    experts = np.stack([tasks.optimum(one) for one in np.eye(3)])
    optima = np.stack([tasks.optimum(a) for a in alpha])
    extracted, _ = bounds.extract_general(tasks, optima)
    constants = bounds.softmax_curvature(tasks, diameter(experts))
    assert constants.varkappa < 1
    assert bounds.judge_general_loss(alpha, experts, optima, extracted, constants, 0.05).ok
    none = replace(constants, dispersion=0.0, lipschitz=0.0)
    assert not bounds.judge_general_loss(alpha, experts, optima, extracted, none, 0.05).ok
    far = experts + 2 * constants.D
    assert not bounds.judge_general_loss(alpha, experts, optima, far, constants, 0.05).ok
    loose = replace(constants, dispersion=1.0)  # varkappa above 1 says nothing
    assert not bounds.judge_general_loss(alpha, experts, optima, extracted, loose, 0.05).ok


def coin_tasks() -> bounds.SoftmaxTasks:
    """Two classes, two points +-1 of one feature, two tasks that weight them 3:1 and 1:3."""
    mass = np.array([[0.75, 0.25], [0.25, 0.75]])
    return bounds.SoftmaxTasks(
        np.array([[1.0], [-1.0]]), np.zeros((2, 2)), mass, np.full((2, 2, 2), 0.5), 0.0
    )


def test_two_even_classes_attain_both_ends_of_the_curvature_interval() -> None:
    """At theta = 0, p = 1/2 and diag p - pp' is 1/2 on centred directions: l pi^2 = 2/4 and 1/2."""
    check = bounds.judge_curvature(coin_tasks(), np.zeros((1, 2, 1)), 0.0, 1.0)
    assert check.ok
    assert check.ratio == pytest.approx(1)
    assert (check.value, check.bound) == (pytest.approx(0.5), pytest.approx(0.5))


def test_three_even_classes_attain_the_smallest_curvature() -> None:
    """p = 1/3 and diag p - pp' is 1/3 on centred directions: l pi^2 = 3/9, below 1/2."""
    tasks = replace(coin_tasks(), base=np.zeros((2, 3)), labels=np.full((2, 2, 3), 1 / 3))
    check = bounds.judge_curvature(tasks, np.zeros((1, 3, 1)), 1.0, 1.0)
    assert check.ok
    assert "worst: smallest curvature; others: largest curvature 0.667" in check.note
    assert check.ratio == pytest.approx(1)


def test_two_of_three_classes_attain_the_largest_curvature() -> None:
    """p = (1/2, 1/2, almost 0): the direction (1, -1, 0) / sqrt 2 has curvature 1/2."""
    tasks = replace(coin_tasks(), base=np.array([[0.0, 0.0, -10.0]] * 2), labels=np.full((2, 2, 3), 1 / 3))
    check = bounds.judge_curvature(tasks, np.zeros((1, 3, 1)), 0.0, 1.0)
    assert check.ok
    assert "worst: largest curvature" in check.note
    assert check.ratio == pytest.approx(1, abs=1e-4)


def test_global_curvature_constants_by_hand() -> None:
    """Points +-1 with second moment 1, masses 3:1 and 1:3: |difference of masses| sums to 1."""
    found = bounds.softmax_curvature(replace(coin_tasks(), ridge=0.25), 2.0)
    assert (found.mu, found.L) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (found.dispersion, found.lipschitz) == (pytest.approx(0.5), pytest.approx(1.5))
    assert found.varkappa == pytest.approx((0.5 + 1.5 * 2 / 2) / 0.25)


def test_softmax_curvature_fails_for_features_beyond_their_bound() -> None:
    tasks = tiny_tasks(ridge=0.0)
    rng = np.random.default_rng(0)
    thetas = rng.standard_normal((4, *tasks.shape))
    thetas -= thetas.mean(1, keepdims=True)
    size = float(distances(thetas, 0 * thetas).max())
    assert bounds.judge_curvature(tasks, thetas, size, tasks.feature_norm).ok
    assert not bounds.judge_curvature(tasks, thetas, size, 0.05 * tasks.feature_norm).ok
    assert not bounds.judge_curvature(
        tasks, 5 * thetas, 0.1 * size, tasks.feature_norm
    ).ok  # outside the ball
    with pytest.raises(ValueError, match=r"ridge is 0\.1"):
        bounds.judge_curvature(replace(tasks, ridge=0.1), thetas, size, 1.0)


# ---- B15 to B17: identity ------------------------------------------------------------------------


def test_the_midpoint_attains_the_identity_floor_and_knowing_the_labels_breaks_it() -> None:
    world = line_world([0, 2], [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    twin = bounds.swap_farthest(world)
    assert twin.experts.ravel().tolist() == [2, 0]
    assert twin.optima == pytest.approx(world.optima)
    middle = [np.ones((2, 1, 1))]
    check = bounds.judge_identity(world, twin, middle, middle)
    assert check.ok
    assert check.ratio == pytest.approx(1)
    assert not bounds.judge_identity(world, twin, [world.experts], [twin.experts]).ok
    other_pool = twin.with_mixtures(world.alpha)
    assert not bounds.judge_identity(world, other_pool, middle, middle).ok


def test_the_twin_exchanges_the_farthest_pair() -> None:
    world = line_world([3, 0, 1, 7], [[0.1, 0.2, 0.3, 0.4]])
    twin = bounds.swap_farthest(world)
    assert twin.experts.ravel().tolist() == [3, 7, 1, 0]
    assert twin.alpha.tolist() == [[0.1, 0.4, 0.3, 0.2]]


def test_a_shrunk_world_on_a_line_by_hand() -> None:
    world = line_world([0, 1], [[0.75, 0.25], [0.25, 0.75]])
    twin = bounds.shrink(world, 0.5)
    assert twin.experts.ravel() == pytest.approx([0.25, 0.75])
    assert twin.alpha == pytest.approx(np.eye(2))
    assert twin.optima == pytest.approx(world.optima)
    between = [(world.experts + twin.experts) / 2]
    check = bounds.judge_interior(world, twin, 0.5, between, between)
    assert check.value == pytest.approx(0.125)  # (M - 1) / (2 M) t h = 1/4 * 1/2 * 1
    assert check.ok
    assert check.ratio == pytest.approx(1)
    assert not bounds.judge_interior(world, twin, 0.5, [world.experts], [twin.experts]).ok
    with pytest.raises(ValueError, match=r"t is 0\.6"):
        bounds.shrink(world, 0.6)


def test_the_interior_check_takes_the_pull_it_is_given() -> None:
    assert "t 0.01," in bounds.check_interior(0, gamma=0.01).note
    whole = bounds.check_interior(0, gamma=1.0)  # every client uniform; t = separation / 2 diameter
    assert whole.ok
    assert whole.note == bounds.check_interior(0, gamma=1.0, eps=0.3).note


def test_vertex_errors_are_those_of_the_best_permutation() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        found, experts = rng.standard_normal((2, 4, 2, 3))
        best = min(
            max(np.linalg.norm(found[k] - experts[m]) for m, k in enumerate(order))
            for order in permutations(range(4))
        )
        assert vertex_set_error(found, experts) == pytest.approx(best)


def test_the_margin_of_two_tasks_on_a_line_by_hand() -> None:
    """Candidates a quarter of the way: task losses 1/16 and 9/16, margin 1/2 against 1/4."""
    world = line_world([0, 1], [[0.5, 0.5]])
    assert bounds.margin_radius(world) == pytest.approx(0.25)
    check = bounds.judge_margin(world, [np.array([[[0.25]], [[0.75]]])])
    assert check.ok
    assert check.ratio == pytest.approx(0.5)
    assert not bounds.judge_margin(world, [np.array([[[0.45]], [[0.55]]])]).ok
    assert not bounds.judge_margin(world, [world.experts[::-1]]).ok  # the wrong one is chosen


def test_the_margin_fails_for_candidates_too_far_away() -> None:
    world, rng = make_instance(0), np.random.default_rng(0)
    radius = bounds.margin_radius(world)
    assert radius == pytest.approx(separation(world.experts) / 6)
    sets = bounds.adverse_candidates(world, radius, rng)
    assert all(distances(V, world.experts) == pytest.approx(radius) for V in sets)
    assert bounds.judge_margin(world, sets).ok
    assert not bounds.judge_margin(world, bounds.adverse_candidates(world, 3 * radius, rng)).ok
