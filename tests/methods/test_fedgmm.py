"""FedGMM against FedEM, scikit-learn's mixture on one client, arithmetic by hand, and planted clusters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn import functional as F

from fedprism.data.arrays import TableRows
from fedprism.engines.inprocess import InProcess
from fedprism.methods import fedem, fedgmm
from fedprism.methods.density_ratio import first_argmax
from fedprism.methods.fedgmm import METHOD, Config, State, router
from fedprism.methods.gaussian_mixture import log_densities
from fedprism.models.interface import FeatureModel
from fedprism.protocol import Ask, Client, Reply, RoundEnd
from tests.tiny import drive, facts_of, mixed_clients, table_clients

SGD: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0}
QUICK: dict[str, Any] = {"pretrain_rounds": 0, "batch_size": 10**6, "local_steps": 1, **SGD}


class Inputs(FeatureModel):
    """Both encoders give the inputs themselves; a head is all there is to train."""

    n_classes = 2

    def __init__(self, d: int) -> None:
        self.width = self.router_width = d
        self.blocks = {"encoder": (), "head": ("head.weight", "head.bias"), "router_encoder": ()}

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed % 2**62)
        head = {"head.weight": torch.randn(2, self.width, generator=g), "head.bias": torch.zeros(2)}
        return head if block == "head" else {}

    def encode(self, tree: Any, batch: Any, block: str = "encoder") -> Tensor:
        return batch["x"]

    def describe(self) -> dict[str, Any]:
        return {}


def client_of(i: int, x: Tensor, model: FeatureModel, label: Tensor | None = None) -> Client:
    zeros = torch.zeros(len(x), dtype=torch.int64)
    columns = {"label": zeros if label is None else label, "task": zeros, "client": zeros + i}
    rows = TableRows({**columns, "row": torch.arange(len(x)) + 50, "component": zeros}, x.float())
    return Client(i, model, {"train": rows})


def clusters(shares: Sequence[Sequence[float]], n: int, means: Tensor, seed: int = 0) -> dict[int, Client]:
    """Client i draws from normal clusters about the rows of `means`, with exactly the given shares."""
    g, model, clients = torch.Generator().manual_seed(seed), Inputs(means.shape[1]), {}
    for i, share in enumerate(shares):
        z = torch.cat([torch.full((round(s * n),), a) for a, s in enumerate(share)])
        clients[i] = client_of(i, means[z] + torch.randn(len(z), means.shape[1], generator=g), model)
    return clients


def first_update(cfg: Config, clients: dict[int, Client], state: State | None = None) -> Ask:
    """The first ask for an update: what set-up led to."""
    facts = facts_of(clients)
    state = state or METHOD.start(cfg, clients[0].model, facts)
    engine = InProcess("fedgmm", {p.name: p for p in METHOD.phases}, clients, cfg, 0)
    server, replies, now = METHOD.server(cfg, state, facts.clients), None, 0
    while True:
        event = server.send(replies)  # type: ignore[arg-type]
        if isinstance(event, RoundEnd):
            replies, now = None, event.round + 1
        elif event.phase == "update":
            return event
        else:
            replies = engine.carry(event, now)


# ---- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_one_gaussian_is_fedem_bit_for_bit(participation: float) -> None:
    common = {"rounds": 3, "batch_size": 8, "lr": 0.05, "n_components": 2, "participation": participation}
    cfg, plain = Config(n_gaussians=1, pretrain_rounds=0, average="samples", **common), fedem.Config(**common)
    mine, theirs = table_clients(), table_clients()
    ends, others = drive(METHOD, cfg, mine), drive(fedem.METHOD, plain, theirs)
    for a, b in zip(ends, others, strict=True):
        for k in (0, 1):
            new, old = a.state.components[k], b.state.components[k]
            assert all(torch.equal(new[name], old[name]) for name in old)
        assert a.log["train_loss"] == b.log["train_loss"]
    for i in mine:
        assert ("pi" in mine[i].state) == ("pi" in theirs[i].state)
        if "pi" in mine[i].state:
            assert torch.equal(mine[i].state["pi"][0], theirs[i].state["pi"])
        batch = next(mine[i].data["test"].batches(12))
        one = METHOD.predictor(mine[i], METHOD.serve(cfg, ends[-1].state), cfg)(batch)
        other = fedem.METHOD.predictor(theirs[i], fedem.METHOD.serve(plain, others[-1].state), plain)(batch)
        assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("n_components", [1, 2])
def test_one_client_whose_labels_say_nothing_is_scikit_learns_mixture(n_components: int) -> None:
    means = torch.tensor([[0.0, 0.0, 0.0], [2.5, 1.0, -1.0], [-1.0, 3.0, 2.0]])
    clients, rounds = clusters([[0.5, 0.3, 0.2]], 200, means), 12
    cfg = Config(rounds=rounds, n_components=n_components, lr=1e-12, **QUICK)
    start = METHOD.start(cfg, clients[0].model, facts_of(clients))
    start = replace(start, components=dict.fromkeys(range(n_components), start.components[0]))  # no opinions
    first = first_update(cfg, clients, start)
    end = drive(METHOD, cfg, clients, state=start)[-1].state
    x = clients[0].data["train"].x().double().numpy()
    x = (x - x.mean(0)) / x.std(0)
    oracle = GaussianMixture(
        3, reg_covar=0.1, max_iter=rounds, tol=0.0, weights_init=np.full(3, 1 / 3),
        means_init=first.body["means"].numpy(), precisions_init=np.stack([np.eye(3) / 100] * 3),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it did not converge, as it was told
        oracle.fit(x)
    assert np.abs(end.means.numpy() - oracle.means_).max() < 1e-7
    assert np.abs(end.covariances.numpy() - oracle.covariances_).max() < 1e-7
    assert np.abs(clients[0].state["pi"].sum(1).numpy() - oracle.weights_).max() < 1e-7


def test_several_clients_without_a_view_of_their_own_take_the_pooled_step() -> None:
    # In the first round all weights are uniform, so who holds a row does not matter for the Gaussians.
    means = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    parted = clusters([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]], 60, means)
    pooled = {0: client_of(0, torch.cat([c.data["train"].x() for c in parted.values()]), Inputs(2))}
    cfg = Config(rounds=1, n_gaussians=2, n_components=1, lr=1e-12, **QUICK)
    gaussians = {"means": torch.tensor([[-0.5, 0.0], [0.5, 0.1]]).double()}
    found = []
    for world in (parted, pooled):
        state = replace(METHOD.start(cfg, world[0].model, facts_of(world)), **gaussians)
        for client in world.values():
            client.state.update(nu={}, shift=state.shift, matrix=state.matrix)
        body = {**gaussians, "covariances": state.covariances, "components": state.components, "lr": 1e-12}
        replies = [Reply(i, METHOD.phases[3](c, body, cfg)) for i, c in world.items()]
        found.append(fedgmm.merged_gaussians(cfg, state, replies))
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) < 1e-10


# ---- server --------------------------------------------------------------------------------------


def written_replies(rows: Sequence[tuple[float, Any, Any, Any]]) -> list[Reply]:
    """Replies of (classifier value, mass (M1, M2), means (M1, 1), variances (M1,)), n the sum of the mass."""
    replies = []
    for i, (value, mass, means, variances) in enumerate(rows):
        mass = torch.tensor(mass, dtype=torch.float64)
        body = {
            "components": {b: {"w": torch.tensor([value + 100 * b])} for b in range(mass.shape[1])},
            "mass": mass, "n": int(mass.sum()), "means": torch.tensor(means, dtype=torch.float64),
            "covariances": torch.tensor(variances, dtype=torch.float64)[:, None, None],
            "loss": 0.0, "examples": 1, "log_likelihood": 0.0,
        }  # fmt: skip
        replies.append(Reply(i, body))
    return replies


REPLIES = written_replies(
    [
        (1.0, [[3.0, 1.0], [0.5, 0.4]], [[0.0], [50.0]], [1.0, 0.0]),  # below 1 in Gaussian 1: left out there
        (5.0, [[2.0, 2.0], [5.0, 1.0]], [[3.0], [7.0]], [1.0, 2.0]),
    ]
)


def state_of(replies: Sequence[Reply], M1: int = 2, M2: int = 2) -> State:
    old = {"means": torch.full((M1, 1), 9.0).double(), "covariances": torch.full((M1, 1, 1), 4.0).double()}
    mass, components = (
        torch.ones(len(replies), M1, M2).double(),
        {b: {"w": torch.zeros(1)} for b in range(M2)},
    )
    shift, matrix = torch.zeros(1).double(), torch.eye(1).double()
    return State(
        0, components, **old, mass=mass, nu={}, decoder={}, shift=shift, matrix=matrix, sizes=(5, 10), seed=0
    )


@pytest.mark.parametrize("compat", ["none", "original"])
def test_the_server_merges_exactly_and_adds_the_floor_once(compat: Any) -> None:
    means, covariances = fedgmm.merged_gaussians(Config(compat=compat), state_of(REPLIES), REPLIES)
    assert means.flatten().tolist() == pytest.approx([(4 * 0 + 4 * 3) / 8, 7.0])
    between = 9 / 4 if compat == "none" else 0.0  # equal masses three apart
    assert covariances.flatten().tolist() == pytest.approx([1 + between + 0.1, 2 + 0.1])


def test_a_gaussian_without_mass_stays_as_it_was() -> None:
    replies = written_replies([(1.0, [[9.0], [0.5]], [[1.0], [2.0]], [1.0, 1.0])])
    means, covariances = fedgmm.merged_gaussians(Config(), state_of(replies, M2=1), replies)
    assert means.flatten().tolist() == [1.0, 9.0]
    assert covariances.flatten().tolist() == pytest.approx([1.1, 4.0])


def test_classifiers_are_averaged_by_responsibility_or_by_examples() -> None:
    old = {"w": torch.tensor([77.0])}
    by_mass = fedgmm.averaged_classifier(Config(), old, 0, REPLIES)["w"].item()
    assert by_mass == pytest.approx((3.5 * 1 + 7 * 5) / 10.5)
    by_mass = fedgmm.averaged_classifier(Config(), old, 1, REPLIES)["w"].item()
    assert by_mass == pytest.approx(100 + (1.4 * 1 + 3 * 5) / 4.4)
    by_rows = fedgmm.averaged_classifier(Config(average="samples"), old, 0, REPLIES)["w"].item()
    assert by_rows == pytest.approx((4 * 1 + 10 * 5) / 14)
    nobody = written_replies([(1.0, [[5.0, 0.0]], [[0.0]], [1.0])])
    assert fedgmm.averaged_classifier(Config(), old, 1, nobody) is old


def test_an_absent_client_keeps_its_weights_for_routing_and_is_not_averaged() -> None:
    clients = clusters([[0.5, 0.5]] * 4, 40, torch.tensor([[0.0], [6.0]]))
    cfg = Config(rounds=1, n_gaussians=2, n_components=1, participation=0.5, lr=0.1, **QUICK)
    start = METHOD.start(cfg, clients[0].model, facts_of(clients))
    assert start.mass.sum((1, 2)).tolist() == [40] * 4  # n_i / (M1 M2) each
    (end,) = drive(METHOD, cfg, clients, state=start)
    here = [i for i, client in clients.items() if "pi" in client.state]
    assert len(here) == 2
    for i, client in clients.items():
        assert set(client.state) >= {"nu", "shift", "matrix"}  # set-up asked everyone
        expected = 40 * client.state["pi"] if i in here else start.mass[i]
        assert torch.allclose(end.state.mass[i], expected)


# ---- features ------------------------------------------------------------------------------------


def test_a_step_of_pretraining_by_hand() -> None:
    clients, lr = {0: client_of(0, torch.tensor([[1.0, -2.0], [3.0, 0.5]]), Inputs(2))}, 0.1
    cfg = Config(rounds=1, **{**QUICK, "pretrain_rounds": 1}, pretrain_lr=lr)
    x = clients[0].data["train"].x()
    start = fedgmm.first_decoder(2, 2, seed=0)
    (end,) = drive(METHOD, cfg, clients, stop=1)
    residual = x @ start["decoder.weight"].T + start["decoder.bias"] - x  # loss: mean of its 4 squares
    assert torch.allclose(end.state.decoder["decoder.bias"], start["decoder.bias"] - lr * residual.sum(0) / 2)
    weight = start["decoder.weight"] - lr * residual.T @ x / 2
    assert torch.allclose(end.state.decoder["decoder.weight"], weight, atol=1e-6)
    assert end.log["reconstruction_loss"] == pytest.approx(float(residual.square().mean()), rel=1e-6)


def test_images_are_given_back_as_means_over_patches() -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    target = fedgmm.reconstruction_target(x)
    assert target.shape == (2, 3 * 8 * 8)
    assert float(target[1, 64 + 8 * 2 + 5]) == pytest.approx(float(x[1, 1, 8:12, 20:24].mean()), abs=1e-6)
    small = torch.randn(1, 3, 5, 5)
    assert torch.equal(fedgmm.reconstruction_target(small), small.flatten(1))


def test_features_are_trained_then_frozen_then_standardised() -> None:
    clients = table_clients(n=60)
    cfg = Config(rounds=2, pretrain_rounds=8, batch_size=16, lr=0.02, n_components=1)
    ends = drive(METHOD, cfg, clients)
    assert len(ends) == cfg.total_rounds == 10
    losses = [end.log["reconstruction_loss"] for end in ends[:8]]
    assert losses[-1] < 0.7 * losses[0]
    trained = ends[7].state
    first = clients[0].model.init("router_encoder", 0)
    assert any(not torch.equal(trained.nu[name], first[name]) for name in first)
    assert trained.decoder and not ends[8].state.decoder
    for end in ends[8:]:
        assert all(torch.equal(end.state.nu[name], trained.nu[name]) for name in first)
    model, state = clients[0].model, ends[-1].state
    with torch.no_grad():
        h = torch.cat(
            [model.encode(state.nu, c.data["train"].columns | {"x": c.data["train"].x()}, "router_encoder")
             for c in clients.values()]
        ).double().numpy()  # fmt: skip
    phi = (h - state.shift.numpy()) @ state.matrix.numpy()
    assert np.abs(phi - (h - h.mean(0)) / np.where(h.std(0) > 1e-5, h.std(0), 1)).max() < 1e-8
    assert "nu" not in METHOD.phases[3].receives  # what is frozen travels once


@pytest.mark.parametrize(("wanted", "got"), [(2, 2), (32, 3)])
def test_the_gaussians_see_as_many_features_as_asked_for_and_there_are(wanted: int, got: int) -> None:
    clients = table_clients()  # a routing encoder of width 3
    cfg = Config(rounds=1, pretrain_rounds=0, feature_dim=wanted, batch_size=16, n_gaussians=2)
    (end,) = drive(METHOD, cfg, clients)
    assert end.state.means.shape == (2, got) and end.state.covariances.shape == (2, got, got)
    assert end.state.matrix.shape == (3, got)


# ---- first means ---------------------------------------------------------------------------------


def centroids_sent(x: list[float], **settings: Any) -> dict[str, Any]:
    client = client_of(0, torch.tensor(x)[:, None], Inputs(1))
    client.state["nu"] = {}
    got = {"shift": torch.zeros(1).double(), "matrix": torch.eye(1).double()}
    sent: dict[str, Any] = METHOD.phases[2](client, got, Config(**settings))
    return sent


def test_clients_send_centroids_with_counts_and_none_of_a_few_rows() -> None:
    rows = [0.0, 0.5] * 5 + [10.0] * 6 + [99.0] * 4
    sent = centroids_sent(rows, n_gaussians=3)
    assert sent["centroids"].flatten().tolist() == [0.25, 10.0] and sent["counts"].tolist() == [10, 6]
    alone = centroids_sent([0.0, 3.0, 9.0], n_gaussians=3)
    assert alone["centroids"].tolist() == [[4.0]] and alone["counts"].tolist() == [3]
    same = centroids_sent([2.0] * 7, n_gaussians=3)
    assert same["centroids"].tolist() == [[2.0]] and same["counts"].tolist() == [7]


def test_first_means_find_clusters_that_no_client_has_all_of() -> None:
    means = torch.tensor([[0.0, 0.0], [12.0, 0.0], [0.0, 12.0]])
    shares = [[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]]
    clients = clusters(shares, 100, means)
    body = first_update(Config(rounds=1, n_components=1, **QUICK), clients).body
    x = torch.cat([c.data["train"].x() for c in clients.values()]).double()
    expected = (means.double() - x.mean(0)) / x.std(0, correction=0)
    assert float(torch.cdist(expected, body["means"]).amin(1).max()) < 0.1
    assert torch.equal(body["covariances"], 100 * torch.eye(2).double().expand(3, 2, 2))


def test_the_original_averages_centroids_of_different_clusters() -> None:
    # each client's larger cluster is number 0: for client 0 the one at -1, for client 1 the one at +1
    replies = [
        Reply(i, {"centroids": torch.tensor(c).double(), "counts": torch.tensor([9.0, 1.0]), "n": 10})
        for i, c in enumerate(([[-1.0], [1.0]], [[1.0], [-1.0]]))
    ]
    original = fedgmm.first_means(replies, Config(n_gaussians=2, compat="original"), 0)
    assert original.flatten().tolist() == [0.0, 0.0]
    ours = fedgmm.first_means(replies, Config(n_gaussians=2), 0)
    assert sorted(ours.flatten().tolist()) == [-1.0, 1.0]


# ---- prediction and routing ----------------------------------------------------------------------


def served(pi: Any, *, sizes: tuple[int, ...] = (1,), apart: float = 2.0) -> dict[str, Any]:
    """Two Gaussians of variance one at 0 and `apart`; classifier b is sure of class b; pi: (m, M1, M2)."""
    heads = {b: {"head.weight": torch.zeros(2, 1), "head.bias": 60 * F.one_hot(torch.tensor(b), 2).float()}
             for b in (0, 1)}  # fmt: skip
    return {
        "components": heads, "means": torch.tensor([[0.0], [apart]]).double(),
        "covariances": torch.ones(2, 1, 1).double(), "nu": {}, "shift": torch.zeros(1).double(),
        "matrix": torch.eye(1).double(), "sizes": torch.tensor(sizes, dtype=torch.float64),
        "mass": torch.tensor(pi, dtype=torch.float64) * torch.tensor(sizes)[:, None, None],
    }  # fmt: skip


def density(x: float, mu: float) -> float:
    return float(np.exp(-((x - mu) ** 2) / 2))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_predictions_by_hand(temperature: float) -> None:
    pi = [[0.1, 0.2], [0.3, 0.4]]
    client = client_of(0, torch.zeros(1, 1), Inputs(1))
    client.state["pi"] = torch.tensor(pi, dtype=torch.float64)
    predict = METHOD.predictor(client, served([pi]), Config(temperature=temperature))
    for x in (-1.0, 0.8, 4.0):
        n = [density(x, mu) ** (1 / temperature) for mu in (0.0, 2.0)]
        mass = [sum(pi[a][b] * n[a] for a in (0, 1)) for b in (0, 1)]
        found = predict({"x": torch.tensor([[x]])}).logits.exp()[0].tolist()
        assert found == pytest.approx([v / sum(mass) for v in mass], rel=1e-5)


def test_a_rare_component_stays_rare_except_in_the_original() -> None:
    client = client_of(0, torch.zeros(1, 1), Inputs(1))
    client.state["pi"] = torch.tensor([[0.01, 0.49], [0.01, 0.49]], dtype=torch.float64)
    batch, got = {"x": torch.zeros(1, 1)}, served([[[0.01, 0.49]] * 2], apart=0.0)
    right = METHOD.predictor(client, got, Config())(batch).logits.exp()[0].tolist()
    assert right == pytest.approx([0.02, 0.98], rel=1e-5)
    wrong = METHOD.predictor(client, got, Config(compat="original"))(batch).logits.exp()[0, 0].item()
    assert wrong == pytest.approx(np.exp(0.01) / (np.exp(0.01) + np.exp(0.49)), rel=1e-5)  # .382


def test_routes_by_hand() -> None:
    pi, sizes = [[[0.4, 0.5], [0.05, 0.05]], [[0.1, 0.1], [0.5, 0.3]]], (30, 10)
    x = torch.tensor([[0.0], [1.0], [2.5]])
    scores = router(Inputs(1), served(pi, sizes=sizes), {"x": x}, Config())
    marginal = [[0.9, 0.1], [0.2, 0.8]]
    for row, value in zip(scores, x.flatten().tolist(), strict=True):
        for i in (0, 1):
            mixed = sum(p * density(value, mu) for p, mu in zip(marginal[i], (0.0, 2.0), strict=True))
            assert float(row[i]) == pytest.approx(np.log(sizes[i] / 40 * mixed / np.sqrt(2 * np.pi)))


def test_clients_of_equal_weights_over_the_gaussians_cannot_be_told_apart() -> None:
    pi = [[[0.5, 0.0], [0.0, 0.5]], [[0.0, 0.5], [0.5, 0.0]]]  # opposite classifiers, equal features
    x = torch.linspace(-3, 5, 20)[:, None]
    scores = router(Inputs(1), served(pi, sizes=(10, 30)), {"x": x}, Config())
    assert torch.allclose(scores[:, 1] - scores[:, 0], torch.tensor(np.log(3.0)))


def test_planted_clusters_are_found_weighed_and_routed() -> None:
    means = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    shares = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.2, 0.7]]
    clients = clusters(shares, 300, means)
    cfg = Config(rounds=25, n_components=1, lr=0.05, **QUICK)
    state = drive(METHOD, cfg, clients)[-1].state
    x = torch.cat([c.data["train"].x() for c in clients.values()])
    scaled = (means.double() - state.shift) @ state.matrix
    order = torch.cdist(scaled, state.means).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    for i, share in enumerate(shares):
        assert clients[i].state["pi"][order, 0].tolist() == pytest.approx(share, abs=0.05)
    route = first_argmax(router(Inputs(2), METHOD.serve(cfg, state), {"x": x}, cfg))
    owner = torch.arange(3).repeat_interleave(300)
    true = log_densities(x.double(), means.double(), torch.eye(2).double().expand(3, 2, 2)).exp()
    best = (true @ torch.tensor(shares).double().T).argmax(1)
    accuracy, bayes = ((r == owner).double().mean() for r in (route, best))
    assert float(bayes) > 0.7 and float(accuracy) > float(bayes) - 0.02


def test_a_client_never_asked_weighs_by_its_own_rows() -> None:
    x = torch.tensor([[0.0]] * 30 + [[40.0]] * 10)
    client = client_of(0, x, Inputs(1), label=torch.ones(40, dtype=torch.int64))
    pi = fedgmm.new_client_weights(
        client, served([[[0.25] * 2] * 2], apart=40.0), Config(n_gaussians=2, n_components=2)
    )
    assert pi.tolist() == [pytest.approx([0, 0.75], abs=1e-6), pytest.approx([0, 0.25], abs=1e-6)]
    assert client.state == {}


def test_a_model_without_an_encoder_is_refused() -> None:
    clients = mixed_clients()
    with pytest.raises(ValueError, match=r'fedgmm: the model is a Linear.*model.kind = "vision" or "mlp"'):
        METHOD.start(Config(), clients[0].model, facts_of(clients))
