"""A laboratory's results as tables and figures: published, expected and measured values side by side.

Reads the JSON-ready dict that `api.lab_fedsee`, `api.lab_fedspm` and `api.lab_fedtar` return (and `--json`
writes); nothing is computed here but means for the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.table import Table
from rich.text import Text

from fedprism.evaluation.plots import FAINT, INK, MARKERS, PALETTE, STYLE, WIDTH, save

Result = Mapping[str, Any]
ESTIMATES = {
    "convex": "convex hull (the paper)",
    "affine": "affine span",
    "auto": "better of the two",
    "posterior": "posterior",
    "public only": "public set alone",
}


# ---- tables --------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if 0 < abs(value) < 5e-4:
        return f"{value:.1e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def _verdict(ok: bool, judged: bool = True) -> Text:
    if not judged:
        return Text("shown", style="dim")
    return Text("holds", style="green") if ok else Text("FAILS", style="bold red")


def _table(title: str, columns: Sequence[str], numeric: int) -> Table:
    """A table whose columns from number `numeric` on are right-aligned, but for the last, the verdict."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        right = numeric <= k < len(columns) - 1
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def rich_tables(result: Result) -> list[Table]:
    """For a terminal: the bounds or checks, the tables or studies, and the recovery without anchors where
    the laboratory has it."""
    bounds = _table(
        f"{'Bounds' if 'beyond' in result else 'Checks'}: ratio at most 1; measured / claimed, for floors "
        "claimed / measured",
        ("", "statement", "value", "bound", "ratio", ""),
        2,
    )
    for check in result["checks"]:
        bounds.add_row(
            check["id"], check["title"], f"{check['value']:.4g}", f"{check['bound']:.4g}",
            f"{check['ratio']:.3f}", _verdict(check["ok"]),
        )  # fmt: skip
    tables = _table(
        "Tables: mean over seeds", ("", "setting", "published", "expected", "ours", "sd", "tolerance", ""), 2
    )
    for table in result["tables"]:
        tables.add_row(table["id"], Text(table["title"], style="bold"), end_section=False)
        for row in table["rows"]:
            tables.add_row(
                "", row["setting"], _number(row["published"]), _number(row["expected"]),
                _number(row["ours"]), _number(row["sd"]), row["tolerance"],
                _verdict(row["ok"], row["tolerance"] != "shown"),
            )  # fmt: skip
    return [bounds, tables, *([_beyond_table(result["beyond"])] if "beyond" in result else [])]


def _beyond_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("pool", "n_i", "n_m", *ESTIMATES, "posterior no worse than the best of three")
    table = _table("Beyond the paper: largest error over tasks, without and with anchors", columns, 1)
    for cell in cells:
        best = min(cell["means"].values())
        numbers = [
            Text(f"{cell['means'][name]:.3f}", style="bold" if cell["means"][name] == best else "")
            for name in ESTIMATES
        ]
        table.add_row(
            cell["pool"], str(cell["n_i"]), str(cell["n_m"]), *numbers, "yes" if cell["holds"] else "no"
        )
    return table


def markdown(result: Result) -> str:
    """The bounds and the synthetic tables in Markdown."""
    lines = ["| | statement | value | bound | ratio | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for c in result["checks"]:
        verdict = "holds" if c["ok"] else "**fails**"
        cells = (c["id"], c["title"], f"{c['value']:.4g}", f"{c['bound']:.4g}", f"{c['ratio']:.3f}", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | setting | published | expected | ours | sd | tolerance | |",
              "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |"]  # fmt: skip
    for table in result["tables"]:
        lines.append(f"| **{table['id']}** | **{table['title']}** | | | | | | |")
        for row in table["rows"]:
            shown = row["tolerance"] == "shown"
            verdict = "" if shown else "holds" if row["ok"] else "**fails**"
            numbers = (_number(row[key]) for key in ("published", "expected", "ours", "sd"))
            lines.append(f"| | {row['setting']} | {' | '.join(numbers)} | {row['tolerance']} | {verdict} |")
    return "\n".join(lines) + "\n"


def beyond_markdown(cells: Sequence[Mapping[str, Any]]) -> str:
    """The recovery without anchors in Markdown; the best estimate of a line is bold."""
    lines = [
        f"| pool | n_i | n_m | {' | '.join(ESTIMATES)} | best of three | posterior's excess |",
        f"| --- | ---: | ---: |{' ---: |' * len(ESTIMATES)} --- | ---: |",
    ]
    for cell in cells:
        best = min(cell["means"].values())
        numbers = [
            f"**{value:.3f}**" if value == best else f"{value:.3f}"
            for value in (cell["means"][name] for name in ESTIMATES)
        ]
        excess = f"{cell['excess']:+.3f} ± {cell['excess_standard_error']:.3f}"
        excess += "" if cell["holds"] else " (worse)"
        row = (cell["pool"], str(cell["n_i"]), str(cell["n_m"]), *numbers, cell["best_rival"], excess)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


ERROR_TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)


# ---- figures -------------------------------------------------------------------------------------


def _curve(ax: Axes, series: Mapping[str, Any], k: int, label: str) -> None:
    """Ours as a line with one standard deviation, published as open markers of the same colour."""
    colour = PALETTE[k]
    low = [max(y - s, 0.0) for y, s in zip(series["ours"], series["sd"], strict=True)]
    high = [y + s for y, s in zip(series["ours"], series["sd"], strict=True)]
    ax.plot(series["x"], series["ours"], color=colour, marker=MARKERS[k], ms=4, lw=1.5, label=label)
    ax.fill_between(series["x"], low, high, color=colour, alpha=0.15, lw=0)
    pairs = [(x, y) for x, y in zip(series["x"], series["published"], strict=True) if y is not None]
    if pairs:
        ax.plot(*zip(*pairs, strict=True), ls="", marker=MARKERS[k], ms=8, mfc="none", mec=colour, mew=1.1)


def _finish(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(axis="y")
    ax.set_ylim(bottom=0)


def _new(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, k + 1) for k in range(columns)]
    return figure, axes


def impurity_figure(curve: Mapping[str, Any]) -> Figure:
    """Recovery error against the anchors' impurity, with the bound."""
    figure, (ax,) = _new(3.6)
    names = {
        "exact": "exact uploads",
        "n_16000": "16 000 samples per client",
        "n_1000": "1 000 samples per client",
    }
    bound = curve["bound"]
    ax.plot(bound["x"], bound["ours"], color=FAINT, ls="--", lw=1.3, label="bound √κ ε D")
    for k, (name, label) in enumerate(names.items()):
        _curve(ax, curve[name], k, label)
    _finish(ax, "impurity ε of the anchors", "recovery error (Frobenius, worst task)")
    ax.plot([], [], ls="", marker="o", ms=8, mfc="none", mec=INK, label="published")
    ax.legend(frameon=False, fontsize=8.5)
    return figure


def identity_figure(curve: Mapping[str, Any]) -> Figure:
    """Task-identity against vertex-set error: who names the experts right."""
    figure, (ax,) = _new(3.9)
    top = 1.08 * max(*curve["identity"], *curve["set"])
    ax.plot([0, top], [0, top], color=FAINT, lw=1)
    ax.text(top * 0.86, top * 0.9, "named right", color=FAINT, fontsize=8.5, rotation=33, ha="center")
    methods = list(dict.fromkeys(curve["method"]))
    for method, anchors, x, y, px, py in zip(
        *(
            curve[key]
            for key in ("method", "anchors", "set", "identity", "published_set", "published_identity")
        ),
        strict=True,
    ):
        k = methods.index(method)
        label = f"{method}, {'anchors' if anchors else 'no anchors'}"
        face = PALETTE[k] if anchors else "white"
        ax.plot(x, y, ls="", marker=MARKERS[k], ms=7, mfc=face, mec=PALETTE[k], mew=1.4, label=label)
        if px is not None:
            ax.plot(px, py, ls="", marker="+", ms=11, mec=INK, mew=0.9)
    ax.plot([], [], ls="", marker="+", ms=11, mec=INK, label="published")
    _finish(ax, "vertex-set error (labels ignored)", "task-identity error (labels kept)")
    ax.set_xlim(0, top)
    ax.legend(frameon=False, fontsize=8.5, loc="lower right")
    return figure


def size_figure(curve: Mapping[str, Any]) -> Figure:
    """Recovery error against samples and against clients: without anchors neither helps."""
    figure, (left, right) = _new(3.3, 2)
    _curve(left, curve["without_anchors"], 1, "no anchors, every client uniform")
    _curve(left, curve["with_anchors"], 0, "pure anchors")
    left.set_xscale("log")
    _finish(left, "samples per client", "recovery error (Frobenius, worst task)")
    left.legend(frameon=False, fontsize=8.5, loc="center")
    _curve(right, curve["clients"], 1, "no anchors, 4 000 samples per client")
    _finish(right, "clients", "")
    right.legend(frameon=False, fontsize=8.5, loc="center")
    return figure


def routing_figure(curve: Mapping[str, Any]) -> Figure:
    """Excess risk of uniform routing for a client at distance tau from the uniform mixture."""
    figure, (ax,) = _new(3.3)
    ax.plot(curve["x"], curve["expected"], color=FAINT, ls="--", lw=1.3, label="q τ²")
    _curve(ax, curve, 0, "uniform router, ours")
    ax.plot(
        [], [], ls="", marker=MARKERS[0], ms=8, mfc="none", mec=PALETTE[0], label="published (another draw)"
    )
    _finish(ax, "distance τ of the client from the uniform mixture", "excess risk")
    ax.legend(frameon=False, fontsize=8.5)
    return figure


def beyond_figure(cells: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Error of every estimate against the public set's size, a panel per pool and client size; None where
    a panel has fewer than two public sizes."""
    pools = list(dict.fromkeys(cell["pool"] for cell in cells))
    sizes = sorted({cell["n_i"] for cell in cells})
    panels = Counter((cell["pool"], cell["n_i"]) for cell in cells)
    if min((panels[pool, n_i] for pool in pools for n_i in sizes), default=0) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 1.75 * len(pools)), layout="constrained")
    axes = figure.subplots(len(pools), len(sizes), sharex=True, sharey=True, squeeze=False)
    for row, pool in zip(axes, pools, strict=True):
        for ax, n_i in zip(row, sizes, strict=True):
            mine = sorted((c for c in cells if c["pool"] == pool and c["n_i"] == n_i), key=lambda c: c["n_m"])
            x = [cell["n_m"] for cell in mine]
            for k, (name, label) in enumerate(ESTIMATES.items()):
                bold = name == "posterior"
                y = [cell["means"][name] for cell in mine]
                look: dict[str, Any] = {"ms": 5, "lw": 2.4, "zorder": 3} if bold else {"ms": 3.5, "lw": 1.2}
                line = "--" if name == "public only" else "-"
                ax.plot(x, y, line, color=PALETTE[k], marker=MARKERS[k], label=label, **look)
            ax.set(xscale="log", yscale="log")
            ax.set_xticks(x, [f"{n}" for n in x], minor=False)
            ax.set_yticks(ERROR_TICKS, [f"{tick:g}" for tick in ERROR_TICKS], minor=False)
            ax.minorticks_off()
            ax.grid(axis="y", which="major")
            ax.set_title(f"{pool}; {n_i} samples per client", fontsize=8.5)
    for ax in axes[-1]:
        ax.set_xlabel("public examples per task")
    axes[len(pools) // 2][0].set_ylabel("largest error over tasks (Frobenius)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def ground_truth_figure(curve: Mapping[str, Any]) -> Figure:
    """J and routing accuracy over the rounds against the truth, without the start, which lies far off.

    A line per setting: mean over the seeds, with the seeds' range; the published rate seed by seed."""
    figure, (left, right) = _new(3.8, 2)
    for ax, name in ((left, "J"), (right, "routing")):
        ax.axhline(curve["bayes"][name], color=FAINT, ls=":", lw=1.6, label="the truth")
        for k, (key, setting) in enumerate(curve["settings"].items()):
            x = setting["runs"][0]["rounds"][1:]
            runs = [run[name][1:] for run in setting["runs"]]
            if key == "published":
                for j, run in enumerate(runs):
                    label = f"{setting['name']}, each seed"
                    ax.plot(x, run, color=PALETTE[k], lw=0.9, ls="--", label="_" * (j > 0) + label)
                continue
            low, mean, high = (
                [end(values) for values in zip(*runs, strict=True)]
                for end in (min, lambda values: sum(values) / len(values), max)
            )
            ax.plot(x, mean, color=PALETTE[k], marker=MARKERS[k], ms=3.5, lw=1.5, label=setting["name"])
            ax.fill_between(x, low, high, color=PALETTE[k], alpha=0.15, lw=0)
        ax.set_xlabel("round")
        ax.set_xlim(left=0)
        ax.grid(axis="y")
    left.set_ylabel("J, nats")
    right.set_ylabel("routing: queries sent to their owner")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


BRIDGE_PANELS = {
    "gradient": "running mean of |grad F|²", "delta": "sum of δ over √t", "epsilon": "running mean of ε",
}  # fmt: skip


def bridge_figure(curve: Mapping[str, Any]) -> Figure:
    """Exact gradient norm and bridge errors against the round, a row per rate and a line per momentum."""
    rates = curve["rates"]
    figure = Figure(figsize=(WIDTH, 0.9 + 2.5 * len(rates)), layout="constrained")
    axes = figure.subplots(len(rates), len(BRIDGE_PANELS), sharex=True, squeeze=False)
    for row, (rate, momenta) in zip(axes, rates.items(), strict=True):
        for ax, (name, label) in zip(row, BRIDGE_PANELS.items(), strict=True):
            for k, (momentum, series) in enumerate(momenta.items()):
                ax.plot(series["rounds"], series[name], color=PALETTE[k], marker=MARKERS[k], ms=3, lw=1.3,
                        label=f"μ = {momentum}")  # fmt: skip
            ax.set_title(f"{label}, rate {rate}", fontsize=8.5)
            ax.grid(axis="y")
            if name == "gradient":
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                ax.yaxis.set_minor_locator(NullLocator())
            else:
                ax.set_ylim(bottom=0)
                ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for ax in axes[-1]:
        ax.set_xlabel("round t")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def feasible_figure(curve: Mapping[str, Any]) -> Figure:
    """At which rounds multipliers exist, a line of marks per mode of evaluation and rate, with the share."""
    rows = list(curve["feasible"].items())
    figure, (ax,) = _new(0.9 + 0.36 * len(rows))
    for y, (_, feasible) in enumerate(rows):
        for k, (holds, face) in enumerate(((True, PALETTE[0]), (False, "white"))):
            x = [t for t, value in zip(curve["rounds"], feasible, strict=True) if value is holds]
            colour = PALETTE[0] if holds else PALETTE[1]
            ax.plot(x, [y] * len(x), ls="", marker="ox"[k], ms=4.5, mfc=face, mec=colour, mew=1.1)
        share = sum(feasible) / len(feasible)
        ax.text(1.015, y, f"{share:.0%}", transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel("round")
    ax.plot([], [], ls="", marker="o", color=PALETTE[0], label="multipliers exist at both ends")
    ax.plot([], [], ls="", marker="x", color=PALETTE[1], label="none, or none accepted")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8.5)
    return figure


FORMS = {
    "affine": "affine", "augmented": "augmented", "literal": "literal", "uncentred": "literal, uncentred z",
    "none": "no projection",
}  # fmt: skip


def retained_figure(curve: Mapping[str, Any]) -> Figure:
    """Norm left of the clustered average against what clients share, a line per projection."""
    figure, (ax,) = _new(3.3)
    for k, (name, label) in enumerate((n, label) for n, label in FORMS.items() if n in curve):
        size = 9 if name == "affine" else 4  # two lines lie on one another
        ax.plot(
            curve["x"], curve[name], color=PALETTE[k], marker=MARKERS[k], ms=size, lw=size / 3, label=label
        )
    _finish(ax, "shared component of the updates over the groups' own", "share of the norm that is left")
    ax.legend(frameon=False, fontsize=8.5)
    return figure


def ridge_figure(curve: Mapping[str, Any]) -> Figure:
    """Norm left by the literal step against an absolute ridge, a line per scale of the updates."""
    figure, (ax,) = _new(3.3)
    for k, (scale, left) in enumerate(curve["scales"].items()):
        ax.plot(
            curve["x"], left, color=PALETTE[k], marker=MARKERS[k], ms=4, lw=1.5, label=f"updates × {scale}"
        )
    ax.axhline(curve["relative"], color=FAINT, ls="--", lw=1.3, label="relative ridges, any scale")
    ax.set_xscale("log")
    _finish(ax, "absolute ridge λ", "share of the norm that is left")
    ax.legend(frameon=False, fontsize=8.5)
    return figure


def coefficients_figure(curve: Mapping[str, Any]) -> Figure:
    """The coefficient of every client under each projection; dotted lines part the true groups."""
    figure, (ax,) = _new(3.3)
    clients, groups = range(len(curve["groups"])), curve["groups"]
    for k, (name, beta) in enumerate(curve["beta"].items()):
        at = [i + 0.12 * (k - 1.5) for i in clients]
        ax.plot(at, beta, ls="", color=PALETTE[k], marker=MARKERS[k], ms=5, label=FORMS[name])
    for i in clients[1:]:
        if groups[i] != groups[i - 1]:
            ax.axvline(i - 0.5, color=FAINT, ls=":", lw=1)
    ax.axhline(0, color=FAINT, lw=1)
    ax.set_xlabel("client")
    ax.set_ylabel("coefficient β")
    ax.grid(axis="y")
    ax.legend(frameon=False, fontsize=8.5)
    return figure


FIGURES = {
    "retained_norm": retained_figure,
    "ridge_against_scale": ridge_figure,
    "client_coefficients": coefficients_figure,
    "recovery_against_impurity": impurity_figure,
    "identity_against_set_error": identity_figure,
    "nonidentifiability_against_size": size_figure,
    "uniform_routing_cost": routing_figure,
    "gaussian_ground_truth": ground_truth_figure,
    "bridge_errors_by_momentum": bridge_figure,
    "feasible_rounds": feasible_figure,
}


def save_figures(result: Result, out: Path) -> list[Path]:
    """Write the figures of a result as PNG and SVG into `out` (made if missing); returns the paths."""
    with matplotlib.rc_context(STYLE):
        drawn: dict[str, Figure | None] = {
            name: draw(result["curves"][name]) for name, draw in FIGURES.items() if name in result["curves"]
        }
        if "beyond" in result:
            drawn["recovery_without_anchors"] = beyond_figure(result["beyond"])
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            for kind in ("png", "svg"):
                written.append(out / f"{name}.{kind}")
                save(figure, written[-1], kind)
    return written
