"""Processes that are killed outright and resumed end with the bits of a process that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedprism.storage import MARKER
from tests.tiny_text import Tiny, left_behind

KILLS = {"fedsee": 5, "scaffold": 2, "local_only": 2}
METHODS = tuple(KILLS)
ROUNDS, LIMIT = 16, 120.0

pytestmark = pytest.mark.slow


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedprism.cli", *map(str, arguments), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    return out


def lines(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill(process: subprocess.Popen[str], run: Path, after: int, delay: float) -> None:
    """SIGKILL, `delay` seconds after the metrics of `after` rounds stand in the run's directory."""
    until = time.monotonic() + LIMIT
    while lines(run) < after:
        assert process.poll() is None, f"ended before round {after}: {process.communicate()[1]}"
        assert time.monotonic() < until, f"round {after} was never reached"
        time.sleep(0.001)
    time.sleep(delay)
    assert process.poll() is None, "ended before it could be killed"
    process.kill()
    process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three methods in one process that nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    config = tiny.write(folder / "tiny.toml", *METHODS, method__rounds=ROUNDS)
    finish(begin("run", config, "--out", folder / "out"))
    return folder / "out"


@pytest.mark.parametrize("name", METHODS)
def test_a_run_killed_at_any_moment_equals_one_left_alone(
    name: str, tiny: Tiny, tmp_path: Path, alone: Path
) -> None:
    config, out = tiny.write(tmp_path / "tiny.toml", name, method__rounds=ROUNDS), tmp_path / "out"
    run = out / name / "seed-3"
    draw = random.Random(f"{name} 7")
    # Each process gets some rounds further; the moment is anywhere in a round, a checkpoint's writing too.
    stops = sorted(draw.sample(range(1, ROUNDS - 4), KILLS[name]))
    command: tuple[str | Path, ...] = ("run", config, "--out", out)
    seen: list[Any] = []
    for after in stops:
        kill(begin(*command), run, after, draw.uniform(0.0, 0.06))
        seen.append((after, lines(run), sorted(p.name for p in (run / "checkpoints").glob("*"))))
        command = ("resume", out)
    printed = finish(begin(*command))
    assert printed.splitlines()[-1] == f"report: {out}/report.html"
    assert left_behind(run) == left_behind(alone / name / "seed-3"), f"after {seen}"
    assert not [p for p in out.rglob(".*") if p.name != MARKER]
