"""Coefficients against the explicit d x d formulas, closed forms and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedprism.methods.task_coefficients import MapSettings, fedtar_coefficients, leave_one_out_r2
from fedprism.methods.task_space import TaskSpace, cluster, group_weights

N, D, R = 9, 25, 3
RNG = np.random.default_rng(1)
DELTA = RNG.normal(size=(D, N)) + RNG.normal(size=(D, 1))
SPACE = TaskSpace.fit(RNG.random((N, 12)), R)
Z = SPACE.z.T
LABELS = cluster(SPACE.z, 3)[0]
P = RNG.dirichlet(np.ones(N) * 5)


def explicit(delta: Any, Z: Any, a: Any, cfg: MapSettings, p: Any) -> Any:
    """B_g by the paper's formulas with d x d matrices and weighted least squares."""
    n = delta.shape[1]
    S = np.diag(n * p)
    if cfg.projection == "none":
        return delta @ a
    if cfg.projection == "augmented":
        Z = np.vstack([Z, np.full(n, np.sqrt((Z**2).sum() / (len(Z) * n)))])
    r = len(Z)
    whole = delta
    if cfg.r_upd:
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        delta = u[:, : cfg.r_upd] * s[: cfg.r_upd] @ vt[: cfg.r_upd]
    relative = cfg.lambda_mode == "relative"
    lz = cfg.rho_z * np.trace(Z @ S @ Z.T) / r if relative else cfg.lambda_
    M = delta @ S @ Z.T @ np.linalg.inv(Z @ S @ Z.T + lz * np.eye(r))
    lp = cfg.rho_p * np.trace(M.T @ M) / r if relative else cfg.lambda_
    project = M @ np.linalg.inv(M.T @ M + lp * np.eye(r)) @ M.T  # d x d
    mean = whole @ p if cfg.projection == "affine" else 0
    return mean + project @ (whole @ a - mean)


@pytest.mark.parametrize("mode", ["relative", "absolute"])
@pytest.mark.parametrize("r_upd", [0, 2, 5])
@pytest.mark.parametrize("projection", ["affine", "literal", "augmented", "none"])
@pytest.mark.parametrize("p", [None, P])
def test_coefficient_form_is_the_explicit_form(projection: Any, r_upd: int, mode: Any, p: Any) -> None:
    cfg = MapSettings(projection=projection, r_upd=r_upd, lambda_mode=mode, lambda_=0.1)
    weight = np.full(N, 1 / N) if p is None else p
    z = Z - (Z @ weight)[:, None]
    beta, facts = fedtar_coefficients(DELTA.T @ DELTA, z, LABELS, cfg, p)
    _, a = group_weights(z.T, LABELS, p=weight)
    expected = explicit(DELTA, z, a, cfg, weight)
    np.testing.assert_allclose(DELTA @ beta, expected, atol=1e-9)
    mean = DELTA @ weight
    norm = np.linalg.norm
    assert facts["retained_mean"] == pytest.approx(norm(expected) / norm(mean))
    assert facts["retained_cluster"] == pytest.approx(norm(expected) / norm(DELTA @ a))
    assert facts["cosine_mean"] == pytest.approx(expected @ mean / norm(expected) / norm(mean))


@pytest.mark.parametrize("p", [None, P])
def test_sums_of_coefficients(p: Any) -> None:
    z = Z - (Z @ (np.full(N, 1 / N) if p is None else p))[:, None]
    G = DELTA.T @ DELTA
    assert abs(fedtar_coefficients(G, z, LABELS, MapSettings(projection="literal"), p)[0].sum()) < 1e-12
    assert fedtar_coefficients(G, z, LABELS, MapSettings(), p)[0].sum() == pytest.approx(1, abs=1e-12)


def test_identical_clients_lose_everything_literally_and_nothing_with_an_intercept() -> None:
    same = np.repeat(DELTA[:, :1], N, 1)
    G = same.T @ same
    beta, facts = fedtar_coefficients(G, Z, LABELS, MapSettings(projection="literal"))
    np.testing.assert_allclose(same @ beta, 0, atol=1e-10)
    assert facts["retained_mean"] < 1e-6  # the root of rounding
    assert facts["notes"] == [
        "projection: 0.0% of the mean's norm is left; "
        'set projection = "affine", or basis and coordinates to "uncentred"'
    ]
    beta, facts = fedtar_coefficients(G, Z, LABELS, MapSettings())
    np.testing.assert_allclose(same @ beta, same[:, 0], atol=1e-10)
    assert facts["notes"] == []


def test_relative_ridges_follow_the_scale_of_the_updates_and_absolute_ones_do_not() -> None:
    G, cfg = DELTA.T @ DELTA, MapSettings(projection="literal")
    for scale in (1e-6, 1e3):
        small = fedtar_coefficients(G * scale**2, Z, LABELS, cfg)[0]
        np.testing.assert_allclose(small, fedtar_coefficients(G, Z, LABELS, cfg)[0], atol=1e-9)
    fixed = replace(cfg, lambda_mode="absolute", lambda_=0.01)
    assert np.linalg.norm(fedtar_coefficients(G * 1e-12, Z, LABELS, fixed)[0]) < 1e-6


def test_signs_rotations_and_the_clients_order_do_not_matter() -> None:
    turn = np.linalg.qr(RNG.normal(size=(R, R)))[0]
    for projection in ("affine", "literal", "augmented"):
        cfg = MapSettings(projection=projection, r_upd=4)
        beta = fedtar_coefficients(DELTA.T @ DELTA, Z, LABELS, cfg)[0]
        np.testing.assert_allclose(
            fedtar_coefficients(DELTA.T @ DELTA, turn @ Z, LABELS, cfg)[0], beta, atol=1e-9
        )
        o = RNG.permutation(N)
        moved = fedtar_coefficients(DELTA[:, o].T @ DELTA[:, o], Z[:, o], LABELS[o], cfg)[0]
        np.testing.assert_allclose(moved, beta[o], atol=1e-9)


def test_limits_that_are_the_plain_mean() -> None:
    G, mean = DELTA.T @ DELTA, np.full(N, 1 / N)
    none = MapSettings(projection="none")
    for labels, cfg in (
        (LABELS, replace(none, tau=0.0, size_aware=True)),
        (np.zeros(N, dtype=int), none),
        (None, none),
        (None, MapSettings()),
        (LABELS, MapSettings(rho_p=1e14)),
    ):
        np.testing.assert_allclose(fedtar_coefficients(G, Z, labels, cfg)[0], mean, atol=1e-12)


def test_a_map_of_all_differences_filters_nothing() -> None:
    space = TaskSpace.fit(RNG.random((N, 12)), N - 1)
    cfg = MapSettings(rho_z=0, rho_p=0)
    _, a = group_weights(space.z, LABELS)
    beta, facts = fedtar_coefficients(DELTA.T @ DELTA, space.z.T, LABELS, cfg)
    np.testing.assert_allclose(beta, a, atol=1e-9)
    assert facts["retained_cluster"] == pytest.approx(1)


def test_updates_linear_in_the_coordinates_come_through_whole() -> None:
    intercept, slope = RNG.normal(size=(D, 1)), RNG.normal(size=(D, R))
    delta = intercept + slope @ Z
    cfg = MapSettings(rho_z=0, rho_p=0)
    _, a = group_weights(Z.T, LABELS)
    G = delta.T @ delta
    beta, facts = fedtar_coefficients(G, Z, LABELS, cfg)
    np.testing.assert_allclose(delta @ beta, delta @ a, atol=1e-9)
    assert facts["loo_r2"] == pytest.approx(1, abs=1e-9)


def test_leave_one_out_is_n_separate_fits() -> None:
    cfg = MapSettings(rho_z=0.05)
    missed = spread = 0.0
    for i in range(N):
        rest = [k for k in range(N) if k != i]
        mean, z = DELTA[:, rest].mean(1), Z[:, rest] - Z[:, rest].mean(1, keepdims=True)
        M = DELTA[:, rest] @ z.T @ np.linalg.inv(z @ z.T + 0.05 * np.trace(z @ z.T) / R * np.eye(R))
        missed += ((DELTA[:, i] - mean - M @ (Z[:, i] - Z[:, rest].mean(1))) ** 2).sum()
        spread += ((DELTA[:, i] - mean) ** 2).sum()
    found = leave_one_out_r2(DELTA.T @ DELTA, Z, cfg, np.full(N, 1 / N))
    assert found == pytest.approx(1 - missed / spread, abs=1e-10)
    beta, facts = fedtar_coefficients(DELTA.T @ DELTA, Z, LABELS, replace(cfg, adaptive=True))
    assert found < 0 and facts["fallback"] and "the mean was taken" in facts["notes"][0]
    np.testing.assert_allclose(beta, 1 / N)


def test_subtracting_the_noise_restores_the_literal_coefficients() -> None:
    d, std = 40_000, 0.05  # noise norm 10, updates' 5 or so
    clean = np.vstack([DELTA, np.zeros((d - D, N))])
    noisy = clean + std * RNG.normal(size=(d, N))
    cfg = MapSettings(projection="literal")
    truth = fedtar_coefficients(clean.T @ clean, Z, LABELS, cfg)[0]
    plain = fedtar_coefficients(noisy.T @ noisy, Z, LABELS, cfg)[0]
    mended = fedtar_coefficients(noisy.T @ noisy, Z, LABELS, replace(cfg, debias=std**2), d=d)[0]
    assert np.linalg.norm(mended - truth) < 0.5 * np.linalg.norm(plain - truth)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"G of shape \(9, 9\) and Z of shape \(3, 8\)"):
        fedtar_coefficients(DELTA.T @ DELTA, Z[:, 1:], LABELS, MapSettings())
    with pytest.raises(ValueError, match="not finite"):
        fedtar_coefficients(DELTA.T @ DELTA * np.nan, Z, LABELS, MapSettings())
