"""Read each text data set into plain columns; licence, size and checksum of the ones that ship with fedprism.

A task is one file `<task>.parquet` or `<task>.csv` with the columns `text_a`, `text_b` (absent or empty for
single-sentence tasks), `label` (0..K-1) and `split` (`train`, `public`, `validation`, `test`). The shipped
tasks are listed in `TEXT_TASKS`; a user's own tasks are files of the same form in a folder of their own.
Everything that is read is checked here, so that later code can rely on it.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

SPLITS = ("train", "public", "validation", "test")
ENVIRONMENT_VARIABLE = "FEDPRISM_DATASETS"
_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TextSource:
    """A text task that ships with fedprism.

    name: task name, and the file's stem. what: the task in words. labels: class names, in order of the label.
    pair: whether `text_b` is used. word: whether the rows turn on one word (column `word`). splits: rows of
    each split. licence: short form; the whole note stands beside the file. commercial: whether the licence
    plainly allows commercial use. sha256, bytes: of the parquet file."""

    name: str
    what: str
    labels: tuple[str, ...]
    pair: bool
    splits: dict[str, int]
    licence: str
    commercial: bool
    sha256: str
    bytes: int
    word: bool = False

    @property
    def file(self) -> str:
        """File name below `dataset_root()`."""
        return f"{self.name}.parquet"

    @property
    def rows(self) -> int:
        """Rows over all splits."""
        return sum(self.splits.values())


def _splits(train: int, public: int, validation: int, test: int) -> dict[str, int]:
    return dict(zip(SPLITS, (train, public, validation, test), strict=True))


TEXT_TASKS: dict[str, TextSource] = {
    source.name: source
    for source in (
        TextSource(
            name="sst2",
            what="SST-2, sentiment of a sentence",
            labels=("negative", "positive"),
            pair=False,
            splits=_splits(5000, 1000, 1000, 872),
            licence="none stated, research use",
            commercial=False,
            sha256="af5c7b1d8d31e18404d8eeccff5d20b3c3087dcc181e0464ca44734d31e560e8",
            bytes=185_836,
        ),
        TextSource(
            name="cola",
            what="CoLA, grammatical acceptability of a sentence",
            labels=("unacceptable", "acceptable"),
            pair=False,
            splits=_splits(5000, 1000, 1000, 1034),
            licence="none stated, research use",
            commercial=False,
            sha256="4681819f7820db8c97a5b71ad7105cdc8d8c3d4b8d00a451445119388016f867",
            bytes=120_648,
        ),
        TextSource(
            name="wic",
            what="WiC, same sense of a word in two sentences",
            labels=("different sense", "same sense"),
            pair=True,
            splits=_splits(4428, 1000, 638, 1400),
            licence="CC BY-NC 4.0",
            commercial=False,
            sha256="46a419ed6d058d6d50ba214e6639788c966ae8126fe501df8bd48efe09956f2c",
            bytes=243_822,
            word=True,
        ),
        TextSource(
            name="boolq",
            what="BoolQ, yes/no question about a passage",
            labels=("no", "yes"),
            pair=True,
            splits=_splits(5000, 1000, 1000, 1000),
            licence="CC BY-SA 3.0",
            commercial=True,
            sha256="e69e028884433822063842d7556062b6d5300533eb98fc567c09bd6661de52d4",
            bytes=1_590_986,
        ),
        TextSource(
            name="qnli",
            what="QNLI, does the sentence answer the question",
            labels=("entailment", "not entailment"),
            pair=True,
            splits=_splits(5000, 1000, 1000, 1000),
            licence="CC BY-SA 4.0",
            commercial=True,
            sha256="25e25fba2c490402943907598ee09ec9c6fcf63b31880f2737a7f12c69ade1fc",
            bytes=640_251,
        ),
        TextSource(
            name="qqp",
            what="QQP, duplicate questions",
            labels=("not duplicate", "duplicate"),
            pair=True,
            splits=_splits(5000, 1000, 1000, 1000),
            licence="Quora terms of service, non-commercial",
            commercial=False,
            sha256="2186e7c74ab6d71211b3949cd552c6605b43062d60c25de7bb98bf66d9af19ee",
            bytes=361_914,
        ),
        TextSource(
            name="rte",
            what="RTE, textual entailment",
            labels=("entailment", "not entailment"),
            pair=True,
            splits=_splits(1788, 400, 300, 277),
            licence="PASCAL RTE challenges, research use",
            commercial=False,
            sha256="73fc85d28c5f248f4437ff576e29ff6de004f975182967a338787a954e3c1ce4",
            bytes=314_421,
        ),
        TextSource(
            name="mrpc",
            what="MRPC, paraphrase",
            labels=("not equivalent", "equivalent"),
            pair=True,
            splits=_splits(2867, 800, 408, 1725),
            licence="Microsoft Research licence, research use",
            commercial=False,
            sha256="404152b67b9bee4fb46ad5f66f0f594d710c92fadf367253ec830031c13a6636",
            bytes=477_700,
        ),
        TextSource(
            name="wnli",
            what="WNLI, Winograd entailment",
            labels=("not entailed", "entailed"),
            pair=True,
            splits=_splits(435, 100, 100, 71),
            licence="CC BY 4.0",
            commercial=True,
            sha256="1a7f5ee02843b1c4b687d6c05ca430066a10513ced692382c31c908b0beef53f",
            bytes=23_000,
        ),
    )
}


@dataclass(frozen=True, eq=False)
class TextTask:
    """One task as read: columns of equal length n, checked.

    name; path: the file. text_a: n strings. text_b: n strings, or None for a single-sentence task. word: n
    strings where the rows turn on one word, else None. label: (n,) int64 in 0..n_classes-1. split: (n,)
    strings out of `SPLITS`. n_classes: K."""

    name: str
    path: Path
    text_a: tuple[str, ...]
    text_b: tuple[str, ...] | None
    word: tuple[str, ...] | None
    label: NDArray[np.int64]
    split: NDArray[np.str_]
    n_classes: int

    def __len__(self) -> int:
        return len(self.text_a)

    def positions(self, *splits: str) -> NDArray[np.int64]:
        """Positions in the file, ascending, of the rows of the given splits; int64."""
        return np.flatnonzero(np.isin(self.split, splits)).astype(np.int64)


def dataset_root() -> Path:
    """Folder with the shipped parquet files: the environment variable FEDPRISM_DATASETS, else the checkout's
    `datasets/`, else the copy inside the installed package. Raises FileNotFoundError where there is none."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise FileNotFoundError(
                f"data: {ENVIRONMENT_VARIABLE}={named} is not a folder, needs the one with the data sets; "
                "correct or unset it"
            )
        return Path(named)
    package = Path(__file__).resolve().parents[1]
    places = (package.parents[1] / "datasets", package / "_datasets")
    for place in places:
        if any((place / source.file).is_file() for source in TEXT_TASKS.values()):
            return place
    raise FileNotFoundError(
        f"data: no data sets in {' or '.join(map(str, places))}; set {ENVIRONMENT_VARIABLE} or data.root to "
        "the folder with the parquet files"
    )


def load_text_task(
    name: str, root: str | Path | None = None, *, needs: Sequence[str] = ("train", "public", "test")
) -> TextTask:
    """Read and check one text task.

    name: task name, the file's stem. root: folder with `<name>.parquet` or `<name>.csv`; None or "" for the
    shipped data sets, whose checksums are verified. needs: splits that must not be empty. Returns the task.
    A task of `TEXT_TASKS` keeps its classes under any root; another task has the classes 0..K-1 that its rows
    outside `test` show. Raises FileNotFoundError for a missing folder or file, ValueError for a file that
    cannot be read, a wrong checksum, wrong columns or types, an unknown or empty split, or a label outside
    its classes."""
    shipped = root is None or str(root) == ""
    path = _find(name, dataset_root() if shipped else Path(str(root)).expanduser())
    known = TEXT_TASKS.get(name)
    if shipped and known is not None:
        verify_checksum(path, known.sha256)
    table = _read(path)
    pair, turns_on_word = (known.pair, known.word) if known else (False, False)
    required = ("text_a", *("text_b",) * pair, "label", "split", *("word",) * turns_on_word)
    missing = [column for column in required if column not in table.column_names]
    if missing:
        raise ValueError(
            f"data: {path.name} has the columns {', '.join(table.column_names)}, lacks {', '.join(missing)}; "
            "needs text_a, label, split (and text_b for pairs, word for wic): rename or add them"
        )
    if table.num_rows == 0:
        raise ValueError(f"data: {path.name} has no rows; fill it or leave '{name}' out of the tasks")
    split = np.asarray(_texts(table, "split", path), dtype=np.str_)
    _check_splits(split, needs, name, path)
    label, n_classes = _labels(table, split, name, path)
    word = _texts(table, "word", path) if turns_on_word else None
    return TextTask(
        name, path, _texts(table, "text_a", path), _second_texts(table, path), word, label, split, n_classes
    )


def _find(name: str, root: Path) -> Path:
    if not _TASK_NAME.fullmatch(name):
        raise ValueError(
            f"data: task name '{name}' is not a plain file stem; use letters, digits, '_', '-', '.'"
        )
    if not root.is_dir():
        raise FileNotFoundError(
            f"data: folder {root} does not exist; correct data.root, or leave it out for {_ours()}"
        )
    found = [path for path in (root / f"{name}.parquet", root / f"{name}.csv") if path.is_file()]
    if len(found) > 1:
        raise ValueError(
            f"data: both {name}.parquet and {name}.csv are in {root}; keep the one that is meant"
        )
    if not found:
        there = sorted({p.stem for p in root.iterdir() if p.suffix in (".parquet", ".csv")})
        near = difflib.get_close_matches(name, there, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"tasks there: {', '.join(there) or 'none'}"
        raise FileNotFoundError(f"data: no {name}.parquet or {name}.csv in {root}; {hint}")
    return found[0]


def _ours() -> str:
    return f"the shipped tasks ({', '.join(TEXT_TASKS)})"


def verify_checksum(path: Path, sha256: str) -> None:
    """Raises ValueError where the file is not the shipped one, whose SHA-256 (hex) is given."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"data: {path.name} has SHA-256 {digest[:12]}..., the shipped file has {sha256[:12]}...; "
            "restore the file, or set data.root to use data of your own"
        )


def _read(path: Path) -> pa.Table:
    texts = {name: pa.string() for name in ("text_a", "text_b", "word", "split")}
    try:
        if path.suffix == ".parquet":
            return pa.parquet.read_table(path)
        return pa.csv.read_csv(
            path,
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                column_types=texts, null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data: {path.name} is not a readable {path.suffix[1:]} file ({reason}); replace it"
        ) from error


def _texts(table: pa.Table, column: str, path: Path) -> tuple[str, ...]:
    """A text column without gaps."""
    values = table[column]
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise ValueError(f"data: {path.name}, column {column} is {values.type}, needs text; convert it")
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy())[0])
        raise ValueError(
            f"data: {path.name}, row {row} (the first is 0) has no {column}, needs text in every row; "
            "fill it or drop the row"
        )
    return tuple(values.to_pylist())


def _second_texts(table: pa.Table, path: Path) -> tuple[str, ...] | None:
    if "text_b" not in table.column_names or table["text_b"].null_count == table.num_rows:
        return None
    return _texts(table, "text_b", path)


def _check_splits(split: NDArray[np.str_], needs: Sequence[str], name: str, path: Path) -> None:
    strange = np.flatnonzero(~np.isin(split, SPLITS))
    if len(strange):
        row = int(strange[0])
        raise ValueError(
            f"data: {path.name}, row {row} (the first is 0) has split '{split[row]}', "
            f"needs one of {', '.join(SPLITS)}; rename it"
        )
    if (split == "test").all():
        raise ValueError(
            f"data: task '{name}' has only test rows in {path.name}, needs rows in train or public; "
            f"give it such rows or leave '{name}' out of the tasks"
        )
    empty = [part for part in needs if not (split == part).any()]
    if empty:
        raise ValueError(
            f"data: task '{name}' has no rows in split {', '.join(empty)} of {path.name}; "
            f"give it such rows or leave '{name}' out of the tasks"
        )


def _labels(table: pa.Table, split: NDArray[np.str_], name: str, path: Path) -> tuple[NDArray[np.int64], int]:
    column = table["label"]
    if not pa.types.is_integer(column.type) or column.null_count:
        got = f"{column.null_count} empty labels" if column.null_count else f"labels of type {column.type}"
        raise ValueError(
            f"data: {path.name} has {got}, needs whole numbers 0..K-1 in every row; renumber the classes"
        )
    label = column.to_numpy().astype(np.int64)
    known = TEXT_TASKS.get(name)
    if known is not None:
        n_classes, classes = len(known.labels), f"0..{len(known.labels) - 1} ({', '.join(known.labels)})"
    else:
        seen = np.unique(label[split != "test"])
        n_classes = len(seen)
        if n_classes < 2 or not np.array_equal(seen, np.arange(n_classes)):
            shown = ", ".join(map(str, seen[:8])) + (", ..." if len(seen) > 8 else "")
            raise ValueError(
                f"data: task '{name}' has the labels {shown} outside its test split, needs 0..K-1 "
                "without gaps and K >= 2; renumber the classes"
            )
        classes = f"0..{n_classes - 1}"
    outside = np.flatnonzero((label < 0) | (label >= n_classes))
    if len(outside):
        row = int(outside[0])
        raise ValueError(
            f"data: task '{name}', row {row} (the first is 0) of {path.name} has label {label[row]}, "
            f"needs {classes}; correct or drop the row"
        )
    return label, n_classes
