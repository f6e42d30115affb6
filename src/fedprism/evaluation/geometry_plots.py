"""Figures and a table from runs of `fedsee_geometry`, beside the published values (FedSEE, Appendix B.2).

    python -c "from fedprism.evaluation.geometry_plots import *; save_geometry('runs/x', 'runs/x/plots')"

Reads run directories only; nothing is trained. Seeds are averaged where the paper averages them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedprism.evaluation import metrics
from fedprism.evaluation.plots import FAINT, INK, MARKERS, PALETTE, STYLE, WIDTH, save
from fedprism.storage import RunDirectory

Array = NDArray[np.float64]
Seeds = Mapping[int, Mapping[str, Any]]  # seed -> {"geometry", "routing", "calibration"}: the rounds' logs
Value = tuple[float, float | None]  # mean, sd over seeds or None

METHOD = "fedsee_geometry"
ROUNDS = {"geometry": 3, "routing": 4, "calibration": 5}
FITS = {
    "affine": "best affine fit",
    "hull": "best hull fit",
    "true": "true mixture",
    "uniform": "uniform mixture",
    "shuffled": "shuffled mixture",
}
KINDS = ("pure", "edge", "interior")
WEIGHTS = {"uniform": "fixed, uniform", "true": "fixed, true mixture", "learned": "learned router"}
# DistilRoBERTa, three seeds: (value, sd over seeds or None). Table 5; Figure 7; Table 6; Figure 8.
PUBLISHED: dict[str, Value] = {
    "residual affine": (0.444, 0.029), "residual hull": (0.444, 0.029), "residual true": (0.493, 0.023),
    "residual uniform": (0.579, 0.015), "residual shuffled": (0.650, 0.012),
    "coordinate_correlation": (0.814, 0.040), "coordinate_mae": (0.157, 0.017),
    "edge_absent_mass": (0.080, 0.021),
    "pure uniform": (0.672, None), "pure true": (0.487, None), "pure learned": (0.481, None),
    "edge uniform": (0.684, None), "edge true": (0.625, None), "edge learned": (0.497, None),
    "interior uniform": (0.691, None), "interior true": (0.679, None), "interior learned": (0.554, None),
    "mismatch uniform": (0.791, None), "mismatch mixture": (0.253, None),
    "pure_correct_mass uniform": (0.462, None), "pure_correct_mass mixture": (0.968, None),
    "edge_absent_mass uniform": (0.289, None), "edge_absent_mass mixture": (0.024, None),
    "cross_entropy uniform": (0.509, None), "cross_entropy mixture": (0.511, None),
}  # fmt: skip


# What each of them is, in the order of the table.
LABELS = {
    **{f"residual {fit}": f"residual, {label}" for fit, label in FITS.items()},
    "coordinate_correlation": "hull weights against mixture, correlation",
    "coordinate_mae": "hull weights against mixture, mean absolute error",
    "edge_absent_mass": "hull weight on the absent task, edge clients",
    **{f"{kind} {how}": f"cross-entropy, {kind} clients, {label}"
       for kind in KINDS for how, label in WEIGHTS.items()},
    **{f"{name} {target}": f"{label}, {target} target"
       for name, label in (
           ("mismatch", "usage mismatch, all clients"), ("cross_entropy", "cross-entropy, all clients"),
           ("pure_correct_mass", "usage of the right expert, pure clients"),
           ("edge_absent_mass", "usage of the absent expert, edge clients"))
       for target in ("uniform", "mixture")},
}  # fmt: skip
# Orders as the runs' logs name them -> in words; one that is not here is shown as it stands in the log.
ORDERS = {
    "true < uniform < shuffled": "residual: true < uniform < shuffled mixture",
    "hull - affine < .02": "residual: hull fit less than 0.02 above affine fit",
    "edge: learned <= true <= uniform": "cross-entropy, edge clients: learned ≤ true ≤ uniform",
    "interior: learned <= true <= uniform": "cross-entropy, interior clients: learned ≤ true ≤ uniform",
    "mixture target closer than uniform": "usage mismatch: mixture target < uniform target",
}


@dataclass(frozen=True)
class Row:
    """One line of the table. name: key of `PUBLISHED`. values: ours by seed, empty where the layout lacks the
    quantity. ours: their mean and sd, None without values. published: the paper's, None where it has none."""

    name: str
    label: str
    values: tuple[float, ...]
    ours: Value | None
    published: Value | None


def finished_seeds(directory: str | Path) -> dict[int, dict[str, Any]]:
    """Logs of the finished seeds of an experiment or of a single run, ascending: seed -> {"geometry",
    "routing", "calibration"}. Empty where there is none.

    directory: any path. A seed is finished when its summary is whole and the logs of its rounds are there."""
    root = Path(directory)
    folders = [root] if (root / "metrics.jsonl").is_file() else sorted(root.glob(f"{METHOD}/seed-*"))
    found = {}
    for folder in folders:
        run = RunDirectory(folder)
        try:
            summary = run.read_json("summary.json") if run.complete else {}
        except ValueError:  # cut short by an interruption
            summary = {}
        if summary.get("method") == METHOD:
            logs = {line["round"]: line.get("log") for line in run.read_metrics()}
            if all(logs.get(k) for k in ROUNDS.values()):
                found[int(summary["seed"])] = {part: logs[k] for part, k in ROUNDS.items()}
    return dict(sorted(found.items()))


def load_seeds(directory: str | Path) -> dict[int, dict[str, Any]]:
    """What `finished_seeds` gives. Raises FileNotFoundError where there is none."""
    found = finished_seeds(directory)
    if not found:
        raise FileNotFoundError(
            f"geometry: {directory} holds no finished run of {METHOD}; run it first, or: fedprism resume "
            f"{directory}"
        )
    return found


def measured(seeds: Seeds) -> dict[str, list[float]]:
    """Each published quantity, as a list of one number per seed; quantities that a layout lacks (absent mass
    without edge clients) are left out. Keys as in `PUBLISHED`."""
    rows = [_published_figures(seed) for seed in seeds.values()]
    return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}


def _published_figures(seed: Mapping[str, Any]) -> dict[str, float]:
    """One seed's numbers under the keys of `PUBLISHED`."""
    summary, means = seed["geometry"]["summary"], seed["routing"]["means"]
    values = {f"residual {fit}": summary["residual"][fit] for fit in FITS}
    values |= {
        name: summary[name] for name in ("coordinate_correlation", "coordinate_mae", "edge_absent_mass")
    }
    values |= {f"{kind} {how}": means[how].get(kind) for kind in KINDS for how in WEIGHTS}
    for target in ("uniform", "mixture"):
        found = seed["calibration"][target]
        values |= {f"{name} {target}": found[name]["all"] for name in ("mismatch", "cross_entropy")}
        values |= {f"{name} {target}": found[name] for name in ("pure_correct_mass", "edge_absent_mass")}
    return {name: float(value) for name, value in values.items() if value is not None}


def value_text(value: Value | None) -> str:
    """A value as "0.444 ± 0.029", without the sd where there is none; "–" for None."""
    if value is None:
        return "–"
    mean, sd = value
    return f"{mean:.3f}".replace("-", "−") + ("" if sd is None else f" ± {sd:.3f}")


def _spread(values: Sequence[float] | None) -> Value | None:
    if not values:
        return None
    found = metrics.spread(values)
    return found["mean"], found["sd"]


def _count(seeds: Seeds) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"


def table_rows(seeds: Seeds) -> list[Row]:
    """Each published quantity, ours beside the paper's: Table 5, Figure 7, Table 6, Figure 8, in this order.

    seeds: at least one, as `load_seeds` gives them. Ours: mean and sample sd over the seeds."""
    ours = measured(seeds)
    return [
        Row(name, label, tuple(ours.get(name, ())), _spread(ours.get(name)), PUBLISHED.get(name))
        for name, label in LABELS.items()
    ]


def orders(seeds: Seeds) -> dict[str, dict[int, bool]]:
    """Which seed kept which order that the paper reports: order in words -> seed -> whether it holds. Orders
    that a layout lacks (edge clients' without such clients) are left out."""
    held: dict[str, dict[int, bool]] = {}
    for seed, logs in seeds.items():
        for log in logs.values():
            for claim, holds in log["holds"].items():
                held.setdefault(ORDERS.get(claim, claim), {})[seed] = bool(holds)
    return held


def geometry_table(directory: str | Path) -> str:
    """Markdown table: each published quantity, ours as mean ± sd over seeds, and the published value; then
    how many seeds kept each order that the paper reports. Raises FileNotFoundError like `load_seeds`."""
    seeds = load_seeds(directory)
    lines = [f"| quantity | ours ({_count(seeds)}) | published |", "| --- | ---: | ---: |"]
    lines += [
        f"| {row.label} | {value_text(row.ours)} | {value_text(row.published)} |" for row in table_rows(seeds)
    ]
    lines += ["", "| order | seeds that keep it |", "| --- | ---: |"]
    lines += [f"| {claim} | {sum(kept.values())} of {len(kept)} |" for claim, kept in orders(seeds).items()]
    return "\n".join(lines) + "\n"


def _mean(seeds: Seeds, key: str) -> Array:
    values: Array = np.array([seed["geometry"][key] for seed in seeds.values()], dtype=float).mean(0)
    return values


def plane(seeds: Seeds) -> Figure | None:
    """Experts' plane of every measured block, one panel each, mean over seeds: triangle of the experts,
    projections of the clients (markers), and where their mixtures would put them (crosses). None unless there
    are three experts (Figure 6)."""
    first = next(iter(seeds.values()))["geometry"]
    tasks, kinds, layers = first["tasks"], first["kinds"], first["layers"]
    if len(tasks) != 3:
        return None
    experts, clients, wanted = (_mean(seeds, f"{what}_points") for what in ("expert", "client", "mixture"))
    points = np.concatenate([experts, clients, wanted], 1).reshape(-1, 2)
    limits = [(float(p.min()) - 0.17, float(p.max()) + 0.17) for p in points.T]
    columns = min(3, len(layers))
    lines = -(-len(layers) // columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 2.35 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for ax, layer, corner, found, implied in zip(axes.flat, layers, experts, clients, wanted, strict=False):
        ax.fill(*corner.T, facecolor="#f4f4f4", edgecolor=FAINT, lw=1, zorder=1)
        middle = corner.mean(0)
        for task, point in zip(tasks, corner, strict=True):
            away = point + 0.13 * (point - middle) / max(float(np.linalg.norm(point - middle)), 1e-9)
            ax.text(*away, task, ha="center", va="center", fontsize=8, fontweight="bold")
        for here, there in zip(found, implied, strict=True):
            ax.plot(*np.stack([here, there]).T, color=FAINT, lw=0.7, zorder=2)
        for k, kind in enumerate(KINDS):
            mine = [i for i, one in enumerate(kinds) if one == kind]
            ax.scatter(*found[mine].T, s=30, color=PALETTE[k], marker=MARKERS[k], lw=0, label=kind, zorder=4)
        ax.scatter(*implied.T, s=26, color=INK, marker="x", lw=1, label="implied by the mixture", zorder=3)
        ax.set_title(layer.replace(".", " "), loc="left")
        ax.set(xticks=[], yticks=[], xlim=limits[0], ylim=limits[1], aspect="equal")
        for side in ax.spines.values():
            side.set_visible(False)
    for ax in axes.flat[len(layers) :]:
        ax.set_visible(False)
    entries = axes.flat[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _bars(ax: Any, x: Array, values: Sequence[Value], width: float, **style: Any) -> None:
    spread = [sd or 0.0 for _, sd in values]
    ax.bar(x, [mean for mean, _ in values], width, yerr=spread if any(spread) else None, zorder=2,
           error_kw={"elinewidth": 1, "capsize": 2, "ecolor": INK}, **style)  # fmt: skip


def residual_bars(seeds: Seeds) -> Figure:
    """Normalised residuals of the five fits, ours beside the published ones, with sd over seeds (Table 5)."""
    ours = measured(seeds)
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    ax = figure.add_subplot()
    x = np.arange(len(FITS), dtype=float)
    both = ([_spread(ours[f"residual {fit}"]) or (0.0, None) for fit in FITS],
            [PUBLISHED[f"residual {fit}"] for fit in FITS])  # fmt: skip
    for shift, values, colour, label in (
        (-0.2, both[0], PALETTE[0], f"fedprism, {_count(seeds)}"), (0.2, both[1], "#c9c9c9", "published"),
    ):  # fmt: skip
        _bars(ax, x + shift, values, 0.38, color=colour, label=label)
        for at, (mean, sd) in zip(x + shift, values, strict=True):
            ax.annotate(f"{mean:.2f}", (at, mean + (sd or 0)), (0, 3), textcoords="offset points",
                        ha="center", fontsize=8)  # fmt: skip
    ax.set_xticks(x, list(FITS.values()))
    ax.set_ylabel("residual over the largest\ndistance between experts")
    ax.grid(axis="y")
    ax.margins(y=0.12)
    ax.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def coordinates(seeds: Seeds) -> Figure:
    """Hull weights against true shares, a dot per client, task, layer and seed, with means (Figure 7)."""
    first = next(iter(seeds.values()))["geometry"]
    tasks, ours = first["tasks"], measured(seeds)
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    ax, side = figure.subplots(1, 2, width_ratios=[4.6, 2.6])
    ax.plot([0, 1], [0, 1], color=FAINT, lw=1, ls="--", zorder=1)
    shares = np.array([seed["geometry"]["mixtures"] for seed in seeds.values()])  # (seeds, N, M)
    weights = np.array([seed["geometry"]["weights"] for seed in seeds.values()])  # (seeds, L, N, M)
    for m, task in enumerate(tasks):
        alpha, found = shares[..., m], weights[..., m]
        x = np.broadcast_to(alpha[:, None], found.shape)
        offset = 0.016 * (m - (len(tasks) - 1) / 2)  # tasks of equal share side by side
        ax.scatter(x + offset, found, s=9, color=PALETTE[m % len(PALETTE)], alpha=0.35, lw=0, label=task)
        for share in np.unique(alpha.round(2)):
            at = x.round(2) == share
            ax.scatter(x[at].mean() + offset, found[at].mean(), s=60, marker="_", lw=2.5,
                       color=PALETTE[m % len(PALETTE)], zorder=4)  # fmt: skip
    ax.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal")
    ax.set_xlabel("true share of the task in the client's data")
    ax.set_ylabel("weight of the nearest point of the experts' hull")
    ax.grid()
    side.axis("off")
    legend = side.legend(*ax.get_legend_handles_labels(), loc="upper left", frameon=False, title="task",
                         alignment="left", borderaxespad=0)  # fmt: skip
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)
    names = {"coordinate_correlation": "correlation", "coordinate_mae": "mean absolute error",
             "edge_absent_mass": "weight on the absent task\nof edge clients"}  # fmt: skip
    lines = [f"{label}:\n  {value_text(_spread(ours.get(name)))}  (published {value_text(PUBLISHED[name])})"
             for name, label in names.items()]  # fmt: skip
    lines.append("dashes: means")
    side.text(0, 0, "\n".join(lines), transform=side.transAxes, fontsize=8.5, va="bottom", linespacing=1.5)
    return figure


def routing(seeds: Seeds) -> Figure:
    """Left: validation cross-entropy by kind of client under fixed and learned weights (Table 6). Right:
    mismatch of mean usage and mixture after training with either KL target (Figure 8). Diamonds: paper."""
    ours = measured(seeds)
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    present = [kind for kind in KINDS if f"{kind} true" in ours]
    x = np.arange(len(present), dtype=float)
    for k, (how, label) in enumerate(WEIGHTS.items()):
        at = x + 0.27 * (k - 1)
        values = [_spread(ours[f"{kind} {how}"]) or (0.0, None) for kind in present]
        _bars(left, at, values, 0.25, color=PALETTE[k], label=label)
        published = [PUBLISHED[f"{kind} {how}"][0] for kind in present]
        left.scatter(at, published, marker="D", s=22, color="white", edgecolor=INK, zorder=4,
                     label="published" if k == len(WEIGHTS) - 1 else None)  # fmt: skip
    left.set_xticks(x, [f"{kind} clients" for kind in present])
    left.set_ylabel("validation cross-entropy (nats)")
    groups = [*present, "all"]
    x = np.arange(len(groups), dtype=float)
    for k, target in enumerate(("uniform", "mixture")):
        values = [_spread([seed["calibration"][target]["mismatch"][group] for seed in seeds.values()])
                  or (0.0, None) for group in groups]  # fmt: skip
        _bars(right, x + 0.38 * (k - 0.5), values, 0.36, color=PALETTE[k], label=f"{target} target")
        right.scatter(x[-1] + 0.38 * (k - 0.5), PUBLISHED[f"mismatch {target}"][0], marker="D", s=22,
                      color="white", edgecolor=INK, zorder=4, label="published" if k else None)  # fmt: skip
    right.set_xticks(x, groups)
    right.set_ylabel("mean usage against mixture,\nsum of absolute differences")
    for ax in (left, right):
        ax.grid(axis="y")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
        ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2, columnspacing=1)
    return figure


def figures(seeds: Seeds) -> dict[str, Figure]:
    """All figures by file name without ending: "geometry_plane" (three tasks only), "geometry_residuals",
    "geometry_coordinates", "geometry_routing". seeds: at least one, as `load_seeds` gives them."""
    with matplotlib.rc_context(STYLE):
        drawn = {"plane": plane(seeds), "residuals": residual_bars(seeds), "coordinates": coordinates(seeds),
                 "routing": routing(seeds)}  # fmt: skip
    return {f"geometry_{name}": figure for name, figure in drawn.items() if figure is not None}


def save_geometry(directory: str | Path, out: str | Path) -> list[Path]:
    """Draw all `figures` of an experiment's finished seeds as PNG and SVG under `out` (made if missing).

    directory: an experiment or a run of `fedsee_geometry`. Returns the paths written. Raises
    FileNotFoundError where no seed is finished."""
    drawn = figures(load_seeds(directory))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            written.append(folder / f"{name}.{kind}")
            save(figure, written[-1], kind)
    return written
