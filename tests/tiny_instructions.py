"""Bytes as tokens, and a folder of made-up instructions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ByteTokenizer:
    """Bytes are ids 0 to 255, called like a Hugging Face tokenizer; 256 ends a text, 257 pads."""

    eos_token_id, pad_token_id, bos_token_id = 256, 257, None
    vocabulary = 258

    def __init__(self, start: int | None = None, appends_end: bool = False) -> None:
        """start: an id that begins a text where special tokens are asked for. appends_end: as T5's does."""
        self.bos_token_id, self.appends_end = start, appends_end

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, return_attention_mask: bool, verbose: bool
    ) -> dict[str, list[list[int]]]:
        assert (return_attention_mask, verbose) == (False, False)
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        last = [self.eos_token_id] if add_special_tokens and self.appends_end else []
        return {"input_ids": [[*first, *text.encode(), *last] for text in texts]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def write_jsonl(path: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    """Write objects, or lines as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def made_up(categories: dict[str, int]) -> list[dict[str, Any]]:
    """So many short instructions of each category, all different."""
    return [
        {"instruction": f"say {name} {i}", "response": f"{name[0] * (1 + i % 4)}.", "category": name}
        for name, n in categories.items()
        for i in range(n)
    ]
