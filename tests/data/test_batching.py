"""Positions of batches: full batches walk through permutations."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from fedprism.data.batching import epoch_batches, full_batches


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_is_left_of_a_permutation_starts_the_next_full_batch() -> None:
    # 5 rows in twos, in order: 0 1 | 2 3 | 4 0 | 1 2 | 3 4 | 0 1
    batches = [batch.tolist() for batch in full_batches(5, 2, 6)]
    assert batches == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


@pytest.mark.parametrize("n, size, steps", [(10, 3, 20), (7, 7, 4), (128, 50, 9), (1, 1, 3)])
def test_full_batches_walk_through_whole_permutations(n: int, size: int, steps: int) -> None:
    batches = [batch.tolist() for batch in full_batches(n, size, steps, seeded(3))]
    assert [len(batch) for batch in batches] == [size] * steps
    walk = list(chain.from_iterable(batches))
    whole = len(walk) // n
    assert all(sorted(walk[k * n : (k + 1) * n]) == list(range(n)) for k in range(whole))
    if n > 1:
        assert walk[:n] != walk[n : 2 * n] or whole < 2


def test_fewer_rows_than_the_size_come_all_in_every_batch() -> None:
    assert [sorted(batch.tolist()) for batch in full_batches(3, 8, 2, seeded())] == [[0, 1, 2]] * 2


def test_two_calls_draw_differently_and_later_draws_change_nothing() -> None:
    shared = seeded(5)
    first, second = full_batches(50, 8, 7, shared), full_batches(50, 8, 7, shared)
    torch.rand(3, generator=shared)
    a, b = ([batch.tolist() for batch in batches] for batches in (first, second))
    assert a != b
    assert a == [batch.tolist() for batch in full_batches(50, 8, 7, seeded(5))]


@pytest.mark.parametrize(
    "n, size, steps, message",
    [
        (5, 0, 1, "size is 0, must be >= 1"),
        (5, 2, -1, "steps is -1, must be >= 0"),
        (0, 2, 1, "1 steps were asked of a split without rows"),
    ],
)
def test_bad_requests_are_refused_at_once(n: int, size: int, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        full_batches(n, size, steps)
    with pytest.raises(ValueError, match=message):
        epoch_batches(n, size, lambda g: (), steps=steps)
