"""FedProx: Li et al. 2020, Algorithm 2. FedAvg whose clients are held near the model they received.

A client minimises loss(w) + mu / 2 ||w - w^t||^2 over the tensors it trains; w^t, the received model, stays
fixed during the round. Stragglers return what they reached instead of being dropped.

Deviations: the term stands in the loss, so AdamW rescales it with the gradient and `clip` limits the sum; on
LoRA models it is a distance between factors A and B, not between their products. A straggler walks a prefix
of the batches it would have walked; its length in steps (not epochs) is uniform below the full number. The
mean weighs by samples, whatever the work done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import (
    Ask,
    Body,
    Client,
    Facts,
    Method,
    RoundEnd,
    Server,
    generator,
    phase,
    sample_clients,
)
from fedprism.training import FederatedTraining, Fraction, NonNegative, solve
from fedprism.trees import Tree, mean


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedAvg with a proximal term."""

    mu: NonNegative = 0.01  # weight of ||w - w^t||^2 / 2 in the local loss; 0 = FedAvg
    straggler_fraction: Fraction = 0.0  # share of a round's clients that do a random smaller amount of work


@dataclass(frozen=True)
class State:
    """round: the next one. w: global tree. seed: the run's, for sampling clients and stragglers."""

    round: int
    w: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """Global tree at its initial value: every trainable block of the model, from the run seed."""
    return State(0, model.trainable(facts.seed), facts.seed)


def squared_distance(w: Tree, anchor: Tree) -> Tensor:
    """||w - anchor||^2 over all tensors of w, a scalar; gradients flow to w alone."""
    return sum(((w[name] - anchor[name].detach()).square().sum() for name in w), start=torch.zeros(()))


@phase(receives=["w", "lr", "share"], sends=["w", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Local steps on loss(w) + mu / 2 ||w - w^t||^2; share in [0, 1): a straggler's part of the work."""
    anchor = got["w"]  # w^t, never the moving w

    def objective(w: Tree, batch: Batch) -> Tensor:
        return client.loss(w, batch) + cfg.mu / 2 * squared_distance(w, anchor)

    full = cfg.local_steps or cfg.local_epochs * -(-client.n // cfg.batch_size)
    steps = 1 + int(got["share"] * (full - 1))  # all for share 1, uniform on 1 .. full - 1 for others
    batches = itertools.islice(cfg.batches(client), steps)
    w, done = solve(cfg, objective, anchor, batches, got["lr"], decayed=client.model.decayed)
    return {"w": w, "n": client.n, "loss": done.loss, "examples": done.examples}


def shares(cfg: Config, state: State, chosen: Sequence[int]) -> dict[int, float]:
    """Part of the work that each chosen client does in this round: 1, or uniform in [0, 1) for stragglers.

    round(straggler_fraction |S|) clients straggle; who and how much follow from (seed, round)."""
    draw = generator(state.seed, "stragglers", state.round)
    order = torch.randperm(len(chosen), generator=draw).tolist()
    amounts = torch.rand(len(chosen), generator=draw, dtype=torch.float64).tolist()
    slow = order[: round(cfg.straggler_fraction * len(chosen))]
    return {who: amounts[k] if k in slow else 1.0 for k, who in enumerate(chosen)}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """w <- sum_k (n_k / n) w_k over the clients that took part, stragglers among them."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        share = shares(cfg, state, chosen)
        each = {who: {"share": part} for who, part in share.items()}
        replies = yield Ask("update", chosen, {"w": state.w, "lr": cfg.rate(t)}, each)
        n = [r.body["n"] for r in replies]
        state = replace(state, round=t + 1, w=mean([r.body["w"] for r in replies], n))
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
        stragglers = [who for who, part in share.items() if part < 1]
        yield RoundEnd(t, state, {"train_loss": loss, "stragglers": stragglers})


def serve(cfg: Any, state: State) -> Body:
    """The global tree."""
    return {"w": state.w}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global model."""
    return lambda batch: client.model.apply(got["w"], batch)


METHOD = Method(
    "fedprox", "Li et al. 2020", Config, State, start, (update,), server, serve, predictor,
    summary="FedAvg with a proximal term that holds clients near the model they received",
)  # fmt: skip
