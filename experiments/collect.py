"""Turn finished experiments into committed results: JSON with seeds, commit, figures; a Markdown table.

    python experiments/collect.py runs/NAME [runs/NAME2 ...] [--reference fedsee]

Writes experiments/results/NAME.json for each directory and prints its table. Seconds stay out: they belong
to a machine. Exit status 2 where a directory holds no finished experiment.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fedprism.evaluation import metrics, reports

RESULTS = Path(__file__).resolve().parent / "results"
LEFT_OUT = ("seconds", "evaluation_seconds", "usage", "public_losses")


def collect(directory: Path, reference: str) -> dict[str, Any]:
    """The figures of one experiment that do not depend on the machine."""
    summary = reports.load_experiment(directory)
    if summary.get("incomplete"):
        raise ValueError(f"{directory}: unfinished runs {summary['incomplete']}; fedprism resume {directory}")
    runs = summary["runs"]
    first = directory / runs[0]["method"] / f"seed-{runs[0]['seed']}" / "versions.json"
    means = metrics.summarise_runs(runs)
    for entry in means:
        entry.pop("seconds", None)
    return {
        "name": summary["name"],
        "seeds": sorted({run["seed"] for run in runs}),
        "versions": json.loads(first.read_text(encoding="utf-8")),
        "config": (directory / "config.toml").read_text(encoding="utf-8"),
        "means": means,
        "paired_differences": metrics.paired_summary(runs, reference),
        "negative_transfer": metrics.negative_transfer(runs),
        "runs": [{k: v for k, v in run.items() if k not in LEFT_OUT} for run in runs],
    }


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
        table = reports.markdown_table(reports.load_experiment(directory), args.reference)
        print(f"{path.name}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
