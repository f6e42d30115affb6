"""Tables and the page, from invented runs: nothing is lost, marked wrong or loaded from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from tests.evaluation import synthetic

from fedprism.evaluation import metrics, plots, reports
from fedprism.evaluation.reports import load_experiment


class Page(HTMLParser):
    """Visible text, tables (rows of (text, classes)), addresses and ids of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.addresses, self.ids = "", [], []
        self.tables: list[list[list[tuple[str, list[str]]]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", (found.get("class") or "").split()))
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            text, kind = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (text + data.strip(), kind)


def printed(table: Any, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.fixture(scope="session")
def html(experiment_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    assert reports.write_report([experiment_dir], target) == target
    return target.read_text(encoding="utf-8")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out of pages: drawing them is slow and has its own tests."""
    monkeypatch.setattr(plots, "figures", lambda experiment: {})


@pytest.fixture
def broken_dir(tmp_path: Path) -> Path:
    """fedsee whole; fedit with one seed missing and one stopped; scaffold on another federation."""
    folder = synthetic.write_experiment(tmp_path / "broken", ("fedsee", "fedit", "scaffold"), (42, 43))
    shutil.rmtree(folder / "fedit" / "seed-43")
    shutil.rmtree(folder / "fedit" / "seed-42")
    synthetic.write_run(folder / "fedit" / "seed-42", "fedit", 42, clients=6, n_tasks=3, stop_after=3)
    shutil.rmtree(folder / "scaffold" / "seed-42")
    synthetic.write_run(folder / "scaffold" / "seed-42", "scaffold", 42, clients=5, n_tasks=3)
    return folder


def test_experiment_is_loaded_whole(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    assert experiment["methods"] == ["fedsee", "fedit", "local_only"]
    assert experiment["seeds"] == [42, 43]
    assert len(experiment["runs"]) == 6
    assert experiment["incomplete"] == [] and experiment["warnings"] == []
    assert experiment["runs"][0]["federation"]["tasks"] == ["sst2", "qnli", "cola"]


def test_single_run_is_loaded_alone(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir / "fedit" / "seed-43")
    assert [(run["method"], run["seed"]) for run in experiment["runs"]] == [("fedit", 43)]


def test_summary_file_is_enough_for_tables(experiment_dir: Path) -> None:
    kept = load_experiment(experiment_dir / "summary.json")
    assert reports.markdown_table(kept) == reports.markdown_table(load_experiment(experiment_dir))


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no runs"):
        load_experiment(tmp_path)
    with pytest.raises(FileNotFoundError, match="no directory"):
        load_experiment(tmp_path / "nothing")
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="not a summary"):
        load_experiment(tmp_path / "other.json")


def test_incomplete_runs_are_listed_with_their_rounds(broken_dir: Path) -> None:
    experiment = load_experiment(broken_dir)
    stopped = {(run["method"], run["seed"]): run for run in experiment["incomplete"]}
    assert stopped.keys() == {("fedit", 42), ("fedit", 43)}
    assert (stopped["fedit", 42]["rounds_done"], stopped["fedit", 42]["rounds_planned"]) == (3, 6)
    assert stopped["fedit", 43]["rounds_done"] == 0
    for text in (printed(reports.summary_table(experiment)), reports.markdown_table(experiment)):
        flat = " ".join(text.split())
        assert "fedit, seed 42: 3 of 6 rounds" in flat
        assert "fedit, seed 43: not started" in flat


def test_run_whose_last_lines_were_cut_is_incomplete_and_keeps_its_rounds(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path, ("fedit",), (42,))
    run = folder / "fedit" / "seed-42"
    for name, keep in (("summary.json", 100), ("metrics.jsonl", -20)):
        path = run / name
        path.write_text(path.read_text(encoding="utf-8")[:keep], encoding="utf-8")
    (stopped,) = load_experiment(folder)["incomplete"]
    assert stopped["rounds_done"] == 5


@pytest.mark.usefixtures("no_pictures")
def test_the_page_lists_incomplete_runs_and_warns_of_other_federations(
    broken_dir: Path, tmp_path: Path
) -> None:
    target = reports.write_report([broken_dir], tmp_path / "report.html")
    page = Page(target.read_text(encoding="utf-8"))
    flat = " ".join(page.text.split())
    assert "2 incomplete runs" in flat
    assert "Seed 42: the runs saw different federations" in flat
    assert "not ranked" in flat
    assert ["fedit", "42", "3 of 6 rounds"] in [
        [text for text, _ in row[:3]] for t in page.tables for row in t
    ]
    differences = page.tables[1]
    assert [text for text, _ in differences[1]][-1] == "43 (no partner: 42)"  # scaffold


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    page = Page(html)
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in page.addresses)
    code = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", code)
    assert all(address[1:] in page.ids for address in page.addresses if address.startswith("#"))
    assert len(set(page.ids)) == len(page.ids)


def test_the_page_has_every_part(html: str) -> None:
    page = Page(html)
    assert set(page.ids) == {
        "results", "differences", "negative", "curves", "clients", "mixtures", "losses", "usage", "costs",
        "federation", "setup",
    }  # fmt: skip
    assert sum(address.startswith("data:") for address in page.addresses) == 7
    assert page.text.count("How to read this.") == 9
    assert "structural limit" in page.text
    assert "test rows of cola are used by more than one client" in page.text
    assert 'names = ["fedsee", "fedit", "local_only"]' in page.text


def test_the_best_value_is_marked_and_no_other(experiment_dir: Path, html: str) -> None:
    experiment = load_experiment(experiment_dir)
    results = Page(html).tables[0]
    marked = {row[0][0] for row in results[1:] if "best" in row[1][1]}
    assert marked == {"fedsee"}
    table = reports.summary_table(experiment)
    cells = [cell for cell in table.columns[1].cells if isinstance(cell, Text)]
    assert [cell.style for cell in cells] == ["bold", "", ""]
    row = next(line for line in reports.markdown_table(experiment).splitlines() if "`fedsee`" in line)
    assert row.split("|")[2].strip().startswith("**")
    assert "**" not in next(
        line for line in reports.markdown_table(experiment).splitlines() if "`fedit`" in line
    )


def test_values_equal_in_print_are_all_best() -> None:
    runs = [
        {
            "method": m,
            "seed": 1,
            "test": {"overall": v, "worst_50": v, "worst_25": v, "per_task": {}, "clients": [v]},
        }
        for m, v in (("x", 0.80001), ("y", 0.80002), ("z", 0.7))
    ]
    table = reports.summary_table({"name": "tie", "runs": runs})
    assert [cell.style for cell in table.columns[1].cells if isinstance(cell, Text)] == ["bold", "bold", ""]
    (line,) = reports._headline(metrics.summarise_runs(runs), runs, None)
    assert line == "y reaches 80.0 % test accuracy, mean over clients, level with x."


def test_numbers_in_all_tables_are_those_of_the_runs(experiment_dir: Path, html: str) -> None:
    experiment = load_experiment(experiment_dir)
    first, second = (100 * run["test"]["overall"] for run in experiment["runs"] if run["method"] == "fedit")
    mean, sd = (first + second) / 2, abs(first - second) / 2**0.5  # two values: n - 1 is 1
    row = Page(html).tables[0][2]
    assert row[0][0] == "fedit"
    in_markdown = next(
        x for x in reports.markdown_table(experiment).splitlines() if x.startswith("| `fedit`")
    )
    shown = re.search(r"fedit +([0-9.]+).*\n +±([0-9.]+)", printed(reports.summary_table(experiment)))
    assert shown is not None
    for numbers in (row[1][0].split("± "), in_markdown.split("|")[2].split(" ± "), shown.groups()):
        assert [float(number) for number in numbers] == pytest.approx([mean, sd], abs=0.0501)
    assert "144" in printed(reports.summary_table(experiment))  # 147456 bytes are 144 KiB


def test_paired_table_subtracts_the_reference_seed_by_seed(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    score = {(run["method"], run["seed"]): 100 * run["test"]["overall"] for run in experiment["runs"]}
    gaps = [score["fedit", seed] - score["fedsee", seed] for seed in (42, 43)]
    shown = re.search(r"fedit +(−[0-9.]+).*\n +±([0-9.]+)", printed(reports.paired_table(experiment)))
    assert shown is not None
    expected = [sum(gaps) / 2, abs(gaps[0] - gaps[1]) / 2**0.5]
    assert [float(n.replace("−", "-")) for n in shown.groups()] == pytest.approx(expected, abs=0.0501)


def test_tables_of_six_tasks_and_three_seeds_fit_80_columns(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(
        tmp_path, ("fedsee", "public_only", "centralized"), (42, 43, 44), clients=6, n_tasks=6, rounds=2
    )
    experiment = load_experiment(folder)
    for table in (reports.summary_table(experiment), reports.paired_table(experiment)):
        assert "…" not in printed(table)


def test_one_method_without_fedsee_has_a_report_and_no_differences(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path / "one", ("fedit",), (42,), clients=3, n_tasks=2, rounds=2)
    experiment = load_experiment(folder)
    assert reports.paired_table(experiment) is None
    assert "Difference" not in reports.markdown_table(experiment)
    page = Page(reports.write_report([folder], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert set(page.ids) == {"results", "curves", "clients", "costs", "federation", "setup"}
    assert not any("best" in kind for _, kind in page.tables[0][1])


def test_a_run_stopped_in_its_first_round_still_has_a_report(tmp_path: Path) -> None:
    run = tmp_path / "fedit" / "seed-42"
    synthetic.write_run(run, "fedit", 42, clients=3, n_tasks=2, stop_after=0)
    page = Page(reports.write_report([tmp_path], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "No run has been tested yet." in page.text
    assert "no round finished" in page.text


def test_the_reference_can_be_chosen_and_must_exist(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    assert "difference to local_only" in printed(reports.paired_table(experiment, "local_only"))
    with pytest.raises(KeyError, match="nobody"):
        reports.paired_table(experiment, "nobody")


@pytest.mark.usefixtures("no_pictures")
def test_a_method_of_two_experiments_is_told_apart(experiment_dir: Path, tmp_path: Path) -> None:
    other = synthetic.write_experiment(tmp_path / "other", ("fedsee",), (42,), clients=5, name="second")
    merged = reports.merge([load_experiment(experiment_dir), load_experiment(other)])
    assert merged["methods"] == ["fedsee (synthetic)", "fedit", "local_only", "fedsee (second)"]
    assert any("different federations" in line for line in merged["warnings"])
    target = reports.write_report([experiment_dir, other], tmp_path / "r.html")
    assert "different federations" in target.read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_pictures")
def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    folder = synthetic.write_experiment(
        tmp_path / "x", ("fedit",), (42,), clients=3, n_tasks=2, name=name, rounds=2
    )
    html = reports.write_report([folder], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in html and "&lt;script&gt;" in html


@pytest.mark.usefixtures("no_pictures")
def test_published_values_stand_beside_ours(experiment_dir: Path, tmp_path: Path) -> None:
    table = tmp_path / "table_9.csv"
    table.write_text(
        "method,sst2,sst2_sd,overall,overall_sd,worst25\nfedit,91.76,2.35,78.06,2.04,64.44\nfedsee_l1,92.54,1.39,82.65,.35,\n",
        encoding="utf-8",
    )
    targets = reports.load_targets(table)
    assert targets["columns"] == ["sst2", "overall", "worst25"]
    assert targets["rows"][0]["values"]["overall"] == {"mean": 78.06, "sd": 2.04}
    target = reports.write_report([experiment_dir], tmp_path / "r.html", targets=targets)
    page = Page(target.read_text(encoding="utf-8"))
    rows = next(t for t in page.tables if any("published" in text for text, _ in t[0]))
    assert [text for text, _ in rows[0]][:4] == ["method", "value", "overall, ours", "published"]
    fedsee = load_experiment(experiment_dir)["runs"][:2]
    ours = 50 * sum(run["test"]["overall"] for run in fedsee)
    assert rows[2][2][0].startswith(f"{ours:.1f}") and rows[2][3][0] == "82.65± 0.35"
    assert rows[2][5][0] == "–"  # no published worst-25 in this row


@pytest.mark.usefixtures("no_pictures")
def test_a_published_sweep_gives_the_column_of_this_heterogeneity(
    experiment_dir: Path, tmp_path: Path
) -> None:
    table = tmp_path / "sweep.csv"
    table.write_text(
        "method,kind,alpha_0,alpha_0.1,uniform\nfedsee_l1,accuracy,76.46,74.95,69.97\n"
        "fedit,paired_difference,-15.47,-6.40,.10\n",
        encoding="utf-8",
    )
    target = reports.write_report([experiment_dir], tmp_path / "r.html", targets=reports.load_targets(table))
    page = Page(target.read_text(encoding="utf-8"))
    rows = next(t for t in page.tables if any("published" in text for text, _ in t[0]))
    assert [text for text, _ in rows[0]] == ["method", "value", "alpha_0.1, ours", "published"]
    assert rows[2][3][0] == "−6.40" and rows[2][2][0].startswith("−")


def test_mixtures_written_out_have_no_level_of_heterogeneity() -> None:
    targets = {"columns": ["alpha_0", "alpha_0.1", "uniform"]}
    assert reports._level(targets, {"partition": "dirichlet", "alpha": 0.1}) == "alpha_0.1"
    assert reports._level(targets, {"partition": "pure", "alpha": 0.1}) == "alpha_0"
    for alpha in (0.1, 50, None):  # alpha stays in the configuration, whatever the partition
        assert reports._level(targets, {"partition": "given", "alpha": alpha}) is None


def test_a_table_without_methods_is_no_table_of_targets(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("row,value\na,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no column 'method'"):
        reports.load_targets(path)


def test_figures_are_written_beside_the_page_when_asked(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path / "x", ("fedit",), (42,), clients=3, n_tasks=2, rounds=2)
    reports.write_report([folder], tmp_path / "r.html", figures_dir=tmp_path / "plots")
    assert (tmp_path / "plots" / "learning_curves.svg").is_file()
    assert (tmp_path / "plots" / "client_accuracies.png").is_file()


def test_spreads_in_print() -> None:
    one = {"mean": 0.8214, "sd": None, "n": 1, "values": [0.8214]}
    many = {"mean": -0.0123, "sd": 0.0046, "n": 3, "values": []}
    assert reports.format_spread(one) == "82.1"
    assert reports.format_spread(many, signed=True) == "−1.2 ± 0.5"
    assert reports.format_spread({**one, "mean": -0.0001}, signed=True) == "0.0"
    assert reports.format_spread(None) == "–"


def test_summaries_are_ready_for_json(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    assert json.loads(json.dumps(experiment)) == experiment


@pytest.mark.usefixtures("no_pictures")
def test_the_page_shows_a_dispersion_once_per_federation(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path / "x", ("fedsee", "fedit"), (42, 43), rounds=2)
    for run in folder.glob("*/seed-*"):
        summary = json.loads((run / "summary.json").read_text())
        summary["covariance_dispersion"] = {
            "rho": None if summary["seed"] == 43 else 12.34, "relative_gap": 0.125, "gap": 71.25,
            "floor": 0.000015, "top": 74.7, "effective_rank": 11.1, "dimension": 385, "span": 382,
            "rows": {"sst2": 1700, "wnli": 1234},
        }  # fmt: skip
        synthetic.write_json(run / "summary.json", summary)
        synthetic.write_json(run / "model.json", {"backbone": "minilm", "features": "rff"})
    target = reports.write_report([folder], tmp_path / "r.html")
    page = Page(target.read_text(encoding="utf-8"))
    rows = next(t for t in page.tables if any(text == "ρ" for text, _ in t[0]))
    rest = ["0.125", "71.2", "1.5e-05", "74.7", "11.1", "382", "1,234"]
    assert [[text for text, _ in row] for row in rows[1:]] == [
        ["42", "rff", "12.3", *rest],
        ["43", "rff", "∞", *rest],
    ]
    assert "diameter of the task optima" in page.text


def test_a_page_without_a_probe_says_nothing_of_dispersion(html: str) -> None:
    assert "dispersion" not in html


@pytest.mark.usefixtures("no_pictures")
def test_the_page_says_which_hull_was_taken_for_every_task(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path / "x", ("fedsee", "fedit"), (42, 43), rounds=2)
    taken = {
        42: {"sst2": "convex", "qnli": "affine 10", "cola": "posterior 100, 0.1"},
        43: {"sst2": "affine 1", "qnli": "convex"},  # two experts for three tasks
    }
    for seed, words in taken.items():
        run = folder / "fedsee" / f"seed-{seed}"
        summary = json.loads((run / "summary.json").read_text())
        synthetic.write_json(run / "summary.json", {**summary, "hull": words})
    page = Page(reports.write_report([folder], tmp_path / "r.html").read_text(encoding="utf-8"))
    rows = next(t for t in page.tables if any(text.startswith("posterior") for row in t for text, _ in row))
    assert [[text for text, _ in row] for row in rows] == [
        ["method", "seed", "sst2", "qnli", "cola"],
        ["fedsee", "42", "convex", "affine 10", "posterior 100, 0.1"],
        ["fedsee", "43", "affine 1", "convex", "–"],
    ]
    assert "hulls" in page.ids and "#hulls" in page.addresses


def test_a_page_of_convex_experts_says_nothing_of_hulls(html: str) -> None:
    assert "Where the experts lie" not in html
