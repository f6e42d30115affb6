"""A word-splitting tokenizer, small task folders and small image files for the data tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from numpy.typing import NDArray


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


# ---- images --------------------------------------------------------------------------------------


def encode_residual(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(3, n, h, w) residuals of RGB images: differences along rows and columns of G, R-G and B-G, modulo
    256."""
    red, green, blue = (images[..., k].astype(np.int64) for k in range(3))
    planes = np.stack([green, red - green, blue - green])
    down = np.diff(planes, axis=-2, prepend=0)
    return (np.diff(down, axis=-1, prepend=0) % 256).astype(np.uint8)


def write_images(
    folder: Path, n_train: int = 420, n_test: int = 180, seed: int = 0
) -> dict[str, NDArray[np.uint8]]:
    """A `fashion_mnist.npz` of random 28x28 images; labels are the row modulo 10."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", n_train), ("test", n_test)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(n) % 10).astype(np.uint8)
    np.savez(folder / "fashion_mnist.npz", **arrays)
    return arrays


def write_cifar100(folder: Path, n_train: int = 200, n_test: int = 100) -> dict[str, NDArray[np.uint8]]:
    """`cifar100_train.npz` and `cifar100_test.npz`; the fine label is the row modulo 100, its superclass that
    modulo 20."""
    rng = np.random.default_rng(1)
    arrays = {}
    for part, n in (("train", n_train), ("test", n_test)):
        images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        fine = (np.arange(n) % 100).astype(np.uint8)
        arrays |= {f"x_{part}": images, f"fine_{part}": fine}
        np.savez(
            folder / f"cifar100_{part}.npz",
            residual=encode_residual(images),
            y=fine,
            class_names=np.array([f"fine {k}" for k in range(100)]),
            fine_to_coarse=(np.arange(100) % 20).astype(np.uint8),
        )
    return arrays


@pytest.fixture
def encode() -> Callable[..., NDArray[np.uint8]]:
    return encode_residual


@pytest.fixture
def images(tmp_path: Path) -> dict[str, NDArray[np.uint8]]:
    """600 random grey images in `tmp_path`; see `write_images`."""
    return write_images(tmp_path)


@pytest.fixture
def cifar100(tmp_path: Path) -> dict[str, NDArray[np.uint8]]:
    """300 random colour images in `tmp_path`; see `write_cifar100`."""
    return write_cifar100(tmp_path)
