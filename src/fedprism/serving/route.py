"""Answers of a finished run to rows whose client nobody knows (FedSPM spec 5).

A row goes to the client of largest posterior (the first among ties), and that client's predictor answers it:
the rule by which the run's system accuracy was measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedprism.serving.rows import ID, Preparation, Prepared, RefusedRow

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """What the federation says about a row.

    row: its number, from 1. id: its own name, "" for none. client: who answers. posterior: client name ->
    probability that the row is one of its, sums to 1. prediction: class name; probability: what the client
    gives it, in (0, 1]. missing: columns that were filled. notes: what is unlike the rows of training."""

    row: int
    id: str
    client: str
    posterior: Mapping[str, float]
    prediction: str
    probability: float
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A row that was not answered. row, id: as of `Answer`. reason: one line."""

    row: int
    id: str
    reason: str


@dataclass(frozen=True, eq=False)
class Router:
    """A finished run that answers.

    client_names: m. class_names: K. preparation: how a row becomes inputs. scores: batch -> (b, m) log-scores
    of the clients. predictors: per client, batch -> (b, K) logits. size: rows per forward pass. about: facts
    of the run, JSON-ready. A batch holds x (b, d) float32 and task (b,), zero."""

    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    preparation: Preparation
    scores: Callable[[Batch], Tensor]
    predictors: Sequence[Callable[[Batch], Tensor]]
    size: int = 64
    about: Mapping[str, Any] = field(default_factory=dict)

    def answer(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer | Refusal]:
        """An answer or a refusal for each row, in order.

        rows: column -> cell, see `Preparation.prepare`; "id" names a row where it is there."""
        found: dict[int, Answer | Refusal] = {}
        ready: list[tuple[int, str, Prepared]] = []
        for number, row in enumerate(rows, start=1):
            name = str(row.get(ID, "")).strip()
            try:
                ready.append((number, name, self.preparation.prepare(row)))
            except RefusedRow as fault:
                found[number] = Refusal(number, name, str(fault))
        for at in range(0, len(ready), self.size):
            for each in self._answer(ready[at : at + self.size]):
                found[each.row] = each
        return [found[number] for number in sorted(found)]

    def _answer(self, ready: Sequence[tuple[int, str, Prepared]]) -> list[Answer | Refusal]:
        x = torch.tensor([row.inputs.tolist() for _, _, row in ready], dtype=torch.float64).float()
        batch = {"x": x, "task": torch.zeros(len(x), dtype=torch.int64)}
        with torch.inference_mode():
            posterior = self.scores(batch).double().softmax(1)  # (b, m)
            said = torch.stack([p(batch).double().softmax(1) for p in self.predictors], dim=1)  # (b, m, K)
        answers: list[Answer | Refusal] = []
        for k, (number, name, row) in enumerate(ready):
            client = int(posterior[k].numpy().argmax())  # numpy takes the first among ties
            classes = said[k, client]
            if not bool(posterior[k].isfinite().all()) or not bool(classes.isfinite().all()):
                answers.append(Refusal(number, name, "its numbers are too large to compute with; check them"))
                continue
            best = int(classes.numpy().argmax())
            answers.append(
                Answer(
                    number,
                    name,
                    self.client_names[client],
                    dict(zip(self.client_names, posterior[k].tolist(), strict=True)),
                    self.class_names[best],
                    float(classes[best]),
                    row.missing,
                    row.notes,
                )
            )
        return answers


def as_record(router: Router, found: Sequence[Answer | Refusal]) -> dict[str, Any]:
    """JSON-ready: the facts of the run, "clients", "classes", "answers" and "refused"."""
    return {
        **router.about,
        "clients": list(router.client_names),
        "classes": list(router.class_names),
        "answers": [asdict(each) for each in found if isinstance(each, Answer)],
        "refused": [asdict(each) for each in found if isinstance(each, Refusal)],
    }


def as_rows(record: Mapping[str, Any], digits: int | None = None) -> list[dict[str, str]]:
    """The answers of `as_record` as rows of text: row, id (if any row has one), client, posterior of each
    client, prediction, probability, notes. digits: of the fractions; None for all of them."""
    show = repr if digits is None else f"{{:.{digits}f}}".format
    has_id = any(each["id"] for each in (*record["answers"], *record["refused"]))
    return [
        {
            "row": str(each["row"]),
            **({ID: each["id"]} if has_id else {}),
            "client": each["client"],
            **{f"P({name})": show(share) for name, share in each["posterior"].items()},
            "prediction": each["prediction"],
            "probability": show(each["probability"]),
            "notes": "; ".join(each["notes"]),
        }
        for each in record["answers"]
    ]


def as_csv(record: Mapping[str, Any]) -> str:
    """`as_rows` as CSV, one line per answered row."""
    rows, text = as_rows(record), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
