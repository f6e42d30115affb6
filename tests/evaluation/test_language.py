"""Phases of language models: token accuracy and loss by hand, benchmarks, their scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny_generator import END, Counter

from fedprism.data.text import Rows
from fedprism.evaluation.language import (
    collect_language,
    generation_phase,
    language_phase,
    question_loss_phase,
    questions,
    score_answers,
    score_choices,
    texts_of,
)
from fedprism.methods.registry import get_method
from fedprism.protocol import Client, Reply

METHOD = get_method("fedavg")


def rows_of(texts: list[list[int]], answers: list[int], tasks: list[int] | None = None) -> Rows:
    """Rows of tokens; answers: how many of the last tokens are the response."""
    n = len(texts)
    marks = [[k >= len(row) - a for k in range(len(row))] for row, a in zip(texts, answers, strict=True)]
    at = torch.arange(n)
    return Rows(
        {"label": torch.zeros_like(at), "row": at, "task": torch.tensor(tasks or [0] * n)},
        tokens=torch.tensor([i for row in texts for i in row], dtype=torch.int32),
        offsets=torch.tensor([0, *map(len, texts)]).cumsum(0),
        response=torch.tensor([i for row in marks for i in row]),
        pad=7,
    )


# The counter says after [1]: 2, after [1, 2]: 5, after [4, 3]: 9, after [0, 5]: 7, after [0, 5, 7]: 5.
ROWS = rows_of([[1, 2, 5], [4, 3, 9], [0, 5, 7, 4], [1, 3]], [2, 1, 2, 1], [0, 1, 1, 0])
SERVED = ("w",)


def nats(right: bool) -> float:
    """Nats of one token under logits 5 (the counter's) and 0 (the nine others)."""
    total = math.log(math.exp(5) + 9)
    return total - 5 if right else total


def client(model: Counter, **data: Rows) -> Client:
    return Client(0, model, data)


def body(**more: Any) -> dict[str, Any]:
    return {"w": Counter().init("lora_B", 0), **more}


def test_token_accuracy_and_loss_by_hand() -> None:
    phase_ = language_phase(METHOD, SERVED)
    sent = phase_(client(Counter(), test=ROWS), body(split="test", size=3, n_tasks=3), METHOD.config())
    # task 0: [1, 2, 5] both right, [1, 3] wrong; task 1: [4, 3, 9] right, [0, 5, 7, 4] right and wrong
    assert sent["correct"].tolist() == [2, 2, 0] and sent["tokens"].tolist() == [3, 3, 0]
    assert sent["examples_of"].tolist() == [2, 2, 0]
    half = (nats(True) + nats(False)) / 2
    assert sent["loss"].tolist() == pytest.approx([nats(True) + nats(False), nats(True) + half, 0], abs=1e-5)


def test_scores_of_several_clients_are_put_together() -> None:
    def reply(who: int, correct: list[int], tokens: list[int], loss: list[float], n: list[int]) -> Reply:
        return Reply(who, {"correct": torch.tensor(correct), "tokens": torch.tensor(tokens),
                           "loss": torch.tensor(loss).double(), "examples_of": torch.tensor(n)})  # fmt: skip

    got = collect_language(
        [reply(0, [3, 0], [4, 0], [6.0, 0.0], [2, 0]), reply(1, [1, 2], [4, 4], [3.0, 8.0], [1, 2])],
        ["a", "b", "c"][:2],
    )
    assert got == {
        "accuracy": [0.75, 0.375],
        "loss": [3.0, pytest.approx(11 / 3)],
        "n": [2, 3],
        "per_task": {
            "a": {"correct": 4, "n": 8, "loss": 3.0, "examples": 3},
            "b": {"correct": 2, "n": 4, "loss": 4.0, "examples": 2},
        },
    }
    with pytest.raises(ValueError, match=r"clients \[1\] have no rows to score"):
        collect_language([reply(0, [1], [1], [1.0], [1]), reply(1, [0], [0], [0.0], [0])], ["a"])


def asked(rows: Rows) -> dict[str, Any]:
    return questions(next(rows.batches(len(rows))))


def test_questions_stand_in_the_order_of_their_rows() -> None:
    got = asked(ROWS)
    assert got["row"].tolist() == [0, 1, 2, 3] and got["input_ids"][2].tolist() == [0, 5, 7, 4]
    assert got["input_ids"][3].tolist() == [1, 3, 7, 7] and got["attention_mask"][3].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("size", [1, 3, 9])
def test_loss_of_questions_by_hand(size: int) -> None:
    phase_ = question_loss_phase(METHOD, SERVED)
    model = Counter()
    sent = phase_(client(model), body(**asked(ROWS), size=size), METHOD.config())
    half = (nats(True) + nats(False)) / 2
    assert sent["nats"].tolist() == pytest.approx([nats(True), nats(True), half, nats(False)], abs=1e-5)
    assert sum(rows for rows, _ in model.passes) == 4


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_answers_to_questions_by_hand(size: int, caches: bool) -> None:
    prompts = rows_of([[2, 0, 3], [1], [4, 3], [3]], [1, 1, 1, 1])
    got = asked(prompts)
    got.pop("response")
    sent = generation_phase(METHOD, SERVED)(
        client(Counter(caches=caches)), body(**got, size=size, end=END, new_tokens=3), METHOD.config()
    )
    # [2, 0, 3]: 8, then 13 + 4 = 17 -> 7, then 20 + 5 = 25 -> 5
    assert sent["generated"].tolist() == [[8, 7, 5], [2, 5, 1], [-1] * 3, [4, -1, -1]]

    class Digits:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(map(str, ids))

    assert texts_of(sent["generated"], Digits()) == ["875", "251", "", "4"]


def test_a_phase_asks_for_what_it_declares() -> None:
    with pytest.raises(ValueError, match="missing"):
        generation_phase(METHOD, SERVED)(client(Counter()), body(size=1), METHOD.config())
    assert language_phase(get_method("ditto"), SERVED).keeps  # what its clients keep may stand there


# ---- scores of benchmarks ------------------------------------------------------------------------


def test_free_answers_are_scored_for_one_client() -> None:
    got = score_answers("number", [["so 3", "4", "none"]], ["#### 3", "#### 5", "#### 6"])
    assert got == {
        "metric": "number", "score": pytest.approx(1 / 3), "n": 3,
        "examples": [{"answer": "so 3", "reference": "#### 3"}, {"answer": "4", "reference": "#### 5"},
                     {"answer": "none", "reference": "#### 6"}],
    }  # fmt: skip
    long = score_answers("rouge_l", [["a b " * 99]], ["a b"])
    assert len(long["examples"][0]["answer"]) == 200 and long["stemming"] in (True, False)
    assert long["score"] == pytest.approx(2 * 2 / (198 + 2))


def test_clients_of_their_own_are_averaged() -> None:
    got = score_answers("exact", [["yes", "no"], ["yes", "yes"], ["x", "y"]], ["Yes", "Yes"])
    assert got["score"] == pytest.approx((0.5 + 1 + 0) / 3) and got["per_client"] == [0.5, 1.0, 0.0]


def test_choices_take_the_likeliest_letter() -> None:
    nats_ = torch.tensor([1.0, 0.5, 2, 2, 3, 3, 3, 3, 4, 4, 4, 1])
    assert score_choices([nats_], ["B", "A", "C"], "ABCD") == {
        "metric": "choice", "score": pytest.approx(2 / 3), "n": 3
    }  # fmt: skip
    two = score_choices([nats_, -nats_], ["B", "A", "C"], "ABCD")
    # the other way round: C (first of two), A (first of four), A
    assert two["per_client"] == [pytest.approx(2 / 3), pytest.approx(1 / 3)] and two["score"] == 0.5
