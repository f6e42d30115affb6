"""FedSVD: Lee et al. 2025. FFA-LoRA whose server turns A to the singular directions of the averaged product.

In a round A is frozen and clients train and send B. Every `period` rounds the server writes the product of
the mean B and A as U S V^T and goes on with A = V^T (orthonormal rows) and B = U S; the product stays as it
is, the scale s stands outside it. While B = 0 there is nothing to refactorise.

A changes, so it is sent along with B (except with `period = 0`, which is FFA-LoRA: A follows from the seed).
The optimiser is fresh each round, as B's basis changes.

Deviations: the server sends A in every round, also between two refactorisations, so that a client that
missed one needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedprism.methods.low_rank_products import refactorise, require_pairs
from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import CountOrZero, FederatedTraining, solve
from fedprism.trees import Tree, mean, select


@dataclass(frozen=True)
class Config(FederatedTraining):
    """FFA-LoRA with a moving A."""

    period: CountOrZero = 1  # rounds between refactorisations; 0 = never, which is FFA-LoRA
    weights: Literal["examples", "uniform"] = "examples"  # how the mean over clients weighs them


@dataclass(frozen=True)
class State:
    """round: the next one. down: A, the frozen block; empty where it never changes. up: mean B (and a trained
    head). seed: the run's."""

    round: int
    down: Tree
    up: Tree
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """A at random, B = 0. Raises ValueError for a model without low-rank pairs, or wider ones than inputs."""
    require_pairs("fedsvd", model)
    tree = model.trainable(facts.seed)
    down = select(tree, model.blocks["lora_A"])
    for name, a in down.items():
        if cfg.period and a.shape[-2] > a.shape[-1]:
            raise ValueError(
                f"fedsvd: '{name}' has rank {a.shape[-2]} for {a.shape[-1]} inputs, orthonormal rows need "
                f"rank <= inputs; lower model.rank to {a.shape[-1]}"
            )
    up = {name: value for name, value in tree.items() if name not in down}
    return State(0, down if cfg.period else {}, up, facts.seed)


@phase(receives=["down", "up", "seed", "lr"], sends=["up", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Train B under the received A."""
    down = got["down"] or client.model.init("lora_A", got["seed"])

    def objective(up: Tree, batch: Batch) -> Tensor:
        return client.loss({**down, **up}, batch)

    decayed = client.model.decayed
    up, done = solve(cfg, objective, got["up"], cfg.batches(client), got["lr"], decayed=decayed)
    return {"up": up, "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """B <- sum_i rho_i B_i; then A <- V^T, B <- U S of the product B A, every `period` rounds."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        body = {"down": state.down, "up": state.up, "seed": state.seed, "lr": cfg.rate(t)}
        replies = yield Ask("update", chosen, body)
        rho = [r.body["n"] if cfg.weights == "examples" else 1 for r in replies]
        down, up, turned = state.down, mean([r.body["up"] for r in replies], rho), 0
        if cfg.period and (t + 1) % cfg.period == 0:
            pair, turned = refactorise({**down, **up})
            down, up = select(pair, down), {**up, **{name: pair[name] for name in up if name in pair}}
        state = replace(state, round=t + 1, down=down, up=up)
        loss = sum(r.body["loss"] * p for r, p in zip(replies, rho, strict=True)) / sum(rho)
        yield RoundEnd(t, state, {"train_loss": loss, "refactorised": turned})


def serve(cfg: Any, state: State) -> Body:
    """Both factors (A by its seed where it never changes)."""
    return {"down": state.down, "up": state.up, "seed": state.seed}


def predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global adapter."""
    tree = {**(got["down"] or client.model.init("lora_A", got["seed"])), **got["up"]}
    return lambda batch: client.model.apply(tree, batch)


METHOD = Method(
    "fedsvd", "Lee et al. 2025", Config, State, start, (update,), server, serve, predictor,
    summary="FFA-LoRA whose A follows the singular directions of the averaged product",
)  # fmt: skip
