"""Heart disease: the shipped table, missing values, medians and standardising by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedprism.data.catalogue import ARRAYS
from fedprism.data.sources import dataset_root
from fedprism.data.tables import (
    ATTRIBUTES,
    INPUTS,
    MAY_MISS,
    Floats,
    load_heart,
    preprocessing,
    scalings,
)

AT = {name: k for k, name in enumerate(ATTRIBUTES)}
FLAG = {name: INPUTS.index(f"{name} missing") for name in MAY_MISS}


def test_shipped_table_has_four_hospitals() -> None:
    heart = load_heart()
    rows = {
        name: [
            int((heart.center == i).sum()),
            int(heart.label[heart.center == i].sum()),
            int((~heart.test)[heart.center == i].sum()),
        ]
        for i, name in enumerate(heart.center_names)
    }
    assert rows == {
        "cleveland": [303, 139, 202],
        "hungarian": [294, 106, 196],
        "switzerland": [123, 115, 83],
        "va": [200, 149, 133],
    }
    assert ARRAYS["heart"].splits == {"train": 614, "test": 306}


def test_zeros_that_nobody_measured_are_missing() -> None:
    heart = load_heart()
    raw = pa.parquet.read_table(dataset_root() / "heart_disease.parquet")
    for name in ("chol", "trestbps", "thal"):
        values = raw[name].to_numpy()
        gone = np.isnan(values) | (values == 0)
        assert np.array_equal(np.isnan(heart.values[:, AT[name]]), gone)
    switzerland = heart.center == heart.center_names.index("switzerland")
    assert np.isnan(heart.values[switzerland, AT["chol"]]).all()
    assert np.nanmin(heart.values[:, AT["oldpeak"]]) < 0  # zeros and less of other attributes stay
    assert np.array_equal(heart.values[:, AT["sex"]], raw["sex"].to_numpy())


def fill_and_standardise(values: list[Floats], trains: list[np.ndarray], **how: str) -> list[Floats]:
    """Inputs of each client."""
    each = scalings(values, trains, **how)
    return [scaling.inputs(v) for scaling, v in zip(each, values, strict=True)]


def two_clients() -> tuple[list[Floats], list[np.ndarray]]:
    """13 attributes that count up; client 0 lacks one chol, client 1 all; the last row of each is a test
    row."""
    values = [
        np.tile(np.arange(1.0, 5.0)[:, None], (1, 13)),
        np.tile(np.arange(11.0, 14.0)[:, None], (1, 13)),
    ]
    values[0][1, AT["chol"]] = np.nan
    values[0][3, AT["chol"]] = np.nan
    values[1][:, AT["chol"]] = np.nan
    return values, [np.array([True, True, True, False]), np.array([True, True, False])]


def test_missing_values_take_the_clients_training_median_and_are_flagged() -> None:
    values, trains = two_clients()
    first, second = fill_and_standardise(values, trains, imputation="local", statistics="federated")
    assert first.shape == (4, 23) and second.shape == (3, 23)
    # chol of client 0 in training is 1, ?, 3: median 2; client 1 never saw one: the federated median, also 2.
    filled = np.array([1, 2, 3, 2, 2])  # the training rows of both
    mean, deviation = filled.mean(), filled.std()
    assert first[:, AT["chol"]] == pytest.approx((np.array([1, 2, 3, 2]) - mean) / deviation)
    assert second[:, AT["chol"]] == pytest.approx(np.full(3, (2 - mean) / deviation))
    assert first[:, FLAG["chol"]].tolist() == [0, 1, 0, 1] and second[:, FLAG["chol"]].tolist() == [1, 1, 1]
    assert first[:, FLAG["ca"]].tolist() == [0, 0, 0, 0]
    # age in training: 1, 2, 3, 11, 12
    age = np.array([1, 2, 3, 11, 12])
    assert first[:, AT["age"]] == pytest.approx((np.array([1, 2, 3, 4]) - age.mean()) / age.std())


def test_federated_filling_weighs_the_clients_medians_by_what_they_observed() -> None:
    values, trains = two_clients()
    values[1][0, AT["chol"]] = 8.0  # medians 2 (of two values) and 8 (of one): (2 * 2 + 8) / 3 = 4
    first, second = fill_and_standardise(values, trains, imputation="federated", statistics="federated")
    filled = np.array([1, 4, 3, 8, 4])
    assert first[[1, 3], AT["chol"]] == pytest.approx(np.full(2, (4 - filled.mean()) / filled.std()))
    assert second[1, AT["chol"]] == pytest.approx((4 - filled.mean()) / filled.std())


def test_local_statistics_centre_each_clients_training_rows() -> None:
    heart = load_heart()
    members = [np.flatnonzero(heart.center == i) for i in range(4)]
    values, trains = [heart.values[rows] for rows in members], [~heart.test[rows] for rows in members]
    for x, train in zip(fill_and_standardise(values, trains, statistics="local"), trains, strict=True):
        assert np.abs(x[train, :13].mean(0)).max() < 1e-9
        spread = x[train, :13].std(0)
        assert ((np.abs(spread - 1) < 1e-9) | (spread < 1e-9)).all()  # a constant column stays one
    shared = fill_and_standardise(values, trains, statistics="federated")
    pooled = np.concatenate([x[train] for x, train in zip(shared, trains, strict=True)])
    assert np.abs(pooled[:, :13].mean(0)).max() < 1e-9 and np.abs(pooled[:, :13].std(0) - 1).max() < 1e-9
    assert all(np.isfinite(x).all() for x in shared)


@pytest.mark.parametrize("imputation", ["local", "federated"])
@pytest.mark.parametrize("statistics", ["local", "federated"])
def test_test_rows_have_no_part_in_the_numbers(imputation: str, statistics: str) -> None:
    values, trains = two_clients()
    before = fill_and_standardise(values, trains, imputation=imputation, statistics=statistics)
    changed = [value.copy() for value in values]
    changed[0][3] = 1000.0
    after = fill_and_standardise(changed, trains, imputation=imputation, statistics=statistics)
    assert np.array_equal(before[0][:3], after[0][:3]) and np.array_equal(before[1], after[1])


def test_preprocessing_says_by_hand_what_training_rows_were_and_how_a_new_row_is_turned() -> None:
    values, trains = two_clients()
    values[0][3, AT["age"]] = 1000.0  # a test row
    facts = preprocessing(values, trains, scalings(values, trains, imputation="federated"))
    assert facts["columns"] == list(ATTRIBUTES) and facts["indicators"] == list(MAY_MISS)
    assert facts["may_be_empty"] == ["chol"]
    assert facts["zero_is_missing"] == ["chol", "trestbps", "thal"]
    # training rows: 1, 2, 3 and 11, 12; chol 1, ?, 3 and none
    assert facts["ranges"][AT["age"]] == [1, 12] and facts["ranges"][AT["chol"]] == [1, 3]
    assert facts["codes"]["thal"] == [1, 2, 3, 11, 12] and "age" not in facts["codes"]
    assert facts["fill"][AT["chol"]] == 2
    assert facts["mean"][AT["age"]] == pytest.approx(29 / 5)
    assert facts["deviation"][AT["age"]] == pytest.approx(np.std([1, 2, 3, 11, 12]))
    for own, fact in (("imputation", "fill"), ("statistics", "mean")):
        how = {"imputation": "federated", "statistics": "federated", own: "local"}
        alone = preprocessing(values, trains, scalings(values, trains, **how))
        assert {name for name in ("fill", "mean") if alone[name] is None} == {fact}
    values[0][:, AT["chol"]] = np.nan
    nobody = preprocessing(values, trains, scalings(values, trains, imputation="federated"))
    assert nobody["ranges"][AT["chol"]] is None and nobody["fill"][AT["chol"]] == 0


def test_bad_tables_and_settings_get_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, trains = two_clients()
    with pytest.raises(ValueError, match="imputation is 'mean', needs one of federated, local"):
        fill_and_standardise(values, trains, imputation="mean")
    with pytest.raises(ValueError, match="client 1 has no training rows"):
        fill_and_standardise(values, [trains[0], np.zeros(3, dtype=bool)])
    with pytest.raises(FileNotFoundError, match=r"no heart_disease.parquet in .*; restore it or correct"):
        load_heart(tmp_path)
    path = tmp_path / "heart_disease.parquet"
    raw = pa.parquet.read_table(dataset_root() / "heart_disease.parquet")
    for table, message in (
        (raw.drop_columns(["ca"]), "heart_disease.parquet lacks ca; needs center, 13 attributes"),
        (raw.slice(0, 0), "heart_disease.parquet has no rows"),
        (
            raw.set_column(raw.column_names.index("age"), "age", pa.nulls(len(raw), pa.float32())),
            r"row 0 \(the first is 0\) has no age",
        ),
        (
            raw.set_column(raw.column_names.index("label"), "label", pa.array([2] * len(raw))),
            "has other labels than 0, 1",
        ),
    ):
        pa.parquet.write_table(table, path)
        with pytest.raises(ValueError, match=message) as caught:
            load_heart(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"no table")
    with pytest.raises(ValueError, match="is not a readable parquet file"):
        load_heart(tmp_path)
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path))
    with pytest.raises(ValueError, match=r"has SHA-256 .*the shipped file has 51b753c9a89e"):
        load_heart()
