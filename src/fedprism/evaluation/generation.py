"""Greedy decoding with a method's predictor, for batches of prompts that are padded on the right.

A decoding batch holds, besides the columns of its rows, `input_ids`, `attention_mask`, `position_ids` (the
place of each token in its own row, padding not counted) and `use_cache`. Where the predictor's outputs carry
`past`, later batches hold it, the one new token of each row as `input_ids` (b, 1), its `position_ids` (b, 1)
and the `attention_mask` of everything so far (b, T + new); prompts' padding stays masked in between. Where
they do not, each step is a pass over prompt and answer of the rows that are still open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

NOTHING = -1  # stands behind the end of an answer


def decode_greedily(
    predict: Callable[[Mapping[str, Any]], Any], batch: Mapping[str, Tensor], *, end: int, new_tokens: int
) -> Tensor:
    """The likeliest next token again and again, until the end token or for `new_tokens` tokens.

    predict: batch -> Outputs with logits (b, T, V). batch: `input_ids` and `attention_mask`, (b, T), padded
    on the right, every row with a token; and columns, (b,). Returns (b, new_tokens) int64 token ids without
    the end token, -1 behind it. Among equally likely tokens the lowest id is taken."""
    columns = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    b, lengths = len(ids), mask.sum(1)
    answers = torch.full((b, new_tokens), NOTHING, dtype=torch.int64, device=ids.device)
    at = torch.arange(b, device=ids.device)  # rows that are still open
    past: Any = None
    with torch.no_grad():
        for step in range(new_tokens):
            if past is None:
                out = predict(_whole(columns, ids, mask, lengths, answers, at, step))
                logits = out.logits[torch.arange(len(at)), lengths[at] + step - 1]
                past = getattr(out, "past", None)
            else:
                out = predict(_one_more(columns, mask, lengths, answers, end, step, past))
                logits, past = out.logits[at, -1], getattr(out, "past", None)
            token = logits.argmax(-1)
            answers[at, step] = torch.where(token == end, NOTHING, token)
            at = at[token != end]
            if not len(at):
                break
    return answers


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _whole(
    columns: Mapping[str, Tensor], ids: Tensor, mask: Tensor, lengths: Tensor, answers: Tensor, at: Tensor,
    step: int,
) -> dict[str, Any]:  # fmt: skip
    """Prompt and answer so far of the open rows, padded on the right; step 0 has all rows."""
    pad = torch.zeros(len(at), step, dtype=ids.dtype, device=ids.device)
    whole, real = torch.cat([ids[at], pad], 1), torch.cat([mask[at], pad.to(mask.dtype)], 1)
    new = lengths[at, None] + torch.arange(step, device=ids.device)  # (b, step) places behind the prompts
    whole, real = whole.scatter(1, new, answers[at, :step]), real.scatter(1, new, 1)
    return {
        **{name: value[at] for name, value in columns.items()},
        "input_ids": whole,
        "attention_mask": real,
        "position_ids": _positions(real),
        "use_cache": step == 0,
    }


def _one_more(
    columns: Mapping[str, Tensor], mask: Tensor, lengths: Tensor, answers: Tensor, end: int, step: int,
    past: Any,
) -> dict[str, Any]:  # fmt: skip
    """The last token of every row; closed rows go on with their end token, which nothing reads."""
    last = answers[:, step - 1 : step]
    return {
        **columns,
        "input_ids": torch.where(last == NOTHING, end, last),
        "attention_mask": torch.cat([mask, torch.ones_like(answers[:, :step]).to(mask.dtype)], 1),
        "position_ids": (lengths + step - 1)[:, None],
        "use_cache": True,
        "past": past,
    }
