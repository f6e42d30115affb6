"""FedTAR's checks hold, fail where the step is broken, and the questions to a run have known answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from typer.testing import CliRunner

from fedprism import cli
from fedprism.methods.task_coefficients import MapSettings
from fedprism.methods.task_coefficients import fedtar_coefficients as shipped
from fedprism.theory import task_projection as lab


def literal_for_affine(G: Any, Z: Any, labels: Any, cfg: MapSettings, p: Any = None, **more: Any) -> Any:
    return shipped(
        G, Z, labels, replace(cfg, projection="literal") if cfg.projection == "affine" else cfg, p, **more
    )


def affine_for_literal(G: Any, Z: Any, labels: Any, cfg: MapSettings, p: Any = None, **more: Any) -> Any:
    return shipped(
        G, Z, labels, replace(cfg, projection="affine") if cfg.projection == "literal" else cfg, p, **more
    )


def absolute_ridges(G: Any, Z: Any, labels: Any, cfg: MapSettings, p: Any = None, **more: Any) -> Any:
    return shipped(G, Z, labels, replace(cfg, lambda_mode="absolute"), p, **more)


def by_position(G: Any, Z: Any, labels: Any, cfg: MapSettings, p: Any = None, **more: Any) -> Any:
    beta, facts = shipped(G, Z, labels, cfg, p, **more)
    return beta * (1 + 1e-3 * np.arange(len(beta))), facts


def no_debias(G: Any, Z: Any, labels: Any, cfg: MapSettings, p: Any = None, **more: Any) -> Any:
    return shipped(G, Z, labels, replace(cfg, debias=0.0), p, **more)


@pytest.mark.parametrize("name", lab.CHECKS)
def test_checks_hold(name: str) -> None:
    check = lab.CHECKS[name](3)
    assert check.ok, check.note


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("A1", literal_for_affine),
        ("A2", literal_for_affine),
        ("A2", affine_for_literal),
        ("A3", absolute_ridges),
        ("A3", by_position),
        ("A4", literal_for_affine),
        ("A5", affine_for_literal),
        ("A6", literal_for_affine),
        ("A6", affine_for_literal),
        ("A8", no_debias),
        ("A8", literal_for_affine),
    ],
)
def test_checks_fail_where_the_step_is_broken(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "fedtar_coefficients", broken)
    assert not lab.CHECKS[name](3).ok


def test_the_basis_check_fails_without_the_centred_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = lab.TaskSpace.fit
    monkeypatch.setattr(lab.TaskSpace, "fit", lambda f, r, **how: fit(f, r, basis="uncentred"))
    assert not lab.check_basis(3).ok


def test_the_streaming_check_fails_where_a_block_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lab.blocks
    monkeypatch.setattr(lab, "blocks", lambda u, c: list(whole(u, c))[1:])
    assert not lab.check_streaming(3).ok


def test_the_adjusted_rand_index_is_scikit_learn_s() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = rng.integers(3, size=12), rng.integers(4, size=12)
        assert lab.adjusted_rand(a, b) == pytest.approx(adjusted_rand_score(a, b))


def test_distances_of_coordinates_and_updates() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 4))
    plain = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.testing.assert_allclose(lab.distances(x @ x.T), plain, atol=1e-7)
    rho, p = lab.distance_correlation(plain, plain**3)  # any increasing function of distance
    assert rho == pytest.approx(1) and p == 1 / 1000
    assert lab.distance_correlation(plain, np.zeros((9, 9)))[1] == 1
    with pytest.raises(ValueError, match="N >= 3"):
        lab.distance_correlation(plain[:2, :2], plain[:2, :2])


def test_permutation_p_values_are_uniform_without_a_relation() -> None:
    values = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a, b = (np.linalg.norm(x[:, None] - x[None], axis=2) for x in rng.normal(size=(2, 6, 2)))
        values.append(lab.distance_correlation(a, b, permutations=49)[1])
    assert 0.35 < np.mean(values) < 0.65 and min(values) < 0.2 and max(values) > 0.8


def test_usage_divergence_by_hand_in_both_directions() -> None:
    p, q = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.9, 0.1]])
    forward = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)  # KL(q || p) of the first layer, the second's is 0
    backward = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    np.testing.assert_allclose(lab.usage_divergence(p, q), (forward / 2, backward / 2), atol=1e-6)
    assert np.isfinite(lab.usage_divergence(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))).all()


def test_the_quick_laboratory_holds_and_draws(tmp_path: Path) -> None:
    where = ["--json", str(tmp_path / "lab.json"), "--out", str(tmp_path / "figures")]
    result = CliRunner().invoke(cli.app, ["lab", "fedtar", "--quick", *where])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "lab.json").read_text(encoding="utf-8"))
    assert found["ok"] and [c["id"] for c in found["checks"]] == list(lab.CHECKS)
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        f"{name}.{kind}" for name in lab.CURVES for kind in ("png", "svg")
    }
