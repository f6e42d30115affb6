"""Clients that hold instructions of several categories, and the common benchmarks that no client holds.

Categories are the federation's tasks. Clients get rows of the sources' training parts and keep some of them
for validation and test; benchmarks take the sources' test parts, or a category that is held out as unseen.
The questions of a benchmark are the same for every seed. `notes` say how many rows were cut to max_length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedprism.data.federation import CLIENT_SPLITS, Federation, fingerprint_rows, rng_for
from fedprism.data.instruction_rows import Cuts, tokenize_instructions
from fedprism.data.instructions import (
    COLUMNS,
    JSONL,
    LETTERS,
    Instructions,
    read_instructions,
    split_name,
)
from fedprism.data.partition import (
    Counts,
    Floats,
    dirichlet_by_class,
    largest_remainder,
    make_partition,
    realised_mixtures,
)
from fedprism.data.text import SHORTEST_MAX_LENGTH, Rows

UNSEEN = "unseen"
METRICS = {UNSEEN: "rouge_l", "dolly": "rouge_l", "gsm8k": "number", "bbh": "exact", "mmlu": "choice"}


@dataclass(frozen=True, eq=False)
class Benchmark:
    """n common questions, the same for every method and seed.

    metric: "rouge_l", "number" (last number equal), "exact" (answer equal) or "choice" (of the options, the
    likeliest). references: n responses. rows: prompts with the references, what the loss is taken on.
    prompts: without responses, to be answered freely; None for "choice". options: the prompts with each of
    the letters A to D in turn, 4n rows, for "choice" alone. The column `row` counts rows from 0."""

    name: str
    metric: str
    references: tuple[str, ...]
    rows: Rows
    prompts: Rows | None = None
    options: Rows | None = None

    def __len__(self) -> int:
        return len(self.references)


@dataclass(frozen=True, eq=False)
class InstructionFederation(Federation):
    """A federation over categories of instructions; there are no public sets and no labels.

    benchmarks: name -> common questions. unseen: the category that no client holds, or ""."""

    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    unseen: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of categories and, per client, split and benchmark, of row ids and content."""
        header = ["fedprism instructions 1", self.tasks, self.unseen]
        holders = [(f"client {i}", client) for i, client in enumerate(self.clients)]
        asked = [
            (f"benchmark {name}", {"rows": b.rows, **({"options": b.options} if b.options else {})})
            for name, b in self.benchmarks.items()
        ]
        return fingerprint_rows(header, [*holders, *asked])

    def describe(self) -> dict[str, Any]:
        """As `Federation.describe`, with the unseen category and the benchmarks' metrics and sizes."""
        asked = {name: {"metric": b.metric, "n": len(b)} for name, b in self.benchmarks.items()}
        return {**super().describe(), "unseen": self.unseen, "benchmarks": asked}


def build_instruction_federation(
    *,
    sources: Sequence[str],
    unseen: str = "",
    clients: int,
    partition: str = "dirichlet",
    alpha: float = 0.1,
    mixtures: Sequence[Sequence[float]] = (),
    train_per_task: int | None = None,
    train_fraction: float = 0.9,
    validation_fraction: float = 0.1,
    min_examples: int,
    benchmarks: Sequence[str] = (),
    benchmark_size: int = 100,
    max_length: int,
    tokenizer: Any,
    columns: Sequence[str] = COLUMNS,
    root: str | Path | None = None,
    seed: int,
) -> InstructionFederation:
    """Build a federation over the categories of one or several sources (FedTAR spec 10).

    sources: see `instructions.read_instructions`; equal categories of different sources are one. unseen: a
    category that no client gets, "" for none. clients: N >= 1. partition: "dirichlet" (each category's rows
    are cut in shares from Dir(alpha) over the clients, all drawn anew until every client has enough), "pure"
    or "given" (`mixtures`, N rows of M shares). train_per_task: at most so many rows per category, None for
    all. train_fraction: of a client's rows, the others are its test rows, in (0, 1). validation_fraction: of
    those training rows, in [0, 1). min_examples: training rows that every client must keep, >= 1.
    benchmarks: names out of `METRICS`. benchmark_size: questions of each, at most. max_length: tokens of
    prompt and response. tokenizer: a Hugging Face tokenizer with an end token. columns: of JSON Lines files.
    root: folder of the sources' files, None or "" for the shipped ones. seed: >= 0. Raises ValueError or
    FileNotFoundError, one line each, for settings or files that cannot give this."""
    _check(sources, benchmarks, benchmark_size, max_length, train_fraction, validation_fraction, tokenizer)
    read = {source: read_instructions(source, root, columns=columns) for source in sources}
    offsets = dict(
        zip(read, np.cumsum([0, *map(len, read.values())])[:-1].tolist(), strict=True)
    )  # of the row ids
    tasks = _categories(read, unseen)
    supply = [_supply(read, offsets, task, train_per_task, seed) for task in tasks]
    sizes = [len(rows) for rows in supply]
    share = train_fraction * (1 - validation_fraction)
    least = next(
        n for n in itertools.count(min_examples) if _sizes(n, train_fraction, share)[0] >= min_examples
    )
    deal, sampled = _deal(partition, sizes, clients, alpha, mixtures, least, seed)
    counts = np.asarray([[len(part) for part in mine] for mine in deal], dtype=np.int64).reshape(clients, -1)
    poorest = int(counts.sum(1).argmin())
    if counts[poorest].sum() < least:
        raise ValueError(
            f"partition: client {poorest} got {counts[poorest].sum()} examples, needs {least}, "
            f"{min_examples} of them to train on ({partition}, {clients} clients); raise "
            "data.train_per_task, or lower data.min_examples or data.clients"
        )
    ids = [
        _parts([rows[at] for rows, at in zip(supply, mine, strict=True)], i, train_fraction, share, seed)
        for i, mine in enumerate(deal)
    ]
    cuts = Cuts()
    table = _table(read, offsets, tasks, np.concatenate([r for c in ids for r in c.values()]), tokenizer,
                   max_length, cuts)  # fmt: skip
    row = table.columns["row"].numpy()
    empty = table.select(torch.zeros(0, dtype=torch.int64))
    realised = realised_mixtures(counts)
    first = realised if sampled is None else sampled
    return InstructionFederation(
        tasks=tasks,
        n_classes=1,
        clients=tuple(
            {split: table.select(np.searchsorted(row, wanted)) for split, wanted in client.items()}
            for client in ids
        ),
        public={"train": empty, **dict.fromkeys(tasks, empty)},
        mixtures={"sampled": first, "thresholded": first, "realised": realised},
        notes=_notes(cuts, max_length),
        benchmarks={
            name: _benchmark(name, read, unseen, benchmark_size, tokenizer, max_length, root)
            for name in benchmarks
        },
        unseen=unseen,
    )


def _check(
    sources: Sequence[str], benchmarks: Sequence[str], benchmark_size: int, max_length: int,
    train_fraction: float, validation_fraction: float, tokenizer: Any,
) -> None:  # fmt: skip
    names = [split_name(source)[0] for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice:
        got = f"'{twice}' twice" if names else "no sources"
        raise ValueError(f"data: got {got}, needs one or more sources, each once; correct data.sources")
    for name in benchmarks:
        if name not in METRICS:
            raise ValueError(
                f"evaluation: got the benchmark '{name}', needs {', '.join(METRICS)}; correct "
                "evaluation.benchmarks"
            )
    for key, value, right in (
        ("evaluation.benchmark_size", benchmark_size, benchmark_size >= 1),
        ("data.train_fraction", train_fraction, 0 < train_fraction < 1),
        ("data.validation_fraction", validation_fraction, 0 <= validation_fraction < 1),
        ("model.max_length", max_length, max_length >= SHORTEST_MAX_LENGTH),
    ):
        if not right:
            needs = {"data.train_fraction": "> 0 and < 1", "data.validation_fraction": ">= 0 and < 1",
                     "model.max_length": f">= {SHORTEST_MAX_LENGTH}"}.get(key, ">= 1")  # fmt: skip
            raise ValueError(f"data: {key} is {value}, must be {needs}; correct it")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "data: the model's tokenizer has no end token, which ends every response; set eos_token in its "
            "tokenizer_config.json or take another model.backbone"
        )


def _categories(read: Mapping[str, Instructions], unseen: str) -> tuple[str, ...]:
    """Categories that clients train on, by source and name. Raises ValueError for a strange unseen one."""
    found: dict[str, None] = {}
    for rows in read.values():
        found |= dict.fromkeys(sorted({rows.category[i] for i in rows.positions("train")}))
    if unseen and unseen not in found:
        raise ValueError(
            f"data: data.unseen is '{unseen}', needs a category of the sources, {', '.join(found)}; "
            "correct it"
        )
    tasks = tuple(task for task in found if task != unseen)
    if not tasks or "train" in tasks:
        got = "only the unseen category" if not tasks else "a category called 'train'"
        raise ValueError(
            f"data: got {got}, needs another one to train on; correct data.sources or data.unseen"
        )
    return tasks


def _supply(
    read: Mapping[str, Instructions], offsets: Mapping[str, int], task: str, n: int | None, seed: int
) -> NDArray[np.int64]:
    """Ascending row ids of a category's training rows, at most n."""
    ids = np.asarray(
        [
            i + offsets[source]
            for source, rows in read.items()
            for i in rows.positions("train")
            if rows.category[i] == task
        ],
        dtype=np.int64,
    )
    if n is None or n >= len(ids):
        return ids
    return np.sort(rng_for(seed, "subsample", task).permutation(ids)[:n])


def _sizes(n: int, train_fraction: float, share: float) -> tuple[int, int, int]:
    """Training, validation and test rows of a client with n rows; a part that is asked for has a row."""
    test, validation = (round(round(n * part, 9)) for part in (1 - train_fraction, train_fraction - share))
    test, validation = max(1, test), max(1, validation) if share < train_fraction else 0
    return n - test - validation, validation, test


def _deal(
    partition: str, sizes: Sequence[int], clients: int, alpha: float, mixtures: Sequence[Sequence[float]],
    least: int, seed: int,
) -> tuple[Sequence[Sequence[NDArray[np.int64]]], Floats | None]:  # fmt: skip
    """[client][category] -> ascending positions in the category's supply, and the mixtures as asked for."""
    rng = rng_for(seed, "partition")
    if partition != "dirichlet":
        part = make_partition(
            partition, sizes, clients, alpha=alpha, threshold=0.0, mixtures=mixtures, rng=rng
        )
        return part.deal, part.sampled
    starts = np.cumsum([0, *sizes])
    label = np.repeat(np.arange(len(sizes)), sizes)
    mine = dirichlet_by_class(label, clients, alpha, rng, min_examples=least, setting="alpha")
    return [[rows[label[rows] == m] - starts[m] for m in range(len(sizes))] for rows in mine], None


def _parts(
    rows: Sequence[NDArray[np.int64]], client: int, train_fraction: float, share: float, seed: int
) -> dict[str, NDArray[np.int64]]:
    """One client's row ids by split, each split in the client's mixture; rows: ids of each category."""
    counts: Counts = np.asarray([len(part) for part in rows], dtype=np.int64)
    _, n_validation, n_test = _sizes(int(counts.sum()), train_fraction, share)
    test = largest_remainder(counts, n_test)
    validation = largest_remainder(counts - test, n_validation)
    found: dict[str, list[NDArray[np.int64]]] = {split: [] for split in CLIENT_SPLITS}
    for m, part in enumerate(rows):
        order = rng_for(seed, "split", client, m).permutation(part)
        ends = np.cumsum([test[m], validation[m]])
        for split, piece in zip(("test", "validation", "train"), np.split(order, ends), strict=True):
            found[split].append(np.sort(piece))
    return {split: np.concatenate(parts).astype(np.int64) for split, parts in found.items()}


def _table(
    read: Mapping[str, Instructions], offsets: Mapping[str, int], tasks: Sequence[str],
    wanted: NDArray[np.int64], tokenizer: Any, max_length: int, cuts: Cuts,
) -> Rows:  # fmt: skip
    """The wanted rows, tokenised, in ascending order of their ids."""
    used, number = np.unique(wanted), {task: m for m, task in enumerate(tasks)}
    prompts, responses, task = [], [], []
    for source, rows in read.items():
        low = offsets[source]
        for i in used[(used >= low) & (used < low + len(rows))] - low:
            prompts.append(rows.prompt[i])
            responses.append(rows.response[i])
            task.append(number[rows.category[i]])
    columns = {"row": torch.from_numpy(used), "task": torch.tensor(task, dtype=torch.int64)}
    return tokenize_instructions(prompts, responses, tokenizer, max_length, columns, cuts)


def _notes(cuts: Cuts, max_length: int) -> tuple[str, ...]:
    if not cuts.prompts:
        return ()
    return (
        f"max_length = {max_length}: of {cuts.rows} rows {cuts.prompts} lost the beginning of their prompt "
        f"and {cuts.responses} the end of their response",
    )


def _benchmark(
    name: str, read: Mapping[str, Instructions], unseen: str, size: int, tokenizer: Any, max_length: int,
    root: str | Path | None,
) -> Benchmark:  # fmt: skip
    """The questions of one benchmark, at most `size`, drawn once for all seeds."""
    if name == UNSEEN:
        if not unseen:
            raise ValueError(
                "evaluation: the benchmark 'unseen' needs a category that no client holds; name one in "
                "data.unseen or leave 'unseen' out of evaluation.benchmarks"
            )
        pool = [(rows, i) for rows in read.values() for i in range(len(rows)) if rows.category[i] == unseen]
    else:
        found = next((rows for source, rows in read.items() if _is(source, name)), None)
        rows = found if found is not None else read_instructions(name, root)
        pool = [(rows, i) for i in rows.positions("test") if name != "dolly" or rows.category[i] != unseen]
    if len(pool) > size:
        chosen = np.sort(rng_for(0, "benchmark", name, unseen).permutation(len(pool))[:size])
        pool = [pool[k] for k in chosen]
    prompts = [rows.prompt[i] for rows, i in pool]
    references = tuple(rows.response[i] for rows, i in pool)
    if not pool:
        raise ValueError(
            f"evaluation: the benchmark '{name}' has no rows; leave it out of evaluation.benchmarks"
        )
    both = tokenize_instructions(prompts, references, tokenizer, max_length)
    if METRICS[name] == "choice":
        each = [prompt for prompt in prompts for _ in LETTERS]
        letters = list(LETTERS) * len(prompts)
        options = tokenize_instructions(each, letters, tokenizer, max_length, ends=False)
        return Benchmark(name, "choice", references, both, options=options)
    alone = tokenize_instructions(prompts, None, tokenizer, max_length)
    return Benchmark(name, METRICS[name], references, both, prompts=alone)


def _is(source: str, name: str) -> bool:
    return not source.endswith(JSONL) and split_name(source)[0] == name
