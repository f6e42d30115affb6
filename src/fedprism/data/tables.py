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
from typing import Any

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
CATEGORICAL = ("sex", "cp", "fbs", "restecg", "exang", "slope", "ca", "thal")  # numbers of the file, few
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


@dataclass(frozen=True, eq=False)
class Scaling:
    """What turns a client's values into inputs: fill, mean and deviation, each (13,) float64."""

    fill: Floats
    mean: Floats
    deviation: Floats

    def inputs(self, values: Floats) -> Floats:
        """(n, 23) float64: 13 standardised attributes and 10 indicators of missing values, from (n, 13)
        values, NaN where missing."""
        may_miss = [ATTRIBUTES.index(name) for name in MAY_MISS]
        filled = np.where(np.isnan(values), self.fill, values)
        return np.concatenate([(filled - self.mean) / self.deviation, np.isnan(values[:, may_miss])], axis=1)


def scalings(
    values: Sequence[Floats],
    trains: Sequence[NDArray[np.bool_]],
    *,
    imputation: str = "local",
    statistics: str = "federated",
) -> list[Scaling]:
    """How each client's missing values are filled and its columns scaled.

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
    filled = [
        np.where(np.isnan(v[t]), fill[i], v[t]) for i, (v, t) in enumerate(zip(values, trains, strict=True))
    ]
    whole = _moments(np.concatenate(filled))
    return [
        Scaling(fill[i], *(_moments(x) if statistics == "local" else whole)) for i, x in enumerate(filled)
    ]


def preprocessing(
    values: Sequence[Floats], trains: Sequence[NDArray[np.bool_]], each: Sequence[Scaling]
) -> dict[str, Any]:
    """JSON-ready: all that turns a new row into inputs, and what training rows looked like.

    values, trains: as for `scalings`, which gave `each`. Returns "columns" (names, in order), "fill", "mean"
    and "deviation" (a number per column; None where clients have numbers of their own, which say nothing
    about a row whose client is unknown), "indicators" (columns that get one, in order), "zero_is_missing",
    "may_be_empty" (columns with missing values in training), "ranges" (per column [smallest, largest] of all
    clients' training rows, None: nobody observed it) and "codes" (categorical column -> the values there)."""
    rows = np.concatenate([v[train] for v, train in zip(values, trains, strict=True)])
    columns = {name: rows[:, k][~np.isnan(rows[:, k])] for k, name in enumerate(ATTRIBUTES)}
    shared: dict[str, Any] = {}
    for fact in ("fill", "mean", "deviation"):
        first, *others = (getattr(scaling, fact) for scaling in each)
        shared[fact] = first.tolist() if all(np.array_equal(first, other) for other in others) else None
    return {
        "columns": list(ATTRIBUTES),
        **shared,
        "indicators": list(MAY_MISS),
        "zero_is_missing": list(ZERO_IS_MISSING),
        "may_be_empty": [name for name, seen in columns.items() if len(seen) < len(rows)],
        "ranges": [
            [float(seen.min()), float(seen.max())] if len(seen) else None for seen in columns.values()
        ],
        "codes": {name: np.unique(columns[name]).tolist() for name in CATEGORICAL},
    }


def _moments(x: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each column; 1 for a column without spread."""
    deviation = x.std(0)
    return x.mean(0), np.where(deviation < _LEAST_DEVIATION, 1.0, deviation)
