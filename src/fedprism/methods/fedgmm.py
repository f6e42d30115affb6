"""FedGMM: Wu et al. 2023. Clients mix shared Gaussians of features and shared classifiers.

p_i(x, y) = sum_ab pi_i(a, b) N(phi(x); mu_a, Sigma_a) p_b(y | x), a <= M1, b <= M2; only pi_i is client i's.
phi is frozen, so this is a density of features. A round: responsibilities over the whole grid,
q_s(a, b) proportional to pi_i(a, b) N(phi(x_s); mu_a, Sigma_a) exp(-loss_b(x_s, y_s)); pi_i = mean_s q_s;
mean and scatter of phi under sum_b q_s(a, b); local training of classifier b with weights sum_a q_s(a, b).
The server merges the Gaussians' moments exactly, with the scatter between clients, adds epsilon I once, and
averages classifier b by the clients' responsibility for it. An outside query goes to the client of largest
rho_i sum_a pi_i(a) N(phi(x); mu_a, Sigma_a), pi_i(a) = sum_b pi_i(a, b).

Choices (spec 11, 24).
- phi: the model's routing encoder, trained in rounds of its own by FedAvg as half of an autoencoder, then
  frozen, sent once, standardised and, where `feature_dim` is smaller than its width, projected on principal
  axes; both from sums over clients. The other half is one linear map back to the input, images averaged to
  at most 8 x 8: it lives in this file because no model has a decoder, and is dropped after these rounds. The
  authors project pretrained features by a principal basis of all clients' pooled data.
- First means: every client sends k-means centroids of its features with their counts, none of fewer than
  five rows (else its mean), and the server clusters those. All clients take part in this step once.
- A client with mass below 1 in a Gaussian is left out of its moments; one that nobody has mass in stays.
- A mixing weight below 1e-8 counts as that much in logarithms; log densities are divided by `temperature`.
- A client never asked finds pi as a new one: EM on pi alone, on its training rows.
- compat = "original" repeats three faults of the released code: no scatter between clients, weights added to
  log densities at prediction instead of their logarithms, and first means that average every client's own
  k-means centroids number by number.
Deviations: pretraining rounds come on top of `rounds`, at a constant rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from fedprism.methods.density_ratio import kmeans_responsibilities, mix_predictions, routing_scores
from fedprism.methods.gaussian_mixture import (
    classifier_weights,
    cluster_centroids,
    fit_weights,
    log_densities,
    log_joint,
    merge_moments,
    responsibilities,
    standardising_map,
    weighted_moments,
)
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
    derive_seed,
    generator,
    phase,
    sample_clients,
)
from fedprism.training import Count, CountOrZero, FederatedTraining, NonNegative, Positive, at_rows, solve
from fedprism.trees import Tree, mean, select

SMALLEST_CLUSTER = 5  # rows; a centroid of fewer would give single rows away
SIDE = 8  # pixels of the image that the decoder gives back
KEPT = ["nu", "shift", "matrix", "pi"]
Group = dict[int, Tree]  # classifier -> its tensors


@dataclass(frozen=True)
class Config(FederatedTraining):
    """Local training of each classifier, the Gaussians, and where their features come from."""

    n_gaussians: Annotated[int, Ge(1), Le(64)] = 3  # M1
    n_components: Annotated[int, Ge(1), Le(64)] = 3  # M2, classifiers
    feature_dim: Count = 32  # features the Gaussians see; the routing encoder's width where that is smaller
    pretrain_rounds: CountOrZero = 20  # rounds that train the features, before `rounds`; 0 = random features
    pretrain_lr: NonNegative = 0.0  # their learning rate; 0 = lr
    # First Sigma_a = this times I, in squared standard deviations. The authors set it for features that are
    # not standardised: it blurs the first ten rounds or so, where 1 starts from the first means as they are.
    initial_covariance: Positive = 100.0
    covariance_floor: Positive = 0.1  # epsilon, added to every merged covariance's diagonal
    temperature: Positive = 1.0  # log densities are divided by it; large = labels decide
    average: Literal["responsibility", "samples"] = "responsibility"  # clients' weights for classifier b
    compat: Literal["none", "original"] = "none"  # original: the released code's faults, see above
    eval_batch: Count = 256  # rows per forward pass of the E-step
    new_client_steps: Count = 10  # E-steps of a client that was never asked, at most
    new_client_tolerance: NonNegative = 1e-3  # they end when no weight changes by more

    @property
    def total_rounds(self) -> int:
        """Pretraining rounds and EM rounds."""
        return self.pretrain_rounds + self.rounds


@dataclass(frozen=True)
class State:
    """round: the next one. components: M2 classifiers. means (M1, d), covariances (M1, d, d): float64. mass:
    (m, M1, M2) float64, last n_i pi_i of each client. nu: routing encoder. decoder: while that is trained.
    shift, matrix: phi(x) = (h(x) - shift) @ matrix. sizes: training examples of each. seed: the run's."""

    round: int
    components: Group
    means: Tensor
    covariances: Tensor
    mass: Tensor
    nu: Tree
    decoder: Tree
    shift: Tensor
    matrix: Tensor
    sizes: tuple[int, ...]
    seed: int


def start(cfg: Config, model: Any, facts: Facts) -> State:
    """Classifiers as FedEM starts them, equal Gaussians about zero, uniform weights."""
    if not isinstance(model, FeatureModel):
        raise ValueError(
            f"fedgmm: the model is a {type(model).__name__}, needs one with an encoder, a head and a routing "
            'encoder; set model.kind = "vision" or "mlp"'
        )
    seeds = [derive_seed(facts.seed, "component", k) if k else facts.seed for k in range(cfg.n_components)]
    d = min(cfg.feature_dim, model.router_width)
    sizes = torch.tensor(facts.sizes, dtype=torch.float64)[:, None, None]
    return State(
        0,
        {k: model.trainable(seed) for k, seed in enumerate(seeds)},
        means=torch.zeros(cfg.n_gaussians, d, dtype=torch.float64),
        covariances=cfg.initial_covariance * torch.eye(d, dtype=torch.float64).repeat(cfg.n_gaussians, 1, 1),
        mass=(sizes / (cfg.n_gaussians * cfg.n_components)).repeat(1, cfg.n_gaussians, cfg.n_components),
        nu=model.init("router_encoder", facts.seed),
        decoder={},
        shift=torch.zeros(model.router_width, dtype=torch.float64),
        matrix=torch.eye(model.router_width, d, dtype=torch.float64),
        sizes=facts.sizes,
        seed=facts.seed,
    )


# --- features ----------------------------------------------------------------------------------------------


def reconstruction_target(x: Tensor) -> Tensor:
    """What the decoder gives back of inputs x: a table's rows, images averaged to at most 8 x 8, (b, p)."""
    if x.ndim == 4:
        x = F.adaptive_avg_pool2d(x, (min(SIDE, x.shape[2]), min(SIDE, x.shape[3])))
    return x.flatten(1)


def first_decoder(width: int, n_outputs: int, seed: int) -> Tree:
    """Linear map from features to inputs, uniform in +-1 / sqrt(width), from `seed` alone."""
    g = generator(seed, "decoder")
    return {
        name: (torch.rand(*shape, generator=g) * 2 - 1) / width**0.5
        for name, shape in (("decoder.weight", (n_outputs, width)), ("decoder.bias", (n_outputs,)))
    }


@phase(receives=["nu", "decoder", "lr", "seed"], keeps=KEPT, sends=["nu", "decoder", "n", "loss", "examples"])
def pretrain(client: Client, got: Body, cfg: Config) -> Body:
    """Local training of encoder and decoder on the mean squared error of the reconstruction."""
    model, decoder = client.model, got["decoder"]
    if not decoder:  # the server holds no inputs and so can't know their size
        first = next(iter(client.data["train"].batches(1)))
        decoder = first_decoder(model.router_width, reconstruction_target(first["x"]).shape[1], got["seed"])

    def loss(tree: Tree, batch: Batch) -> Tensor:
        h = model.encode(tree, batch, "router_encoder")
        found = F.linear(h, tree["decoder.weight"], tree["decoder.bias"])
        return F.mse_loss(found, reconstruction_target(batch["x"]))

    decayed = None if model.decayed is None else {*model.decayed, "decoder.weight"}
    tree, done = solve(cfg, loss, {**got["nu"], **decoder}, cfg.batches(client), got["lr"], decayed=decayed)
    return {
        "nu": select(tree, got["nu"]), "decoder": select(tree, decoder), "n": client.n, "loss": done.loss,
        "examples": done.examples,
    }  # fmt: skip


def features(model: FeatureModel, phi: Body, batch: Batch) -> Tensor:
    """phi(x) = (h(x) - shift) @ matrix, (b, d) float64. phi: nu, shift and matrix, and maybe more."""
    h = model.encode(phi["nu"], batch, "router_encoder").double()
    found: Tensor = (h - phi["shift"]) @ phi["matrix"]
    return found


@phase(receives=["nu"], keeps=KEPT, sends=["count", "total", "second"])
def feature_sums(client: Client, got: Body, cfg: Config) -> Body:
    """Number of rows, sum of h and of h h^T; keeps the encoder, which is frozen from here on."""
    model, rows = client.model, client.data["train"]
    client.state["nu"] = got["nu"]
    with torch.no_grad():
        h = [model.encode(got["nu"], b, "router_encoder").double() for b in rows.batches(cfg.eval_batch)]
    total, second = sum(part.sum(0) for part in h), sum(part.T @ part for part in h)
    return {"count": client.n, "total": total, "second": second}


@phase(receives=["shift", "matrix"], keeps=KEPT, sends=["centroids", "counts", "n"])
def centroids(client: Client, got: Body, cfg: Config) -> Body:
    """k-means centroids of the client's features (k, d) and their rows (k,); keeps the standardising map."""
    client.state |= {"shift": got["shift"], "matrix": got["matrix"]}
    with torch.no_grad():
        rows = client.data["train"].batches(cfg.eval_batch)
        x = torch.cat([features(client.model, client.state, batch) for batch in rows])
    k = cfg.n_gaussians if cfg.compat == "original" else min(cfg.n_gaussians, len(x.unique(dim=0)))
    seed = int(torch.randint(2**62, (1,), generator=client.generator))
    w, found = kmeans_responsibilities(x, k, np.random.default_rng(seed))
    counts = w.sum(0)
    if cfg.compat == "none":
        large = counts >= SMALLEST_CLUSTER
        found, counts = found[large], counts[large]
        if not len(counts):
            found, counts = x.mean(0, keepdim=True), torch.tensor([float(len(x))], dtype=x.dtype)
    return {"centroids": found, "counts": counts, "n": client.n}


def first_means(replies: Sequence[Reply], cfg: Config, seed: int) -> Tensor:
    """(M1, d): k-means of the clients' centroids, each counted as often as it has rows."""
    points, counts = ([r.body[k] for r in replies] for k in ("centroids", "counts"))
    if cfg.compat == "original":  # number a of one client has nothing to do with number a of another
        return mean([{"x": p} for p in points], [r.body["n"] for r in replies])["x"]
    return cluster_centroids(
        torch.cat(points), torch.cat(counts), cfg.n_gaussians, derive_seed(seed, "means")
    )


# --- client ------------------------------------------------------------------------------------------------


def tempered(cfg: Config, got: Body, x: Tensor) -> Tensor:
    """(n, M1) log densities of features x (n, d), divided by the temperature."""
    return log_densities(x, got["means"], got["covariances"]) / cfg.temperature


def row_facts(client: Client, phi: Body, components: Group, size: int) -> tuple[Tensor, Tensor]:
    """Features (n, d) and losses under every classifier (n, M2) of the training rows, in order, float64."""
    model, x, losses = client.model, [], []
    with torch.no_grad():
        for b in client.data["train"].batches(size):
            x.append(features(model, phi, b))
            each = [model.per_example_loss(model.apply(w, b), b).double() for w in components.values()]
            losses.append(torch.stack(each, 1))
    return torch.cat(x), torch.cat(losses)


def uniform(cfg: Config) -> Tensor:
    """(M1, M2) float64 weights, all equal."""
    return torch.ones(cfg.n_gaussians, cfg.n_components).double() / (cfg.n_gaussians * cfg.n_components)


@phase(
    receives=["components", "means", "covariances", "lr"],
    keeps=KEPT,
    sends=["components", "mass", "means", "covariances", "n", "loss", "examples", "log_likelihood"],
)
def update(client: Client, got: Body, cfg: Config) -> Body:
    """E-step, weights and moments, then the classifiers; the server gets n_i pi_i."""
    model, components, ids = client.model, got["components"], client.data["train"].columns["row"]
    pi = client.state.get("pi", uniform(cfg))
    x, losses = row_facts(client, client.state, components, cfg.eval_batch)
    log_n = tempered(cfg, got, x)
    q = responsibilities(pi, log_n, losses)
    likelihood = log_joint(pi, log_n, losses).flatten(1).logsumexp(1) + log_n.amax(1)
    client.state["pi"] = q.flatten(1).mean(0).view_as(pi)
    _, means, covariances = weighted_moments(x, q.sum(2))
    new, loss, examples = {}, 0.0, 0
    for k, tree in components.items():
        weight = q[:, :, k].sum(1)

        def objective(w: Tree, batch: Batch, weight: Tensor = weight) -> Tensor:
            losses: Tensor = model.per_example_loss(model.apply(w, batch, generator=client.generator), batch)
            return (at_rows(weight, ids, batch["row"]).to(losses) * losses).mean()

        new[k], done = solve(cfg, objective, tree, cfg.batches(client), got["lr"], decayed=model.decayed)
        loss, examples = loss + done.loss, examples + done.examples
    return {
        "components": new, "mass": q.sum(0), "means": means, "covariances": covariances, "n": client.n,
        "loss": loss, "examples": examples, "log_likelihood": float(likelihood.mean()),
    }  # fmt: skip


# --- server ------------------------------------------------------------------------------------------------


def merged_gaussians(cfg: Config, state: State, replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """mu_a and Sigma_a + epsilon I from the clients' moments; what no client has mass in stays."""
    gamma = torch.stack([r.body["mass"].sum(1) for r in replies])  # gamma_ia, (m, M1)
    gamma = torch.where(gamma >= 1, gamma, 0.0)
    means, covariances = (torch.stack([r.body[k] for r in replies]) for k in ("means", "covariances"))
    total, means, covariances = merge_moments(gamma, means, covariances, between=cfg.compat == "none")
    covariances = covariances + cfg.covariance_floor * torch.eye(means.shape[1], dtype=means.dtype)
    found = (total > 0)[:, None]
    means = torch.where(found, means, state.means)
    return means, torch.where(found[:, :, None], covariances, state.covariances)


def averaged_classifier(cfg: Config, old: Tree, k: int, replies: Sequence[Reply]) -> Tree:
    """Classifier k, clients weighing by n_i sum_a pi_i(a, k) or by n_i; nobody's stays."""
    weights = [float(r.body["mass"][:, k].sum()) for r in replies]
    if cfg.average == "samples":
        weights = [r.body["n"] for r in replies]
    return mean([r.body["components"][k] for r in replies], weights) if sum(weights) > 0 else old


def server(cfg: Config, state: State, clients: Sequence[int]) -> Server:
    """Rounds that train the features; then, once, their map and the first means; then EM."""
    for t in range(state.round, cfg.total_rounds):
        chosen = sample_clients(clients, cfg.participation, state.seed, t)
        if t < cfg.pretrain_rounds:
            body = {"nu": state.nu, "decoder": state.decoder, "seed": state.seed}
            replies = yield Ask("pretrain", chosen, {**body, "lr": cfg.pretrain_lr or cfg.lr})
            n = [r.body["n"] for r in replies]
            nu, decoder = (mean([r.body[k] for r in replies], n) for k in ("nu", "decoder"))
            state = replace(state, round=t + 1, nu=nu, decoder=decoder)
            loss = sum(r.body["loss"] * r.body["n"] for r in replies) / sum(n)
            yield RoundEnd(t, state, {"reconstruction_loss": loss})
            continue
        if t == cfg.pretrain_rounds:
            replies = yield Ask("feature_sums", clients, {"nu": state.nu})
            count, total, second = (sum(r.body[k] for r in replies) for k in ("count", "total", "second"))
            shift, matrix = standardising_map(count, total, second, cfg.feature_dim)
            replies = yield Ask("centroids", clients, {"shift": shift, "matrix": matrix})
            means = first_means(replies, cfg, state.seed)
            state = replace(state, decoder={}, shift=shift, matrix=matrix, means=means)
        gaussians = {"means": state.means, "covariances": state.covariances}
        rate = cfg.rate(t - cfg.pretrain_rounds)
        replies = yield Ask("update", chosen, {"components": state.components, **gaussians, "lr": rate})
        means, covariances = merged_gaussians(cfg, state, replies)
        new = {k: averaged_classifier(cfg, old, k, replies) for k, old in state.components.items()}
        mass = state.mass.clone()
        for r in replies:
            mass[sorted(clients).index(r.client)] = r.body["mass"]
        state = replace(state, components=new, means=means, covariances=covariances, mass=mass, round=t + 1)
        n = [r.body["n"] for r in replies]
        loss, likelihood = (
            sum(r.body[k] * r.body["n"] for r in replies) / sum(n) for k in ("loss", "log_likelihood")
        )
        weights = (mass / mass.sum((1, 2), keepdim=True)).tolist()
        yield RoundEnd(t, state, {"train_loss": loss, "log_likelihood": likelihood, "weights": weights})


# --- prediction --------------------------------------------------------------------------------------------


def serve(cfg: Config, state: State) -> Body:
    """Classifiers, Gaussians, feature map, and the weights n_i pi_i that routing takes."""
    return {
        "components": state.components, "means": state.means, "covariances": state.covariances,
        "nu": state.nu, "shift": state.shift, "matrix": state.matrix, "mass": state.mass,
        "sizes": torch.tensor(state.sizes, dtype=torch.float64),
    }  # fmt: skip


def new_client_weights(client: Client, got: Body, cfg: Config) -> Tensor:
    """pi (M1, M2) of a client that did not take part: EM on pi alone, on its training rows if it has any."""
    if not len(client.data.get("train", ())):
        return uniform(cfg)
    x, losses = row_facts(client, got, got["components"], cfg.eval_batch)
    log_n = tempered(cfg, got, x)
    return fit_weights(uniform(cfg), log_n, losses, cfg.new_client_steps, cfg.new_client_tolerance)


def predictor(client: Client, got: Body, cfg: Config) -> Callable[[Batch], Outputs]:
    """log sum_ab pi_i(a, b) N(phi(x); mu_a, Sigma_a) p_b(y | x), normalised over y."""
    model, pi = client.model, client.state.get("pi")
    if pi is None:
        pi = new_client_weights(client, got, cfg)

    def predict(batch: Batch) -> Outputs:
        log_n = tempered(cfg, got, features(model, got, batch))
        log_p = [model.apply(w, batch).logits.double().log_softmax(1) for w in got["components"].values()]
        mixed = mix_predictions(
            classifier_weights(pi, log_n, logarithm=cfg.compat == "none"), torch.stack(log_p, 1)
        )
        return Outputs(mixed.float())

    return predict


def router(model: FeatureModel, got: Body, batch: Batch, cfg: Config) -> Tensor:
    """log rho_i + log sum_a pi_i(a) N(phi(x); mu_a, Sigma_a), (b, m) float64."""
    log_n = tempered(cfg, got, features(model, got, batch))
    pi = got["mass"].sum(2) / got["mass"].sum((1, 2))[:, None]  # (m, M1)
    rho = got["sizes"] / got["sizes"].sum()
    return routing_scores(log_n[:, None, :].expand(-1, len(rho), -1), pi, rho)


METHOD = Method(
    "fedgmm", "Wu et al. 2023", Config, State, start, (pretrain, feature_sums, centroids, update),
    server, serve, predictor, router=router,
    summary="clients mix shared Gaussians of frozen features and shared classifiers",
)  # fmt: skip
