"""Quadratic tasks against answers by hand, by brute force and from SciPy's solvers."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize

from fedprism.theory import mixture_geometry as geometry
from fedprism.theory.mixture_geometry import Instance, make_instance


def dense_program(G: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Exact minimum of w'Gw - 2b'w over the simplex: the best feasible solution over all supports."""
    n = len(b)
    best, least = np.zeros(n), np.inf
    for size in range(1, n + 1):
        for support in combinations(range(n), size):
            part = list(support)
            system = np.zeros((size + 1, size + 1))
            system[:size, :size], system[:size, size], system[size, :size] = 2 * G[np.ix_(part, part)], 1, 1
            solved = np.linalg.lstsq(system, np.append(2 * b[part], 1.0), rcond=None)[0][:size]
            if solved.min() < -1e-9 or abs(solved.sum() - 1) > 1e-8:
                continue
            w = np.zeros(n)
            w[part] = solved
            value = float(w @ G @ w - 2 * b @ w)
            if value < least:
                best, least = w, value
    return best, least


def small_world(seed: int = 0, **changes: Any) -> Instance:
    return make_instance(seed, **{"d": 10, "r": 4, "l": 3, "M": 3, "N": 6, "eps": 0.1, **changes})


# ---- instances ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spectrum", geometry.SPECTRA)
def test_the_feature_map_has_the_asked_spectrum(spectrum: str) -> None:
    world = make_instance(3, kappa=9.0, r=5, spectrum=spectrum)
    singular = np.linalg.svd(world.A, compute_uv=False)
    steps = {"geometric": np.log(singular), "linear": singular}[spectrum]
    assert_allclose(singular[[0, -1]], [3, 1], atol=1e-12)  # sqrt(kappa) down to 1
    assert_allclose(np.diff(steps), np.diff(steps)[0], atol=1e-12)
    assert_allclose(world.phi, world.A @ world.A.T)
    assert_allclose(world.spectrum, (1, 9))
    assert world.kappa == pytest.approx(9)


def test_task_optima_are_centred_and_as_wide_as_asked() -> None:
    world = make_instance(1, diam=2.5)
    assert_allclose(world.experts.mean(0), 0, atol=1e-12)
    assert_allclose(world.centre, 0, atol=1e-12)
    widest = max(np.sqrt(((a - b) ** 2).sum()) for a, b in combinations(world.experts, 2))
    assert widest == pytest.approx(2.5)


def test_anchors_have_their_share_and_the_rest_is_spread_evenly() -> None:
    alpha = small_world(eps=0.2).alpha
    assert_allclose(alpha[:3], [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    assert_allclose(alpha.sum(1), 1)
    assert (alpha >= 0).all()


def test_gamma_one_makes_every_client_uniform_and_gamma_bounds_shares_below() -> None:
    assert_allclose(small_world(anchors=False, gamma=1.0).alpha, 1 / 3)
    drawn = small_world(anchors=False).alpha
    assert_allclose(small_world(anchors=False, gamma=0.4).alpha, 0.4 / 3 + 0.6 * drawn)


def test_a_large_concentration_makes_drawn_clients_nearly_uniform() -> None:
    assert np.abs(small_world(anchors=False, conc=1e6).alpha - 1 / 3).max() < 0.01
    assert small_world(anchors=False, conc=1e-2, N=50).alpha.max(1).mean() > 0.95


def test_one_seed_gives_one_world_and_another_seed_another() -> None:
    first, again, other = make_instance(5), make_instance(5), make_instance(6)
    for name in ("A", "experts", "alpha"):
        assert_array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_impurity_and_clients_leave_the_tasks_as_they_are() -> None:
    base = make_instance(2, eps=0.0)
    for other in (make_instance(2, eps=0.4), make_instance(2, anchors=False, gamma=1.0, N=20)):
        assert_array_equal(base.experts, other.experts)
        assert_array_equal(base.A, other.A)
    assert_array_equal(base.alpha[6:], make_instance(2, eps=0.4).alpha[6:])
    assert_array_equal(base.experts, make_instance(2, kappa=100).experts)


def test_client_optima_are_barycentres_and_follow_replaced_mixtures() -> None:
    world = small_world().with_mixtures(np.array([[0.5, 0.5, 0], [0, 0, 1.0]]))
    assert_allclose(world.optima[0], (world.experts[0] + world.experts[1]) / 2)
    assert_allclose(world.optima[1], world.experts[2])


def test_a_single_task_is_a_world_too() -> None:
    world = make_instance(0, M=1, N=2)
    assert_allclose(world.alpha, 1)
    assert geometry.diameter(world.experts) == 0
    assert geometry.separation(world.experts) == np.inf


@pytest.mark.parametrize(
    ("changes", "got", "need"),
    [
        ({"eps": 0.5}, "eps is 0.5", "less than 1/2"),
        ({"eps": -0.1}, "eps is -0.1", "at least 0"),
        ({"gamma": 1.5, "anchors": False}, "gamma is 1.5", "at most 1"),
        ({"gamma": 0.5}, "gamma", "anchors=false"),
        ({"kappa": 0.5}, "kappa is 0.5", "at least 1"),
        ({"kappa": float("inf")}, "kappa is inf", "at least 1"),
        ({"kappa": 1.1e8}, "kappa is 110000000.0", "at most 1e8"),
        ({"diam": 1e-7}, "diam is 1e-07", "at least 1e-6 and at most 1e6"),
        ({"diam": 2e6}, "diam is 2000000.0", "at least 1e-6 and at most 1e6"),
        ({"sigma": 1e-7}, "sigma is 1e-07", "at least 1e-6 and at most 1e6"),
        ({"sigma": 2e6}, "sigma is 2000000.0", "at least 1e-6 and at most 1e6"),
        ({"conc": 1e-4}, "conc is 0.0001", "at least 1e-3 and at most 1e6"),
        ({"conc": 2e6}, "conc is 2000000.0", "at least 1e-3 and at most 1e6"),
        ({"M": "abc"}, "M is 'abc'", "whole number"),
        ({"eps": [0.1]}, "eps is [0.1]", "a number"),
        ({"N": 2}, "N is 2", "at least M = 3"),
        ({"r": 11}, "r is 11", "at most d = 10"),
        ({"spectrum": "flat"}, "'flat'", "geometric, linear"),
        ({"seed": -1}, "seed is -1", "at least 0"),
        ({"l": 0}, "l is 0", "at least 1"),
        ({"conc": 0.0}, "conc is 0.0", "at least 1e-3"),
        ({"diam": -6.0}, "diam is -6.0", "at least 1e-6"),
        ({"sigma": float("nan")}, "sigma is nan", "at least 1e-6"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(changes: dict[str, Any], got: str, need: str) -> None:
    seed = changes.pop("seed", 0)
    with pytest.raises(ValueError, match=r"^instance: ") as refusal:
        small_world(seed, **changes)
    message = str(refusal.value)
    assert got in message
    assert need in message
    assert "\n" not in message


# ---- samples -----------------------------------------------------------------------------------


def test_fewer_samples_than_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^uploads: got 3 samples per client, needs at least r = 4$"):
        geometry.sample_uploads(small_world(), 3, np.random.default_rng(0))


def test_unknown_laws_and_empty_public_sets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"law is 'exact', needs 'wishart' or 'direct'"):
        geometry.sample_moments(small_world(), [5, 5, 5], np.random.default_rng(0), law="exact")
    with pytest.raises(ValueError, match=r"n = 0, needs at least 1"):
        geometry.public_moments(small_world(), 0, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"needs at least 1 and a generator"):
        geometry.public_moments(small_world(), 5)


@pytest.mark.parametrize("law", ["wishart", "direct"])
def test_moments_have_the_mean_and_covariance_of_gaussian_features(law: str) -> None:
    """S = sum phi phi' has mean n Phi and Var S_ab = n (Phi_aa Phi_bb + Phi_ab^2); C - theta S = noise with
    variance sigma^2 n Phi_aa in column a, independent of the row. 3000 draws, within 5 standard errors."""
    world = small_world(r=3, l=2, M=2, N=2, kappa=4.0)
    rng, n, draws = np.random.default_rng(8), 7, 3000
    pairs = [geometry.sample_moments(world, [n, 0], rng, law=law) for _ in range(draws)]
    S = np.stack([pair[0] for pair in pairs])
    noise = np.stack([C - world.experts[0] @ S_one for S_one, C in pairs])
    phi, diagonal = world.phi, np.diag(world.phi)
    variance = n * (np.outer(diagonal, diagonal) + phi**2)
    assert (np.abs(S.mean(0) - n * phi) < 5 * np.sqrt(variance / draws)).all()
    assert_allclose(S.var(0), variance, rtol=0.25)
    expected = np.broadcast_to(world.sigma**2 * n * diagonal, (2, 3))
    assert (np.abs(noise.mean(0)) < 5 * np.sqrt(expected / draws)).all()
    assert_allclose(noise.var(0), expected, rtol=0.2)


@pytest.mark.parametrize("law", ["wishart", "direct"])
def test_least_squares_estimates_spread_as_the_inverse_wishart_says(law: str) -> None:
    """Of one task: E|theta_hat - theta*|^2 = l sigma^2 tr(Phi^-1) / (n - r - 1)."""
    pure = small_world(eps=0.0).with_mixtures(np.repeat(np.eye(3)[:1], 1500, axis=0))
    uploads = geometry.sample_uploads(pure, 30, np.random.default_rng(4), law=law)
    squared = geometry.distances(uploads, pure.experts[0]) ** 2
    expected = 3 * 0.25 * np.trace(np.linalg.inv(pure.phi)) / (30 - 4 - 1)
    assert abs(squared.mean() - expected) < 5 * squared.std() / np.sqrt(1500)


def test_estimates_of_mixed_clients_approach_the_barycentre() -> None:
    world = small_world()
    errors = [
        geometry.distances(geometry.sample_uploads(world, n, np.random.default_rng(0)), world.optima).mean()
        for n in (10_000, 1_000_000)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.3)
    assert errors[1] < 0.01


def test_samples_repeat_with_the_generator() -> None:
    world = small_world()
    one, two = (geometry.sample_uploads(world, 50, np.random.default_rng(3)) for _ in range(2))
    assert_array_equal(one, two)


def test_public_moments_of_the_population_and_of_a_sample_agree() -> None:
    world = small_world()
    S, C = geometry.public_moments(world, None)
    assert_allclose(S, np.stack([world.phi] * 3))
    assert_allclose(C, [expert @ world.phi for expert in world.experts])
    sampled_S, sampled_C = geometry.public_moments(world, 2_000_000, np.random.default_rng(1))
    assert_allclose(sampled_S, S, atol=0.02)
    assert_allclose(sampled_C, C, atol=0.05)


# ---- programs ----------------------------------------------------------------------------------


def test_the_program_is_the_squared_loss_up_to_a_constant() -> None:
    world = small_world()
    S, C = geometry.public_moments(world, 40, np.random.default_rng(0))
    uploads = geometry.sample_uploads(world, 30, np.random.default_rng(1))
    G, b = geometry.upload_programs(uploads, S, C)
    w = np.random.default_rng(2).dirichlet(np.ones(6))
    mixed = sum(share * upload for share, upload in zip(w, uploads, strict=True))
    for m in range(3):
        loss = np.trace(mixed @ S[m] @ mixed.T) - 2 * np.trace(mixed @ C[m].T)
        assert w @ G[m] @ w - 2 * b[m] @ w == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_extraction_agrees_with_the_best_support_and_with_slsqp(seed: int) -> None:
    world = small_world(seed, anchors=False, kappa=50.0)
    uploads = geometry.sample_uploads(world, 40, np.random.default_rng([seed, 3]))
    S, C = geometry.public_moments(world, 60, np.random.default_rng([seed, 4]))
    found = geometry.extract(uploads, S, C, tolerance=1e-13)
    assert found.converged
    assert_allclose(found.weights.sum(1), 1, atol=1e-12)
    assert (found.weights >= 0).all()
    G, b = geometry.upload_programs(uploads, S, C)
    for m in range(3):
        value = found.weights[m] @ G[m] @ found.weights[m] - 2 * b[m] @ found.weights[m]
        w, least = dense_program(G[m], b[m])
        assert value == pytest.approx(least, abs=1e-8)
        assert_allclose(found.experts[m], np.tensordot(w, uploads, 1), atol=1e-4)
        other = minimize(
            lambda w, m=m: w @ G[m] @ w - 2 * b[m] @ w,
            np.full(6, 1 / 6),
            jac=lambda w, m=m: 2 * (G[m] @ w - b[m]),
            method="SLSQP",
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(6)},
            options={"ftol": 1e-13, "maxiter": 1000},
        )
        assert value == pytest.approx(other.fun, abs=1e-6)


def test_extraction_from_exact_anchors_returns_the_tasks_and_the_anchors() -> None:
    world = small_world(eps=0.0)
    found = geometry.extract(world.optima, *geometry.public_moments(world, None))
    assert_allclose(found.experts, world.experts, atol=1e-8)
    assert_allclose(found.weights[:, :3], np.eye(3), atol=1e-8)


def test_a_client_free_of_the_steep_task_takes_weight_from_an_evenly_impure_anchor() -> None:
    """Three orthonormal tasks with risk weights (1, kappa, 1); anchor .8 e0 + .1 e1 + .1 e2 and client
    .5 e0 + .5 e2. With weight w on the client the risk is (.2 + .3w)^2 + kappa (.1 - .1w)^2 + (.1 + .4w)^2,
    smallest at w = (.01 kappa - .1) / (.25 + .01 kappa), from kappa = 10 on. So evenly spread impurity does
    not keep the anchor optimal on eigendirections."""
    for kappa, expected in ((4.0, 0.0), (10.0, 0.0), (100.0, 0.72), (1024.0, 10.14 / 10.49)):
        experts = np.zeros((3, 3, 3))
        experts[range(3), range(3), range(3)] = 1
        mixtures = np.array([[0.8, 0.1, 0.1], [0.5, 0, 0.5]])
        world = Instance(np.diag([1, np.sqrt(kappa), 1]), experts, mixtures, 0.5)
        found = geometry.extract(world.optima, *geometry.public_moments(world, None), tolerance=1e-14)
        assert found.weights[0, 1] == pytest.approx(expected, abs=1e-5)


def test_mixture_estimates_from_exact_uploads_and_experts_are_exact() -> None:
    world = small_world(kappa=20.0)
    assert_allclose(
        geometry.estimate_mixtures(world.optima, world.experts, world.phi), world.alpha, atol=1e-5
    )


def test_mixture_estimates_project_in_the_risk_metric_not_in_frobenius_norm() -> None:
    """Segment from (0, 0) to (1, 1) and Phi = diag(1, 3): of the point (1, 0) the nearest share is 1/4."""
    experts = np.array([[[0.0, 0.0]], [[1.0, 1.0]]])
    found = geometry.estimate_mixtures(np.array([[[1.0, 0.0]]]), experts, np.diag([1.0, 3.0]))
    assert_allclose(found, [[0.75, 0.25]], atol=1e-5)


# ---- estimators of the pool alone --------------------------------------------------------------


def test_successive_projection_returns_exact_vertices_whatever_lies_between() -> None:
    world = make_instance(0, eps=0.0, N=40)
    found = geometry.successive_projection(world.optima, 6)
    assert geometry.vertex_set_error(found, world.experts) < 1e-12


def test_successive_projection_without_lifting_misses_a_vertex_of_centred_tasks() -> None:
    """Centred vertices span one dimension less. Vertices -1 and 1 on a line and one upload beside it: without
    the constant coordinate the second pick is the upload beside the line."""
    uploads = np.array([[[1.0, 0.0]], [[-1.0, 0.0]], [[0.5, 0.1]]])
    lifted = geometry.successive_projection(uploads, 2)
    assert sorted(lifted[:, 0, 0].tolist()) == [-1, 1]
    flat = geometry.successive_projection(uploads, 2, lift=False)
    assert sorted(flat[:, 0, 0].tolist()) == [0.5, 1]


def test_successive_projection_needs_as_many_uploads_as_tasks() -> None:
    with pytest.raises(ValueError, match=r"^successive projection: got 2 uploads, needs at least M = 3$"):
        geometry.successive_projection(np.zeros((2, 1, 1)), 3)


def test_cluster_centres_of_separated_points_are_their_means() -> None:
    rng = np.random.default_rng(0)
    places = np.array([[[0.0, 0.0]], [[10.0, 0.0]], [[0.0, 10.0]], [[10.0, 10.0]]])
    points = places[:, None] + rng.normal(scale=0.1, size=(4, 5, 1, 2))
    centres = geometry.cluster_centres(points.reshape(20, 1, 2), 4, np.random.default_rng(1))
    assert geometry.vertex_set_error(centres, points.mean(1)) < 1e-12


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_cluster_centres_of_what_is_not_finite_are_refused(value: float) -> None:
    uploads = make_instance(0).optima.copy()
    uploads[3, 0, 0] = value
    with pytest.raises(ValueError, match=r"^cluster centres: got uploads that are not finite, needs finite"):
        geometry.cluster_centres(uploads, 6, np.random.default_rng(0))


def test_the_ends_of_the_ranges_are_worlds() -> None:
    for changes in ({"kappa": 1e8, "diam": 1e6, "sigma": 1e-6}, {"kappa": 1, "diam": 1e-6, "sigma": 1e6}):
        world = small_world(conc=1e-3, **changes)
        assert np.isfinite(world.optima).all()
        assert geometry.diameter(world.experts) == pytest.approx(changes["diam"])
    assert np.isfinite(small_world(conc=1e6).alpha).all()


def test_cluster_centres_repeat_with_the_generator() -> None:
    uploads = make_instance(0).optima
    one, two = (geometry.cluster_centres(uploads, 6, np.random.default_rng(3)) for _ in range(2))
    assert_array_equal(one, two)


# ---- errors ------------------------------------------------------------------------------------


def test_bottleneck_assignment_agrees_with_every_permutation() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 5, 6):
        for _ in range(8):
            cost = rng.integers(0, 12, (size, size)).astype(float)  # with ties
            brute = min(max(cost[row, column] for row, column in enumerate(order))
                        for order in permutations(range(size)))  # fmt: skip
            assert geometry.bottleneck(cost) == brute


def test_bottleneck_assignment_is_not_the_cheapest_sum() -> None:
    """The diagonal costs 0 + 5 = 5 in sum and 5 at worst; the other matching 6 in sum and 3 at worst."""
    assert geometry.bottleneck(np.array([[0.0, 3.0], [3.0, 5.0]])) == 3


def test_the_set_error_forgives_names_and_the_identity_error_does_not() -> None:
    experts = np.array([[[0.0]], [[3.0]], [[10.0]]])
    found = np.array([[[10.5]], [[0.0]], [[3.0]]])
    assert geometry.vertex_set_error(found, experts) == pytest.approx(0.5)
    assert geometry.identity_error(found, experts) == pytest.approx(10.5)


def test_distances_are_matched_entry_by_entry_and_broadcast() -> None:
    left = np.array([[[3.0, 4.0]], [[0.0, 1.0]]])
    assert_allclose(geometry.distances(left, np.zeros((2, 1, 2))), [5, 1])
    assert_allclose(geometry.distances(left, np.zeros((1, 2))), [5, 1])


def test_the_risk_norm_weighs_directions_by_phi() -> None:
    phi = np.array([[2.0, 1.0], [1.0, 3.0]])
    assert geometry.phi_norm2(np.array([[1.0, 0.0], [1.0, -1.0]]), phi) == pytest.approx(2 + 2 - 2 + 3)
    assert_allclose(geometry.phi_norm2(np.array([[[1.0, 0.0]], [[0.0, 2.0]]]), phi), [2, 12])


# ---- geometry ----------------------------------------------------------------------------------


def test_geometry_of_a_three_four_five_triangle() -> None:
    triangle = np.array([[[0.0, 0.0]], [[3.0, 0.0]], [[0.0, 4.0]]])
    assert sorted(geometry.pairwise(triangle).tolist()) == [3, 4, 5]
    assert geometry.diameter(triangle) == 5
    assert geometry.separation(triangle) == 3
    assert geometry.affine_height(triangle) == pytest.approx(3 * 4 / 5)  # onto the hypotenuse


def test_the_affine_height_of_two_tasks_is_their_distance_and_of_three_on_a_line_zero() -> None:
    assert geometry.affine_height(np.array([[[0.0, 0.0]], [[3.0, 4.0]]])) == pytest.approx(5)
    line = np.array([[[0.0, 0.0]], [[1.0, 1.0]], [[3.0, 3.0]]])
    assert geometry.affine_height(line) == pytest.approx(0, abs=1e-12)


def two_tasks() -> Instance:
    """|theta_1 - theta_2|_Phi^2 = 4 * 2 + 1 * 1 = 9; Phi = diag(4, 1), difference (sqrt 2, 1)."""
    experts = np.array([[[0.0, 0.0]], [[np.sqrt(2), 1.0]]])
    return Instance(np.diag([2.0, 1.0]), experts, np.array([[0.25, 0.75], [1.0, 0.0]]), 0.5)


def test_mixing_gaps_of_two_tasks_by_hand() -> None:
    """G = a (1 - a) * 9."""
    assert_allclose(geometry.mixing_gaps(two_tasks()), [27 / 16, 0])


def test_mixing_gaps_equal_half_the_weighted_squared_distances() -> None:
    world = make_instance(4)
    expected = [
        sum(a[m] * a[k] * np.trace((world.experts[m] - world.experts[k]) @ world.phi
                                   @ (world.experts[m] - world.experts[k]).T)
            for m, k in combinations(range(6), 2))
        for a in world.alpha
    ]  # fmt: skip
    assert_allclose(geometry.mixing_gaps(world), expected)


def test_constant_routing_of_two_tasks_by_hand() -> None:
    """Distance of mixtures in the second share, squared, times 9."""
    world = two_tasks()
    assert_allclose(geometry.constant_router_excess(world, np.array([0.5, 0.5])), [9 / 16, 9 / 4])
    assert_allclose(geometry.constant_router_excess(world, world.alpha), [0, 0], atol=1e-15)
    each = geometry.constant_router_excess(world, np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert_allclose(each, [9 * 9 / 16, 9])
    swapped = geometry.constant_router_excess(world, np.array([1.0, 0.0]), world.experts[::-1])
    assert_allclose(swapped, [9 / 16, 9])


def test_constant_routing_costs_the_mean_task_risk_above_its_minimum() -> None:
    world, p = make_instance(1), np.random.default_rng(0).dirichlet(np.ones(6))

    def task_risk(share: np.ndarray, client: np.ndarray) -> float:
        mixed = np.tensordot(share, world.experts, 1)
        return sum(a * np.trace((mixed - e) @ world.phi @ (mixed - e).T)
                   for a, e in zip(client, world.experts, strict=True))  # fmt: skip

    expected = [task_risk(p, client) - task_risk(client, client) for client in world.alpha]
    assert_allclose(geometry.constant_router_excess(world, p), expected)


def test_relative_dispersion_by_hand() -> None:
    """Spectral distance of diag(1, 2) and diag(4, 2.5) is 3, the smallest eigenvalue 1 (or .5)."""
    first, second = np.diag([1.0, 2.0]), np.diag([4.0, 2.5])
    assert geometry.relative_dispersion(np.stack([first, second])) == pytest.approx(3)
    assert geometry.relative_dispersion(np.stack([first, second]) / 7) == pytest.approx(3)
    third = np.diag([0.5, 2.0])
    assert geometry.relative_dispersion(np.stack([first, second, third])) == pytest.approx(3.5 / 0.5)
    assert geometry.relative_dispersion(np.stack([first, first])) == 0
    assert geometry.relative_dispersion(np.stack([first, np.diag([0.0, 1.0])])) == np.inf
