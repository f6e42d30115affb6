"""Experts outside the hull under squared loss, against dense Gaussian algebra, SciPy and worked numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

from fedprism.methods import affine_span
from fedprism.methods.affine_span import (
    RIDGES,
    PublicMoments,
    affine_expert,
    affine_weights,
    choose_ridge,
    convex_experts,
    merge,
    posterior,
    public_least_squares,
    recover,
)

Floats = NDArray[np.float64]


def moments(phi: Floats, y: Floats) -> PublicMoments:
    """Moments of features (r, n) and labels (l, n)."""
    n = phi.shape[1]
    return PublicMoments(phi @ phi.T / n, y @ phi.T / n, float((y**2).sum()) / n, n)


def draw(n: int, seed: int = 0, l: int = 2, r: int = 4) -> tuple[Floats, Floats]:  # noqa: E741
    """Features (r, n) and labels (l, n) of a random expert with noise of standard deviation 0.3."""
    rng = np.random.default_rng(seed)
    phi = rng.standard_normal((r, n)) * np.linspace(1, 2, r)[:, None]
    return phi, rng.standard_normal((l, r)) @ phi + 0.3 * rng.standard_normal((l, n))


def uploads_of(N: int, seed: int = 1, l: int = 2, r: int = 4) -> Floats:  # noqa: E741
    return np.random.default_rng(seed).standard_normal((N, l, r)) * 0.8 + 0.3


# ---- moments -------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_squared_residual() -> None:
    phi, y = draw(7)
    theta = uploads_of(1)[0]
    direct = np.mean([np.sum((y[:, k] - theta @ phi[:, k]) ** 2) for k in range(7)])
    assert moments(phi, y).loss(theta) == pytest.approx(float(direct), rel=1e-12)


def test_merged_moments_are_those_of_the_data_side_by_side() -> None:
    sets = [draw(n, seed) for seed, n in enumerate((3, 8, 1))]
    whole = moments(np.hstack([phi for phi, _ in sets]), np.hstack([y for _, y in sets]))
    merged = merge([moments(phi, y) for phi, y in sets])
    assert merged.n == 12
    assert np.allclose(merged.S, whole.S, atol=1e-13)
    assert np.allclose(merged.C, whole.C, atol=1e-13)
    assert merged.energy == pytest.approx(whole.energy, rel=1e-13)


@pytest.mark.parametrize("n", [9, 4, 3, 1])
def test_least_squares_alone_is_numpy_s_and_of_least_norm_with_few_examples(n: int) -> None:
    phi, y = draw(n)
    reference = np.linalg.lstsq(phi.T, y.T, rcond=None)[0].T  # n < r = 4: NumPy returns the least norm too
    assert np.allclose(public_least_squares(moments(phi, y)), reference, atol=1e-8)


# ---- weights of sum one --------------------------------------------------------------------------


def ridge_objective(uploads: Floats, phi: Floats, y: Floats, ridge: float) -> Any:
    """The program in the data themselves: w -> mean loss + ridge s |w - 1/N|^2.

    s is the mean over a basis of weights of sum zero of the loss's second differences, here from e_i - e_j:
    sum over pairs of |change of the prediction|^2 / N = trace of the curvature on that subspace."""
    N, n = len(uploads), phi.shape[1]
    predictions = uploads @ phi  # (N, l, n)
    trace = sum(float(((predictions[i] - predictions[j]) ** 2).sum()) / n for i in range(N) for j in range(i))
    s = trace / N / (N - 1)

    def value(w: Floats) -> float:
        residual = y - np.einsum("i,iab->ab", w, predictions)
        return float((residual**2).sum()) / n + ridge * s * float(((w - 1 / N) ** 2).sum())

    return value


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.3, 10.0])
@pytest.mark.parametrize("n", [3, 30])
def test_affine_weights_agree_with_slsqp(ridge: float, n: int) -> None:
    uploads, (phi, y) = uploads_of(5), draw(n)
    value = ridge_objective(uploads, phi, y, ridge)
    weights = affine_weights(uploads, moments(phi, y), ridge)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
    found = minimize(
        value, np.full(5, 0.2), method="SLSQP", options={"ftol": 1e-15, "maxiter": 1000},
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )  # fmt: skip
    assert value(weights) <= found.fun + 1e-9
    assert np.allclose(weights, found.x, atol=2e-3)
    assert float(weights.min()) < 0 or ridge > 0.1  # the program leaves the hull here
    assert np.allclose(
        affine_expert(uploads, moments(phi, y), ridge), np.einsum("i,iab->ab", weights, uploads)
    )


def test_a_growing_ridge_leads_to_equal_weights() -> None:
    uploads, public = uploads_of(5), moments(*draw(30))
    distances = [
        float(np.abs(affine_weights(uploads, public, ridge) - 0.2).max()) for ridge in (0, 1, 100, 1e9)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.1
    assert distances[-1] < 1e-8


def test_without_a_ridge_uploads_that_say_the_same_share_their_weight() -> None:
    uploads = uploads_of(3)
    weights = affine_weights(np.concatenate([uploads, uploads[:1]]), moments(*draw(30)), 0.0)
    single = affine_weights(uploads, moments(*draw(30)), 0.0)
    assert weights[0] == pytest.approx(weights[3], abs=1e-9)
    assert np.r_[weights[0] + weights[3], weights[1:3]] == pytest.approx(single, abs=1e-8)


# ---- posterior -----------------------------------------------------------------------------------


def prior_covariance(uploads: Floats, span: float, off: float) -> Floats:
    """(l r, l r) covariance span^2 sum d d' + off^2 I of a flattened expert: sum d d' is the uploads'."""
    flat = uploads.reshape(len(uploads), -1)
    spread = flat - flat.mean(0)
    return span**2 * spread.T @ spread / len(flat) + off**2 * np.eye(flat.shape[1])


def dense_posterior_mean(
    uploads: Floats, phi: Floats, y: Floats, centre: Floats, noise: float, span: float, off: float
) -> Floats:
    """argmax over theta (l r,) of the likelihood times the prior, by one dense system."""
    l = len(y)  # noqa: E741
    P = prior_covariance(uploads, span, off)
    precision = np.kron(np.eye(l), phi @ phi.T) / noise**2
    pull = ((y - centre @ phi) @ phi.T).reshape(-1) / noise**2
    moved = np.linalg.solve(np.eye(len(P)) + P @ precision, P @ pull)  # P may be singular
    return centre + moved.reshape(centre.shape)


def dense_log_density(
    uploads: Floats, phi: Floats, y: Floats, centre: Floats, noise: float, span: float, off: float
) -> float:
    """log density of all labels under the marginal Gaussian."""
    l, n = y.shape  # noqa: E741
    H = np.kron(np.eye(l), phi.T)  # labels (l n,) of an expert (l r,)
    covariance = H @ prior_covariance(uploads, span, off) @ H.T + noise**2 * np.eye(l * n)
    return float(multivariate_normal((centre @ phi).reshape(-1), covariance).logpdf(y.reshape(-1)))


def data_constant(phi: Floats, l: int) -> float:  # noqa: E741
    """What the log evidence leaves out: n l log(2 pi) / 2, and the change of variables from labels to
    regressions on the eigenvectors of phi phi', log |eigenvalue| / 2 for each of them and each output."""
    n = phi.shape[1]
    values = np.linalg.svd(phi, compute_uv=False) ** 2
    return -n * l / 2 * float(np.log(2 * np.pi)) - l / 2 * float(np.log(values[values > 1e-9]).sum())


@pytest.mark.parametrize("N", [3, 12])  # 12 uploads span all 8 entries
@pytest.mark.parametrize("n", [2, 30])
def test_the_posterior_s_expert_is_the_dense_map_at_its_strengths(n: int, N: int) -> None:
    uploads, (phi, y) = uploads_of(N), draw(n)
    for centre in (uploads.mean(0), np.zeros((2, 4))):
        found = posterior(uploads, moments(phi, y), centre)
        dense = dense_posterior_mean(uploads, phi, y, centre, found.noise, found.span, found.off)
        assert np.allclose(found.expert, dense, atol=1e-6)
        assert float(np.abs(found.expert - centre).max()) > 0.05


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize(
    ("noise", "span", "off"), [(0.3, 1.0, 0.2), (1.5, 4.0, 0.7), (0.1, 0.3, 1.2), (0.4, 2.0, 1e-3)]
)
def test_the_log_evidence_is_the_density_of_the_labels_at_any_strengths(
    n: int, noise: float, span: float, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, (phi, y) = uploads_of(3), draw(n)
    logs = 2 * np.log([noise, span, off])
    monkeypatch.setattr(affine_span, "minimize", lambda *given, **named: SimpleNamespace(x=logs))
    centre = uploads.mean(0)
    found = posterior(uploads, moments(phi, y), centre)
    assert (found.noise, found.span, found.off) == pytest.approx((noise, span, off), rel=1e-12)
    dense = dense_log_density(uploads, phi, y, centre, noise, span, off)
    assert found.log_evidence + data_constant(phi, 2) == pytest.approx(dense, abs=1e-6)
    mean = dense_posterior_mean(uploads, phi, y, centre, noise, span, off)
    assert np.allclose(found.expert, mean, atol=1e-8)


@pytest.mark.parametrize("n", [3, 12])
def test_no_random_strengths_have_more_evidence_than_the_chosen_ones(n: int) -> None:
    uploads, (phi, y) = uploads_of(3), draw(n)
    centre = uploads.mean(0)
    found = posterior(uploads, moments(phi, y), centre)
    best = dense_log_density(uploads, phi, y, centre, found.noise, found.span, found.off)
    assert found.log_evidence + data_constant(phi, 2) == pytest.approx(best, abs=1e-6)
    rng = np.random.default_rng(5)
    tried = np.exp(rng.uniform(np.log([0.1, 0.05, 1e-3]), np.log([1.0, 20.0, 3.0]), (400, 3)))
    density = [dense_log_density(uploads, phi, y, centre, *strengths) for strengths in tried]
    near = np.array([found.noise, found.span, found.off]) * np.exp(0.2 * rng.standard_normal((100, 3)))
    density += [dense_log_density(uploads, phi, y, centre, *strengths) for strengths in near]
    assert max(density) <= best + 1e-6


def test_a_coarse_grid_of_strengths_never_finds_more_evidence_in_twenty_worlds() -> None:
    # half of the worlds have uploads far smaller than the expert: e must be free to outgrow them
    rng = np.random.default_rng(9)
    factors = [
        (a, t, v) for a in (0.6, 1.0, 1.7) for t in (0.02, 0.4, 3, 20) for v in (1e-3, 0.03, 0.3, 1, 3)
    ]
    for world in range(20):
        uploads = rng.standard_normal((4, 1, 3)) * (0.02 if world % 2 else 1.0)
        phi = rng.standard_normal((3, 6))
        y = rng.standard_normal((1, 3)) @ phi + 0.3 * rng.standard_normal((1, 6))
        centre = uploads.mean(0)
        found = posterior(uploads, moments(phi, y), centre)
        grid = [dense_log_density(uploads, phi, y, centre, a * found.noise, t, v) for a, t, v in factors]
        assert max(grid) <= found.log_evidence + data_constant(phi, 1) + 1e-6, world


def test_an_expert_many_standard_deviations_along_the_span_is_reached() -> None:
    # uploads c - d, c, c + d: standard deviation d sqrt(2 / 3); the expert c + 40 d; 3 examples, 6 features
    rng = np.random.default_rng(12)
    c, d = rng.standard_normal((2, 2, 6))
    phi = rng.standard_normal((6, 3))
    y = (c + 40 * d) @ phi + 0.1 * rng.standard_normal((2, 3))
    uploads = np.stack([c - d, c, c + d])
    found = posterior(uploads, moments(phi, y), c)
    assert found.expert == pytest.approx(c + 40 * d, abs=0.5)
    assert 20 < found.span < 55  # z = 40 / sqrt(2 / 3) = 49, alone in its kind
    best = found.log_evidence + data_constant(phi, 2)
    for span in (1.0, 5.0, 25.0, 49.0):
        assert dense_log_density(uploads, phi, y, c, found.noise, span, found.off) <= best + 1e-4


def test_one_upload_or_equal_uploads_leave_the_public_set_to_decide() -> None:
    phi, y = draw(40)
    for uploads in (uploads_of(1), np.repeat(uploads_of(1), 3, axis=0)):
        found = posterior(uploads, moments(phi, y), uploads.mean(0))
        dense = dense_posterior_mean(uploads, phi, y, uploads[0], found.noise, 0.0, found.off)
        assert np.allclose(found.expert, dense, atol=1e-8)
        for hull in affine_span.HULLS:
            assert np.isfinite(recover(uploads, [moments(phi, y)] * 2, hull).expert).all()


# ---- choosing ------------------------------------------------------------------------------------


def test_two_tasks_on_a_line_lie_outside_the_hull_and_are_found_there() -> None:
    # tasks 0 and e; clients of shares .4 and .6 upload .4 e and .6 e; e = -2 (.4 e) + 3 (.6 e)
    e = np.array([[1.0, 2.0]])
    uploads = np.stack([0.4 * e, 0.6 * e])
    phi = np.array([[1.0, 0.0, 1.0, 2.0], [0.0, 1.0, 1.0, -1.0]])
    folds = [moments(phi[:, k : k + 2], (e @ phi)[:, k : k + 2]) for k in (0, 2)]
    assert affine_weights(uploads, merge(folds), 0.0) == pytest.approx([-2, 3], abs=1e-9)
    assert recover(uploads, folds, "convex").expert == pytest.approx(0.6 * e, abs=1e-6)
    for hull, chosen in (("affine", "affine"), ("auto", "affine"), ("posterior", "posterior: ")):
        found = recover(uploads, folds, hull)
        assert found.chosen.startswith(chosen)
        assert found.expert == pytest.approx(e, abs=1e-4)


def test_the_convex_expert_is_the_best_of_a_fine_grid_of_combinations() -> None:
    uploads, publics = uploads_of(3), [moments(*draw(30, seed)) for seed in (0, 1)]
    shares = [np.array([a, b, 200 - a - b]) / 200 for a in range(201) for b in range(201 - a)]
    for expert, public in zip(convex_experts(uploads, publics), publics, strict=True):
        best = min(public.loss(np.einsum("i,iab->ab", w, uploads)) for w in shares)
        assert public.loss(expert) <= best + 1e-9
        assert public.loss(expert) > best - 1e-3
        w = np.linalg.lstsq(
            np.vstack([uploads.reshape(3, -1).T, np.ones(3)]), np.r_[expert.reshape(-1), 1.0], rcond=None
        )[0]
        assert float(w.min()) > -1e-6
        assert np.allclose(np.einsum("i,iab->ab", w, uploads), expert, atol=1e-8)


def folds_of(theta: Floats, n: int, noise: float, seed: int, folds: int = 5) -> list[PublicMoments]:
    rng = np.random.default_rng(seed)
    parts = []
    for part in np.array_split(np.arange(n), folds):
        phi = rng.standard_normal((theta.shape[1], len(part)))
        parts.append(moments(phi, theta @ phi + noise * rng.standard_normal((len(theta), len(part)))))
    return parts


def test_clean_uploads_get_a_small_ridge_and_noise_around_the_expert_a_large_one() -> None:
    rng = np.random.default_rng(3)
    optima = rng.standard_normal((3, 2, 6)) * 2
    mixed = 0.7 / 3 + 0.3 * rng.dirichlet(np.ones(3), 8)
    clean = np.einsum("nm,mab->nab", mixed, optima)
    folds = folds_of(optima[0], 60, 0.1, 4)
    ridge, affine, convex = choose_ridge(clean, folds)
    assert ridge <= 1e-3
    assert affine < 0.1 * convex
    # the uploads' mean is the best guess: every step from equal weights adds noise
    noisy = optima[0] + 3.0 * rng.standard_normal((30, 2, 6))
    noisy += optima[0] - noisy.mean(0)
    assert choose_ridge(noisy, folds_of(optima[0], 20, 1.0, 5))[0] >= 10


def test_the_losses_of_a_ridge_are_means_over_held_out_examples() -> None:
    uploads, sizes = uploads_of(4), (7, 4, 9)
    data = [draw(n, seed) for seed, n in enumerate(sizes)]
    grid = (0.01, 1.0)
    affine, convex = np.zeros(2), 0.0
    for k, n in enumerate(sizes):
        fit = moments(*(np.hstack([data[j][part] for j in range(3) if j != k]) for part in (0, 1)))
        phi, y = data[k]
        for g, ridge in enumerate(grid):
            affine[g] += np.sum((y - affine_expert(uploads, fit, ridge) @ phi) ** 2) / 20
        convex += float(np.sum((y - convex_experts(uploads, [fit])[0] @ phi) ** 2)) / 20
        assert n == phi.shape[1]
    ridge, least, other = choose_ridge(uploads, [moments(*d) for d in data], grid)
    assert (ridge, least, other) == pytest.approx((grid[affine.argmin()], affine.min(), convex), rel=1e-6)


def test_the_ridge_is_fitted_again_on_all_folds_and_auto_takes_the_better_of_two() -> None:
    uploads, folds = uploads_of(4), [moments(*draw(n, 7)) for n in (12, 15)]
    found = recover(uploads, folds, "affine")
    assert found.ridge in RIDGES
    assert found.expert == pytest.approx(affine_expert(uploads, merge(folds), found.ridge))
    inside = uploads[0]  # an upload itself, known from very few examples: the simplex is the better prior
    few = folds_of(inside, 6, 2.0, 1, folds=3)
    _, affine, convex = choose_ridge(uploads, few)
    found = recover(uploads, few, "auto")
    assert found.chosen == ("convex" if convex <= affine else "affine")
    assert convex < affine
    assert found.expert == pytest.approx(convex_experts(uploads, [merge(few)])[0])


def test_the_posterior_takes_the_centre_with_more_evidence() -> None:
    uploads, chosen = uploads_of(4), set()
    for theta in (uploads[0], uploads.mean(0)):
        folds = folds_of(theta, 20, 0.05, 2)
        public = merge(folds)
        centres = {
            "posterior: mean": uploads.mean(0),
            "posterior: convex": convex_experts(uploads, [public])[0],
        }
        evidence = {name: posterior(uploads, public, c).log_evidence for name, c in centres.items()}
        found = recover(uploads, folds, "posterior")
        assert found.chosen == max(evidence, key=lambda name: evidence[name])
        assert found.evidence is not None
        assert found.evidence.log_evidence == pytest.approx(max(evidence.values()))
        chosen.add(found.chosen)
    assert "posterior: convex" in chosen


def test_unknown_words_and_a_single_fold_are_refused_in_one_line() -> None:
    public = moments(*draw(5))
    with pytest.raises(
        ValueError, match="hull: got 'conical', needs one of convex, affine, auto, posterior"
    ) as a:
        recover(uploads_of(3), [public, public], "conical")
    with pytest.raises(ValueError, match="got 1 folds of public examples, needs at least 2") as b:
        choose_ridge(uploads_of(3), [public])
    with pytest.raises(ValueError, match="got 1 folds"):
        recover(uploads_of(3), [public], "auto")
    assert "\n" not in str(a.value) + str(b.value)
    assert recover(uploads_of(3), [public], "convex").chosen == "convex"  # needs none held out
    assert recover(uploads_of(3), [public], "posterior").evidence is not None
