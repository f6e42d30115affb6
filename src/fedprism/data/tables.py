"""Heart disease in four hospitals: reading, missing values, standardising.

*Missing values.* A zero in chol, trestbps or thal cannot have been measured (thal is 3, 6 or 7) and counts
as missing. Missing values are filled with a number, and a column per attribute that can be missing says
where (0 or 1).

*Categories* (cp, restecg, slope, thal) enter as the numbers of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from fedprism.data.catalogue import ARRAYS
from fedprism.data.sources import dataset_root, verify_checksum

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ATTRIBUTES = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca",
    "thal",
)  # fmt: skip
COMPLETE = ("age", "sex", "cp")  # never missing
MAY_MISS = tuple(name for name in ATTRIBUTES if name not in COMPLETE)
ZERO_IS_MISSING = ("chol", "trestbps", "thal")
INPUTS = (*ATTRIBUTES, *(f"{name} missing" for name in MAY_MISS))
STATISTICS = ("federated", "local")
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True, eq=False)
class LabelledTable:
    """A table as read, checked: n rows.

    name. values: (n, 13) float64 in the order of `ATTRIBUTES`, NaN where missing. label: (n,) int64 in 0..1.
    test: (n,) bool, whether a row belongs to the file's test part. center: (n,) int64. center_names."""

    name: str
    values: Floats
    label: Ints
    test: NDArray[np.bool_]
    class_names: tuple[str, ...]
    center: Ints
    center_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.label)


def load_heart(root: str | Path | None = None) -> LabelledTable:
    """Read and check the heart disease table.

    root: folder with heart_disease.parquet; None or "" for the shipped file, whose checksum is verified.
    Centres are numbered in the order of their first row. Raises FileNotFoundError for a missing file,
    ValueError for a file that does not fit."""
    shipped, source = root is None or str(root) == "", ARRAYS["heart"]
    path = (dataset_root() if shipped else Path(str(root)).expanduser()) / source.file
    if not path.is_file():
        raise FileNotFoundError(f"data: no {source.file} in {path.parent}; restore it or correct data.root")
    if shipped:
        verify_checksum(path, source.sha256)
    try:
        table = pa.parquet.read_table(path)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data: {path.name} is not a readable parquet file ({reason}); replace it"
        ) from error
    missing = [name for name in ("center", *ATTRIBUTES, "label", "split") if name not in table.column_names]
    if missing or not table.num_rows:
        got = f"lacks {', '.join(missing)}" if missing else "has no rows"
        raise ValueError(f"data: {path.name} {got}; needs center, {len(ATTRIBUTES)} attributes, label, split")
    columns = [np.asarray(table[name].to_numpy(), dtype=np.float64) for name in ATTRIBUTES]
    values = np.stack(columns, axis=1)
    for name in ZERO_IS_MISSING:
        column = values[:, ATTRIBUTES.index(name)]
        column[column == 0] = np.nan
    for name in COMPLETE:
        gaps = np.flatnonzero(np.isnan(values[:, ATTRIBUTES.index(name)]))
        if len(gaps):
            raise ValueError(f"data: {path.name}, row {gaps[0]} (the first is 0) has no {name}; drop the row")
    centers = table["center"].to_pylist()
    names = tuple(dict.fromkeys(centers))
    split, label = np.asarray(table["split"].to_pylist()), np.asarray(table["label"].to_pylist())
    if not np.isin(label, (0, 1)).all() or not np.isin(split, ("train", "test")).all():
        raise ValueError(
            f"data: {path.name} has other labels than 0, 1 or splits than train, test; correct it"
        )
    return LabelledTable(
        "heart",
        values,
        label.astype(np.int64),
        split == "test",
        source.labels,
        np.asarray([names.index(center) for center in centers], dtype=np.int64),
        names,
    )


def fill_and_standardise(
    values: Sequence[Floats],
    trains: Sequence[NDArray[np.bool_]],
    *,
    imputation: str = "local",
    statistics: str = "federated",
) -> list[Floats]:
    """Inputs of each client: 13 standardised attributes and 10 indicators of missing values, (n_i, 23)
    float64.

    values: per client (n_i, 13), NaN where missing. trains: per client (n_i,) bool; every number here comes
    from training rows. imputation: "local" fills with the client's median; "federated" with the mean of the
    clients' medians, weighted by their observed rows. statistics: means and deviations (of filled values) of
    all clients' training rows, which three sums per attribute give, or the client's own. A client that never
    observed an attribute takes the federated median; nobody observed it: 0. Raises ValueError for an unknown
    word or a client without training rows."""
    for name, word in (("imputation", imputation), ("statistics", statistics)):
        if word not in STATISTICS:
            raise ValueError(
                f"data: {name} is '{word}', needs one of {', '.join(STATISTICS)}; correct data.{name}"
            )
    empty = [i for i, train in enumerate(trains) if not train.any()]
    if empty:
        raise ValueError(f"data: client {empty[0]} has no training rows, needs at least 1; leave it out")
    observed = np.stack([(~np.isnan(v[t])).sum(0) for v, t in zip(values, trains, strict=True)])  # (m, 13)
    medians = np.zeros(observed.shape)
    for i, (v, train) in enumerate(zip(values, trains, strict=True)):
        seen = observed[i] > 0
        medians[i, seen] = np.nanmedian(v[train][:, seen], axis=0)
    shared = (observed * medians).sum(0) / np.maximum(observed.sum(0), 1)  # (13,)
    fill = (
        np.where(observed > 0, medians, shared)
        if imputation == "local"
        else np.tile(shared, (len(values), 1))
    )
    filled = [np.where(np.isnan(v), fill[i], v) for i, v in enumerate(values)]
    moments = [_moments(x[train]) for x, train in zip(filled, trains, strict=True)]
    whole = _moments(np.concatenate([x[train] for x, train in zip(filled, trains, strict=True)]))
    may_miss = [ATTRIBUTES.index(name) for name in MAY_MISS]
    inputs = []
    for v, x, own in zip(values, filled, moments, strict=True):
        mean, deviation = own if statistics == "local" else whole
        inputs.append(np.concatenate([(x - mean) / deviation, np.isnan(v[:, may_miss])], axis=1))
    return inputs


def _moments(x: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each column; 1 for a column without spread."""
    deviation = x.std(0)
    return x.mean(0), np.where(deviation < _LEAST_DEVIATION, 1.0, deviation)
