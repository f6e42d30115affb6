"""FedSEE's ablations: one change each, same seeds and partitions, at the small scale or in probe mode.

    python experiments/fedsee_ablations.py {small,probe} [--out runs] [--variants default ...] [--set k=v]

Every variant is an experiment of its own in OUT/ablation_SCALE_VARIANT; finished ones are kept, interrupted
ones resumed. `collect_ablations.py` makes the table.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedprism import api, config
from fedprism.methods.registry import METHODS

RECIPES = {"small": "fedsee_small.toml", "probe": "fedsee_probe.toml"}
COMMON = {
    "default": [],
    "calibration_none": ["method.fedsee.calibration=none"],
    "calibration_uniform": ["method.fedsee.calibration=uniform"],
    "active_all": ["method.fedsee.active=0"],
    "no_shared_pair": ["method.fedsee.shared_pair=false"],
}
VARIANTS = {
    "small": {
        **COMMON,
        "public_60": ["data.public_per_task=60"],
        "public_125": ["data.public_per_task=125"],
        "experts_6": ['data.public_only=["rte","mrpc","wnli"]'],
        "experts_2": ["method.fedsee.experts=2"],
    },
    "probe": {
        **COMMON,
        "public_100": ["data.public_per_task=100"],
        "public_250": ["data.public_per_task=250"],
        "public_500": ["data.public_per_task=500"],
        "experts_9": ['data.public_only=["rte","mrpc","wnli"]'],
        "experts_3": ["method.fedsee.experts=3"],
        "hull_affine": ["method.fedsee.hull=affine"],
        "hull_auto": ["method.fedsee.hull=auto"],
        "hull_posterior": ["method.fedsee.hull=posterior"],
    },
}


def main() -> None:
    """Run or resume the variants of one scale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scale", choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--variants", nargs="+", default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    unknown = sorted(set(args.variants or ()) - set(VARIANTS[args.scale]))
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}; there are {', '.join(VARIANTS[args.scale])}")
    recipe = Path(__file__).with_name(RECIPES[args.scale])
    for variant in args.variants or VARIANTS[args.scale]:
        out = args.out / f"ablation_{args.scale}_{variant}"
        changes = ["method.names=[fedsee]", *VARIANTS[args.scale][variant], *args.overrides]
        experiment = replace(config.load(recipe, changes, methods=METHODS), name=out.name)
        if (out / "config.toml").is_file():
            began = config.load(out / "config.toml", methods=METHODS)
            if config.config_hash(began) != config.config_hash(experiment):
                parser.error(f"{out} was begun with other settings; name another --out")
            summary = api.resume_experiment(out)
        else:
            summary = api.run_experiment(experiment, out)
        scores = {run["seed"]: round(run["test"]["overall"], 4) for run in summary["runs"]}
        print(variant, scores, flush=True)


if __name__ == "__main__":
    main()
