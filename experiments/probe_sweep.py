"""Run fedsee_probe.toml at five levels of heterogeneity; each level is an experiment of its own.

    python experiments/probe_sweep.py [--out runs] [--levels pure alpha_0.1 ...] [--set key=value ...]

Finished levels are kept, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedprism import api, config
from fedprism.methods.registry import METHODS

LEVELS = {
    "pure": ["data.partition=pure"],
    "alpha_0.1": ["data.alpha=0.1"],
    "alpha_0.5": ["data.alpha=0.5"],
    "alpha_1": ["data.alpha=1.0"],
    "alpha_50": ["data.alpha=50.0"],
}


def main() -> None:
    """Run or resume all levels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    recipe = Path(__file__).with_name("fedsee_probe.toml")
    for level in args.levels:
        change = LEVELS[level]
        out = args.out / f"fedsee_probe_{level}"
        if (out / "config.toml").is_file():
            summary = api.resume_experiment(out)
        else:
            experiment = config.load(recipe, [*change, *args.overrides], methods=METHODS)
            summary = api.run_experiment(replace(experiment, name=out.name), out)
        scores = {(run["method"], run["seed"]): round(run["test"]["overall"], 4) for run in summary["runs"]}
        print(level, scores, flush=True)


if __name__ == "__main__":
    main()
