"""FedSEE's geometry and routing diagnostics: do clients' adapters lie between the tasks' experts?

Source: FedSEE (2026), Appendix B.2 (Figures 6 to 8, Tables 5 and 6); spec section 10. One expert per task is
trained on that task's pooled rows, one adapter per client on its own rows, all from zero over the same frozen
down-projection A and for the same number of steps. Then: where do the adapters lie relative to the experts,
what does routing add to fixed weights, and what does the target of the KL term do to the routers?
Rounds: 0 initial training, 1 experts, 2 adapters, 3 geometry, 4 routing, 5 calibration.

Deviations and choices where the paper is silent:
A37 the averaged initial update is absorbed as the frozen pair (A, mean B), present in every later pass:
exactly W0 + s mean(B) A. "mean_of_products" takes s mean(B_i A_i) instead, as one pair of rank N r. After
round 0 nothing is dropped out: dropout would hit the absorbed pair too, and add noise to the distances.
The shared schedule is AdamW with a rate that falls linearly to 0 over the steps, fresh for each block.
The true mixture is that of a client's training rows; the clients count them, since the server knows none.
Routing (Table 6) trains without a KL term; for pure clients learned and true are shown, not judged. The two
routers of the calibration start alike and see the same batches; the weight of their KL term is unpublished.
Mean usage is over validation tokens and projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedprism.methods import block_geometry as geometry
from fedprism.models.interface import Bank, Batch, Model, Outputs
from fedprism.protocol import POOLED, Ask, Body, Client, Facts, Method, RoundEnd, Server, phase
from fedprism.training import Count, CountOrZero, Loss, NonNegative, Positive, adamw
from fedprism.trees import Tree, mean, norm, sub


@dataclass(frozen=True)
class Config:
    """Settings of the diagnostics; the rates are AdamW's."""

    init_epochs: Count = 1  # passes over a client's data in the initial round, when init_steps is 0
    init_steps: CountOrZero = 0  # optimiser steps of the initial round; 0 = init_epochs decide
    absorb: Literal["mean_of_factors", "mean_of_products"] = "mean_of_factors"  # A37
    steps: Count = 240  # optimiser steps of every expert and every adapter
    batch_size: Count = 16  # examples per step
    lr: Positive = 5e-3  # rate of the first step
    schedule: Literal["linear", "constant"] = "linear"  # rate over the steps: down to 0, or the same
    weight_decay: NonNegative = 0.01
    clip: NonNegative = 1.0  # largest joint gradient norm; 0 = no clipping
    projections: Literal["value", "query", "all"] = "value"  # blocks whose geometry is measured
    router_steps: Count = 80  # optimiser steps of every router
    router_lr_scale: Positive = 10.0  # rate of routers over lr
    kl_weight: NonNegative = 0.1  # of KL(target | mean usage) in the calibration round

    @property
    def total_rounds(self) -> int:
        """Initial training, experts, adapters, geometry, routing, calibration."""
        return 6


@dataclass(frozen=True)
class State:
    """round: the next one. clients: ids in order. tasks, held: names of the M tasks that clients hold, and
    their indices in the data. n_tasks: indices the data can have. layers: names of the measured blocks.
    A: shared down-projections. blank: zero up-projections, where every block starts. pair: what the initial
    round left, empty before its end. experts, adapters: trained blocks, by expert and by client. mixtures:
    (N, M) realised."""

    round: int
    clients: tuple[int, ...]
    tasks: tuple[str, ...]
    held: tuple[int, ...]
    n_tasks: int
    layers: tuple[str, ...]
    A: Tree
    blank: Tree
    pair: Tree = field(default_factory=dict)
    experts: dict[int, Tree] = field(default_factory=dict)
    adapters: dict[int, Tree] = field(default_factory=dict)
    mixtures: Tensor | None = None


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """A Kaiming uniform from the run seed, B zero. Raises ValueError for a single task or no such blocks."""
    held = tuple(k for k, task in enumerate(facts.tasks) if task in facts.trained_tasks)
    if len(held) < 2:
        raise ValueError(f"fedsee_geometry: clients hold {len(held)} tasks, needs 2 or more; name more tasks")
    names = model.blocks["lora_B"]
    layers = tuple(n for n in names if cfg.projections == "all" or n.endswith(f".{cfg.projections}"))
    if not layers:
        raise ValueError(
            f"fedsee_geometry: got no projection '{cfg.projections}' among {list(names)[:3]}, needs one; set "
            "method.fedsee_geometry.projections = 'all'"
        )
    A, B = model.init("lora_A", facts.seed), model.init("lora_B", facts.seed)
    tasks = tuple(facts.tasks[k] for k in held)
    return State(0, facts.clients, tasks, held, len(facts.tasks), layers, A, B)


def fit(
    cfg: Config, loss: Loss, first: Tree, batches: Iterable[Any], lr: float, steps: int
) -> tuple[Tree, float, int]:
    """AdamW over `steps` batches with the shared schedule: step k of K has the rate lr (1 - k / K), or lr.

    Returns the final tree, the mean loss over the steps and the number of examples seen."""
    w, optimizer, total, examples = first, None, 0.0, 0
    for k, batch in enumerate(batches):
        rate = lr * (1 - k / steps) if cfg.schedule == "linear" else lr
        w, done = adamw(
            loss, w, [batch], rate, weight_decay=cfg.weight_decay, clip=cfg.clip or None, state=optimizer
        )
        optimizer, total, examples = done.optimizer, total + done.loss, examples + done.examples
    return w, total / steps, examples


@phase(receives=["A", "B"], sends=["A", "B", "loss", "examples"])
def initialize(client: Client, got: Body, cfg: Config) -> Body:
    """Initial round: both factors trained on the task loss, alone, at a constant rate and with dropout."""
    epochs = None if cfg.init_steps else cfg.init_epochs
    batches = client.batches(cfg.batch_size, epochs=epochs, steps=cfg.init_steps or None)
    w, done = adamw(client.loss, {**got["A"], **got["B"]}, batches, cfg.lr, weight_decay=cfg.weight_decay,
                    clip=cfg.clip or None)  # fmt: skip
    parts = {block: {name: w[name] for name in got[block]} for block in ("A", "B")}
    return {**parts, "loss": done.loss, "examples": done.examples}


@phase(receives=["A", "pair", "B", "rows"], sends=["B", "loss", "examples"])
def train_block(client: Client, got: Body, cfg: Config) -> Body:
    """One block B over the fixed A on the named rows of the participant, for exactly `steps` steps."""

    def loss(tree: Tree, batch: Batch) -> Tensor:
        bank = Bank(got["A"], {0: tree}, weights=torch.ones(1))
        out = client.model.apply(got["pair"], batch, bank=bank)
        value: Tensor = client.model.per_example_loss(out, batch).mean()
        return value

    rows = client.data[got["rows"]]
    batches = rows.batches(cfg.batch_size, steps=cfg.steps, generator=client.generator)
    B, value, examples = fit(cfg, loss, got["B"], batches, cfg.lr, cfg.steps)
    return {"B": B, "loss": value, "examples": examples}


@phase(receives=["n_tasks"], sends=["counts"])
def composition(client: Client, got: Body, cfg: Config) -> Body:
    """Training rows of each task, (T,) int64: for comparison alone; methods that serve clients do without."""
    return {"counts": torch.bincount(client.data["train"].columns["task"], minlength=got["n_tasks"])}


def train_router(client: Client, got: Body, cfg: Config, target: Tensor | None) -> tuple[Tree, int]:
    """A fresh router over the frozen experts on cross-entropy + kl_weight KL(target | batch usage).

    target: (M,) with sum 1, or None for cross-entropy alone. Returns the router and the examples seen."""
    model = client.model
    seed = int(torch.randint(2**62, (1,), generator=client.generator))
    first = model.init("router", seed, n_experts=len(got["experts"]))

    def loss(tree: Tree, batch: Batch) -> Tensor:
        out = model.apply(got["pair"], batch, bank=Bank(got["A"], got["experts"], tree))
        value: Tensor = model.per_example_loss(out, batch).mean()
        if target is None:
            return value
        seen = target > 0
        usage = out.usage.double().clamp_min(1e-8)[:, seen]  # (projections, tasks of the target)
        kl: Tensor = (target[seen] * (target[seen].log() - usage.log())).sum(1).mean()
        return value + cfg.kl_weight * kl.to(value.dtype)

    batches = client.batches(cfg.batch_size, steps=cfg.router_steps)
    router, _, examples = fit(cfg, loss, first, batches, cfg.lr * cfg.router_lr_scale, cfg.router_steps)
    return router, examples


@torch.no_grad()
def validation_score(client: Client, got: Body, cfg: Config, bank: Bank) -> tuple[float, Tensor]:
    """Mean validation loss in nats, and (P, M) mean usage over validation tokens (empty without router)."""
    rows = client.data["validation"]
    loss, usage, tokens = 0.0, torch.zeros(0, dtype=torch.float64), 0.0
    for batch in rows.batches(cfg.batch_size):
        out = client.model.apply(got["pair"], batch, bank=bank)
        loss += float(client.model.per_example_loss(out, batch).double().sum())
        if out.usage_sum is not None and out.tokens is not None:
            sums = out.usage_sum.double().sum(1)
            usage, tokens = (usage + sums if usage.numel() else sums), tokens + float(out.tokens.sum())
    return loss / len(rows), usage / max(tokens, 1.0)


@phase(receives=["A", "pair", "experts", "mixture"], keeps=["router"],
       sends=["uniform", "true", "learned", "examples"])  # fmt: skip
def route(client: Client, got: Body, cfg: Config) -> Body:
    """Validation cross-entropy of fixed uniform weights, of the client's mixture, and of a trained router."""
    M = len(got["experts"])
    fixed = {"uniform": torch.full((M,), 1.0 / M), "true": got["mixture"].float()}
    banks = {name: Bank(got["A"], got["experts"], weights=weights) for name, weights in fixed.items()}
    router, examples = train_router(client, got, cfg, None)
    client.state["router"] = router
    banks["learned"] = Bank(got["A"], got["experts"], router)
    scores = {name: validation_score(client, got, cfg, bank)[0] for name, bank in banks.items()}
    return {**scores, "examples": examples}


@phase(receives=["A", "pair", "experts", "target"], keeps=["router"],
       sends=["cross_entropy", "usage", "examples"])  # fmt: skip
def calibrate(client: Client, got: Body, cfg: Config) -> Body:
    """Validation cross-entropy and usage (P, M) of a router trained towards the target (M,)."""
    router, examples = train_router(client, got, cfg, got["target"])
    value, usage = validation_score(client, got, cfg, Bank(got["A"], got["experts"], router))
    return {"cross_entropy": value, "usage": usage, "examples": examples}


def absorbed(cfg: Config, A: Tree, trained: Sequence[Mapping[str, Tree]]) -> Tree:
    """The frozen pair that stands for the averaged initial update (A37).

    A: averaged down-projections. trained: per client its trees "A" and "B". "mean_of_products" stacks the
    clients' pairs: their up-projections side by side over N, so that the product is mean(B_i A_i)."""
    B = mean([one["B"] for one in trained])
    if cfg.absorb == "mean_of_factors" or not A:
        return {**A, **B}
    down = {name: torch.cat([one["A"][name] for one in trained]) for name in A}  # (N r, d_in)
    up = {name: torch.cat([one["B"][name] for one in trained], 1) / len(trained) for name in B}
    return {**down, **up}


def _stacked(state: State, blocks: Mapping[int, Tree]) -> Tensor:
    """(L, K, d) measured blocks of K experts or clients, in the order of their keys."""
    order = sorted(blocks)
    return torch.stack([torch.stack([blocks[k][name].flatten() for k in order]) for name in state.layers])


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """The six rounds; the run can stop and go on after each of them."""
    if state.round == 0:
        replies = yield Ask("initialize", clients, {"A": state.A, "B": state.blank})
        A = mean([r.body["A"] for r in replies])
        drift = [norm(sub(r.body["A"], A)) / max(norm(A), 1e-30) for r in replies]
        state = replace(state, round=1, A=A, pair=absorbed(cfg, A, [r.body for r in replies]))
        yield RoundEnd(0, state, {"train_losses": [r.body["loss"] for r in replies], "frame_drift": drift})
    body: Body = {"A": state.A, "pair": state.pair, "B": state.blank}
    if state.round == 1:
        experts, losses = {}, []
        for m, task in enumerate(state.tasks):
            (reply,) = yield Ask("train_block", [POOLED], {**body, "rows": task})
            experts[m] = reply.body["B"]
            losses.append(reply.body["loss"])
        state = replace(state, round=2, experts=experts)
        yield RoundEnd(1, state, {"train_losses": losses})
    if state.round == 2:
        replies = yield Ask("train_block", clients, {**body, "rows": "train"})
        state = replace(state, round=3, adapters={r.client: r.body["B"] for r in replies})
        yield RoundEnd(2, state, {"train_losses": [r.body["loss"] for r in replies]})
    if state.round == 3:
        replies = yield Ask("composition", clients, {"n_tasks": state.n_tasks}, diagnostic=True)
        counts = torch.stack([r.body["counts"] for r in replies])[:, list(state.held)].double()
        mixtures = counts / counts.sum(1, keepdim=True)
        found = geometry.measure(_stacked(state, state.experts), _stacked(state, state.adapters), mixtures)
        names = {"tasks": state.tasks, "layers": [name.partition(".")[2] for name in state.layers]}
        state = replace(state, round=4, mixtures=mixtures)
        yield RoundEnd(3, state, {**names, **geometry.report(found, mixtures)})
    alpha: Tensor = state.mixtures  # type: ignore[assignment]  # set by round 3
    kinds = geometry.client_kinds(alpha)
    body = {"A": state.A, "pair": state.pair, "experts": state.experts}
    if state.round == 4:
        mine: dict[int, Body] = {i: {"mixture": row} for i, row in zip(state.clients, alpha, strict=True)}
        replies = yield Ask("route", clients, body, each=mine)
        values = {name: [r.body[name] for r in replies] for name in ("uniform", "true", "learned")}
        means = {name: geometry.by_kind(losses, kinds) for name, losses in values.items()}
        ordered = {f"{kind}: learned <= true <= uniform":
                   means["learned"][kind] <= means["true"][kind] <= means["uniform"][kind]
                   for kind in ("edge", "interior") if kind in kinds}  # fmt: skip
        state = replace(state, round=5)
        yield RoundEnd(4, state, {"cross_entropy": values, "means": means, "holds": ordered})
    if state.round == 5:
        log: dict[str, Any] = {}
        for target in ("uniform", "mixture"):
            wanted = alpha if target == "mixture" else torch.full_like(alpha, 1.0 / alpha.shape[1])
            mine = {i: {"target": row} for i, row in zip(state.clients, wanted, strict=True)}
            # diagnostic: asked twice in a round, both routers draw the same start and the same batches
            replies = yield Ask("calibrate", clients, body, each=mine, diagnostic=True)
            usage = torch.stack([r.body["usage"] for r in replies])
            log[target] = geometry.calibration(usage, [r.body["cross_entropy"] for r in replies], alpha)
        closer = log["mixture"]["mismatch"]["all"] < log["uniform"]["mismatch"]["all"]
        state = replace(state, round=6)
        yield RoundEnd(5, state, {**log, "holds": {"mixture target closer than uniform": closer}})


def serve(cfg: Config, state: State) -> Body:
    """The absorbed pair and the experts."""
    return {"A": state.A, "pair": state.pair, "experts": state.experts}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """The experts under the client's learned router; before that exists, the backbone with the pair alone."""
    router = client.state.get("router")
    bank = Bank(got["A"], got["experts"], router) if router else None
    return lambda batch: client.model.apply(got["pair"], batch, bank=bank)


METHOD = Method(
    "fedsee_geometry", "FedSEE 2026", Config, State, start,
    (initialize, train_block, composition, route, calibrate), server, serve, predictor, needs=(POOLED,),
    summary="diagnostics: where clients' adapters lie between the tasks' experts, and what routing adds",
)  # fmt: skip
