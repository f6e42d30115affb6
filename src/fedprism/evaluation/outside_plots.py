"""Figures of queries whose owner is hidden: system, average, routing accuracy (FedSPM spec 5).

*System* hides whose a query is: it is routed, or put to the vote of all clients. *Average* tells it, so that
the owner answers. *Routing* is the share of the queries that reach their owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedprism.evaluation import metrics, plots
from fedprism.storage import RunDirectory

MONITORS = {
    "J": "J on training rows (nats)",
    "J_validation": "J on validation rows (nats)",
    "purity": "purity of the components",
}


def outside_accuracies(experiment: Mapping[str, Any]) -> Figure | None:
    """System, average and routing accuracy of every method, a dot per seed and a bar for the mean; None where
    no run answered queries from outside."""
    groups = metrics.group_runs(run for run in experiment["runs"] if run.get("outside"))
    if not groups:
        return None
    figure = Figure(figsize=(plots.WIDTH, 1.2 + 0.28 * len(groups)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for ax, name in zip(panels, metrics.OUTSIDE, strict=True):
        for row, members in enumerate(groups.values()):
            values = [100 * run["outside"][name] for run in members if run["outside"].get(name) is not None]
            if values:
                colour = plots.PALETTE[0 if members[0]["outside"]["rule"] == "route" else 1]
                mean = float(np.mean(values))
                ax.plot([mean, mean], [row - 0.3, row + 0.3], color=colour, lw=2.4, zorder=3)
                ax.plot(values, [row] * len(values), "o", color=colour, ms=4, alpha=0.7, zorder=2)
                right = mean > 100 * 0.5
                ax.annotate(
                    f"{mean:.1f}", (min(values) if right else max(values), row),
                    (-7 if right else 7, 0), textcoords="offset points", va="center",
                    ha="right" if right else "left", fontsize=8,
                )  # fmt: skip
        ax.set_title(f"{name} accuracy (%)")
        ax.set_xlim(-3, 103)
        ax.grid(axis="x")
    panels[0].set_yticks(range(len(groups)), list(groups))
    panels[0].set_ylim(len(groups) - 0.4, -0.6)
    shown = {run["outside"]["rule"] for members in groups.values() for run in members}
    for k, (rule, words) in enumerate((("route", "a router chooses who answers"), ("vote", "clients vote"))):
        if rule in shown:
            panels[2].plot([], [], color=plots.PALETTE[k], lw=2.4, label=words)
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _logged(run: Mapping[str, Any], name: str) -> dict[int, float]:
    """Values of a number in the method's own log, by round."""
    lines = RunDirectory(Path(run["dir"])).read_metrics() if run.get("dir") else []
    return {line["round"] + 1: line["log"][name] for line in lines if name in (line.get("log") or {})}


def monitor_curves(experiment: Mapping[str, Any]) -> Figure | None:
    """J of EM per round and method, and the purity of the components where the data know them, with the share
    of the larger true component as a dotted line; mean over seeds. None where no method logs them."""
    groups = metrics.group_runs(experiment["runs"])
    curves: dict[str, dict[str, tuple[list[int], Any]]] = {}
    for name in (*MONITORS, "base_rate"):
        for label, members in groups.items():
            found = [curve for curve in (_logged(run, name) for run in members) if curve]
            shared = sorted(set.intersection(*(set(curve) for curve in found))) if found else []
            if len(shared) > 1:
                values = np.array([[curve[t] for t in shared] for curve in found])
                curves.setdefault(name, {})[label] = shared, values
    titles = [name for name in MONITORS if name in curves]
    if not titles:
        return None
    figure = Figure(figsize=(plots.WIDTH, 3.1), layout="constrained")
    colours = plots.method_colours(list(groups))
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(titles))), titles, strict=True):
        for label, (rounds, values) in curves[name].items():
            ax.plot(rounds, values.mean(0), color=colours[label], lw=1.8, label=label)
            if len(values) > 1:
                ax.fill_between(rounds, values.min(0), values.max(0), color=colours[label], alpha=0.15, lw=0)
        if name == "purity":
            for label, (rounds, values) in curves.get("base_rate", {}).items():
                ax.plot(rounds, values.mean(0), ":", color=colours[label], lw=1.4)
            ax.set_ylim(0, 1.03)
        ax.set_title(MONITORS[name])
        ax.set_xlabel("rounds completed")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ax.grid(axis="y")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    return figure


def figures(experiment: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure here that the experiment has data for, by file name without ending."""
    with matplotlib.rc_context(plots.STYLE):
        drawn = {draw.__name__: draw(experiment) for draw in (outside_accuracies, monitor_curves)}
    return {name: figure for name, figure in drawn.items() if figure is not None}
