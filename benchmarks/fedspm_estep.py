"""What FedSPM's E-step costs, and what makes it cheaper. Ratios within one run, three components.

estep      the E-step over all rows against the rows that the round will draw (`e_step = "batch"`), and fp32
           against channels_last with and without bf16: seconds of the phases `e_step` and `m_step`, as the
           package's engine counts them. Contestants take turns, a round each
clients    one supervised gradient step of all clients: one client after another, as the package trains them,
           against `torch.func.vmap` over stacked trees, in fp32; loop / vmap. The package doesn't offer the
           latter; the step is written here, on its networks, to tell whether it should

    python benchmarks/fedspm_estep.py [estep clients] [--backbone resnet_narrow] [--repetitions 7] [--tiny]

bf16 is left out where the processor has no bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    PRECISIONS,
    RESULTS,
    InThread,
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
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.networks import NetworkModel
from fedprism.models.vision import load_vision
from fedprism.trees import Tree

CONFIG = """
name = "estep"
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
names = ["fedspm"]
rounds = {rounds}
local_steps = {steps}
batch_size = {batch}
[method.fedspm]
n_components = {components}
drm_steps = {drm_steps}
e_step = "{e_step}"
[engine]
threads = {threads}
[evaluation]
batch_size = 250
"""
FAR_APART = 1e-4  # of gradients, over their largest entry, in fp32
VARIANTS = (*((name, "full") for name in PRECISIONS), ("fp32", "batch"), ("bf16_channels_last", "batch"))


@dataclass(frozen=True)
class Setting:
    """One measurement. examples: images of the pool, 0 = all. repetitions: turns that count."""

    backbone: str = "resnet_narrow"
    router_backbone: str = "lenet"
    image_size: int = 32
    clients: int = 8
    components: int = 3
    examples: int = 0
    steps: int = 10
    drm_steps: int = 15
    batch: int = 128
    repetitions: int = 7
    threads: int = 2
    seed: int = 1

    @property
    def rounds(self) -> int:
        """One that does not count, the repetitions, and the last one, which is scored."""
        return self.repetitions + 2


TINY = Setting(
    backbone="lenet_small", router_backbone="lenet_small", image_size=14, clients=3, examples=700, steps=2,
    drm_steps=2, batch=16, repetitions=1, threads=1,
)  # fmt: skip


def phase_turns(turns: Sequence[Turn], phase: str) -> list[Turn]:
    """The same turns, with the seconds of one phase."""
    return [Turn(turn.facts["phases"][phase]["seconds"], turn.facts) for turn in turns]


def estep(setting: Setting) -> dict[str, Any]:
    """E-steps over all and over drawn rows, in every precision the processor has."""
    names, left_out = usable(list(PRECISIONS))
    chosen = [(name, rows) for name, rows in VARIANTS if name in names]
    with tempfile.TemporaryDirectory() as scratch:
        contestants = {}
        for name, rows in chosen:
            folder = Path(scratch) / f"{name}_{rows}"
            folder.mkdir()
            text = CONFIG.format(rounds=setting.rounds, e_step=rows, **asdict(setting))
            experiment = load_experiment(text, folder, PRECISIONS[name])
            contestants[f"{name}_{rows}"] = InThread(package_run(experiment, folder / "run"))
        warm_up(contestants)
        turns = take_turns(contestants, setting.repetitions)
        for contestant in contestants.values():
            contestant.turn()  # the last round, which scores the clients
            contestant.finish()
    e = {name: phase_turns(taken, "e_step") for name, taken in turns.items()}
    m = {name: phase_turns(taken, "m_step") for name, taken in turns.items()}
    share = {
        name: [a.seconds / (a.seconds + b.seconds) for a, b in zip(e[name], m[name], strict=True)]
        for name in turns
    }
    fp32 = "fp32_full"
    ratios = {
        "e_step_full_over_batch": {
            name: ratio(e[f"{name}_full"], e[f"{name}_batch"]) for name in names if f"{name}_batch" in e
        },
        "e_step_fp32_over": {name: ratio(e[fp32], e[f"{name}_full"]) for name in names if name != "fp32"},
        "m_step_fp32_over": {name: ratio(m[fp32], m[f"{name}_full"]) for name in names if name != "fp32"},
        "round_fp32_full_over": {name: ratio(turns[fp32], turns[name]) for name in turns if name != fp32},
    }
    quoted = {what: {name: found["ratio"] for name, found in group.items()} for what, group in ratios.items()}
    return {
        "ratio": quoted,
        "e_step_share": {name: statistics.median(values) for name, values in share.items()},
        "left_out": left_out,
        "ratios": ratios,
        "seconds": {"round": median_seconds(turns), "e_step": median_seconds(e), "m_step": median_seconds(m)},
    }


# --- one client after another, or all at once --------------------------------------------------------------


def client_steps(setting: Setting) -> dict[str, Callable[[], Tree]]:
    """One supervised gradient of every client in fp32, stacked (m, ...): in a loop, in a loop with
    channels_last, and by vmap over stacked trees, for which torch has neither channels_last nor bf16.

    Clients differ in their trees and batches; images are drawn at random, which time does not depend on."""
    m, side = setting.clients, setting.image_size
    names = setting.backbone, setting.router_backbone
    plain, laid_out = (load_vision(*names, image_size=side, channels_last=last) for last in (False, True))
    draw = torch.Generator().manual_seed(setting.seed)
    x = torch.rand(m, setting.batch, 3, side, side, generator=draw) * 2 - 1
    label = torch.randint(plain.n_classes, (m, setting.batch), generator=draw)
    own = [plain.trainable(setting.seed + k) for k in range(m)]
    stacked = {name: torch.stack([tree[name] for tree in own]) for name in own[0]}

    def loss(model: NetworkModel, tree: Tree, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model.apply(tree, {"x": x}).logits, label)

    def loop(model: NetworkModel) -> Tree:
        found = []
        for k, tree in enumerate(own):
            leaves = {name: value.detach().requires_grad_() for name, value in tree.items()}
            gradients = torch.autograd.grad(loss(model, leaves, x[k], label[k]), list(leaves.values()))
            found.append(dict(zip(leaves, gradients, strict=True)))
        return {name: torch.stack([tree[name] for tree in found]) for name in stacked}

    at_once = torch.func.vmap(torch.func.grad(partial(loss, plain)))
    return {
        "loop": partial(loop, plain),
        "loop_channels_last": partial(loop, laid_out),
        "vmap": partial(at_once, stacked, x, label),
    }


def timed(step: Callable[[], Tree]) -> Turn:
    """One call of a step."""
    started = time.perf_counter()
    step()
    return Turn(time.perf_counter() - started, {})


def clients(setting: Setting) -> dict[str, Any]:
    """Loops over clients against vmap, which must give the same gradients; ratios loop / vmap."""
    torch.set_num_threads(setting.threads)
    steps = client_steps(setting)
    gradients = {name: step() for name, step in steps.items()}  # also the turns that do not count
    apart = {name: relative_distance(gradients["vmap"], tree) for name, tree in gradients.items()}
    if max(apart.values()) > FAR_APART:
        raise RuntimeError(f"clients: gradients differ from vmap's by {apart}, needs {FAR_APART}")
    turns: dict[str, list[Turn]] = {name: [] for name in steps}
    for k in range(setting.repetitions):
        for name in list(steps)[:: 1 if k % 2 == 0 else -1]:
            turns[name].append(timed(steps[name]))
    ratios = {name: ratio(turns[name], turns["vmap"]) for name in steps if name != "vmap"}
    return {
        "ratio": {name: found["ratio"] for name, found in ratios.items()},
        "ratios": ratios,
        "seconds": median_seconds(turns),
        "difference": apart,
    }


def relative_distance(a: Tree, b: Tree) -> float:
    """Largest difference of two trees over the largest entry of the first."""
    largest = max(float(value.abs().max()) for value in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest


PARTS = {"estep": estep, "clients": clients}


def main() -> None:
    """Measure the named parts (all by default), print ratios, write results/fedspm_estep.json (not tiny)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    for name in ("backbone", "router_backbone"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(Setting, name))
    for name in ("repetitions", "threads", "examples", "image_size", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting, name))
    parser.add_argument("--tiny", action="store_true", help="seconds: does it run? writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "fedspm_estep.json")
    args = vars(parser.parse_args())
    out, tiny, parts = args.pop("out"), args.pop("tiny"), args.pop("parts") or list(PARTS)
    setting = TINY if tiny else replace(Setting(), **args)
    result: dict[str, Any] = {"setting": asdict(setting)}
    for part in parts:
        result[part] = PARTS[part](setting)
        print(part, json.dumps(result[part]["ratio"], indent=1), result[part].get("left_out", ""))
    if not tiny:
        write_result(out, result, seed=setting.seed, threads=setting.threads)


if __name__ == "__main__":
    main()
