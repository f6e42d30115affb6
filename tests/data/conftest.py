"""A word-splitting tokenizer and small task folders for the data tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest


class WordTokenizer:
    """One id per word between 1 (start) and 2 (end of a text), called like a Hugging Face tokenizer."""

    pad_token_id = 9
    model_max_length = 64

    def __call__(
        self, text: list[str], text_pair: list[str] | None = None, *, max_length: int, **options: Any
    ) -> dict[str, list[list[int]]]:
        assert options == {"truncation": "longest_first", "padding": False, "return_attention_mask": False}
        ids, types = [], []
        for i, first in enumerate(text):
            a = [10 + zlib.crc32(word.encode()) % 1000 for word in first.split()]
            b = [10 + zlib.crc32(word.encode()) % 1000 for word in text_pair[i].split()] if text_pair else []
            while len(a) + len(b) + 2 + bool(text_pair) > max_length:
                (a if len(a) >= len(b) else b).pop()
            ids.append([1, *a, 2, *([*b, 2] if text_pair else [])])
            types.append([0] * (len(a) + 2) + [1] * (len(b) + 1 if text_pair else 0))
        return {"input_ids": ids, "token_type_ids": types}


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


Columns = dict[str, list[Any]]


def small_task(
    name: str, train: int = 40, public: int = 10, validation: int = 6, test: int = 20, pair: bool = False
) -> Columns:
    """Rows of 1 to 7 words; labels alternate."""
    split = ["train"] * train + ["public"] * public + ["validation"] * validation + ["test"] * test
    n = len(split)
    return {
        "text_a": [" ".join(f"{name}{i}" for _ in range(1 + i % 7)) for i in range(n)],
        "text_b": [f"second {name}{i}" if pair else None for i in range(n)],
        "label": [i % 2 for i in range(n)],
        "split": split,
    }


def write_task(folder: Path, name: str, columns: Columns, **types: pa.DataType) -> Path:
    path = folder / f"{name}.parquet"
    arrays = {column: pa.array(values, types.get(column)) for column, values in columns.items()}
    pa.parquet.write_table(pa.table(arrays), path)
    return path


@pytest.fixture
def make_task() -> Callable[..., Columns]:
    return small_task


@pytest.fixture
def write() -> Callable[..., Path]:
    return write_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tasks `red` (pairs), `green`, `blue` with 40 train, 10 public, 6 validation and 20 test rows each."""
    for name in ("red", "green", "blue"):
        write_task(tmp_path, name, small_task(name, pair=name == "red"))
    return tmp_path
