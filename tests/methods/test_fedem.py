"""FedEM against FedAvg, arithmetic by hand, exact maximisation, and planted concepts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.methods import fedavg, fedem
from fedprism.methods.fedem import METHOD, Config, State
from fedprism.models.interface import Outputs
from fedprism.protocol import Ask, Client, Reply, RoundEnd
from tests.tiny import Linear, Quadratic, TinyRows, drive, facts_of, table_clients

SGD = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0}


class RandomLinear(Linear):
    """Linear classifier whose weights start at random: what a component needs."""

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed % 2**62)
        return {"lora_B.p": torch.randn(self.outputs, self.d, generator=g)} if block == "lora_B" else {}


def rows(**columns: Any) -> TinyRows:
    made = {name: torch.as_tensor(value) for name, value in columns.items()}
    return TinyRows(**made, row=torch.arange(len(next(iter(made.values())))) + 100)


def line(w: float, tree: str = "w") -> dict[str, Tensor]:
    return {tree: torch.tensor([w], dtype=torch.float64)}


def point_clients(*points: list[float]) -> dict[int, Client]:
    """Clients of examples with loss (w - b)^2 / 2: a Gaussian of variance one about each component."""
    model = Quadratic()
    return {
        i: Client(i, model, {"train": rows(a=torch.ones(len(b)).double(), b=torch.tensor(b).double())})
        for i, b in enumerate(points)
    }


# ---- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "optimizer": "sgd"}, {}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_one_component_is_fedavg_bit_for_bit(settings: dict[str, Any], participation: float) -> None:
    common = {"rounds": 3, "batch_size": 8, "lr": 0.05, "participation": participation, **settings}
    mine = drive(METHOD, Config(n_components=1, **common), table_clients())
    theirs = drive(fedavg.FEDAVG, fedavg.Config(**common), table_clients())
    for a, b in zip(mine, theirs, strict=True):
        assert a.state.components[0].keys() == b.state.w.keys()
        assert all(torch.equal(a.state.components[0][name], b.state.w[name]) for name in b.state.w)
        assert a.log["train_loss"] == b.log["train_loss"]


def test_one_component_predicts_as_fedavg() -> None:
    clients = table_clients()
    state = METHOD.start(Config(n_components=1), clients[0].model, facts_of(clients))
    batch = next(clients[1].data["test"].batches(12))
    mine = METHOD.predictor(clients[1], METHOD.serve(Config(), state), Config())(batch).logits
    plain = clients[1].model.apply(state.components[0], batch).logits
    assert torch.allclose(mine, plain.log_softmax(1), atol=1e-6)


# ---- the E-step ----------------------------------------------------------------------------------


def test_responsibilities_by_hand() -> None:
    pi = torch.tensor([0.2, 0.8], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    q = fedem.responsibilities(pi, -p.log())
    assert q[:, 0].tolist() == pytest.approx([0.1 / 0.5, 0.18 / 0.26, 0.02 / 0.74])
    assert q.sum(1).tolist() == pytest.approx([1, 1, 1], abs=1e-15)


def test_a_collapsed_weight_counts_as_a_hundred_millionth() -> None:
    pi = torch.tensor([0.0, 1.0], dtype=torch.float64)
    losses = torch.tensor([[0.0, math.log(1e8)], [0.0, 0.0]], dtype=torch.float64)
    q = fedem.responsibilities(pi, losses)
    assert q[:, 0].tolist() == pytest.approx([0.5, 1e-8], rel=1e-6)  # it can come back


def test_a_round_by_hand() -> None:
    # One full-batch step of lr from w_k on (1/n) sum_s q_sk (w - b_s)^2 / 2, for points 0 and 4.
    w, b, lr = (1.0, 3.0), (0.0, 4.0), 0.1
    q = [
        [math.exp(-((wk - bs) ** 2) / 2) / sum(math.exp(-((wj - bs) ** 2) / 2) for wj in w) for wk in w]
        for bs in b
    ]
    expected = [wk - lr * sum(q[s][k] * (wk - b[s]) for s in (0, 1)) / 2 for k, wk in enumerate(w)]
    clients = point_clients(list(b))
    cfg = Config(rounds=1, n_components=2, local_steps=1, batch_size=2, lr=lr, **SGD)
    (end,) = drive(METHOD, cfg, clients, state=State(0, {0: line(w[0]), 1: line(w[1])}, 0))
    assert [float(end.state.components[k]["w"]) for k in (0, 1)] == pytest.approx(expected, abs=1e-12)
    assert clients[0].state["q"].tolist() == [pytest.approx(row) for row in q]
    assert clients[0].state["pi"].tolist() == pytest.approx([sum(row[k] for row in q) / 2 for k in (0, 1)])
    likelihood = sum(math.log(sum(0.5 * math.exp(-((wk - bs) ** 2) / 2) for wk in w)) for bs in b) / 2
    assert end.log["log_likelihood"] == pytest.approx(likelihood)


def test_the_loss_is_divided_by_the_batch_and_not_by_its_responsibility() -> None:
    clients = point_clients([1.0, 5.0])
    loss = fedem.weighted_loss(clients[0], torch.tensor([0.25, 0.5]), clients[0].data["train"].columns["row"])
    batch = next(clients[0].data["train"].batches(2))
    assert float(loss(line(0.0), batch)) == pytest.approx((0.25 * 0.5 + 0.5 * 12.5) / 2)


def test_responsibilities_belong_to_rows_and_not_to_places() -> None:
    clients = point_clients([1.0, 5.0, 9.0])
    ids = clients[0].data["train"].columns["row"]
    loss = fedem.weighted_loss(clients[0], torch.tensor([1.0, 0.0, 0.0]), ids)
    batch = {name: value[[2, 0]] for name, value in clients[0].data["train"].columns.items()}
    assert float(loss(line(0.0), batch)) == pytest.approx((0 * 40.5 + 1 * 0.5) / 2)


def test_the_e_step_and_prediction_are_in_evaluation_mode() -> None:
    class Noisy(RandomLinear):
        modes: list[bool]

        def apply(self, tree: Any, batch: Any, *, bank: Any = None, generator: Any = None) -> Outputs:
            self.modes.append(generator is not None)
            return super().apply(tree, batch)

    model = Noisy(2)
    model.modes = []
    data = rows(x=torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), label=[0, 1, 0, 1, 0, 1])
    client = {0: Client(0, model, {"train": data})}
    ends = drive(METHOD, Config(rounds=1, n_components=2, batch_size=6, local_steps=1, **SGD), client)
    assert model.modes == [False, False, True, True]  # two E-step passes, then a training step of each
    model.modes = []
    METHOD.predictor(client[0], METHOD.serve(Config(), ends[0].state), Config())(data.columns)
    assert model.modes == [False, False]


# ---- EM ------------------------------------------------------------------------------------------


def test_the_likelihood_never_falls_when_the_components_are_maximised() -> None:
    g = torch.Generator().manual_seed(1)
    points = torch.cat([torch.randn(30, generator=g) - 1.5, torch.randn(20, generator=g) + 1.5]).tolist()
    state = State(0, {0: line(0.1), 1: line(0.3)}, 0)
    cfg = Config(rounds=12, n_components=2, local_steps=40, batch_size=50, lr=1.0, **SGD)
    clients = point_clients(points)
    ends = drive(METHOD, cfg, clients, state=state)
    likelihood = [end.log["log_likelihood"] for end in ends]
    assert all(after >= before - 1e-12 for before, after in pairwise(likelihood))
    assert likelihood[-1] > likelihood[0] + 0.1
    q, b = clients[0].state["q"], clients[0].data["train"].columns["b"]  # components: weighted means
    for k in (0, 1):
        best = float((q[:, k] * b).sum() / q[:, k].sum())
        assert float(ends[-1].state.components[k]["w"]) == pytest.approx(best, abs=1e-6)


def concept_clients(shares: list[float], n: int = 100) -> dict[int, Client]:
    """Labels are the sign of x_0; a share of each client's rows has the opposite label instead."""
    g = torch.Generator().manual_seed(3)
    clients, model = {}, RandomLinear(2)
    for i, share in enumerate(shares):
        x = torch.randn(n, 2, generator=g)
        x[:, 0] += 2 * x[:, 0].sign()  # no row within 2 of the border
        opposite = torch.arange(n) < round(share * n)
        label = (x[:, 0] > 0) ^ opposite
        clients[i] = Client(i, model, {"train": rows(x=x, label=label.long(), opposite=opposite)})
    return clients


def test_two_opposite_concepts_are_told_apart_and_weighed() -> None:
    shares = [0.1, 0.3, 0.6, 0.9]
    clients = concept_clients(shares)
    cfg = Config(rounds=15, n_components=2, batch_size=50, local_epochs=2, lr=2.0, momentum=0.9, **SGD)
    end = drive(METHOD, cfg, clients)[-1]
    first = int(end.state.components[0]["lora_B.p"][1, 0] < 0)  # 1: component 0 is the opposite concept
    for i, share in enumerate(shares):
        pi, q = clients[i].state["pi"], clients[i].state["q"]
        assert float(pi[1 - first]) == pytest.approx(share, abs=0.05)
        assert torch.allclose(q.sum(1), torch.ones(len(q), dtype=torch.float64), atol=1e-12)
        opposite = clients[i].data["train"].columns["opposite"]
        assert torch.equal(q[:, 1 - first] > 0.5, opposite)
        assert torch.equal(clients[i].state["ids"], clients[i].data["train"].columns["row"])


def test_components_that_start_equal_stay_equal_and_ours_do_not() -> None:
    cfg = Config(rounds=3, n_components=2, batch_size=100, local_steps=4, lr=0.5, **SGD)
    clients = concept_clients([0.1, 0.9])
    started = METHOD.start(cfg, clients[0].model, facts_of(clients))
    same = replace(started, components=dict.fromkeys((0, 1), started.components[0]))
    drive(METHOD, cfg, clients, state=same)
    assert torch.allclose(clients[0].state["q"], torch.tensor(0.5).double(), atol=1e-4)  # full batches
    assert not torch.equal(started.components[0]["lora_B.p"], started.components[1]["lora_B.p"])
    again = METHOD.start(cfg, clients[0].model, facts_of(clients))
    assert torch.equal(again.components[1]["lora_B.p"], started.components[1]["lora_B.p"])


# ---- server and prediction -----------------------------------------------------------------------


def test_the_server_weighs_by_examples_and_only_those_who_replied() -> None:
    cfg = Config(rounds=1, n_components=2, participation=0.5)
    server = METHOD.server(cfg, State(0, {0: line(7.0), 1: line(7.0)}, 0), [0, 1, 2, 3])
    ask = next(server)
    assert isinstance(ask, Ask) and len(ask.clients) == 2 and ask.phase == "update"
    facts = {"loss": 0.0, "examples": 1, "log_likelihood": 0.0}
    sent = [(1, 1.0, 2.0, [0.9, 0.1]), (3, 5.0, 6.0, [0.1, 0.9])]  # n, w_0, w_1, pi
    end = server.send(
        [
            Reply(i, {"components": {0: line(a), 1: line(b)}, "n": n, "weights": pi, **facts})
            for i, (n, a, b, pi) in enumerate(sent)
        ]
    )
    assert isinstance(end, RoundEnd)
    assert float(end.state.components[0]["w"]) == pytest.approx((1 * 1 + 3 * 5) / 4)
    assert float(end.state.components[1]["w"]) == pytest.approx((1 * 2 + 3 * 6) / 4)


def test_predictions_mix_probabilities_and_not_logits() -> None:
    # Component 0 is sure of class 0 by 8 nats; component 1 prefers class 1 by 1. Mixed logits would say 0.
    model = RandomLinear(1)
    components = {
        0: {"lora_B.p": torch.tensor([[8.0], [0.0]])},
        1: {"lora_B.p": torch.tensor([[0.0], [1.0]])},
    }
    client = Client(0, model, {"train": rows(x=torch.ones(1, 1), label=[0])})
    client.state["pi"] = torch.tensor([0.25, 0.75], dtype=torch.float64)
    out = METHOD.predictor(client, {"components": components}, Config())({"x": torch.ones(1, 1)})
    p1 = 0.25 / (1 + math.exp(8)) + 0.75 / (1 + math.exp(-1))
    assert out.logits.exp()[0].tolist() == pytest.approx([1 - p1, p1], abs=1e-6)
    assert int(out.logits.argmax()) == 1 and 0.25 * 8 > 0.75 * 1


def test_a_client_predicts_with_the_weights_of_its_last_round() -> None:
    clients = concept_clients([0.1, 0.9])
    cfg = Config(rounds=2, n_components=2, batch_size=50, lr=0.5, **SGD)
    first = drive(METHOD, cfg, clients, stop=1)[-1]
    before = clients[0].state["pi"]
    served = METHOD.serve(cfg, first.state)["components"]
    drive(METHOD, cfg, clients, state=first.state)
    losses = fedem.row_losses(clients[0].model, served, clients[0].data["train"], 64)
    assert torch.allclose(clients[0].state["pi"], fedem.responsibilities(before, losses).mean(0), atol=1e-12)


def test_a_new_client_finds_its_weights_with_the_models_held_still() -> None:
    components = {0: {"lora_B.p": torch.tensor([[-9.0, 0.0], [9.0, 0.0]])}}
    components[1] = {"lora_B.p": -components[0]["lora_B.p"]}
    newcomer = concept_clients([0.3])[0]
    for steps in (1, 10):
        pi = fedem.new_client_weights(newcomer.model, components, newcomer.data["train"], steps=steps)
        assert pi.tolist() == pytest.approx([0.7, 0.3], abs=1e-3)
    assert fedem.new_client_weights(newcomer.model, components, None).tolist() == [0.5, 0.5]
    predicted = METHOD.predictor(newcomer, {"components": components}, Config())(
        {"x": torch.tensor([[1.0, 0]])}
    )
    assert predicted.logits.exp()[0].tolist() == pytest.approx([0.3, 0.7], abs=1e-3)
    assert newcomer.state == {}
