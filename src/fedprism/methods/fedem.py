"""FedEM: Marfoq et al. 2021, Algorithm 1. Each client mixes C shared models with its own weights.

p_i(y | x) = sum_k pi_ik p_k(y | x). Once a round a client does, in this order: responsibilities of all its
training rows, q_sk proportional to pi_ik exp(-loss_k(x_s, y_s)), in evaluation mode; weights
pi_ik = mean_s q_sk; local training of each component on (1 / |b|) sum_{s in b} q_sk loss_k(x_s, y_s), with q
held fixed. The server averages each component by the clients' examples, never by pi.

Choices. Component 0 starts as FedAvg does, the others from seeds of their own, all the same for every client:
components that start equal and see equal batches would stay equal. Each component draws its own batches.
A weight below 1e-8 counts as that much in logarithms, at training and at prediction.
A client that was never asked has no weights: the predictor finds them as for a new client, by E-steps and
weight updates on its training rows with the components as they are; without rows they are uniform.
Deviations: only the clients of a round are averaged (the authors' code counts absent ones with a stale copy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedprism.methods.density_ratio import mix_predictions
from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import (
    Ask,
    Body,
    Client,
    Facts,
    Method,
    RoundEnd,
    Server,
    derive_seed,
    phase,
    sample_clients,
)
from fedprism.training import Count, FederatedTraining, NonNegative, at_rows, solve
from fedprism.trees import Tree, mean

FLOOR = 1e-8  # smallest mixing weight inside a logarithm
Group = dict[int, Tree]  # component -> its tensors


@dataclass(frozen=True)
class Config(FederatedTraining):
    """Local training of each component, and how the weights of new clients are found."""

    n_components: Annotated[int, Ge(1), Le(64)] = 3  # C
    eval_batch: Count = 256  # rows per forward pass of the E-step
    new_client_steps: Count = 10  # E-steps of a client that was never asked, at most
    new_client_tolerance: NonNegative = 1e-3  # they end when no weight changes by more


@dataclass(frozen=True)
class State:
    """round: the next one. components: C trees. seed: the run's."""

    round: int
    components: Group
    seed: int


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """C models from seeds of their own; the first is the one FedAvg starts from."""
    seeds = [derive_seed(facts.seed, "component", k) if k else facts.seed for k in range(cfg.n_components)]
    return State(0, {k: model.trainable(seed) for k, seed in enumerate(seeds)}, facts.seed)


# --- client ------------------------------------------------------------------------------------------------


def log_weights(pi: Tensor) -> Tensor:
    """log pi with pi floored at 1e-8, any shape."""
    return pi.clamp_min(FLOOR).log()


def responsibilities(pi: Tensor, losses: Tensor) -> Tensor:
    """q_sk proportional to pi_k exp(-loss_sk), rows sum to 1, (n, C).

    pi: (C,), sums to 1. losses: (n, C) negative log-likelihoods in nats."""
    return (log_weights(pi) - losses).softmax(1)


def row_losses(model: Model, components: Group, rows: Any, size: int) -> Tensor:
    """(n, C) float64: loss of every row, in order, under every component, in evaluation mode.

    rows: a split with `batches(size)`. size: rows per forward pass."""
    with torch.no_grad():
        found = [
            torch.stack(
                [model.per_example_loss(model.apply(w, b), b).double() for w in components.values()], 1
            )
            for b in rows.batches(size)
        ]
    return torch.cat(found)


def weighted_loss(client: Client, q: Tensor, ids: Tensor) -> Callable[[Tree, Batch], Tensor]:
    """Training loss of one component: the mean over the batch of q_s loss_s, not divided by sum_s q_s.

    q: (n,) responsibilities of the rows with the given ids (n,)."""

    def loss(tree: Tree, batch: Batch) -> Tensor:
        losses: Tensor = client.model.per_example_loss(
            client.model.apply(tree, batch, generator=client.generator), batch
        )
        return (at_rows(q, ids, batch["row"]).to(losses) * losses).mean()

    return loss


@phase(
    receives=["components", "lr"],
    keeps=["pi", "q", "ids"],
    sends=["components", "n", "loss", "examples", "log_likelihood", "weights"],
)
def update(client: Client, got: Body, cfg: Config) -> Body:
    """E-step, weights, then the components; q and pi stay with the client."""
    components: Group = got["components"]
    pi = client.state.get("pi", uniform(len(components)))
    rows, ids = client.data["train"], client.data["train"].columns["row"]
    losses = row_losses(client.model, components, rows, cfg.eval_batch)
    q = responsibilities(pi, losses)
    likelihood = float((log_weights(pi) - losses).logsumexp(1).mean())  # at the parameters that came in
    client.state |= {"pi": q.mean(0), "q": q, "ids": ids}
    new, loss, examples = {}, 0.0, 0
    for k, tree in components.items():
        objective = weighted_loss(client, q[:, k], ids)
        new[k], done = solve(
            cfg, objective, tree, cfg.batches(client), got["lr"], decayed=client.model.decayed
        )
        loss, examples = loss + done.loss, examples + done.examples
    return {
        "components": new, "n": client.n, "loss": loss, "examples": examples,
        "log_likelihood": likelihood, "weights": client.state["pi"].tolist(),
    }  # fmt: skip


def uniform(n_components: int) -> Tensor:
    """(C,) float64 weights 1 / C."""
    return torch.full((n_components,), 1 / n_components, dtype=torch.float64)


def new_client_weights(
    model: Model, components: Group, rows: Any, *, size: int = 256, steps: int = 10, tolerance: float = 1e-3
) -> Tensor:
    """Weights pi (C,) float64 of a client that did not take part: EM on pi alone, components held fixed.

    rows: its labelled rows, or None where it has none, which gives uniform weights. size: rows per forward
    pass. steps: E-steps, at most. tolerance: it ends when no weight changes by more."""
    pi = uniform(len(components))
    if rows is None or not len(rows):
        return pi
    losses = row_losses(model, components, rows, size)
    for _ in range(steps):
        before, pi = pi, responsibilities(pi, losses).mean(0)
        if float((pi - before).abs().max()) <= tolerance:
            break
    return pi


# --- server ------------------------------------------------------------------------------------------------


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """w_k <- sum_i (n_i / n) w_ik for every k, over the clients that took part."""
    for t in range(state.round, cfg.rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        replies = yield Ask("update", chosen, {"components": state.components, "lr": cfg.rate(t)})
        n = [r.body["n"] for r in replies]
        average = {k: mean([r.body["components"][k] for r in replies], n) for k in state.components}
        state = replace(state, round=t + 1, components=average)
        loss, likelihood = (
            sum(r.body[key] * r.body["n"] for r in replies) / sum(n) for key in ("loss", "log_likelihood")
        )
        weights = {str(r.client): r.body["weights"] for r in replies}
        yield RoundEnd(t, state, {"train_loss": loss, "log_likelihood": likelihood, "weights": weights})


# --- prediction --------------------------------------------------------------------------------------------


def serve(cfg: Config, state: State) -> Body:
    """The components."""
    return {"components": state.components}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """log sum_k pi_ik softmax(logits_k): probabilities are mixed, not logits."""
    components: Group = got["components"]
    pi = client.state.get("pi")
    if pi is None:
        pi = new_client_weights(
            client.model, components, client.data.get("train"),
            size=cfg.eval_batch, steps=cfg.new_client_steps, tolerance=cfg.new_client_tolerance,
        )  # fmt: skip
    weights = log_weights(pi)[None].softmax(1)  # (1, C)

    def predict(batch: Batch) -> Outputs:
        log_p = [
            client.model.apply(tree, batch).logits.double().log_softmax(1) for tree in components.values()
        ]
        return Outputs(mix_predictions(weights, torch.stack(log_p, 1)).float())

    return predict


METHOD = Method(
    "fedem", "Marfoq et al. 2021", Config, State, start, (update,), server, serve, predictor,
    summary="every client a mixture of shared models; weights and models by federated EM",
)  # fmt: skip
