"""What benchmarks share: contestants that take turns, ratios within one run, the record of a result.

A contestant does one round per turn. Turns alternate, and every other repetition goes through the contestants
backwards, so that other work on the machine and slow drifts hit all of them; quoted are medians of ratios of
the turns of one repetition. The first turns of each, with all it has to set up, do not count.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedprism import api, config
from fedprism.config import Experiment
from fedprism.methods.registry import METHODS
from fedprism.models.encoder import native_bf16
from fedprism.storage import RunDirectory, versions

RESULTS = Path(__file__).resolve().parent / "results"
Pause = Callable[[Mapping[str, Any]], None]
Body = Callable[[Pause], None]
# How the package can run a model: settings of [model].
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "channels_last": False},
    "fp32_channels_last": {"precision": "fp32", "channels_last": True},
    "bf16_channels_last": {"precision": "bf16", "channels_last": True},
}
NO_BF16 = "not measured: this processor has no bfloat16 instructions"


@dataclass(frozen=True)
class Turn:
    """One round: its wall-clock seconds and what the contestant says about it."""

    seconds: float
    facts: Mapping[str, Any]


class Contestant(Protocol):
    """Someone who does a round when it is their turn."""

    def turn(self) -> Turn: ...

    def finish(self) -> None: ...


class InThread:
    """A contestant in a thread of its own, so that each has its own pool of workers and its own heap.

    body(pause): does rounds and calls pause(facts) after each; whatever stands between two calls is the time
    of a round. It begins with the first turn and must end after as many rounds as there are turns."""

    def __init__(self, body: Body) -> None:
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[Turn | BaseException | None] = queue.Queue()
        self._body, self._released = body, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._wait()
            self._body(self._pause)
            self._done.put(None)
        except BaseException as fault:
            self._done.put(fault)

    def _wait(self) -> None:
        self._go.get()
        self._released = time.perf_counter()

    def _pause(self, facts: Mapping[str, Any]) -> None:
        self._done.put(Turn(time.perf_counter() - self._released, facts))
        self._wait()

    def _next(self) -> Turn | None:
        self._go.put(None)
        told = self._done.get()
        if isinstance(told, BaseException):
            raise told
        return told

    def turn(self) -> Turn:
        """One round. Raises what the body raised, RuntimeError where it ended too early."""
        told = self._next()
        if told is None:
            raise RuntimeError("benchmark: a contestant ended before its last turn")
        return told

    def finish(self) -> None:
        """Let the body end. Raises what it raised, RuntimeError where it goes on."""
        if self._next() is not None:
            raise RuntimeError("benchmark: a contestant has rounds left after its last turn")
        self._thread.join()


class InProcess:
    """A contestant in another process: it gets a line "go" per turn and answers with a line of JSON, which
    holds `seconds`; at the end it gets "end". What it prints besides goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._log, self._command = log, list(command)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **env},
            )  # fmt: skip

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except BrokenPipeError as broken:
            raise self._failure() from broken

    def _failure(self) -> RuntimeError:
        tail = " | ".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        return RuntimeError(f"benchmark: {Path(self._command[1]).name} failed: {tail}")

    def turn(self) -> Turn:
        """One round. Raises RuntimeError with the end of the log where the process has ended."""
        self._tell("go")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        facts = json.loads(line)
        return Turn(facts.pop("seconds"), facts)

    def finish(self) -> None:
        """Let the process end. Raises RuntimeError where it ends with an error."""
        self._tell("end")
        if self._process.wait(timeout=120):
            raise self._failure()

    def abort(self) -> None:
        """End the process, whatever it does."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=30)


def warm_up(contestants: Mapping[str, Contestant], turns: int = 1) -> None:
    """Turns of each contestant that do not count: setting up is part of the first."""
    for contestant in contestants.values():
        for _ in range(turns):
            contestant.turn()


def take_turns(contestants: Mapping[str, Contestant], repetitions: int) -> dict[str, list[Turn]]:
    """`repetitions` turns of each contestant, every other time backwards."""
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for k in range(repetitions):
        for name in list(contestants)[:: 1 if k % 2 == 0 else -1]:
            turns[name].append(contestants[name].turn())
            print(f"{k + 1}/{repetitions} {name:24s} {turns[name][-1].seconds:8.3f} s", flush=True)
    return turns


def ratio(slow: Sequence[Turn], fast: Sequence[Turn]) -> dict[str, Any]:
    """How many times longer the first takes: median, quartiles and all ratios over the repetitions."""
    ratios = [a.seconds / b.seconds for a, b in zip(slow, fast, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"ratio": statistics.median(ratios), "quartiles": [low, high], "ratios": ratios}


def median_seconds(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Median seconds of a round by contestant."""
    return {name: statistics.median(turn.seconds for turn in taken) for name, taken in turns.items()}


def usable(precisions: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The names of `PRECISIONS` that this processor can run in earnest, and why the others are left out."""
    left_out = {
        name: NO_BF16 for name in precisions if PRECISIONS[name]["precision"] == "bf16" and not native_bf16()
    }
    return [name for name in precisions if name not in left_out], left_out


def load_experiment(text: str, folder: Path, model: Mapping[str, Any]) -> Experiment:
    """The experiment of a TOML text, with settings of [model] on top."""
    path = folder / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    settings = [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
    return config.load(path, settings, methods=METHODS)


def package_run(experiment: Experiment, folder: Path) -> Body:
    """The experiment's one method and seed, run by the package as `fedprism run` does it: every round with
    its evaluation, line of metrics and checkpoint. folder: of the run, made here."""

    def body(pause: Pause) -> None:
        class Watch(api.Silent):
            def round_end(self, round: int, seconds: float, line: dict[str, Any]) -> None:
                pause(line)

        directory, watch = RunDirectory.create(folder), Watch()
        (method,), (seed,) = experiment.methods, experiment.seeds
        api.run_method(experiment, method, seed, directory, api.Workshop(experiment, watch), watch)

    return body


def write_result(path: Path, result: Mapping[str, Any], *, seed: int, threads: int) -> None:
    """Write a result as JSON with seed, versions, commit, thread count and the load of the machine."""
    made = {**versions(), "threads": threads}
    record = {
        **result,
        "seed": seed,
        "commit": made.pop("git_commit"),
        "versions": made,
        "native_bf16": native_bf16(),
        "load_average": os.getloadavg()[0],  # above `threads`: other work shared the cores
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
