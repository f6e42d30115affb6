"""System, average and routing accuracy in tables, reports and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedprism.evaluation import metrics, outside_plots, reports

# method -> seed -> (rule, system, average, routing)
ANSWERS = {
    "fedavg": {1: ("vote", 0.50, 0.50, None), 2: ("vote", 0.60, 0.60, None)},
    "fedspm": {1: ("route", 0.70, 0.72, 0.90), 2: ("route", 0.76, 0.80, 0.94)},
}


def runs() -> list[dict[str, Any]]:
    """Runs of two methods and two seeds on one task."""
    made = []
    for method, seeds in ANSWERS.items():
        for seed, (rule, system, average, routing) in seeds.items():
            outside = {"rule": rule, "system": system, "average": average, "n": 100}
            if routing is not None:
                outside["routing"] = routing
            test = {"overall": average, "worst_50": average, "worst_25": average, "clients": [average]}
            test["per_task"] = {"images": average}
            made.append(
                {"method": method, "seed": seed, "fingerprint": f"f{seed}", "complete": True, "test": test,
                 "outside": outside}
            )  # fmt: skip
    return made


def summary() -> dict[str, Any]:
    return {"name": "clothes", "runs": runs()}


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as caught:
        console.print(table)
    return caught.get()


def test_spreads_and_paired_differences_are_those_worked_by_hand() -> None:
    entries = {entry["label"]: entry["outside"] for entry in metrics.summarise_runs(runs())}
    assert entries["fedavg"]["rule"] == "vote"
    assert entries["fedavg"]["routing"] is None
    assert entries["fedspm"]["system"]["mean"] == pytest.approx(0.73)
    assert entries["fedspm"]["system"]["sd"] == pytest.approx(0.06 / 2**0.5)
    assert entries["fedspm"]["routing"]["mean"] == pytest.approx(0.92)
    (paired,) = metrics.paired_summary(runs(), "fedavg")
    assert paired["outside"]["system"]["values"] == pytest.approx([0.20, 0.16])
    assert paired["outside"]["average"]["mean"] == pytest.approx(0.21)


def test_runs_without_outside_queries_have_no_such_table() -> None:
    plain = [{key: value for key, value in run.items() if key != "outside"} for run in runs()]
    assert [entry["outside"] for entry in metrics.summarise_runs(plain)] == [None, None]
    assert reports.outside_table({"name": "text", "runs": plain}) is None
    assert "images" in printed(reports.summary_table({"name": "text", "runs": plain}))
    assert "hidden" not in reports.markdown_table({"name": "text", "runs": plain})


def test_the_terminal_and_markdown_show_the_numbers_and_mark_the_best() -> None:
    shown = printed(reports.outside_table(summary(), "fedavg"))
    for text in ("73.0", "±4.2", "92.0", "+18.0", "+21.0", "router", "vote"):
        assert text in shown, text
    assert "images" not in printed(reports.summary_table(summary()))  # its numbers stand under "average"
    row = next(line for line in reports.markdown_table(summary(), "fedavg").splitlines() if "router" in line)
    assert row == (
        "| `fedspm` | router | **73.0 ± 4.2** | **76.0 ± 5.7** | 92.0 ± 2.8 | +18.0 ± 2.8 | +21.0 ± 1.4 |"
    )


def test_the_page_has_the_table_and_the_figures(tmp_path: Path) -> None:
    for run in runs():
        folder = tmp_path / run["method"] / f"seed-{run['seed']}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(run), encoding="utf-8")
    page = reports.write_report([tmp_path], tmp_path / "report.html", reference="fedavg")
    html = page.read_text(encoding="utf-8")
    assert "Queries whose owner is hidden" in html
    assert "On queries whose owner is hidden fedspm is right on 73.0 ± 4.2 %, by routing them" in html
    assert "System, average and routing accuracy per method" in html


def test_the_monitor_is_drawn_from_the_rounds_that_logged_it(tmp_path: Path) -> None:
    lines = [
        {"round": t, "log": {"J": 3.0 - t, "purity": 0.7 + 0.1 * t, "base_rate": 0.65}} for t in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = {**runs()[2], "dir": str(tmp_path)}
    figure = outside_plots.monitor_curves({"runs": [run]})
    assert figure is not None
    left, right = figure.axes
    assert left.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert left.lines[0].get_ydata().tolist() == [3.0, 2.0, 1.0]
    assert right.lines[1].get_ydata().tolist() == [0.65] * 3  # what guessing gives
    assert outside_plots.monitor_curves({"runs": [{**run, "dir": None}]}) is None


def test_dots_and_bars_stand_at_the_seeds_and_their_mean() -> None:
    figure = outside_plots.outside_accuracies({"runs": runs()})
    assert figure is not None
    system, _, routing = figure.axes
    bars = [line.get_xdata()[0] for line in system.lines if line.get_linewidth() > 2]
    assert bars == pytest.approx([55.0, 73.0])
    dots = [line.get_xdata() for line in routing.lines if line.get_marker() == "o"]
    assert [list(map(float, dot)) for dot in dots] == [[90.0, 94.0]]
