"""Outside queries: routed or put to the vote, encoders run once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import drive, facts_of, table_clients

from fedprism.engines.inprocess import InProcess
from fedprism.evaluation.measure import answer_phase, collect_answers, encoding_once, pooled_queries
from fedprism.evaluation.metrics import system_report, weighted_overall
from fedprism.methods.registry import get_method
from fedprism.protocol import Ask


def test_votes_are_counted_by_hand_and_ties_go_to_the_lowest_class() -> None:
    answers = np.array([[0, 2, 1, 1], [0, 1, 2, 2], [1, 0, 2, 0]])  # 3 clients, 4 queries
    # winners: 0 (two votes), 0 (tie of 2, 1, 0), 2 (two votes), 0 (tie)
    report = system_report(answers, np.array([0, 1, 2, 0]), np.zeros(4, int), None, 3)
    assert report == {"rule": "vote", "system": 0.75, "n": 4, "tied": 0.5}


def test_a_router_is_scored_by_the_rule_that_routes() -> None:
    answers = np.array([[0, 0, 0], [1, 1, 1]])
    scores = np.log(np.array([[0.75, 0.25], [0.5, 0.5], [0.1, 0.9]]))
    report = system_report(answers, np.array([0, 1, 1]), np.array([0, 1, 0]), scores, 2)
    # routes: 0, 0 (tie to the lowest), 1; labels right: yes, no, yes; owners right: yes, no, no
    assert report["system"] == pytest.approx(2 / 3) and report["routing"] == pytest.approx(1 / 3)
    assert report["routing_nll"] == pytest.approx(-(math.log(0.75) + math.log(0.5) + math.log(0.1)) / 3)
    assert report["asked"] == pytest.approx([2 / 3, 1 / 3])


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 scores are not numbers"):
        system_report(np.zeros((2, 1), int), np.zeros(1), np.zeros(1), np.array([[0.0, np.nan]]), 2)


def test_average_accuracy_weighs_clients_by_their_training_rows() -> None:
    assert weighted_overall([1.0, 0.5], [30, 10]) == pytest.approx(0.875)


@pytest.mark.parametrize(("name", "times"), [("fedspm", 2), ("fedavg", 1)])
def test_shared_encoders_run_once_per_batch_however_many_clients_answer(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, clients = get_method(name), table_clients()
    cfg = method.config(rounds=1, batch_size=8, local_steps=2, lr=0.05)
    served = method.serve(cfg, drive(method, cfg, clients)[-1].state)
    model, calls = clients[0].model, []
    plain = type(model).encode

    def counted(self: Any, tree: Any, batch: Any, block: str = "encoder") -> Any:
        calls.append(block)
        return plain(self, tree, batch, block)

    def answers(once: bool) -> Any:
        for client in clients.values():
            client.model = model
        shared = encoding_once(model) if once else model
        for client in clients.values():
            client.model = shared
        queries, labels, owners = pooled_queries(list(clients.values()), "test")
        engine = InProcess(name, {"answer": answer_phase(method, tuple(served))}, clients, cfg, seed=0)
        ask = Ask("answer", facts_of(clients).clients, {**served, **queries, "size": 10}, diagnostic=True)
        replies = engine.carry(ask, 0)
        report = collect_answers(
            replies, queries, labels, owners, method=method, cfg=cfg, model=shared, served=served, size=10
        )
        return [r.body["answers"].tolist() for r in replies], report

    expected = answers(once=False)
    monkeypatch.setattr(type(model), "encode", counted)
    got = answers(once=True)
    assert got == expected
    assert len(calls) == times * 4  # 36 queries in batches of 10, each encoder once
    assert got[1]["n"] == 36 and (got[1]["rule"] == "route") == (name == "fedspm")


def test_encoders_of_a_clients_own_are_not_taken_for_the_shared_one() -> None:
    clients = table_clients()
    method = get_method("fedavg_ft")
    cfg = method.config(rounds=1, batch_size=8, lr=0.5, finetune_epochs=3, optimizer="sgd", clip=0.0)
    served = method.serve(cfg, drive(method, cfg, clients)[-1].state)
    queries, _, _ = pooled_queries(list(clients.values()), "test")
    batch = {"x": queries["x"], "task": queries["task"]}
    logits: dict[bool, list[torch.Tensor]] = {}
    for once in (False, True):
        shared = encoding_once(clients[0].model) if once else clients[0].model
        logits[once] = []
        for client in table_clients().values():
            client.model = shared
            client.generator.manual_seed(client.id)
            predict = method.predictor(client, served, cfg)
            with torch.no_grad():
                logits[once].append(predict(batch).logits)
    assert all(torch.equal(a, b) for a, b in zip(logits[False], logits[True], strict=True))
    assert not torch.equal(logits[True][0], logits[True][1])
