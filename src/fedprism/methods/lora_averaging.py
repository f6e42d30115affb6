"""FFA-LoRA and FedSA-LoRA: one loop of local training and averaging; they differ in which block travels.

FFA-LoRA: Sun et al. 2024. A is frozen at its random start, the same on every client because all draw it from
the run's seed; B is trained, sent and averaged, which is exact: sum_i rho_i B_i A = (sum_i rho_i B_i) A.
FedSA-LoRA: Guo et al. 2025. A and B are trained, A is sent and averaged, B stays with its client.

A head that the model trains travels with B in FFA-LoRA and stays with the client in FedSA-LoRA.

Deviations: where the paper is silent about a client that was never asked, it starts from B = 0 and fits a
copy of its private block before predicting (`new_client_epochs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedprism.methods.low_rank_products import require_pairs
from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import Ask, Body, Client, Facts, Method, RoundEnd, Server, phase, sample_clients
from fedprism.training import CountOrZero, FederatedTraining, solve
from fedprism.trees import Tree, mean, norm, select


@dataclass(frozen=True)
class FFAConfig(FederatedTraining):
    """B travels."""

    weights: Literal["examples", "uniform"] = "examples"  # how the mean over clients weighs them


@dataclass(frozen=True)
class FedSAConfig(FederatedTraining):
    """A travels."""

    weights: Literal["examples", "uniform"] = "examples"  # how the mean over clients weighs them
    new_client_epochs: CountOrZero = (
        1  # passes that fit B where a client was never asked; 0 = predict with B = 0
    )


@dataclass(frozen=True)
class State:
    """round: the next one. shared: the block that travels. seed: the run's, from which the other starts."""

    round: int
    shared: Tree
    seed: int


def _blocks(model: Model, seed: int) -> tuple[Tree, Tree]:
    """(A, the rest of what the model trains) at their start, from the run's seed."""
    tree = model.trainable(seed)
    downs = model.blocks["lora_A"]
    return select(tree, downs), {name: value for name, value in tree.items() if name not in downs}


def ffa_start(cfg: Any, model: Model, facts: Facts) -> State:
    """B = 0. Raises ValueError for a model without low-rank pairs."""
    require_pairs("ffa_lora", model)
    return State(0, _blocks(model, facts.seed)[1], facts.seed)


def fedsa_start(cfg: Any, model: Model, facts: Facts) -> State:
    """A at random. Raises ValueError for a model without low-rank pairs."""
    require_pairs("fedsa_lora", model)
    return State(0, _blocks(model, facts.seed)[0], facts.seed)


@phase(receives=["shared", "seed", "lr"], sends=["shared", "n", "loss", "examples"])
def train_up(client: Client, got: Body, cfg: FFAConfig) -> Body:
    """FFA-LoRA: train B under the A of the run's seed."""
    down = client.model.init("lora_A", got["seed"])  # the same bits on every client, never sent

    def objective(up: Tree, batch: Batch) -> Any:
        return client.loss({**down, **up}, batch)

    decayed = client.model.decayed
    up, done = solve(cfg, objective, got["shared"], cfg.batches(client), got["lr"], decayed=decayed)
    return {"shared": up, "n": client.n, "loss": done.loss, "examples": done.examples}


@phase(receives=["shared", "seed", "lr"], keeps=["own"], sends=["shared", "n", "loss", "examples"])
def train_both(client: Client, got: Body, cfg: FedSAConfig) -> Body:
    """FedSA-LoRA: train the received A and the client's own B; only A is sent."""
    own = client.state.get("own") or _blocks(client.model, got["seed"])[1]  # B = 0 at first contact
    w, done = solve(
        cfg, client.loss, {**got["shared"], **own}, cfg.batches(client), got["lr"],
        decayed=client.model.decayed,
    )  # fmt: skip
    client.state["own"] = select(w, own)
    shared = select(w, got["shared"])
    return {"shared": shared, "n": client.n, "loss": done.loss, "examples": done.examples}


def server(cfg: Any, state: State, clients: Sequence[int]) -> Server:
    """shared <- sum_i rho_i shared_i over the clients that took part."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        body = {"shared": state.shared, "seed": state.seed, "lr": cfg.rate(t)}
        replies = yield Ask("update", chosen, body)
        rho = [r.body["n"] if cfg.weights == "examples" else 1 for r in replies]
        state = replace(state, round=t + 1, shared=mean([r.body["shared"] for r in replies], rho))
        loss = sum(r.body["loss"] * p for r, p in zip(replies, rho, strict=True)) / sum(rho)
        yield RoundEnd(t, state, {"train_loss": loss, "shared_norm": norm(state.shared)})


def serve(cfg: Any, state: State) -> Body:
    """The block that travels, and the seed of the other."""
    return {"shared": state.shared, "seed": state.seed}


def ffa_predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The global adapter."""
    tree = {**client.model.init("lora_A", got["seed"]), **got["shared"]}
    return lambda batch: client.model.apply(tree, batch)


def fedsa_predictor(client: Client, got: Body, cfg: FedSAConfig) -> Callable[[Batch], Outputs]:
    """The shared A with the client's own B; one that was never asked fits a copy of B = 0 first."""
    shared, own = got["shared"], client.state.get("own")
    if own is None:
        own = _blocks(client.model, got["seed"])[1]
        if cfg.new_client_epochs:

            def objective(mine: Tree, batch: Batch) -> Any:
                return client.loss({**shared, **mine}, batch)

            batches = client.batches(cfg.batch_size, epochs=cfg.new_client_epochs)
            own, _ = solve(cfg, objective, own, batches, cfg.lr, decayed=client.model.decayed)
    tree = {**shared, **own}
    return lambda batch: client.model.apply(tree, batch)


# Both phases are called "update", as FedAvg's is: all methods see the same batches.
FFA_LORA = Method(
    "ffa_lora", "Sun et al. 2024", FFAConfig, State, ffa_start, (replace(train_up, name="update"),), server,
    serve, ffa_predictor, summary="low-rank adapters with one frozen A; only B is trained and averaged",
)  # fmt: skip
FEDSA_LORA = Method(
    "fedsa_lora", "Guo et al. 2025", FedSAConfig, State, fedsa_start, (replace(train_both, name="update"),),
    server, serve, fedsa_predictor, summary="low-rank adapters; A is averaged, B stays with the client",
)  # fmt: skip
