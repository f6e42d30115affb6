"""FedEx-LoRA: Singhal et al. 2025. FedIT whose server makes up for averaging the factors separately.

The mean of the clients' products differs from the product of their means by
    R = sum_i rho_i B_i A_i - B A = sum_i rho_i (B_i - B) (A_i - A),
of rank at most (|S| - 1) r. R joins an accumulated residual beside the frozen weights, so that after every
round the model is base + s (B A + residual) = base + s (earlier residual + sum_i rho_i B_i A_i), exactly.

The residual is kept in factors, compressed exactly to its rank and hence never wider than min(out, in); the
model reads it as more columns of B and rows of A, under the scale s of the configured rank. It stands apart
from the pretrained weights in the server's state and in what `serve` gives: A and B alone are not the model.

Deviations: the server sends the whole accumulated residual, so a client that missed rounds needs nothing
else and clients keep nothing; a client that took part in the round before could do with the last R alone.
As part of the low-rank branch the residual sees the adapter's input dropout in training, where weights that
were merged into the base would not. Uniform weights, as in the authors' code, are `weights = "uniform"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedprism.methods.low_rank_products import (
    compress,
    no_product,
    product_norm,
    require_pairs,
    residual,
    widen,
    widths,
)
from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import FederatedTraining, solve
from fedprism.trees import Tree, mean


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FedIT with a residual."""

    weights: Literal["examples", "uniform"] = "examples"  # rho of all three sums: n_i / n, or 1 / |S|


@dataclass(frozen=True)
class State:
    """round: the next one. w: means of A and B (and of a trained head). residual: accumulated, a pair with
    the names of w's and widths of its own. seed: the run's, for sampling clients."""

    round: int
    w: Tree
    residual: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """Initial adapter without residual. Raises ValueError for a model without low-rank pairs."""
    require_pairs("fedex_lora", model)
    w = model.trainable(facts.seed)
    return State(0, w, no_product(w), facts.seed)


@phase(receives=["w", "residual", "lr"], sends=["w", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Local training of A and B from their means, on base + s (B A + residual)."""

    def objective(w: Tree, batch: Batch) -> Tensor:
        return client.loss(widen(w, got["residual"]), batch)

    decayed = client.model.decayed
    w, done = solve(cfg, objective, got["w"], cfg.batches(client), got["lr"], decayed=decayed)
    return {"w": w, "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """Means of A and of B; the residual takes up what they miss of the mean product."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        body = {"w": state.w, "residual": state.residual, "lr": cfg.rate(t)}
        replies = yield Ask("update", chosen, body)
        rho = [r.body["n"] if cfg.weights == "examples" else 1 for r in replies]
        trained = [r.body["w"] for r in replies]
        w = mean(trained, rho)
        missed = residual(trained, rho, w)  # R of this round
        whole = compress(widen(missed, state.residual))
        state = replace(state, round=t + 1, w=w, residual=whole)
        loss = sum(r.body["loss"] * p for r, p in zip(replies, rho, strict=True)) / sum(rho)
        log = {"train_loss": loss, "missed_norm": product_norm(missed), "residual_norm": product_norm(whole)}
        yield RoundEnd(t, state, {**log, "residual_width": max(widths(whole).values())})


def serve(cfg: Any, state: State) -> Body:
    """The adapter and the residual; both are needed."""
    return {"w": state.w, "residual": state.residual}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global model, residual included."""
    tree = widen(got["w"], got["residual"])
    return lambda batch: client.model.apply(tree, batch)


METHOD = Method(
    "fedex_lora", "Singhal et al. 2025", Config, State, start, (update,), server, serve, predictor,
    summary="FedIT with a residual that makes the average of the products exact",
)  # fmt: skip
