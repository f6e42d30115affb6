"""FedDRM against gradients by hand and Gaussian clients whose density ratios are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedprism.data.arrays import TableRows
from fedprism.methods.density_ratio import first_argmax
from fedprism.methods.feddrm import BIAS, METHOD, WEIGHT, Config, State, router
from fedprism.models.interface import FeatureModel
from fedprism.protocol import Ask, Client, Reply, RoundEnd
from tests.tiny import drive, facts_of, mixed_clients, table_clients

SGD: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0}


class Inputs(FeatureModel):
    """Features are the inputs themselves; a head is all there is to train."""

    n_classes = 2

    def __init__(self, d: int) -> None:
        self.width = self.router_width = d
        self.blocks = {"encoder": (), "head": ("head.weight", "head.bias"), "router_encoder": ()}

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        head = {"head.weight": torch.zeros(2, self.width), "head.bias": torch.zeros(2)}
        return head if block == "head" else {}

    def encode(self, tree: Any, batch: Any, block: str = "encoder") -> Tensor:
        return batch["x"]

    def describe(self) -> dict[str, Any]:
        return {}


def gaussian_clients(means: list[list[float]], sizes: list[int], seed: int = 0) -> dict[int, Client]:
    """Client i's inputs are normal with variance one about means[i]; the sample mean is exactly that."""
    g, clients, model = torch.Generator().manual_seed(seed), {}, Inputs(len(means[0]))
    for i, (mean, n) in enumerate(zip(means, sizes, strict=True)):
        x = torch.randn(n, len(mean), generator=g)
        x = x - x.mean(0) + torch.tensor(mean)
        same = torch.zeros(n, dtype=torch.int64)
        columns = {"label": (x[:, 0] > 0).long(), "task": same, "row": torch.arange(n), "client": same + i}
        clients[i] = Client(i, model, {"train": TableRows({**columns, "component": same}, x)})
    return clients


def fitted(sizes: list[int], means: list[list[float]], rounds: int = 150, lam: float = 0.0) -> State:
    """The client head after one full-batch step per round: gradient descent on the pooled likelihood."""
    cfg = Config(rounds=rounds, local_steps=1, batch_size=10**6, lr=0.8, lam=lam, **SGD)
    state: State = drive(METHOD, cfg, gaussian_clients(means, sizes))[-1].state
    return state


# ---- training ------------------------------------------------------------------------------------


def test_one_full_step_moves_the_averaged_client_head_by_the_pooled_gradient() -> None:
    clients, lr, lam = gaussian_clients([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]], [12, 30, 7]), 0.3, 0.6
    cfg = Config(rounds=1, local_steps=1, batch_size=100, lr=lr, lam=lam, **SGD)
    begin = METHOD.start(cfg, clients[0].model, facts_of(clients))
    (end,) = drive(METHOD, cfg, clients)
    x = np.concatenate([c.data["train"].x().numpy() for c in clients.values()]).astype(np.float64)
    who = np.concatenate([np.full(c.n, i) for i, c in clients.items()])
    z = x @ begin.shared[WEIGHT].double().numpy().T + begin.shared[BIAS].double().numpy()
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    residual = (p - np.eye(3)[who]) / len(x)  # gradient of the mean cross-entropy in z
    for name, gradient in ((WEIGHT, residual.T @ x), (BIAS, residual.sum(0))):
        moved = (begin.shared[name] - end.state.shared[name]).double().numpy() / lr
        assert np.abs(moved - (1 - lam) * gradient).max() < 1e-6


def test_the_label_head_follows_its_own_rows_with_weight_lambda_and_stays_at_home() -> None:
    clients, lr, lam = gaussian_clients([[1.0], [-2.0]], [20, 10]), 0.5, 0.6
    cfg = Config(rounds=1, local_steps=1, batch_size=100, lr=lr, lam=lam, **SGD)
    (end,) = drive(METHOD, cfg, clients)
    for client in clients.values():
        x, label = client.data["train"].x(), client.data["train"].columns["label"]
        residual = (0.5 - torch.eye(2)[label]) / len(x)  # the head starts at zero: probabilities one half
        assert torch.allclose(client.state["head"]["head.weight"], -lr * lam * residual.T @ x, atol=1e-6)
    assert not any(name.startswith("head") for name in end.state.shared)
    assert "head" not in METHOD.serve(cfg, end.state)


@pytest.mark.parametrize("settings", [SGD | {"momentum": 0.9}, {"optimizer": "adamw", "weight_decay": 0.0}])
def test_with_labels_alone_the_client_head_stays_where_it_began(settings: dict[str, Any]) -> None:
    clients = table_clients()
    cfg = Config(rounds=3, batch_size=8, lr=0.05, lam=1.0, **settings)
    begin = METHOD.start(cfg, clients[0].model, facts_of(clients))
    end = drive(METHOD, cfg, clients)[-1].state
    for name in (WEIGHT, BIAS):
        assert torch.allclose(end.shared[name], begin.shared[name], atol=1e-6)
    moved = [name for name in begin.shared if not torch.allclose(end.shared[name], begin.shared[name])]
    assert len(moved) > 3  # the encoder learnt


def test_weight_decay_reaches_the_weights_of_the_client_head_and_not_its_bias() -> None:
    clients = table_clients()
    cfg = Config(rounds=1, local_steps=1, lam=1.0, lr=0.1, **SGD | {"weight_decay": 0.5})
    begin = METHOD.start(cfg, clients[0].model, facts_of(clients))
    end = drive(METHOD, cfg, clients)[-1].state
    assert torch.allclose(end.shared[WEIGHT], 0.95 * begin.shared[WEIGHT], atol=1e-6)
    assert torch.allclose(end.shared[BIAS], begin.shared[BIAS], atol=1e-6)


def test_without_labels_the_label_head_stays_where_it_began() -> None:
    clients = table_clients()
    drive(METHOD, Config(rounds=2, batch_size=8, lr=0.05, lam=0.0, **SGD), clients)
    for client in clients.values():
        assert all(torch.equal(v, client.model.init("head", 0)[k]) for k, v in client.state["head"].items())


def test_the_server_weighs_by_examples_over_those_who_took_part_bias_included() -> None:
    clients = gaussian_clients([[0.0]] * 4, [1, 1, 3, 3])
    cfg = Config(rounds=1, participation=0.5)
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    server = METHOD.server(cfg, state, [0, 1, 2, 3])
    ask = next(server)
    assert isinstance(ask, Ask) and len(ask.clients) == 2
    assert set(ask.body["shared"]) == {WEIGHT, BIAS}
    trees = [{WEIGHT: torch.full((4, 1), v), BIAS: torch.full((4,), 10 * v)} for v in (1.0, 5.0)]
    end = server.send(
        [Reply(i, {"shared": trees[i], "n": n, "loss": 0.0, "examples": 1}) for i, n in ((0, 1), (1, 3))]
    )
    assert isinstance(end, RoundEnd)
    assert end.state.shared[WEIGHT].flatten().tolist() == [4.0] * 4  # (1 * 1 + 3 * 5) / 4
    assert end.state.shared[BIAS].tolist() == [40.0] * 4
    assert METHOD.serve(cfg, end.state)["sizes"].tolist() == [1, 1, 3, 3]  # log rho counts everyone


# ---- density ratios ------------------------------------------------------------------------------


def test_gaussian_clients_give_back_the_differences_of_their_tilts() -> None:
    # N(mu_i, 1) / N(mu_j, 1) = exp((mu_i - mu_j) x - (mu_i^2 - mu_j^2) / 2), so xi_i - xi_j = mu_i - mu_j and
    # z_i - z_j has the intercept -(mu_i^2 - mu_j^2) / 2 + log(n_i / n_j).
    means, sizes = [[1.0, 0.0], [0.0, 0.5], [-0.5, -0.5]], [2000, 1000, 1000]
    head = fitted(sizes, means).shared
    for i, j in ((0, 1), (0, 2), (1, 2)):
        a, b = (torch.tensor(means[k]) for k in (i, j))
        assert torch.allclose(head[WEIGHT][i] - head[WEIGHT][j], a - b, atol=0.12)
        intercept = float(b @ b - a @ a) / 2 + math.log(sizes[i] / sizes[j])
        assert float(head[BIAS][i] - head[BIAS][j]) == pytest.approx(intercept, abs=0.12)


def border(state: State, prior: Any) -> float:
    """Where on the line the router changes from client 1 (left) to client 0 (right)."""
    x = torch.linspace(-3, 3, 6001)[:, None]
    scores = router(Inputs(1), METHOD.serve(Config(), state), {"x": x}, Config(prior=prior))
    left = first_argmax(scores) == 1
    assert bool((left[:-1] >= left[1:]).all())  # one border
    return float(x[int(left.sum())])


def test_more_data_of_one_client_moves_the_routes_of_the_fraction_prior_alone() -> None:
    # means 1 and -1: log ratio 2 x, so the borders are 0 and where 2 x + log(n_0 / n_1) = 0
    means = [[1.0], [-1.0]]
    few, many = fitted([1000, 1000], means), fitted([4000, 1000], means)
    assert border(few, "uniform") == pytest.approx(0.0, abs=0.08)
    assert border(few, "fraction") == pytest.approx(0.0, abs=0.08)
    assert border(many, "uniform") == pytest.approx(0.0, abs=0.08)
    assert border(many, "fraction") == pytest.approx(-math.log(4) / 2, abs=0.08)


def test_routing_scores_by_hand_in_logits() -> None:
    shared = {WEIGHT: torch.tensor([[1.0], [-1.0]]), BIAS: torch.tensor([0.5, 900.0])}
    got = METHOD.serve(Config(), State(1, shared, (1, 3), 0))
    batch = {"x": torch.tensor([[2.0], [700.0]])}  # probabilities would be 0 or 1 here
    z = torch.tensor([[2.5, 898.0], [700.5, 200.0]], dtype=torch.float64)
    assert torch.allclose(router(Inputs(1), got, batch, Config(prior="fraction")), z)
    uniform = z - torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    assert torch.allclose(router(Inputs(1), got, batch, Config()), uniform)


def test_routing_reads_the_averaged_head_where_local_heads_all_say_me() -> None:
    clients = gaussian_clients([[1.0], [-1.0]], [400, 400])
    cfg = Config(rounds=6, local_steps=30, batch_size=400, lr=0.5, lam=0.0, **SGD)
    ends = drive(METHOD, cfg, clients)
    shared = ends[-1].state.shared
    x = torch.cat([clients[i].data["train"].x() for i in (0, 1)])
    for i in (0, 1):
        body = {"shared": shared, "lr": 0.5, "seed": 0}
        local = METHOD.phases[0](clients[i], body, Config(local_steps=300, batch_size=400, lam=0.0, **SGD))
        z = x @ local["shared"][WEIGHT].T + local["shared"][BIAS]
        assert float((z.argmax(1) == i).float().mean()) > 0.9  # a local copy claims nearly everything
    route = first_argmax(router(Inputs(1), METHOD.serve(cfg, ends[-1].state), {"x": x}, cfg))
    right = route == torch.arange(2).repeat_interleave(400)
    assert float(right.float().mean()) > 0.82  # Phi(1) = .841 is the best there is


# ---- prediction and refusals ---------------------------------------------------------------------


def test_a_client_predicts_with_its_own_head_on_the_averaged_encoder() -> None:
    clients = table_clients()
    cfg = Config(rounds=2, batch_size=8, lr=0.05)
    state = drive(METHOD, cfg, clients)[-1].state
    batch = next(clients[0].data["test"].batches(12))
    model, found = clients[0].model, []
    features = model.encode(state.shared, batch)
    for client in clients.values():
        head = client.state["head"]
        found.append(METHOD.predictor(client, METHOD.serve(cfg, state), cfg)(batch).logits)
        assert torch.allclose(found[-1], features @ head["head.weight"].T + head["head.bias"], atol=1e-6)
    assert not torch.allclose(found[0], found[1])


def test_a_client_never_asked_predicts_with_the_first_head() -> None:
    clients = table_clients()
    state = METHOD.start(Config(), clients[0].model, facts_of(clients))
    batch = next(clients[2].data["test"].batches(12))
    plain = clients[2].model.apply({**state.shared, **clients[2].model.init("head", 0)}, batch).logits
    found = METHOD.predictor(clients[2], METHOD.serve(Config(), state), Config())(batch).logits
    assert torch.equal(found, plain)


def test_a_client_that_came_later_is_refused() -> None:
    clients = gaussian_clients([[0.0]] * 3, [5] * 3)
    state = METHOD.start(Config(), clients[0].model, facts_of({i: clients[i] for i in (0, 1)}))
    with pytest.raises(ValueError, match="client 2 has no row in the client head of 2; start a new run"):
        METHOD.phases[0](clients[2], {"shared": state.shared, "lr": 0.1, "seed": 0}, Config())


def test_a_model_without_an_encoder_is_refused() -> None:
    clients = mixed_clients()
    with pytest.raises(ValueError, match=r'feddrm: the model is a Linear.*model.kind = "vision" or "mlp"'):
        METHOD.start(Config(), clients[0].model, facts_of(clients))
