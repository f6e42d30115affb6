"""What FedSEE costs on real text: padding, extraction, the pool, memory. Ratios within one run.

trimmed     a training epoch over the six tasks in trimmed, length-bucketed batches against the same rows
            padded to 128 tokens; the two alternate. Quoted: padded / trimmed seconds.
extraction  share of a FedSEE round's training and extraction time that extraction takes, 12 clients whose
            examples per round are at least three times the extraction's
pool        seconds of one extraction with 192 uploads over 12 uploads, same model and public batches
memory      peak resident memory of one process that runs FedSEE with 12 and with 100 clients

python benchmarks/fedsee_costs.py [trimmed extraction pool memory] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedprism import api, config
from fedprism.data.federation import build_text_federation
from fedprism.methods.expert_extraction import PublicLosses, extract, warm_start
from fedprism.methods.registry import METHODS
from fedprism.models.encoder import load_encoder
from fedprism.storage import RunDirectory, versions
from fedprism.training import adamw
from fedprism.trees import flatten

TASKS = ("sst2", "qnli", "cola", "qqp", "wic", "boolq")
RESULTS = Path(__file__).resolve().parent / "results"
CONFIG = """
name = "cost"
seeds = [1]
[data]
tasks = ["sst2", "qnli", "cola", "qqp", "wic", "boolq"]
clients = {clients}
alpha = 1.0
train_per_task = {per_task}
public_per_task = 64
validation_per_client = 8
test_per_client = 8
[model]
max_length = 48
[method]
names = ["fedsee"]
rounds = {rounds}
batch_size = 16
[method.fedsee]
init_epochs = 1
public_batch = 8
extract_steps = {steps}
frame_rows = 0
table_rows = 0
[engine]
threads = {threads}
"""


def experiment(folder: Path, **values: int) -> config.Experiment:
    """The experiment of CONFIG with the given numbers."""
    path = folder / "cost.toml"
    path.write_text(CONFIG.format(**values), encoding="utf-8")
    return config.load(path, methods=METHODS)


def run(folder: Path, **values: int) -> list[dict[str, Any]]:
    """One FedSEE run; returns its metrics."""
    setting = experiment(folder, **values)
    directory = RunDirectory.create(folder / "run")
    watch = api.Silent()
    api.run_method(setting, "fedsee", 1, directory, api.Workshop(setting, watch), watch)
    return directory.read_metrics()


def trimmed(threads: int) -> dict[str, Any]:
    """Seconds of the same training rows, padded to 128 against trimmed and bucketed."""
    model = load_encoder("minilm", head_scale=1.0, max_length=128, precision="fp32", seed=0)
    federation = build_text_federation(
        tasks=TASKS, clients=6, partition="pure", train_per_task=192, public_per_task=8,
        validation_per_client=64,
        test_per_client=8, min_examples=64, max_length=128, tokenizer=model.tokenizer, seed=0,
    )  # fmt: skip
    rows = federation.pooled["train"]
    tree = {**model.init("lora_A", 0), **model.init("lora_B", 0)}

    def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        width = 128 - batch["input_ids"].shape[1]
        return {k: torch.nn.functional.pad(v, (0, width)) if v.dim() == 2 else v for k, v in batch.items()}

    def epoch(batches: list[dict[str, torch.Tensor]]) -> float:
        dropout = torch.Generator().manual_seed(0)

        def loss(now: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return model.per_example_loss(model.apply(now, batch, generator=dropout), batch).mean()

        started = time.perf_counter()
        adamw(loss, tree, batches, 1e-3)
        return time.perf_counter() - started

    short = list(rows.batches(32, epochs=1, generator=torch.Generator().manual_seed(0)))
    long = [padded(batch) for batch in short]
    epoch(short[:2])
    seconds = [(epoch(long), epoch(short)) for _ in range(3)]
    return {
        "rows": len(rows),
        "mean_width_trimmed": sum(b["input_ids"].numel() for b in short) / len(rows),
        "ratio_padded_over_trimmed": statistics.median(a / b for a, b in seconds),
        "ratios": [a / b for a, b in seconds],
    }


def extraction(threads: int) -> dict[str, Any]:
    """Extraction's share of the update rounds' training and extraction time."""
    with tempfile.TemporaryDirectory() as folder:
        lines = run(Path(folder), clients=12, per_task=500, rounds=3, steps=15, threads=threads)
    shares, examples = [], []
    for line in lines[1:]:
        up, ex = line["phases"]["update"], line["phases"]["extract"]
        shares.append(ex["seconds"] / (ex["seconds"] + up["seconds"]))
        examples.append((up["examples"], ex["examples"]))
    return {"share_of_round": shares, "examples_clients_and_extraction": examples}


def pool(threads: int) -> dict[str, Any]:
    """One extraction over 192 uploads against one over 12, alternating."""
    torch.set_num_threads(threads)
    model = load_encoder("minilm", head_scale=1.0, max_length=48, precision="fp32", seed=0)
    federation = build_text_federation(
        tasks=TASKS, clients=6, partition="pure", train_per_task=64, public_per_task=64,
        validation_per_client=8,
        test_per_client=8, min_examples=8, max_length=48, tokenizer=model.tokenizer, seed=0,
    )  # fmt: skip
    down, like = model.init("lora_A", 0), model.init("lora_B", 0)
    size, rows = len(flatten(like)), [federation.public[task] for task in TASKS]

    def seconds(uploads: int) -> float:
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(uploads, size, generator=generator) * 0.01
        keys = [(i % 12, i // 12) for i in range(uploads)]
        losses = PublicLosses(model, {}, down, like, rows, size=8, chunk=64, steps=5, generator=generator)
        started = time.perf_counter()
        extract(losses.gradient, matrix, [k for k, _ in keys], warm_start(keys, 6, [], None), steps=5)
        return time.perf_counter() - started

    seconds(12)
    pairs = [(seconds(192), seconds(12)) for _ in range(5)]
    return {
        "ratio_192_over_12_uploads": statistics.median(a / b for a, b in pairs),
        "ratios": [a / b for a, b in pairs],
    }


def memory(threads: int) -> dict[str, Any]:
    """Peak memory of fresh processes with 12 and with 100 clients."""
    peaks = {}
    for clients in (12, 100):
        code = [sys.executable, __file__, "--child", str(clients), "--threads", str(threads)]
        done = subprocess.run(code, capture_output=True, text=True, check=True)
        peaks[str(clients)] = json.loads(done.stdout.splitlines()[-1])
    growth = peaks["100"]["peak_bytes"] - peaks["12"]["peak_bytes"]
    return {
        "peaks": peaks,
        "growth_bytes_per_client": growth / 88,
        "ratio_100_over_12": peaks["100"]["peak_bytes"] / peaks["12"]["peak_bytes"],
    }


def peak_memory() -> int:
    """Peak resident bytes of this process alone; getrusage would carry over the parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [text for text in status.read_text().splitlines() if text.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(clients: int, threads: int) -> None:
    """Run FedSEE once and print the peak memory of this process and what a client keeps."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), clients=clients, per_task=40 * clients // 6, rounds=2, steps=2, threads=threads)
        checkpoint = max((Path(folder) / "run" / "checkpoints").glob("*/clients.safetensors"))
        kept = checkpoint.stat().st_size
    print(json.dumps({"peak_bytes": peak_memory(), "client_state_bytes": kept / clients}))


def main() -> None:
    """Run the named parts (all by default) and merge them into results/fedsee_costs.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"trimmed": trimmed, "extraction": extraction, "pool": pool, "memory": memory}
    parser.add_argument("parts", nargs="*", help=", ".join(parts))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        child(args.child, args.threads)
        return
    path = RESULTS / "fedsee_costs.json"
    RESULTS.mkdir(exist_ok=True)
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in args.parts or parts:
        result[name] = parts[name](args.threads)
        print(name, json.dumps(result[name]))
        result["versions"] = {**versions(), "threads": args.threads}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
