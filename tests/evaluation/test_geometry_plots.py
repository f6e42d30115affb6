"""The geometry's numbers, tables and figures, from invented logs whose means can be worked out by hand."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import collect
from matplotlib.figure import Figure
from tests.evaluation import synthetic
from tests.evaluation.test_reports import Page

from fedprism.evaluation import geometry_plots, plots, reports

# Every quantity of a seed is a base value plus the seed's shift. The shifts 0, .02, .1 have the mean .04 and
# the sample sd sqrt((.04^2 + .02^2 + .06^2) / 2) = sqrt(.0028) = .0529.
SHIFTS = {42: 0.0, 43: 0.02, 44: 0.1}
MEANS = {
    "residual, best affine fit": 0.44, "residual, best hull fit": 0.45, "residual, true mixture": 0.54,
    "residual, uniform mixture": 0.64, "residual, shuffled mixture": 0.74,
    "hull weights against mixture, correlation": 0.14,
    "hull weights against mixture, mean absolute error": 0.19,
    "hull weight on the absent task, edge clients": 0.12,
    "cross-entropy, pure clients, fixed, uniform": 0.95,
    "cross-entropy, pure clients, fixed, true mixture": 0.85,
    "cross-entropy, pure clients, learned router": 0.75,
    "cross-entropy, edge clients, fixed, uniform": 0.96,
    "cross-entropy, edge clients, fixed, true mixture": 0.86,
    "cross-entropy, edge clients, learned router": 0.76,
    "cross-entropy, interior clients, fixed, uniform": 0.97,
    "cross-entropy, interior clients, fixed, true mixture": 0.87,
    "cross-entropy, interior clients, learned router": 0.77,
    "usage mismatch, all clients, uniform target": 0.79,
    "usage mismatch, all clients, mixture target": 0.29,
    "cross-entropy, all clients, uniform target": 0.59,
    "cross-entropy, all clients, mixture target": 0.60,
    "usage of the right expert, pure clients, uniform target": 0.49,
    "usage of the right expert, pure clients, mixture target": 0.89,
    "usage of the absent expert, edge clients, uniform target": 0.33,
    "usage of the absent expert, edge clients, mixture target": 0.06,
}  # fmt: skip
EDGE = {label for label in MEANS if "edge clients" in label}
FIGURES = {"geometry_plane", "geometry_residuals", "geometry_coordinates", "geometry_routing"}


@pytest.fixture(scope="module")
def geometry_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished seeds; seed 44 broke the order of the residuals."""
    logs = {seed: synthetic.geometry_logs(shift, kept=seed != 44) for seed, shift in SHIFTS.items()}
    return synthetic.write_geometry(tmp_path_factory.mktemp("geometry") / "triangle", logs)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty figures in the place of all: drawing them is slow and has its own tests."""
    monkeypatch.setattr(plots, "figures", lambda experiment: {})
    monkeypatch.setattr(
        geometry_plots, "figures", lambda seeds: {name: Figure(figsize=(0.2, 0.2)) for name in FIGURES}
    )


def logs_of_one_seed(**choices: Any) -> dict[int, dict[str, dict[str, Any]]]:
    return {42: synthetic.geometry_logs(0.0, **choices)}


def texts(page: Page, first: str) -> list[list[str]]:
    """Cells of the table whose first title is this."""
    table = next(t for t in page.tables if t[0][0][0] == first)
    return [[text for text, _ in row] for row in table]


def page_of(folder: Path, out: Path, *others: Path) -> Page:
    return Page(reports.write_report([*others, folder], out / "r.html").read_text(encoding="utf-8"))


def test_rows_are_means_and_sample_deviations_over_seeds(geometry_dir: Path) -> None:
    rows = geometry_plots.table_rows(geometry_plots.load_seeds(geometry_dir))
    assert [row.label for row in rows] == list(MEANS)
    for row in rows:
        assert row.ours == pytest.approx((MEANS[row.label], 0.0028**0.5)), row.label
        assert row.values == pytest.approx([MEANS[row.label] - 0.04 + shift for shift in SHIFTS.values()])
    published = {row.label: row.published for row in rows}
    assert published["residual, true mixture"] == (0.493, 0.023)
    assert published["usage of the absent expert, edge clients, mixture target"] == (0.024, None)


def test_orders_say_which_seed_kept_them(geometry_dir: Path) -> None:
    everywhere = dict.fromkeys(SHIFTS, True)
    assert geometry_plots.orders(geometry_plots.load_seeds(geometry_dir)) == {
        "residual: true < uniform < shuffled mixture": {42: True, 43: True, 44: False},
        "residual: hull fit less than 0.02 above affine fit": everywhere,
        "cross-entropy, edge clients: learned ≤ true ≤ uniform": everywhere,
        "cross-entropy, interior clients: learned ≤ true ≤ uniform": everywhere,
        "usage mismatch: mixture target < uniform target": everywhere,
    }


def test_an_order_without_words_is_shown_as_the_log_has_it() -> None:
    logs = logs_of_one_seed()
    logs[42]["routing"]["holds"] = {"something new": False}
    assert geometry_plots.orders(logs)["something new"] == {42: False}


def test_the_markdown_table_has_a_line_per_quantity_and_per_order(geometry_dir: Path) -> None:
    lines = geometry_plots.geometry_table(geometry_dir).splitlines()
    assert lines[0] == "| quantity | ours (3 seeds) | published |"
    assert "| residual, best hull fit | 0.450 ± 0.053 | 0.444 ± 0.029 |" in lines
    assert "| usage mismatch, all clients, mixture target | 0.290 ± 0.053 | 0.253 |" in lines
    assert "| residual: true < uniform < shuffled mixture | 2 of 3 |" in lines
    assert "| usage mismatch: mixture target < uniform target | 3 of 3 |" in lines
    assert len(lines) == 2 + 25 + 1 + 2 + 5


def test_without_edge_clients_their_rows_have_no_value_of_ours_and_their_order_is_absent() -> None:
    seeds = logs_of_one_seed(edge=False)
    for row in geometry_plots.table_rows(seeds):
        assert (row.ours is None) == (row.label in EDGE), row.label
        assert row.published is not None
    assert not any("edge" in claim for claim in geometry_plots.orders(seeds))
    figure = geometry_plots.routing(seeds)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == [
        "pure clients", "interior clients",
    ]  # fmt: skip


def test_one_seed_has_no_deviation_and_a_negative_value_has_a_minus() -> None:
    logs = logs_of_one_seed()
    logs[42]["geometry"]["summary"]["coordinate_correlation"] = -0.25
    row = next(r for r in geometry_plots.table_rows(logs) if r.name == "coordinate_correlation")
    assert row.ours == (-0.25, None)
    assert geometry_plots.value_text(row.ours) == "−0.250"
    assert geometry_plots.value_text(None) == "–"


def test_bars_and_points_stand_at_the_means(geometry_dir: Path) -> None:
    seeds = geometry_plots.load_seeds(geometry_dir)
    bars = geometry_plots.residual_bars(seeds).axes[0].containers
    heights = [bar.get_height() for group in bars if hasattr(group, "patches") for bar in group.patches]
    assert heights == pytest.approx([0.44, 0.45, 0.54, 0.64, 0.74, 0.444, 0.444, 0.493, 0.579, 0.65])
    panel = geometry_plots.plane(seeds)
    assert panel is not None
    pure = next(c for c in panel.axes[1].collections if c.get_label() == "pure")
    np.testing.assert_allclose(pure.get_offsets(), [[0.04, 0.04], [1.04, 0.04], [0.54, 0.84]])


def test_two_tasks_have_no_triangle() -> None:
    logs = logs_of_one_seed()
    logs[42]["geometry"]["tasks"] = ["sst2", "qnli"]
    assert geometry_plots.plane(logs) is None


def test_every_figure_is_written_as_png_and_svg(geometry_dir: Path, tmp_path: Path) -> None:
    written = geometry_plots.save_geometry(geometry_dir / "fedsee_geometry" / "seed-43", tmp_path / "deep/er")
    assert {path.name for path in written} == {
        f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")
    }
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_only_finished_seeds_count(tmp_path: Path) -> None:
    logs = {seed: synthetic.geometry_logs(shift) for seed, shift in SHIFTS.items()}
    folder = synthetic.write_geometry(tmp_path / "x", logs)
    runs = folder / "fedsee_geometry"
    (runs / "seed-43" / "summary.json").unlink()
    torn = runs / "seed-44" / "summary.json"
    torn.write_text(torn.read_text(encoding="utf-8")[:80], encoding="utf-8")
    assert list(geometry_plots.load_seeds(folder)) == [42]
    (runs / "seed-42" / "metrics.jsonl").write_text("", encoding="utf-8")
    assert geometry_plots.finished_seeds(folder) == {}


def test_where_nothing_is_finished_the_error_says_what_to_do(experiment_dir: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    synthetic.write_run(
        stopped / "fedsee_geometry" / "seed-42", "fedsee_geometry", 42, clients=6, n_tasks=3, stop_after=4
    )
    for folder in (stopped, experiment_dir, experiment_dir / "fedit" / "seed-42", tmp_path / "nowhere"):
        assert geometry_plots.finished_seeds(folder) == {}
        with pytest.raises(FileNotFoundError, match=r"no finished run of fedsee_geometry; .*fedprism resume"):
            geometry_plots.geometry_table(folder)
    assert geometry_plots.finished_seeds(experiment_dir / "summary.json") == {}
    with pytest.raises(FileNotFoundError, match="no finished run"):
        geometry_plots.save_geometry(stopped, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


# ---- in the report -------------------------------------------------------------------------------


@pytest.mark.usefixtures("blank_pictures")
def test_a_report_of_geometry_alone_has_its_section_and_the_accuracies(
    geometry_dir: Path, tmp_path: Path
) -> None:
    target = reports.write_report([geometry_dir], tmp_path / "r.html", figures_dir=tmp_path / "plots")
    page = Page(target.read_text(encoding="utf-8"))
    assert "geometry" in page.ids and "#geometry" in page.addresses
    assert sum(address.startswith("data:") for address in page.addresses) == len(FIGURES)
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == FIGURES
    rows = texts(page, "quantity")
    assert rows[0] == ["quantity", "ours", "published"]
    assert [row[0] for row in rows[1:]] == list(MEANS)
    assert rows[1] == ["residual, best affine fit", "0.440± 0.053", "0.444± 0.029"]
    assert rows[-1] == ["usage of the absent expert, edge clients, mixture target", "0.060± 0.053", "0.024"]
    held = texts(page, "order")
    assert held[0] == ["order", "seed 42", "seed 43", "seed 44", "kept"]
    assert held[1] == ["residual: true < uniform < shuffled mixture", "yes", "yes", "no", "2 of 3"]
    results = texts(page, "method")
    assert results[1][0] == "fedsee_geometry" and results[1][-1] == "3"
    clients = [
        json.loads((geometry_dir / f"fedsee_geometry/seed-{seed}/summary.json").read_text())["test"][
            "clients"
        ]
        for seed in SHIFTS
    ]
    overall = 100 * sum(sum(one) / len(one) for one in clients) / 3
    assert float(results[1][1].split("±")[0]) == pytest.approx(overall, abs=0.0501)


@pytest.mark.usefixtures("blank_pictures")
def test_of_several_directories_the_first_with_geometry_is_shown(
    experiment_dir: Path, geometry_dir: Path, tmp_path: Path
) -> None:
    second = synthetic.write_geometry(tmp_path / "second", {42: synthetic.geometry_logs(0.5)})
    reported = reports.write_report([experiment_dir, geometry_dir, second], tmp_path / "r.html")
    page = Page(reported.read_text(encoding="utf-8"))
    assert texts(page, "quantity")[1][1] == "0.440± 0.053"
    assert str(geometry_dir) in page.text
    assert page.ids.count("geometry") == 1


@pytest.mark.usefixtures("blank_pictures")
def test_a_report_without_finished_geometry_has_no_such_section(
    experiment_dir: Path, geometry_dir: Path, tmp_path: Path
) -> None:
    folder = synthetic.write_geometry(tmp_path / "x", logs_of_one_seed())
    (folder / "fedsee_geometry" / "seed-42" / "summary.json").unlink()
    for source in (experiment_dir, folder):
        page = page_of(source, tmp_path)
        assert "geometry" not in page.ids and "#geometry" not in page.addresses
        assert not any(table[0][0][0] == "quantity" for table in page.tables)


# ---- as a committed result -----------------------------------------------------------------------


def test_a_collected_result_holds_the_geometry_by_seed(
    geometry_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["collect.py", str(geometry_dir)])
    assert collect.main() == 0
    kept = json.loads((tmp_path / "triangle.json").read_text(encoding="utf-8"))
    assert kept["geometry"]["seeds"] == [42, 43, 44]
    assert kept["geometry"]["measured"]["residual hull"] == pytest.approx([0.41, 0.43, 0.51])
    assert kept["geometry"]["measured"]["edge_absent_mass mixture"] == pytest.approx([0.02, 0.04, 0.12])
    assert len(kept["geometry"]["measured"]) == len(MEANS)
    assert kept["geometry"]["orders"]["residual: true < uniform < shuffled mixture"] == {
        "42": True, "43": True, "44": False,
    }  # fmt: skip
    assert kept["paired_differences"] == []
    printed = capsys.readouterr().out
    assert "| residual, best hull fit | 0.450 ± 0.053 | 0.444 ± 0.029 |" in printed
    assert "| `fedsee_geometry` |" in printed and "Difference" not in printed


def test_a_collected_result_without_geometry_has_no_entry_of_it(experiment_dir: Path) -> None:
    kept = collect.collect(experiment_dir, "fedsee")
    assert "geometry" not in kept
    assert [entry["label"] for entry in kept["paired_differences"]] == ["fedit", "local_only"]
