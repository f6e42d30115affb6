"""FedTAR: task-aware federated fine-tuning of mixture-of-experts models (arXiv 2609.13395, Sec. IV).

Clients train the up-projections B of every routed expert under one frozen A, drawn from the run's seed, and
send once how the router treats their data. The server places clients in a task space, groups them, and adds
B_g = sum_i beta_i Delta_i to the adapter: coefficients of `task_coefficients`, no d x d object.

Deviations (all with a switch; preset "paper" sets the literal ones): affine projection instead of the literal
one, which loses what all clients agree on; relative ridges and tau; centred basis; learning rate 0.5 for SGD,
because the published 1e-5 with clipping at 2 moves B by at most 1e-4 a round; increments are sent, so that
the past is not counted twice; the ridges' value, tau and the rank are not published. Features keep the layers
apart; held-out examples (`validation`, at most 256) give them, or training rows where fewer than 32 are held
out. The task space of a round is fitted to the clients that take part in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from fedprism.methods.routing_features import (
    RoutingStats,
    arrange,
    clipped_sum,
    example_means,
    keep_largest,
    unit,
)
from fedprism.methods.task_coefficients import MapSettings, fedtar_coefficients
from fedprism.methods.task_space import Floats, TaskSpace, cluster
from fedprism.methods.update_gram import blocks, combine, grams
from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import (
    Ask,
    Body,
    Client,
    Facts,
    Method,
    Reply,
    RoundEnd,
    Server,
    generator,
    phase,
    sample_clients,
)
from fedprism.training import Count, CountOrZero, FederatedTraining, NonNegative, Positive, solve
from fedprism.trees import Tree, add, norm, sub

FEWEST_HELD_OUT, MOST_HELD_OUT = 32, 256  # examples that give the features
FEWEST_CLIENTS = 3  # two have one difference, which any map keeps whole
STILL = 1e-3  # a round that can't move B farther than this deserves a warning


@dataclass(frozen=True)
class Config(MapSettings, FederatedTraining):
    """Recommended values; the map's are in `task_coefficients.MapSettings`."""

    optimizer: Literal["adamw", "sgd"] = "sgd"
    lr: Positive = 0.5  # of B
    local_steps: CountOrZero = 5  # optimiser steps per round; 0 = local_epochs decide
    batch_size: Count = 16  # examples per step
    clip: NonNegative = 2.0  # largest joint gradient norm; 0 = no clipping
    weight_decay: NonNegative = 0.0
    features: Literal["all", "mean", "coactivation"] = "all"  # statistics in the vector, entropy besides
    feature_layers: Literal["per_layer", "pooled", "one"] = "per_layer"  # all joined, their mean, or one
    feature_layer: CountOrZero = 0  # number of the layer where feature_layers is one
    feature_scaling: Literal["literal", "balanced"] = (
        "literal"  # balanced: mean and co-activation weigh alike
    )
    feature_split: Literal["heldout", "train"] = "heldout"  # rows that the features are taken on
    feature_clip: NonNegative = 0.0  # norm that each example's features are clipped to; 0 = token means
    post_topk: CountOrZero = 0  # experts per token whose probabilities count; 0 = all
    refresh: CountOrZero = 0  # rounds after which features are taken anew; 0 = once, before round 0
    r_task: CountOrZero = (
        0  # dimensions of the task space, <= N - 1; 0 = 95 % of the energy, at most 4, N - 2
    )
    basis: Literal["centred", "uncentred", "full"] = "centred"  # full: no reduction ("without SVD")
    coordinates: Literal["centred", "uncentred"] = "centred"  # whether the mean is taken off the features
    clustering: bool = True  # False: the mean is projected ("without clustering")
    n_clusters: CountOrZero = 5  # Q groups, lowered to the distinct clients; 0 = by silhouette, 2..8
    client_weights: Literal["uniform", "examples"] = "uniform"  # of every mean over clients
    granularity: Literal["global", "layer"] = "global"  # coefficients for all tensors, or for each layer
    delta_mode: Literal["increment", "absolute"] = "increment"  # absolute: B itself is sent and replaced
    cluster_seed: Annotated[int, Ge(0)] = 0  # of k-means


@dataclass(frozen=True)
class State:
    """round: the next one. b: accumulated B. seed: the run's. sizes: training examples by client, in order.
    features: (N, F) float64, the clients' last ones; (0, 0) before the first."""

    round: int
    b: Tree
    seed: int
    sizes: list[int]
    features: Tensor


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """B = 0. Raises ValueError, one line, for a model without routed low-rank experts, too few clients in a
    round, or a rank that they do not allow."""
    if not callable(getattr(model, "routing", None)) or not model.blocks.get("lora_B"):
        raise ValueError(
            "fedtar: got a model without routed low-rank experts, needs `routing` and the blocks lora_A and "
            'lora_B; set model.kind to a mixture-of-experts language model or take method = "ffa_lora"'
        )
    n = len(sample_clients(facts.clients, cfg.participation, facts.seed, 0))
    if n < FEWEST_CLIENTS:
        raise ValueError(
            f"fedtar: got {n} clients per round, needs at least {FEWEST_CLIENTS} for a task space; add "
            'clients, raise participation or take method = "ffa_lora"'
        )
    if cfg.r_task > n - 1:
        raise ValueError(
            f"fedtar: got r_task = {cfg.r_task}, needs at most N - 1 = {n - 1} for {n} clients per round; "
            "lower method.fedtar.r_task or set it to 0"
        )
    return State(
        0, model.init("lora_B", facts.seed), facts.seed, list(facts.sizes),
        torch.zeros(0, 0, dtype=torch.float64),
    )  # fmt: skip


def _tree(model: Model, got: Body) -> Tree:
    """A of the run's seed and the received B."""
    return {**model.init("lora_A", got["seed"]), **got["b"]}


@phase(receives=["b", "seed"], sends=["c"])
def features(client: Client, got: Body, cfg: Config) -> Body:
    """c_i = [mu; co; h] of the router on the client's rows; of norm 1 unless examples are clipped."""
    rows = client.data["train"]
    held = client.data.get("validation", ())
    if cfg.feature_split == "heldout" and len(held) >= FEWEST_HELD_OUT:
        pick = torch.randperm(len(held), generator=generator(got["seed"], "features", client.id))
        rows = held.select(pick[:MOST_HELD_OUT].sort().values)
    tree, stats, total, n = _tree(client.model, got), None, None, 0
    form = (cfg.feature_layers, cfg.feature_scaling, cfg.features)
    for batch in rows.batches(cfg.batch_size):
        with torch.no_grad():
            p = client.model.routing(tree, batch)  # (L, b, T, K)
        p = keep_largest(p, cfg.post_topk) if cfg.post_topk else p
        mask = batch.get("attention_mask")
        if cfg.feature_clip:
            part = arrange(*example_means(p, mask), *form, layer=cfg.feature_layer)
            part = clipped_sum(part, cfg.feature_clip)
            total, n = part if total is None else total + part, n + p.shape[1]
        else:
            stats = stats or RoutingStats.empty(p.shape[0], p.shape[-1])
            stats.update(p, mask)
    if total is not None:
        return {"c": (total / n).cpu()}
    if stats is None:
        raise ValueError("fedtar: got no rows for routing features, needs at least one; give the client data")
    return {"c": stats.vector(*form, layer=cfg.feature_layer)}


@phase(receives=["b", "seed", "lr"], sends=["delta", "n", "loss", "examples"])
def update(client: Client, got: Body, cfg: Config) -> Body:
    """Train B from the accumulated one under the A of the run's seed; send the increment (or B itself)."""
    down = client.model.init("lora_A", got["seed"])  # the same bits on every client, never sent

    def objective(up: Tree, batch: Batch) -> Any:
        return client.loss({**down, **up}, batch)

    b, done = solve(
        cfg, objective, got["b"], cfg.batches(client), got["lr"], decayed=client.model.decayed
    )  # fmt: skip
    delta = sub(b, got["b"]) if cfg.delta_mode == "increment" else b
    return {"delta": delta, "n": client.n, "loss": done.loss, "examples": done.examples}


def layer_of(name: str) -> str:
    """The layer in a tensor's name: `lora_B.<layer>.down` -> `<layer>`."""
    return name.split(".")[1]


def aggregate(
    cfg: Config, features: Tensor, at: Sequence[int], replies: Sequence[Reply]
) -> tuple[Tree, dict[str, Any]]:
    """B_g of the clients at rows `at` of (N, F) features, and the facts of the round (spec 5.2, 6)."""
    p = np.array([r.body["n"] if cfg.client_weights == "examples" else 1.0 for r in replies])
    p, n = p / p.sum(), len(replies)
    space = TaskSpace.fit(
        features[list(at)].numpy(), cfg.r_task, basis=cfg.basis, coordinates=cfg.coordinates, p=p
    )  # fmt: skip
    labels, note = cluster(space.z, cfg.n_clusters, cfg.cluster_seed, p=p) if cfg.clustering else (None, "")
    updates = [r.body["delta"] for r in replies]
    by_layer = cfg.granularity == "layer"
    found: dict[str, Floats] = {}
    facts: dict[str, dict[str, Any]] = {}
    for key, G in grams(blocks(updates), n, layer_of if by_layer else lambda name: "").items():
        d = sum(v.numel() for name, v in updates[0].items() if not by_layer or layer_of(name) == key)
        found[key], facts[key] = fedtar_coefficients(G, space.z.T, labels, cfg, p, d=d)
    result = combine(blocks(updates), updates[0], lambda name: found[layer_of(name) if by_layer else ""])
    log = {"layers": facts, "notes": _notes(facts)} if by_layer else facts[""]
    notes = ([note] if note else []) + list(log["notes"])
    return result, {
        **log, "notes": notes, "clients": [r.client for r in replies], "coordinates": space.z.tolist(),
        "feature_spectrum": space.spectrum.tolist(), "r_task": space.rank,
    }  # fmt: skip


def _notes(facts: dict[str, dict[str, Any]]) -> list[str]:
    return [f"layer {key}: {note}" for key, fact in facts.items() for note in fact["notes"]]


def _slow(cfg: Config) -> list[str]:
    """A note where clipped SGD steps can't move B visibly (spec 3)."""
    reach = cfg.lr * cfg.clip * cfg.local_steps
    if cfg.optimizer != "sgd" or cfg.momentum or not 0 < reach < STILL:
        return []
    return [
        f"lr: with lr = {cfg.lr:g}, clip = {cfg.clip:g} and {cfg.local_steps} steps B moves by at most "
        f"{reach:.1g} per round; raise method.fedtar.lr (0.1 to 3)"
    ]


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """Features once (or every `refresh` rounds), then per round updates, coefficients, B += B_g."""
    order = {client: k for k, client in enumerate(clients)}
    for t in range(state.round, cfg.rounds):
        shared = {"b": state.b, "seed": state.seed}
        if t == 0 or (cfg.refresh and t % cfg.refresh == 0):
            replies = yield Ask("features", clients, shared)
            rows = torch.stack([r.body["c"] for r in replies])  # replies are sorted by client
            rows = rows[[[r.client for r in replies].index(client) for client in clients]]
            state = replace(state, features=unit(rows))
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        replies = yield Ask("update", chosen, {**shared, "lr": cfg.rate(t)})
        step, facts = aggregate(cfg, state.features, [order[r.client] for r in replies], replies)
        b = add(state.b, step) if cfg.delta_mode == "increment" else step
        state = replace(state, round=t + 1, b=b)
        loss = math.fsum(r.body["loss"] for r in replies) / len(replies)
        facts["notes"] = (_slow(cfg) if t == 0 else []) + facts["notes"]
        yield RoundEnd(
            t, state, {"train_loss": loss, "b_norm": norm(b), "step_norm": norm(step), "fedtar": facts}
        )  # fmt: skip


def serve(cfg: Config, state: State) -> Body:
    """The accumulated B and the seed of A."""
    return {"b": state.b, "seed": state.seed}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """The global adapter."""
    tree = _tree(client.model, got)
    return lambda batch: client.model.apply(tree, batch)


PAPER = {
    "rounds": 100, "lr": 1e-5, "local_steps": 5, "batch_size": 16, "clip": 2.0, "optimizer": "sgd",
    "feature_layers": "pooled", "basis": "uncentred", "projection": "literal", "lambda_mode": "absolute",
    "tau_mode": "absolute", "size_aware": False, "n_clusters": 5, "r_task": 8,
}  # fmt: skip

METHOD = Method(
    "fedtar", "arXiv 2609.13395", Config, State, start, (features, update), server, serve, predictor,
    presets={"paper": PAPER},
    summary="routing features place clients in a task space; a map from it filters the clustered average",
)  # fmt: skip
