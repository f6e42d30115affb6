"""Scores of generated texts against references: ROUGE-L, last numbers, short answers.

ROUGE-L (Lin 2004) is sentence-level: the longest common subsequence of lower-cased word tokens. With the
package rouge-score (the extra `language`) tokens of four letters or more are Porter-stemmed, as that package
does; without it nothing is stemmed, and scores are a little lower. `stems` says which, and so does a run.

Choices where the text is silent: numbers are compared by value, so 27.0 is 27. An answer is what follows the
last "answer is" or "answer:", else the first line that is not empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

_WORD = re.compile(r"[a-z0-9]+")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_NUMBER = re.compile(rf"(?<![\w.)])-?\$?-?{_DIGITS}|{_DIGITS}")
_ANSWER = re.compile(r"answer(?:\s+is)?\s*:|answer\s+is\b", re.IGNORECASE)
_OPTION = re.compile(r"\(([A-Za-z])\)")
_LETTER = re.compile(r"([A-Za-z])(?:[).:]|\s|$)")


@cache
def _stemmer() -> Any | None:
    """rouge-score's tokenizer with its Porter stemmer; None without the package."""
    try:
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError:
        return None
    return DefaultTokenizer(use_stemmer=True)


def stems() -> bool:
    """Whether ROUGE-L stems words here."""
    return _stemmer() is not None


def words(text: str) -> list[str]:
    """Lower-cased runs of letters a-z and digits, stemmed where `stems()`."""
    tokenizer = _stemmer()
    return _WORD.findall(text.lower()) if tokenizer is None else list(tokenizer.tokenize(text))


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for k, y in enumerate(b, start=1):
            previous, row[k] = row[k], previous + 1 if x == y else max(row[k], row[k - 1])
    return row[-1]


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 in 0..1: harmonic mean of LCS / words of the prediction and LCS / words of the reference."""
    got, wanted = words(prediction), words(reference)
    length = common_subsequence(got, wanted)
    return 2 * length / (len(got) + len(wanted)) if length else 0.0


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without $ and thousands' commas; None where there is none. A minus sign
    belongs to a number unless a digit, a letter or a bracket stands before it."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace("$", "").replace(",", "")) if found else None


def same_number(prediction: str, reference: str) -> float:
    """1.0 where the last numbers are equal and exist, else 0.0."""
    number = last_number(prediction)
    return float(number is not None and number == last_number(reference))


def answer_of(text: str) -> str:
    """The answer inside a text: see the module."""
    marks = list(_ANSWER.finditer(text))
    rest = text[marks[-1].end() :] if marks else text
    return next((line.strip() for line in rest.splitlines() if line.strip()), "")


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(" \t\"'`*").rstrip(".").split()).strip("\"'`*")


def same_answer(prediction: str, reference: str) -> float:
    """1.0 where the answers are equal but for case, spaces, quotes and a last dot, else 0.0. Where the
    reference is an option like (B), the first bracketed letter of the prediction's answer counts, or a letter
    that it begins with."""
    answer = answer_of(prediction)
    option = _OPTION.fullmatch(reference.strip())
    if option:
        found = _OPTION.search(answer) or _LETTER.match(answer)
        return float(found is not None and found[1].upper() == option[1].upper())
    return float(_plain(answer) == _plain(reference))


SCORES: dict[str, Callable[[str, str], float]] = {
    "rouge_l": rouge_l,
    "number": same_number,
    "exact": same_answer,
}
