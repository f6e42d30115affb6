"""FFA-LoRA and FedSA-LoRA: what travels, what stays, and one gradient step in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.methods.lora_averaging import FEDSA_LORA, FFA_LORA, FedSAConfig, FFAConfig, State
from fedprism.protocol import Ask, Client, Reply, payload_bytes
from tests.tiny import Linear, TinyRows, drive, facts_of

PLAIN: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 99}


def regressions(sizes: tuple[int, ...] = (5, 9, 2)) -> dict[int, Client]:
    """Clients of different sizes, inputs (n, 4) and targets (n, 3), squared loss, rank 2."""
    model, g = Linear(4, outputs=3, rank=2, loss="square"), torch.Generator().manual_seed(2)
    clients = {}
    for i, n in enumerate(sizes):
        x, y = torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g)
        rows = TinyRows(x=x, y=y, label=torch.zeros(n, dtype=torch.int64))
        clients[i] = Client(i, model, {"train": rows, "test": rows})
    return clients


def first_step(client: Client, a: Tensor, lr: float) -> Tensor:
    """B after one step from 0 on mean |B A x - y|^2: 2 lr / n sum_j y_j (A x_j)^T."""
    x, y = (client.data["train"].columns[name] for name in ("x", "y"))
    return 2 * lr / len(x) * y.T @ (x @ a.T)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_ffa_takes_one_step_under_the_same_a_everywhere(weights: Any) -> None:
    clients = regressions()
    (end,) = drive(FFA_LORA, FFAConfig(rounds=1, lr=0.1, weights=weights, **PLAIN), clients)
    a = clients[0].model.init("lora_A", 0)["lora_A.p"]  # the run's seed is 0
    steps = [first_step(c, a, 0.1) for c in clients.values()]
    rho = (5 / 16, 9 / 16, 2 / 16) if weights == "examples" else (1 / 3,) * 3
    expected = sum(p * b for p, b in zip(rho, steps, strict=True))
    assert torch.allclose(end.state.shared["lora_B.p"], expected, atol=1e-6)
    products = sum(p * b @ a for p, b in zip(rho, steps, strict=True))
    assert torch.allclose(end.state.shared["lora_B.p"] @ a, products, atol=1e-6)  # the average is exact


@pytest.mark.parametrize(
    ("method", "cfg", "entries"), [(FFA_LORA, FFAConfig(), 3 * 2), (FEDSA_LORA, FedSAConfig(), 2 * 4)]
)
def test_one_block_travels(method: Any, cfg: Any, entries: int) -> None:
    """B has 3 x 2 entries and A 2 x 4, of four bytes; a seed and a rate of eight go along."""
    clients = regressions()
    state = method.start(cfg, clients[0].model, facts_of(clients))
    ask = next(method.server(cfg, state, (0, 1, 2)))
    assert isinstance(ask, Ask) and payload_bytes(ask.body) == 4 * entries + 16
    sent = method.phases[0](clients[0], dict(ask.body), cfg)
    assert payload_bytes(sent["shared"]) == 4 * entries


def test_the_server_weighs_as_it_is_told() -> None:
    for weights, expected in (("examples", 2.5), ("uniform", 2.0)):
        cfg = FFAConfig(rounds=1, weights=weights)  # type: ignore[arg-type]
        server = FFA_LORA.server(cfg, State(0, {"lora_B.p": torch.zeros(1, 1)}, 0), (0, 1))
        next(server)
        bodies = [(1, 1.0), (3, 3.0)]  # examples, value: (1 + 9) / 4 or (1 + 3) / 2
        end: Any = server.send(
            [
                Reply(i, {"shared": {"lora_B.p": torch.full((1, 1), v)}, "n": n, "loss": v, "examples": n})
                for i, (n, v) in enumerate(bodies)
            ]
        )
        assert float(end.state.shared["lora_B.p"]) == expected and end.log["train_loss"] == expected


def test_fedsa_clients_keep_their_b_through_rounds_they_miss() -> None:
    clients = regressions()
    cfg = FedSAConfig(rounds=6, lr=0.05, participation=0.3, **PLAIN)  # one client in a round
    state = FEDSA_LORA.start(cfg, clients[0].model, facts_of(clients))
    seen: set[int] = set()
    for _ in range(6):
        before = {i: dict(c.state.get("own", {})) for i, c in clients.items()}
        (end,) = drive(FEDSA_LORA, cfg, clients, state=state, stop=1)
        now = {i: c.state.get("own", {}) for i, c in clients.items()}
        moved = [
            i
            for i, own in now.items()
            if any(not torch.equal(v, before[i].get(k, torch.zeros(()))) for k, v in own.items())
        ]
        assert len(moved) == 1
        seen |= set(moved)
        state = end.state
        assert set(state.shared) == {"lora_A.p"}
        assert all(set(c.state.get("own", {})) <= {"lora_B.p"} for c in clients.values())
    assert len(seen) > 1
    got = FEDSA_LORA.serve(cfg, state)
    batch = clients[0].data["test"].columns
    for i in seen:  # everyone predicts with the one A and a B of its own
        logits = FEDSA_LORA.predictor(clients[i], got, cfg)(batch).logits
        own = clients[i].state["own"]["lora_B.p"] @ state.shared["lora_A.p"]
        assert torch.allclose(logits, batch["x"] @ own.T, atol=1e-6)


def test_a_client_that_was_never_asked_fits_a_copy_of_b() -> None:
    clients = regressions()
    cfg = FedSAConfig(rounds=1, lr=0.1, **PLAIN)
    a = clients[0].model.init("lora_A", 7)
    got = {"shared": a, "seed": 7}
    batch = clients[1].data["test"].columns
    logits = FEDSA_LORA.predictor(clients[1], got, cfg)(batch).logits
    expected = batch["x"] @ (first_step(clients[1], a["lora_A.p"], 0.1) @ a["lora_A.p"]).T
    assert torch.allclose(logits, expected, atol=1e-6) and not clients[1].state
    still = FedSAConfig(rounds=1, new_client_epochs=0)
    assert not FEDSA_LORA.predictor(clients[1], got, still)(batch).logits.any()


@pytest.mark.parametrize(("method", "cfg"), [(FFA_LORA, FFAConfig()), (FEDSA_LORA, FedSAConfig())])
def test_models_without_pairs_are_refused(method: Any, cfg: Any) -> None:
    clients = regressions()
    with pytest.raises(ValueError, match=rf"^{method.name}: got a model without low-rank pairs"):
        method.start(cfg, Linear(3), facts_of(clients))
