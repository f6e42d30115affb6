"""FedSVD: the product outlives the turn of its factors, A is sent, and rounds follow dense arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedprism.methods.fedsvd import METHOD, Config
from fedprism.methods.lora_averaging import FFA_LORA, FFAConfig
from fedprism.protocol import Client, payload_bytes
from tests.tiny import Linear, TinyRows, drive, facts_of
from tests.tiny_language import language_clients

PLAIN: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 99}


def regressions(rank: int = 2) -> dict[int, Client]:
    model, g = Linear(4, outputs=3, rank=rank, loss="square"), torch.Generator().manual_seed(8)
    clients = {}
    for i, n in enumerate((6, 10)):
        x, y = torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g)
        clients[i] = Client(i, model, {"train": TinyRows(x=x, y=y)})
    return clients


def test_rounds_follow_dense_arithmetic() -> None:
    """One step on mean |B A x - y|^2 moves the product by -lr G A^T A, with A^T A of the round before.

    After a refactorisation A^T A projects on the row space of the product, whatever signs and order."""
    clients = regressions()
    ends = drive(METHOD, Config(rounds=4, lr=0.05, **PLAIN), clients)
    a = clients[0].model.init("lora_A", 0)["lora_A.p"].double()
    square, product = a.T @ a, torch.zeros(3, 4).double()
    for end in ends:
        slopes = []
        for c in clients.values():
            x, y = (c.data["train"].columns[name].double() for name in ("x", "y"))
            slopes.append((len(x) / 16, 2 / len(x) * (x @ product.T - y).T @ x))
        product = product - 0.05 * sum(p * slope for p, slope in slopes) @ square
        square = torch.linalg.pinv(product, rtol=1e-9) @ product  # orthogonal projector on its rows
        down, up = end.state.down["lora_A.p"].double(), end.state.up["lora_B.p"].double()
        assert torch.allclose(up @ down, product, atol=1e-6)
        assert torch.allclose(down @ down.T, torch.eye(2).double(), atol=1e-6)
        assert torch.allclose(up.norm(dim=0), torch.linalg.svdvals(product)[:2], atol=1e-6)
        assert end.log["refactorised"] == 1


def test_between_refactorisations_a_stands_still() -> None:
    cfg = Config(rounds=4, period=2, lr=0.05, **PLAIN)
    ends = drive(METHOD, cfg, regressions())
    assert [end.log["refactorised"] for end in ends] == [0, 1, 0, 1]
    downs = [end.state.down["lora_A.p"] for end in ends]
    assert torch.equal(downs[0], regressions()[0].model.init("lora_A", 0)["lora_A.p"])
    assert torch.equal(downs[1], downs[2]) and not torch.equal(downs[0], downs[1])
    plain = drive(FFA_LORA, FFAConfig(rounds=1, lr=0.05, **PLAIN), regressions())
    assert torch.equal(ends[0].state.up["lora_B.p"], plain[0].state.shared["lora_B.p"])


def test_while_b_is_zero_a_stays_as_it_is() -> None:
    clients = regressions()
    for c in clients.values():
        c.data["train"].columns["y"] *= 0  # nothing to learn: B stays 0
    (end,) = drive(METHOD, Config(rounds=1, lr=0.05, **PLAIN), clients)
    assert end.log["refactorised"] == 0 and not end.state.up["lora_B.p"].any()
    assert torch.equal(end.state.down["lora_A.p"], clients[0].model.init("lora_A", 0)["lora_A.p"])


@pytest.mark.parametrize(("period", "entries"), [(1, 2 * 4 + 3 * 2), (0, 3 * 2)])
def test_a_travels_where_it_moves(period: int, entries: int) -> None:
    clients = regressions()
    cfg = Config(period=period)
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    ask: Any = next(METHOD.server(cfg, state, (0, 1)))
    assert payload_bytes(ask.body) == 4 * entries + 16  # a seed and a rate besides
    assert payload_bytes(METHOD.phases[0](clients[0], dict(ask.body), cfg)["up"]) == 4 * 3 * 2


def test_every_expert_is_turned_by_itself() -> None:
    clients = language_clients()
    (end,) = drive(METHOD, Config(rounds=1, lr=0.5, **PLAIN), clients, facts=facts_of(clients))
    (plain,) = drive(METHOD, Config(rounds=1, lr=0.5, period=0, **PLAIN), clients, facts=facts_of(clients))
    a, b = end.state.down["lora_A.0.down"], end.state.up["lora_B.0.down"]
    before = plain.state.up["lora_B.0.down"] @ clients[0].model.init("lora_A", 0)["lora_A.0.down"]
    assert end.log["refactorised"] == 3 and torch.allclose(b @ a, before, atol=1e-6)
    assert torch.allclose(a @ a.mT, torch.eye(2).expand(3, 2, 2), atol=1e-6)


def test_a_rank_above_the_inputs_is_refused() -> None:
    clients = regressions(rank=5)
    with pytest.raises(ValueError, match=r"^fedsvd: 'lora_A.p' has rank 5 for 4 inputs.*model.rank to 4"):
        METHOD.start(Config(), clients[0].model, facts_of(clients))
    METHOD.start(Config(period=0), clients[0].model, facts_of(clients))
