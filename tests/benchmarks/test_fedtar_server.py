"""The server benchmark's rival computes the package's step, and streaming from files gives the same."""

from __future__ import annotations

from pathlib import Path

import fedtar_server as bench
import numpy as np
import pytest
import torch

from fedprism.methods.task_coefficients import MapSettings
from fedprism.theory.task_projection import explicit_step, group_weights


def test_rival_and_package_take_the_explicit_step() -> None:
    d, n = 300, 8
    rows = torch.stack([bench.draw(d, n, 1, k) for k in range(n)])
    Z, labels = bench.coordinates(n, 1)
    a = group_weights(Z.T, labels)[1]
    expected = explicit_step(rows.T.double().numpy(), Z, a, MapSettings())
    assert np.linalg.norm(expected - rows.double().numpy().mean(0)) > 0.1  # not just the mean
    for found in (
        bench.svd_step(rows.T.contiguous(), Z, labels),
        bench.gram_step([{"lora_B.0.down": row} for row in rows], Z, labels),
    ):
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_the_tiny_benchmark_runs_and_compares(tmp_path: Path) -> None:
    found = bench.sizes(bench.TINY, tmp_path)
    assert set(found["ratio"]) == {"d=20000,N=12", "d=50000,N=5"}
    assert all(found[key]["difference"] < 1e-5 for key in found["ratio"])
    found = bench.streamed(bench.TINY, tmp_path)
    assert found["difference"] < 1e-5 and found["peak_mib"] > 0
    assert list(tmp_path.iterdir()) == []  # updates are removed


def test_steps_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "svd_step", lambda delta, Z, labels: delta.mean(1))
    with pytest.raises(RuntimeError, match="differ by"):
        bench.sizes(bench.TINY, tmp_path)
