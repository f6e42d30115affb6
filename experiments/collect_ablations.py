"""Turn finished ablations into a committed result: paired differences to the default, per seed, as JSON.

    python experiments/collect_ablations.py {small,probe} [--out runs]

Reads OUT/ablation_SCALE_VARIANT of `fedsee_ablations.py`, writes results/fedsee_ablations_SCALE.json, prints
the table. A variant must have the default's seeds and client partitions. Exit status 2 where one has not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedsee_ablations import VARIANTS

from fedprism.evaluation import reports

RESULTS = Path(__file__).resolve().parent / "results"
PUBLISHED = {  # change of overall accuracy in points, headline setting (RoBERTa-large, 10 clients)
    "calibration_uniform": -1.80, "calibration_none": -1.30, "no_shared_pair": -0.62, "public_100": -1.38,
    "public_250": -0.73, "public_500": -0.16, "experts_3": -0.64, "experts_9": -0.34,
}  # fmt: skip


def load(directory: Path) -> dict[int, dict[str, Any]]:
    """Seed -> the run's scores, mixture error and partition."""
    summary = reports.load_experiment(directory)
    if summary.get("incomplete"):
        raise ValueError(f"{directory}: unfinished, go on with fedprism resume {directory}")
    found = {}
    for run in summary["runs"]:
        folder = directory / run["method"] / f"seed-{run['seed']}"
        federation = json.loads((folder / "federation.json").read_text(encoding="utf-8"))
        held = [k for k, column in enumerate(zip(*federation["counts"], strict=True)) if any(column)]
        found[run["seed"]] = {
            **{name: run["test"][name] for name in ("overall", "worst_50", "worst_25")},
            "mixture_mae": run["mixture"]["mae"],
            "partition": [[row[k] for k in held] for row in federation["counts"]],
            "fingerprint": federation["fingerprint"],
            "commit": json.loads((folder / "versions.json").read_text(encoding="utf-8")).get("git_commit"),
        }
    return found


def compare(scale: str, out: Path) -> dict[str, Any]:
    """Means of every finished variant and its differences to the default on the same clients, in points."""
    default = load(out / f"ablation_{scale}_default")
    variants: dict[str, Any] = {}
    for variant in VARIANTS[scale]:
        directory = out / f"ablation_{scale}_{variant}"
        if not (directory / "summary.json").is_file():
            continue
        runs = load(directory)
        shared = sorted(runs)
        # a fingerprint covers the public sets; variants that change those share the clients' counts
        same = "partition" if variant.startswith(("public_", "experts_")) else "fingerprint"
        if set(runs) != set(default) or any(runs[s][same] != default[s][same] for s in shared):
            raise ValueError(f"{directory}: other seeds or another federation than the default's")
        commits = sorted({str(run["commit"]) for run in runs.values()})
        entry: dict[str, Any] = {"seeds": shared, "published": PUBLISHED.get(variant), "commits": commits}
        for name in ("overall", "worst_50", "worst_25", "mixture_mae"):
            values = [100 * runs[seed][name] for seed in shared]
            gaps = [v - 100 * default[seed][name] for v, seed in zip(values, shared, strict=True)]
            entry[name] = {"mean": mean(values), "difference": mean(gaps), "by_seed": gaps,
                           "difference_sd": stdev(gaps) if len(gaps) > 1 else None}  # fmt: skip
        variants[variant] = entry
    config = (out / f"ablation_{scale}_default" / "config.toml").read_text(encoding="utf-8")
    return {"name": f"fedsee_ablations_{scale}", "config": config, "variants": variants}


def table(result: dict[str, Any]) -> str:
    """Markdown: differences of overall and worst-25 to the default, in points."""

    def difference(entry: dict[str, Any]) -> str:
        spread = "" if entry["difference_sd"] is None else f" ± {entry['difference_sd']:.2f}"
        return f"{entry['difference']:+.2f}{spread}".replace("-", "−")

    lines = ["| variant | overall | difference | worst-25 difference | mixture error | published | seeds |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name, entry in result["variants"].items():
        published = "" if entry["published"] is None else f"{entry['published']:+.2f}".replace("-", "−")
        row = (f"`{name}`", f"{entry['overall']['mean']:.2f}", difference(entry["overall"]),
               difference(entry["worst_25"]), f"{entry['mixture_mae']['mean']:.1f}", published,
               str(len(entry["seeds"])))  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    """Collect one scale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scale", choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    try:
        result = compare(args.scale, args.out)
    except (ValueError, FileNotFoundError) as fault:
        print(f"collect_ablations: {fault}", file=sys.stderr)
        return 2
    target = RESULTS / f"{result['name']}.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{target.name}\n\n{table(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
