"""Whole experiments: what they leave behind, that they repeat, that they resume, what they count."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprism import api
from fedprism import config as configs
from fedprism.config import UserError
from fedprism.engines.inprocess import InProcess
from fedprism.methods.registry import METHODS
from fedprism.protocol import Ask, Reply, tensors_in
from fedprism.storage import MARKER, RunDirectory
from tests.test_contracts import ON_EXPERTS, ON_TABLES
from tests.tiny_text import WORDS, Stopped, Tiny, Watch, left_behind, rows, without_times, write_task

Whole = tuple[Path, dict[str, Any], Watch]
FOUR = ("fedsee", "fedit", "local_only", "public_only")
TASKS = list(WORDS)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The runs set the threads of the process; other tests get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than these runs; one test looks at the report."""
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Four methods, two seeds, with the report."""
    out, watch = tmp_path_factory.mktemp("runs") / "whole", Watch()
    summary = api.run_experiment(tiny.experiment(*FOUR, seeds=[3, 4]), out, progress=watch)
    return out, summary, watch


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# ---- what a run leaves behind --------------------------------------------------------------------


def test_an_experiment_writes_every_file_of_its_directory(whole: Whole) -> None:
    out, summary, watch = whole
    assert {"config.toml", "summary.json", "report.html", "plots", MARKER, *FOUR} == {
        p.name for p in out.iterdir()
    }
    assert read(out / "summary.json") == json.loads(json.dumps(summary))
    assert (summary["name"], summary["methods"], summary["seeds"]) == ("tiny", list(FOUR), [3, 4])
    assert [(run["seed"], run["method"]) for run in summary["runs"]] == [(s, m) for s in (3, 4) for m in FOUR]
    for method in FOUR:
        for seed in (3, 4):
            run = out / method / f"seed-{seed}"
            records = {"config.toml", "versions.json", "federation.json", "model.json", "metrics.jsonl"}
            assert {p.name for p in run.iterdir()} == {*records, "summary.json", "checkpoints", MARKER}
            assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["round-0002", "round-0003"]
            for kept in (run / "checkpoints").iterdir():
                assert {p.name for p in kept.iterdir()} == {
                    "server.safetensors",
                    "clients.safetensors",
                    "state.json",
                }
            assert not [p for p in run.rglob(".*") if p.name != MARKER]  # no temporary names
    assert watch.started == [f"{m}, seed {s}" for s in (3, 4) for m in FOUR]
    assert watch.rounds == [0, 1, 2, 3] * 8
    assert watch.closed == 1


def test_the_records_of_a_run_say_what_it_was(whole: Whole, tiny: Tiny) -> None:
    out, _, _ = whole
    run = out / "fedsee" / "seed-4"
    again = configs.load(run / "config.toml", methods=METHODS)
    assert (again.methods, again.seeds, again.shared) == (("fedsee",), (4,), {})
    own = again.own("fedsee")
    assert (own["rounds"], own["lr"], own["init_epochs"], own["smoothing"]) == (4, 0.01, 1, 0.9)
    assert configs.load(out / "config.toml", methods=METHODS) == tiny.experiment(*FOUR, seeds=[3, 4])
    federation = read(run / "federation.json")
    assert federation["tasks"] == TASKS
    assert federation["public_sizes"] == dict.fromkeys(TASKS, 16)
    assert [size["validation"] for size in federation["client_sizes"]] == [6] * 4
    trained_on = [size["train"] for size in federation["client_sizes"]]
    assert [sum(counts) for counts in federation["counts"]] == trained_on
    model = read(run / "model.json")
    assert (model["kind"], model["rank"], model["blocks"]["lora_A"]) == ("encoder", 2, 128)
    made = read(run / "versions.json")
    assert made["torch"] == torch.__version__
    assert made["threads"] == 1
    pairs = [(method, seed) for method in FOUR for seed in (3, 4)]
    prints = {(m, s): read(out / m / f"seed-{s}/federation.json")["fingerprint"] for m, s in pairs}
    assert len(set(prints.values())) == 2  # methods share the data of a seed
    assert all(prints[m, s] == prints["fedit", s] for m, s in prints)


def test_a_run_s_summary_has_every_field(whole: Whole) -> None:
    out, summary, _ = whole
    for run in summary["runs"]:
        kept = out / run["method"] / f"seed-{run['seed']}" / "summary.json"
        assert read(kept) == json.loads(json.dumps(run))
        assert {
            "name", "method", "seed", "fingerprint", "complete", "rounds", "selected_round", "seconds",
            "evaluation_seconds", "threads", "test", "validation", "matthews", "bytes_up_per_client_round",
            "bytes_down_per_client_round", "examples_trained", "examples_public", "local_epochs", "notes",
        } <= set(run)  # fmt: skip
        assert (run["complete"], run["rounds"], run["selected_round"], run["threads"]) == (True, 4, 3, 1)
        for split in ("test", "validation"):
            scored = run[split]
            assert set(scored) == {"overall", "worst_50", "worst_25", "per_task", "clients"}
            ordered = sorted(scored["clients"])
            assert scored["overall"] == pytest.approx(sum(ordered) / 4)
            assert scored["worst_50"] == pytest.approx(sum(ordered[:2]) / 2)
            assert scored["worst_25"] == pytest.approx(ordered[0])
            assert set(scored["per_task"]) <= set(TASKS)
        federated = run["method"] == "fedsee"
        assert ("mixture" in run, "public_losses" in run, "usage" in run) == (federated,) * 3
        if federated:
            assert {
                "estimated", "partitioner", "realised", "mae", "mae_realised", "best_feasible_mae", "slope",
                "pure_argmax_accuracy",
            } == set(run["mixture"])  # fmt: skip
            assert [len(row) for row in run["mixture"]["estimated"]] == [3] * 4
            assert [len(row) for row in run["public_losses"]] == [3] * 3
            assert run["usage"]["experts"] == TASKS
            for row in run["usage"]["per_client"]:
                assert sum(row) == pytest.approx(1.0)


def test_every_line_of_the_metrics_has_its_schema(whole: Whole) -> None:
    out, _, _ = whole
    for method in FOUR:
        lines = lines_of(out / method / "seed-3")
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        for line in lines:
            assert set(line) == {
                "round", "seconds", "phases", "bytes_total", "bytes_up_per_client", "bytes_down_per_client",
                "evaluation", "evaluation_seconds", "log",
            }  # fmt: skip
            splits = ["test", "validation"] if line["round"] == 3 else ["validation"]
            assert sorted(line["evaluation"]) == splits
            for cost in line["phases"].values():
                assert set(cost) == {"seconds", "asked", "bytes_up", "bytes_down", "examples"}
            assert "evaluate" not in line["phases"]  # scoring is no part of what a method costs
            assert 0 < sum(cost["seconds"] for cost in line["phases"].values()) <= line["seconds"] + 0.01
            for scored in line["evaluation"].values():
                assert len(scored["accuracy"]) == len(scored["loss"]) == len(scored["n"]) == 4
                counted = scored["per_task"].values()
                assert sum(cell["n"] for cell in counted) == sum(scored["n"])
                right = [a * n for a, n in zip(scored["accuracy"], scored["n"], strict=True)]
                assert sum(cell["correct"] for cell in counted) == pytest.approx(sum(right), abs=1e-9)
                assert all(r == pytest.approx(round(r), abs=1e-12) for r in right)
    log = lines_of(out / "fedsee/seed-3")[2]["log"]
    assert [sum(row) for row in log["assigned"]] == pytest.approx([1.0] * 4)
    assert [sum(row) for row in log["contributions"]] == pytest.approx([1.0] * 3)
    assert set(log["active"]) == {"0", "1", "2", "3"}


def test_the_report_is_one_page_that_needs_nothing_else(whole: Whole) -> None:
    out, _, _ = whole
    text = (out / "report.html").read_text(encoding="utf-8")
    for method in FOUR:
        assert method in text
    assert "data:image" in text
    assert 'src="http' not in text
    assert {p.suffix for p in (out / "plots").iterdir()} == {".png", ".svg"}


# ---- the same twice ------------------------------------------------------------------------------


def test_the_same_experiment_gives_the_same_bits_whatever_ran_before(
    whole: Whole, tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    out, _, _ = whole
    api.run_experiment(tiny.experiment(*reversed(FOUR)), tmp_path / "again")
    for method in FOUR:
        first, second = (left_behind(d / method / "seed-3") for d in (out, tmp_path / "again"))
        assert len(first) >= 12
        assert first.keys() == second.keys()
        for name in first:
            assert first[name] == second[name], f"{method}: {name}"


def test_seeds_give_different_runs(whole: Whole) -> None:
    out, _, _ = whole
    last = "checkpoints/round-0003/server.safetensors"
    assert (out / "fedit/seed-3" / last).read_bytes() != (out / "fedit/seed-4" / last).read_bytes()


# ---- interrupted and resumed ---------------------------------------------------------------------


def stop(tiny: Tiny, out: Path, watch: Watch, *names: str, **changes: Any) -> None:
    with pytest.raises(Stopped):
        api.run_experiment(tiny.experiment(*names, **changes), out, progress=watch)
    assert not (out / "summary.json").exists()


# Methods of an encoder and a head are interrupted in test_array_runs, of routed experts in test_contracts.
ON_TEXT = [m for m in METHODS if m not in {"untrained", "fedsee_geometry", *ON_TABLES, *ON_EXPERTS}]


@pytest.mark.parametrize("name", ON_TEXT)
def test_an_interrupted_run_resumed_equals_one_that_was_not(
    name: str, tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    api.run_experiment(tiny.experiment(name), tmp_path / "whole")
    expected = left_behind(tmp_path / "whole" / name / "seed-3")
    for k in (0, 2) if name == "fedsee" else (1,):
        out = tmp_path / f"stopped-{k}"
        stop(tiny, out, Watch(stop_after=k), name)
        assert RunDirectory.open(out / name / "seed-3").checkpoint_rounds()[-1] == k
        watch = Watch()
        summary = api.resume_experiment(out, watch)
        assert watch.rounds == list(range(k + 1, 4))
        assert left_behind(out / name / "seed-3") == expected
        assert without_times(summary) == without_times(read(tmp_path / "whole/summary.json"))


@pytest.mark.parametrize("phase", ["update", "extract"])
def test_a_run_stopped_inside_a_round_does_that_round_again(
    phase: str, tiny: Tiny, tmp_path: Path, whole: Whole, no_report: None
) -> None:
    stop(tiny, tmp_path / "out", Watch(stop_in=(2, phase)), "fedsee")
    watch = Watch()
    api.resume_experiment(tmp_path / "out", watch)
    assert watch.rounds == [2, 3]
    assert left_behind(tmp_path / "out/fedsee/seed-3") == left_behind(whole[0] / "fedsee/seed-3")


def test_a_round_whose_metrics_were_written_but_not_its_checkpoint_is_done_again(
    tiny: Tiny, tmp_path: Path, whole: Whole, no_report: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = RunDirectory.save_checkpoint

    def stops(self: RunDirectory, round: int, *rest: Any) -> None:
        if round == 2:
            raise Stopped
        original(self, round, *rest)

    monkeypatch.setattr(RunDirectory, "save_checkpoint", stops)
    stop(tiny, tmp_path / "out", Watch(), "fedit")
    monkeypatch.undo()
    run = tmp_path / "out/fedit/seed-3"
    assert [line["round"] for line in lines_of(run)] == [0, 1, 2]
    assert RunDirectory.open(run).checkpoint_rounds() == [0, 1]
    monkeypatch.setattr(api, "write_report", lambda dirs: dirs[0])
    watch = Watch()
    api.resume_experiment(tmp_path / "out", watch)
    assert watch.rounds == [2, 3]
    assert left_behind(run) == left_behind(whole[0] / "fedit/seed-3")


def test_a_run_stopped_before_its_summary_only_writes_that(
    tiny: Tiny, tmp_path: Path, no_report: None, whole: Whole
) -> None:
    stop(tiny, tmp_path / "out", Watch(stop_after=3), "local_only")
    watch = Watch()
    api.resume_experiment(tmp_path / "out", watch)
    assert (watch.started, watch.rounds) == (["local_only, seed 3"], [])
    assert left_behind(tmp_path / "out/local_only/seed-3") == left_behind(whole[0] / "local_only/seed-3")


def test_checkpoints_every_second_round(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    changes = {"engine__checkpoint_every": 2, "method__rounds": 5}
    api.run_experiment(tiny.experiment("scaffold", **changes), tmp_path / "whole")
    run = RunDirectory.open(tmp_path / "whole/scaffold/seed-3")
    assert run.checkpoint_rounds() == [3, 4]  # rounds 1 and 3, and the last one
    out = tmp_path / "out"
    stop(tiny, out, Watch(stop_after=2), "scaffold", **changes)
    stopped = RunDirectory.open(out / "scaffold/seed-3")
    assert stopped.checkpoint_rounds() == [1]
    assert [line["round"] for line in stopped.read_metrics()] == [0, 1, 2]
    watch = Watch()
    api.resume_experiment(out, watch)
    assert watch.rounds == [2, 3, 4]
    assert left_behind(stopped.path) == left_behind(run.path)


def test_resume_keeps_finished_runs_and_does_the_rest(
    tiny: Tiny, tmp_path: Path, whole: Whole, no_report: None
) -> None:
    names = ("local_only", "fedit", "public_only")
    out = tmp_path / "out"

    class SecondRun(Watch):
        def round_end(self, round: int, seconds: float, line: dict[str, Any]) -> None:
            self.stop_after = 1 if len(self.started) == 2 else None
            super().round_end(round, seconds, line)

    stop(tiny, out, SecondRun(), *names)
    before = (out / "local_only/seed-3/summary.json").stat().st_mtime_ns
    watch = Watch()
    summary = api.resume_experiment(out, watch)
    assert watch.started == ["fedit, seed 3", "public_only, seed 3"]
    assert watch.rounds == [2, 3, 0, 1, 2, 3]
    assert (out / "local_only/seed-3/summary.json").stat().st_mtime_ns == before
    assert [run["method"] for run in summary["runs"]] == list(names)
    for name in names:
        assert left_behind(out / name / "seed-3") == left_behind(whole[0] / name / "seed-3")
    watch = Watch()
    assert api.resume_experiment(out, watch) == summary  # nothing is left to do
    assert watch.started == []


def test_a_single_run_s_directory_can_be_resumed(
    tiny: Tiny, tmp_path: Path, whole: Whole, no_report: None
) -> None:
    stop(tiny, tmp_path / "out", Watch(stop_after=1), "fedit")
    run = tmp_path / "alone"
    shutil.move(tmp_path / "out/fedit/seed-3", run)  # complete alone
    watch = Watch()
    summary = api.resume_experiment(run, watch)
    assert (watch.rounds, watch.closed) == ([2, 3], 1)
    assert (summary["methods"], summary["seeds"], len(summary["runs"])) == (["fedit"], [3], 1)
    assert left_behind(run) == left_behind(whole[0] / "fedit/seed-3")


def test_a_run_killed_before_its_records_were_whole_starts_again(
    tiny: Tiny, tmp_path: Path, whole: Whole, no_report: None
) -> None:
    out = tmp_path / "out"
    for missing in ({"versions.json", "federation.json", "model.json"}, {"model.json"}, {"config.toml"}):
        stop(tiny, out, Watch(stop_in=(0, "update")), "fedit")
        for name in missing:
            (out / "fedit/seed-3" / name).unlink()
        api.resume_experiment(out)
        assert left_behind(out / "fedit/seed-3") == left_behind(whole[0] / "fedit/seed-3")
        shutil.rmtree(out)


def test_an_experiment_killed_before_its_config_was_written_says_so(
    tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    RunDirectory.create(tmp_path / "out")
    with pytest.raises(UserError, match=r"resume: .*config\.toml.*; start anew with --force"):
        api.resume_experiment(tmp_path / "out")


def test_changed_data_are_refused_on_resume(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    root, out = tmp_path / "tasks", tmp_path / "out"
    shutil.copytree(tiny.root, root)
    stop(tiny, out, Watch(stop_after=1), "fedit", data__root=str(root))
    kept = left_behind(out)
    changed = rows("metal")
    changed["label"] = [1 - label for label in changed["label"]]
    write_task(root, "metal", changed)
    with pytest.raises(
        UserError, match=r"resume: the data of .*seed-3 have changed .*restore them"
    ) as caught:
        api.resume_experiment(out)
    assert "\n" not in str(caught.value)
    assert left_behind(out) == kept
    write_task(root, "metal")
    api.resume_experiment(out)


def test_a_changed_backbone_is_refused_on_resume(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    from safetensors.torch import load_file, save_file

    backbone, out = tmp_path / "backbone", tmp_path / "out"
    shutil.copytree(tiny.backbone, backbone)
    stop(tiny, out, Watch(stop_after=1), "fedit", model__backbone=str(backbone))
    kept = left_behind(out)
    weights = load_file(backbone / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    save_file({**weights, name: weights[name] * 1.01}, backbone / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"resume: the backbone of .*seed-3 has changed .*restore it"
    ) as caught:
        api.resume_experiment(out)
    assert "\n" not in str(caught.value)
    assert left_behind(out) == kept


# ---- directories ---------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("data or model were prepared")

    monkeypatch.setattr(api, "_build", refuse)


def test_an_existing_run_is_refused_before_any_work(
    tiny: Tiny, tmp_path: Path, no_report: None, no_work: None
) -> None:
    out = RunDirectory.create(tmp_path / "out")
    out.write_json("summary.json", {"kept": True})
    with pytest.raises(FileExistsError, match="--force"):
        api.run_experiment(tiny.experiment("fedit"), out.path)
    assert out.read_json("summary.json") == {"kept": True}


def test_force_replaces_everything_of_the_earlier_run(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    out = RunDirectory.create(tmp_path / "out")
    out.write_json("summary.json", {"old": True})
    (out.path / "scaffold").mkdir()
    api.run_experiment(tiny.experiment("untrained"), out.path, force=True)
    assert {p.name for p in out.path.iterdir()} == {MARKER, "config.toml", "summary.json", "untrained"}
    assert "old" not in out.read_json("summary.json")


@pytest.mark.parametrize("change", [{"method__fedit": {"lrr": 1}}, {"data__root": "/nowhere"}])
def test_force_replaces_nothing_when_the_experiment_is_faulty(
    change: dict[str, Any], tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    out = RunDirectory.create(tmp_path / "out")
    out.write_json("summary.json", {"kept": True})
    with pytest.raises((UserError, FileNotFoundError)):
        api.run_experiment(tiny.experiment("fedit", **change), out.path, force=True)
    assert out.read_json("summary.json") == {"kept": True}


def test_force_never_replaces_what_fedprism_did_not_make(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="stays as it is"):
        api.run_experiment(tiny.experiment("untrained"), tmp_path, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


# ---- evaluation ----------------------------------------------------------------------------------


def scripted(validation: list[float], test: list[float]) -> Callable[..., dict[str, Any]]:
    """Stands in for `collect`: validation and test accuracies by round, two calls per round."""
    told = [value for pair in zip(validation, test, strict=True) for value in pair]

    def collect(replies: Any, tasks: Any, projections: Any) -> dict[str, Any]:
        cell = {"correct": 1, "n": 2, "matthews": 0.0}
        return {"accuracy": [told.pop(0)] * 4, "loss": [0.0] * 4, "n": [6] * 4, "per_task": {"fruit": cell}}

    return collect


@pytest.mark.parametrize(("select", "round", "score"), [("best_validation", 2, 0.3), ("final", 3, 0.4)])
def test_the_round_that_is_reported(
    select: str, round: int, score: float, tiny: Tiny, tmp_path: Path, no_report: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Validation is best in rounds 1 and 2; of equals the later one counts. Test accuracy plays no part.
    monkeypatch.setattr(api, "collect", scripted([0.2, 0.6, 0.6, 0.5], [0.9, 0.2, 0.3, 0.4]))
    experiment = tiny.experiment("fedit", evaluation__select=select, evaluation__test_every=1)
    (run,) = api.run_experiment(experiment, tmp_path / "out")["runs"]
    assert (run["selected_round"], run["test"]["overall"]) == (round, pytest.approx(score))
    assert run["validation"]["overall"] == pytest.approx([0.2, 0.6, 0.6, 0.5][round])


def test_best_validation_needs_both_splits_every_round(tiny: Tiny, tmp_path: Path, no_work: None) -> None:
    with pytest.raises(UserError, match=r"evaluation\.test_every = 1"):
        api.run_experiment(tiny.experiment("fedit", evaluation__select="best_validation"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_splits_are_scored_as_often_as_asked(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    changes = {"evaluation__validation_every": 2, "evaluation__test_every": 3, "method__rounds": 7}
    api.run_experiment(tiny.experiment("fedit", **changes), tmp_path / "out")
    scored = [sorted(line["evaluation"]) for line in lines_of(tmp_path / "out/fedit/seed-3")]
    both = ["test", "validation"]
    assert scored == [[], ["validation"], ["test"], ["validation"], [], both, both]


# ---- the probe -----------------------------------------------------------------------------------


def test_the_probe_runs_repeats_and_resumes(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    changes = {"model__kind": "probe", "model__cache_dir": str(tmp_path / "cache")}
    names = ("fedsee", "fedit", "local_only", "centralized")
    summary = api.run_experiment(tiny.experiment(*names, **changes), tmp_path / "whole")
    assert [run["method"] for run in summary["runs"]] == list(names)
    model = read(tmp_path / "whole/fedsee/seed-3/model.json")
    assert (model["kind"], model["blocks"]["lora_B"]) == ("probe", 2 * (16 + 1))
    (first,) = (p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    files = sorted(first.iterdir())
    assert files
    api.run_experiment(tiny.experiment(*names, **changes), tmp_path / "again")
    assert sorted(first.iterdir()) == files  # the second one found every feature
    stop(tiny, tmp_path / "stopped", Watch(stop_after=1), *names, **changes)
    api.resume_experiment(tmp_path / "stopped")
    for name in names:
        expected = left_behind(tmp_path / "whole" / name / "seed-3")
        assert left_behind(tmp_path / "again" / name / "seed-3") == expected
        assert left_behind(tmp_path / "stopped" / name / "seed-3") == expected


# ---- what is counted -----------------------------------------------------------------------------

# Three clients of one task each: 36 rows, 6 of them for validation, 30 to train on. Rank 2 on query and value
# of two layers of width 16: A and B have 4 * 2 * 16 = 128 numbers each, 512 bytes. A router has for each of
# 4 projections 3 experts of 16 + 1 numbers, 816 bytes. A number on its own takes 8 bytes.
PURE = {"data__clients": 3, "data__partition": "pure"}
N, A, B, ROUTER, NUMBER = 30, 512, 512, 816, 8


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fedit", A + B + 3 * NUMBER, A + B + NUMBER),  # up: n, loss, examples; down: the rate
        ("fedavg", A + B + 3 * NUMBER, A + B + NUMBER),
        ("scaffold", 2 * (A + B) + 2 * NUMBER, 2 * (A + B) + NUMBER),  # dy, dc, loss, examples; x, c, rate
        ("local_only", 3 * NUMBER, 2 * NUMBER),  # n, loss, examples; seed and rate
        ("public_only", 0, 0),
        ("centralized", 0, 0),
        ("untrained", 0, 0),
    ],
)
def test_bytes_and_examples_of_a_run(
    name: str, up: int, down: int, tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    (run,) = api.run_experiment(tiny.experiment(name, **PURE), tmp_path / "out")["runs"]
    assert (run["bytes_up_per_client_round"], run["bytes_down_per_client_round"]) == (up, down)
    for line in lines_of(tmp_path / "out" / name / "seed-3"):
        assert (line["bytes_up_per_client"], line["bytes_down_per_client"]) == (up, down)
    public = 4 * 3 * 16 if name == "public_only" else 0  # rounds, tasks, public rows
    trained = 0 if name in ("public_only", "untrained") else 4 * 3 * N
    assert (run["examples_trained"], run["examples_public"]) == (trained, public)
    assert run["local_epochs"] == trained / (3 * N)


def test_bytes_and_examples_of_fedsee(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    (run,) = api.run_experiment(tiny.experiment("fedsee", **PURE), tmp_path / "out")["runs"]
    lines = lines_of(tmp_path / "out/fedsee/seed-3")
    first = {
        "initialize": (3, 3 * (A + B + 3 * NUMBER), 3 * (A + B + 2 * NUMBER), 3 * N),  # epochs, rate
        "frame_cost": (3, 3 * 3 * NUMBER, 3 * (A + B + NUMBER), 0),  # three scores; the aligned B, rows
    }
    for phase, (asked, up, down, examples) in first.items():
        cost = {key: value for key, value in lines[0]["phases"][phase].items() if key != "seconds"}
        assert cost == {"asked": asked, "bytes_up": up, "bytes_down": down, "examples": examples}
    assert lines[0]["bytes_up_per_client"] == A + B + 3 * NUMBER  # a diagnosis is no communication
    assert lines[0]["bytes_down_per_client"] == A + B + 2 * NUMBER
    # up: one expert, the pair, the router; n, loss, kl, examples
    up = B + (A + B) + ROUTER + 4 * NUMBER
    # down: A, three experts; number of experts, rate; three usable, one active; a target of three doubles
    down = A + 3 * B + 2 * NUMBER + 4 * NUMBER + 3 * 8
    assert [line["bytes_up_per_client"] for line in lines[1:]] == [up] * 3
    assert [line["bytes_down_per_client"] for line in lines[1:]] == [down] + [down + A + B + ROUTER] * 2
    for line in lines:
        assert line["phases"]["extract"]["asked"] == 1
        assert line["phases"]["extract"]["examples"] == 4 * 3 * 4  # steps, tasks, examples per step and task
    assert run["bytes_up_per_client_round"] == (A + B + 3 * NUMBER + 3 * up) / 4
    assert run["examples_trained"] == 4 * 3 * N  # one initial epoch and three rounds
    assert run["examples_public"] == 4 * 48
    assert run["local_epochs"] == 4.0


def test_bytes_are_means_over_the_clients_that_were_asked(
    tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    changes = {"method__fedit": {"participation": 0.5}, **PURE}  # 2 of 3
    (run,) = api.run_experiment(tiny.experiment("fedit", **changes), tmp_path / "out")["runs"]
    lines = lines_of(tmp_path / "out/fedit/seed-3")
    assert [line["phases"]["update"]["asked"] for line in lines] == [2] * 4
    assert [line["phases"]["update"]["bytes_up"] for line in lines] == [2 * (A + B + 24)] * 4
    assert run["bytes_up_per_client_round"] == A + B + 24
    assert (run["examples_trained"], run["local_epochs"]) == (4 * 2 * N, pytest.approx(8 / 3))


def test_local_only_sends_no_tensors(
    tiny: Tiny, tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, travelled = InProcess.carry, []

    def spy(self: InProcess, ask: Ask, round: int) -> list[Reply]:
        replies = original(self, ask, round)
        if ask.phase != "evaluate":
            bodies = [ask.body, *ask.each.values(), *(reply.body for reply in replies)]
            travelled.append([path for body in bodies for path, _ in tensors_in(body)])
        return replies

    monkeypatch.setattr(InProcess, "carry", spy)
    api.run_experiment(tiny.experiment("local_only"), tmp_path / "out")
    assert travelled == [[]] * 4


def test_lists_name_what_there_is() -> None:
    assert [entry["name"] for entry in api.list_methods()] == list(METHODS)
    assert {entry["name"]: entry["needs"] for entry in api.list_methods()}["fedsee"] == "public data"
    assert [entry["name"] for entry in api.list_models()] == ["encoder", "probe", "vision", "mlp"]
    assert {"sst2", "rte"} <= {entry["name"] for entry in api.list_datasets()}


def test_resuming_with_other_settings_is_refused(tiny: Tiny, tmp_path: Path, no_report: None) -> None:
    out = tmp_path / "out"
    stop(tiny, out, Watch(stop_after=1), "fedit")
    recipe = out / "config.toml"
    text = recipe.read_text(encoding="utf-8")
    changed = re.sub(r"(?m)^rounds = \d+$", "rounds = 9", text)
    assert changed != text
    recipe.write_text(changed, encoding="utf-8")
    with pytest.raises(UserError, match=r"resume: the settings of .*differ .*; restore that file"):
        api.resume_experiment(out)


def test_estimated_mixtures_of_absent_clients_are_their_smoothed_columns(
    tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    changes = {"method__participation": 0.5}
    (run,) = api.run_experiment(tiny.experiment("fedsee", **changes), tmp_path / "out")["runs"]
    estimated = np.array(run["mixture"]["estimated"])
    assert np.isfinite(estimated).all() and np.allclose(estimated.sum(1), 1)


# ---- random features and the tasks' second moments -----------------------------------------------


def test_a_probe_on_random_features_resumes_as_if_never_stopped(
    tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    changes = {
        "model__kind": "probe", "model__cache_dir": str(tmp_path / "cache"), "model__features": "rff",
        "model__rff_features": 11, "model__rff_scale": 1.5, "method__rounds": 3,
    }  # fmt: skip
    experiment = tiny.experiment("fedsee", **changes)
    api.run_experiment(experiment, tmp_path / "whole")
    model = read(tmp_path / "whole/fedsee/seed-3/model.json")
    assert (model["features"], model["blocks"]["lora_B"]) == ("rff", 2 * (11 + 1))
    assert [model["rff"][key] for key in ("n_features", "scale", "seed")] == [11, 1.5, 3]
    stop(tiny, tmp_path / "stopped", Watch(stop_after=1), "fedsee", **changes)
    api.resume_experiment(tmp_path / "stopped")
    expected = left_behind(tmp_path / "whole/fedsee/seed-3")
    assert left_behind(tmp_path / "stopped/fedsee/seed-3") == expected
    assert expected["summary.json"]["covariance_dispersion"]["dimension"] == 12


def test_a_summary_says_for_every_expert_which_hull_was_taken(
    tiny: Tiny, tmp_path: Path, no_report: None
) -> None:
    own = {"init_epochs": 1, "extract_steps": 4, "hull": "affine", "hull_steps": 2, "experts": 2}
    changes = {"model__kind": "probe", "model__cache_dir": str(tmp_path / "cache"), "method__rounds": 2}
    experiment = tiny.experiment("fedsee", method__fedsee=own, **changes)
    (run,) = api.run_experiment(experiment, tmp_path / "out")["runs"]
    taken = lines_of(tmp_path / "out/fedsee/seed-3")[-1]["log"]["hull"]
    assert all(word.startswith("affine ") for word in taken)
    assert run["hull"] == {"fruit": taken[0], "metal": taken[1]}


def test_a_summary_of_convex_experts_says_nothing_of_hulls(whole: Whole) -> None:
    assert not any("hull" in run for run in whole[1]["runs"])


@pytest.mark.parametrize(
    ("mixtures", "expected"),
    [
        ([[1, 0, 0]] * 3, "got 3 mixtures, needs one row of 3 shares for each of the 4 clients"),
        ([[1, 0, 0]] * 3 + [[0.5, 0.5]], r"client 3 got 2 shares, needs 3 .*; correct data.mixtures\[3\]"),
        ([[1, 0, 0]] * 3 + [[0.5, 0.4, 0]], r"client 3 got shares that sum to 0.9, needs 3"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_work(
    mixtures: list[list[float]], expected: str, tiny: Tiny, tmp_path: Path, no_work: None
) -> None:
    experiment = tiny.experiment("fedit", data__partition="given", data__mixtures=mixtures)
    with pytest.raises(UserError, match=expected):
        api.run_experiment(experiment, tmp_path / "out")


def test_a_probe_s_summary_has_the_dispersion_of_the_tasks(
    tiny: Tiny, tmp_path: Path, no_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedprism.theory.mixture_geometry import relative_dispersion

    asked, original = [], api.covariance_dispersion
    monkeypatch.setattr(api, "covariance_dispersion", lambda phi: asked.append(1) or original(phi))
    experiment = tiny.experiment(
        "fedit", "local_only", seeds=[3, 4], model__kind="probe", method__rounds=1,
        data__public_only=["river"], data__tasks=["fruit", "metal"], data__alpha=20.0,
        model__cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    runs = api.run_experiment(experiment, tmp_path / "out")["runs"]
    assert len(asked) == 2  # once per seed
    model, federation = api.Workshop(experiment, Watch()).get(4)
    training = [model.prepare(client["train"]) for client in federation.clients]
    phi = np.concatenate([rows.features.numpy() for rows in training]).astype(float)
    task = np.concatenate([rows.columns["task"].numpy() for rows in training])
    # A standardised vector sums to 0: one of its 16 directions is void, which this basis leaves out.
    basis = np.zeros((17, 16))
    basis[:16, :15] = np.linalg.qr(np.concatenate([np.ones((16, 1)), np.eye(16)[:, :15]], 1))[0][:, 1:]
    basis[16, 15] = 1
    moments = np.stack([phi[task == m].T @ phi[task == m] / (task == m).sum() for m in (0, 1)])
    for run in (run for run in runs if run["seed"] == 4):
        found = run["covariance_dispersion"]
        assert found["rho"] == pytest.approx(relative_dispersion(basis.T @ moments @ basis), rel=1e-6)
        assert found["gap"] == pytest.approx(np.linalg.norm(moments[0] - moments[1], 2))
        assert (found["dimension"], found["span"]) == (17, 16)
        assert found["rows"] == {"fruit": (task == 0).sum(), "metal": (task == 1).sum()}
    assert read(tmp_path / "out/fedit/seed-4/summary.json")["covariance_dispersion"] == found


def test_an_encoder_s_summary_has_no_dispersion(whole: Whole) -> None:
    assert not any("covariance_dispersion" in run for run in whole[1]["runs"])
