"""Writes run directories in fedprism's format, with invented numbers, so that reports can be tested."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedprism.evaluation import metrics

TASKS = ("sst2", "qnli", "cola", "qqp", "wic", "boolq", "rte", "mrpc", "wnli")
LEVEL = {"fedsee": 0.03, "local_only": 0.0, "fedit": -0.05, "public_only": -0.07, "untrained": -0.25}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_config(
    folder: Path, name: str, methods: Sequence[str], seeds: Sequence[int], clients: int, rounds: int
) -> None:
    """Writes the part of config.toml that reports read."""
    lines = [
        f"name = {json.dumps(name)}",
        f"seeds = {list(seeds)}",
        "[data]",
        'partition = "dirichlet"',
        "alpha = 0.1",
        f"clients = {clients}",
        "[method]",
        f"names = {json.dumps(list(methods))}",
        f"rounds = {rounds}",
    ]
    (folder / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def federation(seed: int, clients: int, n_tasks: int) -> dict[str, Any]:
    """Describes a Dirichlet federation whose first clients are pure."""
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet(np.full(n_tasks, 0.15), size=clients)
    mixtures = np.where(mixtures < 0.05, 0, mixtures)
    mixtures[: min(3, clients)] = np.eye(n_tasks)[np.arange(min(3, clients)) % n_tasks]
    mixtures /= mixtures.sum(1, keepdims=True)
    counts = np.floor(mixtures * 200).astype(int)
    return {
        "fingerprint": hashlib.sha256(f"{seed} {clients} {n_tasks}".encode()).hexdigest(),
        "tasks": list(TASKS[:n_tasks]),
        "client_sizes": counts.sum(1).tolist(),
        "counts": counts.tolist(),
        "mixtures": {
            "sampled": mixtures.tolist(),
            "thresholded": mixtures.tolist(),
            "realised": (counts / counts.sum(1, keepdims=True)).tolist(),
        },
        "public_sizes": dict.fromkeys(TASKS[:n_tasks], 1000),
        "notes": [f"test rows of {TASKS[n_tasks - 1]} are used by more than one client"],
    }


def evaluation(
    rng: np.random.Generator, fed: dict[str, Any], level: float, routed: bool, layers: int
) -> dict[str, Any]:
    mixtures = np.asarray(fed["mixtures"]["thresholded"])
    n, m = mixtures.shape
    difficulty = np.linspace(0.9, 0.62, m)
    accuracy = np.clip(mixtures @ difficulty + level + rng.normal(0, 0.02, n), 0, 1).round(3)
    task = np.clip(difficulty + level + rng.normal(0, 0.01, m), 0, 1)
    result: dict[str, Any] = {
        "accuracy": accuracy.tolist(),
        "loss": (1 - accuracy).tolist(),
        "n": [200] * n,
        "per_task": {
            name: {"correct": int(400 * a), "n": 400} for name, a in zip(fed["tasks"], task, strict=True)
        },
    }
    if routed:
        names = [
            f"encoder.layer.{k}.attention.self.{part}" for k in range(layers) for part in ("query", "value")
        ]
        usage = {}
        for k, name in enumerate(fed["tasks"]):
            rows = rng.dirichlet(np.full(m, 0.6) + 6 * np.eye(m)[k], size=len(names))
            usage[name] = rows.tolist()
        result["usage"] = {
            "projections": names,
            "experts": fed["tasks"],
            "per_task": usage,
            "per_client": mixtures.tolist(),
        }
    return result


def write_run(
    folder: Path,
    method: str,
    seed: int,
    *,
    clients: int,
    n_tasks: int,
    rounds: int = 6,
    stop_after: int | None = None,
    layers: int = 6,
    name: str = "synthetic",
) -> None:
    """Writes one run directory. stop_after: rounds written before the run was interrupted."""
    fed = federation(seed, clients, n_tasks)
    rng = np.random.default_rng([seed, sum(method.encode())])
    base = LEVEL.get(method, -0.12 + 0.12 * rng.random())
    routed = method.startswith("fedsee")
    extracted = routed and method != "fedsee_geometry"
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, name, [method], [seed], clients, rounds)
    write_json(
        folder / "versions.json", {"fedprism": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "threads": 2}
    )
    write_json(folder / "federation.json", fed)
    write_json(folder / "model.json", {"backbone": "minilm", "projections": 2 * layers})
    count = 1 if method == "untrained" else rounds
    lines, last = [], {}
    for t in range(count if stop_after is None else stop_after):
        level = base - 0.25 * np.exp(-0.8 * (t + 1)) * (method != "untrained")
        last = {
            split: evaluation(rng, fed, level, routed and split == "test", layers)
            for split in ("validation", "test")
        }
        done = t == count - 1
        lines.append(
            json.dumps(
                {
                    "round": t,
                    "seconds": 12.0,
                    "phases": {
                        "update": {
                            "seconds": 10.0,
                            "asked": clients,
                            "bytes_up": 10,
                            "bytes_down": 20,
                            "examples": 0 if method == "untrained" else 200 * clients,
                        }
                    },
                    "bytes_up_per_client": 1.0,
                    "bytes_down_per_client": 2.0,
                    "evaluation": last if done else {"validation": last["validation"]},
                    "log": {},
                }
            )
        )
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if stop_after is not None:
        return
    true = np.asarray(fed["mixtures"]["thresholded"])
    summary: dict[str, Any] = {
        "name": name,
        "method": method,
        "seed": seed,
        "fingerprint": fed["fingerprint"],
        "complete": True,
        "rounds": count,
        "seconds": 12.0 * count,
        "threads": 2,
        "test": metrics.score(last["test"]),
        "validation": metrics.score(last["validation"]),
        "bytes_up_per_client_round": {"local_only": 0.0, "untrained": 0.0}.get(method, 147456.0),
        "bytes_down_per_client_round": {"local_only": 0.0, "untrained": 0.0, "fedsee": 890000.0}.get(
            method, 147456.0
        ),
        "examples_trained": 200 * clients * count,
        "examples_public": 19200 if routed else 0,
        "local_epochs": count,
        "notes": ["public sets are used by the server only"] if routed else [],
    }
    if routed:
        summary["usage"] = last["test"]["usage"]
    if extracted:
        guess = np.clip(0.75 * true + 0.25 / n_tasks + rng.normal(0, 0.05, true.shape), 0, None)
        guess /= guess.sum(1, keepdims=True)
        summary["mixture"] = metrics.mixture_report(guess, true, fed["mixtures"]["realised"])
        losses = 0.69 + 0.1 * rng.random((n_tasks, n_tasks))
        losses[np.diag_indices(n_tasks)] = np.linspace(0.25, 0.62, n_tasks)
        summary["public_losses"] = losses.tolist()
    write_json(folder / "summary.json", summary)


def write_experiment(
    folder: Path,
    methods: Sequence[str] = ("fedsee", "fedit", "local_only"),
    seeds: Sequence[int] = (42, 43),
    *,
    clients: int = 6,
    n_tasks: int = 3,
    name: str = "synthetic",
    layers: int = 2,
    rounds: int = 6,
) -> Path:
    """Writes an experiment of complete runs and returns its folder."""
    for method in methods:
        for seed in seeds:
            write_run(
                folder / method / f"seed-{seed}",
                method,
                seed,
                clients=clients,
                n_tasks=n_tasks,
                name=name,
                layers=layers,
                rounds=rounds,
            )
    write_config(folder, name, methods, seeds, clients, rounds)
    runs = [
        json.loads((folder / m / f"seed-{s}" / "summary.json").read_text()) for m in methods for s in seeds
    ]
    write_json(
        folder / "summary.json", {"name": name, "methods": list(methods), "seeds": list(seeds), "runs": runs}
    )
    return folder


LAYOUT = {
    "pure": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "edge": [[0.5, 0.5, 0], [0, 0.4, 0.6]],
    "interior": [[0.2, 0.2, 0.6]],
}


def geometry_logs(shift: float, edge: bool = True, kept: bool = True) -> dict[str, dict[str, Any]]:
    """Logs of a seed's geometry, routing and calibration rounds: three tasks, two layers, up to six clients.

    shift: added to every published quantity. edge: whether there are edge clients. kept: whether the seed
    kept the order of the residuals."""
    layout = {kind: rows for kind, rows in LAYOUT.items() if edge or kind != "edge"}
    mixtures = np.array([row for rows in layout.values() for row in rows], dtype=float)
    kinds = [kind for kind, rows in layout.items() for _ in rows]
    corners = np.array([[0, 0], [1, 0], [0.5, 0.8]])
    residual = {"affine": 0.40, "hull": 0.41, "true": 0.50, "uniform": 0.60, "shuffled": 0.70}
    routing = {
        "uniform": {"pure": 0.91, "edge": 0.92, "interior": 0.93, "all": 0.94},
        "true": {"pure": 0.81, "edge": 0.82, "interior": 0.83, "all": 0.84},
        "learned": {"pure": 0.71, "edge": 0.72, "interior": 0.73, "all": 0.74},
    }
    mismatch = {
        "uniform": {"pure": 1.31, "edge": 0.61, "interior": 0.51, "all": 0.75},
        "mixture": {"pure": 0.21, "edge": 0.22, "interior": 0.23, "all": 0.25},
    }

    def present(values: dict[str, float]) -> dict[str, float]:
        return {kind: value + shift for kind, value in values.items() if edge or kind != "edge"}

    calibration: dict[str, Any] = {
        target: {
            "mismatch": present(mismatch[target]),
            "pure_correct_mass": correct + shift,
            "edge_absent_mass": absent + shift if edge else None,
            "cross_entropy": {"all": loss + shift},
        }
        for target, correct, absent, loss in (("uniform", 0.45, 0.29, 0.55), ("mixture", 0.85, 0.02, 0.56))
    }
    return {
        "geometry": {
            "tasks": list(TASKS[:3]),
            "layers": ["layer.0.value", "layer.1.value"],
            "mixtures": mixtures.tolist(),
            "kinds": kinds,
            "weights": np.stack([mixtures, mixtures]).tolist(),
            "expert_points": [corners.tolist()] * 2,
            "client_points": [(mixtures @ corners + shift).tolist()] * 2,
            "mixture_points": [(mixtures @ corners).tolist()] * 2,
            "summary": {
                "residual": {fit: value + shift for fit, value in residual.items()},
                "coordinate_correlation": 0.10 + shift,
                "coordinate_mae": 0.15 + shift,
                "edge_absent_mass": 0.08 + shift if edge else None,
            },
            "holds": {"true < uniform < shuffled": kept, "hull - affine < .02": True},
        },
        "routing": {
            "means": {how: present(values) for how, values in routing.items()},
            "holds": {
                f"{kind}: learned <= true <= uniform": True
                for kind in (("edge", "interior") if edge else ("interior",))
            },
        },
        "calibration": {**calibration, "holds": {"mixture target closer than uniform": True}},
    }


def write_geometry(folder: Path, seeds: dict[int, dict[str, dict[str, Any]]]) -> Path:
    """Writes an experiment of complete runs of fedsee_geometry, one per seed, with logs like those of
    `geometry_logs`, and returns its folder."""
    write_experiment(folder, ("fedsee_geometry",), list(seeds), name=folder.name)
    for seed, logs in seeds.items():
        path = folder / "fedsee_geometry" / f"seed-{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line, log in zip(
            lines[3:], (logs[k] for k in ("geometry", "routing", "calibration")), strict=True
        ):
            line["log"] = log
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
