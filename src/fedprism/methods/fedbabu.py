"""FedBABU: Oh et al. 2022. The body is trained together under a head that never moves, then both fine-tuned.

The head has the server's initial value on every client. It is a constant of the local loss, no parameter of
the local solver: without gradient, decay or momentum. Clients train and send the body alone. Before it
predicts, a client fine-tunes a copy on its training rows, with fresh momentum and a constant rate, by default
that of round 0, and keeps nothing of it.
`finetune_epochs = 0` scores the untuned model ("before" in the paper's tables).

Choices. The head travels as the seed that it is drawn from. On a model with an encoder and a head the body is
the encoder. On a LoRA model it is the trained blocks (A and B); the head there is frozen anyway, so training
equals FedAvg's, and the difference is that fine-tuning moves the head too, where the model lends one.
Deviations: the server weighs by samples unless `average` says otherwise (the authors: uniformly); the
authors fine-tune 5 epochs at a hundredth of the training rate, we 1 epoch at the rate of round 0 (the FedSPM
suite) unless `finetune_epochs` and `finetune_lr` say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import CountOrZero, FederatedTraining, NonNegative, solve
from fedprism.trees import Tree, mean


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedAvg of the body; fine-tuning before every evaluation."""

    finetune_epochs: CountOrZero = 1  # passes over the client's data before it predicts; 0 = untuned
    finetune_lr: NonNegative = 0.0  # their learning rate, constant; 0 = lr, that of round 0
    finetune_scope: Literal["full", "head"] = "full"  # what they move: body and head, or the head alone
    average: Literal["samples", "uniform"] = "samples"  # weights of the clients in the server's mean


@dataclass(frozen=True)
class State:
    """round: the next one. body: global tree without the head. seed: the run's; the head is drawn from it."""

    round: int
    body: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """The trained blocks but the head, from the run seed."""
    head = head_of(model, facts.seed)
    if cfg.finetune_scope == "head" and cfg.finetune_epochs and not head:
        raise ValueError(
            f"fedbabu: the model is a {type(model).__name__} without a head of its own, finetune_scope is "
            '"head"; set finetune_scope = "full", or model.kind = "vision" or "mlp"'
        )
    body = {name: value for name, value in model.trainable(facts.seed).items() if name not in head}
    return State(0, body, facts.seed)


def head_of(model: Model, seed: int) -> Tree:
    """The head as the server starts it; a model with a frozen head gives that one, whatever the seed."""
    return model.init("head", seed) if model.blocks["head"] else {}


@phase(receives=["body", "seed", "lr"], sends=["body", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Local training of the body under the constant head."""
    trained = "head" in client.model.trained  # elsewhere the model holds it already
    head = head_of(client.model, got["seed"]) if trained else {}

    def loss(body: Tree, batch: Batch) -> Tensor:
        return client.loss({**body, **head}, batch)

    batches, decayed = cfg.batches(client), client.model.decayed
    body, done = solve(cfg, loss, got["body"], batches, got["lr"], decayed=decayed)
    return {"body": body, "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """body <- mean of the clients' bodies."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        body = {"body": state.body, "seed": state.seed, "lr": cfg.rate(t)}
        replies = yield Ask("update", chosen, body)
        n = [r.body["n"] for r in replies]
        weights = n if cfg.average == "samples" else None
        state = replace(state, round=t + 1, body=mean([r.body["body"] for r in replies], weights))
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
        yield RoundEnd(t, state, {"train_loss": loss})


def serve(cfg: Any, state: State) -> Body:
    """The body, and the seed of the head."""
    return {"body": state.body, "seed": state.seed}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """A copy of body and head, fine-tuned on the client's training rows."""
    body, head = got["body"], head_of(client.model, got["seed"])
    moving, still = ({**body, **head}, {}) if cfg.finetune_scope == "full" else (head, body)

    def loss(tree: Tree, batch: Batch) -> Tensor:
        return client.loss({**still, **tree}, batch)

    if cfg.finetune_epochs:
        batches = client.batches(cfg.batch_size, epochs=cfg.finetune_epochs)
        rate = cfg.finetune_lr or cfg.lr
        moving, _ = solve(cfg, loss, moving, batches, rate, decayed=client.model.decayed)
    tree = {**still, **moving}
    return lambda batch: client.model.apply(tree, batch)


METHOD = Method(
    "fedbabu", "Oh et al. 2022", Config, State, start, (update,), server, serve, predictor,
    summary="FedAvg of the body under a fixed head; clients fine-tune a copy before predicting",
)  # fmt: skip
