"""Local solvers that several methods call: SGD with momentum and AdamW over a tree of tensors.

A solver takes the tree to start from and returns a new one together with what it did (`Solved`). It counts
instead of deriving: `steps` is the number of optimiser steps, `weight` the total weight that the optimiser
gave the gradients, which SCAFFOLD divides by.

Private training (`PrivateTraining`, `private_solve`) keeps to a budget of `privacy` (docs/privacy.md).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedprism import privacy, trees
from fedprism.trees import Tree

Loss = Callable[[Tree, Any], Tensor]
Rate = float | Callable[[str], float]  # one number, or a function from tensor name to number

# Ranges of config fields, checked when a config is read.
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class LocalTraining:
    """Fields that every trained method shares: how many rounds, and what a client does in one.

    The optimiser's state is fresh each round (baselines spec 0.3); rates follow the round, not the step."""

    rounds: Count = 10  # communication rounds, >= 1
    local_epochs: Count = 1  # passes over a client's data per round, used when local_steps is 0
    local_steps: CountOrZero = 0  # optimiser steps per round; 0 = local_epochs decide
    batch_size: Count = 64  # examples per step
    lr: Positive = 5e-4  # learning rate at round 0
    schedule: Literal["constant", "cosine"] = "constant"  # rate over the rounds
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: Annotated[float, Ge(0), Le(0.999)] = 0.0  # sgd only
    weight_decay: NonNegative = 0.01
    clip: NonNegative = 1.0  # largest joint gradient norm; 0 = no clipping

    @property
    def total_rounds(self) -> int:
        """Number of `RoundEnd`s of the whole run."""
        return self.rounds

    def rate(self, round: int) -> float:
        """Learning rate of a round (0-based): constant, or half a cosine from lr to 0 over the rounds."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * round / self.rounds))

    def batches(self, client: Any) -> Iterable[Any]:
        """One round's batches of a client: `local_steps` of them, or `local_epochs` passes."""
        if self.local_steps:
            return client.batches(self.batch_size, steps=self.local_steps)  # type: ignore[no-any-return]
        return client.batches(self.batch_size, epochs=self.local_epochs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Solved:
    """What a local solver did.

    steps: optimiser steps. weight: sum over steps s of sum_{k >= s} lr_k momentum^(k-s), the factor between
    a constant gradient and the displacement of plain SGD (0 for AdamW, where none exists). loss: mean of the
    per-step losses, in the loss's unit. examples: rows seen. optimizer: the optimiser's state as a tree, to
    be handed back as `state` where training continues."""

    steps: int
    weight: float
    loss: float
    examples: int
    optimizer: Tree = field(default_factory=dict)


def _leaves(tree: Tree) -> Tree:
    return {name: value.detach().clone().requires_grad_(True) for name, value in tree.items()}


def decay_rate(weight_decay: float, decayed: Collection[str] | None) -> Rate:
    """Weight decay by tensor name: `weight_decay` for the names in `decayed`, 0 for others; None: for all."""
    if decayed is None:
        return weight_decay
    return lambda name: weight_decay if name in decayed else 0.0


def _groups(leaves: Tree, **rates: Rate) -> list[dict[str, Any]]:
    """Parameter groups of an optimiser: tensors with equal values of all `rates` stand together."""
    groups: dict[tuple[float, ...], list[Tensor]] = {}
    for name, leaf in leaves.items():
        values = tuple(rate(name) if callable(rate) else rate for rate in rates.values())
        groups.setdefault(values, []).append(leaf)
    return [{"params": members, **dict(zip(rates, key, strict=True))} for key, members in groups.items()]


def _clip(leaves: Tree, limit: float | None) -> None:
    """Scale all gradients so that their joint norm is at most `limit` (None: leave them)."""
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([leaf for leaf in leaves.values() if leaf.grad is not None], limit)


def _backward(loss: Loss, leaves: Tree, batch: Any, step: int) -> Tensor:
    """One backward pass; returns the loss, detached. Raises FloatingPointError where it is not finite."""
    for leaf in leaves.values():
        leaf.grad = None
    value = loss(leaves, batch)
    if not torch.isfinite(value):
        raise FloatingPointError(
            f"local training: the loss is {float(value.detach())} at step {step}; lower the learning rate"
        )
    value.backward()
    return value.detach()


def _rows(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values())))
    return 0


def sgd(
    loss: Loss,
    start: Tree,
    batches: Iterable[Any],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: Rate = 0.0,
    clip: float | None = None,
    correct: Tree | None = None,
) -> tuple[Tree, Solved]:
    """Minimise `loss` by SGD with heavy-ball momentum, one step per batch.

    loss(tree, batch): scalar. start: where to begin; not changed. lr > 0. momentum in [0, 1). weight_decay:
    times the tensor, is added to its gradient; one number, or a function from tensor name to number. clip:
    largest joint norm of the data gradient. correct: tree added to the gradient after clipping (SCAFFOLD's
    c - c_i). Tensors that no batch gives a gradient keep their value. Returns the final tree and what was
    done. Raises FloatingPointError on a loss that is not finite."""
    leaves = _leaves(start)
    optimizer = torch.optim.SGD(_groups(leaves, weight_decay=weight_decay), lr=lr, momentum=momentum)
    steps, examples, weight, reach = 0, 0, 0.0, 0.0
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total += _backward(loss, leaves, batch, steps).double()
        _clip(leaves, clip)
        if correct is not None:
            for name, leaf in leaves.items():
                leaf.grad = correct[name].clone() if leaf.grad is None else leaf.grad + correct[name]
        optimizer.step()
        # A gradient of step s moves the tree by lr_k momentum^(k-s) at every later step k; `reach` is the sum
        # of momentum^(k-s) over the gradients so far, so its running total is the weight of all gradients.
        reach = momentum * reach + 1.0
        weight += lr * reach
        steps += 1
        examples += _rows(batch)
    return trees.copy(leaves), Solved(steps, weight, float(total) / max(steps, 1), examples)


def adamw(
    loss: Loss,
    start: Tree,
    batches: Iterable[Any],
    lr: Rate,
    *,
    weight_decay: Rate = 0.01,
    clip: float | None = 1.0,
    state: Tree | None = None,
) -> tuple[Tree, Solved]:
    """Minimise `loss` by AdamW (decoupled weight decay), one step per batch.

    lr, weight_decay: one number, or a function from tensor name to number. clip: largest joint gradient norm
    over all tensors. state: `Solved.optimizer` of an earlier call, to continue it; None starts fresh. Tensors
    that a batch gives no gradient keep their value and moments. Returns the final tree and what was done.
    Raises FloatingPointError on a loss that is not finite."""
    leaves = _leaves(start)
    optimizer = torch.optim.AdamW(_groups(leaves, lr=lr, weight_decay=weight_decay), foreach=True)
    for name, leaf in leaves.items():
        if state and f"step:{name}" in state:
            parts = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[leaf] = {part: state[f"{part}:{name}"].clone() for part in parts}
    steps, examples, total = 0, 0, torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total += _backward(loss, leaves, batch, steps).double()
        _clip(leaves, clip)
        optimizer.step()
        steps += 1
        examples += _rows(batch)
    kept = {
        f"{part}:{name}": value.detach().clone()
        for name, leaf in leaves.items()
        for part, value in optimizer.state.get(leaf, {}).items()
    }
    return trees.copy(leaves), Solved(steps, 0.0, float(total) / max(steps, 1), examples, kept)


def at_rows(values: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """The entries of `values` (n, ...) that belong to the row ids `wanted` (b,), in that order, (b, ...).

    ids: (n,) the id of each entry's row, all different, in any order: what a client computed for its rows is
    looked up by the row, never by position. Raises ValueError naming ids that are not there."""
    order = ids.argsort()
    place = torch.searchsorted(ids[order], wanted).clamp(max=len(ids) - 1)
    at = order[place]
    strange = ids[at] != wanted
    if bool(strange.any()):
        raise ValueError(f"rows: no values for rows {wanted[strange][:5].tolist()}; compute them first")
    return values[at]


@dataclass(frozen=True)
class FederatedTraining(LocalTraining):
    """Local training of methods whose server asks clients for updates."""

    participation: Annotated[float, Gt(0), Le(1)] = 1.0  # share of the clients asked each round


def solve(
    cfg: LocalTraining,
    loss: Loss,
    start: Tree,
    batches: Iterable[Any],
    lr: float,
    *,
    state: Tree | None = None,
    decayed: Collection[str] | None = None,
) -> tuple[Tree, Solved]:
    """Minimise `loss` with the optimiser that `cfg` names, at rate `lr`. See `sgd` and `adamw`.

    decayed: names of the tensors that `cfg.weight_decay` applies to (`Model.decayed`); None: all."""
    clip, weight_decay = cfg.clip or None, decay_rate(cfg.weight_decay, decayed)
    if cfg.optimizer == "adamw":
        return adamw(loss, start, batches, lr, weight_decay=weight_decay, clip=clip, state=state)
    if state:
        raise ValueError("solve: a continued optimiser state is AdamW's; sgd starts fresh")
    return sgd(loss, start, batches, lr, momentum=cfg.momentum, weight_decay=weight_decay, clip=clip)


@dataclass(frozen=True)
class PrivateTraining(FederatedTraining):
    """Local training whose updates may be released under differential privacy (docs/privacy.md).

    `clip` is not used where dp is on. Client sampling is not counted in a client's favour: the plan is for a
    client that is asked every round."""

    dp: Literal["off", "record", "client"] = "off"  # what is hidden: one record, or all of a client's data
    epsilon: Positive = 6.0  # budget of each client over the whole run, features included
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5  # below 1 / n of every client
    dp_clip: Positive = 2.0  # largest norm of a record's gradient (record) or of an update (client)
    dp_micro_batch: Count = 1  # records differentiated at once; above 1 by torch.func, which few models allow
    noise_source: Literal["seeded", "secure"] = "seeded"  # seeded: simulation; secure: deployment

    @property
    def feature_releases(self) -> int:
        """Releases of features that a client's budget has to hold besides its updates."""
        return 0


@dataclass(frozen=True)
class PrivateFeatures(PrivateTraining):
    """Private training of methods whose clients also release features (`private_mean`)."""

    feature_share: Annotated[float, Gt(0), Lt(1)] = 0.1  # share of the budget's squared ratio for features

    @property
    def feature_releases(self) -> int:
        """Once per run; a method that sends them anew overrides this."""
        return 1


def _record_gradients(loss: Loss, leaves: Tree, records: Any, at_once: int, step: int) -> Iterator[Tree]:
    """The gradient of each record of `records` (rows), one tree after another."""
    if at_once == 1:
        for batch in records.batches(1):
            _backward(loss, leaves, batch, step)
            yield {n: torch.zeros_like(v) if v.grad is None else v.grad.detach() for n, v in leaves.items()}
        return
    plain = trees.copy(leaves)

    def of_one(tree: Tree, record: dict[str, Tensor]) -> Tensor:
        return loss(tree, {name: value[None] for name, value in record.items()})

    for batch in records.batches(at_once):
        try:
            found = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0))(plain, batch)
        except RuntimeError as error:
            raise ValueError(
                f"dp_sgd: this model's records can't be differentiated {at_once} at once "
                f"({str(error).splitlines()[0]}); set dp_micro_batch = 1"
            ) from error
        for k in range(len(next(iter(batch.values())))):
            yield {name: value[k] for name, value in found.items()}


def dp_sgd(
    loss: Loss,
    start: Tree,
    rows: Any,
    lr: float,
    *,
    clip: float,
    noise: float,
    rate: float,
    steps: int,
    source: privacy.NoiseSource,
    optimizer: Literal["adamw", "sgd"] = "sgd",
    momentum: float = 0.0,
    weight_decay: Rate = 0.0,
    at_once: int = 1,
) -> tuple[Tree, Solved]:
    """Minimise `loss` with clipped, noisy gradients of Poisson samples (DP-SGD, Abadi et al. 2016, Alg. 1).

    rows: one row per record, with `len`, `select(index)` and `batches(size)`; their number is public. clip:
    largest norm of one record's gradient over all tensors. noise: multiplier z; the sum over the sample gets
    Normal(0, (z clip)^2) on every entry, and is divided by the expected sample size rate * n. rate in (0, 1]:
    each record is in a step's sample independently; an empty sample is a noisy step like any other. source:
    a seeded one is for simulation alone, since whoever knows the seed removes the noise. optimizer: what the
    noisy gradient is handed to, with momentum (sgd) and weight_decay; these look at no data. at_once: records
    differentiated together (1 is always right).

    The weight of `Solved` is sgd's; its loss is 0 and its examples are the expected ones, because the true
    ones are not private. Raises ValueError for values out of range or no rows, FloatingPointError for a loss
    or gradient that is not finite."""
    if not len(rows) or not 0 < rate <= 1 or clip <= 0 or noise < 0 or steps < 0:
        raise ValueError(
            f"dp_sgd: got {len(rows)} rows, rate {rate}, clip {clip}, noise {noise} and {steps} steps; needs "
            "rows, a rate in (0, 1], clip > 0, noise >= 0 and steps >= 0"
        )
    leaves = _leaves(start)
    groups = _groups(leaves, weight_decay=weight_decay)
    step_by: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=lr)
        if optimizer == "adamw"
        else torch.optim.SGD(groups, lr=lr, momentum=momentum)
    )
    expected, weight, reach = rate * len(rows), 0.0, 0.0
    for step in range(steps):
        chosen = (source.uniform(len(rows)) < rate).nonzero().flatten()
        total = trees.zeros(start)
        if len(chosen):
            for gradient in _record_gradients(loss, leaves, rows.select(chosen), at_once, step):
                total = trees.add(total, privacy.clip_tree(gradient, clip))
        total = privacy.add_noise(total, noise * clip, source)
        for name, leaf in leaves.items():
            leaf.grad = total[name] / expected
        step_by.step()
        reach = momentum * reach + 1.0
        weight += lr * reach
    weight = weight if optimizer == "sgd" else 0.0
    return trees.copy(leaves), Solved(steps, weight, 0.0, round(expected * steps))


def budget_of(cfg: PrivateTraining, client: Any) -> privacy.Budget:
    """The client's budget as it stands (`client.state["privacy"]`), planned at first contact.

    Record: add or remove one of its n training records, n public; local steps of Poisson rate batch_size / n.
    Client: replace its data; one release of its update per round. Raises ValueError for an epsilon out of
    reach, or a delta of 1 / n and more, which would allow a record to be published whole."""
    kept = client.state.get("privacy")
    if kept is not None:
        return privacy.Budget(**{name: value for name, value in kept.items() if name != "spent"})
    share = cfg.feature_share if isinstance(cfg, PrivateFeatures) else 0.0
    steps, rate = cfg.total_rounds, 1.0
    if cfg.dp == "record":
        if cfg.delta * client.n >= 1:
            raise ValueError(
                f"privacy: delta is {cfg.delta:g}, must be below 1 / n = {1 / client.n:.2g} for client "
                f"{client.id} with {client.n} records; lower delta"
            )
        steps, rate = steps * _private_steps(cfg, client.n), min(1.0, cfg.batch_size / client.n)
    return privacy.plan(
        cfg.epsilon, cfg.delta, steps=steps, rate=rate, releases=cfg.feature_releases, feature_share=share
    )


def _private_steps(cfg: LocalTraining, n: int) -> int:
    """Steps of one round: `local_steps`, or as many as `local_epochs` passes in batches would take."""
    return cfg.local_steps or cfg.local_epochs * math.ceil(n / cfg.batch_size)


def _charge(client: Any, budget: privacy.Budget, *, steps: int = 0, releases: int = 0) -> None:
    """Note what is about to be released; raises ValueError past the limit."""
    after, spent = budget.charge(steps=steps, releases=releases)
    client.state["privacy"] = {**asdict(after), "spent": spent}


def spent_of(client: Any) -> float:
    """Epsilon that the client has spent so far, features included; 0 where nothing was private."""
    return float(client.state.get("privacy", {}).get("spent", 0.0))


def private_solve(
    cfg: PrivateTraining,
    client: Any,
    loss: Loss,
    start: Tree,
    lr: float,
) -> tuple[Tree, Solved]:
    """Local training of a client as `cfg.dp` says: `solve` (off), `dp_sgd` (record), or `solve` with the
    clipped update released under noise (client).

    The phase that calls this declares `privacy` among what it keeps; `spent_of` gives epsilon for the log.
    Where dp is on the returned loss is 0, as the true one is not released. Warns, with the ratio of noise to
    update, before a client's first private update of unit client. Raises ValueError past the budget."""
    decayed = client.model.decayed
    if cfg.dp == "off":
        return solve(cfg, loss, start, cfg.batches(client), lr, decayed=decayed)
    budget = budget_of(cfg, client)
    source = privacy.noise_source(cfg.noise_source, client.generator)
    if cfg.dp == "record":
        steps = _private_steps(cfg, client.n)
        _charge(client, budget, steps=steps)
        return dp_sgd(
            loss, start, client.data["train"], lr, clip=cfg.dp_clip, noise=1 / budget.update_ratio,
            rate=budget.rate, steps=steps, source=source, optimizer=cfg.optimizer, momentum=cfg.momentum,
            weight_decay=decay_rate(cfg.weight_decay, decayed), at_once=cfg.dp_micro_batch,
        )  # fmt: skip
    if not budget.steps:
        ratio = privacy.noise_to_signal(budget.update_ratio, trees.count(start))
        warnings.warn(
            f"dp = 'client': the noise on the {trees.count(start)} values of client {client.id}'s update is "
            f"{ratio:.3g} times the largest update (epsilon {cfg.epsilon:g}, {cfg.total_rounds} rounds); "
            "dp = 'record' needs far less",
            stacklevel=2,
        )
    _charge(client, budget, steps=1)
    end, done = solve(cfg, loss, start, cfg.batches(client), lr, decayed=decayed)
    update = privacy.clip_tree(trees.sub(end, start), cfg.dp_clip)
    update = privacy.add_noise(update, 2 * cfg.dp_clip / budget.update_ratio, source)
    return trees.add(start, update), replace(done, loss=0.0, weight=0.0, optimizer={})


def private_mean(cfg: PrivateFeatures, client: Any, total: Tensor, n: int, limit: float) -> Tensor:
    """The mean of n records' clipped features, released under the client's budget where dp is on.

    total: sum of vectors of norm at most `limit` (`privacy.clipped_sum`), `limit` chosen without the data;
    n >= 1 is public. Noise: sensitivity limit / n of adding or removing a record, 2 limit of replacing the
    client's data, over the budget's feature ratio. Scaling, centring and symmetrising come after, on the
    server. The phase declares `privacy` among what it keeps. Raises ValueError past the budget, and where
    dp is on for a limit or n that bounds nothing."""
    if cfg.dp == "off":
        return total / n
    if n < 1 or not 0 < limit < math.inf:
        raise ValueError(
            f"privacy: got features of {n} records clipped to {limit}, needs records and a norm > 0 that is "
            "set before looking at the data; set feature_clip (1 is usual)"
        )
    budget = budget_of(cfg, client)
    _charge(client, budget, releases=1)
    sensitivity = limit / n if cfg.dp == "record" else 2 * limit
    source = privacy.noise_source(cfg.noise_source, client.generator)
    return privacy.add_noise({"mean": total / n}, sensitivity / budget.feature_ratio, source)["mean"]
