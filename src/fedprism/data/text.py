"""From text to padded batches: templates, tokenising, ragged storage, trimmed and length-bucketed batches.

Token ids are kept ragged, one flat array and offsets; a batch is padded to its own longest row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedprism.data.batching import epoch_batches
from fedprism.data.sources import TextTask

BUCKET_WINDOW = 8  # batches sorted by length together
SHORTEST_MAX_LENGTH = 8  # room for the special tokens of a pair and some text


@dataclass(frozen=True, eq=False)
class Rows:
    """One split of one participant: n rows, immutable.

    columns: name -> (n,) tensor; at least `label`, `task` (index in the federation's tasks) and `row` (an id,
    unique over the federation's data), all int64. tokens: (total,) int32 ids, row i at
    offsets[i]:offsets[i + 1]. offsets: (n + 1,) int64. token_types: (total,) int32, or None where the
    tokenizer gives none. response: (total,) bool, the tokens that a language model is scored on, or None.
    features: (n, d) float32 in place of the text, or None. pad: id of the padding."""

    columns: Mapping[str, Tensor]
    tokens: Tensor | None = None
    offsets: Tensor | None = None
    token_types: Tensor | None = None
    features: Tensor | None = None
    pad: int = 0
    response: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in self.columns.items()}
        if self.features is not None:
            sizes["features"] = len(self.features)
        if self.offsets is not None:
            sizes["offsets"] = len(self.offsets) - 1
        if not {"label", "task", "row"} <= sizes.keys() or len(set(sizes.values())) != 1:
            raise ValueError(f"rows: got columns {sizes}, needs label, task and row, all of one length")
        if (self.tokens is None) != (self.offsets is None) or (self.tokens is None) == (
            self.features is None
        ):
            raise ValueError("rows: needs either tokens with offsets or features, and not both")
        if self.response is not None and (self.tokens is None or len(self.response) != len(self.tokens)):
            raise ValueError("rows: needs a response mark for each token and tokens for each mark")

    def __len__(self) -> int:
        return len(self.columns["label"])

    @cached_property
    def lengths(self) -> Tensor:
        """(n,) int64 tokens of each row; zeros for rows of features."""
        return torch.zeros(len(self), dtype=torch.int64) if self.offsets is None else self.offsets.diff()

    def select(self, index: Tensor | ArrayLike) -> Self:
        """The rows at `index` ((k,) positions or an (n,) mask), in that order."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at.to(torch.int64)
        chosen: dict[str, Any] = {"columns": {name: column[at] for name, column in self.columns.items()}}
        if self.features is not None:
            return replace(self, features=self.features[at], **chosen)
        tokens, offsets = self._text()
        lengths = self.lengths[at]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        source = torch.arange(int(ends[-1])) + torch.repeat_interleave(offsets[:-1][at] - ends[:-1], lengths)
        types = None if self.token_types is None else self.token_types[source]
        marks = None if self.response is None else self.response[source]
        return replace(self, tokens=tokens[source], offsets=ends, token_types=types, response=marks, **chosen)

    def with_features(self, features: Tensor) -> Self:
        """The same rows with (n, d) features in place of the text; batches then hold `features`."""
        if features.ndim != 2 or len(features) != len(self):
            raise ValueError(f"rows: got features of shape {tuple(features.shape)}, needs ({len(self)}, d)")
        return replace(
            self, features=features.to(torch.float32), tokens=None, offsets=None, token_types=None,
            response=None,
        )  # fmt: skip

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, one after another. Raises ValueError for no parts or different kinds."""
        if not parts:
            raise ValueError("rows: nothing to concatenate, needs at least one part")
        kinds = {
            (frozenset(p.columns), p.features is None, p.token_types is None, p.response is None, p.pad)
            for p in parts
        }
        if len(kinds) > 1:
            raise ValueError("rows: parts differ in columns, form or padding; build them with one tokenizer")
        columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
        if parts[0].features is not None:
            return Rows(columns, features=torch.cat([p.features for p in parts if p.features is not None]))
        lengths = torch.cat([part.lengths for part in parts])
        return Rows(
            columns,
            tokens=torch.cat([part._text()[0] for part in parts]),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            token_types=None
            if parts[0].token_types is None
            else torch.cat([p.token_types for p in parts if p.token_types is not None]),
            pad=parts[0].pad,
            response=None
            if parts[0].response is None
            else torch.cat([p.response for p in parts if p.response is not None]),
        )

    def batches(
        self,
        size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of at most `size` rows: whole epochs (default one), or exactly `steps` batches over as many
        epochs as that takes.

        With a generator an epoch is shuffled, sorted by length inside windows of 8 batches, and the batches
        of a window are visited in random order; a short batch holds random rows and comes last. One number is
        drawn from the generator, when this is called; the order follows from it, whatever else draws later.
        Without a generator rows come sorted by length. Every row comes once per epoch. A batch holds the
        columns and, for text, `input_ids` and `attention_mask` (and `token_type_ids`), (b, T) int64 with T
        its longest row, and `response` (b, T) bool where rows have it; for features, `features` (b, d)
        float32. Raises ValueError for a size, epochs or steps out of range, or steps without rows."""
        positions = epoch_batches(
            len(self), size, partial(self._epoch, size), epochs=epochs, steps=steps, generator=generator
        )
        return map(self._batch, positions)

    def content_hash(self) -> str:
        """SHA-256 (hex) of the content without columns: tokens, offsets, token types and response marks, or
        features."""
        digest = hashlib.sha256()
        for name in ("tokens", "offsets", "token_types", "features", "response"):
            value = getattr(self, name)
            if value is not None:
                digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
                digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _text(self) -> tuple[Tensor, Tensor]:
        if self.tokens is None or self.offsets is None:
            raise ValueError("rows: these rows hold features, the text was asked for")
        return self.tokens, self.offsets

    def _epoch(self, size: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Positions of each batch of one epoch."""
        n = len(self)
        if generator is None:
            yield from torch.split(torch.argsort(self.lengths, stable=True), size) if n else ()
            return
        order = torch.randperm(n, generator=generator)
        whole = n - n % size
        for window in torch.split(order[:whole], size * BUCKET_WINDOW) if whole else ():
            batches = torch.split(window[torch.argsort(self.lengths[window], stable=True)], size)
            for k in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[k]
        if n > whole:
            yield order[whole:]

    def _batch(self, at: Tensor) -> dict[str, Tensor]:
        batch = {name: column[at] for name, column in self.columns.items()}
        if self.features is not None:
            return {"features": self.features[at], **batch}
        tokens, offsets = self._text()
        lengths = self.lengths[at]
        reach = torch.arange(int(lengths.max()))
        real = reach < lengths[:, None]  # (b, T)
        source = torch.where(real, offsets[:-1][at][:, None] + reach, 0)
        text = {
            "input_ids": torch.where(real, tokens[source].long(), self.pad),
            "attention_mask": real.long(),
        }
        if self.token_types is not None:
            text["token_type_ids"] = torch.where(real, self.token_types[source].long(), 0)
        if self.response is not None:
            text["response"] = self.response[source] & real
        return {**text, **batch}


def texts(task: TextTask, positions: NDArray[np.int64]) -> tuple[list[str], list[str] | None]:
    """The two texts that the encoder reads for the rows at `positions` of the task's file.

    Single sentences and pairs are taken as they are; where rows turn on a word (WiC) the first text is
    `word: text_a`. Returns first texts and second texts (None for a single-sentence task)."""
    first = [task.text_a[i] if task.word is None else f"{task.word[i]}: {task.text_a[i]}" for i in positions]
    return first, None if task.text_b is None else [task.text_b[i] for i in positions]


def tokenize(
    task: TextTask,
    positions: NDArray[np.int64],
    tokenizer: Any,
    max_length: int,
    *,
    task_index: int = 0,
    row_offset: int = 0,
) -> Rows:
    """Tokenise some rows of a task, truncated to `max_length` tokens from the longer text of a pair.

    positions: (k,) int64 positions in the task's file. tokenizer: a Hugging Face tokenizer. task_index: value
    of the column `task`. row_offset: added to the positions to give the column `row`. Raises ValueError for
    a max_length below 8 or above what the tokenizer allows."""
    limit = getattr(tokenizer, "model_max_length", None)
    if max_length < SHORTEST_MAX_LENGTH or (limit is not None and max_length > limit):
        raise ValueError(
            f"tokenize: max_length is {max_length}, must be >= {SHORTEST_MAX_LENGTH}"
            + (f" and <= {limit} for this tokenizer" if limit is not None and limit < 1_000_000 else "")
            + "; correct model.max_length"
        )
    encoded: Mapping[str, list[list[int]]] = {"input_ids": []}
    if len(positions):
        first, second = texts(task, positions)
        encoded = tokenizer(
            first,
            second,
            truncation="longest_first",
            max_length=max_length,
            padding=False,
            return_attention_mask=False,
        )
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids")
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)]).astype(np.int64)
    pad = getattr(tokenizer, "pad_token_id", None)
    at = torch.as_tensor(np.asarray(positions, dtype=np.int64))
    return Rows(
        {
            "label": torch.from_numpy(task.label[at.numpy()]),
            "task": torch.full_like(at, task_index),
            "row": at + row_offset,
        },
        tokens=_flat(ids),
        offsets=torch.from_numpy(offsets),
        token_types=None if types is None else _flat(types),
        pad=0 if pad is None else int(pad),
    )


def _flat(rows: list[list[int]]) -> Tensor:
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32))
