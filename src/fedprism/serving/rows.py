"""Rows from outside: reading a CSV file, checking each cell, turning a row into a model's inputs.

Numbers that fill and scale come from the run's `preprocessing.json`; no data file is read.
"""

from __future__ import annotations

import csv
import difflib
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ID = "id"  # a column of a row's own name, which nothing computes with
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class RefusedRow(ValueError):
    """A row that can't be answered; the text says why."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A row as a model reads it.

    inputs: (d,) float64, a number per column and an indicator per column that has one. missing: names of the
    columns that were filled. notes: what is unlike the rows of training."""

    inputs: NDArray[np.float64]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preparation:
    """How a row becomes inputs, as the run recorded it (`data.tables.preprocessing` says what each is)."""

    columns: tuple[str, ...]
    fill: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    indicators: tuple[str, ...]
    zero_is_missing: tuple[str, ...]
    may_be_empty: tuple[str, ...]
    ranges: tuple[tuple[float, float] | None, ...]
    codes: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Preparation:
        """From the run's record. Raises ValueError where clients filled or scaled by numbers of their own."""
        if any(record[fact] is None for fact in ("fill", "mean", "deviation")):
            raise ValueError(
                "route: each client of this run filled or scaled its rows by numbers of its own, which a row "
                "of an unknown client does not have; repeat the run with data.imputation = 'federated' and "
                "data.statistics = 'federated'"
            )
        return cls(
            columns=tuple(record["columns"]),
            fill=tuple(record["fill"]),
            mean=tuple(record["mean"]),
            deviation=tuple(record["deviation"]),
            indicators=tuple(record["indicators"]),
            zero_is_missing=tuple(record["zero_is_missing"]),
            may_be_empty=tuple(record["may_be_empty"]),
            ranges=tuple(None if seen is None else (seen[0], seen[1]) for seen in record["ranges"]),
            codes={name: tuple(codes) for name, codes in record["codes"].items()},
        )

    @property
    def n_inputs(self) -> int:
        """Numbers that a model reads per row."""
        return len(self.columns) + len(self.indicators)

    def prepare(self, row: Mapping[str, Any]) -> Prepared:
        """Check and turn one row.

        row: column -> a number, or text of one; None, NaN and empty text are a missing value. `id` is passed
        over. Raises RefusedRow naming every column that is missing, unknown, empty where training rows never
        were, or no number."""
        faults = column_faults([name for name in row if name != ID], self.columns)
        values, notes = [math.nan] * len(self.columns), []
        for k, name in enumerate(self.columns):
            if name not in row:
                continue
            try:
                value = _number(name, row[name])
            except RefusedRow as fault:
                faults.append(str(fault))
                continue
            zero = value == 0 and name in self.zero_is_missing
            if (zero or math.isnan(value)) and name not in self.may_be_empty:
                faults.append(f"{name} is missing, which it never was in training; give a number")
            elif zero:
                notes.append(f"{name} 0 counts as missing")
            elif not math.isnan(value):
                values[k] = value
                notes += self._unlike(name, value)
        if faults:
            raise RefusedRow("; ".join(faults))
        x = np.asarray(values)
        gone = np.isnan(x)
        scaled = (np.where(gone, self.fill, x) - np.asarray(self.mean)) / np.asarray(self.deviation)
        flags = gone[[self.columns.index(name) for name in self.indicators]]
        missing = tuple(name for name, is_gone in zip(self.columns, gone, strict=True) if is_gone)
        return Prepared(np.concatenate([scaled, flags]), missing, tuple(notes))

    def _unlike(self, name: str, value: float) -> list[str]:
        """What is unlike training rows about an observed value."""
        seen, codes = self.ranges[self.columns.index(name)], self.codes.get(name)
        if seen is None:
            return [f"{name} was never observed in training"]
        if codes is not None:
            known = ", ".join(f"{code:g}" for code in codes)
            return [] if value in codes else [f"{name} {value:g} is none of {known}, which training rows had"]
        low, high = seen
        inside = low <= value <= high
        return [] if inside else [f"{name} {value:g} is outside {low:g} to {high:g}, the range of training"]


def _number(name: str, cell: Any) -> float:
    """The number of a cell, NaN where it is empty. Raises RefusedRow for anything else."""
    text = cell.strip() if isinstance(cell, str) else cell
    if text is None or text == "":
        return math.nan
    if isinstance(text, str):
        value = float(text) if _NUMBER.fullmatch(text) else None
    else:
        value = float(text) if isinstance(text, numbers.Real) else None
    if value is None:
        raise RefusedRow(f"{name} is {text!r}, needs a number, or nothing where it is missing")
    if math.isinf(value):
        raise RefusedRow(f"{name} is {text}, needs a finite number")
    return value


def column_faults(got: Sequence[str], needed: Sequence[str]) -> list[str]:
    """What is wrong with the names of columns: some lack, some are unknown; empty if nothing is."""
    lacking = [name for name in needed if name not in got]
    unknown = [name for name in got if name not in needed]
    faults = [f"lacks {', '.join(lacking)}"] if lacking else []
    if unknown:
        near = sorted(
            {n for name in unknown for n in difflib.get_close_matches(name, lacking, n=1, cutoff=0.5)}
        )
        faults.append(f"has unknown {', '.join(unknown)}" + (f" (is it {', '.join(near)}?)" if near else ""))
    return faults


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file, column -> cell, blank lines left out.

    path: UTF-8 with commas, the names of the columns first; the order is free, and a column `id` may stand
    among them. columns: names that a row needs. A short row lacks its last columns, a long one has "cell N"
    besides. Raises FileNotFoundError, or ValueError in one line, for a file that no row can be read from."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"route: --input {path} {what}; name a CSV file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if any(cell.strip() for cell in line)]
    except UnicodeDecodeError as fault:
        raise ValueError(f"route: {path} is not UTF-8 text; save it as CSV in UTF-8") from fault
    except csv.Error as fault:
        raise ValueError(f"route: {path} is no CSV file ({fault}); save it with commas") from fault
    needs = f"needs {', '.join(columns)}, and may have {ID}"
    if len(lines) < 2:
        got = "has no row below the names of its columns" if lines else "is empty"
        raise ValueError(f"route: {path} {got}; {needs}")
    header = [name.strip() for name in lines[0]]
    if len(header) == 1 and ";" in header[0]:
        raise ValueError(f"route: {path} separates its columns by semicolons; save it with commas")
    twice = sorted({name for name in header if header.count(name) > 1})
    faults = [f"has {', '.join(map(repr, twice))} twice"] if twice else []
    faults += column_faults([name for name in header if name != ID], columns)
    if faults:
        raise ValueError(f"route: {path} {' and '.join(faults)}; {needs}")
    rows = []
    for line in lines[1:]:
        names = header + [f"cell {k}" for k in range(len(header) + 1, len(line) + 1)]
        rows.append(dict(zip(names, line, strict=False)))
    return rows
