"""Clients with train, validation and test rows, the server's public sets, and a fingerprint of it all.

Which rows go where depends on the seed and the data settings alone: each purpose and task draws from a stream
of its own, and neither the tokenizer nor the model has a part in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedprism.data.partition import Counts, Floats, Partition, deal_with_reuse, make_partition, matched_counts
from fedprism.data.sources import TextTask, load_text_task
from fedprism.data.text import Rows, tokenize

CLIENT_SPLITS = ("train", "validation", "test")


class HashedRows(Protocol):
    """Rows as a fingerprint sees them."""

    @property
    def columns(self) -> Mapping[str, torch.Tensor]: ...

    def __len__(self) -> int: ...

    def content_hash(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a run knows about its data.

    tasks: M names in expert order, the clients' tasks first, public-only ones last. n_classes: classes of the
    task that has most. clients: per client its rows as `train`, `validation`, `test`. public: `train` (all
    public rows) and the public rows of each task under its name. mixtures: `sampled`, `thresholded` and
    `realised`, (N, M) float64, zero for public-only tasks. notes: what a reader of results has to know."""

    tasks: tuple[str, ...]
    n_classes: int
    clients: tuple[Mapping[str, Rows], ...]
    public: Mapping[str, Rows]
    mixtures: Mapping[str, Floats]
    notes: tuple[str, ...] = ()

    @cached_property
    def pooled(self) -> dict[str, Rows]:
        """All clients' training rows as one split `train`."""
        return {"train": Rows.concat([client["train"] for client in self.clients])}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of task names and, per client, split and public set, of row ids, labels and content.
        Equal federations have equal fingerprints in every process."""
        header = ["fedprism federation 1", self.tasks, self.n_classes]
        holders = [(f"client {i}", client) for i, client in enumerate(self.clients)]
        return fingerprint_rows(header, [*holders, ("public", self.public)])

    @cached_property
    def counts(self) -> Counts:
        """(N, M) int64 training rows of each client and task."""
        return np.stack([_task_counts(client["train"], len(self.tasks)) for client in self.clients])

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for the run record: fingerprint, tasks, n_classes, client_sizes (per client and
        split), counts (N x M training rows), mixtures, public_sizes (per task) and notes."""
        return {
            "fingerprint": self.fingerprint,
            "tasks": list(self.tasks),
            "n_classes": self.n_classes,
            "client_sizes": [{split: len(rows) for split, rows in client.items()} for client in self.clients],
            "counts": self.counts.tolist(),
            "mixtures": {name: mixture.tolist() for name, mixture in self.mixtures.items()},
            "public_sizes": {task: len(self.public[task]) for task in self.tasks},
            "notes": list(self.notes),
        }


def build_text_federation(
    *,
    tasks: Sequence[str],
    public_only: Sequence[str] = (),
    clients: int,
    partition: str = "dirichlet",
    alpha: float = 0.1,
    threshold: float = 0.05,
    mixtures: Sequence[Sequence[float]] = (),
    train_per_task: int | None = None,
    public_per_task: int | None = None,
    validation_per_client: int,
    test_per_client: int,
    min_examples: int,
    max_length: int,
    tokenizer: Any,
    root: str | Path | None = None,
    seed: int,
) -> Federation:
    """Build a federation over text tasks (FedSEE spec 7).

    tasks: names of the clients' tasks. public_only: names of tasks that only the server holds; each pools
    its train, public and validation rows. clients: N >= 1. partition: "dirichlet" (alpha > 0), "pure" or
    "given". threshold: drawn mixture entries below it become 0, in [0, 1/M). mixtures: with "given", N rows
    of M shares, each with sum 1. train_per_task, public_per_task: at most so many rows per task, None for
    all. validation_per_client: taken from a client's allocation, in its realised mixture. test_per_client:
    from the tasks' test split, in the same mixture; reused over clients once a test split is used up (see
    `notes`). min_examples: training rows that every client must keep, >= 1. max_length: tokens per example.
    tokenizer: a Hugging Face tokenizer. root: folder of the tasks' files, None or "" for the shipped ones.
    seed: >= 0. Raises ValueError or FileNotFoundError, one line each, for settings or files
    that cannot give this."""
    _check_settings(
        tasks,
        public_only,
        train_per_task,
        public_per_task,
        validation_per_client,
        test_per_client,
        min_examples,
        seed,
    )
    own = [load_text_task(name, root) for name in tasks]
    others = [load_text_task(name, root, needs=()) for name in public_only]
    supply = [_subsample(task, ("train",), train_per_task, seed) for task in own]
    public = [_subsample(task, ("public",), public_per_task, seed) for task in own]
    public += [_subsample(task, ("train", "public", "validation"), public_per_task, seed) for task in others]
    sizes = [len(rows) for rows in supply]
    rng = rng_for(seed, "partition")
    part = make_partition(
        partition, sizes, clients, alpha=alpha, threshold=threshold, mixtures=mixtures, rng=rng
    )
    _check_allocations(part, partition, alpha, validation_per_client, min_examples)
    held_out = matched_counts(part.counts, validation_per_client)
    test_supply = [task.positions("test") for task in own]
    test_counts = matched_counts(part.counts, test_per_client)
    _check_test(test_counts, test_supply, own)
    test_deal, reused = deal_with_reuse(
        test_counts, [len(rows) for rows in test_supply], rng_for(seed, "test")
    )

    everything = own + others
    offsets = np.cumsum([0, *(len(task) for task in everything)])
    ids: list[dict[str, NDArray[np.int64]]] = []
    for i in range(clients):
        got: dict[str, list[NDArray[np.int64]]] = {split: [] for split in CLIENT_SPLITS}
        for m, task in enumerate(own):
            mine = supply[m][part.deal[i][m]] + offsets[m]
            order = rng_for(seed, "validation", i, task.name).permutation(len(mine))
            got["validation"].append(mine[np.sort(order[: held_out[i, m]])])
            got["train"].append(mine[np.sort(order[held_out[i, m] :])])
            got["test"].append(test_supply[m][test_deal[i][m]] + offsets[m])
        ids.append({split: np.concatenate(parts) for split, parts in got.items()})
    public_ids = [rows + offset for rows, offset in zip(public, offsets[:-1], strict=True)]

    used = [*(rows for client in ids for rows in client.values()), *public_ids]
    table = _tokenized(everything, offsets, used, tokenizer, max_length)
    row = table.columns["row"].numpy()

    def rows_of(wanted: NDArray[np.int64]) -> Rows:
        return table.select(np.searchsorted(row, wanted))

    names = tuple(task.name for task in everything)
    pad = ((0, 0), (0, len(others)))
    return Federation(
        tasks=names,
        n_classes=max(task.n_classes for task in everything),
        clients=tuple({split: rows_of(wanted) for split, wanted in client.items()} for client in ids),
        public={
            "train": rows_of(np.concatenate(public_ids)),
            **{name: rows_of(wanted) for name, wanted in zip(names, public_ids, strict=True)},
        },
        mixtures={
            name: np.pad(mixture, pad)
            for name, mixture in (
                ("sampled", part.sampled),
                ("thresholded", part.thresholded),
                ("realised", part.realised),
            )
        },
        notes=tuple(
            f"test: task {task.name} has {len(rows)} test rows, the clients were given {asked}: "
            f"{again} of them repeat another client's"
            for task, rows, asked, again in zip(own, test_supply, test_counts.sum(0), reused, strict=True)
            if again
        ),
    )


def fingerprint_rows(header: Sequence[Any], holders: Sequence[tuple[str, Mapping[str, HashedRows]]]) -> str:
    """SHA-256 (hex) of a JSON-ready header and, per holder and split, of the rows' number, columns and
    content.

    holders: name and splits of each, in order."""
    digest = hashlib.sha256()
    digest.update(json.dumps(header).encode())
    for holder, splits in holders:
        for split in sorted(splits):
            rows = splits[split]
            digest.update(json.dumps([holder, split, len(rows), sorted(rows.columns)]).encode())
            for column in sorted(rows.columns):
                digest.update(rows.columns[column].numpy().tobytes())
            digest.update(rows.content_hash().encode())
    return digest.hexdigest()


def rng_for(seed: int, *purpose: str | int) -> np.random.Generator:
    """A stream of its own for each purpose, the same in every process. seed: >= 0."""
    name = "\x1f".join(map(str, (seed, *purpose)))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big"))


def _subsample(task: TextTask, splits: tuple[str, ...], n: int | None, seed: int) -> NDArray[np.int64]:
    """Ascending file positions of at most n rows of the splits."""
    rows = task.positions(*splits)
    if n is None or n >= len(rows):
        return rows
    return np.sort(rng_for(seed, "subsample", *splits, task.name).permutation(rows)[:n])


def _tokenized(
    tasks: Sequence[TextTask],
    offsets: NDArray[np.int64],
    wanted: Sequence[NDArray[np.int64]],
    tokenizer: Any,
    max_length: int,
) -> Rows:
    """All wanted rows, each tokenised once, in ascending order of their ids."""
    used = np.unique(np.concatenate(wanted))
    bounds = np.searchsorted(used, offsets)
    return Rows.concat(
        [
            tokenize(
                task,
                used[bounds[m] : bounds[m + 1]] - offsets[m],
                tokenizer,
                max_length,
                task_index=m,
                row_offset=int(offsets[m]),
            )
            for m, task in enumerate(tasks)
        ]
    )


def _task_counts(rows: Rows, n_tasks: int) -> Counts:
    return torch.bincount(rows.columns["task"], minlength=n_tasks).numpy()


def _check_settings(
    tasks: Sequence[str],
    public_only: Sequence[str],
    train_per_task: int | None,
    public_per_task: int | None,
    validation_per_client: int,
    test_per_client: int,
    min_examples: int,
    seed: int,
) -> None:
    names = [*tasks, *public_only]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not tasks or twice or "train" in names:
        got = "no tasks" if not tasks else f"'{twice[0]}' twice" if twice else "a task called 'train'"
        raise ValueError(
            f"data: got {got}, needs one or more tasks, each once over data.tasks and data.public_only, none "
            "called 'train'; correct the lists"
        )
    for name, value, least in (
        ("train_per_task", train_per_task, 1),
        ("public_per_task", public_per_task, 1),
        ("validation_per_client", validation_per_client, 0),
        ("test_per_client", test_per_client, 0),
        ("min_examples", min_examples, 1),
        ("seed", seed, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"data: {name} is {value}, must be >= {least}; correct it")


def _check_allocations(part: Partition, kind: str, alpha: float, validation: int, min_examples: int) -> None:
    """Every client must keep enough training rows; the poorest client is named."""
    sizes = part.counts.sum(1)
    poorest = int(sizes.argmin())
    if sizes[poorest] >= validation + min_examples:
        return
    drawn = kind == "dirichlet"
    setting = f"alpha={alpha}, " if drawn else f"{kind}, "
    raise_what = "data.alpha or data.train_per_task" if drawn else "data.train_per_task"
    parts = f", {min_examples} to train on and {validation} for validation" if validation else ""
    raise ValueError(
        f"partition: client {poorest} got {sizes[poorest]} examples, needs {validation + min_examples}"
        f"{parts} ({setting}{len(sizes)} clients); raise {raise_what}, or lower data.min_examples"
        + (", data.validation_per_client" if validation else "")
        + " or data.clients"
    )


def _check_test(counts: Counts, supply: Sequence[NDArray[np.int64]], tasks: Sequence[TextTask]) -> None:
    for m, (task, rows) in enumerate(zip(tasks, supply, strict=True)):
        client = int(counts[:, m].argmax())
        if counts[client, m] > len(rows):
            raise ValueError(
                f"data: client {client} needs {counts[client, m]} different test rows of task '{task.name}', "
                f"got {len(rows)}; lower data.test_per_client to {len(rows)}"
            )
