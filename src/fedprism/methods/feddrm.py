"""FedDRM: Beyond Aggregation, ICLR 2026. One encoder, private label heads, a shared client head.

The feature densities of m clients are exp(gamma_i + xi_i . h(x)) times a common baseline. With the baseline
profiled out, the likelihood is that of a classifier which tells from x whose it is, with logits
z_i(x) = gamma_i + log rho_i + xi_i . h(x), rho_i client i's share of all examples. So client i trains on
lam CE(label) + (1 - lam) CE(its own index), and z_i(x) - log rho_i is its log density ratio up to a term that
is the same for all clients. The label head stays with the client; encoder and client head, bias included, are
averaged by the clients' examples. A query goes to the client of largest density ratio ("uniform"), or of
largest posterior z_i(x) ("fraction"), and meets that client's label head there.

Choices. Local targets that name one client drive a client's own copy of the client head to "always me"; only
the average means anything, so routing reads the averaged head and encoder alone. rho counts all clients,
also those that a round left out. A client that was not there at the start has no row in the client head and
is refused. Label heads start equal.
Deviations: both heads read the encoder's features, which end in linear - layer norm - ReLU, where the paper
gives each head such a map of its own on a common trunk. With encoders of their own: `feddrm_separate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.methods.density_ratio import routing_scores
from fedprism.models.interface import Batch, FeatureModel, Outputs
from fedprism.protocol import (
    Ask,
    Body,
    Client,
    Facts,
    Method,
    RoundEnd,
    Server,
    generator,
    participant_name,
    phase,
    sample_clients,
)
from fedprism.training import FederatedTraining, Fraction, solve
from fedprism.trees import Tree, mean, select

WEIGHT, BIAS = "client_head.weight", "client_head.bias"


@dataclass(frozen=True)
class Config(FederatedTraining):
    """Local training on two targets, and the prior of the router."""

    lam: Fraction = 0.9  # lambda, weight of the label's cross-entropy; 1 - lam is that of the client's index
    prior: Literal["uniform", "fraction"] = "uniform"  # of the router: none, or the training fractions


@dataclass(frozen=True)
class State:
    """round: the next one. shared: encoder, client_head.weight (m, d) and client_head.bias (m,). sizes:
    training examples of every client. seed: the run's."""

    round: int
    shared: Tree
    sizes: tuple[int, ...]
    seed: int


def start(cfg: Config, model: Any, facts: Facts) -> State:
    """Encoder and client head from the run seed, the latter uniform in +-1 / sqrt(d)."""
    if not isinstance(model, FeatureModel):
        raise ValueError(
            f"feddrm: the model is a {type(model).__name__}, needs one with an encoder and a head; set "
            'model.kind = "vision" or "mlp"'
        )
    if facts.clients != tuple(range(len(facts.clients))):
        raise ValueError(f"feddrm: clients are {facts.clients}, needs 0 to m - 1 in order; renumber them")
    m, d, g = len(facts.clients), model.width, generator(facts.seed, "client_head")
    weight, bias = ((torch.rand(*shape, generator=g) * 2 - 1) / d**0.5 for shape in ((m, d), (m,)))
    return State(
        0, {**model.init("encoder", facts.seed), WEIGHT: weight, BIAS: bias}, facts.sizes, facts.seed
    )


def client_logits(model: FeatureModel, shared: Tree, batch: Batch) -> Tensor:
    """z_i(x), (b, m): log density ratio plus log rho_i, up to a term without i."""
    return F.linear(model.encode(shared, batch), shared[WEIGHT], shared[BIAS])


def label_head(client: Client, seed: int) -> Tree:
    """The client's own head; at first contact the one that every client starts from."""
    head: Tree = client.state.get("head") or client.model.init("head", seed)
    return head


@phase(receives=["shared", "lr", "seed"], keeps=["head"], sends=["shared", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Encoder and both heads together; the label head stays. Raises ValueError for a client without a row."""
    model, shared, m = client.model, got["shared"], len(got["shared"][BIAS])
    if not 0 <= client.id < m:
        raise ValueError(
            f"feddrm: {participant_name(client.id)} has no row in the client head of {m}; start a new run "
            "with all clients"
        )

    def loss(tree: Tree, batch: Batch) -> Tensor:
        features = model.encode(tree, batch)
        label = F.cross_entropy(model.classify(tree, features), batch["label"])
        z = F.linear(features, tree[WEIGHT], tree[BIAS])
        me = torch.full_like(batch["label"], client.id)
        return cfg.lam * label + (1 - cfg.lam) * F.cross_entropy(z, me)

    decayed = None if model.decayed is None else {*model.decayed, WEIGHT}
    tree = {**shared, **label_head(client, got["seed"])}
    tree, done = solve(cfg, loss, tree, cfg.batches(client), got["lr"], decayed=decayed)
    client.state["head"] = select(tree, model.blocks["head"])
    return {"shared": select(tree, shared), "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """FedAvg of encoder and client head over the clients that took part."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        body = {"shared": state.shared, "lr": cfg.rate(t), "seed": state.seed}
        replies = yield Ask("update", chosen, body)
        n = [r.body["n"] for r in replies]
        state = replace(state, round=t + 1, shared=mean([r.body["shared"] for r in replies], n))
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
        yield RoundEnd(t, state, {"train_loss": loss})


def serve(cfg: Config, state: State) -> Body:
    """Averaged encoder and client head, the clients' sizes, and the seed of first label heads."""
    return {
        "shared": state.shared, "sizes": torch.tensor(state.sizes, dtype=torch.float64), "seed": state.seed
    }  # fmt: skip


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """The client's label head on the averaged encoder."""
    tree = {**got["shared"], **label_head(client, got["seed"])}
    return lambda batch: client.model.apply(tree, batch)


def router(model: FeatureModel, got: Body, batch: Batch, cfg: Config) -> Tensor:
    """z_i(x) - log rho_i for the uniform prior, z_i(x) for the fraction prior, (b, m) float64."""
    z, rho = client_logits(model, got["shared"], batch).double(), got["sizes"] / got["sizes"].sum()
    one = torch.ones(len(rho), 1, dtype=torch.float64)  # a single component per client
    return routing_scores((z - rho.log())[:, :, None], one, rho, cfg.prior)


METHOD = Method(
    "feddrm", "FedDRM, ICLR 2026", Config, State, start, (update,), server, serve, predictor, router=router,
    summary="shared encoder, private label heads, and a shared head that routes by density ratio",
)  # fmt: skip
