"""Routing with a finished run: the measured accuracy again, posteriors by hand, what is refused."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from tests.tiny_text import Stopped, Watch
from typer.testing import CliRunner, Result

from fedprism import api, cli
from fedprism import config as configs
from fedprism.data import image_federation
from fedprism.data.sources import dataset_root
from fedprism.data.tables import ATTRIBUTES
from fedprism.methods.registry import METHODS, get_method
from fedprism.protocol import sample_clients
from fedprism.serving.load import load, routing_methods
from fedprism.serving.route import Answer, Refusal, Router
from fedprism.serving.rows import Preparation
from fedprism.storage import RunDirectory

HEART: dict[str, Any] = {
    "name": "hospitals",
    "seeds": [3],
    "data": {"dataset": "heart"},
    "model": {"hidden": [16], "width": 8, "router_width": 8},
    "method": {
        "names": ["fedspm", "feddrm", "fedavg"],
        "rounds": 4,
        "lr": 0.05,
        "batch_size": 32,
        "optimizer": "sgd",
        "local_epochs": 1,
        "fedspm": {"local_steps": 0, "n_components": 2, "drm_steps": 8},
    },
    "engine": {"threads": 1},
}
PATIENT = dict.fromkeys(ATTRIBUTES, "") | {"age": "63", "sex": "1", "cp": "4"}


def experiment(*names: str, **settings: Any) -> configs.Experiment:
    method = {**HEART["method"], "names": list(names), **settings}
    return configs.parse({**HEART, "method": method}, methods=METHODS)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Loading a run sets the threads of the process; other tests get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on the hospitals, four rounds, without a report."""
    out = tmp_path_factory.mktemp("runs") / "hospitals"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
        api.run_experiment(experiment("fedspm", "feddrm", "fedavg"), out)
    return out


def table_rows() -> list[dict[str, Any]]:
    """The shipped table's rows, None where a value is missing."""
    return pyarrow.parquet.read_table(dataset_root() / "heart_disease.parquet").to_pylist()


def cells(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ATTRIBUTES}


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspm", "feddrm"])
def test_the_test_rows_get_the_accuracy_that_the_run_measured(trained: Path, method: str) -> None:
    run = trained / method / "seed-3"
    rows = [row for row in table_rows() if row["split"] == "test"]
    found = load(run).answer([cells(row) for row in rows])
    measured = json.loads((run / "summary.json").read_text())["outside"]
    n = len(rows)
    assert measured["n"] == n == 306
    names = ("no disease", "disease")
    right = sum(each.prediction == names[row["label"]] for each, row in zip(found, rows, strict=True))
    owner = sum(each.client == row["center"] for each, row in zip(found, rows, strict=True))
    nll = -sum(math.log(each.posterior[row["center"]]) for each, row in zip(found, rows, strict=True)) / n
    assert (right / n, owner / n) == pytest.approx((measured["system"], measured["routing"]))
    assert nll == pytest.approx(measured["routing_nll"], rel=1e-5)
    assert method != "fedspm" or owner / n > 0.5  # the commonest hospital alone would give 101 / 306


def test_a_test_row_gets_the_posterior_of_the_router_on_the_inputs_of_the_run(trained: Path) -> None:
    run = RunDirectory.open(trained / "fedspm" / "seed-3")
    method, made = get_method("fedspm"), experiment("fedspm")
    workshop = api.Workshop(made, api.Silent())
    model, federation = workshop.get(3)
    restored = run.load_checkpoint(method.state)
    assert restored is not None
    cfg = api._resolve(made, "fedspm")[1]
    served = method.serve(cfg, restored[1])
    router, shipped = load(run.path), table_rows()
    assert method.router is not None
    for client in federation.clients:
        test = client["test"].select([0, 3, 7])
        batch = {"x": test.x(), "task": test.columns["task"]}
        scores = method.router(model, served, batch, cfg).double().exp()
        posterior = scores / scores.sum(1, keepdim=True)
        found = router.answer([cells(shipped[int(k)]) for k in test.columns["row"]])
        for each, expected in zip(found, posterior, strict=True):
            assert isinstance(each, Answer)
            assert list(each.posterior.values()) == pytest.approx(expected.tolist(), abs=1e-6)
            assert each.client == federation.client_names[int(expected.argmax())]
            assert sum(each.posterior.values()) == pytest.approx(1)


def test_a_client_that_never_took_part_answers_as_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    own = {"local_steps": 0, "n_components": 2, "drm_steps": 1, "drm_lr": 1e-6}
    made = experiment("fedspm", rounds=1, participation=0.25, fedspm=own)
    (summary,) = api.run_experiment(made, tmp_path / "out")["runs"]
    rows = [row for row in table_rows() if row["split"] == "test"]
    found = load(tmp_path / "out/fedspm/seed-3").answer([cells(row) for row in rows])
    absent = {0, 1, 2, 3} - set(sample_clients(range(4), 0.25, 3, 0))
    names = ("cleveland", "hungarian", "switzerland", "va")
    assert {each.client for each in found if isinstance(each, Answer)} & {names[i] for i in absent}
    right = [
        each.prediction == ("no disease", "disease")[r["label"]] for each, r in zip(found, rows, strict=True)
    ]
    assert sum(right) / 306 == pytest.approx(summary["outside"]["system"])


def test_nothing_but_the_run_directory_is_needed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(trained / "fedspm/seed-3").answer([PATIENT])
    shutil.copytree(trained / "fedspm" / "seed-3", tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError):
        image_federation.build_natural_federation(dataset="heart", seed=3)
    assert load(tmp_path / "elsewhere").answer([PATIENT]) == before


def by_hand(scores: list[float], logits: list[list[float]]) -> Router:
    """Two columns, as many clients as scores; client i says logits[i] whatever the row."""
    preparation = Preparation(
        ("a", "b"), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0), (), (), (), ((0.0, 1.0), (0.0, 1.0)), {}
    )
    return Router(
        tuple("ABC"[: len(scores)]),
        ("no", "yes"),
        preparation,
        lambda batch: torch.tensor([scores]).expand(len(batch["x"]), -1) * batch["x"][:, :1],
        [lambda batch, row=row: torch.tensor([row]).expand(len(batch["x"]), -1) for row in logits],
        size=2,
        about={"method": "hand"},
    )


def test_posterior_and_probability_are_those_of_the_log_scores() -> None:
    router = by_hand([0.0, math.log(3), math.log(4)], [[0.0, 9.0], [0.0, 9.0], [math.log(9), 0.0]])
    rows = [{"a": 1, "b": 0, "id": "x"}, {"a": -1, "b": 0}, {"a": "?", "b": 0, "id": 7}, {"a": 0, "b": 0}]
    first, second, third, fourth = router.answer(rows)
    assert isinstance(first, Answer) and isinstance(second, Answer) and isinstance(fourth, Answer)
    assert first.posterior == pytest.approx({"A": 1 / 8, "B": 3 / 8, "C": 4 / 8})
    assert (first.row, first.id, first.client, first.prediction) == (1, "x", "C", "no")
    assert first.probability == pytest.approx(0.9)
    assert second.posterior == pytest.approx({"A": 12 / 19, "B": 4 / 19, "C": 3 / 19})
    assert (second.client, second.prediction) == ("A", "yes")
    assert second.notes == ("a -1 is outside 0 to 1, the range of training",)
    assert third == Refusal(3, "7", "a is '?', needs a number, or nothing where it is missing")
    assert (fourth.client, fourth.row) == ("A", 4)  # a tie: the first


def test_numbers_that_overflow_are_refused() -> None:
    (answer,) = by_hand([0.0, 1.0], [[0.0, 1.0], [0.0, 1.0]]).answer([{"a": 1e60, "b": 0}])
    assert answer == Refusal(1, "", "its numbers are too large to compute with; check them")


# ---- the command ---------------------------------------------------------------------------------


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["route", *map(str, arguments)])


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", *ATTRIBUTES])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_command_answers_what_it_can_and_names_what_it_can_t(trained: Path, tmp_path: Path) -> None:
    sick, unread = {**PATIENT, "id": "a"}, {**PATIENT, "id": "b", "age": "sixty"}
    source = write(tmp_path / "in.csv", sick, unread)
    run = trained / "fedspm/seed-3"
    result = call(run, "--input", source, "--json")
    assert result.exit_code == 0
    said = result.stderr.splitlines()
    assert said == [
        "fedprism: row 2 (b) refused: age is 'sixty', needs a number, or nothing where it is missing",
        "fedprism: answered 1 of 2 rows, refused 1",
    ]
    record = json.loads(result.stdout)
    (expected,) = load(run).answer([PATIENT])
    assert isinstance(expected, Answer)
    (answer,) = record["answers"]
    assert (answer["id"], answer["client"], answer["prediction"]) == (
        "a",
        expected.client,
        expected.prediction,
    )
    assert answer["posterior"] == expected.posterior
    assert answer["missing"] == list(ATTRIBUTES[3:])
    assert [refused["row"] for refused in record["refused"]] == [2]
    assert (record["method"], record["seed"], record["rounds"]) == ("fedspm", 3, 4)
    shown = call(run, "--input", source).stdout
    assert expected.client in shown and f"{expected.probability:.3f}" in shown and "P(switzerland)" in shown


def test_the_command_writes_csv_or_json(trained: Path, tmp_path: Path) -> None:
    source, run = write(tmp_path / "in.csv", PATIENT, {**PATIENT, "sex": "0"}), trained / "feddrm/seed-3"
    result = call(run, "--input", source, "--output", tmp_path / "out.csv")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"fedprism: answered 2 of 2 rows, refused 0; answers: {tmp_path / 'out.csv'}\n"
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    call(run, "--input", source, "--output", tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    call(run, "--input", source, "--output", tmp_path / "other", "--json")
    assert json.loads((tmp_path / "other").read_text()) == record
    for row, answer in zip(rows, record["answers"], strict=True):
        assert {name: float(row[f"P({name})"]) for name in record["clients"]} == answer["posterior"]
        assert (row["client"], row["prediction"]) == (answer["client"], answer["prediction"])
        assert float(row["probability"]) == answer["probability"]
    before = source.read_text()
    refused = call(run, "--input", source, "--output", source)
    assert (refused.exit_code, source.read_text()) == (2, before)
    assert "is the input" in refused.stderr
    assert call(run, "--input", source, "--output", tmp_path / "no/out.csv").exit_code == 2


def test_without_an_answer_the_status_is_2_and_nothing_is_written(trained: Path, tmp_path: Path) -> None:
    bad = {**PATIENT, "sex": "m"}
    source = write(tmp_path / "in.csv", *[bad] * 23)
    result = call(trained / "fedspm/seed-3", "--input", source, "--output", tmp_path / "out.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert not (tmp_path / "out.csv").exists()
    lines = result.stderr.splitlines()
    assert len(lines) == 22  # twenty rows one by one
    assert lines[-2:] == [
        "fedprism: and 3 more rows refused; --json has the reasons",
        "fedprism: answered 0 of 23 rows, refused 23",
    ]
    every = call(trained / "fedspm/seed-3", "--input", source, "--json")
    assert every.exit_code == 2 and len(json.loads(every.stdout)["refused"]) == 23
    (tmp_path / "in.csv").write_text("age,sex\n60,1\n")
    result = call(trained / "fedspm/seed-3", "--input", source)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "lacks cp, trestbps" in result.stderr


def test_runs_that_can_t_route_get_one_line_with_the_way_out(trained: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", PATIENT)
    for run, line in [
        (trained / "fedavg/seed-3", f"fedavg has no router; name a run of {', '.join(routing_methods())}"),
        (trained, f"is an experiment; name one of its runs: {trained / 'feddrm/seed-3'}, "
         f"{trained / 'fedspm/seed-3'}"),
        (tmp_path / "nowhere", "does not exist; name a directory that `fedprism run` made"),
        (tmp_path, "is no run of fedprism's"),
    ]:  # fmt: skip
        result = call(run, "--input", source)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert line in result.stderr


def test_an_unfinished_run_is_told_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        api.run_experiment(experiment("feddrm"), out, progress=Watch(stop_after=0))
    run, source = out / "feddrm" / "seed-3", write(tmp_path / "in.csv", PATIENT)
    result = call(run, "--input", source)
    assert result.exit_code == 2
    assert result.stderr == (
        f"fedprism: route: {run} is not finished; finish it with: fedprism resume {run}\n"
    )
    api.resume_experiment(run)
    assert call(run, "--input", source).exit_code == 0


def test_a_damaged_or_foreign_run_is_refused(trained: Path, tmp_path: Path) -> None:
    source, run = write(tmp_path / "in.csv", PATIENT), tmp_path / "run"
    shutil.copytree(trained / "fedspm/seed-3", run)
    settings = (run / "config.toml").read_text()

    def told() -> str:
        result = call(run, "--input", source)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        return result.stderr

    (run / "config.toml").write_text(settings.replace("router_width = 8", "router_width = 9"))
    assert "this version builds" in told()
    shutil.rmtree(run / "checkpoints")
    (run / "config.toml").write_text(settings)
    assert "has no checkpoint any more" in told()
    facts = json.loads((run / "preprocessing.json").read_text())
    (run / "preprocessing.json").write_text(json.dumps({**facts, "mean": None}))
    assert "data.statistics = 'federated'" in told()
    (run / "preprocessing.json").unlink()
    assert "an earlier version made this run; repeat it" in told()
    images = {
        **HEART,
        "data": {"dataset": "fashion_mnist"},
        "model": {"kind": "vision", "backbone": "lenet_small", "router_backbone": "lenet_small"},
        "method": {"names": ["feddrm"]},
    }
    (run / "config.toml").write_text(configs.dumps(configs.parse(images, methods=METHODS)))
    assert "hold 'fashion_mnist', which is no table; name a run with data.dataset = 'heart'" in told()


def test_routing_methods_are_those_with_a_router() -> None:
    found = routing_methods()
    assert {"fedspm", "feddrm", "feddrm_separate"} <= set(found) <= set(METHODS)
    assert not {"fedavg", "local_only", "fedsee"} & set(found)


def test_the_shipped_experiment_on_the_hospitals_can_be_run() -> None:
    made = configs.load(configs.find("heart"), methods=METHODS)
    api._check(made)
    assert set(made.methods) & set(routing_methods())
    assert (made.data.imputation, made.data.statistics) == ("federated", "federated")
