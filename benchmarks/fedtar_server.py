"""What FedTAR's server step costs: the Gram form against a thin SVD with the explicit map, within one run.

sizes      (d, N): one server step on N updates of d float32 values in memory. Rival: a thin
           `torch.linalg.svd` of the d x N updates, the map M = U (S V^T W), and B_g through M; the package:
           Gram matrix by blocks, coefficients, combination. Contestants take turns; steps agree to 1e-5
streamed   (d, N) from safetensors files of one update each, in two passes: seconds and peak memory of a
           process of its own; agreement with updates in memory where those fit (tiny)

    python benchmarks/fedtar_server.py [sizes streamed] [--repetitions 5] [--folder DIR] [--tiny]

"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import RESULTS, Turn, median_seconds, ratio, write_result
from safetensors.torch import save_file
from torch import Tensor

from fedprism.methods.task_coefficients import MapSettings, fedtar_coefficients, map_weights, ridge_inverse
from fedprism.methods.task_space import cluster, group_weights
from fedprism.methods.update_gram import StoredUpdates, blocks, combine, grams
from fedprism.trees import Tree

FAR_APART = 1e-5  # of the steps, over the norm of one
RANK, GROUPS = 4, 5


@dataclass(frozen=True)
class Setting:
    """One measurement. sizes: (d, N) in memory. streamed: (d, N) from files. repetitions: of each step."""

    sizes: tuple[tuple[int, int], ...] = ((1_000_000, 100), (10_000_000, 10))
    streamed: tuple[int, int] = (10_000_000, 200)
    repetitions: int = 5
    threads: int = 1
    seed: int = 1


TINY = Setting(sizes=((20_000, 12), (50_000, 5)), streamed=(70_000, 6), repetitions=1)


def draw(d: int, n: int, seed: int, k: int) -> Tensor:
    """(d,) update of client k: what all share, what its group shares, and its own."""
    parts = [
        torch.randn(d, generator=torch.Generator().manual_seed(seed * 10_007 + s)) for s in (k % 3, 3, 9 + k)
    ]
    return parts[0] + parts[1] + 0.5 * parts[2]


def coordinates(n: int, seed: int) -> tuple[Any, Any]:
    """Z (r, N), centred, and groups."""
    z = np.random.default_rng(seed).normal(size=(n, min(RANK, n - 2))) + 3.0 * (np.arange(n) % 3)[:, None]
    z -= z.mean(0)
    return z.T, cluster(z, min(GROUPS, n))[0]


def gram_step(updates: Sequence[Tree], Z: Any, labels: Any) -> Tensor:
    """The package's step, as `fedtar.aggregate` takes it."""
    (G,) = grams(blocks(updates), len(updates)).values()
    beta, _ = fedtar_coefficients(G, Z, labels, MapSettings())
    return combine(blocks(updates), updates[0], lambda name: beta)["lora_B.0.down"]


def svd_step(delta: Tensor, Z: Any, labels: Any) -> Tensor:
    """Thin SVD of the (d, N) updates, the explicit (d, r) map and the projection of the clustered average."""
    cfg, n = MapSettings(), delta.shape[1]
    p = np.full(n, 1 / n)
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    core = (s[:, None] * vh).double()
    W = torch.from_numpy(map_weights(Z, cfg, p))
    M = u @ (core @ W).float()  # (d, r)
    square = (M.T @ M).double().numpy()
    inverse = ridge_inverse(square, cfg.rho_p * float(np.trace(square)) / len(square))
    a = group_weights(Z.T, labels)[1]
    mean, clustered = (delta @ torch.from_numpy(w).float() for w in (p, a))
    return mean + M @ torch.from_numpy(inverse).float() @ (M.T @ (clustered - mean))


def timed(step: Callable[[], Tensor]) -> tuple[Turn, Tensor]:
    """One call, its seconds and its result."""
    started = time.perf_counter()
    result = step()
    return Turn(time.perf_counter() - started, {}), result


def sizes(setting: Setting, folder: Path) -> dict[str, Any]:
    """Steps in memory: svd / gram, and how far apart their results are."""
    torch.set_num_threads(setting.threads)
    found: dict[str, Any] = {"ratio": {}}
    for d, n in setting.sizes:
        rows = torch.stack([draw(d, n, setting.seed, k) for k in range(n)])
        updates, delta = [{"lora_B.0.down": row} for row in rows], rows.T.contiguous()
        Z, labels = coordinates(n, setting.seed)
        steps = {
            "svd": lambda delta=delta, Z=Z, labels=labels: svd_step(delta, Z, labels),
            "gram": lambda updates=updates, Z=Z, labels=labels: gram_step(updates, Z, labels),
        }
        turns: dict[str, list[Turn]] = {name: [] for name in steps}
        results = {name: step() for name, step in steps.items()}  # also the turns that do not count
        apart = float((results["svd"] - results["gram"]).norm() / results["gram"].norm())
        if apart > FAR_APART:
            raise RuntimeError(f"sizes: steps of d = {d}, N = {n} differ by {apart:.2g}, needs {FAR_APART:g}")
        for k in range(setting.repetitions):
            for name in list(steps)[:: 1 if k % 2 == 0 else -1]:
                turns[name].append(timed(steps[name])[0])
        compared = ratio(turns["svd"], turns["gram"])
        key = f"d={d},N={n}"
        found["ratio"][key] = compared["ratio"]
        found[key] = {**compared, "seconds": median_seconds(turns), "difference": apart}
    return found


def streamed_step(folder: Path, seed: int) -> dict[str, Any]:
    """One step from the files of a folder: seconds of both passes, peak memory of this process in MiB."""
    stored = StoredUpdates(sorted(folder.glob("*.safetensors")))
    n = len(stored)
    Z, labels = coordinates(n, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.perf_counter()
    (G,) = grams(stored.blocks(), n).values()
    first = time.perf_counter() - started
    beta, _ = fedtar_coefficients(G, Z, labels, MapSettings())
    step = combine(stored.blocks(), stored.like, lambda name: beta)["lora_B.0.down"]
    seconds = time.perf_counter() - started
    save_file({"step": step}, folder / "step.result")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "first_pass": first, "peak_mib": peak, "before_mib": before}


def streamed(setting: Setting, folder: Path) -> dict[str, Any]:
    """Writes N updates, takes a step in a process of its own, and removes them. Compares with the step in
    memory where the updates take less than a gigabyte."""
    (d, n), place = setting.streamed, Path(tempfile.mkdtemp(dir=folder))
    need, free = 4.2 * d * n, shutil.disk_usage(place).free
    try:
        if need > free:
            raise RuntimeError(
                f"streamed: {need / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free; name another --folder"
            )
        for k in range(n):
            update = {"lora_B.0.down": draw(d, n, setting.seed, k)}
            save_file(update, place / f"{k:05d}.safetensors")
        command = [sys.executable, __file__, "--child", str(place), "--seed", str(setting.seed)]
        told = subprocess.run(
            [*command, "--threads", str(setting.threads)], check=True, capture_output=True, text=True
        ).stdout  # fmt: skip
        found: dict[str, Any] = json.loads(told.splitlines()[-1])
        found |= {"d": d, "N": n, "updates_gib": 4 * d * n / 2**30}
        if 4 * d * n < 2**30:
            from safetensors.torch import load_file

            updates = [{"lora_B.0.down": draw(d, n, setting.seed, k)} for k in range(n)]
            expected, step = (
                gram_step(updates, *coordinates(n, setting.seed)),
                load_file(place / "step.result")["step"],
            )
            found["difference"] = float((step - expected).norm() / expected.norm())
            if found["difference"] > FAR_APART:
                raise RuntimeError(f"streamed: differs by {found['difference']:.2g}, needs {FAR_APART:g}")
        return found
    finally:
        shutil.rmtree(place)


PARTS = {"sizes": sizes, "streamed": streamed}


def main() -> None:
    """Measure the named parts (all by default), print them, write results/fedtar_server.json (not tiny)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    for name in ("repetitions", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the streamed updates"
    )
    parser.add_argument("--tiny", action="store_true", help="seconds: does it run? writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "fedtar_server.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    out, tiny, parts, child = (args.pop(key) for key in ("out", "tiny", "parts", "child"))
    folder = args.pop("folder")
    if child is not None:
        torch.set_num_threads(args["threads"])
        print(json.dumps(streamed_step(child, args["seed"])))
        return
    setting = TINY if tiny else replace(Setting(), **args)
    result: dict[str, Any] = {"setting": asdict(setting)}
    for part in parts or list(PARTS):
        result[part] = PARTS[part](setting, folder)
        print(part, json.dumps(result[part], indent=1))
    if not tiny:
        write_result(out, result, seed=setting.seed, threads=setting.threads)


if __name__ == "__main__":
    main()
