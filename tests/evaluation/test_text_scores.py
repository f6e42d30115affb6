"""Scores of texts: by hand, and ROUGE-L against the package rouge-score."""

from __future__ import annotations

import builtins
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from fedprism.evaluation import text_scores
from fedprism.evaluation.text_scores import (
    answer_of,
    common_subsequence,
    last_number,
    rouge_l,
    same_answer,
    same_number,
    stems,
    words,
)


@pytest.fixture
def unstemmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if rouge-score were not installed."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("rouge_score"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    text_scores._stemmer.cache_clear()
    yield
    monkeypatch.undo()
    text_scores._stemmer.cache_clear()


def test_longest_common_subsequence_by_hand() -> None:
    assert common_subsequence("abcde", "ace") == 3
    assert common_subsequence("abc", "") == common_subsequence("", "abc") == common_subsequence("a", "b") == 0
    assert common_subsequence("abcabc", "bcab") == 4 and common_subsequence("ab", "ba") == 1


def test_rouge_l_by_hand(unstemmed: None) -> None:
    assert not stems()
    # "police killed the gunman" (Lin 2004): LCS with "police kill the gunman" is 3 of 4 words
    assert rouge_l("Police kill the gunman!", "police killed the gunman") == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(2 / 4)
    assert rouge_l("a b", "a c b d e") == pytest.approx(2 * (2 / 2) * (2 / 5) / (2 / 2 + 2 / 5))
    assert rouge_l("", "a") == rouge_l("a", "") == rouge_l("", "") == rouge_l("a", "b") == 0.0
    assert rouge_l("It's 3.5", "it s 3 5") == 1.0


def test_words_are_stemmed_with_the_package() -> None:
    pytest.importorskip("rouge_score")
    assert stems() and words("Cats were running, and ran") == ["cat", "were", "run", "and", "ran"]
    assert rouge_l("the cats", "the cat") == 1.0


def test_rouge_l_is_the_packages() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
    draw = random.Random(3)
    vocabulary = ["the", "runner", "runs", "running", "Paris,", "3.5", "it's", "—", "happily", "happy", "a"]
    for _ in range(200):
        a, b = (" ".join(draw.choices(vocabulary, k=draw.randint(0, 12))) for _ in range(2))
        assert rouge_l(a, b) == pytest.approx(scorer.score(b, a)["rougeL"].fmeasure, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 48 / 4 = 12, and 12+15=27.\n#### 27", "27"),
        ("It costs $1,234.50.", "1234.50"),
        ("about 95%", "95"),
        ("from 10-5", "5"),
        ("it is -5 degrees", "-5"),
        ("-$5", "-5"),
        ("$-5.", "-5"),
        ("(3)-4", "4"),
        ("choose 1, 2 or 3, then", "3"),
        ("12,345,678 people", "12345678"),
        ("12,34", "34"),
        ("none at all", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_numbers_are_compared_by_value() -> None:
    assert same_number("The answer is $1,000.00.", "... #### 1000") == 1.0
    assert same_number("1000 or 999", "#### 1000") == 0.0
    assert same_number("nothing", "nothing") == same_number("", "#### 3") == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "right"),
    [
        ("(B)", "(B)", 1),
        ("B", "(B)", 1),
        ("b) the second", "(B)", 1),
        ("The answer is (B) Tuesday.", "(B)", 1),
        ("(A) is wrong, so the answer is (B).", "(B)", 1),
        ("(A) or (B)", "(B)", 0),
        ("Because of this", "(B)", 0),
        ("", "(B)", 0),
        ("Yes.", "yes", 1),
        ("\n\n'True'\nand more", "True", 1),
        ("Answer: no", "No", 1),
        ("the answer is: valid", "valid", 1),
        ("invalid", "valid", 0),
        ("syndrome  therefrom", "syndrome therefrom", 1),
        ("] ]", "] ]", 1),
        ("] ] ]", "] ]", 0),
        ("24", "24", 1),
        ("", "24", 0),
    ],
)
def test_short_answers(prediction: str, reference: str, right: int) -> None:
    assert same_answer(prediction, reference) == right


def test_the_last_mark_of_an_answer_counts() -> None:
    assert answer_of("The answer is 3? No: the answer is 4\nbye") == "4"
    assert answer_of("  first \nsecond") == "first" and answer_of(" \n") == ""
    assert answer_of("the answer is\n\n7") == "7"
