"""Rows from outside: files that can and can't be read, cells that can and can't be used, inputs by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from fedprism.data.sources import dataset_root
from fedprism.data.tables import ATTRIBUTES, load_heart, preprocessing, scalings
from fedprism.serving.rows import Preparation, RefusedRow, read_csv

RECORD: dict[str, Any] = {
    "columns": ["age", "chol", "thal"],
    "fill": [50.0, 200.0, 3.0],
    "mean": [40.0, 250.0, 5.0],
    "deviation": [10.0, 25.0, 2.0],
    "indicators": ["chol", "thal"],
    "zero_is_missing": ["chol"],
    "may_be_empty": ["chol", "thal"],
    "ranges": [[20.0, 70.0], [100.0, 300.0], [3.0, 7.0]],
    "codes": {"thal": [3.0, 6.0, 7.0]},
}
PREPARATION = Preparation.of(RECORD)


def test_a_row_is_filled_and_scaled_by_the_numbers_of_the_run() -> None:
    row = PREPARATION.prepare({"age": "60", "chol": " 275.0", "thal": "7"})
    assert row.inputs.tolist() == [2.0, 1.0, 1.0, 0.0, 0.0]
    assert (row.missing, row.notes) == ((), ())
    # chol takes (200 - 250) / 25, thal (3 - 5) / 2; both are flagged
    gaps = PREPARATION.prepare({"id": "x", "thal": None, "chol": "", "age": 30})
    assert gaps.inputs.tolist() == [-1.0, -2.0, -1.0, 1.0, 1.0]
    assert (gaps.missing, gaps.notes) == (("chol", "thal"), ())
    assert PREPARATION.n_inputs == 5


def test_a_zero_that_nobody_measured_is_missing_and_said_to_be() -> None:
    row = PREPARATION.prepare({"age": "60", "chol": "0", "thal": "3"})
    assert row.inputs.tolist() == [2.0, -2.0, -1.0, 1.0, 0.0]
    assert (row.missing, row.notes) == (("chol",), ("chol 0 counts as missing",))


@pytest.mark.parametrize(
    ("cells", "note"),
    [
        ({"age": "70"}, None),
        ({"age": "20"}, None),
        ({"age": "70.5"}, "age 70.5 is outside 20 to 70, the range of training"),
        ({"age": "-3"}, "age -3 is outside 20 to 70, the range of training"),
        ({"thal": "6.0"}, None),
        ({"thal": "5"}, "thal 5 is none of 3, 6, 7, which training rows had"),
    ],
)
def test_what_training_never_saw_is_answered_with_a_note(cells: dict[str, str], note: str | None) -> None:
    row = PREPARATION.prepare({"age": "60", "chol": "250", "thal": "3", **cells})
    assert row.notes == (() if note is None else (note,))


def test_a_column_that_nobody_observed_has_a_note() -> None:
    blind = Preparation.of({**RECORD, "ranges": [[20, 70], None, [3, 7]]})
    assert blind.prepare({"age": 60, "chol": "", "thal": 3}).notes == ()
    assert blind.prepare({"age": 60, "chol": 5, "thal": 3}).notes == ("chol was never observed in training",)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"age": "60", "thal": "3"}, "lacks chol"),
        ({"age": "60", "thal": "3", "cholest": "4"}, "lacks chol; has unknown cholest (is it chol?)"),
        ({"age": "60", "chol": "1", "thal": "3", "pulse": "4"}, "has unknown pulse"),
        ({"age": "", "chol": "1", "thal": "3"}, "age is missing, which it never was in training"),
        ({"age": "60", "chol": "high", "thal": "3"}, "chol is 'high', needs a number, or nothing where"),
        ({"age": "60", "chol": "2_0", "thal": "3"}, "chol is '2_0', needs a number"),
        ({"age": "60", "chol": "6,5", "thal": "3"}, "chol is '6,5', needs a number"),
        ({"age": "60", "chol": "nan", "thal": "3"}, "chol is 'nan', needs a number"),
        ({"age": "60", "chol": "1e999", "thal": "3"}, "chol is 1e999, needs a finite number"),
        ({"age": float("inf"), "chol": "1", "thal": "3"}, "age is inf, needs a finite number"),
        ({"age": "old", "chol": "1", "thal": "?"}, "age is 'old', needs a number, or nothing where it is "
         "missing; thal is '?', needs"),
    ],
)  # fmt: skip
def test_a_row_that_can_t_be_used_says_which_column_and_what_it_held(
    row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RefusedRow) as refused:
        PREPARATION.prepare(row)
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fact", ["fill", "mean", "deviation"])
def test_numbers_of_each_client_s_own_say_nothing_about_a_row_of_an_unknown_client(fact: str) -> None:
    with pytest.raises(ValueError, match=r"repeat the run with data.imputation = 'federated'"):
        Preparation.of({**RECORD, fact: None})


def test_rows_become_the_very_inputs_that_training_had() -> None:
    heart = load_heart()
    members = [np.flatnonzero(heart.center == i) for i in range(4)]
    values, trains = [heart.values[rows] for rows in members], [~heart.test[rows] for rows in members]
    each = scalings(values, trains, imputation="federated", statistics="federated")
    prepare = Preparation.of(preprocessing(values, trains, each)).prepare
    for v, scaling in zip(values, each, strict=True):
        rows = [prepare(dict(zip(ATTRIBUTES, row, strict=True))).inputs for row in v.tolist()]
        assert np.array_equal(np.stack(rows), scaling.inputs(v))


# ---- files ---------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "patients.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_columns_may_stand_in_any_order_and_cells_in_quotes(tmp_path: Path) -> None:
    text = '\ufeffthal, id ,chol,age\r\n3,"Ann, B.",,61\r\n\r\n,,,\r\n7,Bo,240,"52"\r\n'
    assert read_csv(written(tmp_path, text), PREPARATION.columns) == [
        {"thal": "3", "id": "Ann, B.", "chol": "", "age": "61"},
        {"thal": "7", "id": "Bo", "chol": "240", "age": "52"},
    ]


def test_a_short_row_lacks_columns_and_a_long_one_has_unknown_cells(tmp_path: Path) -> None:
    short, long = read_csv(written(tmp_path, "age,chol,thal\n60,200\n60,200,3,9,8\n"), PREPARATION.columns)
    for row, reason in ((short, "lacks thal"), (long, "has unknown cell 4, cell 5")):
        with pytest.raises(RefusedRow) as refused:
            PREPARATION.prepare(row)
        assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; needs age, chol, thal, and may have id"),
        ("age,chol,thal\n\n", "has no row below the names of its columns; needs age"),
        ("age,thal\n60,3\n", "lacks chol; needs age, chol, thal, and may have id"),
        ("age,cholesterol,thal\n60,1,3\n", "lacks chol and has unknown cholesterol (is it chol?); needs age"),
        ("age,chol,thal,ward\n60,1,3,4\n", "has unknown ward; needs age"),
        ("age,chol,thal,age\n60,1,3,4\n", "has 'age' twice; needs age"),
        ("age;chol;thal\n60;1;3\n", "separates its columns by semicolons; save it with commas"),
        ("age,chol,thal\n60,\"1,3\n", "is no CSV file (unexpected end of data)"),
        (b"age,chol,thal\n60,1,3\xff\n", "is not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_file_that_can_t_be_used_gets_one_clear_line(tmp_path: Path, text: str | bytes, line: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_csv(written(tmp_path, text), PREPARATION.columns)
    assert line in str(refused.value)
    assert str(refused.value).startswith(f"route: {tmp_path / 'patients.csv'} ")
    assert "\n" not in str(refused.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is a folder; name a CSV file"):
        read_csv(tmp_path, PREPARATION.columns)
    with pytest.raises(FileNotFoundError, match="does not exist; name a CSV file"):
        read_csv(tmp_path / "nobody.csv", PREPARATION.columns)


def test_the_shipped_patients_are_rows_of_the_shipped_table_that_no_run_trains_on() -> None:
    rows = pyarrow.parquet.read_table(dataset_root() / "heart_disease.parquet").to_pylist()
    patients = read_csv(dataset_root() / "patients.csv", ATTRIBUTES)
    assert len(patients) == 12
    for patient in patients:
        center, _, number = patient["id"].partition("-")
        row = rows[int(number)]
        assert (row["center"], row["split"]) == (center, "test")
        for name in ATTRIBUTES:
            cell = patient[name]
            assert row[name] is None if cell == "" else np.float32(cell) == np.float32(row[name])
