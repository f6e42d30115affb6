"""A whole experiment in a second: a random two-layer BERT, three tasks of made-up sentences, four clients."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedprism import config as configs
from fedprism.api import Silent
from fedprism.config import Experiment
from fedprism.methods.registry import METHODS

WORDS = {  # task -> words of label 0 and of label 1
    "fruit": (("sour", "bitter", "green"), ("sweet", "ripe", "red")),
    "metal": (("dull", "rusty", "bent"), ("bright", "clean", "straight")),
    "river": (("dry", "narrow", "slow"), ("deep", "wide", "fast")),
}
FILLERS = ("the", "a", "very", "quite", "it", "is", "was", "and", "not")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPLITS = {"train": 36, "public": 16, "validation": 6, "test": 24}

Columns = dict[str, list[Any]]


def rows(task: str, **splits: int) -> Columns:
    """Sentences of 2 to 8 words, most of them words of their label; `river` has pairs of sentences."""
    draw = np.random.default_rng(sum(map(ord, task)))
    columns: Columns = {"text_a": [], "text_b": [], "label": [], "split": []}
    for split, n in (splits or SPLITS).items():
        for i in range(n):
            label = i % 2
            words = [str(draw.choice(WORDS[task][label])) for _ in range(draw.integers(1, 4))]
            words += [str(draw.choice(FILLERS)) for _ in range(draw.integers(1, 6))]
            columns["text_a"].append(" ".join(draw.permutation(words)))
            columns["text_b"].append(f"the {task} is {words[0]}" if task == "river" else None)
            columns["label"].append(label)
            columns["split"].append(split)
    return columns


def write_task(folder: Path, task: str, columns: Columns | None = None) -> Path:
    """Write a task's parquet file, by default `rows(task)`."""
    path = folder / f"{task}.parquet"
    text = pa.string()
    types = {"text_a": text, "text_b": text, "label": pa.int64(), "split": text}
    made = columns or rows(task)
    pa.parquet.write_table(pa.table({name: pa.array(made[name], types[name]) for name in types}), path)
    return path


def save_tokenizer(folder: Path) -> int:
    """Save a WordPiece tokenizer over the words of the tasks; returns the size of its vocabulary."""
    from transformers import BertTokenizerFast

    words = sorted({*FILLERS, *WORDS, *(w for both in WORDS.values() for side in both for w in side)})
    vocabulary = {word: k for k, word in enumerate((*SPECIAL, *words))}
    BertTokenizerFast(vocab=vocabulary, model_max_length=32).save_pretrained(folder)
    return len(vocabulary)


def save_quietly(model: Any, folder: Path) -> None:
    """Save a transformers model without its progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()


def save_backbone(folder: Path) -> Path:
    """Save a random BERT of two layers, width 16, with its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    size = save_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = BertModel(
            BertConfig(
                vocab_size=size,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=32,
                initializer_range=0.2,
            )
        )
    save_quietly(model, folder)
    return folder


def settings(backbone: Path, root: Path) -> dict[str, Any]:
    """The raw tables of a small experiment: four mixed clients, four rounds, one thread."""
    return {
        "name": "tiny",
        "seeds": [3],
        "data": {
            "tasks": list(WORDS),
            "clients": 4,
            "alpha": 1.0,
            "validation_per_client": 6,
            "test_per_client": 8,
            "root": str(root),
        },
        "model": {
            "backbone": str(backbone),
            "rank": 2,
            "lora_alpha": 4.0,
            "max_length": 16,
            "precision": "fp32",
        },
        "method": {
            "names": ["fedit"],
            "rounds": 4,
            "batch_size": 8,
            "lr": 0.01,
            "fedsee": {"init_epochs": 1, "extract_steps": 4, "public_batch": 4, "table_rows": 8},
            "scaffold": {"momentum": 0.5, "lr": 0.05},
        },
        "engine": {"threads": 1},
        "evaluation": {"batch_size": 16},
    }


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with "a.b" keys of `changes` set; tables of methods that are not run are left out."""
    raw = deepcopy(base)
    for key, value in changes.items():
        *path, last = key.split(".")
        table = raw
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return raw


class Tiny:
    """Makes small experiments over one backbone and one folder of tasks.

    backbone: folder of the model. root: folder of the tasks."""

    def __init__(self, backbone: Path, root: Path) -> None:
        self.backbone, self.root = backbone, root

    def raw(self, *names: str, **changes: Any) -> dict[str, Any]:
        """Tables of an experiment over the named methods. changes: `data__alpha=2` sets data.alpha."""
        found = {key.replace("__", "."): value for key, value in changes.items()}
        base = settings(self.backbone, self.root)
        if names:
            base["method"]["names"] = list(names)
        return merged(base, found)

    def experiment(self, *names: str, **changes: Any) -> Experiment:
        """The experiment itself, checked as a file's would be."""
        return configs.parse(self.raw(*names, **changes), methods=METHODS)

    def write(self, path: Path, *names: str, **changes: Any) -> Path:
        """The experiment as a TOML file."""
        configs.dump(self.experiment(*names, **changes), path)
        return path


@dataclass
class Watch(Silent):
    """A progress that remembers, and that stops the run: at the end of a round, or inside one.

    stop_after: round whose end raises `Stopped`, after its checkpoint. stop_in: (round, phase) that does."""

    stop_after: int | None = None
    stop_in: tuple[int, str] | None = None
    started: list[str] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    asked: list[tuple[int, str, str]] = field(default_factory=list)
    closed: int = 0

    def start(self, run_label: str, total_runs: int, run_index: int, rounds: int) -> None:
        self.started.append(run_label)

    def phase(self, round: int, name: str, participant: str, done: int, asked: int) -> None:
        self.asked.append((round, name, participant))
        if (round, name) == self.stop_in and done == asked - 1:
            raise Stopped

    def round_end(self, round: int, seconds: float, line: dict[str, Any]) -> None:
        self.rounds.append(round)
        if round == self.stop_after:
            raise Stopped

    def close(self) -> None:
        self.closed += 1


class Stopped(Exception):
    """The run was stopped from outside."""


# ---- comparing what runs left behind -------------------------------------------------------------

TIMES = {"seconds", "evaluation_seconds"}


def without_times(value: Any) -> Any:
    """A JSON value without the entries that depend on the clock."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def left_behind(run: Path) -> dict[str, Any]:
    """All that a run wrote, but for times: checkpoints as bytes, records and metrics as values."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors" or path.name == "state.json":
            found[name] = path.read_bytes()
        elif path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".toml":
            found[name] = path.read_text()
        elif path.is_file():
            found[name] = None
    return found
