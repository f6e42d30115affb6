"""FedSPM: every client a semiparametric mixture, learnt by federated EM, and a router for outside queries.

Algorithm 1 (App. B). Client i mixes C components; component c has class probabilities P_ic(y | x), a private
head on a shared encoder theta, and a feature density exp(gamma_ic + xi_ic . h(x)) relative to a common
baseline, h a second shared encoder nu. A round is two asks: E-step (responsibilities stay with the client,
their totals tau travel), M-step (weighted cross-entropy for theta and heads; the density-ratio surrogate for
gamma, xi and nu). gamma and xi travel as whole tables: a client moves the rows of all clients. A query
without an owner goes to the client of largest posterior, which mixes its components' predictions by features.

*Deviations and choices* (spec 2 to 4, 7).
- Means over examples, not sums; rates follow the round; momentum starts at zero; pi_i = tau_i / n_i.
- C = 1 has no E-step: one ask a round. The monitor J then costs a pass of its own (`monitor_every`).
- J of round t is that of the parameters and totals the round begins with.
- `init = "kmeans"`: first responsibilities from k-means on each client's own inputs. With encoders per
  component its centroids (means of a client's inputs) go to the server, to agree on numbers.
- Equal components would never separate: heads are drawn per client and component, xi per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedprism.methods import density_ratio as dr
from fedprism.methods.component_mixture import Components, agreed_centroids, purity
from fedprism.models.interface import Batch, FeatureModel, Outputs
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
from fedprism.training import (
    Count,
    CountOrZero,
    FederatedTraining,
    Loss,
    NonNegative,
    Solved,
    at_rows,
    decay_rate,
    sgd,
)
from fedprism.trees import Tree, join, mean, split

SHARED = ("theta", "gamma", "xi", "nu")


@dataclass(frozen=True)
class Config(FederatedTraining):
    """Federated EM; the defaults are the published ones (spec 6)."""

    rounds: Count = 200  # communication rounds, >= 1
    local_steps: CountOrZero = 10  # supervised SGD steps per round; 0 = local_epochs decide
    batch_size: Count = 128  # examples per step of either block
    lr: Annotated[float, Ge(1e-9)] = 0.01  # learning rate at round 0
    schedule: Literal["constant", "cosine"] = "cosine"  # rate over the rounds, for both blocks
    optimizer: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Ge(0), Le(0.999)] = 0.9  # of the supervised block
    weight_decay: NonNegative = 5e-4  # on weights of encoders and heads; never on gamma and xi
    clip: NonNegative = 0.0  # largest joint gradient norm of a block; 0 = no clipping
    n_components: Annotated[int, Ge(1), Le(64)] = 3  # C
    encoders: Literal["shared", "separate"] = "shared"  # one pair for all components (1x), or one each (Cx)
    drm_steps: Count = 15  # SGD steps per round on gamma, xi and nu
    drm_momentum: Annotated[float, Ge(0), Le(0.999)] = 0.95
    drm_lr: NonNegative = 0.0  # its learning rate at round 0; 0 = lr
    e_step: Literal["full", "batch"] = "full"  # over all rows, or over those this round will draw
    # Where responsibilities come from at first: random heads, k-means on a client's inputs, or the true
    # components that simulated data know.
    init: Literal["random", "kmeans", "components"] = "random"
    warm_rounds: CountOrZero = 10  # rounds that keep the responsibilities of k-means or of the components
    calibrate_gamma: CountOrZero = 0  # sweeps after each round that make the ratios integrate to one
    prior: Literal["fraction", "uniform"] = "fraction"  # of the router: training fractions, or none
    monitor_every: CountOrZero = 1  # n_components = 1: rounds between values of J; 0 = never
    eval_batch: Count = 1000  # rows per forward pass of the E-step

    def on(self, model: FeatureModel) -> Components:
        """The components of a client on a model."""
        return Components(model, self.n_components, self.encoders == "separate")


@dataclass(frozen=True)
class OneComponentConfig(Config):
    """FedDRM with separate encoders."""

    n_components: Annotated[int, Ge(1), Le(1)] = 1  # fixed


@dataclass(frozen=True)
class State:
    """round: the next one. theta, nu: encoders, names `c:...` where each component has its own. gamma (m, C),
    xi (m, C, d_h): tables. tau: (m, C) float64, rows sum to `sizes`. centroids: (C, p), empty unless k-means
    has to agree over clients. seed: the run's."""

    round: int
    theta: Tree
    gamma: Tensor
    xi: Tensor
    nu: Tree
    tau: Tensor
    centroids: Tensor
    sizes: tuple[int, ...]
    seed: int


def start(cfg: Config, model: Any, facts: Facts) -> State:
    """gamma = 0, xi uniform in +-1 / sqrt(d_h), pi = 1 / C (spec 7, row 2)."""
    if not isinstance(model, FeatureModel):
        raise ValueError(
            f"fedspm: the model is a {type(model).__name__}, needs one with an encoder, a head and a routing "
            'encoder; set model.kind = "vision" or "mlp"'
        )
    if facts.clients != tuple(range(len(facts.clients))):
        raise ValueError(f"fedspm: clients are {facts.clients}, needs 0 to m - 1 in order; renumber them")
    if cfg.n_components > min(facts.sizes):
        small = facts.sizes.index(min(facts.sizes))
        raise ValueError(
            f"fedspm: client {small} has {facts.sizes[small]} examples for {cfg.n_components} "
            "components; lower n_components or give it more"
        )
    m, C, d = len(facts.clients), cfg.n_components, model.router_width
    xi = (torch.rand(m, C, d, generator=generator(facts.seed, "xi")) * 2 - 1) / d**0.5
    tau = torch.tensor(facts.sizes, dtype=torch.float64)[:, None].expand(m, C) / C
    theta, nu = (cfg.on(model).encoders(block, facts.seed) for block in ("encoder", "router_encoder"))
    return State(0, theta, torch.zeros(m, C), xi, nu, tau.clone(), torch.zeros(0), facts.sizes, facts.seed)


# --- client ------------------------------------------------------------------------------------------------

KEPT = ("head", "shared", "w", "ids", "kmeans")
FITTED = (*SHARED, "n", "loss", "drm_loss", "examples")


def _head(client: Client, cfg: Config) -> Tree:
    """The client's heads; at first contact drawn per component, different for every client."""
    head: Tree | None = client.state.get("head")
    if head is None:
        head = cfg.on(client.model).heads(int(torch.randint(2**62, (1,), generator=client.generator)))
    return head


@phase(
    receives=[*SHARED, "tau", "warm", "centroids"],
    keeps=KEPT,
    sends=["tau", "n", "J", "J_validation", "confidence", "purity", "base_rate"],
)
def e_step(client: Client, got: Body, cfg: Config) -> Body:  # lines 4-5
    """Responsibilities of the training rows, kept; their totals, sent, scaled to n_i."""
    head, rows, place = _head(client, cfg), client.data["train"], torch.arange(client.n)
    if cfg.e_step == "batch":  # the rows that this round's M-step will draw from
        drawn = cfg.batch_size * max(cfg.local_steps, cfg.drm_steps)
        place = torch.randperm(client.n, generator=client.generator)[:drawn].sort().values
        rows = rows.select(place)
    seen = list(cfg.on(client.model).look(got, head, rows, cfg.eval_batch))
    tilts, log_p = (torch.cat(parts).clone() for parts in zip(*seen, strict=True))  # (n, m, C), (n, C)
    pi = dr.mixing_weights(got["tau"])[client.id].float()
    w = dr.responsibilities(log_p, dr.own_rows(tilts, client.id), pi)  # Eq. (7)
    if got["warm"]:
        w = _first_split(client, cfg, got["centroids"])[place]
    else:
        client.state.pop("kmeans", None)
    shared = {name: got[name] for name in SHARED}
    client.state |= {"head": head, "shared": shared, "w": w, "ids": rows.columns["row"]}
    pure, base_rate = purity(w, rows.columns.get("component"))
    return {
        "tau": w.double().sum(0) * (client.n / len(rows)), "n": client.n,
        "J": float(dr.monitor(tilts, client.id, log_p, got["tau"].float()).mean(dtype=torch.float64)),
        "J_validation": _mean_monitor(client, cfg, got, "validation"),
        "confidence": float(w.amax(1).mean()), "purity": pure, "base_rate": base_rate,
    }  # fmt: skip


def _mean_monitor(client: Client, cfg: Config, got: Body, name: str) -> float:
    """The client's mean J over a split, nats per row; -1 where it has no rows."""
    rows, total = client.data.get(name, ()), 0.0
    if not len(rows):
        return -1.0
    for tilts, log_p in cfg.on(client.model).look(got, client.state["head"], rows, cfg.eval_batch):
        total += float(dr.monitor(tilts, client.id, log_p, got["tau"].float()).sum(dtype=torch.float64))
    return total / len(rows)


def _first_split(client: Client, cfg: Config, agreed: Tensor) -> Tensor:
    """Hard responsibilities from k-means on the client's own inputs, (n, C), computed once (spec 10b), or
    those of the true components.

    agreed: (C, p) centroids that number the components, or empty: by falling size."""
    if cfg.init == "components":
        component = client.data["train"].columns["component"]
        if int(component.min()) < 0 or int(component.max()) >= cfg.n_components:
            raise ValueError(
                f"init = 'components': the data have components {int(component.min())} to "
                f"{int(component.max())} (-1: unknown), needs 0 to {cfg.n_components - 1}; use 'kmeans'"
            )
        return torch.nn.functional.one_hot(component, cfg.n_components).float()
    if "kmeans" not in client.state:
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=client.generator)))
        w, own = dr.kmeans_responsibilities(client.data["train"].x(), cfg.n_components, rng)
        client.state["kmeans"] = {"labels": w.argmax(1), "centroids": own}
    kept = client.state["kmeans"]
    w = torch.nn.functional.one_hot(kept["labels"], cfg.n_components).float()
    return w[:, dr.match_centroids(kept["centroids"], agreed)] if agreed.numel() else w


@phase(keeps=KEPT, sends=["centroids", "n"])
def centroids(client: Client, got: Body, cfg: Config) -> Body:
    """The client's k-means centroids, where encoders per component make their order matter."""
    _first_split(client, cfg, torch.zeros(0))
    return {"centroids": client.state["kmeans"]["centroids"], "n": client.n}


@phase(receives=["tau", "lr"], keeps=KEPT, sends=FITTED)
def m_step(client: Client, got: Body, cfg: Config) -> Body:  # lines 9-12
    """Both blocks from what the E-step received, with its responsibilities, which end here."""
    shared, w, ids = (client.state.pop(name) for name in ("shared", "w", "ids"))
    return _maximise(client, {**shared, **got}, cfg, lambda batch: at_rows(w, ids, batch["row"]), ids)


@phase(receives=[*SHARED, "tau", "lr"], keeps=["head"], sends=FITTED)
def fit(client: Client, got: Body, cfg: Config) -> Body:
    """C = 1: no responsibilities to compute, one ask a round."""
    ids = client.data["train"].columns["row"]
    return _maximise(client, got, cfg, lambda batch: torch.ones(len(batch["label"]), 1), ids)


def _maximise(client: Client, got: Body, cfg: Config, w: Callable[[Batch], Tensor], ids: Tensor) -> Body:
    """Q1 in theta and heads, then the surrogate of Q2 in gamma, xi and nu, each by SGD from momentum 0.

    w: responsibilities of a batch, (b, C). ids: rows that have them, the ones to draw from."""
    parts, totals = cfg.on(client.model), dr.floored_totals(got["tau"]).float()
    rows = client.data["train"]
    if len(ids) < len(rows):
        rows = rows.select(torch.isin(rows.columns["row"], ids))

    def ascend(loss: Loss, tree: Tree, steps: int, lr: float, momentum: float) -> tuple[Tree, Solved]:
        many: dict[str, Any] = {"steps": steps, "full": True} if steps else {"epochs": cfg.local_epochs}
        decayed = client.model.decayed or ()
        decay = decay_rate(cfg.weight_decay, {n for n in tree if n.rpartition(":")[2] in decayed})
        batches = rows.batches(cfg.batch_size, generator=client.generator, **many)
        return sgd(loss, tree, batches, lr, momentum=momentum, weight_decay=decay, clip=cfg.clip or None)

    tree, done = ascend(
        lambda tree, batch: parts.supervised_loss(tree, batch, w(batch)),
        join({"theta": got["theta"], "head": _head(client, cfg)}), cfg.local_steps, got["lr"], cfg.momentum,
    )  # fmt: skip
    fitted = split(tree, ("theta", "head"))
    client.state["head"] = fitted["head"]
    tree, drm = ascend(
        lambda tree, batch: parts.density_ratio_loss(tree, batch, client.id, w(batch), totals),
        join({"table": {"gamma": got["gamma"], "xi": got["xi"]}, "nu": got["nu"]}), cfg.drm_steps,
        got["lr"] * (cfg.drm_lr / cfg.lr if cfg.drm_lr else 1.0), cfg.drm_momentum,
    )  # fmt: skip
    moved = split(tree, ("table", "nu"))
    return {
        "theta": fitted["theta"], **moved["table"], "nu": moved["nu"], "n": client.n, "loss": done.loss,
        "drm_loss": drm.loss, "examples": done.examples + drm.examples,
    }  # fmt: skip


@phase(receives=[*SHARED, "tau"], keeps=["head"], sends=["n", "J", "J_validation"])
def monitor(client: Client, got: Body, cfg: Config) -> Body:
    """C = 1: the client's mean J, which elsewhere comes with the E-step (spec 2.5)."""
    client.state["head"] = _head(client, cfg)
    J, held = (_mean_monitor(client, cfg, got, name) for name in ("train", "validation"))
    return {"n": client.n, "J": J, "J_validation": held}


@phase(receives=["gamma", "xi", "nu", "tau"], keeps=["head", "kmeans"], sends=["sums"])
def pair_sums(client: Client, got: Body, cfg: Config) -> Body:
    """The client's part of one calibration sweep, (m, C) logarithms (spec 8.3)."""
    with torch.inference_mode():
        parts = [
            dr.log_pair_sums(cfg.on(client.model).log_ratios(got, batch).double(), got["tau"])
            for batch in client.data["train"].batches(cfg.eval_batch)
        ]
        sums = torch.stack(parts).logsumexp(0)
    return {"sums": sums.clone()}


# --- server ------------------------------------------------------------------------------------------------


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """E-step, M-step, weighted means of the whole tables and encoders."""
    for t in range(state.round, cfg.rounds):  # line 1
        chosen, log = sample_clients(clients, cfg.participation, state.seed, t), {}
        shared = {"theta": state.theta, "gamma": state.gamma, "xi": state.xi, "nu": state.nu}
        tau, agreed, lr = state.tau, state.centroids, cfg.rate(t)
        if cfg.n_components == 1:
            if cfg.monitor_every and t % cfg.monitor_every == 0:
                replies = yield Ask("monitor", chosen, {**shared, "tau": tau}, diagnostic=True)
                log = _described(replies, ("J", "J_validation"))
            replies = yield Ask("fit", chosen, {**shared, "tau": tau, "lr": lr})
        else:
            warm = cfg.init != "random" and t < cfg.warm_rounds
            if warm and cfg.init == "kmeans" and cfg.encoders == "separate" and not agreed.numel():
                replies = yield Ask("centroids", chosen, {})
                sizes = [r.body["n"] for r in replies]
                agreed = agreed_centroids([r.body["centroids"] for r in replies], sizes)
            replies = yield Ask("e_step", chosen, {**shared, "tau": tau, "warm": warm, "centroids": agreed})
            tau = tau.clone()  # lines 2-6
            for r in replies:  # (m, C); absent clients keep their last row
                tau[r.client] = r.body["tau"]
            log = _described(replies, ("J", "J_validation", "confidence", "purity", "base_rate"))
            log |= {"tau_min": float(tau.min()), "tau_max": float(tau.max())}
            replies = yield Ask("m_step", chosen, {"tau": tau, "lr": lr})  # lines 7-13
        log |= _described(replies, ("loss", "drm_loss"))
        rho = [r.body["n"] for r in replies]  # mean() normalises them over those present
        theta, nu = (mean([r.body[name] for r in replies], rho) for name in ("theta", "nu"))
        table = mean([{name: r.body[name] for name in ("gamma", "xi")} for r in replies], rho)
        for _ in range(cfg.calibrate_gamma):
            replies = yield Ask("pair_sums", clients, {**table, "nu": nu, "tau": tau})
            sums = torch.stack([r.body["sums"] for r in replies])
            table["gamma"] = dr.calibrate_gamma(table["gamma"].double(), tau, sums).to(table["gamma"])
        state = replace(
            state, round=t + 1, theta=theta, nu=nu, gamma=table["gamma"], xi=table["xi"], tau=tau,
            centroids=agreed,
        )  # line 14  # fmt: skip
        yield RoundEnd(t, state, {"train_loss": log.pop("loss"), **log})


def _described(replies: Sequence[Reply], names: Sequence[str]) -> dict[str, float]:
    """Means over the clients' rows of what they measured; -1 stands for a client that could not."""
    log = {}
    for name in names:
        told = [(r.body[name], r.body["n"]) for r in replies if r.body[name] != -1.0]
        if told:
            log[name] = sum(value * n for value, n in told) / sum(n for _, n in told)
    return log


# --- prediction --------------------------------------------------------------------------------------------


def serve(cfg: Config, state: State) -> Body:
    """Encoders, tables, totals and sizes: all that routing takes."""
    return {
        "theta": state.theta, "gamma": state.gamma, "xi": state.xi, "nu": state.nu, "tau": state.tau,
        "sizes": torch.tensor(state.sizes, dtype=torch.float64),
    }  # fmt: skip


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """Components mixed by features alone: log sum_c q_c(x) P_c(k | x) (spec 4)."""
    head, parts = _head(client, cfg), cfg.on(client.model)
    pi = dr.mixing_weights(got["tau"])[client.id].float()

    def predict(batch: Batch) -> Outputs:
        q = None
        if cfg.n_components > 1:
            q = dr.component_weights(dr.own_rows(parts.log_ratios(got, batch), client.id), pi)
        return Outputs(parts.mixed(q, got["theta"], head, batch))

    return predict


def router(model: FeatureModel, got: Body, batch: Batch, cfg: Config) -> Tensor:
    """log rho_i + log sum_c pi_ic e_ic(x), (b, m), Eq. (10)."""
    tilts = cfg.on(model).log_ratios(got, batch)
    rho = (got["sizes"] / got["sizes"].sum()).to(tilts)
    return dr.routing_scores(tilts, dr.mixing_weights(got["tau"]).to(tilts), rho, cfg.prior)


METHOD = Method(
    "fedspm", "FedSPM 2026", Config, State, start, (e_step, m_step, centroids, pair_sums, monitor, fit),
    server, serve, predictor, router=router,
    summary="clients as semiparametric mixtures: federated EM, and a router for outside queries",
)  # fmt: skip
FEDDRM_SEPARATE = replace(
    METHOD, name="feddrm_separate", config=OneComponentConfig,
    summary="density-ratio router with an encoder of its own: FedSPM with one component",
)  # fmt: skip
