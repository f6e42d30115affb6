"""Figures exist for every size of experiment, say what the files say, and put no two labels on one spot."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from tests.evaluation import synthetic

from fedprism.evaluation import plots
from fedprism.evaluation.reports import load_experiment

NINE = (
    "fedsee",
    "fedit",
    "local_only",
    "centralized",
    "public_only",
    "fedavg_ft",
    "scaffold",
    "untrained",
    "ditto",
)
EVERY = {
    "learning_curves", "learning_curves_examples", "client_accuracies", "mixture_scatter", "mixture_heatmaps",
    "public_losses", "expert_usage",
}  # fmt: skip


def laid_out(figure: Figure) -> Figure:
    with matplotlib.rc_context(plots.STYLE):
        figure.draw_without_rendering()
    return figure


def test_figures_are_saved_as_png_and_svg(experiment_dir: Path, tmp_path: Path) -> None:
    written = plots.draw_all(load_experiment(experiment_dir), tmp_path / "plots")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in EVERY for kind in ("png", "svg")}
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_equal_runs_give_equal_pictures(experiment_dir: Path, tmp_path: Path) -> None:
    experiment = load_experiment(experiment_dir)
    files = []
    for name in ("a", "b"):
        drawn = {"learning_curves": plots.figures(experiment)["learning_curves"]}
        files.append([path.read_bytes() for path in plots.draw_all(experiment, tmp_path / name, drawn)])
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("methods", "seeds", "clients", "n_tasks", "layers"),
    [
        (("fedsee",), (42,), 3, 2, 6),
        (NINE, (42, 43), 12, 6, 6),
        (("fedsee", "local_only"), (42,), 100, 9, 24),
    ],
)
def test_figures_cope_with_small_and_large_experiments(
    tmp_path: Path, methods: tuple[str, ...], seeds: tuple[int, ...], clients: int, n_tasks: int, layers: int
) -> None:
    folder = synthetic.write_experiment(
        tmp_path, methods, seeds, clients=clients, n_tasks=n_tasks, layers=layers, rounds=3
    )
    drawn = plots.figures(load_experiment(folder))
    assert drawn.keys() == EVERY
    assert all(laid_out(figure).get_size_inches()[0] == plots.WIDTH for figure in drawn.values())


def test_labels_of_learning_curves_never_overlap(tmp_path: Path) -> None:
    folder = synthetic.write_experiment(tmp_path, NINE, (42,), clients=6, n_tasks=2, rounds=3)
    figure = laid_out(plots.figures(load_experiment(folder))["learning_curves"])
    labels = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    assert {label.get_text().split()[0] for label in labels} == set(NINE)
    boxes = sorted((Text.get_window_extent(label) for label in labels), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 2 for low, high in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_learning_curve_is_the_mean_over_clients_and_seeds(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    runs = [run for run in experiment["runs"] if run["method"] == "fedsee"]
    last = 100 * np.mean([np.mean(run["validation"]["clients"]) for run in runs])
    line = plots.figures(experiment)["learning_curves"].axes[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert line.get_ydata()[-1] == pytest.approx(last)


def test_client_panels_share_the_order_of_the_reference(experiment_dir: Path) -> None:
    experiment = load_experiment(experiment_dir)
    first, second = plots.figures(experiment)["client_accuracies"].axes[:2]
    by_method = {
        method: 100
        * np.concatenate([r["test"]["clients"] for r in experiment["runs"] if r["method"] == method])
        for method in ("fedsee", "fedit")
    }
    order = np.argsort(by_method["fedsee"], kind="stable")
    for ax, method in ((first, "fedsee"), (second, "fedit")):
        np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], by_method[method][order])


def test_labels_spread_around_what_they_want() -> None:
    assert plots._spread_labels([0, 10], 1, -5, 15) == [0, 10]
    assert plots._spread_labels([5, 5], 2, 0, 10) == [4, 6]
    assert plots._spread_labels([0, 0, 0.5], 1, 0, 10) == [0, 1, 2]
    assert plots._spread_labels([10, 9.9], 1, 0, 10) == [10, 9]
    assert plots._spread_labels([5, 6.5, 5], 1, 0, 10) == [4.5, 6.5, 5.5]


def test_projection_names_keep_what_differs() -> None:
    names = ["encoder.layer.0.attention.self.query", "encoder.layer.11.attention.self.value"]
    assert plots.short_projections(names) == ["0 query", "11 value"]
    assert plots.short_projections(["features"]) == ["features"]
    assert plots.short_projections(["a.b", "c"]) == ["a.b", "c"]


def test_a_method_keeps_its_colour_in_all_figures_of_an_experiment() -> None:
    assert plots.method_colours(["fedit", "fedsee"])["fedsee"] == plots.PALETTE[0]
    assert len(set(plots.method_colours(NINE).values())) == 9
