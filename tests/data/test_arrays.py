"""Rows of images and tables: batches, selection, hashes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.data.arrays import ImageRows, TableRows


def columns(n: int) -> dict[str, torch.Tensor]:
    at = torch.arange(n)
    return {
        "label": at % 3,
        "task": torch.zeros_like(at),
        "row": at + 100,
        "client": torch.full_like(at, 4),
        "component": at % 2,
    }


def image_rows(n: int = 11) -> ImageRows:
    """Row i has the constant level 20 i."""
    levels = (20 * torch.arange(n)).to(torch.uint8)
    return ImageRows(columns(n), levels[:, None, None, None].expand(-1, 3, 2, 2).contiguous())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(batches: Any) -> list[list[int]]:
    return [(batch["row"] - 100).tolist() for batch in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def test_a_batch_holds_normalised_images_beside_its_columns() -> None:
    (batch,) = image_rows(2).batches(5)
    assert set(batch) == {"x", "label", "task", "row", "client", "component"}
    assert batch["x"].shape == (2, 3, 2, 2) and batch["x"].dtype == torch.float32
    # (x - 0.5) / 0.5 of 0 and of 20 / 255
    assert batch["x"][0].unique().tolist() == [-1]
    assert batch["x"][1].unique().tolist() == pytest.approx([40 / 255 - 1], abs=1e-6)
    assert batch["client"].tolist() == [4, 4] and batch["component"].tolist() == [0, 1]


def test_epochs_hold_every_row_once_and_end_with_the_short_batch() -> None:
    rows = image_rows()
    assert ids(rows.batches(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    shuffled = ids(rows.batches(4, epochs=2, generator=seeded()))
    assert [len(batch) for batch in shuffled] == [4, 4, 3, 4, 4, 3]
    assert sorted(flat(shuffled[:3])) == sorted(flat(shuffled[3:])) == list(range(11))
    assert shuffled[:3] != shuffled[3:]
    assert shuffled == ids(rows.batches(4, epochs=2, generator=seeded()))
    assert ids(rows.batches(4, steps=4, generator=seeded())) == shuffled[:4]


def test_full_batches_have_no_short_one() -> None:
    rows = image_rows()
    batches = ids(rows.batches(4, steps=11, generator=seeded(), full=True))
    walk = flat(batches)
    assert {len(batch) for batch in batches} == {4}
    assert all(sorted(walk[k : k + 11]) == list(range(11)) for k in (0, 11, 22, 33))
    with pytest.raises(ValueError, match="full batches got epochs=2 and steps=None, needs steps alone"):
        rows.batches(4, epochs=2, full=True)


def test_select_and_concat_keep_inputs_with_their_columns() -> None:
    rows = image_rows()
    picked = rows.select(np.array([7, 2, 2]))
    assert isinstance(picked, ImageRows)
    assert picked.inputs[:, 0, 0, 0].tolist() == [140, 40, 40]
    assert picked.columns["row"].tolist() == [107, 102, 102]
    mask = torch.arange(11) < 6
    again = ImageRows.concat([rows.select(mask), rows.select(~mask)])
    assert again.content_hash() == rows.content_hash()
    assert torch.equal(again.columns["row"], rows.columns["row"])
    assert len(rows.select([])) == 0 and list(rows.select([]).batches(3, epochs=2)) == []
    with pytest.raises(ValueError, match="parts differ"):
        ImageRows.concat([rows, ImageRows(columns(1), torch.zeros(1, 3, 2, 2, dtype=torch.float16))])


def test_content_hash_sees_a_pixel_but_no_column() -> None:
    rows = image_rows()
    changed = rows.inputs.clone()
    changed[3, 1, 0, 1] += 1
    relabelled = ImageRows({**rows.columns, "label": 2 - rows.columns["label"]}, rows.inputs)
    assert ImageRows(rows.columns, changed).content_hash() != rows.content_hash()
    assert relabelled.content_hash() == rows.content_hash()


def test_half_precision_images_are_read_in_the_same_range() -> None:
    half = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float16)[:, None, None, None].expand(-1, 3, 2, 2)
    assert ImageRows(columns(3), half).x()[:, 0, 0, 0].tolist() == [-1, -0.5, 1]


def test_rows_of_a_table_are_given_as_they_are() -> None:
    table = torch.tensor([[1.5, -2.0], [0.0, 3.0]])
    (batch,) = TableRows(columns(2), table).batches(2)
    assert torch.equal(batch["x"], table)


@pytest.mark.parametrize(
    "kind, inputs, message",
    [
        (ImageRows, torch.zeros(2, 3, 2, 2), "type torch.float32, needs .* in uint8 or float16"),
        (ImageRows, torch.zeros(2, 3, 2, dtype=torch.uint8), r"shape \(2, 3, 2\)"),
        (ImageRows, torch.zeros(3, 3, 2, 2, dtype=torch.uint8), "all of one length"),
        (TableRows, torch.tensor([[1.0], [float("nan")]]), "needs .* finite float32"),
        (TableRows, torch.zeros(2, 2, dtype=torch.float64), "finite float32"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(kind: Any, inputs: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(columns(2), inputs)
