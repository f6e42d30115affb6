"""FedAvg, FedIT and FedAvgFT: one loop of local training and averaging.

FedAvg: McMahan et al. 2017, Algorithm 1. FedIT: Zhang et al. 2024, the same loop on LoRA adapters, A and B
averaged separately. FedAvgFT: Wang et al. 2019, FedAvg whose clients fine-tune a copy before predicting.

Deviations: none. On models whose only trainable tensors are adapters FedAvg and FedIT coincide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import CountOrZero, FederatedTraining, LocalTraining, NonNegative, solve
from fedprism.trees import Tree, mean


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedAvg has no settings beyond local training."""


@dataclass(frozen=True)
class FineTuneConfig(FederatedTraining):
    """FedAvg followed by fine-tuning before every evaluation."""

    finetune_epochs: CountOrZero = 1  # passes over the client's data; 0 = FedAvg
    finetune_lr: NonNegative = 0.0  # their learning rate, constant; 0 = lr, that of round 0


@dataclass(frozen=True)
class State:
    """round: the next one. w: global tree. seed: the run's, for client sampling."""

    round: int
    w: Tree
    seed: int


def start(cfg: Any, model: Model, facts: Facts) -> State:
    """Global tree at its initial value: every trainable block of the model, from the run seed."""
    return State(0, model.trainable(facts.seed), facts.seed)


@phase(receives=["w", "lr"], sends=["w", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: LocalTraining) -> Body:  # ClientUpdate(k, w)
    """Local training from the global tree."""
    w, done = solve(cfg, client.loss, got["w"], cfg.batches(client), got["lr"], decayed=client.model.decayed)
    return {"w": w, "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: FederatedTraining, state: State, clients: Sequence[int]) -> Server:
    """w <- sum_k (n_k / n) w_k over the clients that took part."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        replies = yield Ask("update", chosen, {"w": state.w, "lr": cfg.rate(t)})
        n = [r.body["n"] for r in replies]
        state = replace(state, round=t + 1, w=mean([r.body["w"] for r in replies], n))
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
        yield RoundEnd(t, state, {"train_loss": loss})


def serve(cfg: Any, state: State) -> Body:
    """The global tree."""
    return {"w": state.w}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global model."""
    return lambda batch: client.model.apply(got["w"], batch)


def fine_tuned(client: Client, got: Body, cfg: FineTuneConfig) -> Callable[[Batch], Outputs]:
    """A copy of the global model, fine-tuned on the client's training data at a constant rate."""
    w = got["w"]
    if cfg.finetune_epochs:
        batches = client.batches(cfg.batch_size, epochs=cfg.finetune_epochs)
        rate = cfg.finetune_lr or cfg.lr
        w, _ = solve(cfg, client.loss, w, batches, rate, decayed=client.model.decayed)
    return lambda batch: client.model.apply(w, batch)


FEDAVG = Method(
    "fedavg", "McMahan et al. 2017", Config, State, start, (update,), server, serve, predictor,
    summary="one global model, the sample-weighted mean of the clients' models",
)  # fmt: skip
FEDIT = replace(
    FEDAVG,
    name="fedit",
    paper="Zhang et al. 2024",
    summary="FedAvg on LoRA adapters, A and B averaged separately",
)
FEDAVG_FT = replace(
    FEDAVG, name="fedavg_ft", paper="Wang et al. 2019", config=FineTuneConfig, predictor=fine_tuned,
    summary="FedAvg; each client fine-tunes a copy on its own data before predicting",
)  # fmt: skip
