"""The small text experiment, built once for all tests that run one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_text import WORDS, Tiny, save_backbone, write_task


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Random two-layer BERT and three tasks on disk; makes experiments over them."""
    root: Path = tmp_path_factory.mktemp("tasks")
    for task in WORDS:
        write_task(root, task)
    return Tiny(save_backbone(tmp_path_factory.mktemp("backbone")), root)
