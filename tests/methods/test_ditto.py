"""Ditto on quadratics, whose branches are recursions of numbers, and against a loop that takes turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedprism.methods import fedavg
from fedprism.methods.ditto import METHOD, Config, predictor, serve
from fedprism.protocol import Client
from tests.tiny import TinyRows, drive, quadratic_clients, table_clients

A, B = (1.0, 4.0), (0.0, 1.0)
PLAIN = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 1}


def descend(
    start: float, a: float, b: float, lr: float, steps: int, *, lam: float = 0.0, anchor: float = 0.0,
    momentum: float = 0.0,
) -> float:  # fmt: skip
    """Heavy ball on a (x - b)^2 / 2 + lam (x - anchor)^2 / 2, in plain numbers."""
    x, velocity = start, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + a * (x - b) + lam * (x - anchor)
        x -= lr * velocity
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("split", ["interleaved", "sequential"])
def test_both_branches_follow_their_recursions_round_by_round(momentum: float, split: str) -> None:
    lam, lr, steps = 0.7, 0.02, 5
    w, v = 0.0, [0.0, 0.0]
    for rounds in range(1, 5):
        anchor = w  # as received: neither the client's own update nor the next global model
        v = [
            descend(v[i], A[i], B[i], lr, steps, lam=lam, anchor=anchor, momentum=momentum) for i in range(2)
        ]
        w = sum(descend(w, A[i], B[i], lr, steps, momentum=momentum) for i in range(2)) / 2
        clients = quadratic_clients(A, B)
        cfg = Config(rounds=9, lam=lam, lr=lr, local_steps=steps, momentum=momentum, split=split, **PLAIN)
        ends = drive(METHOD, cfg, clients, stop=rounds)
        assert float(ends[-1].state.w["w"]) == pytest.approx(w, abs=1e-12)
        assert [float(clients[i].state["v"]["w"]) for i in range(2)] == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize("split", ["interleaved", "sequential"])
@pytest.mark.parametrize(
    "solver", [{"optimizer": "sgd", "momentum": 0.9, "lr": 0.05}, {"optimizer": "adamw", "lr": 0.01}]
)
def test_the_global_trajectory_is_that_of_fedavg(split: str, solver: dict[str, Any]) -> None:
    shared = {"rounds": 3, "local_epochs": 2, "batch_size": 16, "participation": 0.6, **solver}
    mine = drive(METHOD, Config(split=split, **shared), table_clients())
    plain = drive(fedavg.FEDAVG, fedavg.Config(**shared), table_clients())
    for end, other in zip(mine, plain, strict=True):
        assert all(torch.equal(value, other.state.w[name]) for name, value in end.state.w.items())


def test_a_very_large_lambda_keeps_the_personal_model_at_the_received_one() -> None:
    # lr lam = 1, so one step goes to the anchor but for the data's pull, a |b - w| / (a + lam) at the minimum
    lam = 1e5
    for rounds in (2, 4):
        clients = quadratic_clients(A, B)
        cfg = Config(rounds=5, lam=lam, lr=1 / lam, local_steps=8, **PLAIN)
        ends = drive(METHOD, cfg, clients, stop=rounds, state=None)
        received = float(ends[-2].state.w["w"])
        for i in range(2):
            v = float(clients[i].state["v"]["w"])
            assert v == pytest.approx((A[i] * B[i] + lam * received) / (A[i] + lam), abs=1e-12)
            assert abs(v - received) < 5e-5


@pytest.mark.parametrize(("steps", "shared"), [(5, (2, 3)), (4, (2, 2)), (1, (1, 1))])
def test_half_the_budget_is_the_floor_for_the_global_branch_and_the_rest_for_the_other(
    steps: int, shared: tuple[int, int]
) -> None:
    clients = quadratic_clients((2.0,), (1.0,))
    cfg = Config(rounds=1, lam=0.5, lr=0.1, local_steps=steps, budget="halved", **PLAIN)
    (end,) = drive(METHOD, cfg, clients)
    assert float(end.state.w["w"]) == pytest.approx(descend(0, 2, 1, 0.1, shared[0]), abs=1e-12)
    v = float(clients[0].state["v"]["w"])
    assert v == pytest.approx(descend(0, 2, 1, 0.1, shared[1], lam=0.5), abs=1e-12)


def test_half_the_budget_of_epochs_counts_batches() -> None:
    client = table_clients(m=1)[0]  # 40 rows: 3 batches an epoch, 6 in two; 3 for each branch
    cfg = Config(local_epochs=2, batch_size=16, budget="halved")
    sent = METHOD.phases[0](client, {"w": client.model.trainable(0), "lr": 0.01, "seed": 0}, cfg)
    assert sent["examples"] == 2 * 40


def watched(client: Client) -> list[list[int]]:
    """The rows of every batch whose loss the client computes from now on."""
    rows: list[list[int]] = []
    plain = client.loss

    def loss(tree: Any, batch: Any) -> Any:
        rows.append(batch["row"].tolist())
        return plain(tree, batch)

    client.loss = loss  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize(("split", "same"), [("interleaved", True), ("sequential", False)])
def test_taking_turns_means_the_same_batches_for_both(split: str, same: bool) -> None:
    client = table_clients(m=1)[0]
    rows = watched(client)
    cfg = Config(local_steps=4, batch_size=8, split=split)
    METHOD.phases[0](client, {"w": client.model.trainable(0), "lr": 0.01, "seed": 0}, cfg)
    assert len(rows) == 8 and (rows[:4] == rows[4:]) is same


def test_one_branch_after_the_other_equals_a_loop_that_takes_turns() -> None:
    client = table_clients(m=1)[0]
    w0 = client.model.trainable(3)
    client.state["v"] = v0 = client.model.trainable(4)
    client.generator.manual_seed(11)
    batches = list(client.batches(16, steps=6))
    client.generator.manual_seed(11)
    cfg = Config(
        local_steps=6, batch_size=16, lam=0.8, optimizer="sgd", momentum=0.9, weight_decay=0.0, clip=0.0
    )
    sent = METHOD.phases[0](client, {"w": w0, "lr": 0.05, "seed": 0}, cfg)

    v, w = ({n: x.clone().requires_grad_() for n, x in tree.items()} for tree in (v0, w0))
    own, common = (torch.optim.SGD(tree.values(), lr=0.05, momentum=0.9) for tree in (v, w))
    for batch in batches:
        own.zero_grad()
        pull = sum((v[n] - w0[n]).square().sum() for n in v)
        (torch.nn.functional.cross_entropy(client.model.apply(v, batch).logits, batch["label"])
         + 0.4 * pull).backward()  # fmt: skip
        own.step()
        common.zero_grad()
        torch.nn.functional.cross_entropy(client.model.apply(w, batch).logits, batch["label"]).backward()
        common.step()
    for name in w0:
        assert torch.allclose(sent["w"][name], w[name], atol=1e-6)
        assert torch.allclose(client.state["v"][name], v[name], atol=1e-6)


def test_a_client_never_asked_predicts_with_the_global_model_and_others_with_their_own() -> None:
    clients = table_clients()
    cfg = Config(rounds=1, participation=0.3, lr=0.1, optimizer="sgd", batch_size=8)
    ends = drive(METHOD, cfg, clients)
    got = serve(cfg, ends[-1].state)
    asked = [i for i, client in clients.items() if client.state]
    assert len(asked) == 1
    for i, client in clients.items():
        batch = next(client.data["test"].batches(12))
        plain = client.model.apply(got["w"], batch).logits
        tree = client.state["v"] if i in asked else got["w"]
        mine = predictor(client, got, cfg)(batch).logits
        assert torch.equal(mine, client.model.apply(tree, batch).logits)
        assert torch.equal(mine, plain) is (i not in asked)


def test_a_client_first_asked_late_starts_its_model_where_all_started() -> None:
    b = (2.0, 1.0)
    cfg = Config(rounds=6, participation=0.5, lam=0.7, lr=0.05, local_steps=5, **PLAIN)
    for rounds in range(2, 7):
        clients, before = quadratic_clients(A, b), quadratic_clients(A, b)
        ends = drive(METHOD, cfg, clients, stop=rounds)
        drive(METHOD, cfg, before, stop=rounds - 1)
        late = [i for i in (0, 1) if clients[i].state and not before[i].state]
        if late:
            (i,) = late
            w = float(ends[-2].state.w["w"])
            expected = descend(0.0, A[i], b[i], 0.05, 5, lam=0.7, anchor=w)
            assert w != 0.0 and float(clients[i].state["v"]["w"]) == pytest.approx(expected, abs=1e-12)
            return
    raise AssertionError("one client was never asked; take another seed")


def with_validation(train: float, validation: float) -> Client:
    client = quadratic_clients((1.0,), (train,))[0]
    rows = TinyRows(a=torch.ones(1).double(), b=torch.tensor([validation]).double())
    client.data = {**client.data, "validation": rows}
    return client


# (b of training, b of validation, the best lambda); the received model and the first own one are 0
CHOICES = [
    (1.0, 1.0, 0.1),  # the training data say the truth: the weakest pull
    (1.0, 0.0, 2.0),  # they mislead and the global model is right: the strongest
    (0.0, 5.0, 0.1),  # no lambda moves anything: the smallest among equals
]


@pytest.mark.parametrize(("train", "validation", "best"), CHOICES)
def test_lambda_is_chosen_on_validation_rows(train: float, validation: float, best: float) -> None:
    client = with_validation(train, validation)
    cfg = Config(dynamic_lam=True, local_steps=50, lr=0.1, **PLAIN)
    sent = METHOD.phases[0](client, {"w": {"w": torch.zeros(1).double()}, "lr": 0.1, "seed": 0}, cfg)
    assert sent["lam"] == best and sent["examples"] == 4 * 50
    expected = descend(0.0, 1.0, train, 0.1, 50, lam=best)
    assert float(client.state["v"]["w"]) == pytest.approx(expected, abs=1e-12)


def test_a_middle_lambda_wins_where_the_truth_lies_between() -> None:
    client = with_validation(1.0, 0.5)  # minima at 1 / (1 + lam): .91, .5 and .33
    cfg = Config(dynamic_lam=True, local_steps=80, lr=0.1, rounds=1, **PLAIN)
    (end,) = drive(METHOD, cfg, {0: client})
    assert end.log["lam"] == {"0": 1.0}
    assert float(client.state["v"]["w"]) == pytest.approx(0.5, abs=1e-6)


def test_choosing_lambda_without_validation_rows_is_refused_with_a_way_out() -> None:
    client = quadratic_clients((1.0,), (1.0,))[0]
    with pytest.raises(ValueError, match=r"needs validation rows, got none; give some or set lam"):
        METHOD.phases[0](
            client, {"w": {"w": torch.zeros(1).double()}, "lr": 0.1, "seed": 0}, Config(dynamic_lam=True)
        )
