"""IFCA (the "ClusterFL" of the FedSPM tables): Ghosh et al. 2020, Algorithm 1. C models; clients choose one.

Every round a client takes the model of lowest mean loss on all its training rows, in evaluation mode, trains
it and says which it was; the server averages within each cluster. A model nobody chose stays as it is. Equal
losses go to the client's current cluster, then to the lowest index.

Initialisation decides success. "redraw": the C random models are drawn anew until each is chosen by at least
`min_share` of the clients, at most `max_draws` times, then "random_groups". "random_groups": in the first
rounds clients train in fixed random groups of equal size, each with its model, instead of choosing.
"independent": the first draw is taken as it is. Drawings travel as seeds: clients build the candidates, and
one client sends the accepted ones back, as a server holds no model to draw from.

Choices. Models that are one function (LoRA with B = 0) tie on every client and would do so in every draw, so
one draw without any preference is enough to give up. `share_body`: one encoder, averaged over all clients,
and a head per cluster. `group_rounds = 0`: the 20 rounds of the authors, but at most a tenth of the run.
Deviations: none known; the authors pretrain the shared body of their second experiment, we don't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le

from fedprism.models.interface import Batch, FeatureModel, Model, Outputs
from fedprism.protocol import (
    Ask,
    Body,
    Client,
    Facts,
    Method,
    Reply,
    RoundEnd,
    Server,
    derive_seed,
    generator,
    phase,
    sample_clients,
)
from fedprism.training import Count, CountOrZero, FederatedTraining, Fraction, solve
from fedprism.trees import Tree, mean, select

Group = dict[int, Tree]  # cluster -> its own tensors


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedAvg within clusters that form by training loss."""

    n_clusters: Annotated[int, Ge(1), Le(64)] = 3  # C, at most the number of clients
    init: Literal["redraw", "random_groups", "independent"] = "redraw"  # how the clusters begin
    min_share: Fraction = 0.0  # redraw: share of clients that each first model needs, at most 1/C; 0 = .3/C
    max_draws: Count = 50  # redraw: draws before it falls back to random groups
    group_rounds: CountOrZero = 0  # rounds in random groups; 0 = 20, at most a tenth of the run, at least 1
    share_body: bool = False  # one encoder for all clusters, a head for each
    average: Literal["samples", "uniform"] = "samples"  # weights of the clients in the server's means

    def __post_init__(self) -> None:
        if self.min_share > 1 / self.n_clusters:
            raise ValueError(
                f"method.ifca.min_share is {self.min_share}, {self.n_clusters} clusters can't all have that; "
                f"set at most {1 / self.n_clusters:.3g}"
            )

    @property
    def random_rounds(self) -> int:
        """Rounds in random groups where there are any."""
        return self.group_rounds or min(20, max(1, self.rounds // 10))


@dataclass(frozen=True)
class State:
    """round: the next one. models: what belongs to each cluster alone. body: what all share, or nothing.
    grouped: rounds before this one go in random groups. seed: the run's."""

    round: int
    models: Group
    body: Tree
    grouped: int
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """The first draw. Raises ValueError for more clusters than clients, or a body that can't be shared."""
    if cfg.n_clusters > len(facts.clients):
        raise ValueError(
            f"ifca: n_clusters is {cfg.n_clusters} for {len(facts.clients)} clients, needs at most one per "
            "client; lower method.ifca.n_clusters"
        )
    if cfg.share_body and not isinstance(model, FeatureModel):
        raise ValueError(
            f"ifca: share_body got a {type(model).__name__}, needs a model with an encoder and a head; set "
            'model.kind = "vision" or "mlp", or share_body = false'
        )
    body, models = candidates(model, draw_seeds(cfg, facts.seed, 0), cfg.share_body)
    grouped = cfg.random_rounds if cfg.init == "random_groups" else 0
    return State(0, models, body, grouped, facts.seed)


# --- first models ------------------------------------------------------------------------------------------


def draw_seeds(cfg: Config, seed: int, draw: int) -> list[int]:
    """Seeds of the C models of one draw. The first model of the first draw is the one FedAvg starts from."""
    return [derive_seed(seed, "cluster", draw, j) if draw or j else seed for j in range(cfg.n_clusters)]


def candidates(model: Model, seeds: Sequence[int], share_body: bool) -> tuple[Tree, Group]:
    """(shared body, cluster -> own tensors) of one draw; without sharing the body is empty."""
    drawn = [model.trainable(seed) for seed in seeds]
    own = [name for name in drawn[0] if not share_body or name in model.blocks["head"]]
    body = {name: value for name, value in drawn[0].items() if name not in own}
    return body, {j: select(tree, own) for j, tree in enumerate(drawn)}


def random_groups(cfg: Config, clients: Sequence[int], seed: int) -> dict[int, int]:
    """Client -> cluster, fixed by the seed; sizes differ by at most one."""
    order = torch.randperm(len(clients), generator=generator(seed, "groups")).tolist()
    return {clients[k]: place % cfg.n_clusters for place, k in enumerate(order)}


# --- clients -----------------------------------------------------------------------------------------------


def training_losses(client: Client, body: Tree, models: Mapping[int, Tree], size: int) -> dict[int, float]:
    """Cluster -> mean loss over all training rows in evaluation mode. Raises FloatingPointError for NaN."""
    losses = {}
    for j, own in models.items():
        total = 0.0
        with torch.no_grad():
            for batch in client.data["train"].batches(size):
                outputs = client.model.apply({**body, **own}, batch)  # no generator: no dropout
                total += float(client.model.per_example_loss(outputs, batch).double().sum())
        if math.isnan(total):
            raise FloatingPointError(
                f"ifca: the loss of cluster {j} is not a number; lower the learning rate"
            )
        losses[j] = total / client.n
    return losses


def lowest(losses: Mapping[int, float], current: int | None) -> int:
    """The cluster of least loss; among equals the current one, then the lowest index."""
    least = min(losses.values())
    equal = [j for j, loss in losses.items() if loss == least]
    return current if current in equal else min(equal)


def choose(client: Client, body: Tree, models: Mapping[int, Tree], cfg: Config) -> int:
    """The client's cluster among `models`; a single one needs no loss."""
    if len(models) == 1:
        return next(iter(models))
    return lowest(training_losses(client, body, models, cfg.batch_size), client.state.get("cluster"))


@phase(receives=["seeds"], sends=["choice", "undecided"])
def prefer(client: Client, got: Body, cfg: Config) -> Body:
    """Which model of a draw the client would take, and whether all are the same to it."""
    losses = training_losses(client, *candidates(client.model, got["seeds"], cfg.share_body), cfg.batch_size)
    return {"choice": lowest(losses, None), "undecided": len(set(losses.values())) == 1}


@phase(receives=["seeds"], sends=["body", "models"])
def build(client: Client, got: Body, cfg: Config) -> Body:
    """The models of the accepted draw, for the server."""
    body, models = candidates(client.model, got["seeds"], cfg.share_body)
    return {"body": body, "models": models}


@phase(receives=["body", "models", "lr"], keeps=["cluster"], sends=["choice", "w", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Choose a model, then local training from it."""
    j = client.state["cluster"] = choose(client, got["body"], got["models"], cfg)
    w = {**got["body"], **got["models"][j]}
    w, done = solve(cfg, client.loss, w, cfg.batches(client), got["lr"], decayed=client.model.decayed)
    return {"choice": j, "w": w, "n": client.n, "loss": done.loss, "examples": done.examples}


# --- server ------------------------------------------------------------------------------------------------


def accepted(cfg: Config, replies: Sequence[Reply]) -> bool:
    """Does each model of a draw have its share of the clients?"""
    chosen = [r.body["choice"] for r in replies]
    needed = (cfg.min_share or 0.3 / cfg.n_clusters) * len(chosen)
    return all(chosen.count(j) >= round(needed, 9) for j in range(cfg.n_clusters))


def redraw(
    cfg: Config, state: State, clients: Sequence[int]
) -> Generator[Ask | RoundEnd, list[Reply], tuple[State, dict[str, Any]]]:
    """Draw models until each has its share of clients; returns (state, log) of how it went."""
    for draw in range(cfg.max_draws):
        seeds = draw_seeds(cfg, state.seed, draw)
        replies = yield Ask("prefer", clients, {"seeds": seeds})
        if accepted(cfg, replies):
            if draw:
                (reply,) = yield Ask("build", clients[:1], {"seeds": seeds})
                state = replace(state, body=reply.body["body"], models=reply.body["models"])
            return state, {"init": "redraw", "draws": draw + 1}
        undecided = all(r.body["undecided"] for r in replies)
        if undecided:
            break
    why = (
        "the first models are one function" if undecided else f"none of {draw + 1} draws gave each its share"
    )
    warning = f"ifca: {why}; clients first train in random groups for {cfg.random_rounds} rounds"
    log = {"init": "random_groups", "draws": draw + 1, "warning": warning}
    return replace(state, grouped=cfg.random_rounds), log


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """Weighted means within the clusters; with a shared body, over all clients for that."""
    log: dict[str, Any] = {"init": cfg.init}
    groups = random_groups(cfg, clients, state.seed)
    if state.round == 0 and cfg.init == "redraw" and cfg.n_clusters > 1:
        state, log = yield from redraw(cfg, state, clients)
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        each = {who: {"models": state.models} for who in chosen}
        if t < state.grouped:  # one model, so no choice
            each = {who: {"models": {groups[who]: state.models[groups[who]]}} for who in chosen}
        replies = yield Ask("update", chosen, {"body": state.body, "lr": cfg.rate(t)}, each)
        parts = {j: [r for r in replies if r.body["choice"] == j] for j in state.models}
        models = {j: cluster_mean(cfg, part, state.models[j]) for j, part in parts.items()}
        state = replace(state, round=t + 1, models=models, body=cluster_mean(cfg, replies, state.body))
        n = [r.body["n"] for r in replies]
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
        members = [[r.client for r in part] for part in parts.values()]
        yield RoundEnd(t, state, {"train_loss": loss, "clusters": members, **(log if t == 0 else {})})


def cluster_mean(cfg: Config, replies: Sequence[Reply], old: Tree) -> Tree:
    """Mean of the clients' tensors with the names in `old`; `old` itself where nobody sent any."""
    if not replies or not old:
        return old
    weights = [r.body["n"] for r in replies] if cfg.average == "samples" else None
    return mean([select(r.body["w"], old) for r in replies], weights)


def serve(cfg: Any, state: State) -> Body:
    """All models."""
    return {"body": state.body, "models": state.models}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """The model of least loss on the client's training rows."""
    j = choose(client, got["body"], got["models"], cfg)
    return lambda batch: client.model.apply({**got["body"], **got["models"][j]}, batch)


METHOD = Method(
    "ifca", "Ghosh et al. 2020", Config, State, start, (prefer, build, update), server, serve, predictor,
    summary="C models; every client trains the one that fits its data best",
)  # fmt: skip
