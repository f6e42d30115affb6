"""Which rows a batch holds: whole epochs, exactly so many steps, or a walk through permutations in full
batches.

One number is drawn from the caller's generator, when a function here is called; the order follows from it,
whatever else draws later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

Epoch = Callable[[torch.Generator | None], Iterable[Tensor]]


def epoch_batches(
    n: int,
    size: int,
    epoch: Epoch,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Positions of each batch: whole `epochs` (default one), or exactly `steps` batches over as many epochs
    as that takes.

    n: rows. size: rows of a batch, >= 1. epoch: gives the positions of each batch of one epoch, shuffled by
    the generator that it gets, or in a fixed order for None. generator: the caller's; one number is drawn
    from it. Raises ValueError for a size, epochs or steps out of range, or steps without rows."""
    _check_size(size)
    if epochs is not None and steps is not None:
        raise ValueError(f"batches: got epochs={epochs} and steps={steps}, needs one of them")
    count = steps if steps is not None else epochs if epochs is not None else 1
    if count < 0:
        raise ValueError(f"batches: {'epochs' if steps is None else 'steps'} is {count}, must be >= 0")
    _check_rows(n, steps)
    rounds = range(count) if steps is None else itertools.count()
    shuffle = None if generator is None else own_generator(generator)
    orders = (order for _ in rounds for order in epoch(shuffle))
    return itertools.islice(orders, steps)


def full_batches(n: int, size: int, steps: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Positions of exactly `steps` batches of min(size, n) rows each (FedSPM spec 3, Batches).

    The rows are walked through in a permutation, and in a new one when it is used up; what is left of a
    permutation starts the batch that the next one fills, so a row can come twice in such a batch. Without a
    generator every permutation is 0..n-1. Raises ValueError for a size or steps out of range, or no rows."""
    _check_size(size)
    if steps < 0:
        raise ValueError(f"batches: steps is {steps}, must be >= 0")
    _check_rows(n, steps)
    return _walk(n, min(size, n), steps, None if generator is None else own_generator(generator))


def own_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator seeded by one draw from `generator`."""
    draw = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    return torch.Generator().manual_seed(int(draw))


def _walk(n: int, size: int, steps: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    left = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(left) < size:
            order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
            left = torch.cat([left, order])
        yield left[:size]
        left = left[size:]


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"batches: size is {size}, must be >= 1")


def _check_rows(n: int, steps: int | None) -> None:
    if steps and not n:
        raise ValueError(f"batches: {steps} steps were asked of a split without rows; give it rows")
