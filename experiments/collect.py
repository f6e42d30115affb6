"""Turn finished experiments into committed results: JSON with seeds, commit, figures; a Markdown table.

    python experiments/collect.py runs/NAME [runs/NAME2 ...] [--reference fedsee]

Writes experiments/results/NAME.json for each directory and prints its table. Seconds stay out: they belong
to a machine. Finished geometry diagnostics are an entry and a table of their own. Exit status 2 where a
directory holds no finished experiment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fedprism.evaluation import geometry_plots, metrics, reports

RESULTS = Path(__file__).resolve().parent / "results"
LEFT_OUT = ("dir", "seconds", "evaluation_seconds", "usage", "public_losses")


def geometry(directory: Path) -> dict[str, Any] | None:
    """The geometry diagnostics of an experiment: the published quantities as a list with a number per seed,
    and for each order which seeds kept it; None where no run of them is finished."""
    seeds = geometry_plots.finished_seeds(directory)
    if not seeds:
        return None
    return {
        "seeds": list(seeds),
        "measured": geometry_plots.measured(seeds),
        "orders": {
            claim: {str(seed): holds for seed, holds in kept.items()}
            for claim, kept in geometry_plots.orders(seeds).items()
        },
    }


def collect(directory: Path, reference: str) -> dict[str, Any]:
    """The figures of one experiment that do not depend on the machine.

    reference: the method that differences refer to; an experiment of a single method has none. Raises
    ValueError for unfinished runs, KeyError for a reference that is not there."""
    summary = reports.load_experiment(directory)
    if summary.get("incomplete"):
        raise ValueError(f"{directory}: unfinished runs {summary['incomplete']}; fedprism resume {directory}")
    runs = summary["runs"]
    first = directory / runs[0]["method"] / f"seed-{runs[0]['seed']}" / "versions.json"
    means = metrics.summarise_runs(runs)
    for entry in means:
        entry.pop("seconds", None)
    result = {
        "name": summary["name"],
        "seeds": sorted({run["seed"] for run in runs}),
        "versions": json.loads(first.read_text(encoding="utf-8")),
        "config": (directory / "config.toml").read_text(encoding="utf-8"),
        "means": means,
        "paired_differences": metrics.paired_summary(runs, reference) if len(means) > 1 else [],
        "negative_transfer": metrics.negative_transfer(runs),
        "runs": [{k: v for k, v in run.items() if k not in LEFT_OUT} for run in runs],
    }
    found = geometry(directory)
    return result if found is None else {**result, "geometry": found}


def main() -> int:
    """Collect every directory named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--reference", default="fedsee")
    args = parser.parse_args()
    for directory in args.directories:
        try:
            result = collect(directory, args.reference)
        except (ValueError, FileNotFoundError) as fault:
            print(f"collect: {fault}", file=sys.stderr)
            return 2
        path = RESULTS / f"{directory.name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        reference = args.reference if len(result["means"]) > 1 else None
        table = reports.markdown_table(reports.load_experiment(directory), reference)
        print(f"{path.name}\n\n{table}\n")
        if "geometry" in result:
            print(geometry_plots.geometry_table(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
