"""Sources of instructions: what ships, templates, levels, a user's file, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tests.tiny_instructions import made_up, write_jsonl

from fedprism.data.catalogue import INSTRUCTIONS
from fedprism.data.instructions import BBH_GROUPS, prompt_of, read_instructions, read_jsonl, split_name
from fedprism.data.sources import dataset_root


@pytest.mark.parametrize("source", INSTRUCTIONS.values(), ids=lambda source: source.name)
def test_shipped_file_is_what_the_table_says(source: Any) -> None:
    path = dataset_root() / source.file
    rows = read_instructions(source.name)  # verifies the checksum
    assert path.stat().st_size == source.bytes and len(rows) == source.rows
    assert Counter(rows.split) == source.splits
    readme = (dataset_root() / "README.md").read_text()
    assert f"{source.sha256}  {source.file}" in readme and f"{source.bytes:,}" in readme
    assert f"| {source.what.removesuffix(' (subset)')} | {source.rows:,} |" in readme
    note = (dataset_root() / f"{source.name}.LICENSE.md").read_text()
    assert all(f"## {part}" in note for part in ("Origin", "Licence", "Citation", "Changes", "Caveats"))


def test_data_sets_stay_below_25_megabytes() -> None:
    assert sum(path.stat().st_size for path in dataset_root().iterdir()) < 25_000_000


def test_prompts_have_instruction_and_context() -> None:
    assert prompt_of(" Add.\n") == "Instruction:\nAdd.\n\nResponse:\n"
    assert prompt_of("Add.", "1 2") == "Instruction:\nAdd.\n\nContext:\n1 2\n\nResponse:\n"
    assert prompt_of("Add.", " \n") == prompt_of("Add.")


def test_dolly_has_eight_categories_or_one() -> None:
    rows = read_instructions("dolly")
    assert set(Counter(rows.category).values()) == {675} and len(set(rows.category)) == 8
    assert set(read_instructions("dolly:one").category) == {"dolly"}
    haiku = next(i for i, text in enumerate(rows.prompt) if "child who does not like piano" in text)
    assert rows.category[haiku] == "creative_writing" and "Context:" not in rows.prompt[haiku]
    assert rows.response[haiku].startswith("Monday lessons")


def test_gsm8k_answers_have_no_calculator_marks_and_end_with_the_number() -> None:
    rows = read_instructions("gsm8k")
    finals = pa.parquet.read_table(dataset_root() / "gsm8k.parquet")["final"].to_pylist()
    for answer, final in zip(rows.response, finals, strict=True):
        assert "<<" not in answer and answer.rsplit("#### ", 1)[1].replace(",", "") == final
    assert rows.response[0] == "A quarter of 48 is 48/4=12.\nThe number is 12+15=27.\n#### 27"


def test_bbh_is_one_category_four_groups_or_27_tasks() -> None:
    tasks = [task for group in BBH_GROUPS.values() for task in group]
    rows = read_instructions("bbh:tasks")
    assert sorted(tasks) == sorted(set(rows.category)) and len(tasks) == 27
    assert set(read_instructions("bbh").category) == {"bbh"}
    assert set(read_instructions("bbh:groups").category) == set(BBH_GROUPS)


def test_a_fifth_of_every_bbh_task_is_for_tests_in_every_process() -> None:
    rows = read_instructions("bbh:tasks")
    held = Counter(rows.category[i] for i in rows.positions("test"))
    every = Counter(rows.category)
    assert held == {task: n // 5 for task, n in every.items()}
    assert rows.split == read_instructions("bbh").split
    first = [i for i in rows.positions("test") if rows.category[i] == "navigate"]
    assert first != list(range(first[0], first[0] + 50))  # in a random order


def test_mmlu_asks_with_four_letters() -> None:
    rows = read_instructions("mmlu:subjects")
    assert set(rows.response) == set("ABCD") and len(set(rows.category)) == 57
    assert all(re.search(r"\nA\. .*\nB\. .*\nC\. .*\nD\. ", text, re.DOTALL) for text in rows.prompt)


def test_sources_are_offered_when_a_name_is_wrong() -> None:
    assert split_name("bbh") == ("bbh", "one") and split_name("dolly") == ("dolly", "categories")
    assert split_name("my/own.jsonl") == ("my/own.jsonl", "")
    with pytest.raises(ValueError, match=r"'doly', needs one of dolly, .* did you mean dolly\?"):
        split_name("doly")
    with pytest.raises(ValueError, match=r"'bbh:task', needs 'bbh:one' or 'bbh:groups' or 'bbh:tasks'"):
        split_name("bbh:task")


# ---- a user's file -------------------------------------------------------------------------------


def test_own_file_becomes_prompts_responses_and_categories(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "own.jsonl",
        [
            {"instruction": "Name it.", "context": "a\u2028b", "response": "c", "category": " x "},
            "",
            {"instruction": "Why?", "response": "So.", "category": "y", "context": None, "extra": 1},
        ],
    )
    rows = read_instructions("own.jsonl", tmp_path)
    assert rows.prompt == (prompt_of("Name it.", "a\u2028b"), prompt_of("Why?"))
    assert (rows.response, rows.category, rows.split) == (("c", "So."), ("x", "y"), ("train", "train"))
    assert read_instructions(str(path)).prompt == rows.prompt


def test_columns_of_an_own_file_can_have_other_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [{"q": "Why?", "a": "So.", "kind": "y"}])
    rows = read_jsonl(path, ("q", "text", "a", "kind"))
    assert (rows.prompt, rows.response, rows.category) == ((prompt_of("Why?"),), ("So.",), ("y",))
    with pytest.raises(ValueError, match=r"data.jsonl_columns is \['q', 'q', 'a', 'kind'\], needs four dif"):
        read_jsonl(path, ("q", "q", "a", "kind"))


GOOD = {"instruction": "Why?", "response": "So.", "category": "y"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "category": " "}, r"line 2 has an empty 'category'; fill it or drop the line"),
        ({**GOOD, "response": ""}, r"line 2 has an empty 'response'; fill it or drop the line"),
        ({"instruction": "a", "response": "b"}, r"line 2 lacks 'category', has instruction, response; add it,"
                                                r" or name the column of the category in data.jsonl_columns"),
        ({**GOOD, "category": 3}, r"line 2 has a 'category' of int, needs text; put it in quotes"),
        ({**GOOD, "response": None}, r"line 2 has a 'response' of null, needs text"),
        ({**GOOD, "context": ["a"]}, r"line 2 has a 'context' of list, needs text"),
        ('{"instruction": "a",', r"line 2 is not valid JSON \(Expecting property .*column \d+\); correct"),
        ("[1, 2]", r"line 2 is list, needs a JSON object; correct the line"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [GOOD, line, GOOD])
    with pytest.raises(ValueError, match=r"^data: own.jsonl, " + message) as error:
        read_jsonl(path)
    assert "\n" not in str(error.value)


def test_files_without_rows_or_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("\n \n")
    with pytest.raises(
        ValueError, match=r"own.jsonl has no rows, needs one JSON object per line; fill the file"
    ):
        read_instructions("own.jsonl", tmp_path)
    (tmp_path / "own.jsonl").write_bytes(b'{"instruction": "\xff"}')
    with pytest.raises(ValueError, match=r"own.jsonl is not UTF-8 text; save it as UTF-8"):
        read_instructions("own.jsonl", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file .*gone.jsonl; correct data.sources or data.root"):
        read_instructions("gone.jsonl", tmp_path)
    (tmp_path / "own.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"instruction": "a", "response": "b", '
                                         b'"category": "c"}\r\n')  # fmt: skip
    assert len(read_instructions("own.jsonl", tmp_path)) == 1  # as some editors save it


# ---- parquet files -------------------------------------------------------------------------------


def test_changed_shipped_file_is_refused_but_ones_own_folder_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(dataset_root() / "bbh.parquet", tmp_path / "gsm8k.parquet")
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path))
    with pytest.raises(ValueError, match=r"gsm8k.parquet has SHA-256 e621.*the shipped file has bd61"):
        read_instructions("gsm8k")
    with pytest.raises(
        ValueError, match=r"gsm8k.parquet has the columns task, input, target, lacks question"
    ):
        read_instructions("gsm8k", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no dolly.parquet in .*; correct data.root"):
        read_instructions("dolly", tmp_path)


def test_own_parquet_file_may_have_gaps_in_the_context_alone(tmp_path: Path) -> None:
    row = {"instruction": "a", "context": "", "response": "b", "category": "c", "split": "train"}
    pa.parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / "dolly.parquet")
    assert len(read_instructions("dolly", tmp_path)) == 2
    pa.parquet.write_table(pa.Table.from_pylist([row, {**row, "response": " "}]), tmp_path / "dolly.parquet")
    with pytest.raises(ValueError, match=r"dolly.parquet, row 1 \(the first is 0\) has no text in response"):
        read_instructions("dolly", tmp_path)
    pa.parquet.write_table(pa.Table.from_pylist([row]).slice(0, 0), tmp_path / "dolly.parquet")
    with pytest.raises(ValueError, match=r"dolly.parquet has no rows"):
        read_instructions("dolly", tmp_path)
    (tmp_path / "dolly.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"dolly.parquet is not a readable parquet file \(.*\); replace it"):
        read_instructions("dolly", tmp_path)


def test_made_up_rows_are_what_other_tests_think(tmp_path: Path) -> None:
    rows = read_jsonl(write_jsonl(tmp_path / "own.jsonl", made_up({"red": 3, "blue": 2})))
    assert Counter(rows.category) == {"red": 3, "blue": 2} and len(set(rows.prompt)) == 5
