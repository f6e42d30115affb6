"""Ditto: Li et al. 2021, Algorithm 1. A global model by FedAvg, and beside it a personal model per client.

The personal model v_i descends on loss(v) + lam / 2 ||v - w^t||^2, where w^t is the global model as received:
neither the client's own update of it nor the next one. Each branch has an optimiser of its own.

Choices. As the anchor is fixed, taking turns after each batch gives the same as one branch after the other;
"interleaved" therefore means that both see the same batches (and dropout masks), "sequential" that the
personal branch draws its own after the global one. With `budget = "halved"` the K steps of a round are split,
floor(K / 2) global and the rest personal; a branch has at least one step, so K = 1 costs two.
`dynamic_lam` runs the personal branch with .1, 1 and 2 from the same v and keeps the one of lowest loss on
the client's validation rows, the smaller lam among equals.
Deviations: the server weighs by samples (the authors' code uniformly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import FederatedTraining, NonNegative, Solved, solve
from fedprism.trees import Tree, mean

CANDIDATES = (0.1, 1.0, 2.0)  # values of lam that `dynamic_lam` chooses among


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedAvg and a personal branch."""

    lam: NonNegative = 1.0  # lambda, weight of ||v - w^t||^2 / 2 in the personal loss; 0 = local training
    dynamic_lam: bool = False  # choose lam among .1, 1 and 2, per client and round, on validation rows
    split: Literal["interleaved", "sequential"] = "interleaved"  # one stream of batches for both, or two
    budget: Literal["full", "halved"] = "full"  # a round's steps for each branch, or shared between them


@dataclass(frozen=True)
class State:
    """round: the next one. w: global tree. seed: the run's, for sampling and first personal models."""

    round: int
    w: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """w^0: every trainable block of the model, from the run seed."""
    return State(0, model.trainable(facts.seed), facts.seed)


def squared_distance(v: Tree, anchor: Tree) -> Tensor:
    """||v - anchor||^2 over all tensors of v, a scalar; gradients flow to v alone."""
    return sum(((v[name] - anchor[name].detach()).square().sum() for name in v), start=torch.zeros(()))


def branch_batches(client: Client, cfg: Config, personal: bool) -> Iterable[Any]:
    """The batches of one branch in one round, drawn from the client's generator as it stands."""
    if cfg.budget == "full":
        return cfg.batches(client)
    full = cfg.local_steps or cfg.local_epochs * -(-client.n // cfg.batch_size)
    return client.batches(cfg.batch_size, steps=max(1, full - full // 2 if personal else full // 2))


def validation_loss(client: Client, tree: Tree, size: int) -> float:
    """Mean loss over the client's validation rows in evaluation mode.

    Raises ValueError where it has none."""
    rows = client.data.get("validation", ())
    if not len(rows):
        raise ValueError("ditto: dynamic_lam needs validation rows, got none; give some or set lam instead")
    total = 0.0
    with torch.no_grad():
        for batch in rows.batches(size):
            outputs = client.model.apply(tree, batch)
            total += float(client.model.per_example_loss(outputs, batch).double().sum())
    return total / len(rows)


@phase(receives=["w", "lr", "seed"], keeps=["v"], sends=["w", "n", "loss", "examples", "lam", "v_loss"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """The global branch as in FedAvg, then the personal branch; only the global tree is sent."""
    anchor, lr, decayed = got["w"], got["lr"], client.model.decayed  # w^t
    drawn = client.generator.get_state()
    batches = branch_batches(client, cfg, personal=False)
    w, done = solve(cfg, client.loss, anchor, batches, lr, decayed=decayed)
    if cfg.split == "sequential":
        drawn = client.generator.get_state()
    v = client.state.get("v") or client.model.trainable(got["seed"])  # w^0 at first contact

    def personal_branch(lam: float) -> tuple[Tree, Solved]:
        def objective(tree: Tree, batch: Batch) -> Tensor:
            return client.loss(tree, batch) + lam / 2 * squared_distance(tree, anchor)

        client.generator.set_state(drawn)
        batches = branch_batches(client, cfg, personal=True)
        return solve(cfg, objective, v, batches, lr, decayed=decayed)

    examples, lam = done.examples, cfg.lam
    if cfg.dynamic_lam:
        tried = {lam: personal_branch(lam) for lam in CANDIDATES}
        examples += sum(mine.examples for _, mine in tried.values())
        lam = min(CANDIDATES, key=lambda c: validation_loss(client, tried[c][0], cfg.batch_size))
        client.state["v"], mine = tried[lam]
    else:
        client.state["v"], mine = personal_branch(lam)
        examples += mine.examples
    sent = {"w": w, "n": client.n, "loss": done.loss, "examples": examples}
    return {**sent, "lam": lam, "v_loss": mine.loss}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """FedAvg of the global branches."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        replies = yield Ask("update", chosen, {"w": state.w, "lr": cfg.rate(t), "seed": state.seed})
        n = [r.body["n"] for r in replies]
        state = replace(state, round=t + 1, w=mean([r.body["w"] for r in replies], n))
        loss, personal = (sum(r.body[k] * r.body["n"] for r in replies) / sum(n) for k in ("loss", "v_loss"))
        log = {"train_loss": loss, "personal_loss": personal}
        if cfg.dynamic_lam:
            log["lam"] = {str(r.client): r.body["lam"] for r in replies}
        yield RoundEnd(t, state, log)


def serve(cfg: Any, state: State) -> Body:
    """The global tree, for clients that were never asked."""
    return {"w": state.w}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The client's personal model; a client that was never asked has none and takes the global one."""
    v = client.state.get("v") or got["w"]
    return lambda batch: client.model.apply(v, batch)


METHOD = Method(
    "ditto", "Li et al. 2021", Config, State, start, (update,), server, serve, predictor,
    summary="FedAvg, and a personal model per client that is drawn towards the global one",
)  # fmt: skip
