"""Rows whose inputs are arrays: images and tables, with the same interface as rows of text.

Inputs are stored once, compactly, and turned into float32 batch by batch.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedprism.data.batching import epoch_batches, full_batches
from fedprism.data.shifts import normalise, unit_range

COLUMNS = ("label", "task", "row", "client", "component")
UNKNOWN_COMPONENT = -1


@dataclass(frozen=True, eq=False)
class ArrayRows(abc.ABC):
    """One split of one participant: n rows, immutable.

    columns: name -> (n,) int64 tensor: label; task (0, the federation has one); row (an id, unique over the
    federation's data); client; component (the true one, for purity only; -1 where nobody knows it).
    inputs: (n, ...) as stored."""

    columns: Mapping[str, Tensor]
    inputs: Tensor

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in self.columns.items()} | {"inputs": len(self.inputs)}
        if not set(COLUMNS) <= sizes.keys() or len(set(sizes.values())) != 1:
            raise ValueError(f"rows: got columns {sizes}, needs {', '.join(COLUMNS)}, all of one length")
        self._check_inputs()

    @abc.abstractmethod
    def _check_inputs(self) -> None:
        """Raises ValueError for inputs of the wrong kind."""

    @abc.abstractmethod
    def x(self, index: Tensor | slice = slice(None)) -> Tensor:
        """(k, ...) float32 inputs as a model reads them, of the rows at `index` (default all)."""

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, index: Tensor | ArrayLike) -> Self:
        """The rows at `index` ((k,) positions or an (n,) mask), in that order."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at.to(torch.int64)
        return replace(
            self, inputs=self.inputs[at], columns={name: column[at] for name, column in self.columns.items()}
        )

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one after another. Raises ValueError for no parts or different kinds."""
        if not parts:
            raise ValueError("rows: nothing to concatenate, needs at least one part")
        kinds = {(type(p), frozenset(p.columns), p.inputs.dtype, p.inputs.shape[1:]) for p in parts}
        if len(kinds) > 1:
            raise ValueError("rows: parts differ in columns, type or shape; build them with equal settings")
        return replace(
            parts[0],
            inputs=torch.cat([part.inputs for part in parts]),
            columns={name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        )

    def batches(
        self,
        size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        generator: torch.Generator | None = None,
        full: bool = False,
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of at most `size` rows: whole epochs (default one), or exactly `steps` batches over as
        many epochs as that takes.

        With a generator an epoch is shuffled; without one rows come in their order. One number is drawn from
        the generator, when this is called; the order follows from it. Every row comes once per epoch and a
        short batch comes last. full: with `steps`, every batch has min(size, n) rows, the rest of a
        permutation starting the batch that the next one fills (FedSPM spec 3, Batches). A batch holds `x`
        ((b, ...) float32) and the columns. Raises ValueError for a size, epochs or steps out of range, steps
        without rows, or full without steps."""
        if not full:
            positions = epoch_batches(
                len(self), size, lambda g: self._epoch(size, g), epochs=epochs, steps=steps,
                generator=generator,
            )  # fmt: skip
        elif steps is None or epochs is not None:
            raise ValueError(
                f"batches: full batches got epochs={epochs} and steps={steps}, needs steps alone"
            )
        else:
            positions = full_batches(len(self), size, steps, generator)
        return map(self._batch, positions)

    def content_hash(self) -> str:
        """SHA-256 (hex) of the inputs as stored, without columns."""
        digest = hashlib.sha256(f"inputs:{self.inputs.dtype}:{tuple(self.inputs.shape)};".encode())
        digest.update(self.inputs.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _epoch(self, size: int, generator: torch.Generator | None) -> Sequence[Tensor]:
        n = len(self)
        if not n:
            return ()
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        return torch.split(order, size)

    def _batch(self, at: Tensor) -> dict[str, Tensor]:
        return {"x": self.x(at), **{name: column[at] for name, column in self.columns.items()}}


class ImageRows(ArrayRows):
    """Rows of images. inputs: (n, channels, height, width), uint8 in 0..255 or float16 in [0, 1].

    `x` is (x - 0.5) / 0.5, in [-1, 1] (FedSPM spec 6, item 8)."""

    def _check_inputs(self) -> None:
        if self.inputs.ndim != 4 or self.inputs.dtype not in (torch.uint8, torch.float16):
            raise ValueError(
                f"rows: got images of shape {tuple(self.inputs.shape)} and type {self.inputs.dtype}, needs "
                "(n, channels, height, width) in uint8 or float16"
            )

    def x(self, index: Tensor | slice = slice(None)) -> Tensor:
        """(k, channels, height, width) float32 in [-1, 1]."""
        return normalise(unit_range(self.inputs[index]))


class TableRows(ArrayRows):
    """Rows of a table. inputs: (n, d) float32, finite; `x` is the same."""

    def _check_inputs(self) -> None:
        if (
            self.inputs.ndim != 2
            or self.inputs.dtype != torch.float32
            or not bool(self.inputs.isfinite().all())
        ):
            raise ValueError(
                f"rows: got a table of shape {tuple(self.inputs.shape)} and type {self.inputs.dtype}, needs "
                "(n, d) finite float32"
            )

    def x(self, index: Tensor | slice = slice(None)) -> Tensor:
        """(k, d) float32."""
        return self.inputs[index]
