"""Gaussian mixtures against SciPy, NumPy on pooled rows, and arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from fedprism.methods import fedem
from fedprism.methods import gaussian_mixture as gm


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(M: int, d: int) -> Tensor:
    root = draw(M, d, d, seed=5)
    return root @ root.transpose(1, 2) + 0.1 * torch.eye(d).double()


# ---- densities -----------------------------------------------------------------------------------


def test_log_densities_are_scipys() -> None:
    x, means, covariances = draw(7, 4), draw(3, 4, seed=1) * 5, spd(3, 4)
    found = gm.log_densities(x, means, covariances).numpy()
    for a in range(3):
        expected = multivariate_normal(means[a].numpy(), covariances[a].numpy()).logpdf(x.numpy())
        assert np.allclose(found[:, a], expected, rtol=1e-11, atol=1e-11)


def test_a_singular_covariance_is_named() -> None:
    covariances = torch.stack([torch.eye(2), torch.ones(2, 2) - 2 * torch.eye(2)]).double()
    with pytest.raises(ValueError, match=r"covariance 1 is not positive definite.*covariance_floor"):
        gm.log_densities(draw(3, 2), draw(2, 2), covariances)


# ---- responsibilities ----------------------------------------------------------------------------


def test_responsibilities_by_hand_over_the_whole_grid() -> None:
    pi = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    N, p = [2.0, 5.0], [0.9, 0.25]
    q = gm.responsibilities(pi, torch.tensor([N]).double().log(), -torch.tensor([p]).double().log())
    terms = [[float(pi[a, b]) * N[a] * p[b] for b in (0, 1)] for a in (0, 1)]
    total = sum(sum(row) for row in terms)
    assert q[0].tolist() == [pytest.approx([t / total for t in row], rel=1e-6) for row in terms]


def test_with_one_gaussian_they_are_fedems_bit_for_bit() -> None:
    pi, losses = draw(4).softmax(0), draw(50, 4, seed=1).abs() * 3
    log_n = draw(50, 1, seed=2) * 100
    assert torch.equal(gm.responsibilities(pi[None], log_n, losses)[:, 0], fedem.responsibilities(pi, losses))


def test_far_rows_and_collapsed_weights_stay_numbers() -> None:
    pi = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    log_n = torch.tensor([[-1e6, -2e6], [-1e6, -1e6]], dtype=torch.float64)
    q = gm.responsibilities(pi, log_n, torch.zeros(2, 1).double())
    assert q[:, :, 0].tolist() == [[1.0, 0.0], [pytest.approx(1e-8, rel=1e-6), pytest.approx(1.0)]]


def test_predictions_weigh_by_the_weight_itself_and_not_by_its_exponential() -> None:
    pi = torch.tensor([[0.02, 0.98]], dtype=torch.float64)
    equal = torch.zeros(1, 1, dtype=torch.float64)
    assert gm.classifier_weights(pi, equal)[0].tolist() == pytest.approx([0.02, 0.98])
    wrong = math.exp(0.02) / (math.exp(0.02) + math.exp(0.98))  # .277: the weight added to a log density
    assert gm.classifier_weights(pi, equal, logarithm=False)[0].tolist() == pytest.approx([wrong, 1 - wrong])


def test_classifier_weights_by_hand() -> None:
    pi = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    found = gm.classifier_weights(pi, torch.tensor([[2.0, 5.0]]).double().log())
    first, second = 0.1 * 2 + 0.3 * 5, 0.2 * 2 + 0.4 * 5
    assert found[0].tolist() == pytest.approx([first / (first + second), second / (first + second)])


def test_weights_alone_converge_to_the_likeliest() -> None:
    # one Gaussian, two classifiers, one of which explains 3 rows in 4 with certainty: pi = (3/4, 1/4)
    losses = torch.tensor([[0.0, 50.0]] * 3 + [[50.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    found = gm.fit_weights(start, torch.zeros(4, 1).double(), losses, 10, 1e-3)
    assert found.tolist() == [pytest.approx([0.75, 0.25])]
    assert torch.equal(gm.fit_weights(start, torch.zeros(4, 1).double(), losses, 0, 1e-3), start)


# ---- moments -------------------------------------------------------------------------------------


def test_weighted_moments_are_numpys() -> None:
    x, q = draw(30, 3), draw(30, 2, seed=1).exp()
    mass, means, covariances = gm.weighted_moments(x, q)
    for a in (0, 1):
        weights = q[:, a].numpy()
        assert float(mass[a]) == pytest.approx(weights.sum())
        assert np.allclose(means[a], np.average(x.numpy(), axis=0, weights=weights), atol=1e-12)
        assert np.allclose(covariances[a], np.cov(x.numpy().T, aweights=weights, ddof=0), atol=1e-12)


def test_a_gaussian_without_mass_has_zeros_and_no_nan() -> None:
    _, means, covariances = gm.weighted_moments(draw(5, 2), torch.zeros(5, 1).double())
    assert means.tolist() == [[0, 0]] and covariances.tolist() == [[[0, 0], [0, 0]]]


def test_merged_moments_are_the_pooled_ones() -> None:
    sizes, M, d = (40, 7, 100), 3, 5
    x = [draw(n, d, seed=n) + 10 * i for i, n in enumerate(sizes)]
    q = [draw(n, M, seed=n + 1).softmax(1) for n in sizes]
    parts = [gm.weighted_moments(xi, qi) for xi, qi in zip(x, q, strict=True)]
    merged = gm.merge_moments(*(torch.stack(part) for part in zip(*parts, strict=True)))
    pooled, weights = torch.cat(x).numpy(), torch.cat(q).numpy()
    for a in range(M):
        assert abs(float(merged[0][a]) - weights[:, a].sum()) < 1e-10
        assert np.abs(merged[1][a].numpy() - np.average(pooled, axis=0, weights=weights[:, a])).max() < 1e-10
        covariance = np.cov(pooled.T, aweights=weights[:, a], ddof=0)
        assert np.abs(merged[2][a].numpy() - covariance).max() < 1e-10


def test_without_the_scatter_between_clients_the_variance_lacks_a_quarter_of_the_squared_distance() -> None:
    mass, variance = torch.ones(2, 1).double(), torch.ones(2, 1, 1, 1).double()
    means = torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64)  # two clients three deviations apart
    assert gm.merge_moments(mass, means, variance)[2].item() == pytest.approx(1 + 9 / 4)
    assert gm.merge_moments(mass, means, variance, between=False)[2].item() == pytest.approx(1)


# ---- features ------------------------------------------------------------------------------------


def sums(h: Tensor) -> tuple[float, Tensor, Tensor]:
    return len(h), h.sum(0), h.T @ h


def test_sums_of_clients_standardise_their_pooled_rows() -> None:
    h = torch.cat([draw(50, 3) * torch.tensor([1.0, 5.0, 0.1]) + 2, draw(20, 3, seed=1)])
    count, total, second = (a + b for a, b in zip(sums(h[:50]), sums(h[50:]), strict=True))
    shift, matrix = gm.standardising_map(count, total, second, 3)
    found = ((h - shift) @ matrix).numpy()
    assert np.abs(found - (h.numpy() - h.numpy().mean(0)) / h.numpy().std(0)).max() < 1e-10


def test_fewer_dimensions_are_principal_axes_of_the_standardised_features() -> None:
    h = draw(80, 5) @ draw(5, 5, seed=1)
    shift, matrix = gm.standardising_map(*sums(h), 2)
    found = ((h - shift) @ matrix).numpy()
    values = np.sort(np.linalg.eigvalsh(np.corrcoef(h.numpy().T)))[::-1]
    assert np.allclose(np.cov(found.T, ddof=0), np.diag(values[:2]), atol=1e-10)


def test_a_feature_that_never_changes_is_centred_and_stays_finite() -> None:
    h = torch.cat([draw(20, 2), torch.full((20, 1), 0.3).double()], 1)
    shift, matrix = gm.standardising_map(*sums(h), 8)
    found = (h - shift) @ matrix
    assert found.shape == (20, 3) and float(found[:, 2].abs().max()) < 1e-12


# ---- first means ---------------------------------------------------------------------------------


def test_centroids_of_clients_are_clustered_by_their_counts() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [12.0]], dtype=torch.float64)
    counts = torch.tensor([3.0, 1.0, 1.0, 9.0], dtype=torch.float64)
    found = gm.cluster_centroids(points, counts, 2, seed=0)
    assert found.flatten().tolist() == pytest.approx([(10 + 9 * 12) / 10, 1 / 4])  # larger cluster first


def test_fewer_centroids_than_gaussians_are_named() -> None:
    with pytest.raises(ValueError, match=r"2 different centroids for 3 Gaussians.*lower n_gaussians"):
        points = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)
        gm.cluster_centroids(points, torch.ones(3).double(), 3, seed=0)
