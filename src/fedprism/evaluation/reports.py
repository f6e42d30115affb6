"""Tables and the HTML report, from run directories and beside the published values.

An *experiment* here is the dict that `load_experiment` returns; the tables also take the plain content of
an experiment's `summary.json`. Accuracies are fractions in files and percent in every table; "points" are
percentage points. Incomplete runs are always listed, and never counted in a mean.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedprism.evaluation import metrics, page
from fedprism.evaluation.metrics import Spread
from fedprism.storage import RunDirectory

Experiment = dict[str, Any]

SCORE_TITLES = {"overall": "overall", "worst_50": "worst-50", "worst_25": "worst-25"}
SPLITS = ("test", "validation")


# ---------------------------------------------------------------------------------------------- reading


def _read_json(path: Path) -> Any | None:
    """Content of a JSON file; None when it is missing or cut short (a run killed while writing)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Text and content of config.toml; empty when it is missing or unreadable as TOML."""
    path = folder / "config.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text, {}


def _planned_rounds(config: Mapping[str, Any], method: str) -> int | None:
    """Rounds that a configuration plans for a method; None where it leaves them to the method's preset."""
    table = config.get("method", {})
    own = table.get(method, {})
    rounds = (own if isinstance(own, Mapping) else {}).get("rounds", table.get("rounds"))
    return int(rounds) if isinstance(rounds, int) else None


def _is_run(folder: Path) -> bool:
    """Whether a folder is one run (not an experiment): it has round metrics, or a summary of one method."""
    return (folder / "metrics.jsonl").is_file() or "method" in (_read_json(folder / "summary.json") or {})


def _load_run(folder: Path, name: str) -> dict[str, Any]:
    """One run with everything the report shows; `complete` says whether its summary was written."""
    text, config = _read_config(folder)
    federation = _read_json(folder / "federation.json") or {}
    about = {
        "dir": str(folder),
        "experiment": name,
        "federation": federation,
        "versions": _read_json(folder / "versions.json") or {},
        "model": _read_json(folder / "model.json") or {},
        "config": text,
        "alpha": config.get("data", {}).get("alpha"),
        "partition": config.get("data", {}).get("partition"),
    }
    summary = _read_json(folder / "summary.json")
    if isinstance(summary, dict) and summary.get("complete") and "method" in summary:
        return {**summary, **about}
    method = next(iter(config.get("method", {}).get("names", [])), folder.parent.name)
    digits = folder.name.rpartition("-")[2]
    seed = int(digits) if digits.isdigit() else next(iter(config.get("seeds", [])), None)
    lines = RunDirectory(folder).read_metrics()
    scored = [
        line["evaluation"]["validation"]["accuracy"]
        for line in lines
        if (line.get("evaluation") or {}).get("validation")
    ]
    return {
        "method": method,
        "seed": seed,
        "complete": False,
        "fingerprint": federation.get("fingerprint"),
        "rounds_done": len(lines),
        "rounds_planned": _planned_rounds(config, method),
        "last_validation": metrics.overall(scored[-1]) if scored else None,
        **about,
    }


def load_experiment(path: str | Path) -> Experiment:
    """Read an experiment directory, a single run directory, or a `summary.json` kept without its runs.

    Returns {"name", "dir", "methods", "seeds", "runs", "incomplete", "config", "alpha", "partition",
    "warnings"}. "runs": summaries of the complete runs, each with its "dir", "federation", "versions",
    "model" and "config". "incomplete": runs without a summary, with "rounds_done", "rounds_planned" and
    "last_validation"; a run that the configuration names and that has no directory yet is there with 0
    rounds. "warnings": lines for the reader. Raises FileNotFoundError when there is nothing of the kind.
    """
    folder = Path(path)
    if folder.is_file():
        content = _read_json(folder)
        if not isinstance(content, dict) or "runs" not in content:
            raise ValueError(f"report: {folder} is not a summary (needs a key 'runs'); give a run directory")
        runs = [run for run in content["runs"] if run.get("complete", True)]
        stopped = [run for run in content["runs"] if not run.get("complete", True)]
        return _experiment(content.get("name", folder.stem), folder, runs, stopped, "", {})
    if not folder.is_dir():
        raise FileNotFoundError(f"report: no directory {folder}; give the output directory of 'fedprism run'")
    text, config = _read_config(folder)
    if _is_run(folder):
        summary = _read_json(folder / "summary.json") or {}
        name = str(config.get("name") or summary.get("name") or folder.name)
        found = [_load_run(folder, name)]
    else:
        name = str(
            config.get("name") or (_read_json(folder / "summary.json") or {}).get("name") or folder.name
        )
        found = [_load_run(run, name) for run in sorted(folder.glob("*/seed-*")) if run.is_dir()]
        wanted = [
            (method, seed)
            for method in config.get("method", {}).get("names", [])
            for seed in config.get("seeds", [])
        ]
        have = {(run["method"], run["seed"]) for run in found}
        found += [
            {
                "method": method,
                "seed": seed,
                "complete": False,
                "fingerprint": None,
                "rounds_done": 0,
                "rounds_planned": _planned_rounds(config, method),
                "last_validation": None,
                "dir": None,
                "experiment": name,
            }
            for method, seed in wanted
            if (method, seed) not in have
        ]
        order = {pair: k for k, pair in enumerate(wanted)}
        found.sort(key=lambda run: (order.get((run["method"], run["seed"]), len(order)), run["method"]))
        if not found:
            raise FileNotFoundError(
                f"report: {folder} holds no runs (looked for <method>/seed-<n>/ and metrics.jsonl); "
                "give the output directory of 'fedprism run'"
            )
    complete = [run for run in found if run["complete"]]
    return _experiment(name, folder, complete, [run for run in found if not run["complete"]], text, config)


def _experiment(
    name: str,
    path: Path,
    runs: list[dict[str, Any]],
    stopped: list[dict[str, Any]],
    text: str,
    config: Mapping[str, Any],
) -> Experiment:
    """Put an experiment together and note what a reader has to know before comparing its runs."""
    everything = [*runs, *stopped]
    return {
        "name": name,
        "dir": str(path),
        "methods": list(dict.fromkeys(metrics.label_of(run) for run in everything)),
        "seeds": list(dict.fromkeys(run["seed"] for run in everything)),
        "runs": runs,
        "incomplete": stopped,
        "config": text,
        "alpha": config.get("data", {}).get("alpha"),
        "partition": config.get("data", {}).get("partition"),
        "warnings": _warnings(runs, stopped),
    }


def _warnings(runs: Sequence[Mapping[str, Any]], stopped: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines on runs that do not compare: other federations under a seed, seeds that a method lacks."""
    lines = []
    for seed, prints in metrics.fingerprint_conflicts([*runs, *stopped]).items():
        sides = "; ".join(
            f"{', '.join(dict.fromkeys(labels))} on {mark[:10]}" for mark, labels in prints.items()
        )
        lines.append(
            f"Seed {seed}: the runs saw different federations ({sides}). Their clients or examples "
            "differ, so their accuracies must not be compared; paired differences leave them out."
        )
    seeds = {label: {run["seed"] for run in members} for label, members in metrics.group_runs(runs).items()}
    if len({frozenset(own) for own in seeds.values()}) > 1:
        every = sorted(set.union(*seeds.values()))
        lacking = [
            f"{label} lacks {', '.join(str(s) for s in every if s not in own)}"
            for label, own in seeds.items()
            if set(every) - own
        ]
        lines.append(
            f"Not every method has every seed: {'; '.join(lacking)}. Means are over the seeds that are there."
        )
    return lines


def merge(experiments: Sequence[Experiment]) -> Experiment:
    """One experiment out of several, for a common table. A method that several of them hold is labelled
    "method (experiment)", with the directory's name where experiments share theirs."""
    if not experiments:
        raise ValueError("report: got no directories, needs at least one")
    if len(experiments) == 1:
        return experiments[0]
    names = [experiment["name"] for experiment in experiments]
    if len(set(names)) < len(names):
        names = [f"{e['name']}, {Path(e['dir']).name}" for e in experiments]
    owners: dict[tuple[str, Any], set[int]] = {}
    for k, experiment in enumerate(experiments):
        for run in [*experiment["runs"], *experiment["incomplete"]]:
            owners.setdefault((run["method"], run["seed"]), set()).add(k)
    doubled = {method for (method, _), own in owners.items() if len(own) > 1}
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for name, experiment in zip(names, experiments, strict=True):
        for part, key in zip(parts, ("runs", "incomplete"), strict=True):
            for run in experiment[key]:
                label = f"{run['method']} ({name})" if run["method"] in doubled else run["method"]
                part.append({**run, "label": label})
    merged = _experiment(" + ".join(dict.fromkeys(names)), Path(experiments[0]["dir"]), *parts, "", {})
    merged["config"] = "\n".join(f"# ---- {e['name']}\n{e['config']}" for e in experiments if e["config"])
    for key in ("alpha", "partition"):
        values = {experiment[key] for experiment in experiments}
        merged[key] = values.pop() if len(values) == 1 else None
    return merged


def load_targets(path: str | Path) -> dict[str, Any]:
    """Read a table of published values: a CSV with a column "method", value columns in percent and their
    standard deviations in columns ending in "_sd". A column "kind" may say "paired_difference".

    Returns {"title", "columns", "rows"}; a row is {"method", "kind", "values": column -> {"mean", "sd"}}.
    Raises FileNotFoundError, or ValueError for a table of another shape.
    """
    source = Path(path)
    with source.open(newline="", encoding="utf-8") as lines:
        table = list(csv.DictReader(lines))
    if not table or "method" not in table[0]:
        raise ValueError(
            f"targets: {source} has no column 'method'; needs one row per method, values in percent"
        )

    def number(text: str | None) -> float | None:
        try:
            return float(text) if text else None
        except ValueError:
            return None

    numeric = [name for name in table[0] if name and any(number(row[name]) is not None for row in table)]
    columns = [name for name in numeric if not name.endswith("_sd") and name not in ("method", "kind")]
    rows = [
        {
            "method": row["method"],
            "kind": row.get("kind") or "accuracy",
            "values": {
                name: {"mean": number(row[name]), "sd": number(row.get(f"{name}_sd"))}
                for name in columns
                if number(row[name]) is not None
            },
        }
        for row in table
    ]
    return {"title": source.stem.replace("_", " "), "columns": columns, "rows": rows}


# --------------------------------------------------------------------------------------------- numbers


def format_spread(value: Spread | None, factor: float = 100, digits: int = 1, signed: bool = False) -> str:
    """A spread as "82.1 ± 0.4", without the sd for one value, "–" for None. signed: always with a sign."""
    if value is None or value["mean"] is None:
        return "–"
    mean = value["mean"] * factor
    text = f"{mean:{'+' if signed else ''},.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = f"{0:.{digits}f}"
    text = text.replace("-", "−")
    return text if value["sd"] is None else f"{text} ± {value['sd'] * factor:.{digits}f}"


def _best(
    entries: Sequence[Mapping[str, Any]], pick: Callable[[Any], Spread | None], digits: int
) -> set[str]:
    """Labels with the highest mean, as printed: ties in the last digit shown are all best. None if one
    entry."""
    shown = {
        e["label"]: round(100 * value["mean"], digits) for e in entries if (value := pick(e)) is not None
    }
    return (
        {label for label, mean in shown.items() if mean == max(shown.values())} if len(shown) > 1 else set()
    )


def _score_columns(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[str, list[tuple[str, Callable[[Any], Spread | None]]]]:
    """The split that tables show ("test", or "validation" if no run was tested) and its accuracy columns."""
    split = next((s for s in SPLITS if any(entry[s]["overall"] for entry in entries)), "test")
    tasks = dict.fromkeys(task for entry in entries for task in entry[split]["per_task"])

    def score_of(name: str) -> Callable[[Any], Spread | None]:
        return lambda entry: entry[split][name]

    def task_of(task: str) -> Callable[[Any], Spread | None]:
        return lambda entry: entry[split]["per_task"].get(task)

    columns = [(title, score_of(name)) for name, title in SCORE_TITLES.items()]
    if len(tasks) == 1 and any(entry.get("outside") for entry in entries):
        tasks = {}  # the average accuracy of the other table
    return split, columns + [(task, task_of(task)) for task in tasks]


def _outside_rows(
    entries: Sequence[Mapping[str, Any]], paired: Sequence[Mapping[str, Any]] | None
) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Titles and rows (text, whether it is the best of its column) of the table of queries from outside.

    paired: what `metrics.paired_summary` gave, for columns of differences; None for none. No rows where no
    method answered such queries."""
    shown = [entry for entry in entries if entry["outside"]]

    def best_of(name: str) -> set[str]:
        return _best(shown, lambda entry: entry["outside"][name], 1)

    best = [best_of(name) for name in metrics.OUTSIDE]
    differences = {entry["label"]: entry["outside"] for entry in paired or ()}
    rows = []
    for entry in shown:
        found = entry["outside"]
        row = [(entry["label"], False), ({"route": "router", "vote": "vote"}[found["rule"]], False)]
        for name, top in zip(metrics.OUTSIDE, best, strict=True):
            row.append((format_spread(found[name]), entry["label"] in top))
        if paired is not None:
            own = differences.get(entry["label"], {})
            row += [(format_spread(own.get(name), signed=True), False) for name in ("system", "average")]
        rows.append(row)
    titles = ["method", "answers by", *metrics.OUTSIDE]
    if paired is not None:
        titles += ["system, difference", "average, difference"]
    return titles, rows


def _kib(value: Spread | None) -> str:
    """Mean bytes as KiB."""
    return "–" if value is None else f"{value['mean'] / 1024:,.{0 if value['mean'] >= 1024 * 100 else 1}f}"


def _mean(value: Spread | None) -> str:
    """A mean as a whole number, with separators."""
    return "–" if value is None else f"{value['mean']:,.0f}"


def _state(run: Mapping[str, Any]) -> str:
    """How far an incomplete run got, in words."""
    done, planned = run.get("rounds_done", 0), run.get("rounds_planned")
    if not done:
        return "not started" if not run.get("dir") else "no round finished"
    # A method with an initial round may do one more than its configuration plans.
    if planned and planned >= done:
        return f"{done} of {planned} rounds"
    return f"{done} round{'s' if done > 1 else ''} done"


def _incomplete_lines(summary: Mapping[str, Any]) -> list[str]:
    return [
        f"{metrics.label_of(run)}, seed {run['seed']}: {_state(run)}" for run in summary.get("incomplete", [])
    ]


def _complete(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete runs of an experiment; a single run's own summary counts as an experiment of one."""
    runs = summary.get("runs", [summary])
    return [run for run in runs if run.get("complete", True)]


def _pick_reference(summary: Mapping[str, Any], reference: str | None) -> str | None:
    """The reference asked for, or fedsee, or the first method; None when there is nothing to compare."""
    if reference is not None:
        return reference
    runs = _complete(summary)
    return metrics.reference_label(runs) if len(metrics.group_runs(runs)) > 1 else None


# ----------------------------------------------------------------------------------- terminal, markdown


def _narrow(title: str) -> str:
    """A column title over two lines where that saves width: a terminal has 80 characters."""
    return {"overall": "over-\nall"}.get(title, title.replace("worst-", "worst\n-").replace(" ", "\n"))


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The result as a table for the terminal: a row per method, accuracies in percent, mean ± sd over seeds.

    summary: an experiment (`load_experiment`) or the content of an experiment's summary.json. The best value
    of an accuracy column is bold. Incomplete runs stand in the caption, methods without a complete run have a
    row of dashes.
    """
    entries = metrics.summarise_runs(_complete(summary))
    split, columns = _score_columns(entries)
    several = any(len(entry["seeds"]) > 1 for entry in entries)
    table = Table(
        title=f"{summary.get('name', '')}: {split} accuracy in %"
        + (", mean ± sd over seeds" if several else ""),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for title in [*(title for title, _ in columns), "KiB up", "KiB down", "sec"]:
        table.add_column(_narrow(title), justify="right", vertical="top", no_wrap=True)
    best = [_best(entries, pick, 1) for _, pick in columns]
    for entry in entries:
        cells: list[Text] = []
        for (_, pick), top in zip(columns, best, strict=True):
            # The sd gets a line of its own: ten columns of "82.1 ± 0.4" do not fit a terminal.
            text = format_spread(pick(entry)).replace(" ± ", "\n±")
            cells.append(Text(text, style="bold" if entry["label"] in top else "", justify="right"))
        table.add_row(
            entry["label"],
            *cells,
            _kib(entry["bytes_up_per_client_round"]),
            _kib(entry["bytes_down_per_client_round"]),
            _mean(entry["seconds"]),
        )
    done = {entry["label"] for entry in entries}
    for label in dict.fromkeys(metrics.label_of(run) for run in summary.get("incomplete", [])):
        if label not in done:
            table.add_row(Text(label, style="dim"), *["–"] * (len(columns) + 3))
    notes = ["KiB: per client and round. Bold: best value of the column."]
    if stopped := _incomplete_lines(summary):
        notes.append("Incomplete, not in the means: " + "; ".join(stopped) + ".")
    notes += [f"Warning: {line}" for line in summary.get("warnings", [])]
    table.caption = "\n".join(notes)
    return table


def paired_table(summary: Mapping[str, Any], reference: str | None = None) -> Table | None:
    """Differences to a reference for the terminal: method minus reference per seed, mean ± sd, in points.

    reference: a method; None takes fedsee, or the first method without it. Returns None when there is one
    method only. Raises KeyError for a reference that has no complete run.
    """
    reference = _pick_reference(summary, reference)
    if reference is None:
        return None
    entries = metrics.paired_summary(_complete(summary), reference)
    tasks = list(dict.fromkeys(task for entry in entries for task in entry["per_task"]))
    table = Table(
        title=f"difference to {reference} on the same clients, in points",
        title_justify="left",
        caption="below 0: worse than the reference",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for title in [*SCORE_TITLES.values(), *tasks, "seeds"]:
        table.add_column(_narrow(title), justify="right", no_wrap=True)
    for entry in entries:
        values = [entry[name] for name in metrics.SCORES] + [entry["per_task"].get(task) for task in tasks]
        cells = [format_spread(value, signed=True).replace(" ± ", "\n±") for value in values]
        table.add_row(entry["label"], *cells, str(len(entry["seeds"])))
    return table


def outside_table(summary: Mapping[str, Any], reference: str | None = None) -> Table | None:
    """Queries whose owner is hidden, for the terminal: system, average and routing accuracy in %, and
    differences to the reference in points; None where no run answered any."""
    runs = _complete(summary)
    chosen = _pick_reference(summary, reference)
    paired = metrics.paired_summary(runs, chosen) if chosen is not None else None
    titles, rows = _outside_rows(metrics.summarise_runs(runs), paired)
    if not rows:
        return None
    table = Table(
        title="queries whose owner is hidden, in %"
        + (f"; differences to {chosen} in points" if chosen is not None else ""),
        title_justify="left",
        caption="system: routed, or put to the vote of all clients. average: the owner answers. routing: "
        "sent to the owner.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column(titles[0], no_wrap=True)
    table.add_column(titles[1].replace(" ", "\n"), no_wrap=True)
    for title in titles[2:]:
        table.add_column(title.replace(", ", "\n"), justify="right", no_wrap=True)
    for (label, _), *cells in rows:
        table.add_row(
            label, *(Text(text.replace(" ± ", "\n±"), style="bold" if top else "") for text, top in cells)
        )
    return table


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table: first column left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def markdown_table(summary: Mapping[str, Any], reference: str | None = None, digits: int = 1) -> str:
    """The results as markdown for a document: accuracies, then paired differences, then what is incomplete.

    summary: as for `summary_table`. reference: as for `paired_table`. digits: decimals of the percent values.
    """
    entries = metrics.summarise_runs(_complete(summary))
    split, columns = _score_columns(entries)
    best = [_best(entries, pick, digits) for _, pick in columns]
    rows = []
    for entry in entries:
        cells = [format_spread(pick(entry), digits=digits) for _, pick in columns]
        cells = [f"**{c}**" if entry["label"] in top else c for c, top in zip(cells, best, strict=True)]
        rows.append(
            [
                f"`{entry['label']}`",
                *cells,
                _kib(entry["bytes_up_per_client_round"]),
                _kib(entry["bytes_down_per_client_round"]),
                _mean(entry["seconds"]),
            ]
        )
    done = {entry["label"] for entry in entries}
    for label in dict.fromkeys(metrics.label_of(run) for run in summary.get("incomplete", [])):
        if label not in done:
            rows.append([f"`{label}`", "incomplete", *["–"] * (len(columns) + 2)])
    header = ["method", *(title for title, _ in columns), "KiB up", "KiB down", "seconds"]
    count = max((len(entry["seeds"]) for entry in entries), default=0)
    seeds = f", mean ± sample standard deviation over {count} seeds" if count > 1 else ""
    text = f"{split.capitalize()} accuracy in percent{seeds}. KiB are per client and round.\n\n"
    text += _markdown(header, rows)
    chosen = _pick_reference(summary, reference)
    if chosen is not None:
        paired = metrics.paired_summary(_complete(summary), chosen)
        text += f"\nDifference to `{chosen}` on the same clients, in points:\n\n" + _markdown(
            ["method", *SCORE_TITLES.values(), "seeds"],
            [
                [
                    f"`{e['label']}`",
                    *(format_spread(e[n], digits=digits, signed=True) for n in metrics.SCORES),
                    str(len(e["seeds"])),
                ]
                for e in paired
            ],
        )
    paired_outside = None if chosen is None else metrics.paired_summary(_complete(summary), chosen)
    titles, outside = _outside_rows(entries, paired_outside)
    if outside:
        text += "\nQueries whose owner is hidden, in percent; differences in points:\n\n" + _markdown(
            titles,
            [
                [f"`{label}`", *(f"**{text}**" if top else text for text, top in cells)]
                for (label, _), *cells in outside
            ],
        )
    if stopped := _incomplete_lines(summary):
        text += "\nIncomplete runs, not in the means:\n\n" + "".join(f"- {line}\n" for line in stopped)
    for line in summary.get("warnings", []):
        text += f"\n**Warning.** {line}\n"
    return text


# ------------------------------------------------------------------------------------------------ HTML


def _cell(value: Any, tone: str = "", tip: str = "") -> dict[str, str]:
    """A cell of a grid. value: its text; a "± sd" goes on a line of its own. tone: a class of the style
    sheet ("best", "up", "down"). tip: shown when one points at the cell."""
    text, _, sd = str(value).partition(" ± ")
    return {"text": text, "below": f"± {sd}" if sd else "", "tone": tone, "tip": tip}


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Any]], kinds: Mapping[int, str]) -> dict[str, Any]:
    """A table of the page. rows: cells as `_cell` gives them, or plain values. kinds: column -> "name" (bold,
    left), "text" (left, wraps), "part" (a rule on its left); the others hold numbers."""
    return {
        "columns": [{"title": title, "kind": kinds.get(k, "")} for k, title in enumerate(columns)],
        "rows": [[cell if isinstance(cell, dict) else _cell(cell) for cell in row] for row in rows],
    }


def _results(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The main table: scores, then tasks; the best value of a column is marked."""
    _, columns = _score_columns(entries)
    best = [_best(entries, pick, 1) for _, pick in columns]
    rows = [
        [
            entry["label"],
            *(
                _cell(format_spread(pick(entry)), "best" if entry["label"] in top else "")
                for (_, pick), top in zip(columns, best, strict=True)
            ),
            len(entry["seeds"]),
        ]
        for entry in entries
    ]
    titles = ["method", *(title for title, _ in columns), "seeds"]
    return _grid(titles, rows, {0: "name", 1 + len(SCORE_TITLES): "part", len(titles) - 1: "part"})


def _headline(
    entries: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]], reference: str | None
) -> list[str]:
    """The result in a few sentences that hold whatever the numbers are; equal in print counts as level."""
    ranked = sorted((e for e in entries if e["test"]["overall"]), key=lambda e: -e["test"]["overall"]["mean"])
    if not ranked:
        return ["No run has been tested yet."]
    if metrics.fingerprint_conflicts(runs):
        return ["The methods did not all see the same federation, so they are not ranked; see the warning."]
    top = ranked[0]
    first = (
        f"{top['label']} reaches {format_spread(top['test']['overall'])} % test accuracy, mean over clients"
    )
    leaders = _best(ranked, lambda entry: entry["test"]["overall"], 1) - {top["label"]}
    level = [entry["label"] for entry in ranked if entry["label"] in leaders]
    if level:
        first += f", level with {' and '.join(level)}"
    elif len(ranked) > 1:
        first += f", the highest of {len(ranked)} methods"
    lines = [first + "."]
    if sentence := _outside_headline(entries):
        lines.append(sentence)
    own = next((entry for entry in ranked if entry["label"] == reference), None)
    if reference is None or own is None:
        return lines
    if own is not top and reference not in level:
        lines[0] += f" {reference} reaches {format_spread(own['test']['overall'])} %."
    paired = {entry["label"]: entry for entry in metrics.paired_summary(runs, reference)}
    for name in ("local_only", "fedit", "fedavg", "public_only"):
        if name in paired and paired[name]["overall"]:
            gain, worst = (-100 * paired[name][score]["mean"] for score in ("overall", "worst_25"))
            lines.append(
                f"Against {name}, {reference} is {_points(gain)} overall and {_points(worst)} on the "
                "worst-served quarter of the clients."
            )
    return lines


def _outside_headline(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """The best method on queries from outside in one sentence; None without any."""
    answered = [entry for entry in entries if entry["outside"]]
    if not answered:
        return None
    top = max(answered, key=lambda entry: entry["outside"]["system"]["mean"])
    how = "by routing them" if top["outside"]["rule"] == "route" else "by a vote of all clients"
    right = format_spread(top["outside"]["system"])
    return (
        f"On queries whose owner is hidden {top['label']} is right on {right} %, {how}"
        + (f"; the highest of {len(answered)} methods" if len(answered) > 1 else "")
        + "."
    )


def _points(value: float) -> str:
    """A signed difference in words: "2.1 points better"; less than 0.05 is equal."""
    if abs(value) < 0.05:
        return "equal"
    return f"{abs(value):.1f} points {'better' if value > 0 else 'worse'}"


def _differences(runs: Sequence[Mapping[str, Any]], reference: str) -> dict[str, Any]:
    """The table of paired differences."""
    entries = metrics.paired_summary(runs, reference)
    tasks = list(dict.fromkeys(task for entry in entries for task in entry["per_task"]))

    def cell(value: Spread | None) -> dict[str, str]:
        if value is None:
            return _cell("–")
        tone = "" if abs(value["mean"]) < 5e-4 else "down" if value["mean"] < 0 else "up"
        each = ", ".join(f"{100 * v:+.1f}" for v in value["values"]) if value["n"] > 1 else ""
        return _cell(format_spread(value, signed=True), tone, each)

    rows = []
    for entry in entries:
        seeds = ", ".join(str(seed) for seed in entry["seeds"]) or "none"
        if entry["unpaired"]:
            seeds += f" (no partner: {', '.join(str(seed) for seed in entry['unpaired'])})"
        values = [entry[name] for name in metrics.SCORES] + [entry["per_task"].get(task) for task in tasks]
        rows.append([entry["label"], *(cell(value) for value in values), seeds])
    titles = ["method", *SCORE_TITLES.values(), *tasks, "paired seeds"]
    return _grid(titles, rows, {0: "name", 1 + len(SCORE_TITLES): "part", len(titles) - 1: "part"})


def _outside(
    entries: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]], reference: str | None
) -> dict[str, Any] | None:
    """The table of queries from outside; None where no run answered any."""
    paired = metrics.paired_summary(runs, reference) if reference else None
    titles, rows = _outside_rows(entries, paired)
    if not rows:
        return None
    cells = [[_cell(text, "best" if top else "") for text, top in row] for row in rows]
    return _grid(titles, cells, {0: "name", 1: "text", 2: "part", 5: "part"})


def _negative(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The table of negative transfer; None when no method shares its clients with local_only."""
    rows = [
        [
            row["label"],
            f"{row['below']['mean']:.1f}".removesuffix(".0") + f" of {row['n_clients']}",
            ", ".join(f"{value:.0f}" for value in row["below"]["values"]),
            format_spread(row["difference"], signed=True),
        ]
        for row in metrics.negative_transfer(runs)
    ]
    titles = ["method", "clients below local_only", "in each seed", "mean difference, points"]
    return _grid(titles, rows, {0: "name"}) if rows else None


def _stopped(stopped: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of incomplete runs."""
    rows = []
    for run in stopped:
        last = run.get("last_validation")
        reached = "–" if last is None else f"{100 * last:.1f} %"
        rows.append([metrics.label_of(run), run["seed"], _state(run), reached])
    return _grid(["method", "seed", "state", "last validation accuracy"], rows, {0: "name", 2: "text"})


def _costs(entries: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of costs; totals are over all clients and rounds of a run."""
    groups = metrics.group_runs(runs)
    rows = []
    for entry in entries:
        up, down = entry["bytes_up_per_client_round"], entry["bytes_down_per_client_round"]
        total = "–"
        totals = [run["bytes_total"] for run in groups[entry["label"]] if "bytes_total" in run]
        if totals:
            total = f"{sum(totals) / len(totals) / 1024**2:,.1f}"
        epochs = "–" if entry["local_epochs"] is None else f"{entry['local_epochs']['mean']:.4g}"
        counts = [_mean(entry[name]) for name in ("examples_trained", "examples_public", "seconds")]
        rows.append([entry["label"], _kib(up), _kib(down), total, _mean(entry["rounds"]), epochs, *counts])
    titles = ["method", "KiB up", "KiB down", "total MiB", "rounds", "local epochs", "training examples"]
    return _grid([*titles, "public examples", "seconds"], rows, {0: "name", 4: "part", 8: "part"})


def _mixtures(entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The table of mixture errors, in points; None when no method estimates mixtures."""
    rows = []
    for entry in entries:
        found = entry["mixture"]
        if found["mae"]:
            errors = [format_spread(found[n]) for n in ("mae", "best_feasible_mae", "mae_realised")]
            pure = format_spread(found["pure_argmax_accuracy"], 100, 0)
            rows.append([entry["label"], *errors, format_spread(found["slope"], 1, 2), pure])
    titles = ["method", "mean absolute error, points", "best feasible", "against realised shares"]
    titles += ["slope of the fit", "one-task clients recognised, %"]
    return _grid(titles, rows, {0: "name"}) if rows else None


def _level(targets: Mapping[str, Any], experiment: Experiment) -> str | None:
    """The column of a table by heterogeneity ("alpha_0.1") that fits the experiment, None without one."""
    if experiment.get("partition") == "given":  # mixtures written out; alpha is there and means nothing
        return None
    alpha = 0.0 if experiment.get("partition") == "pure" else experiment.get("alpha")
    if alpha is None:
        return None
    for column in targets["columns"]:
        number = column.removeprefix("alpha_")
        if number != column and math.isclose(float(number), float(alpha)):
            return str(column)
    return "uniform" if alpha >= 50 and "uniform" in targets["columns"] else None


def _published(
    targets: Mapping[str, Any],
    experiment: Experiment,
    entries: Sequence[dict[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    reference: str | None,
) -> dict[str, Any]:
    """Published values beside ours. Columns named like our scores or tasks are matched by name; a table with
    a column per heterogeneity level gives the overall accuracy of this experiment's level."""
    names = {"overall": "overall", "worst50": "worst_50", "worst25": "worst_25"}
    names |= {name: name for name in metrics.SCORES}
    tasks = {task for entry in entries for task in entry["test"]["per_task"]}
    columns = [column for column in targets["columns"] if column in names]
    columns += [column for column in targets["columns"] if column in tasks]
    level = None if columns else _level(targets, experiment)
    if level is not None:
        columns = [level]
    tested = {entry["label"]: entry["test"] for entry in entries}
    paired = {e["label"]: e for e in metrics.paired_summary(runs, reference)} if reference else {}
    rows = []
    for row in targets["rows"]:
        difference = row["kind"] == "paired_difference"
        # Published tables tell variants apart by an ending; "fedsee_l1" is what the plain name stands for.
        label = row["method"] if row["method"] in tested else row["method"].removesuffix("_l1")
        source = (paired if difference else tested).get(label)
        cells = []
        for column in columns:
            ours = None
            if source is not None:
                ours = (
                    source["per_task"].get(column)
                    if column in tasks
                    else source[names.get(column, "overall")]
                )
            cells.append(format_spread(ours, signed=difference))
            cells.append(format_spread(row["values"].get(column), 1, 2, signed=difference))
        rows.append([row["method"], row["kind"].replace("_", " "), *cells])
    titles = [title for column in columns for title in (f"{column}, ours", "published")]
    kinds = {0: "name", 1: "text"} | {2 + 2 * k: "part" for k in range(len(columns))}
    return {
        "title": targets.get("title", "published values"),
        "level": level,
        "table": _grid(["method", "value", *titles], rows, kinds) if columns else None,
    }


def _federations(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per distinct federation: who used it, sizes, table of counts, notes."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run.get("federation"):
            groups.setdefault(str(run["federation"].get("fingerprint")), []).append(run)
    result = []
    for fingerprint, members in groups.items():
        described = members[0]["federation"]
        tasks, counts = described.get("tasks", []), described.get("counts") or []
        sizes = [sum(row) for row in counts]
        rows = [[i, *(cell or "·" for cell in row), sizes[i]] for i, row in enumerate(counts)]
        rows.append(["all", *(sum(column) for column in zip(*counts, strict=True)), sum(sizes)])
        public = described.get("public_sizes") or {}
        if public:
            rows.append(["public", *(public.get(task, "·") for task in tasks), ""])
        spread = f", {min(sizes)} to {max(sizes)} training examples each" if sizes else ""
        result.append(
            {
                "fingerprint": fingerprint,
                "seeds": list(dict.fromkeys(run["seed"] for run in members)),
                "methods": list(dict.fromkeys(metrics.label_of(run) for run in members)),
                "tasks": tasks,
                "clients": len(counts),
                "sizes": spread,
                "counts": _grid(["client", *tasks, "all"], rows, {0: "name", len(tasks) + 1: "part"}),
                "notes": described.get("notes", []),
            }
        )
    return result


def _hulls(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The table of where each task's expert lies, one row per run; None when none may leave the hull."""
    free = [run for run in runs if run.get("hull")]
    tasks = list(dict.fromkeys(task for run in free for task in run["hull"]))
    rows = [
        [metrics.label_of(run), run["seed"], *(run["hull"].get(task, "–") for task in tasks)] for run in free
    ]
    kinds = {0: "name", **{2 + k: "text" for k in range(len(tasks))}}
    return _grid(["method", "seed", *tasks], rows, kinds) if rows else None


def _dispersions(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The table of covariance dispersions, one row per distinct one (methods of a seed share theirs); None
    when no run has one."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run.get("covariance_dispersion"):
            groups.setdefault(json.dumps([run["seed"], run["covariance_dispersion"]]), []).append(run)
    if not groups:
        return None
    rows = []
    for members in groups.values():
        found = members[0]["covariance_dispersion"]
        rho = "∞" if found["rho"] is None else f"{found['rho']:.3g}"
        numbers = [f"{found[name]:.3g}" for name in ("relative_gap", "gap", "floor", "top", "effective_rank")]
        features = (members[0].get("model") or {}).get("features", "–")
        fewest = min(found["rows"].values())
        rows.append([members[0]["seed"], features, rho, *numbers, f"{found['span']}", f"{fewest:,}"])
    titles = ["seed", "features", "ρ", "relative gap", "gap", "floor", "top", "effective rank", "dimensions"]
    return _grid([*titles, "fewest rows of a task"], rows, {0: "name", 1: "text", 2: "part"})


def _clients(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per seed and federation a table of client accuracies; the best value of a client is marked."""
    tables: dict[tuple[Any, Any], dict[str, list[float]]] = {}
    for run in runs:
        if run.get("test"):
            table = tables.setdefault((run["seed"], run.get("fingerprint")), {})
            table[metrics.label_of(run)] = run["test"]["clients"]
    result = []
    for (seed, _), columns in tables.items():
        rows: list[list[Any]] = []
        for i, values in enumerate(zip(*columns.values(), strict=False)):
            top = max(values) if len(values) > 1 else None
            rows.append([i, *(_cell(f"{100 * v:.1f}", "best" if v == top else "") for v in values)])
        alone = sum(other == seed for other, _ in tables) == 1
        title = f"seed {seed}" if alone else f"seed {seed}, {', '.join(columns)}"
        result.append({"title": title, "table": _grid(["client", *columns], rows, {0: "name"})})
    return result


def _versions(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Every name in the runs' versions.json with its value, or all values where runs differ."""
    known = [run["versions"] for run in runs if run.get("versions")]
    rows = []
    for name in dict.fromkeys(name for table in known for name in table):
        values = list(dict.fromkeys(str(table.get(name)) for table in known))
        rows.append([name, " / ".join(values), "differs between runs" if len(values) > 1 else ""])
    return _grid(["name", "version", ""], rows, {0: "name", 1: "text", 2: "text"}) if rows else None


def _geometry_seeds(dirs: Sequence[str | Path]) -> tuple[Path | None, Mapping[int, Mapping[str, Any]]]:
    """The first directory with finished geometry diagnostics, and its seeds' logs; (None, {}) without."""
    from fedprism.evaluation import geometry_plots

    for folder in dirs:
        if seeds := geometry_plots.finished_seeds(folder):
            return Path(folder), seeds
    return None, {}


def _geometry(seeds: Mapping[int, Mapping[str, Any]], source: str | None) -> dict[str, Any] | None:
    """The tables of the geometry diagnostics: quantities beside the published ones, orders by seed; None
    without seeds. source: where they are from, None where that is plain."""
    from fedprism.evaluation import geometry_plots

    if not seeds:
        return None
    rows: list[list[Any]] = []
    for row in geometry_plots.table_rows(seeds):
        each = ", ".join(geometry_plots.value_text((value, None)) for value in row.values)
        ours = _cell(geometry_plots.value_text(row.ours), tip=each if len(row.values) > 1 else "")
        rows.append([row.label, ours, geometry_plots.value_text(row.published)])
    held = []
    for claim, kept in geometry_plots.orders(seeds).items():
        answers = [_cell(*{True: ("yes", "up"), False: ("no", "down"), None: ("–",)}[kept.get(seed)])
                   for seed in seeds]  # fmt: skip
        held.append([claim, *answers, f"{sum(kept.values())} of {len(kept)}"])
    titles = ["order", *(f"seed {seed}" for seed in seeds), "kept"]
    return {
        "source": source,
        "several": len(seeds) > 1,
        "table": _grid(["quantity", "ours", "published"], rows, {0: "name"}),
        "orders": _grid(titles, held, {0: "name", len(titles) - 1: "part"}),
    }


def _pictures(
    experiment: Experiment, seeds: Mapping[int, Mapping[str, Any]], figures_dir: Path | None
) -> dict[str, list[dict[str, str]]]:
    """Figures by kind, each as a data address with a title; several methods of a kind follow each other.

    seeds: logs of the geometry diagnostics, or empty. figures_dir: where figures are saved as files too."""
    # Imported here: tables in the terminal need neither matplotlib nor jinja2.
    from fedprism.evaluation import geometry_plots, outside_plots, plots

    drawn = plots.figures(experiment) | outside_plots.figures(experiment)
    if seeds:
        drawn |= geometry_plots.figures(seeds)
    if figures_dir is not None:
        plots.draw_all(experiment, figures_dir, drawn)
    result: dict[str, list[dict[str, str]]] = {}
    for name, figure in drawn.items():
        buffer = io.BytesIO()
        plots.save(figure, buffer, "png")
        kind, _, label = name.partition("-")
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        result.setdefault(kind, []).append({"source": f"data:image/png;base64,{data}", "label": label})
    return result


def write_report(
    dirs: Sequence[str | Path],
    out_file: str | Path,
    *,
    targets: Mapping[str, Any] | None = None,
    reference: str | None = None,
    figures_dir: str | Path | None = None,
) -> Path:
    """Write a self-contained HTML report on one or several experiment or run directories.

    dirs: directories (or summary files) that `load_experiment` reads; several are compared in common tables.
    The geometry diagnostics shown are those of the first directory that has finished ones.
    out_file: the page, replaced if it exists. targets: published values (`load_targets`) shown beside ours.
    reference: the method that differences refer to, default fedsee or the first. figures_dir: a folder for
    the figures as PNG and SVG files, None for none. Returns out_file.
    Raises FileNotFoundError for a directory without runs, KeyError for an unknown reference, ImportError
    without matplotlib or jinja2 (the extra "report").
    """
    import jinja2

    experiment = merge([load_experiment(path) for path in dirs])
    runs, stopped = experiment["runs"], experiment["incomplete"]
    everything = [*runs, *stopped]
    entries = metrics.summarise_runs(runs)
    compared = _pick_reference(experiment, reference)  # None with a single method
    federations = _federations(everything)
    where, seeds = _geometry_seeds(dirs)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    html = environment.from_string(page.TEMPLATE).render(
        style=page.STYLE,
        name=experiment["name"],
        methods=experiment["methods"],
        seeds=experiment["seeds"],
        clients=sorted({federation["clients"] for federation in federations}),
        tasks=list(dict.fromkeys(task for federation in federations for task in federation["tasks"])),
        version=next((run["versions"].get("fedprism") for run in runs if run.get("versions")), None),
        warnings=experiment["warnings"],
        headline=_headline(entries, runs, compared),
        several=any(len(entry["seeds"]) > 1 for entry in entries),
        reference=compared or metrics.reference_label(runs),
        split=_score_columns(entries)[0],
        results=_results(entries) if entries else None,
        differences=_differences(runs, compared) if compared else None,
        outside=_outside(entries, runs, compared),
        has_local=any(run["method"] == "local_only" for run in runs),
        negative=_negative(runs),
        n_incomplete=len(stopped),
        incomplete=_stopped(stopped),
        pictures=_pictures(experiment, seeds, None if figures_dir is None else Path(figures_dir)),
        geometry=_geometry(seeds, str(where) if len(dirs) > 1 else None),
        client_tables=_clients(runs),
        mixture=_mixtures(entries),
        costs=_costs(entries, runs) if entries else None,
        published=_published(targets, experiment, entries, runs, compared) if targets else None,
        federations=federations,
        dispersions=_dispersions(runs),
        hulls=_hulls(runs),
        notes=[(metrics.label_of(run), run["seed"], note) for run in runs for note in run.get("notes", [])],
        config=experiment["config"] or next((run["config"] for run in everything if run.get("config")), ""),
        model=next((json.dumps(run["model"], indent=2) for run in runs if run.get("model")), ""),
        versions=_versions(everything),
    )
    target = Path(out_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    return target
