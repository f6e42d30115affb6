"""Seconds per round of FedSPM with one component against a plain script that does the same round.

Package: `feddrm_separate` as `fedprism run` runs it, evaluation, metrics and checkpoint of every round
included. Rival: `rivals/file_loop.py`, whose docstring lists every difference; it runs in fp32. All of them
train the same networks on the same images with the same number of steps and score average, system and routing
accuracy once per round. They take turns in one process, forwards and backwards; quoted are medians of
rival / package.

    python benchmarks/fedspm_round.py [--backbone resnet_narrow] [--repetitions 7] [--threads 2] [--tiny]

Aims: 2 in fp32, 3 with bf16 and channels_last (left out where the processor has no bfloat16 instructions).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measuring import (
    PRECISIONS,
    RESULTS,
    InThread,
    Pause,
    Turn,
    load_experiment,
    median_seconds,
    package_run,
    ratio,
    take_turns,
    usable,
    warm_up,
    write_result,
)
from rivals import file_loop

from fedprism.data.image_federation import build_image_federation
from fedprism.models.vision import load_vision

AIMS = {"fp32": 2.0, "bf16_channels_last": 3.0}
CONFIG = """
name = "round"
seeds = [{seed}]
[data]
dataset = "fashion_mnist"
clients = {clients}
examples = {examples}
image_size = {image_size}
[model]
kind = "vision"
backbone = "{backbone}"
router_backbone = "{router_backbone}"
[method]
names = ["feddrm_separate"]
rounds = {rounds}
local_steps = {steps}
batch_size = {batch}
[method.feddrm_separate]
drm_steps = {drm_steps}
monitor_every = 0  # the rival has no such pass
[engine]
threads = {threads}
[evaluation]
test_every = 1
batch_size = {evaluated}
"""


@dataclass(frozen=True)
class Setting:
    """One measurement. examples: images of the pool, 0 = all. evaluated: rows per forward pass of the
    evaluation, on both sides. repetitions: turns that count. workers: processes per loader of the rival."""

    backbone: str = "resnet_narrow"
    router_backbone: str = "lenet"
    image_size: int = 32
    clients: int = 8
    examples: int = 0
    steps: int = 10
    drm_steps: int = 15
    batch: int = 128
    evaluated: int = 250
    repetitions: int = 7
    workers: int = 0
    threads: int = 2
    seed: int = 1

    @property
    def rounds(self) -> int:
        """Of every contestant: one that does not count, and the repetitions."""
        return self.repetitions + 1


TINY = Setting(
    backbone="lenet_small", router_backbone="lenet_small", image_size=14, clients=3, examples=700, steps=2,
    drm_steps=2, batch=16, repetitions=1, threads=1,
)  # fmt: skip


def rival(setting: Setting, folder: Path) -> InThread:
    """The plain script, in fp32."""
    folder.mkdir()

    def body(pause: Pause) -> None:
        federation = build_image_federation(
            dataset="fashion_mnist", clients=setting.clients, examples=setting.examples or None,
            size=setting.image_size, seed=setting.seed,
        )  # fmt: skip
        model = load_vision(setting.backbone, setting.router_backbone, image_size=setting.image_size)
        settings = file_loop.Settings(
            rounds=setting.rounds, steps=setting.steps, drm_steps=setting.drm_steps, batch=setting.batch,
            evaluated=setting.evaluated, size=setting.image_size, workers=setting.workers,
            threads=setting.threads, seed=setting.seed,
        )  # fmt: skip
        file_loop.run(model, federation, settings, folder, pause)

    return InThread(body)


def package(setting: Setting, precision: str, folder: Path) -> InThread:
    """The package with the model settings of that name."""
    folder.mkdir()
    text = CONFIG.format(rounds=setting.rounds, **asdict(setting))
    return InThread(package_run(load_experiment(text, folder, PRECISIONS[precision]), folder / "run"))


def accuracy_of(turn: Turn) -> dict[str, float]:
    """System, routing and average accuracy at the end of a turn of either side."""
    said = turn.facts["evaluation"]["outside"] if "evaluation" in turn.facts else turn.facts
    return {name: said[name] for name in ("system", "routing", "average")}


def losses_of(turns: Sequence[Turn]) -> dict[str, list[float]]:
    """Training losses of a contestant's turns in nats: of the classes and of the density ratios, where the
    package's stand higher by a constant, the mean of log n_i."""
    logs = [turn.facts.get("log", turn.facts) for turn in turns]
    return {
        "classes": [log.get("train_loss", log.get("loss")) for log in logs],
        "density_ratios": [log["drm_loss"] for log in logs],
    }


def measure(setting: Setting) -> dict[str, Any]:
    """All contestants in turn; ratios rival / package with their medians, losses and accuracies."""
    names, left_out = usable(list(PRECISIONS))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        contestants = {"rival": rival(setting, root / "rival")}
        contestants |= {name: package(setting, name, root / name) for name in names}
        warm_up(contestants)
        turns = take_turns(contestants, setting.repetitions)
        for contestant in contestants.values():
            contestant.finish()
    ratios = {name: ratio(turns["rival"], turns[name]) for name in names}
    evaluation = {name: [turn.facts["evaluation_seconds"] for turn in turns[name]] for name in names}
    return {
        "ratio": {name: found["ratio"] for name, found in ratios.items()} | left_out,
        "aim": AIMS,
        "ratios": ratios,
        "seconds": median_seconds(turns),
        "evaluation_seconds": evaluation,
        "losses": {name: losses_of(taken) for name, taken in turns.items()},
        "accuracy": {name: accuracy_of(taken[-1]) for name, taken in turns.items()},
        "setting": asdict(setting),
    }


def main() -> None:
    """Measure, print the ratios and write results/fedspm_round.json (nothing with --tiny)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("backbone", "router_backbone"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(Setting, name))
    for name in ("repetitions", "threads", "examples", "image_size", "workers", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting, name))
    parser.add_argument("--tiny", action="store_true", help="seconds: does it run? writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "fedspm_round.json")
    args = vars(parser.parse_args())
    out, tiny = args.pop("out"), args.pop("tiny")
    setting = TINY if tiny else replace(Setting(), **args)
    result = measure(setting)
    for name, found in result["ratio"].items():
        print(f"{name:20s} {found if isinstance(found, str) else f'{found:.2f} times as fast'}")
    if not tiny:
        write_result(out, result, seed=setting.seed, threads=setting.threads)


if __name__ == "__main__":
    main()
