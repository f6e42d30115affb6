"""Greedy decoding of counters: answers by hand, padding, end tokens, and the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny_generator import END, Counter
from torch import Tensor

from fedprism.evaluation.generation import decode_greedily


def padded(*rows: list[int]) -> dict[str, Tensor]:
    """Right-padded with 7, which the counter would count were it not masked."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [7] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "row": torch.arange(len(rows)),
    }


def by_hand(row: list[int], new_tokens: int, shift: int = 0) -> list[int]:
    found: list[int] = []
    while len(found) < new_tokens:
        token = (sum(row + found) + len(row + found) + shift) % 10
        if token == END:
            break
        found.append(token)
    return found + [-1] * (new_tokens - len(found))


def decode(model: Counter, batch: dict[str, Tensor], new_tokens: int) -> list[list[int]]:
    answers = decode_greedily(lambda got: model.apply({}, got), batch, end=END, new_tokens=new_tokens)
    assert answers.dtype == torch.int64
    return answers.tolist()


ROWS = [[1], [2, 0, 3], [3], [8, 8, 8, 8, 8], [4, 3]]


@pytest.mark.parametrize("caches", [False, True])
def test_answers_are_those_by_hand(caches: bool) -> None:
    # [1]: 1 + 1 = 2, then 1 + 2 + 2 = 5, then 1 + 2 + 5 + 3 = 11 -> 1, then 9 + 4 = 13 -> 3
    assert by_hand([1], 4) == [2, 5, 1, 3]
    answers = decode(Counter(caches=caches), padded(*ROWS), 6)
    assert answers == [by_hand(row, 6) for row in ROWS]
    assert any(-1 in row for row in answers) and any(-1 not in row for row in answers)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("shift", range(10))
def test_a_row_is_answered_alone_as_among_others(shift: int, caches: bool) -> None:
    model = Counter(caches=caches, shift=shift)
    together = decode(model, padded(*ROWS), 8)
    assert together == [decode(model, padded(row), 8)[0] for row in ROWS]
    assert together == [by_hand(row, 8, shift) for row in ROWS]


def test_the_cache_reads_one_token_a_step_and_without_it_closed_rows_are_left_out() -> None:
    cached, plain = Counter(caches=True), Counter()
    batch = padded([1], [4, 3])  # 4 + 3 + 2 = 9: the second row ends at once
    assert decode(cached, batch, 3) == decode(plain, batch, 3) == [[2, 5, 1], [-1, -1, -1]]
    assert cached.passes == [(2, 2), (2, 1), (2, 1)]
    assert plain.passes == [(2, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize("caches", [False, True])
def test_decoding_stops_when_every_row_has_ended(caches: bool) -> None:
    model = Counter(caches=caches)
    assert decode(model, padded([4, 3], [8]), 5) == [[-1] * 5, [-1] * 5]
    assert len(model.passes) == 1


def test_columns_and_positions_come_with_every_pass() -> None:
    seen: list[dict[str, Any]] = []
    model = Counter()

    def predict(got: Any) -> Any:
        seen.append(dict(got))
        return model.apply({}, got)

    decode_greedily(predict, padded([4, 3], [1], [2, 2, 2]), end=END, new_tokens=2)
    assert seen[0]["row"].tolist() == [0, 1, 2] and seen[0]["use_cache"]
    assert seen[1]["row"].tolist() == [1] and not seen[1]["use_cache"]  # 2 * 3 + 3 = 9 ends as well
    assert seen[1]["input_ids"].tolist() == [[1, 2, 7, 0]] and seen[1]["attention_mask"].tolist() == [
        [1, 1, 0, 0]
    ]
    assert seen[1]["position_ids"][0, :2].tolist() == [0, 1]


def test_equally_likely_tokens_give_the_lowest() -> None:
    class Undecided:
        logits = torch.zeros(1, 1, 4)

    class Later:
        logits = torch.zeros(1, 2, 4)

    outs = iter([Undecided(), Later()])
    answers = decode_greedily(lambda got: next(outs), padded([1]), end=3, new_tokens=2)
    assert answers.tolist() == [[0, 0]]
