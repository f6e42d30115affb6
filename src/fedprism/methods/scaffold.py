"""SCAFFOLD: Karimireddy et al. 2020, Algorithm 1, control variates by option II.

Deviations: the control update divides the displacement by the total weight that the optimiser gave the
gradients, sum_s sum_{k>=s} lr_k momentum^(k-s), which is K lr for plain SGD and the correct denominator with
momentum. The data gradient is clipped before the correction is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import FederatedTraining, Positive, decay_rate, sgd
from fedprism.trees import Tree, add, mean, scale, sub, zeros


@dataclass(frozen=True)
class Config(FederatedTraining):
    """SCAFFOLD runs on SGD: its correction is a statement about gradients, which AdamW rescales."""

    optimizer: Literal["adamw", "sgd"] = "sgd"
    lr: Positive = 0.05
    weight_decay: float = 0.0
    server_lr: Positive = 1.0  # eta_g

    def __post_init__(self) -> None:
        if self.optimizer != "sgd":
            raise ValueError(
                f"method.scaffold.optimizer is '{self.optimizer}', SCAFFOLD needs 'sgd'; "
                "set method.scaffold.optimizer = 'sgd' with a rate of its own (method.scaffold.lr)"
            )


@dataclass(frozen=True)
class State:
    """round: the next one. x: global tree. c: server control variate. seed: the run's."""

    round: int
    x: Tree
    c: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """Initial global tree; the control variate starts at zero."""
    x = model.trainable(facts.seed)
    return State(0, x, zeros(x), facts.seed)


@phase(receives=["x", "c", "lr"], keeps=["c_i"], sends=["dy", "dc", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Corrected local steps, then the new control variate of the client."""
    x, c = got["x"], got["c"]
    c_i = client.state.get("c_i", zeros(x))  # zero at first contact
    y, done = sgd(
        client.loss, x, cfg.batches(client), got["lr"], momentum=cfg.momentum,
        weight_decay=decay_rate(cfg.weight_decay, client.model.decayed), clip=cfg.clip or None,
        correct=sub(c, c_i),
    )  # fmt: skip  # Eq. (3): g + c - c_i
    new = add(sub(c_i, c), scale(sub(x, y), 1 / done.weight))  # Eq. (4), option II
    client.state["c_i"] = new
    return {"dy": sub(y, x), "dc": sub(new, c_i), "loss": done.loss, "examples": done.examples}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """x <- x + eta_g mean(dy), c <- c + |S| / N mean(dc); both means are uniform."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        replies = yield Ask("update", chosen, {"x": state.x, "c": state.c, "lr": cfg.rate(t)})
        dx, dc = (mean([r.body[k] for r in replies]) for k in ("dy", "dc"))
        share = len(replies) / len(clients)  # |S| / N
        x = add(state.x, scale(dx, cfg.server_lr))  # Eq. (5)
        state = replace(state, round=t + 1, x=x, c=add(state.c, scale(dc, share)))
        yield RoundEnd(t, state, {"train_loss": sum(r.body["loss"] for r in replies) / len(replies)})


def serve(cfg: Config, state: State) -> Body:
    """The global tree."""
    return {"x": state.x}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global model."""
    return lambda batch: client.model.apply(got["x"], batch)


METHOD = Method(
    "scaffold", "Karimireddy et al. 2020", Config, State, start, (update,), server, serve, predictor,
    summary="FedAvg with control variates against client drift",
)  # fmt: skip
