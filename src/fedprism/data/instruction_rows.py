"""Instructions as token rows: prompt, response and end token, with a mark on what a model is scored on.

Truncation: a prompt and response of more than max_length tokens lose tokens from the left of the prompt,
behind a start token. A quarter of max_length stays with the prompt; a response that is longer than the rest
is cut at its right, and its end token with it. Prompts without a response lose their left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedprism.data.text import Rows

PROMPT_SHARE = 4  # a prompt keeps one token in so many of max_length


@dataclass
class Cuts:
    """How many rows lost tokens of the prompt, and of the response."""

    rows: int = 0
    prompts: int = 0
    responses: int = 0


def tokenize_instructions(
    prompts: Sequence[str], responses: Sequence[str] | None, tokenizer: Any, max_length: int,
    columns: Mapping[str, torch.Tensor] | None = None, cuts: Cuts | None = None, ends: bool = True,
) -> Rows:  # fmt: skip
    """Rows of prompts, each with its response and the end token marked in `response`, at most max_length
    tokens (truncation: see the module).

    prompts: n texts. responses: n texts, or None for prompts alone. columns: `row` and `task`; the default
    counts rows from 0 in task 0. cuts: is added to. ends: whether the end token follows a response."""
    heads = _encode(tokenizer, prompts, special=True)
    end, start = tokenizer.eos_token_id, getattr(tokenizer, "bos_token_id", None)
    heads = [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in heads]  # some append it
    tails = [[] for _ in heads] if responses is None else _encode(tokenizer, responses, special=False)
    tokens: list[int] = []
    marks: list[bool] = []
    lengths: list[int] = []
    cuts = cuts or Cuts()
    for head, tail in zip(heads, tails, strict=True):
        answer = [*tail, end] if ends and responses is not None else tail
        room = max(max_length - len(answer), min(len(head), max_length // PROMPT_SHARE))
        cut = _cut_left(head, room, start)
        kept = answer[: max_length - len(cut)]
        cuts.rows, cuts.prompts = cuts.rows + 1, cuts.prompts + (len(cut) < len(head))
        cuts.responses += len(kept) < len(answer)
        tokens += [*cut, *kept]
        marks += [False] * len(cut) + [True] * len(kept)
        lengths.append(len(cut) + len(kept))
    n = len(heads)
    pad = getattr(tokenizer, "pad_token_id", None)
    zeros = torch.zeros(n, dtype=torch.int64)
    return Rows(
        {"label": zeros, **(columns or {"row": torch.arange(n), "task": zeros})},
        tokens=torch.tensor(tokens, dtype=torch.int32),
        offsets=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64),
        pad=int(end if pad is None else pad),
        response=None if responses is None else torch.tensor(marks, dtype=torch.bool),
    )


def _encode(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    encoded: Mapping[str, list[list[int]]] = tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"]


def _cut_left(ids: list[int], room: int, start: int | None) -> list[int]:
    """The last `room` ids, behind the start token where there was one."""
    if len(ids) <= room:
        return ids
    if ids[0] == start and room > 1:
        return [ids[0], *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]
