"""Variants of FedSPM on the federation of fedspm_fmnist_small.toml: how it starts, how many components, whose
encoders.

    python experiments/fedspm_variants.py [--out runs] [--variants kmeans_3 ...] [--set k=v]

Every variant is an experiment of its own in OUT/fedspm_VARIANT, over the same clients and seeds; finished
ones are kept, interrupted ones resumed. `collect.py` and `fedprism report` read them like any other run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedprism import api, config
from fedprism.methods.registry import METHODS

FIRST = "method.fedspm.init"
VARIANTS = {
    "kmeans_3": [f"{FIRST}=kmeans"],
    "kmeans_2": [f"{FIRST}=kmeans", "method.fedspm.n_components=2"],
    "true_components_2": [
        f"{FIRST}=components", "method.fedspm.n_components=2", "method.fedspm.warm_rounds=1000",
    ],
    "separate_3": ["method.fedspm.encoders=separate"],
    "separate_kmeans_3": ["method.fedspm.encoders=separate", f"{FIRST}=kmeans"],
    "random_2": ["method.fedspm.n_components=2"],
    "calibrated_3": [f"{FIRST}=kmeans", "method.fedspm.calibrate_gamma=3"],
    "batch_e_step_3": ["method.fedspm.e_step=batch"],
}  # fmt: skip


def main() -> None:
    """Run or resume the variants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    unknown = sorted(set(args.variants) - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    recipe = Path(__file__).with_name("fedspm_fmnist_small.toml")
    for variant in args.variants:
        out = args.out / f"fedspm_{variant}"
        changes = ["method.names=[fedspm]", *VARIANTS[variant], *args.overrides]
        experiment = replace(config.load(recipe, changes, methods=METHODS), name=out.name)
        begun = (out / "config.toml").is_file()
        summary = api.resume_experiment(out) if begun else api.run_experiment(experiment, out)
        print(variant, {run["seed"]: run["outside"] for run in summary["runs"]}, flush=True)


if __name__ == "__main__":
    main()
