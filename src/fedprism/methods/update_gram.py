"""Inner products and combinations of clients' updates, a block of values at a time (FedTAR, spec 6).

A block is (N, k): k consecutive values of one named tensor, a row per client. Products run in float32
(float64 where the updates are), sums over blocks in float64. Updates stand in memory (`blocks`) or in
safetensors files of one client each (`StoredUpdates`), read twice: for the Gram matrix, then for the
combination, because the coefficients depend on all of the first. Beside the updates a block and the
result are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedprism.trees import Tree

Floats = NDArray[np.float64]
Block = tuple[str, int, Tensor]  # name, position of the first value, (N, k)

BLOCK = 65_536  # values per client in a block
EXACT = 8192  # values per float32 product: longer sums lose digits
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GramAccumulator:
    """G = sum over blocks of block block^T. n: clients N."""

    def __init__(self, n: int) -> None:
        self._sum = torch.zeros(n, n, dtype=torch.float64)

    def add_block(self, block: Tensor) -> None:
        """Add (N, k) values, any k; half precision is widened. Raises ValueError for another N."""
        if block.ndim != 2 or len(block) != len(self._sum):
            raise ValueError(f"gram: got a block of shape {tuple(block.shape)}, needs ({len(self._sum)}, k)")
        for part in block.split(EXACT, 1):
            wide = _wide(part)
            self._sum += (wide @ wide.T).double().cpu()

    def matrix(self) -> Floats:
        """(N, N) float64, symmetric."""
        return ((self._sum + self._sum.T) / 2).numpy()


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def blocks(updates: Sequence[Tree], columns: int = BLOCK) -> Iterator[Block]:
    """Blocks of at most `columns` values of updates in memory, in the order of the first one's names.

    Raises ValueError where names or sizes differ."""
    for name, first in updates[0].items():
        if any(u.keys() != updates[0].keys() or u[name].shape != first.shape for u in updates[1:]):
            raise ValueError(
                f"updates: '{name}' is not of the same names and shapes in all; send the same tensors"
            )
        rows = [update[name].reshape(-1) for update in updates]
        for at in range(0, first.numel(), columns):
            yield name, at, torch.stack([row[at : at + columns] for row in rows])


def grams(parts: Iterable[Block], n: int, group: Callable[[str], str] = lambda name: "") -> dict[str, Floats]:
    """Gram matrices of N clients, by the group of a tensor's name; one group "" unless given."""
    found: dict[str, GramAccumulator] = {}
    for name, _, block in parts:
        found.setdefault(group(name), GramAccumulator(n)).add_block(block)
    return {key: accumulator.matrix() for key, accumulator in found.items()}


def combine(parts: Iterable[Block], like: Tree, beta: Callable[[str], ArrayLike]) -> Tree:
    """sum_i beta_i Delta_i with the names, shapes and types of `like`. beta(name): (N,) coefficients."""
    result = {name: torch.empty(value.numel(), dtype=value.dtype) for name, value in like.items()}
    for name, at, block in parts:
        values = _wide(block)
        share = torch.as_tensor(np.asarray(beta(name))).to(values)
        result[name][at : at + block.shape[1]] = (share @ values).to(result[name].dtype)
    return {name: value.view(like[name].shape) for name, value in result.items()}


class StoredUpdates:
    """Updates of N clients in safetensors files, one each, with the same names, shapes and types.

    Ranges are read straight from their place in the file, so that no more than a block is in memory.
    like: a tree of the names, shapes and types, without storage. Raises ValueError naming the file that
    differs from the first, or holds another type than float."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise ValueError("updates: got no files, needs one per client")
        self._files = [(path, *_layout(path)) for path in paths]
        first = self._files[0][2]
        form = {name: (kind, shape) for name, (kind, shape, _) in first.items()}
        for path, _, layout in self._files[1:]:
            if {name: (kind, shape) for name, (kind, shape, _) in layout.items()} != form:
                raise ValueError(
                    f"updates: {path.name} has other tensors than {paths[0].name}; send the same tensors"
                )
        unknown = {kind for kind, _ in form.values()} - DTYPES.keys()
        if unknown:
            raise ValueError(f"updates: got types {sorted(unknown)}, needs one of {', '.join(DTYPES)}")
        self.like: Tree = {
            name: torch.empty(shape, dtype=DTYPES[kind], device="meta")
            for name, (kind, shape) in form.items()
        }

    def __len__(self) -> int:
        return len(self._files)

    def blocks(self, columns: int = BLOCK) -> Iterator[Block]:
        """As `blocks`, from the disk."""
        for name, value in self.like.items():
            for at in range(0, value.numel(), columns):
                count = min(columns, value.numel() - at)
                block = torch.empty(len(self), count, dtype=value.dtype)
                for row, (path, data, layout) in zip(block, self._files, strict=True):
                    offset = data + layout[name][2] + at * value.element_size()
                    raw = np.fromfile(path, np.uint8, count * value.element_size(), offset=offset)
                    row.copy_(torch.from_numpy(raw).view(value.dtype))
                yield name, at, block


def _layout(path: Path) -> tuple[int, dict[str, tuple[str, tuple[int, ...], int]]]:
    """Where the data of a safetensors file begin, and name -> (type, shape, offset from there)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {n: (e["dtype"], tuple(e["shape"]), int(e["data_offsets"][0])) for n, e in header.items()}
    return 8 + length, dict(sorted(found.items(), key=lambda item: item[1][2]))
