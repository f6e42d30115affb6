"""Instructions for language models: prompt, response and category of the rows of each source.

A source is one of `catalogue.INSTRUCTIONS`, with a level where its categories can be read in several ways
("bbh:groups"), or a JSON Lines file of the user's. Everything that is read is checked here.

Templates: an instruction, its context where there is one, and the mark after which the response begins. The
marks of a calculator are taken out of GSM8K's worked answers. MMLU's responses are the letters A to D.
Rows of BIG-Bench Hard, which has no parts of its own, get them here, the same in every run: every fifth row
of a task, in a fixed random order, is for tests.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedprism.data.catalogue import INSTRUCTIONS
from fedprism.data.federation import rng_for
from fedprism.data.sources import dataset_root, verify_checksum

JSONL = ".jsonl"
COLUMNS = ("instruction", "context", "response", "category")  # of a JSON Lines file
LETTERS = ("A", "B", "C", "D")
BBH_TEST_SHARE = 5  # one row in so many is for tests

BBH_GROUPS: dict[str, tuple[str, ...]] = {
    "bbh_logic": (
        "boolean_expressions", "causal_judgement", "formal_fallacies", "logical_deduction_five_objects",
        "logical_deduction_seven_objects", "logical_deduction_three_objects", "temporal_sequences",
        "web_of_lies",
    ),
    "bbh_tracking": (
        "navigate", "object_counting", "penguins_in_a_table", "reasoning_about_colored_objects",
        "tracking_shuffled_objects_five_objects", "tracking_shuffled_objects_seven_objects",
        "tracking_shuffled_objects_three_objects",
    ),
    "bbh_language": (
        "disambiguation_qa", "hyperbaton", "movie_recommendation", "ruin_names",
        "salient_translation_error_detection", "snarks", "sports_understanding",
    ),
    "bbh_symbols": (
        "date_understanding", "dyck_languages", "geometric_shapes", "multistep_arithmetic_two",
        "word_sorting",
    ),
}  # fmt: skip

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_NEEDED = {
    "dolly": ("instruction", "context", "response", "category", "split"),
    "gsm8k": ("question", "answer", "split"),
    "bbh": ("task", "input", "target"),
    "mmlu": ("subject", "question", *LETTERS, "answer", "split"),
}


@dataclass(frozen=True, eq=False)
class Instructions:
    """The rows of one source, columns of equal length n.

    source: its name or the file's path. prompt, response, category: n strings, none empty. split: n strings,
    "train", "validation" or "test"."""

    source: str
    prompt: tuple[str, ...]
    response: tuple[str, ...]
    category: tuple[str, ...]
    split: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompt)

    def positions(self, *splits: str) -> list[int]:
        """Ascending positions of the rows of the given splits."""
        return [i for i, split in enumerate(self.split) if split in splits]


def prompt_of(instruction: str, context: str = "") -> str:
    """The text that a response follows. context: "" for none."""
    parts = [f"Instruction:\n{instruction.strip()}"]
    if context.strip():
        parts.append(f"Context:\n{context.strip()}")
    return "\n\n".join([*parts, "Response:\n"])


def split_name(source: str) -> tuple[str, str]:
    """Name and level of a source: "bbh:groups" -> ("bbh", "groups"), "bbh" -> ("bbh", "one"). The level of a
    JSON Lines file is "". Raises ValueError for an unknown name or level."""
    if source.endswith(JSONL):
        return source, ""
    name, colon, level = source.partition(":")
    if name not in INSTRUCTIONS:
        near = difflib.get_close_matches(name, INSTRUCTIONS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"data: got the source '{source}', needs one of {', '.join(INSTRUCTIONS)} or a file *{JSONL}; "
            f"{meant}correct data.sources"
        )
    levels = INSTRUCTIONS[name].levels
    if colon and level not in levels:
        ways = " or ".join(f"'{name}:{known}'" for known in levels)
        raise ValueError(f"data: got the source '{source}', needs {ways}; correct data.sources")
    return name, level or levels[0]


def read_instructions(
    source: str, root: str | Path | None = None, *, columns: Sequence[str] = COLUMNS
) -> Instructions:
    """Read and check one source.

    source: "dolly", "gsm8k", "bbh", "mmlu", with ":level" or without, or the path of a JSON Lines file.
    root: folder of the parquet files; None or "" for the shipped ones, whose checksums are verified. A JSON
    Lines file that is not found as it stands is looked for there. columns: names of instruction, context,
    response and category in such a file. Raises FileNotFoundError or ValueError, one line each, for a source
    that can't be read."""
    name, level = split_name(source)
    folder = Path(str(root)).expanduser() if root else None
    if not level:
        path = Path(name).expanduser()
        if folder is not None and not path.is_file():
            path = folder / path
        return read_jsonl(path, columns)
    path = (folder or dataset_root()) / INSTRUCTIONS[name].file
    if not path.is_file():
        raise FileNotFoundError(
            f"data: no {path.name} in {path.parent}; correct data.root, or leave it out for the shipped file"
        )
    if folder is None:
        verify_checksum(path, INSTRUCTIONS[name].sha256)
    rows = _READERS[name](_columns(path, _NEEDED[name]))
    if level == "one":
        return replace(rows, category=(name,) * len(rows))
    if level == "groups":
        group = {task: key for key, tasks in BBH_GROUPS.items() for task in tasks}
        return replace(rows, category=tuple(group.get(task, task) for task in rows.category))
    return rows


def read_jsonl(path: str | Path, columns: Sequence[str] = COLUMNS) -> Instructions:
    """Read a JSON Lines file: one object per line with texts; all rows are "train".

    columns: names of instruction, context, response and category; context may be missing or null. Blank lines
    are skipped. Raises FileNotFoundError for no such file; ValueError, naming the line, for a line that is no
    JSON object, a missing or empty text, a value that is no text, and for a file without rows."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"data: no file {path}; correct data.sources or data.root")
    if len(columns) != len(COLUMNS) or len(set(columns)) != len(COLUMNS) or not all(columns):
        raise ValueError(
            f"data: data.jsonl_columns is {list(columns)}, needs four different names, for "
            f"{', '.join(COLUMNS)}; correct it"
        )
    found: list[list[str]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as fault:
        raise ValueError(f"data: {path.name} is not UTF-8 text; save it as UTF-8") from fault
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_line(f"{path.name}, line {number}", line, columns))
    if not found:
        raise ValueError(f"data: {path.name} has no rows, needs one JSON object per line; fill the file")
    instruction, context, response, category = zip(*found, strict=True)
    prompts = tuple(prompt_of(*pair) for pair in zip(instruction, context, strict=True))
    return Instructions(str(path), prompts, response, category, ("train",) * len(found))


def _line(where: str, line: str, columns: Sequence[str]) -> list[str]:
    """Instruction, context, response and category of one line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as fault:
        raise ValueError(
            f"data: {where} is not valid JSON ({fault.msg}, column {fault.colno}); correct or drop the line"
        ) from fault
    if not isinstance(row, dict):
        raise ValueError(f"data: {where} is {type(row).__name__}, needs a JSON object; correct the line")
    texts = []
    for column, role in zip(columns, COLUMNS, strict=True):
        value = row.get(column)
        if value is None and role == "context":
            value = ""
        if column not in row and value is None:
            raise ValueError(
                f"data: {where} lacks '{column}', has {', '.join(map(str, row)) or 'nothing'}; add it, or "
                f"name the column of the {role} in data.jsonl_columns"
            )
        if not isinstance(value, str):
            got = "null" if value is None else type(value).__name__
            raise ValueError(f"data: {where} has a '{column}' of {got}, needs text; put it in quotes")
        if not value.strip() and role != "context":
            raise ValueError(f"data: {where} has an empty '{column}'; fill it or drop the line")
        texts.append(value.strip() if role == "category" else value)
    return texts


def _columns(path: Path, needed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The needed text columns of a parquet file, without gaps."""
    try:
        table = pa.parquet.read_table(path)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data: {path.name} is not a readable parquet file ({reason}); replace it"
        ) from error
    missing = [column for column in needed if column not in table.column_names]
    if missing:
        raise ValueError(
            f"data: {path.name} has the columns {', '.join(table.column_names)}, lacks {', '.join(missing)}; "
            "rename or add them"
        )
    if table.num_rows == 0:
        raise ValueError(f"data: {path.name} has no rows; fill it or leave it out of data.sources")
    found: dict[str, tuple[str, ...]] = {}
    for column in needed:
        values = table[column].to_pylist()
        for row, value in enumerate(values):
            if not isinstance(value, str) or (not value.strip() and column != "context"):
                raise ValueError(
                    f"data: {path.name}, row {row} (the first is 0) has no text in {column}; fill it or drop "
                    "the row"
                )
        found[column] = tuple(values)
    return found


def _dolly(c: Mapping[str, tuple[str, ...]]) -> Instructions:
    prompts = tuple(prompt_of(*pair) for pair in zip(c["instruction"], c["context"], strict=True))
    return Instructions("dolly", prompts, c["response"], c["category"], c["split"])


def _gsm8k(c: Mapping[str, tuple[str, ...]]) -> Instructions:
    prompts = tuple(map(prompt_of, c["question"]))
    answers = tuple(_CALCULATOR.sub("", answer) for answer in c["answer"])
    return Instructions("gsm8k", prompts, answers, ("gsm8k",) * len(prompts), c["split"])


def _bbh(c: Mapping[str, tuple[str, ...]]) -> Instructions:
    task = np.asarray(c["task"])
    split = np.full(len(task), "train", dtype="<U5")
    for name in np.unique(task):
        rows = np.flatnonzero(task == name)
        order = rng_for(0, "bbh test rows", str(name)).permutation(rows)
        split[order[: len(rows) // BBH_TEST_SHARE]] = "test"
    prompts = tuple(map(prompt_of, c["input"]))
    return Instructions("bbh", prompts, c["target"], c["task"], tuple(split.tolist()))


def _mmlu(c: Mapping[str, tuple[str, ...]]) -> Instructions:
    options = zip(*(c[letter] for letter in LETTERS), strict=True)
    questions = [
        "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True))])
        for question, texts in zip(c["question"], options, strict=True)
    ]
    split = tuple("train" if part == "dev" else part for part in c["split"])
    return Instructions("mmlu", tuple(map(prompt_of, questions)), c["answer"], c["subject"], split)


_Reader = Callable[[Mapping[str, tuple[str, ...]]], Instructions]
_READERS: dict[str, _Reader] = {"dolly": _dolly, "gsm8k": _gsm8k, "bbh": _bbh, "mmlu": _mmlu}
