"""Sources: the shipped files are what the table says, and bad files get one clear line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedprism.data.sources import SPLITS, TEXT_TASKS, dataset_root, load_text_task


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_shipped_file_is_what_the_table_says(name: str) -> None:
    source, task = TEXT_TASKS[name], load_text_task(name)
    assert (dataset_root() / source.file).stat().st_size == source.bytes
    assert {split: len(task.positions(split)) for split in SPLITS} == source.splits
    assert len(task) == source.rows and task.n_classes == len(source.labels)
    assert (task.text_b is not None) == source.pair and (task.word is not None) == source.word
    note = (dataset_root() / f"{name}.LICENSE.md").read_text()
    assert all(f"## {part}" in note for part in ("Origin", "Licence", "Citation", "Changes", "Caveats"))


def test_table_can_be_listed_and_marks_non_commercial_files() -> None:
    readme = (dataset_root() / "README.md").read_text()
    for source in TEXT_TASKS.values():
        assert source.what and source.licence and source.rows > 0
        assert f"{source.sha256}  {source.file}" in readme
    for name in ("wic", "qqp"):
        assert not TEXT_TASKS[name].commercial
        note = (dataset_root() / f"{name}.LICENSE.md").read_text()
        assert "NON-COMMERCIAL. This file is outside the project's Apache-2.0 licence" in note


def test_root_can_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path))
    assert dataset_root() == tmp_path
    with pytest.raises(FileNotFoundError, match=r"no sst2.parquet or sst2.csv"):
        load_text_task("sst2")
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match=r"is not a folder, needs .*; correct or unset it"):
        dataset_root()


def test_changed_shipped_file_is_refused_but_ones_own_folder_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    shutil.copy(folder / "green.parquet", folder / "sst2.parquet")
    assert len(load_text_task("sst2", folder)) == 76
    monkeypatch.setenv("FEDPRISM_DATASETS", str(folder))
    with pytest.raises(ValueError, match=r"sst2.parquet has SHA-256 .*the shipped file has af5c7b1d8d31"):
        load_text_task("sst2")
    assert load_text_task("green").name == "green"  # not one of ours: nothing to compare with


def test_own_parquet_and_csv_give_the_same_task(folder: Path, make_task: Callable[..., Any]) -> None:
    columns = make_task("red", pair=True)
    lines = ["label,split,text_a,text_b,extra"]
    for a, b, label, split in zip(*(columns[k] for k in ("text_a", "text_b", "label", "split")), strict=True):
        lines.append(f'{label},{split},"{a}","{b}",1.5')
    lines.append('1,train,"null, ""NA""\nand nan",nan,')
    (folder / "own.csv").write_text("\n".join(lines) + "\n")
    own, red = load_text_task("own", folder), load_text_task("red", folder)
    assert own.text_a[:-1] == red.text_a and own.text_b is not None and own.text_b[:-1] == red.text_b
    assert own.label[:-1].tolist() == red.label.tolist()
    assert own.text_a[-1] == 'null, "NA"\nand nan' and own.text_b[-1] == "nan"
    assert own.n_classes == 2 and load_text_task("green", folder).text_b is None


def test_empty_csv_fields_are_no_texts(tmp_path: Path) -> None:
    lines = ["text_a,text_b,label,split", "one,,0,train", "two,,1,train", "three,,1,public", "four,,0,test"]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    assert load_text_task("own", tmp_path).text_b is None
    (tmp_path / "own.csv").write_text("\n".join([*lines, ",,1,train"]))
    with pytest.raises(ValueError, match=r"own.csv, row 4 \(the first is 0\) has no text_a"):
        load_text_task("own", tmp_path)


def test_missing_files_and_folders(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no gren.parquet or gren.csv in .*; did you mean green"):
        load_text_task("gren", folder)
    with pytest.raises(FileNotFoundError, match=r"tasks there: blue, green, red"):
        load_text_task("zzz", folder)
    with pytest.raises(FileNotFoundError, match=r"folder .* does not exist; correct data.root"):
        load_text_task("sst2", folder / "nowhere")
    with pytest.raises(ValueError, match=r"is not a plain file stem"):
        load_text_task("../red", folder)
    (folder / "red.csv").write_text("text_a,label,split\n")
    with pytest.raises(ValueError, match=r"both red.parquet and red.csv"):
        load_text_task("red", folder)


def test_files_that_are_not_tables(folder: Path) -> None:
    (folder / "noise.parquet").write_bytes(b"not a table")
    with pytest.raises(ValueError, match=r"noise.parquet is not a readable parquet file"):
        load_text_task("noise", folder)
    (folder / "noise2.csv").write_text("text_a,label,split\na,0\n")
    with pytest.raises(ValueError, match=r"noise2.csv is not a readable csv file"):
        load_text_task("noise2", folder)


def _with(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.pop("label"), "has the columns text_a, text_b, split, lacks label; needs"),
        (lambda c: [v.clear() for v in c.values()], "bad.parquet has no rows"),
        (_with("text_a", 3, None), r"row 3 \(the first is 0\) has no text_a, needs text in every row"),
        (_with("text_b", 5, "only here"), r"row 0 \(the first is 0\) has no text_b"),
        (_with("split", 2, "dev"), r"row 2 \(the first is 0\) has split 'dev', needs one of train, public"),
        (
            lambda c: c.update(split=["train"] * 76),
            "task 'bad' has no rows in split public, test of bad.parquet",
        ),
        (lambda c: c.update(label=[0.5] * 76), "has labels of type double, needs whole numbers"),
        (_with("label", 0, None), "has 1 empty labels"),
        (_with("label", 0, 7), "has the labels 0, 1, 7 outside its test split, needs 0..K-1 without gaps"),
        (_with("label", 1, -1), "has the labels -1, 0, 1 outside"),
        (lambda c: c.update(label=[0] * 76), "has the labels 0 outside its test split"),
        (
            _with("label", 75, 2),
            r"task 'bad', row 75 \(the first is 0\) of bad.parquet has label 2, needs 0..1",
        ),
        (lambda c: c.update(text_a=list(range(76))), "column text_a is int64, needs text"),
    ],
)
def test_bad_columns_get_one_clear_line(
    tmp_path: Path,
    make_task: Callable[..., Any],
    write: Callable[..., Path],
    change: Callable[[dict[str, list[Any]]], Any],
    message: str,
) -> None:
    columns = make_task("bad")
    change(columns)
    write(tmp_path, "bad", columns)
    with pytest.raises(ValueError, match=message) as caught:
        load_text_task("bad", tmp_path)
    assert "\n" not in str(caught.value)


def test_label_outside_the_classes_of_a_known_task(
    tmp_path: Path, make_task: Callable[..., Any], write: Callable[..., Path]
) -> None:
    columns = make_task("sst2")
    columns["label"][4] = 2
    write(tmp_path, "sst2", columns, label=pa.int8())
    with pytest.raises(
        ValueError, match=r"task 'sst2', row 4 .*has label 2, needs 0..1 \(negative, positive\)"
    ):
        load_text_task("sst2", tmp_path)
    write(tmp_path, "wic", make_task("wic", pair=True))
    with pytest.raises(ValueError, match=r"lacks word; needs"):
        load_text_task("wic", tmp_path)
