"""Figures from run directories: what a run wrote is all that is read, nothing is trained or evaluated.

Each figure takes an experiment as `reports.load_experiment` returns it and gives a matplotlib figure, or
None when its data are not there (a method without mixtures, a run stopped before its first evaluation).
`draw_all` saves every figure that exists as PNG and SVG. Figures are 8 inches wide: 800 pixels at 100 dpi.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedprism.evaluation import metrics
from fedprism.storage import RunDirectory

Array = NDArray[np.float64]
Experiment = Mapping[str, Any]

WIDTH = 8.0  # inches
PNG_DPI = 200  # dots per inch; twice the nominal 100, for dense screens
# Okabe and Ito's colours without yellow (too pale on white), and two of Paul Tol's: safe for colour-blind
# eyes.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933", "#444444")
MARKERS = "os^DvPX*<>"
INK, FAINT = "#222222", "#9a9a9a"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.grid": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "fedprism",
    "svg.fonttype": "path",
}


def method_colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour per label; FedSEE is always blue, so figures of different runs agree. Repeats after nine."""
    ordered = sorted(labels, key=lambda label: label.split(" ")[0] != "fedsee")
    return {label: PALETTE[k % len(PALETTE)] for k, label in enumerate(ordered)}


def _colours(experiment: Experiment) -> dict[str, str]:
    """Colours of all labels of an experiment, the same in every figure of it."""
    runs = [*experiment["runs"], *experiment.get("incomplete", [])]
    return method_colours(list(metrics.group_runs(runs)))


def tasks_of(run: Mapping[str, Any]) -> list[str]:
    """Task names in expert order, from the federation's description or else from the per-task table."""
    tasks = (run.get("federation") or {}).get("tasks")
    return list(tasks or (run.get("test") or {}).get("per_task", {}))


def _dark(colour: str) -> Any:
    """A darker shade of a colour, for text: the pale colours of the palette are lines, not letters."""
    return tuple(0.72 * channel for channel in to_rgb(colour))


def _figure(height: float) -> Figure:
    """A figure of the common width that lays itself out. height: inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions nearest to the wanted ones, in the same order, at least `gap` apart, inside low..high if it
    fits.

    Pools neighbours that collide into blocks centred on the mean of what their members want.
    """
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    blocks: list[tuple[list[int], float]] = []  # members bottom up, position of the lowest

    def place(members: list[int]) -> float:
        start = sum(wanted[k] - gap * position for position, k in enumerate(members)) / len(members)
        return max(min(start, high - gap * (len(members) - 1)), low)

    for k in order:
        members = [k]
        while blocks and blocks[-1][1] + gap * len(blocks[-1][0]) > place(members):
            members = blocks.pop()[0] + members
        blocks.append((members, place(members)))
    result = [0.0] * len(wanted)
    for members, start in blocks:
        for position, k in enumerate(members):
            result[k] = start + gap * position
    return result


def _curves(experiment: Experiment, by_examples: bool) -> dict[str, tuple[Array, Array]]:
    """Validation curves: label -> (x (R,), accuracies (seeds, R) as fractions); x in rounds or examples."""
    complete = metrics.group_runs(experiment["runs"])
    stopped = metrics.group_runs(experiment.get("incomplete", []))
    result = {}
    for label in [*complete, *(label for label in stopped if label not in complete)]:
        name, seeds = (
            (label, complete[label]) if label in complete else (f"{label} (incomplete)", stopped[label])
        )
        curves: list[dict[int, tuple[float, float]]] = []
        for run in seeds:
            curve, examples, counted = {}, 0.0, False
            for line in RunDirectory(Path(run["dir"])).read_metrics() if run.get("dir") else []:
                asked = [
                    phase["examples"]
                    for phase in (line.get("phases") or {}).values()
                    if phase.get("examples")
                ]
                examples, counted = examples + sum(asked), counted or bool(asked)
                found = (line.get("evaluation") or {}).get("validation")
                if found and found.get("accuracy") and (counted or not by_examples):
                    x = examples if by_examples else line["round"] + 1
                    curve[int(line["round"])] = (float(x), metrics.overall(found["accuracy"]))
            if curve:
                curves.append(curve)
        shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if shared:
            points = np.array([[curve[t] for t in shared] for curve in curves])  # (seeds, R, 2)
            result[name] = (points[:, :, 0].mean(0), points[:, :, 1])
    return result


def learning_curves(experiment: Experiment, by_examples: bool = False) -> Figure | None:
    """Validation accuracy (mean over clients) per round and method; band = mean +- sd over seeds.

    by_examples: x counts the examples trained on, clients and server together, instead of rounds.
    """
    curves = _curves(experiment, by_examples)
    if not curves or (by_examples and all(len(x) < 2 for x, _ in curves.values())):
        return None
    colours = _colours(experiment)
    ordered = list(colours)
    figure = _figure(3.9 + 0.12 * max(0, len(curves) - 5))
    ax = figure.add_subplot()
    last = max(float(x[-1]) for x, _ in curves.values())
    ends, tops = [], []
    for name, (x, values) in curves.items():
        label = name.removesuffix(" (incomplete)")
        colour, marker = colours[label], MARKERS[ordered.index(label) % len(MARKERS)]
        mean = 100 * values.mean(0)
        dash: Any = "--" if name.endswith("(incomplete)") else "-"
        if len(x) > 1:
            ax.plot(x, mean, dash, color=colour, lw=1.8, marker=marker, ms=4, zorder=3)
        else:  # a method that is evaluated once has a level, not a curve
            ax.plot([0, last], [mean[0], mean[0]], ":", color=colour, lw=1.6, zorder=2)
        if len(values) > 1 and len(x) > 1:
            sd = 100 * values.std(0, ddof=1)
            ax.fill_between(
                x,
                mean - sd,
                mean + sd,
                color=colour,
                alpha=0.13 if len(curves) <= 5 else 0.06,
                lw=0,
                zorder=1,
            )
        ends.append(float(mean[-1]))
        tops.append((float(x[-1]) if len(x) > 1 else last, colour, name))
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    # Text of 8.5 points needs about 0.15 inches of height; the axes are roughly 0.75 inches less than the
    # figure.
    gap = (high - low) * 0.155 / (figure.get_size_inches()[1] - 0.75)
    places = _spread_labels(ends, gap, low, high)
    for place, end, (x_end, colour, name) in zip(places, ends, tops, strict=True):
        leader = "-" if x_end > 0.95 * last else (0, (1, 3))  # a long leader must not look like a curve
        ax.annotate(
            f"{name}  {end:.1f}",
            (x_end, end),
            (1.02, (place - low) / (high - low)),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=_dark(colour),
            fontweight="bold",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.7,
                "ls": leader,
                "shrinkA": 2,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )
    if by_examples:
        ax.set_xlabel("examples trained on so far, clients and server together (thousands)")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
        ax.set_xlim(0, last * 1.02)
    else:
        ax.set_xlabel("rounds completed")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlim(min(1, last) - 0.02 * last if last > 1 else 0, last * 1.02)
    ax.set_ylabel("validation accuracy, mean over clients (%)")
    ax.grid(axis="y")
    return figure


def client_accuracies(experiment: Experiment, reference: str | None = None) -> Figure | None:
    """Test accuracy of every client, one panel per method, clients in the same order in all panels.

    The order is by the reference's accuracy, lowest first; its values are the grey steps in every panel, so a
    dot below the grey line is a client that this method serves worse. Several seeds are pooled. A method
    whose clients are not the reference's (another federation) is sorted by itself, without a grey line.
    """
    groups = {
        label: {(run["seed"], run.get("fingerprint")): run for run in runs if run.get("test")}
        for label, runs in metrics.group_runs(experiment["runs"]).items()
    }
    groups = {label: runs for label, runs in groups.items() if runs}
    if not groups:
        return None
    first = reference if reference in groups else metrics.reference_label(experiment["runs"])
    first = first if first in groups else next(iter(groups))
    base = groups[first]
    colours = _colours(experiment)
    labels = [first, *(label for label in groups if label != first)]
    # A bold letter of 9.5 points is about 0.088 inches wide; a panel must hold the longest label.
    fitting = max(1, int(7.3 / (0.088 * max(len(label) for label in labels) + 0.1)))
    columns = min(len(labels), 5 if len(labels) > 8 else 4, fitting)
    lines = math.ceil(len(labels) / columns)
    figure = _figure(0.75 + 2.35 * lines)
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for ax, label in zip(axes.flat, labels, strict=False):
        keys = [key for key in groups[label] if key in base]
        own = {key: groups[label][key]["test"]["clients"] for key in keys or groups[label]}
        names = [client for key in own for client in range(len(own[key]))]
        values = 100 * np.concatenate([np.asarray(own[key], dtype=float) for key in own])
        compared = (
            np.concatenate([np.asarray(base[key]["test"]["clients"], float) for key in own]) if keys else None
        )
        order = np.argsort(values if compared is None else compared, kind="stable")
        x = np.arange(len(values))
        size = float(np.clip(420 / len(values), 4, 26))
        if compared is not None and label != first:
            ax.step(x, 100 * compared[order], where="mid", color=FAINT, lw=1.1, zorder=1)
        ax.scatter(x, values[order], s=size, color=colours[label], zorder=3, lw=0)
        mean = values.mean()
        ax.axhline(mean, color=colours[label], lw=0.9, ls=(0, (4, 3)), zorder=2)
        worse = (
            ""
            if compared is None or label == first
            else f", {int((values < 100 * compared - 1e-9).sum())} below"
        )
        ax.set_title(label, color=_dark(colours[label]), fontweight="bold", loc="left", pad=15)
        ax.text(0, 1.015, f"mean {mean:.1f} %{worse}", transform=ax.transAxes, va="bottom", fontsize=8)
        ax.grid(axis="y")
        if len(own) == 1 and len(values) <= 14:
            ax.set_xticks(x, [str(names[k]) for k in order], fontsize=8 if len(values) <= 10 else 7)
        else:
            ax.set_xticks([])
        ax.set_xlim(-0.8, len(values) - 0.2)
    for ax in axes.flat[len(labels) :]:
        ax.set_visible(False)
    n = len(next(iter(base.values()))["test"]["clients"])
    seeds = "" if len(base) == 1 else f" of {len(base)} seeds"
    what = "client number" if len(base) == 1 and n <= 14 else f"the {n} clients{seeds}"
    grey = f"; grey line: {first}" if len(labels) > 1 else ""
    figure.supxlabel(f"{what}, from lowest to highest accuracy of {first}{grey}", fontsize=9)
    figure.supylabel("test accuracy (%)", fontsize=9)
    return figure


def mixture_labels(experiment: Experiment) -> list[str]:
    """Labels of the methods that estimate the clients' mixtures."""
    return list(dict.fromkeys(metrics.label_of(run) for run in experiment["runs"] if run.get("mixture")))


def _mixture_runs(experiment: Experiment, label: str) -> list[Mapping[str, Any]]:
    return [run for run in experiment["runs"] if run.get("mixture") and metrics.label_of(run) == label]


def mixture_scatter(experiment: Experiment, label: str) -> Figure | None:
    """Estimated against true mixture shares, a dot per client and task (and seed), with the identity line."""
    runs = _mixture_runs(experiment, label)
    if not runs:
        return None
    tasks = tasks_of(runs[0])
    true = np.concatenate([np.asarray(run["mixture"]["partitioner"], dtype=float) for run in runs])
    guess = np.concatenate([np.asarray(run["mixture"]["estimated"], dtype=float) for run in runs])
    figure = _figure(4.6)
    ax, side = figure.subplots(1, 2, width_ratios=[4.6, 2.6])
    ax.plot([0, 100], [0, 100], color=FAINT, lw=1, zorder=1)
    ax.text(
        92,
        94,
        "exact",
        color="#6b6b6b",
        ha="right",
        va="bottom",
        rotation=45,
        rotation_mode="anchor",
        fontsize=8,
    )
    size = float(np.clip(2600 / true.size, 9, 34))
    for m in range(true.shape[1]):
        ax.scatter(
            100 * true[:, m],
            100 * guess[:, m],
            s=size,
            color=PALETTE[m % len(PALETTE)],
            alpha=0.8,
            lw=0,
            marker=MARKERS[m % len(MARKERS)],
            label=tasks[m] if m < len(tasks) else f"task {m}",
            zorder=3,
            clip_on=False,
        )
    mean = {
        name: np.mean([run["mixture"][name] for run in runs])
        for name in ("mae", "best_feasible_mae")
        if all(run["mixture"].get(name) is not None for run in runs)
    }
    lines = [f"mean absolute error: {100 * mean['mae']:.1f} points"] if "mae" in mean else []
    if "best_feasible_mae" in mean:
        lines.append(f"best feasible error: {100 * mean['best_feasible_mae']:.1f} points")
    slopes = [run["mixture"].get("slope") for run in runs]
    if all(slope is not None for slope in slopes):
        lines.append(f"slope of the fit: {np.mean(slopes):.2f} (exact: 1)")
    if len(runs) > 1:
        lines.append(f"{len(runs)} seeds together")
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal")
    ax.set_xlabel("true share of the task in the client's data (%)")
    ax.set_ylabel(f"share estimated by {label} (%)")
    ax.grid()
    side.axis("off")
    side.legend(
        *ax.get_legend_handles_labels(),
        loc="upper left",
        frameon=False,
        title="task",
        alignment="left",
        borderaxespad=0,
        handletextpad=0.2,
    )
    side.text(0, 0, "\n".join(lines), transform=side.transAxes, fontsize=9, va="bottom", linespacing=1.6)
    return figure


def mixture_heatmaps(experiment: Experiment, label: str) -> Figure | None:
    """True and estimated mixtures side by side, clients as rows and tasks as columns (the first seed).

    Clients are ordered by their largest true task and its share, so that equal clients stand together.
    """
    runs = _mixture_runs(experiment, label)
    if not runs:
        return None
    run = runs[0]
    true, guess = (100 * np.asarray(run["mixture"][key], dtype=float) for key in ("partitioner", "estimated"))
    tasks = tasks_of(run) or [f"task {m}" for m in range(true.shape[1])]
    order = sorted(range(len(true)), key=lambda i: (int(true[i].argmax()), -true[i].max()))
    numbers = len(true) <= 24 and true.shape[1] <= 9
    figure = _figure(1.1 + (0.21 if numbers else 0.11 if len(true) <= 60 else 0.06) * len(true))
    axes = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    for ax, values, title in zip(axes, (true, guess), ("true mixture", f"estimated by {label}"), strict=True):
        picture = ax.imshow(values[order], cmap="Blues", vmin=0, vmax=100, aspect="auto")
        ax.set_title(title, loc="left", fontweight="bold")
        _task_ticks(ax, tasks)
        if numbers:
            for row, i in enumerate(order):
                for m in range(true.shape[1]):
                    if values[i, m] >= 0.5:
                        ax.text(
                            m,
                            row,
                            f"{values[i, m]:.0f}",
                            ha="center",
                            va="center",
                            fontsize=7.5,
                            color="white" if values[i, m] > 55 else INK,
                        )
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)
    if len(true) <= 60:
        axes[0].set_yticks(range(len(true)), [str(i) for i in order], fontsize=8 if numbers else 6.5)
        axes[0].set_ylabel("client")
    else:
        axes[0].set_yticks([])
        axes[0].set_ylabel(f"{len(true)} clients, grouped by main task")
    bar = figure.colorbar(picture, ax=list(axes), shrink=0.7, pad=0.015, aspect=30)
    bar.set_label("share (%)")
    bar.outline.set_visible(False)
    return figure


def _task_ticks(ax: Any, tasks: Sequence[str], own: int | None = None) -> None:
    """Task names under a heat map, slanted when they are too many to stand; one of them may be bold."""
    tilted = len(tasks) > 4
    ax.set_xticks(
        range(len(tasks)),
        tasks,
        rotation=40 if tilted else 0,
        ha="right" if tilted else "center",
        rotation_mode="anchor" if tilted else "default",
        fontsize=8,
    )
    if own is not None and own < len(tasks):
        ax.get_xticklabels()[own].set_fontweight("bold")


def _mean_over_seeds(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[list[str], Array, int] | None:
    """(task names, mean of a matrix over the seeds with the same tasks, number of seeds), None without
    one."""
    having = [run for run in runs if run.get(key)]
    having = [run for run in having if tasks_of(run) == tasks_of(having[0])]
    if not having:
        return None
    return (
        tasks_of(having[0]),
        np.mean([np.asarray(run[key], dtype=float) for run in having], axis=0),
        len(having),
    )


def public_losses(experiment: Experiment, label: str) -> Figure | None:
    """Loss of every recovered expert on every task's public set, in nats; mean over seeds.

    Rows are experts, columns tasks. The smallest of a row carries a dot, the best expert of a task a frame;
    extraction works when both lie on the diagonal.
    """
    found = _mean_over_seeds(
        [run for run in experiment["runs"] if metrics.label_of(run) == label], "public_losses"
    )
    if found is None:
        return None
    tasks, losses, _ = found
    count = len(losses)
    tasks = tasks[:count]  # a method may have experts for the first tasks only
    figure = _figure(1.35 + 0.36 * count)
    ax = figure.add_subplot()
    low, high = float(losses.min()), float(losses.max())
    margin = max(high - low, 1e-3)  # colours stop short of the darkest, so that the numbers stay readable
    picture = ax.imshow(
        losses, cmap="Purples", aspect="auto", vmin=low - 0.15 * margin, vmax=high + 0.45 * margin
    )
    for k in range(count):
        for m in range(losses.shape[1]):
            smallest = losses[k, m] <= losses[k].min()
            best = losses[k, m] <= losses[:, m].min()
            ax.text(
                m,
                k,
                f"{losses[k, m]:.3f}" + (" ●" if smallest else ""),
                ha="center",
                va="center",
                fontsize=8.5,
                fontweight="bold" if smallest else "normal",
                color="white" if losses[k, m] > low + 0.75 * margin else INK,
            )
            if best:
                ax.add_patch(Rectangle((m - 0.46, k - 0.44), 0.92, 0.88, fill=False, ec="#D55E00", lw=1.8))
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(tasks)), tasks, fontsize=8.5)
    ax.set_yticks(range(len(tasks)), [f"expert {task}" for task in tasks])
    ax.set_xlabel(
        "● bold: smallest loss of this expert (row)      orange frame: best expert for this task (column)",
        fontsize=8.5,
        labelpad=8,
    )
    for side in ax.spines.values():
        side.set_visible(False)
    ax.tick_params(length=0)
    bar = figure.colorbar(picture, ax=ax, pad=0.015, aspect=24)
    bar.ax.set_ylim(low, max(high, low + 1e-9))
    bar.set_label("public loss (nats)")
    bar.outline.set_visible(False)
    return figure


def short_projections(names: Sequence[str]) -> list[str]:
    """Short row labels: what all names share is cut, a layer number comes first ("3 query").

    names: full module paths of the adapted projections.
    """
    parts = [re.split(r"[._]", name) for name in names]
    if len({len(part) for part in parts}) != 1:
        return [name[-18:] for name in names]
    varying = [k for k in range(len(parts[0])) if len({part[k] for part in parts}) > 1]
    return [" ".join(part[k] for k in varying) or name[-18:] for part, name in zip(parts, names, strict=True)]


def expert_usage(experiment: Experiment, label: str) -> Figure | None:
    """Mean usage of the experts per task and adapted projection, one panel per task; mean over seeds.

    Rows are projections from first layer to last, columns experts; a row sums to 100 %. The task's own expert
    is bold below its panel.
    """
    runs = [run for run in experiment["runs"] if metrics.label_of(run) == label]
    having = [run for run in runs if (run.get("usage") or {}).get("per_task")]
    having = [run for run in having if run["usage"]["experts"] == having[0]["usage"]["experts"]]
    if not having:
        return None
    experts, rows = list(having[0]["usage"]["experts"]), short_projections(having[0]["usage"]["projections"])
    tasks = [task for task in experts if all(task in run["usage"]["per_task"] for run in having)]
    if not tasks:
        return None
    columns = min(len(tasks), 3 if len(tasks) in (5, 6, 9) or len(experts) > 7 else 4)
    lines = math.ceil(len(tasks) / columns)
    panel = float(np.clip(0.17 * len(rows), 0.7, 3.2))
    figure = _figure(0.5 + lines * (panel + 0.75))
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    numbers = len(experts) * columns <= 16
    for ax, task in zip(axes.flat, tasks, strict=False):
        values = 100 * np.mean(
            [np.asarray(run["usage"]["per_task"][task], dtype=float) for run in having], axis=0
        )
        picture = ax.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        own = experts.index(task)
        ax.set_title(
            f"{task}: {values[:, own].mean():.0f} % on its own", loc="left", fontweight="bold", fontsize=8.5
        )
        _task_ticks(ax, experts, own)
        step = max(1, math.ceil(len(rows) / 24))
        ax.set_yticks(range(0, len(rows), step), rows[::step], fontsize=7)
        ax.add_patch(
            Rectangle((own - 0.5, -0.5), 1, len(rows), fill=False, ec="#D55E00", lw=1.3, clip_on=False)
        )
        if numbers and len(rows) <= 24:
            for row in range(len(rows)):
                for m in range(len(experts)):
                    ax.text(
                        m,
                        row,
                        f"{values[row, m]:.0f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if values[row, m] > 55 else INK,
                    )
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)
    for ax in axes.flat[len(tasks) :]:
        ax.set_visible(False)
    bar = figure.colorbar(picture, ax=axes, shrink=min(1.0, 0.5 + 0.2 * lines), pad=0.015, aspect=30)
    bar.set_label("usage (%)")
    bar.outline.set_visible(False)
    return figure


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def figures(experiment: Experiment) -> dict[str, Figure]:
    """Every figure that the experiment has data for, by file name without ending.

    "learning_curves", "learning_curves_examples", "client_accuracies"; for each method that has them also
    "mixture_scatter", "mixture_heatmaps", "public_losses" and "expert_usage", followed by "-" and the method
    where more than one method has them.
    """
    with matplotlib.rc_context(STYLE):
        result: dict[str, Figure | None] = {
            "learning_curves": learning_curves(experiment),
            "learning_curves_examples": learning_curves(experiment, by_examples=True),
            "client_accuracies": client_accuracies(experiment),
        }
        labels = list(metrics.group_runs(experiment["runs"]))
        for draw in (mixture_scatter, mixture_heatmaps, public_losses, expert_usage):
            drawn = {label: draw(experiment, label) for label in labels}
            drawn = {label: figure for label, figure in drawn.items() if figure is not None}
            for label, figure in drawn.items():
                result[draw.__name__ + (f"-{_slug(label)}" if len(drawn) > 1 else "")] = figure
    return {name: figure for name, figure in result.items() if figure is not None}


def save(figure: Figure, target: Any, kind: str) -> None:
    """Write a figure to a path or a binary file. kind: "png" or "svg". Equal figures give equal bytes."""
    with matplotlib.rc_context(STYLE):
        clean: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(target, format=kind, dpi=PNG_DPI, metadata=clean)


def draw_all(
    experiment: Experiment, out_dir: str | Path, drawn: Mapping[str, Figure] | None = None
) -> list[Path]:
    """Save every figure as PNG and SVG under out_dir (made if missing). Returns the paths written.

    drawn: what `figures` gave for this experiment, where it is there already."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (figures(experiment) if drawn is None else drawn).items():
        for kind in ("png", "svg"):
            written.append(folder / f"{name}.{kind}")
            save(figure, written[-1], kind)
    return written
