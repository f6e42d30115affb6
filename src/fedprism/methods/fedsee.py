"""FedSEE: experts recovered from mixed uploads, routing calibrated to each client's mixture.

Source: FedSEE (2026), Algorithm 1 and Appendix C. The server sends M experts (LoRA up-projections B_m over
one shared, frozen down-projection A), clients train the few that carry their mixture together with an
always-on pair and a router, and the server recovers each task's expert as a convex combination of the
uploads, guided by its small task-labelled public sets.

Deviations and choices where the paper is silent (numbers as in docs/fedsee.md):
A1 the coefficient 0.01 is a ridge; A2 identities, not positions, carry Omega over a changed pool; A3
extraction runs the recovered block alone on the base with the averaged pair merged; A9 nothing of the initial
round is absorbed; A23 the evaluated model is the personal one right after local training; A26
`match_total_epochs` takes the initial epochs off the rounds; A35 `align_init = "lstsq"` moves first uploads
to the frame of the averaged A. `hull` other than "convex" is ours. Preset "paper" has the published values.
The server's public sets live with the participant PUBLIC, whose phase `extract` does the server's training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedprism.methods.beyond_hull import DESCENTS
from fedprism.methods.expert_extraction import PublicLosses, smooth_contributions, warm_start
from fedprism.methods.expert_extraction import extract as run_extraction
from fedprism.methods.lora_frames import accuracies, align, average_rows
from fedprism.methods.simplex import SERVER, client_mass
from fedprism.models.interface import Bank, Batch, Model, Outputs
from fedprism.protocol import (
    PUBLIC,
    Ask,
    Body,
    Client,
    Facts,
    Method,
    RoundEnd,
    Server,
    phase,
    sample_clients,
)
from fedprism.training import Count, CountOrZero, FederatedTraining, Fraction, NonNegative, Positive, adamw
from fedprism.trees import Tree, copy, flatten, join, mean, norm, split, sub, unflatten, zeros

INITIAL = -1  # what a client's initial upload is an expert of: nothing yet
Group = dict[int, Tree]  # expert index -> tree with the names of blocks["lora_B"]


@dataclass(frozen=True)
class Config(FederatedTraining):
    """Settings of FedSEE beyond local training (spec sections 6, 9 and 12)."""

    optimizer: Literal["adamw"] = "adamw"
    # initial round
    init: Literal["paper", "federated", "fixed"] = "federated"  # A trained alone; averaged per epoch; frozen
    init_epochs: Count = 5  # E_init
    init_lr_A_scale: NonNegative = 1.0  # rate of A in the initial round over lr (A36)
    align_init: Literal["none", "lstsq"] = "lstsq"  # A35
    average_A: Literal["uniform", "samples"] = "uniform"  # A8
    head_init: Literal["frozen", "train_init"] = "frozen"  # A12
    match_total_epochs: bool = True  # the initial epochs count as local epochs of the whole run (A26)
    frame_rows: CountOrZero = 32  # validation rows per client that measure what the change of frame costs
    # assignment
    usable: CountOrZero = 0  # U: experts a client may use; 0 = all
    active: CountOrZero = 1  # L: experts a client trains; 0 = all
    tau: Fraction = 0.05  # smallest share of a trained expert in the client's mixture
    empty_active: Literal["top1", "none"] = "top1"  # A7
    smoothing: Fraction = 0.9  # lambda, the weight of the new contributions
    # client update
    shared_pair: bool = True
    kl_weight: NonNegative = 1e-3  # beta_KL
    calibration: Literal["mixture", "uniform", "none"] = "mixture"
    router_lr_scale: Positive = 10.0  # eta_r / eta_B
    router_init: Literal["linear", "zero"] = "linear"  # A15
    router_average: Literal["uniform", "users"] = "uniform"  # A16
    # extraction
    experts: CountOrZero = 0  # M: the first so many tasks get an expert; 0 = all with a public set (A31)
    extraction: Literal["balanced", "independent"] = "balanced"
    extract_steps: CountOrZero = 50
    extract_lr: Positive = 0.1
    block_clip: NonNegative = 1.0  # 0 = off
    row_clip: NonNegative = 1.0  # 0 = off
    reg: Literal["ridge", "entropy", "none"] = "ridge"
    reg_strength: NonNegative = 0.01  # rho
    sinkhorn_iterations: Count = 20
    sinkhorn_every: Count = 5
    public_batch: CountOrZero = 64  # public examples per step and task; 0 = the whole set
    hull: Literal["convex", "affine", "auto", "posterior"] = "convex"  # where experts may lie (beyond_hull)
    hull_holdout: Fraction = 0.2  # share of the public rows that chooses then; 0 = those that are fitted
    hull_steps: Count = 50  # of each descent outside the convex hull, at rate
    hull_lr: Positive = 0.1
    keep_previous: bool = False  # previous experts as server-owned entries without a column constraint (A5)
    table_rows: CountOrZero = 32  # public examples per cell of the table of public losses; 0 = no table
    # evaluation
    evaluate: Literal["personal", "broadcast"] = "personal"  # A23

    @property
    def update_rounds(self) -> int:
        """Rounds after the initial one; with `match_total_epochs` the initial epochs are taken off."""
        if not self.match_total_epochs:
            return self.rounds
        left = self.rounds * self.local_epochs - self.init_epochs
        if self.local_steps or left < self.local_epochs or left % self.local_epochs:
            raise ValueError(
                f"method.fedsee: {self.rounds} rounds x {self.local_epochs} epochs less {self.init_epochs} "
                "initial epochs leave no whole number of rounds, needs at least one; change init_epochs, "
                "rounds or local_epochs (local_steps = 0), or set match_total_epochs = false"
            )
        return left // self.local_epochs

    @property
    def total_rounds(self) -> int:
        """The initial round and the update rounds."""
        return 1 + self.update_rounds


@dataclass(frozen=True)
class State:
    """round: the next one; 0 is the initial round. A: shared down-projections. B: start of the initial
    uploads. head: trained head, empty when frozen. experts: recovered, to be sent next. sent: experts of the
    last update round. pair, router: averaged; empty before the first average. keys: (client, expert) of each
    pool entry. omega: (M, P) weights of the last extraction. C: (M, N) smoothed contributions. idle: rounds
    in a row that an expert had no trainer. tasks: expert m recovers tasks[m]. clients, seed: the run's."""

    round: int
    tasks: tuple[str, ...]
    clients: tuple[int, ...]
    seed: int
    A: Tree
    B: Tree
    head: Tree
    experts: Group = field(default_factory=dict)
    sent: Group = field(default_factory=dict)
    pair: Tree = field(default_factory=dict)
    router: Tree = field(default_factory=dict)
    keys: tuple[tuple[int, int], ...] = ()
    omega: Tensor | None = None
    C: Tensor | None = None
    idle: tuple[int, ...] = ()


def start(cfg: Config, model: Model, facts: Facts) -> State:
    """A Kaiming uniform, B zero, both from the run seed; the head only where it is trained."""
    M = cfg.experts or len(facts.tasks)
    if cfg.update_rounds < 1 or not 1 <= M <= len(facts.tasks):
        raise ValueError(
            f"fedsee: got {M} experts, {len(facts.tasks)} public sets; needs 1 to as many as sets"
        )
    if cfg.hull != "convex" and min(facts.public_sizes[:M], default=2) < 2:
        raise ValueError("fedsee: a public set of one row, hull needs 2 or more of each; set hull = 'convex'")
    head = model.init("head", facts.seed) if cfg.head_init == "train_init" else {}
    A, B = model.init("lora_A", facts.seed), model.init("lora_B", facts.seed)
    return State(0, facts.tasks[:M], facts.clients, facts.seed, A, B, head, idle=(0,) * M)


@phase(receives=["A", "B", "head", "epochs", "lr"], keeps=["adapter"],
       sends=["A", "B", "head", "n", "loss", "examples"])  # fmt: skip
def initialize(client: Client, got: Body, cfg: Config) -> Body:
    """Initial round: both factors trained on the task loss alone."""
    A, B, head = got["A"], got["B"], got["head"]
    fixed = A if cfg.init == "fixed" else {}
    trained = {**B, **head, **({} if fixed else A)}
    w, done = adamw(
        lambda tree, batch: client.loss({**fixed, **tree}, batch),
        trained, client.batches(cfg.batch_size, epochs=got["epochs"]),
        lambda name: got["lr"] * (cfg.init_lr_A_scale if name in A else 1.0),
        weight_decay=cfg.weight_decay, clip=cfg.clip or None,
    )  # fmt: skip
    w = {**copy(fixed), **w}
    client.state["adapter"] = w
    parts = {block: {name: w[name] for name in got[block]} for block in ("A", "B", "head")}
    return {**parts, "n": client.n, "loss": done.loss, "examples": done.examples}


@phase(receives=["A", "head", "aligned", "rows"], keeps=["adapter"], sends=["own", "raw", "aligned"])
def frame_cost(client: Client, got: Body, cfg: Config) -> Body:
    """Validation accuracy of the own block under its own A, under the shared A, and aligned to the shared."""
    mine = client.state["adapter"]
    raw = {**mine, **got["A"], **got["head"]}
    forms = {"own": mine, "raw": raw, "aligned": {**raw, **got["aligned"]}}
    rows = client.data["validation"]
    rows = rows.select(torch.arange(min(len(rows), got["rows"])))
    return accuracies(client.model, forms, rows, cfg.batch_size)


@phase(receives=["A", "head", "experts", "pair", "router", "n_experts", "usable", "active", "target", "lr"],
       keeps=["active", "pair", "router", "usable"],
       sends=["blocks", "pair", "router", "n", "loss", "kl", "examples"])  # fmt: skip
def update(client: Client, got: Body, cfg: Config) -> Body:
    """ClientUpdate (spec 6.1): active blocks, pair and router on cross-entropy + beta KL(target | usage)."""
    model, M, pair = client.model, got["n_experts"], got["pair"]
    seeds = torch.randint(2**62, (3,), generator=client.generator).tolist()
    if cfg.shared_pair and not pair:  # first round: everyone starts from its own pair and router
        pair = {**model.init("lora_A", seeds[0]), **model.init("lora_B", seeds[1])}
    router = got["router"] or model.init("router", seeds[2], n_experts=M)
    if cfg.router_init == "zero" and not got["router"]:
        router = zeros(router)
    experts: Group = got["experts"]
    active = [str(m) for m in got["active"]]
    parts = {"pair": pair, "router": router, **{m: experts[int(m)] for m in active}}
    target = got["target"]  # (M,) sums to 1
    seen = target > 0
    target_entropy = (target[seen] * target[seen].log()).sum()
    divergences: list[Tensor] = []

    def loss(tree: Tree, batch: Batch) -> Tensor:
        now = split(tree, parts)
        bank = Bank(got["A"], {**experts, **{int(m): now[m] for m in active}}, now["router"])
        out = model.apply({**now["pair"], **got["head"]}, batch, bank=bank, generator=client.generator)
        task_loss: Tensor = model.per_example_loss(out, batch).mean()
        if cfg.calibration == "none":
            return task_loss
        usage = out.usage.double().clamp_min(1e-8)  # (projections, M)
        kl: Tensor = (target_entropy - (usage[:, seen].log() * target[seen]).sum(1)).mean()
        divergences.append(kl.detach())
        return task_loss + cfg.kl_weight * kl.to(task_loss.dtype)

    def rate(name: str) -> float:
        return float(got["lr"]) * (cfg.router_lr_scale if name.startswith("router:") else 1.0)

    w, done = adamw(
        loss, join(parts), cfg.batches(client), rate, weight_decay=cfg.weight_decay, clip=cfg.clip or None
    )
    new = split(w, parts)
    blocks = {int(m): new[m] for m in active}
    client.state.pop("adapter", None)
    client.state.update(active=blocks, pair=new["pair"], router=new["router"], usable=list(got["usable"]))
    kl = float(torch.stack(divergences).mean()) if divergences else 0.0
    return {"blocks": blocks, "pair": new["pair"], "router": new["router"], "n": client.n,
            "loss": done.loss, "kl": kl, "examples": done.examples}  # fmt: skip


@phase(receives=["A", "head", "pair", "like", "pool", "keys", "omega", "tasks"],
       sends=["experts", "omega", "losses", "table", "residual", "norms", "examples", "hull"])  # fmt: skip
def extract(client: Client, got: Body, cfg: Config) -> Body:
    """Extract (spec 6.3) on the public sets: the block alone on base plus pair, no dropout, no router."""
    rows = [client.data[task] for task in got["tasks"]]
    losses = PublicLosses(
        client.model, {**got["pair"], **got["head"]}, got["A"], got["like"], rows, size=cfg.public_batch,
        chunk=cfg.batch_size, steps=cfg.extract_steps + DESCENTS[cfg.hull] * cfg.hull_steps,
        generator=client.generator, hold_out=0.0 if cfg.hull == "convex" else cfg.hull_holdout,
    )  # fmt: skip
    result = run_extraction(
        losses.gradient, got["pool"], [owner for owner, _ in got["keys"]], got["omega"],
        steps=cfg.extract_steps, lr=cfg.extract_lr, block_clip=cfg.block_clip or None,
        row_clip=cfg.row_clip or None, reg=cfg.reg, reg_strength=cfg.reg_strength,
        projection=cfg.extraction, every=cfg.sinkhorn_every, iterations=cfg.sinkhorn_iterations,
        hull=cfg.hull, held_out=losses.held_out, sizes=[len(part) for part in losses.fit],
        outside_steps=cfg.hull_steps, outside_lr=cfg.hull_lr,
    )  # fmt: skip
    experts = {m: copy(unflatten(result.experts[m], got["like"])) for m in range(len(rows))}
    table = losses.table(experts, cfg.table_rows) if cfg.table_rows else torch.zeros(0, 0)
    return {"experts": experts, "omega": result.omega, "losses": result.losses, "table": table,
            "residual": result.residual, "norms": (result.gradient_norms, result.row_norms),
            "examples": losses.examples, "hull": result.outside.chosen if result.outside else ()}  # fmt: skip


def assign(column: Tensor, cfg: Config) -> tuple[list[int], Tensor, list[int]]:
    """Assign (spec 6.2), from one client's column of C, (M,): usable experts U, mixture c over them, trained
    experts A. c (M,) is zero outside U and sums to 1. Ties go to the lower index."""
    M = len(column)
    order = sorted(range(M), key=lambda m: (-float(column[m]), m))
    usable = sorted(order[: cfg.usable or M])
    c = torch.zeros(M, dtype=torch.float64)
    c[usable] = column[usable].double()
    c = c / c.sum()
    active = [m for m in order if m in usable and float(c[m]) >= cfg.tau][: cfg.active or M]
    if not active and cfg.empty_active == "top1":
        active = order[:1]
    return usable, c, sorted(active)


def _extract_body(state: State, uploads: Mapping[tuple[int, int], Tree], cfg: Config) -> Body:
    if cfg.keep_previous:
        uploads = {**uploads, **{(SERVER, m): expert for m, expert in state.experts.items()}}
    keys = tuple(sorted(uploads))  # stable identities (A2); equal order whoever replied first
    pool = torch.stack([flatten(uploads[key]) for key in keys])  # (P, D)
    omega = warm_start(keys, len(state.tasks), state.keys, state.omega)
    return {"A": state.A, "head": state.head, "pair": state.pair, "like": uploads[keys[0]], "pool": pool,
            "keys": keys, "omega": omega, "tasks": list(state.tasks)}  # fmt: skip


def _absorb(
    cfg: Config, state: State, asked: Body, got: Body, chosen: Sequence[int]
) -> tuple[State, dict[str, Any]]:
    """State after an extraction and its log: new experts, Omega, smoothed contributions of who took part."""
    keys = asked["keys"]
    new = client_mass(got["omega"], [owner for owner, _ in keys], list(chosen))  # (M, N_t), the raw C*
    if cfg.keep_previous:
        new = new / new.sum(1, keepdim=True)  # the rest of a row is the server's own entry
    C = smooth_contributions(state.C, new, [state.clients.index(i) for i in chosen], cfg.smoothing)
    state = replace(state, round=state.round + 1, experts=got["experts"], keys=keys, omega=got["omega"], C=C)
    log = {
        "contributions": new.tolist(), "smoothed": C.tolist(), "public_losses": got["table"].tolist(),
        "column_residual": got["residual"], "extraction_losses": [row.mean().item() for row in got["losses"]],
        "gradient_norm": got["norms"][0], "row_norm": got["norms"][1], "hull": list(got["hull"]),
        "largest_weight": got["omega"].amax(1).tolist(),
    }  # fmt: skip
    if got["residual"] > 1e-3:
        log["warning"] = f"Sinkhorn: column residual {got['residual']:.1e}; raise sinkhorn_iterations"
    return state, log


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """The initial round, then update rounds; each ends with Extract and smoothing of the contributions."""
    M = len(state.tasks)
    if state.round == 0:
        A, B, head = state.A, state.B, state.head
        federated = cfg.init == "federated"  # A and B averaged every epoch: frames never drift apart
        for epochs in [1] * cfg.init_epochs if federated else [cfg.init_epochs]:
            body = {"A": A, "B": B, "head": head, "epochs": epochs, "lr": cfg.rate(0)}
            replies = yield Ask("initialize", clients, body)
            n = [r.body["n"] for r in replies] if cfg.average_A == "samples" else None
            A, head = (mean([r.body[k] for r in replies], n) for k in ("A", "head"))
            B = mean([r.body["B"] for r in replies], n) if federated else B
        blocks = {r.client: r.body["B"] for r in replies}
        aligned = {r.client: align(r.body["B"], r.body["A"], A) for r in replies}
        size = max(norm(A), 1e-30)
        log: dict[str, Any] = {"train_loss": sum(r.body["loss"] for r in replies) / len(replies)}
        log["frame_drift"] = [norm(sub(r.body["A"], A)) / size for r in replies]
        state = replace(state, A=A, head=head)
        if cfg.frame_rows and A:
            body = {"A": A, "head": head, "rows": cfg.frame_rows}
            moved = {i: {"aligned": aligned[i]} for i in clients}
            replies = yield Ask("frame_cost", clients, body, each=moved, diagnostic=True)
            log["frame_accuracy"] = {k: [r.body[k] for r in replies] for k in ("own", "raw", "aligned")}
        uploads = {(i, INITIAL): (aligned if cfg.align_init == "lstsq" else blocks)[i] for i in clients}
        body = _extract_body(state, uploads, cfg)
        replies = yield Ask("extract", [PUBLIC], body)
        state, more = _absorb(cfg, state, body, replies[0].body, clients)
        yield RoundEnd(0, state, {**log, **more})
    for t in range(state.round, cfg.total_rounds):
        C: Tensor = state.C  # type: ignore[assignment]  # set by the initial round
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        each: dict[int, Body] = {}
        assigned, trained_by = {}, {}
        for i in chosen:
            usable, c, active = assign(C[:, state.clients.index(i)], cfg)
            uniform = torch.zeros_like(c)
            uniform[usable] = 1.0 / len(usable)
            each[i] = {"usable": usable, "active": active, "experts": {m: state.experts[m] for m in usable},
                       "target": c if cfg.calibration == "mixture" else uniform}  # fmt: skip
            assigned[i], trained_by[i] = c.tolist(), active
        body = {"A": state.A, "head": state.head, "pair": state.pair, "router": state.router, "n_experts": M,
                "lr": cfg.rate(t - 1)}  # fmt: skip
        replies = yield Ask("update", chosen, body, each=each)
        idle = tuple(0 if any(m in a for a in trained_by.values()) else state.idle[m] + 1 for m in range(M))
        log = {"train_loss": sum(r.body["loss"] for r in replies) / len(replies),
               "kl": [r.body["kl"] for r in replies], "assigned": [assigned.get(i) for i in clients],
               "active": {str(i): active for i, active in trained_by.items()},
               "untrained_experts": [state.tasks[m] for m in range(M) if idle[m] >= 3]}  # fmt: skip
        pair, router = (mean([r.body[k] for r in replies]) for k in ("pair", "router"))
        if cfg.router_average == "users":
            users = [[k for k, r in enumerate(replies) if m in each[r.client]["usable"]] for m in range(M)]
            router = average_rows([r.body["router"] for r in replies], users)
        state = replace(state, sent=state.experts, pair=pair, router=router, idle=idle)
        uploads = {(r.client, m): block for r in replies for m, block in r.body["blocks"].items()}
        if not uploads:
            raise ValueError(f"fedsee: no client trained an expert in round {t}; lower method.fedsee.tau")
        body = _extract_body(state, uploads, cfg)
        replies = yield Ask("extract", [PUBLIC], body)
        state, more = _absorb(cfg, state, body, replies[0].body, [i for i in chosen if trained_by[i]])
        yield RoundEnd(t, state, {**log, **more})


def serve(cfg: Config, state: State) -> Body:
    """What a client's prediction needs besides its own state: the experts it was sent, or the new ones."""
    experts = state.experts if cfg.evaluate == "broadcast" or not state.sent else state.sent
    return {"A": state.A, "head": state.head, "experts": experts, "pair": state.pair, "router": state.router}


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """The personal model (spec 6.4); after the initial round the client's own adapter."""
    model, mine = client.model, client.state
    if "adapter" in mine and not got["router"]:
        return lambda batch: model.apply({**mine["adapter"], **got["head"]}, batch)
    experts, personal = got["experts"], cfg.evaluate == "personal" and "router" in mine
    if "usable" in mine:
        own = mine["active"] if personal else {}
        experts = {m: own.get(m, experts[m]) for m in mine["usable"]}
    pair, router = (mine["pair"], mine["router"]) if personal else (got["pair"], got["router"])
    bank = Bank(got["A"], experts, router) if router else Bank(
        got["A"], experts, weights=torch.full((len(experts),), 1.0 / len(experts))
    )  # fmt: skip
    return lambda batch: model.apply({**pair, **got["head"]}, batch, bank=bank)


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"init": "paper", "align_init": "none", "match_total_epochs": False, "block_clip": 0.1,
              "row_clip": 0.1, "rounds": 10, "local_epochs": 5, "init_epochs": 5, "public_batch": 64},
}  # fmt: skip

METHOD = Method(
    "fedsee", "FedSEE 2026", Config, State, start, (initialize, frame_cost, update, extract), server, serve,
    predictor, presets=PRESETS, needs=(PUBLIC,),
    summary="experts recovered from mixed uploads with a small public set, routing calibrated to the mixture",
)  # fmt: skip
