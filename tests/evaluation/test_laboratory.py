"""A laboratory's tables and figures show the numbers they are given, and mark what fails."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from rich.console import Console

from fedprism.evaluation import laboratory
from fedprism.evaluation.laboratory import ESTIMATES

matplotlib.use("agg")


def row(setting: str, ok: bool = True, **more: Any) -> dict[str, Any]:
    numbers = {"published": 0.8, "expected": None, "ours": 0.81234, "sd": 0.0312, "tolerance": "±8 %"}
    return {"setting": setting, **numbers, "ok": ok, **more}


def check(name: str, ok: bool, value: float = 1.5) -> dict[str, Any]:
    return {"id": name, "title": f"claim of {name}", "value": value, "bound": 3.0, "ratio": value / 3,
            "ok": ok, "note": ""}  # fmt: skip


def cell(pool: str, n_i: int, n_m: int, holds: bool = True, **means: float) -> dict[str, Any]:
    level = {name: (k + 1) / n_m for k, name in enumerate(ESTIMATES)}
    return {"pool": pool, "n_i": n_i, "n_m": n_m, "means": {**level, **means}, "best_rival": "convex",
            "excess": -0.01, "excess_standard_error": 0.002, "holds": holds}  # fmt: skip


CURVE = {"x": [1.0, 2.0, 4.0], "ours": [3.0, 2.0, 0.5], "sd": [0.2, 0.1, 1.0], "published": [3.1, None, 0.4]}
POINTS = {
    "method": ["supervised", "SPA", "supervised"], "anchors": [True, True, False], "set": [0.3, 0.4, 3.5],
    "identity": [0.3, 5.0, 3.7], "published_set": [0.29, None, 3.7], "published_identity": [0.29, None, 3.8],
}  # fmt: skip
SIZES = dict.fromkeys(("without_anchors", "with_anchors", "clients"), CURVE)
RESULT: dict[str, Any] = {
    "checks": [check("B1", True), check("B2", False, 4.5)],
    "tables": [
        {"id": "T1", "title": "first", "ok": False, "rows": [
            row("n = 1"), row("n = 2", ok=False), row("n = 3", tolerance="shown", ours=123.456)]},
    ],
    "beyond": [cell("interior", 500, n) for n in (8, 50)],
    "curves": {
        "recovery_against_impurity": {"exact": CURVE, "n_1000": CURVE, "n_16000": CURVE,
                                      "bound": {"x": [0.0, 0.4], "ours": [0.0, 4.8]}},
        "identity_against_set_error": POINTS,
        "nonidentifiability_against_size": SIZES,
        "uniform_routing_cost": {**CURVE, "expected": [3.0, 2.0, 1.0]},
    },
}  # fmt: skip


def printed(result: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    for table in laboratory.rich_tables(result):
        console.print(table)
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


# ---- tables --------------------------------------------------------------------------------------


def test_printed_tables_hold_every_number_and_its_verdict() -> None:
    lines = printed(RESULT)
    found = {line.split()[0]: line.split() for line in lines if line[:2] in ("B1", "B2", "T1")}
    assert found["B1"] == ["B1", "claim", "of", "B1", "1.5", "3", "0.500", "holds"]
    assert found["B2"] == ["B2", "claim", "of", "B2", "4.5", "3", "1.500", "FAILS"]
    assert found["T1"] == ["T1", "first"]
    rows = [line.split() for line in lines if line.lstrip().startswith("n = ")]
    assert rows[0] == ["n", "=", "1", "0.8000", "0.8123", "0.0312", "±8", "%", "holds"]
    assert rows[1][-1] == "FAILS"
    assert rows[2] == ["n", "=", "3", "0.8000", "123.5", "0.0312", "shown", "shown"]
    beyond = [line.split() for line in lines if line.startswith("interior")]
    assert beyond[0] == ["interior", "500", "8", "0.125", "0.250", "0.375", "0.500", "0.625", "yes"]


def test_a_row_that_is_only_shown_never_counts_as_failed() -> None:
    shown = {
        **RESULT,
        "tables": [{"id": "T1", "title": "t", "rows": [row("a", ok=False, tolerance="shown")]}],
    }
    (line,) = [line for line in printed(shown) if line.lstrip().startswith("a ")]
    assert line.split()[-1] == "shown"
    assert "fails" not in laboratory.markdown(shown).split("\n\n")[1]


def test_markdown_tables_are_well_formed_and_mark_failures() -> None:
    text = laboratory.markdown(RESULT)
    bounds, tables = (part.splitlines() for part in text.strip().split("\n\n"))
    for part in (bounds, tables):
        assert len({line.count("|") for line in part}) == 1
    assert bounds[2] == "| B1 | claim of B1 | 1.5 | 3 | 0.500 | holds |"
    assert bounds[3] == "| B2 | claim of B2 | 4.5 | 3 | 1.500 | **fails** |"
    assert tables[2] == "| **T1** | **first** | | | | | | |"
    assert tables[3] == "| | n = 1 | 0.8000 |  | 0.8123 | 0.0312 | ±8 % | holds |"
    assert tables[4].endswith("| **fails** |")
    assert tables[5].endswith("| shown |  |")


def test_the_markdown_of_recovery_without_anchors_marks_the_best_and_the_worse() -> None:
    cells = [cell("interior", 500, 8, affine=0.01), cell("pure", 500, 8, holds=False)]
    lines = laboratory.beyond_markdown(cells).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == (
        "| interior | 500 | 8 | 0.125 | **0.010** | 0.375 | 0.500 | 0.625 | convex | -0.010 ± 0.002 |"
    )
    assert lines[3].endswith(
        "| **0.125** | 0.250 | 0.375 | 0.500 | 0.625 | convex | -0.010 ± 0.002 (worse) |"
    )


# ---- figures -------------------------------------------------------------------------------------


def lines_of(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def test_the_impurity_figure_has_the_bound_ours_and_only_the_published_points_there_are() -> None:
    (ax,) = laboratory.impurity_figure(RESULT["curves"]["recovery_against_impurity"]).axes
    drawn = lines_of(ax)
    assert drawn["bound √κ ε D"] == ([0.0, 0.4], [0.0, 4.8])
    assert drawn["exact uploads"] == (CURVE["x"], CURVE["ours"])
    hidden = [v for k, v in drawn.items() if k.startswith("_")]
    assert ([1.0, 4.0], [3.1, 0.4]) in hidden
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.0, 3.2))  # one sd, not below zero: 0.5 - 1 -> 0


def test_the_identity_figure_has_a_point_per_method_filled_with_anchors() -> None:
    (ax,) = laboratory.identity_figure(POINTS).axes
    drawn = lines_of(ax)
    assert drawn["SPA, anchors"] == ([0.4], [5.0])
    assert drawn["supervised, no anchors"] == ([3.5], [3.7])
    faces = {str(line.get_label()): line.get_markerfacecolor() for line in ax.lines}
    assert faces["supervised, no anchors"] == "white" != faces["supervised, anchors"]
    crosses = [line for line in ax.lines if line.get_marker() == "+" and len(line.get_xdata())]
    assert sorted(float(line.get_ydata()[0]) for line in crosses) == [0.29, 3.8]


def test_the_other_curves_show_what_they_are_given() -> None:
    left, right = laboratory.size_figure(RESULT["curves"]["nonidentifiability_against_size"]).axes
    assert left.get_xscale() == "log"
    assert lines_of(left)["pure anchors"] == (CURVE["x"], CURVE["ours"])
    assert lines_of(right)["no anchors, 4 000 samples per client"] == (CURVE["x"], CURVE["ours"])
    (ax,) = laboratory.routing_figure(RESULT["curves"]["uniform_routing_cost"]).axes
    assert lines_of(ax)["q τ²"] == (CURVE["x"], [3.0, 2.0, 1.0])


def test_recovery_without_anchors_has_a_panel_per_pool_and_client_size_sorted_by_public_size() -> None:
    cells = [
        cell(pool, n_i, n_m) for n_m in (50, 8) for pool in ("interior", "pure") for n_i in (20_000, 500)
    ]
    cells[0]["means"]["posterior"] = 0.007
    figure = laboratory.beyond_figure(cells)
    assert figure is not None
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [f"{p}; {n} samples per client" for p in ("interior", "pure") for n in ("500", "20000")]
    assert lines_of(figure.axes[1])["posterior"] == ([8, 50], [4 / 8, 0.007])
    for ax in figure.axes:
        assert len(ax.lines) == len(ESTIMATES)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


@pytest.mark.parametrize(
    "cells", [[], [cell("a", 500, 8)], [cell("a", 500, 8), cell("a", 500, 50), cell("b", 500, 8)]]
)
def test_a_panel_of_a_single_point_is_not_drawn(cells: list[dict[str, Any]]) -> None:
    assert laboratory.beyond_figure(cells) is None


def runs(rounds: list[int], *each: tuple[list[float], list[float]]) -> list[dict[str, Any]]:
    return [{"rounds": rounds, "J": J, "routing": routing} for J, routing in each]


GROUND = {
    "bayes": {"J": 1.05, "routing": 0.765},
    "settings": {
        "one": {
            "name": "C = 1",
            "runs": runs(
                [0, 5, 10], ([3.0, 1.2, 1.1], [0.2, 0.7, 0.74]), ([3.0, 1.4, 1.3], [0.2, 0.6, 0.72])
            ),
        },
        "published": {
            "name": "slow",
            "runs": runs([0, 20], ([3.0, 1.2], [0.2, 0.7]), ([3.0, 2.2], [0.2, 0.8])),
        },
    },
}
SERIES = {"rounds": [1, 2], "gradient": [0.4, 0.1], "delta": [0.0, 1e-4], "epsilon": [1e-5, 0.0]}
BRIDGE = {"rates": {rate: dict.fromkeys(("0", "0.95"), SERIES) for rate in ("0.01", "0.05")}}


def test_the_ground_truth_figure_has_means_and_ranges_without_the_start_and_the_truth() -> None:
    left, right = laboratory.ground_truth_figure(GROUND).axes
    drawn = lines_of(left)
    assert drawn["C = 1"] == ([5, 10], pytest.approx([1.3, 1.2]))
    assert drawn["the truth"][1] == [1.05, 1.05]
    assert drawn["slow, each seed"] == ([20], [1.2])
    assert (
        sum(label.endswith("slow, each seed") for label in drawn) == 2
    )  # the second has no place in the legend
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1.1, 1.4))
    assert lines_of(right)["C = 1"][1] == pytest.approx([0.65, 0.73])


def test_the_bridge_figure_has_a_row_per_rate_and_a_line_per_momentum() -> None:
    axes = laboratory.bridge_figure(BRIDGE).axes
    assert [ax.get_title() for ax in axes[:3]] == [
        "running mean of |grad F|², rate 0.01", "sum of δ over √t, rate 0.01", "running mean of ε, rate 0.01"
    ]  # fmt: skip
    assert len(axes) == 6 and axes[3].get_title().endswith("rate 0.05")
    assert lines_of(axes[4]) == {"μ = 0": ([1, 2], [0.0, 1e-4]), "μ = 0.95": ([1, 2], [0.0, 1e-4])}
    assert [ax.get_yscale() for ax in axes[:3]] == ["log", "linear", "linear"]


def test_the_feasible_figure_marks_every_round_and_names_the_share() -> None:
    curve = {
        "rounds": [1, 11, 21, 31],
        "feasible": {"shifted": [False, True, True, True], "raw": [False] * 4},
    }
    (ax,) = laboratory.feasible_figure(curve).axes
    assert [text.get_text() for text in ax.texts] == ["75%", "0%"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["shifted", "raw"]
    marks = [(line.get_marker(), list(line.get_xdata()), set(line.get_ydata())) for line in ax.lines]
    assert ("o", [11, 21, 31], {0}) in marks and ("x", [1], {0}) in marks
    assert ("x", [1, 11, 21, 31], {1}) in marks


def test_a_laboratory_without_a_last_part_has_two_tables_and_its_own_figures(tmp_path: Path) -> None:
    other = {
        "checks": RESULT["checks"],
        "tables": RESULT["tables"],
        "curves": {"bridge_errors_by_momentum": BRIDGE},
    }
    lines = printed(other)
    assert lines[0].startswith("Checks: ratio at most 1")
    assert printed(RESULT)[0].startswith("Bounds: ")
    assert not any(line.startswith("Beyond") for line in lines)
    made = laboratory.save_figures(other, tmp_path)
    assert [path.name for path in made] == [f"bridge_errors_by_momentum.{kind}" for kind in ("png", "svg")]


def test_small_numbers_are_not_printed_as_nothing() -> None:
    one = {"id": "T1", "title": "t", "rows": [row("a", ours=1.8e-11, sd=0.0, expected=0.0)]}
    (line,) = [line for line in printed({**RESULT, "tables": [one]}) if line.lstrip().startswith("a ")]
    assert line.split()[1:5] == ["0.8000", "0.0000", "1.8e-11", "0.0000"]


def test_figures_are_saved_twice_each_and_repeat_to_the_byte(tmp_path: Path) -> None:
    curves = {"uniform_routing_cost": RESULT["curves"]["uniform_routing_cost"]}
    made = laboratory.save_figures({"curves": curves, "beyond": RESULT["beyond"]}, tmp_path / "a" / "b")
    names = ("uniform_routing_cost", "recovery_without_anchors")
    assert [path.name for path in made] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert all(path.stat().st_size > 5000 for path in made)
    again = laboratory.save_figures({"curves": curves, "beyond": []}, tmp_path)
    assert [path.name for path in again] == ["uniform_routing_cost.png", "uniform_routing_cost.svg"]
    for path in again:
        assert path.read_bytes() == (tmp_path / "a" / "b" / path.name).read_bytes()
