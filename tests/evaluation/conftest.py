"""One synthetic experiment for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.evaluation import synthetic


@pytest.fixture(scope="session")
def experiment_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two seeds, six clients, three tasks, all complete."""
    return synthetic.write_experiment(tmp_path_factory.mktemp("runs") / "whole")
