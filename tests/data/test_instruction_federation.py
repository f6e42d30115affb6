"""Clients of instructions: tokens and truncation, who gets which rows, benchmarks, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_instructions import ByteTokenizer, made_up, write_jsonl

from fedprism.data.federation import build_text_federation
from fedprism.data.instruction_federation import InstructionFederation, build_instruction_federation
from fedprism.data.instruction_rows import tokenize_instructions
from fedprism.data.instructions import prompt_of, read_instructions
from fedprism.data.text import Rows

SETTINGS: dict[str, Any] = {
    "sources": ["own.jsonl"],
    "clients": 4,
    "alpha": 1.0,
    "min_examples": 8,
    "max_length": 96,
    "tokenizer": ByteTokenizer(),
    "seed": 1,
}
END, PAD = 256, 257


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., InstructionFederation]:
    write_jsonl(tmp_path / "own.jsonl", made_up({"red": 60, "blue": 50, "green": 40}))

    def build_with(**changes: Any) -> InstructionFederation:
        return build_instruction_federation(**{"root": tmp_path, **SETTINGS, **changes})

    return build_with


def row_of(rows: Rows, i: int) -> tuple[list[int], list[bool]]:
    assert rows.tokens is not None and rows.offsets is not None and rows.response is not None
    at = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
    return rows.tokens[at].tolist(), rows.response[at].tolist()


def ids(federation: InstructionFederation, *splits: str) -> list[int]:
    return [i for c in federation.clients for split in splits for i in c[split].columns["row"].tolist()]


# ---- tokens --------------------------------------------------------------------------------------


def test_a_row_is_prompt_response_and_end_token() -> None:
    rows = tokenize_instructions(["abc", "d"], ["xy", "z"], ByteTokenizer(), 8)
    assert row_of(rows, 0) == ([*b"abcxy", END], [False] * 3 + [True] * 3)
    (batch,) = rows.batches(2)  # sorted by length
    assert batch["input_ids"].tolist() == [[*b"dz", END, PAD, PAD, PAD], [*b"abcxy", END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch["response"].tolist() == [[False, True, True] + [False] * 3, [False] * 3 + [True] * 3]
    assert batch["row"].tolist() == [1, 0] and batch["label"].tolist() == batch["task"].tolist() == [0, 0]


def test_prompts_alone_have_no_end_and_no_marks() -> None:
    rows = tokenize_instructions(["abcdefghijkl", "d"], None, ByteTokenizer(), 8)
    assert rows.response is None and rows.tokens is not None
    assert rows.tokens.tolist() == [*b"efghijkl", *b"d"]


def test_too_long_rows_lose_the_left_of_the_prompt_and_then_the_end() -> None:
    # 8 tokens: 2 of them stay with the prompt whatever the response
    rows = tokenize_instructions(
        ["abcdef", "abcdef", "a"], ["xyz", "uvwxyz0", "uvwxyz012"], ByteTokenizer(), 8
    )
    assert row_of(rows, 0) == ([*b"cdefxyz", END], [False] * 4 + [True] * 4)
    assert row_of(rows, 1) == ([*b"efuvwxyz"], [False] * 2 + [True] * 6)
    assert row_of(rows, 2) == ([*b"auvwxyz0"], [False] + [True] * 7)


def test_a_start_token_stays_and_an_end_token_behind_the_prompt_goes() -> None:
    rows = tokenize_instructions(["abcdefghi"], ["xy"], ByteTokenizer(start=300, appends_end=True), 8)
    assert row_of(rows, 0) == ([300, *b"fghixy"[0:4], *b"xy", END], [False] * 5 + [True] * 3)


def test_marks_follow_their_rows() -> None:
    rows = tokenize_instructions(["a", "bc", "def"], ["x", "yz", ""], ByteTokenizer(), 8)
    chosen = rows.select([2, 0])
    assert row_of(chosen, 0) == ([*b"def", END], [False] * 3 + [True])
    both = Rows.concat([chosen, rows.select([1])])
    assert row_of(both, 2) == ([*b"bcyz", END], [False] * 2 + [True] * 3)
    assert rows.response is not None
    assert rows.content_hash() != replace(rows, response=~rows.response).content_hash()
    with pytest.raises(ValueError, match="parts differ"):
        Rows.concat([rows, tokenize_instructions(["a"], None, ByteTokenizer(), 8)])
    with pytest.raises(ValueError, match="a response mark for each token"):
        Rows(rows.columns, tokens=rows.tokens, offsets=rows.offsets, response=torch.ones(2, dtype=torch.bool))


# ---- clients -------------------------------------------------------------------------------------


def test_every_row_goes_to_one_client_and_one_split(build: Callable[..., InstructionFederation]) -> None:
    federation = build()
    assert federation.tasks == ("blue", "green", "red")
    assert sorted(ids(federation, "train", "validation", "test")) == list(range(150))
    for client in federation.clients:
        n = sum(map(len, client.values()))
        assert len(client["test"]) == max(1, round(0.1 * n))
        assert len(client["validation"]) == max(1, round(0.09 * n)) and len(client["train"]) >= 8
        for rows in client.values():
            at = rows.columns["row"]  # red 0 to 59, blue to 109, green to 149
            assert rows.columns["task"].tolist() == [
                2 if i < 60 else 0 if i < 110 else 1 for i in at.tolist()
            ]
    described = federation.describe()
    assert sum(map(sum, described["counts"])) == len(ids(federation, "train"))
    assert described["public_sizes"] == {"blue": 0, "green": 0, "red": 0} and described["benchmarks"] == {}
    assert [sum(row) for row in described["mixtures"]["realised"]] == pytest.approx([1] * 4)


def test_rows_say_what_the_file_says(build: Callable[..., InstructionFederation]) -> None:
    federation = build()
    rows = federation.clients[0]["train"]
    tokens, marks = row_of(rows, 0)
    made = made_up({"red": 60, "blue": 50, "green": 40})[int(rows.columns["row"][0])]
    assert tokens == [*(prompt_of(made["instruction"]) + made["response"]).encode(), END]
    assert sum(marks) == len(made["response"]) + 1


def test_one_seed_gives_one_federation_and_every_setting_another(
    build: Callable[..., InstructionFederation],
) -> None:
    prints = [build(**changes).fingerprint for changes in
              ({}, {"seed": 2}, {"alpha": 2.0}, {"unseen": "red"}, {"max_length": 40}, {"train_per_task": 30},
               {"unseen": "red", "benchmarks": ["unseen"]}, {"validation_fraction": 0.0})]  # fmt: skip
    assert len(set(prints)) == len(prints)
    assert build().fingerprint == prints[0]


def test_clients_are_drawn_anew_until_each_has_enough(build: Callable[..., InstructionFederation]) -> None:
    sizes = [[len(c["train"]) for c in build(min_examples=m, seed=5).clients] for m in (1, 25)]
    assert min(sizes[0]) < 25 <= min(sizes[1])
    refused = (
        r"client \d got \d+ examples in the last of 100 draws, needs 48 \(alpha=0.1, 4 clients, "
        r"150 examples\); raise data.alpha or lower data.min_examples or data.clients"
    )
    with pytest.raises(ValueError, match=refused):
        build(alpha=0.1, min_examples=39)


def test_clients_can_take_turns_or_be_written_down(build: Callable[..., InstructionFederation]) -> None:
    pure = build(partition="pure", clients=3).counts
    assert (pure > 0).tolist() == [[True, False, False], [False, True, False], [False, False, True]]
    given = build(partition="given", clients=2, mixtures=[[0.9, 0.1, 0], [0, 0, 1]])
    assert given.counts[0, 0] > 4 * given.counts[0, 1] > 0 and given.counts[1, :2].sum() == 0
    with pytest.raises(
        ValueError, match=r"client 1 got 40 examples, needs 61, 50 of them to train on \(pure, "
    ):
        build(partition="pure", clients=3, min_examples=50)


def test_a_split_has_the_mixture_of_its_client(build: Callable[..., InstructionFederation]) -> None:
    federation = build(partition="given", clients=1, mixtures=[[0.4, 0.2, 0.4]], train_fraction=0.5)
    (client,) = federation.clients
    shares = {s: torch.bincount(r.columns["task"], minlength=3) / len(r) for s, r in client.items()}
    assert torch.allclose(shares["train"], shares["test"], atol=0.02)


def test_sources_are_joined_and_equal_categories_are_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", made_up({"red": 30, "blue": 30}))
    write_jsonl(tmp_path / "b.jsonl", made_up({"red": 20, "green": 30}))
    federation = build_instruction_federation(
        **{**SETTINGS, "sources": ["a.jsonl", "b.jsonl"], "root": tmp_path, "clients": 2}
    )
    assert federation.tasks == ("blue", "red", "green")
    tasks = Counter(t for c in federation.clients for r in c.values() for t in r.columns["task"].tolist())
    assert tasks == {0: 30, 1: 50, 2: 30} and len(set(ids(federation, "train", "validation", "test"))) == 110


def test_dolly_and_bbh_make_eight_categories_with_one_unseen() -> None:
    federation = build_instruction_federation(
        **{**SETTINGS, "sources": ["dolly", "bbh"], "unseen": "summarization", "train_per_task": 40,
           "benchmarks": ["unseen", "dolly", "gsm8k", "bbh", "mmlu"], "benchmark_size": 7},
    )  # fmt: skip
    assert len(federation.tasks) == 8 and "summarization" not in federation.tasks
    assert federation.tasks[-1] == "bbh"
    dolly, bbh = read_instructions("dolly"), read_instructions("bbh")
    for i in ids(federation, "train", "validation", "test"):
        rows, at = (dolly, i) if i < len(dolly) else (bbh, i - len(dolly))
        assert rows.split[at] == "train" and rows.category[at] != "summarization"
    assert (
        "of 320 rows" in federation.notes[0] and "lost the beginning of their prompt" in federation.notes[0]
    )
    assert federation.describe()["benchmarks"] == {
        "unseen": {"metric": "rouge_l", "n": 7}, "dolly": {"metric": "rouge_l", "n": 7},
        "gsm8k": {"metric": "number", "n": 7}, "bbh": {"metric": "exact", "n": 7},
        "mmlu": {"metric": "choice", "n": 7},
    }  # fmt: skip
    held = {text: k for rows in (dolly, bbh) for text, k in zip(rows.response, rows.category, strict=True)}
    assert {held[text] for text in federation.benchmarks["unseen"].references} == {"summarization"}
    tests = {bbh.response[i] for i in bbh.positions("test")}
    assert set(federation.benchmarks["bbh"].references) <= tests


# ---- benchmarks ----------------------------------------------------------------------------------


def test_benchmarks_ask_the_same_in_every_seed(build: Callable[..., InstructionFederation]) -> None:
    asked = [
        build(seed=seed, unseen="red", benchmarks=["unseen"], benchmark_size=9).benchmarks["unseen"]
        for seed in (1, 2)
    ]
    assert asked[0].references == asked[1].references and len(asked[0]) == 9
    assert asked[0].rows.content_hash() == asked[1].rows.content_hash()
    assert asked[0].prompts is not None and asked[0].options is None
    whole = build(unseen="red", benchmarks=["unseen"], benchmark_size=99).benchmarks["unseen"]
    assert len(whole) == 60 and whole.references == tuple(row["response"] for row in made_up({"red": 60}))


def test_choices_come_with_each_letter_in_turn() -> None:
    federation = build_instruction_federation(
        **{**SETTINGS, "sources": ["gsm8k"], "train_per_task": 80, "clients": 2, "benchmarks": ["mmlu"],
           "benchmark_size": 3, "max_length": 64},
    )  # fmt: skip
    mmlu = federation.benchmarks["mmlu"]
    assert mmlu.prompts is None and mmlu.options is not None and len(mmlu.options) == 12
    for k in range(12):
        tokens, marks = row_of(mmlu.options, k)
        assert tokens[-1] == b"ABCD"[k % 4] and marks[-1] and sum(marks) == 1
        answer = row_of(mmlu.rows, k // 4)[0][-2:]
        assert (answer == [tokens[-1], END]) == (mmlu.references[k // 4] == "ABCD"[k % 4])


# ---- refusals ------------------------------------------------------------------------------------


class Endless(ByteTokenizer):
    eos_token_id = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": []}, r"got no sources, needs one or more sources, each once; correct data.sources"),
        ({"sources": ["bbh", "bbh:tasks"]}, r"got 'bbh' twice, needs one or more sources"),
        (
            {"unseen": "pink"},
            r"data.unseen is 'pink', needs a category of the sources, blue, green, red; corr",
        ),
        ({"benchmarks": ["arc"]}, r"got the benchmark 'arc', needs unseen, dolly, gsm8k, bbh, mmlu; correct"),
        (
            {"benchmarks": ["unseen"]},
            r"'unseen' needs a category that no client holds; name one in data.unseen",
        ),
        ({"benchmark_size": 0}, r"evaluation.benchmark_size is 0, must be >= 1"),
        ({"train_fraction": 1.0}, r"data.train_fraction is 1.0, must be > 0 and < 1"),
        ({"validation_fraction": 1.0}, r"data.validation_fraction is 1.0, must be >= 0 and < 1"),
        ({"max_length": 7}, r"model.max_length is 7, must be >= 8"),
        ({"tokenizer": Endless()}, r"tokenizer has no end token, which ends every response; set eos_token"),
        ({"alpha": 0.0}, r"partition: alpha is 0.0, must be > 0"),
        ({"clients": 0}, r"partition: got 0 clients"),
    ],
)
def test_settings_that_do_not_fit(
    build: Callable[..., InstructionFederation], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build(**changes)
    assert "\n" not in str(error.value)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "own.jsonl", made_up({"red": 60}))
    with pytest.raises(ValueError, match=r"got only the unseen category, needs another one to train on"):
        build_instruction_federation(**{**SETTINGS, "root": tmp_path, "unseen": "red"})
    write_jsonl(tmp_path / "own.jsonl", made_up({"train": 60}))
    with pytest.raises(ValueError, match=r"got a category called 'train'"):
        build_instruction_federation(**{**SETTINGS, "root": tmp_path})


def test_text_federations_keep_their_fingerprint(folder: Path, tokenizer: Any) -> None:
    federation = build_text_federation(
        tasks=["red", "green", "blue"], clients=4, alpha=1.0, validation_per_client=5, test_per_client=8,
        min_examples=4, max_length=16, seed=1, tokenizer=tokenizer, root=folder,
    )  # fmt: skip
    # taken at commit bfc9b8a, before rows could hold response marks
    assert federation.fingerprint == "d2c18ebf04f9c3a007f3f2ab17f97c79f28741c32a5f6de1763a26a7f2534ae9"
