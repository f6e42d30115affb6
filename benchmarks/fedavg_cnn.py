"""Seconds per round of FedAvg on a small CNN against `pfl` and Flower's simulation: the same work.

Eight clients, ten steps of 128 images each, SGD with momentum, the global model scored on every client's
validation rows once per round. The rivals start at the package's tensors and train on the very rows that the
package draws, so all must come to the same model: in fp32 their distance after two rounds, over the way from
the start, is checked (at most 1e-4) and recorded; later on rounding grows by itself. Rivals are the packages
with their own parts, see `rivals/pfl_fedavg.py` and `rivals/flower_fedavg.py`; images are finished for them
beforehand, while the package makes floats of bytes.

One rival at a time takes turns with the package, forwards and backwards; quoted are medians of rival /
package: "fp32" both in fp32; "bf16" the rival in fp32, the package in bf16 and channels_last; "bf16_both".
Flower runs with as many clients at a time as threads, and with one client on all threads ("flower_serial").
Starting up and the first two rounds do not count.

The rivals live in a Python of their own:

    python3 -m venv DIR && DIR/bin/pip install torch==2.13.0
    DIR/bin/pip install torch==2.13.0 pfl "flwr[simulation]>=1.42,<1.43"
    python benchmarks/fedavg_cnn.py --python DIR/bin/python [--rivals pfl flower flower_serial] [--tiny]

Aims, against the faster rival: 1.0 in fp32, 1.8 in bf16 (left out without bfloat16 instructions).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import (
    PRECISIONS,
    RESULTS,
    Contestant,
    InProcess,
    InThread,
    load_experiment,
    median_seconds,
    package_run,
    ratio,
    take_turns,
    usable,
    warm_up,
    write_result,
)

from fedprism import api
from fedprism.methods.fedavg import State
from fedprism.models.vision import UNPADDED_FROM
from fedprism.protocol import derive_seed
from fedprism.storage import RunDirectory
from fedprism.trees import Tree, norm, sub

AIMS = {"fp32": 1.0, "bf16": 1.8}
UNCOUNTED = 2  # rounds before the measurement, after which the two sides' models are compared
FAR_APART = 1e-4  # of these models, over the way from the start, in fp32
DRIVERS = Path(__file__).resolve().parent / "rivals"
RIVALS = ("pfl", "flower", "flower_serial")
PACKAGES = ("pfl", "flwr", "ray", "torch", "numpy")
CONFIG = """
name = "fedavg"
seeds = [{seed}]
[data]
dataset = "fashion_mnist"
clients = {clients}
examples = {examples}
image_size = {image_size}
validation_fraction = 0.3
[model]
kind = "vision"
backbone = "{backbone}"
router_backbone = "lenet_small"  # FedAvg has no use for it
[method]
names = ["fedavg"]
rounds = {rounds}
local_steps = {steps}
batch_size = {batch}
lr = {lr}
optimizer = "sgd"
momentum = {momentum}
weight_decay = {decay}
clip = 0.0
[engine]
threads = {threads}
[evaluation]
validation_every = 1
batch_size = {evaluated}
"""


@dataclass(frozen=True)
class Setting:
    """One measurement. examples: images of the pool, 0 = all. evaluated: rows per forward pass of the
    evaluation. repetitions: turns that count."""

    backbone: str = "lenet"
    image_size: int = 32
    clients: int = 8
    examples: int = 0
    steps: int = 10
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    decay: float = 5e-4
    evaluated: int = 250
    repetitions: int = 7
    threads: int = 2
    seed: int = 1

    @property
    def rounds(self) -> int:
        """Uncounted ones, the repetitions, and the last one, which the package scores on more."""
        return UNCOUNTED + self.repetitions + 1


TINY = Setting(
    backbone="lenet_small",
    image_size=14,
    clients=3,
    examples=700,
    steps=2,
    batch=16,
    repetitions=1,
    threads=1,
)


def hand_out(setting: Setting, folder: Path) -> None:
    """Write the work for the rivals: images as bytes, the start, the rows of every step, settings."""
    experiment = load_experiment(config_of(setting), folder, PRECISIONS["fp32"])
    model, federation = api.Workshop(experiment, api.Silent()).get(setting.seed)
    arrays: dict[str, Any] = {
        f"start/{name}": value.numpy() for name, value in model.trainable(setting.seed).items()
    }
    clients: list[dict[str, Any]] = [dict(client) for client in federation.clients]
    for k, client in enumerate(clients):
        for split in ("train", "validation"):
            arrays[f"x_{split}_{k}"] = client[split].inputs.numpy()
            arrays[f"y_{split}_{k}"] = client[split].columns["label"].numpy()
    rows, lengths = [], np.zeros((setting.rounds, setting.clients, setting.steps), dtype=np.int64)
    for t in range(setting.rounds):
        for k, client in enumerate(clients):
            ids = client["train"].columns["row"]
            order = ids.argsort()
            draw = torch.Generator().manual_seed(derive_seed(setting.seed, t, 0, "update", k))
            batches = client["train"].batches(setting.batch, steps=setting.steps, generator=draw)
            for s, batch in enumerate(batches):
                rows.append(order[torch.searchsorted(ids[order], batch["row"])])
                lengths[t, k, s] = len(rows[-1])
    arrays |= {"plan_rows": torch.cat(rows).numpy(), "plan_lengths": lengths}
    np.savez(folder / "work.npz", **arrays)
    settings = {
        **asdict(setting), "rounds": setting.rounds, "save_after": UNCOUNTED,
        "padding": 0 if setting.image_size >= UNPADDED_FROM else 2,
    }  # fmt: skip
    (folder / "work.json").write_text(json.dumps(settings), encoding="utf-8")


def config_of(setting: Setting) -> str:
    """The package's experiment as TOML."""
    return CONFIG.format(rounds=setting.rounds, **asdict(setting))


def rival(name: str, precision: str, setting: Setting, python: str, work: Path, folder: Path) -> InProcess:
    """A driver in a process of its own; after UNCOUNTED rounds it writes its model to folder/model.npz."""
    folder.mkdir()
    last = [work, precision, setting.threads, folder / "model.npz"]
    if name != "pfl":
        last.append(setting.threads if name == "flower_serial" else 1)
    script = DRIVERS / ("pfl_fedavg.py" if name == "pfl" else "flower_fedavg.py")
    env = {
        "PYTHONPATH": str(DRIVERS), "OMP_NUM_THREADS": str(setting.threads), "FLWR_HOME": str(folder / "home")
    }  # fmt: skip
    return InProcess([python, str(script), *map(str, last)], folder / "log.txt", env)


def package(setting: Setting, precision: str, folder: Path) -> InThread:
    """The package with the model settings of that name."""
    folder.mkdir()
    return InThread(
        package_run(load_experiment(config_of(setting), folder, PRECISIONS[precision]), folder / "run")
    )


def relative_distance(run: Path, rival_model: Path, work: Path) -> float:
    """Of package and rival now, over the distance of the package from the start."""
    restored = RunDirectory.open(run).load_checkpoint(State)
    if restored is None:
        raise RuntimeError("fedavg_cnn: the package left no checkpoint")
    ours: Tree = restored[1].w
    with np.load(rival_model, allow_pickle=False) as z:
        theirs = {name: torch.from_numpy(z[name]) for name in z.files}
    with np.load(work / "work.npz", allow_pickle=False) as z:
        start = {name: torch.from_numpy(z[f"start/{name}"]) for name in ours}
    return norm(sub(ours, theirs)) / norm(sub(ours, start))


def pairing(
    name: str, precision: str, ours: Sequence[str], setting: Setting, python: str, work: Path
) -> dict[str, Any]:
    """One rival in turn with the package in the given precisions."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        driver = rival(name, precision, setting, python, work, root / "rival")
        contestants: dict[str, Contestant] = {name: driver}
        contestants |= {which: package(setting, which, root / which) for which in ours}
        try:
            warm_up(contestants, UNCOUNTED)
            apart = None
            if precision == "fp32":
                apart = relative_distance(root / "fp32" / "run", root / "rival" / "model.npz", work)
                if not apart <= FAR_APART:
                    raise RuntimeError(f"fedavg_cnn: {name} is {apart:.2g} of the way off, needs {FAR_APART}")
            turns = take_turns(contestants, setting.repetitions)
            for contestant in contestants.values():
                contestant.turn()
                contestant.finish()
        finally:
            driver.abort()
    scored = {which: turns[which][-1].facts["evaluation"]["validation"] for which in ours}
    return {
        "rival_precision": precision,
        "ratios": {which: ratio(turns[name], turns[which]) for which in ours},
        "seconds": median_seconds(turns),
        "relative_distance": apart,
        "accuracy": {name: turns[name][-1].facts["accuracy"]} | {w: mean(s) for w, s in scored.items()},
    }


def mean(scored: Mapping[str, Any]) -> float:
    """Accuracy over all clients' rows."""
    right = sum(a * n for a, n in zip(scored["accuracy"], scored["n"], strict=True))
    return float(right / sum(scored["n"]))


def rival_versions(python: str) -> dict[str, str]:
    """Versions of the rivals' packages. Raises SystemExit, one line, where they are not installed."""
    code = f"import importlib.metadata as m; print({{p: m.version(p) for p in {PACKAGES!r}}})"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = (asked.stderr.splitlines() or ["no message"])[-1]
        raise SystemExit(f"fedavg_cnn: {python} can't run the rivals ({reason}); make it as --help says")
    found: dict[str, str] = json.loads(asked.stdout.replace("'", '"'))
    return found


def measure(setting: Setting, python: str, rivals: Sequence[str]) -> dict[str, Any]:
    """All pairings; ratios rival / package."""
    names, left_out = usable(list(PRECISIONS))
    ratios: dict[str, dict[str, float]] = {}
    pairings = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        hand_out(setting, work)
        for name in rivals:
            pairings[name] = found = pairing(name, "fp32", names, setting, python, work)
            ratios[name] = {which: found["ratios"][which]["ratio"] for which in names}
            ratios[name] = {
                "bf16" if which == "bf16_channels_last" else which: value
                for which, value in ratios[name].items()
            }
            if "bf16_channels_last" in names:
                pairings[f"{name}_bf16"] = found = pairing(
                    name, "bf16", ["bf16_channels_last"], setting, python, work
                )
                ratios[name]["bf16_both"] = found["ratios"]["bf16_channels_last"]["ratio"]
    against_fastest = {which: min(row[which] for row in ratios.values()) for which in ratios[rivals[0]]}
    return {
        "ratio": against_fastest | left_out,
        "aim": AIMS,
        "ratio_by_rival": ratios,
        "pairings": pairings,
        "setting": asdict(setting),
    }


def main() -> None:
    """Measure, print the ratios and write results/fedavg_cnn.json (nothing with --tiny)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the environment that has the rivals")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--backbone", choices=("lenet", "lenet_small"), default=Setting.backbone)
    for name in ("repetitions", "threads", "examples", "image_size", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting, name))
    parser.add_argument("--tiny", action="store_true", help="a minute: does it run? writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "fedavg_cnn.json")
    args = vars(parser.parse_args())
    out, tiny, python, rivals = (args.pop(name) for name in ("out", "tiny", "python", "rivals"))
    found = rival_versions(python)
    setting = TINY if tiny else replace(Setting(), **args)
    result = measure(setting, python, rivals)
    for name, row in result["ratio_by_rival"].items():
        print(name, {which: round(value, 3) for which, value in row.items()})
    if not tiny:
        result["rival_versions"] = found
        write_result(out, result, seed=setting.seed, threads=setting.threads)


if __name__ == "__main__":
    main()
