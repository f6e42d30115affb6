"""Arithmetic on named tensors.

A *tree* is a flat dict from name to tensor. Trees are combined by name, never by position: combining two
trees with different names is an error that lists the names. No function changes its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def _same_names(what: str, first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming the keys or shapes in which two trees differ."""
    if first.keys() != other.keys():
        only_first, only_other = sorted(first.keys() - other.keys()), sorted(other.keys() - first.keys())
        raise ValueError(
            f"{what}: trees have different names; only in the first: {only_first[:5]}, "
            f"only in the second: {only_other[:5]}"
        )
    for name, value in first.items():
        if value.shape != other[name].shape:
            raise ValueError(
                f"{what}: '{name}' has shapes {tuple(value.shape)} and {tuple(other[name].shape)}"
            )


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b, name by name. Raises ValueError where names or shapes differ."""
    _same_names("add", a, b)
    return {name: a[name] + b[name] for name in a}


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b, name by name. Raises ValueError where names or shapes differ."""
    _same_names("sub", a, b)
    return {name: a[name] - b[name] for name in a}


def scale(a: Tree, factor: float) -> Tree:
    """Return factor * a."""
    return {name: value * factor for name, value in a.items()}


def zeros(like: Tree) -> Tree:
    """Return zeros with the names, shapes and types of `like`."""
    return {name: torch.zeros_like(value) for name, value in like.items()}


def copy(a: Tree) -> Tree:
    """Return detached copies of every tensor."""
    return {name: value.detach().clone() for name, value in a.items()}


def mean(trees: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:
    """Weighted mean of trees with equal names and shapes.

    trees: at least one. weights: one non-negative number per tree with a positive sum, normalised here;
    None gives every tree the same weight. Sums run in the given order and at least in float32, so the
    result depends on the order of `trees` only (callers pass them sorted by client); integer buffers take
    the maximum. Raises ValueError for no trees, bad weights, or differing names or shapes.
    """
    if not trees:
        raise ValueError("mean: got no trees, needs at least one")
    share = [1.0] * len(trees) if weights is None else [float(w) for w in weights]
    if len(share) != len(trees):
        raise ValueError(f"mean: got {len(share)} weights for {len(trees)} trees")
    total = math.fsum(share)
    if not total > 0 or min(share) < 0 or not math.isfinite(total):
        raise ValueError(f"mean: weights must be non-negative with a positive finite sum, got {share}")
    for k, tree in enumerate(trees[1:], start=1):
        _same_names(f"mean: tree 0 and tree {k}", trees[0], tree)
    result: Tree = {}
    for name, first in trees[0].items():
        if not first.is_floating_point():
            result[name] = torch.stack([tree[name] for tree in trees]).amax(0)
            continue
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        value = torch.zeros(first.shape, dtype=wide, device=first.device)
        for tree, weight in zip(trees, share, strict=True):
            value += tree[name].to(wide) * (weight / total)
        result[name] = value.to(first.dtype)
    return result


def select(a: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Return the part of `a` with the given names. Raises KeyError naming the missing ones."""
    names = list(names)
    missing = [name for name in names if name not in a]
    if missing:
        raise KeyError(f"select: no {missing[:5]} among {sorted(a)[:5]}...")
    return {name: a[name] for name in names}


def join(parts: Mapping[str, Tree]) -> Tree:
    """Join named trees into one flat tree with names `part:name`; `split` undoes it."""
    return {f"{part}:{name}": value for part, tree in parts.items() for name, value in tree.items()}


def split(joined: Tree, parts: Iterable[str]) -> dict[str, Tree]:
    """Undo `join` for the given parts; a part without entries comes back as an empty tree."""
    result: dict[str, Tree] = {part: {} for part in parts}
    for key, value in joined.items():
        part, _, name = key.partition(":")
        if part not in result:
            raise KeyError(f"split: part '{part}' of '{key}' is none of {sorted(result)}")
        result[part][name] = value
    return result


def flatten(a: Tree) -> Tensor:
    """Return all entries as one vector, in the order of the names in `a`."""
    return torch.cat([value.reshape(-1) for value in a.values()]) if a else torch.zeros(0)


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """Undo `flatten`: views into `vector` with the names and shapes of `like` (gradients flow through).

    Raises ValueError if the vector's length is not the number of entries of `like`."""
    sizes = [value.numel() for value in like.values()]
    if vector.numel() != sum(sizes):
        raise ValueError(f"unflatten: got {vector.numel()} entries, needs {sum(sizes)}")
    pieces = torch.split(vector, sizes)
    return {name: piece.view(value.shape) for (name, value), piece in zip(like.items(), pieces, strict=True)}


def norm(a: Tree) -> float:
    """Euclidean norm over all entries."""
    return math.sqrt(math.fsum(float(value.double().square().sum()) for value in a.values()))


def count(a: Tree) -> int:
    """Number of entries over all tensors."""
    return sum(value.numel() for value in a.values())
