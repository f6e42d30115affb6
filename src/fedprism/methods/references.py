"""References, the ends of every table: local-only, centralised, untrained and public-only.

local_only: every client trains alone (no communication). centralized: all clients' data in one place, one
model per task chosen by the true task of each query, or one pooled model. untrained: the model as it starts.
public_only: one expert per task trained on the server's public set alone; it tells whether the federation
adds anything to the public data. Sources: baselines spec sections 1 and 2; public_only is our control.

Deviations: centralized gets the clients' local epochs by default (`budget = "matched_epochs"`; where
`local_steps` is set, that many steps); with "matched_steps" every model gets the steps of an average client,
so scope "task" takes M times as many in all.

centralized (scope "task") and public_only choose the expert by the query's true task, which no deployed
client knows: they are generous references, not upper bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fedprism.models.interface import Batch, FeatureModel, Model, Outputs
from fedprism.protocol import POOLED, PUBLIC, Ask, Body, Client, Facts, Method, RoundEnd, Server, phase
from fedprism.training import LocalTraining, solve
from fedprism.trees import Tree

# --- local-only -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalConfig(LocalTraining):
    """Local training for the whole budget."""

    persist_optimizer: bool = True  # AdamW's moments live on between rounds; false = fresh each round


@dataclass(frozen=True)
class LocalState:
    """round: the next one. seed: from which every client draws the same initial tree."""

    round: int
    seed: int


@phase(receives=["seed", "lr"], keeps=["w", "optimizer"], sends=["n", "loss", "examples"])
def train_alone(client: Client, got: Body, cfg: LocalConfig) -> Body:
    """One round of training on the client's own data; the model stays with the client."""
    w = client.state.get("w") or client.model.trainable(got["seed"])
    kept = client.state.get("optimizer") if cfg.persist_optimizer and cfg.optimizer == "adamw" else None
    w, done = solve(
        cfg, client.loss, w, cfg.batches(client), got["lr"], state=kept, decayed=client.model.decayed
    )
    client.state["w"] = w
    client.state["optimizer"] = done.optimizer if cfg.persist_optimizer else {}
    return {"n": client.n, "loss": done.loss, "examples": done.examples}


def local_server(cfg: LocalConfig, state: LocalState, clients: Sequence[int]) -> Server:
    """Tell every client to go on training; nothing is averaged."""
    for t in range(state.round, cfg.rounds):
        replies = yield Ask("train_alone", clients, {"seed": state.seed, "lr": cfg.rate(t)})
        loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(r.body["n"] for r in replies)
        state = replace(state, round=t + 1)
        yield RoundEnd(t, state, {"train_loss": loss})


def local_predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The client's own model."""
    return lambda batch: client.model.apply(client.state["w"], batch)


# --- one model per task (centralised, public-only), or one for all ----------------------------------------


@dataclass(frozen=True)
class CentralizedConfig(LocalTraining):
    """Training where the data lie together."""

    scope: Literal["task", "pooled"] = "task"  # one model per task, or one for everything
    budget: Literal["matched_epochs", "matched_steps"] = "matched_epochs"  # steps: those of an average client


@dataclass(frozen=True)
class PublicConfig(LocalTraining):
    """Training on the public sets, one expert per task."""


@dataclass(frozen=True)
class ModelsState:
    """round: the next one. models: data name ("train" or a task's) -> tree. optimizers: likewise. order: the
    data name that serves each task index. steps: optimiser steps per round where they are matched, else 0."""

    round: int
    models: dict[str, Tree]
    optimizers: dict[str, Tree]
    order: tuple[str, ...]
    steps: int


@phase(receives=["w", "optimizer", "rows", "lr", "steps"], sends=["w", "optimizer", "loss", "examples"])
def train_rows(client: Client, got: Body, cfg: LocalTraining) -> Body:
    """Train one model on the named part of the participant's data; the optimiser goes on where it was."""
    rows = client.data[got["rows"]]
    steps = got["steps"] or cfg.local_steps
    batches: Iterable[Any] = (
        rows.batches(cfg.batch_size, steps=steps, generator=client.generator)
        if steps
        else rows.batches(cfg.batch_size, epochs=cfg.local_epochs, generator=client.generator)
    )
    kept = got["optimizer"] if cfg.optimizer == "adamw" else None
    w, done = solve(cfg, client.loss, got["w"], batches, got["lr"], state=kept, decayed=client.model.decayed)
    return {"w": w, "optimizer": done.optimizer, "loss": done.loss, "examples": done.examples}


def _models_server(where: int, cfg: LocalTraining, state: ModelsState) -> Server:
    for t in range(state.round, cfg.rounds):
        models, optimizers, losses = {}, {}, {}
        for name, w in state.models.items():
            body = {
                "w": w,
                "optimizer": state.optimizers[name],
                "rows": name,
                "lr": cfg.rate(t),
                "steps": state.steps,
            }
            (reply,) = yield Ask("train_rows", [where], body)
            models[name], optimizers[name] = reply.body["w"], reply.body["optimizer"]
            losses[name] = reply.body["loss"]
        state = replace(state, round=t + 1, models=models, optimizers=optimizers)
        yield RoundEnd(t, state, {"train_loss": sum(losses.values()) / len(losses), "train_losses": losses})


def _models_state(
    names: Sequence[str], order: Sequence[str], steps: int, model: Model, seed: int
) -> ModelsState:
    return ModelsState(
        0, {name: model.trainable(seed) for name in names}, {name: {} for name in names}, tuple(order), steps
    )


def centralized_start(cfg: CentralizedConfig, model: Model, facts: Facts) -> ModelsState:
    """All models from the same initial tree."""
    names = (
        ["train"] if cfg.scope == "pooled" else [task for task in facts.tasks if task in facts.trained_tasks]
    )
    order = [task if task in names else "train" for task in facts.tasks]
    steps = 0
    if cfg.budget == "matched_steps":  # optimiser steps of an average client in one round
        per_client = [-(-n // cfg.batch_size) * cfg.local_epochs for n in facts.sizes]
        steps = cfg.local_steps or max(1, round(sum(per_client) / len(per_client)))
    return _models_state(names, order, steps, model, facts.seed)


def centralized_server(cfg: CentralizedConfig, state: ModelsState, clients: Sequence[int]) -> Server:
    """Train every model for one round's budget on the pooled training data."""
    yield from _models_server(POOLED, cfg, state)


def public_start(cfg: PublicConfig, model: Model, facts: Facts) -> ModelsState:
    """One expert per public task, all from the same initial tree."""
    return _models_state(facts.tasks, facts.tasks, 0, model, facts.seed)


def public_server(cfg: PublicConfig, state: ModelsState, clients: Sequence[int]) -> Server:
    """Train every expert for one round's budget on its public set."""
    yield from _models_server(PUBLIC, cfg, state)


def serve_models(cfg: Any, state: ModelsState) -> Body:
    """All models and which of them serves which task index."""
    return {"models": state.models, "order": list(state.order)}


def by_task(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """Each example by the model of its true task (an oracle choice); where there is one model, by that.

    A mixed batch goes through the models in parts and drops what only a whole batch has, such as the past of
    a text that is being written."""
    model: Model = client.model
    models, order = got["models"], got["order"]

    def predict(batch: Batch) -> Outputs:
        names = [order[task] for task in batch["task"].tolist()] if len(models) > 1 else list(models)
        if len(set(names)) == 1:
            return model.apply(models[names[0]], batch)
        rows = {name: value for name, value in batch.items() if getattr(value, "ndim", 0)}
        parts, places = [], []
        for name in dict.fromkeys(names):
            mine = torch.tensor([k for k, other in enumerate(names) if other == name])
            part = {key: value[mine.to(value.device)] for key, value in rows.items()}
            parts.append(model.apply(models[name], part).logits)
            places.append(mine)
        logits = torch.cat(parts)  # (b, C), of a language model (b, T, V), model by model
        return Outputs(logits[torch.cat(places).argsort().to(logits.device)])

    return predict


# --- untrained ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UntrainedConfig(LocalTraining):
    """No training: one round without asks."""

    @property
    def total_rounds(self) -> int:
        """One evaluation of the frozen model."""
        return 1


def untrained_server(cfg: UntrainedConfig, state: LocalState, clients: Sequence[int]) -> Server:
    """Ask nobody; the frozen model is what is scored."""
    if state.round == 0:
        yield RoundEnd(0, replace(state, round=1))


def untrained_predictor(client: Client, got: Body, cfg: Any) -> Callable[[Batch], Outputs]:
    """The frozen model without any adapter; where nothing is frozen, the model as training would start it."""
    fresh = client.model.trainable(got["seed"]) if isinstance(client.model, FeatureModel) else {}
    return lambda batch: client.model.apply(fresh, batch)


def _seed_only(cfg: Any, model: Model, facts: Facts) -> LocalState:
    return LocalState(0, facts.seed)


def _nothing(cfg: Any, state: Any) -> Body:
    return {}


def _serve_seed(cfg: Any, state: LocalState) -> Body:
    return {"seed": state.seed}


LOCAL_ONLY = Method(
    "local_only", "reference", LocalConfig, LocalState, _seed_only, (train_alone,), local_server, _nothing,
    local_predictor, summary="every client trains alone on its own data",
)  # fmt: skip
CENTRALIZED = Method(
    "centralized", "reference", CentralizedConfig, ModelsState, centralized_start, (train_rows,),
    centralized_server, serve_models, by_task, needs=(POOLED,),
    summary="all clients' data together; one model per task (chosen by the true task) or one pooled model",
)  # fmt: skip
PUBLIC_ONLY = Method(
    "public_only", "reference", PublicConfig, ModelsState, public_start, (train_rows,), public_server,
    serve_models, by_task, needs=(PUBLIC,),
    summary="one expert per task trained on the server's public set alone (chosen by the true task)",
)  # fmt: skip
UNTRAINED = Method(
    "untrained", "reference", UntrainedConfig, LocalState, _seed_only, (), untrained_server, _serve_seed,
    untrained_predictor, summary="the model as it is before any training",
)  # fmt: skip
