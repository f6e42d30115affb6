"""Local solvers that several methods call: SGD with momentum and AdamW over a tree of tensors.

A solver takes the tree to start from and returns a new one together with what it did (`Solved`). It counts
instead of deriving: `steps` is the number of optimiser steps, `weight` the total weight that the optimiser
gave the gradients, which SCAFFOLD divides by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedprism import trees
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
