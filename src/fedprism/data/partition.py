"""Deal task rows to clients by mixtures (FedSEE spec 7), and rows of a class by Dirichlet shares (FedSPM
spec 6).

Everything here is NumPy on counts and positions; no text, label or model is seen. Randomness comes from the
generator that is passed in. N is the number of clients, M the number of tasks.

*Choices where the source is silent.* A threshold of 1/M or more could empty a client and is refused. In the
supply step a cell within 1e-9 below a whole number counts as that number, so rounding noise costs no row.
The threshold tames random draws; mixtures that were written down on purpose are dealt as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Deal = tuple[tuple[Counts, ...], ...]  # [client][task] -> positions

PARTITIONS = ("dirichlet", "pure", "given")
DRAWS = 100  # attempts at a partition by class in which every client is large enough


@dataclass(frozen=True, eq=False)
class Partition:
    """What each client gets of each task.

    sampled, thresholded, realised: (N, M) float64 mixtures, rows sum to 1: as drawn or given, after the
    threshold, and of the counts. counts: (N, M) int64 rows dealt. deal: [client][task] -> ascending positions
    in the task's supply, 0..supply-1; no position occurs twice."""

    sampled: Floats
    thresholded: Floats
    realised: Floats
    counts: Counts
    deal: Deal


def make_partition(
    kind: str,
    supplies: Sequence[int],
    n_clients: int,
    *,
    alpha: float,
    threshold: float,
    rng: np.random.Generator,
    mixtures: ArrayLike = (),
) -> Partition:
    """Deal M tasks to N clients (spec 7, steps 2 to 4 and 6).

    kind: "pure" (clients take turns over the tasks, nothing is drawn but the order of rows), "dirichlet", or
    "given" (`mixtures` says who gets what). supplies: rows of each task. alpha > 0: Dirichlet concentration.
    threshold in [0, 1/M): smaller entries of drawn mixtures become 0. mixtures: (N, M), with "given" only.
    Raises ValueError for an unknown kind, values out of range, mixtures that do not fit, or N < M at the pure
    end."""
    if kind not in PARTITIONS:
        raise ValueError(
            f"partition: got '{kind}', needs one of {', '.join(PARTITIONS)}; correct data.partition"
        )
    if kind != "given" and np.size(mixtures):
        raise ValueError(
            f"partition: got mixtures with the partition '{kind}', needs 'given' to use them; set "
            "data.partition = 'given' or drop data.mixtures"
        )
    if kind == "pure":
        sampled = thresholded = pure_mixtures(n_clients, len(supplies))
        counts = pure_counts(supplies, n_clients)
    elif kind == "given":
        sampled = thresholded = given_mixtures(mixtures, n_clients, len(supplies))
        counts = supply_counts(thresholded, supplies)
    else:
        sampled = dirichlet_mixtures(alpha, n_clients, len(supplies), rng)
        thresholded = threshold_mixtures(sampled, threshold)
        counts = supply_counts(thresholded, supplies)
    return Partition(
        sampled, thresholded, realised_mixtures(counts), counts, deal_rows(counts, supplies, rng)
    )


def pure_mixtures(n_clients: int, n_tasks: int) -> Floats:
    """(N, M) rows with a single 1: client i holds task i mod M (spec 7, step 2). ValueError if N < M."""
    _check_sizes(n_clients, n_tasks)
    if n_clients < n_tasks:
        raise ValueError(
            f"partition: {n_tasks} tasks, {n_clients} clients: more tasks than clients at the pure end; "
            f"raise data.clients to {n_tasks} or drop tasks"
        )
    return np.eye(n_tasks)[np.arange(n_clients) % n_tasks]


def pure_counts(supplies: Sequence[int], n_clients: int) -> Counts:
    """(N, M) counts at the pure end: each task split evenly over its clients, the remainder to its last one
    (spec 7, step 2). supplies: (M,) rows of each task. Raises ValueError if N < M."""
    holds = pure_mixtures(n_clients, len(supplies)) > 0
    counts = np.zeros(holds.shape, dtype=np.int64)
    for m, supply in enumerate(supplies):
        owners = np.flatnonzero(holds[:, m])
        counts[owners, m] = supply // len(owners)
        counts[owners[-1], m] += supply % len(owners)
    return counts


def given_mixtures(mixtures: ArrayLike, n_clients: int, n_tasks: int) -> Floats:
    """(N, M) mixtures as written down, checked: one row per client, one share per task.

    mixtures: (N, M), entries >= 0, rows sum to 1 within 1e-6 (the rest is rounding, and divided out). Raises
    ValueError naming the first row that does not fit."""
    _check_sizes(n_clients, n_tasks)
    rows: list[Any] = list(mixtures) if isinstance(mixtures, (list, tuple, np.ndarray)) else []
    if len(rows) != n_clients:
        raise ValueError(
            f"partition: got {len(rows)} mixtures, needs one row of {n_tasks} shares for each of the "
            f"{n_clients} clients; correct data.mixtures or data.clients"
        )
    for i, row in enumerate(rows):
        shares = np.asarray(row, dtype=np.float64)
        if shares.shape != (n_tasks,):
            got = f"{shares.size} shares"
        elif not (np.isfinite(shares).all() and (shares >= 0).all()):
            got = f"the shares {shares.tolist()}"
        elif abs(shares.sum() - 1) > 1e-6:
            got = f"shares that sum to {shares.sum():.6g}"
        else:
            continue
        raise ValueError(
            f"partition: client {i} got {got}, needs {n_tasks} (one per task), all >= 0 and with sum 1; "
            f"correct data.mixtures[{i}]"
        )
    checked = np.asarray(rows, dtype=np.float64)
    shares = checked / checked.sum(1, keepdims=True)
    return np.asarray(shares, dtype=np.float64)


def dirichlet_mixtures(alpha: float, n_clients: int, n_tasks: int, rng: np.random.Generator) -> Floats:
    """(N, M) mixtures, rows drawn from Dir(alpha, ..., alpha) (spec 7, step 3). Raises ValueError unless
    alpha > 0 and the draw is finite."""
    _check_sizes(n_clients, n_tasks)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(
            f"partition: alpha is {alpha}, must be > 0; raise data.alpha, or set data.partition='pure' "
            "for clients of one task"
        )
    mixtures = rng.dirichlet(np.full(n_tasks, float(alpha)), size=n_clients)
    if not np.allclose(mixtures.sum(1), 1.0):
        raise ValueError(
            f"partition: alpha={alpha} is too small to draw from; raise data.alpha, "
            "or set data.partition='pure'"
        )
    return mixtures


def threshold_mixtures(mixtures: Floats, threshold: float) -> Floats:
    """(N, M) mixtures with entries below `threshold` set to 0 and rows renormalised (spec 7, step 3).
    Raises ValueError unless 0 <= threshold < 1/M: above that a row could lose all its entries."""
    n_tasks = mixtures.shape[1]
    if not 0 <= threshold < 1 / n_tasks:
        raise ValueError(
            f"partition: threshold is {threshold}, must be >= 0 and < 1/{n_tasks} for {n_tasks} tasks; "
            "lower data.threshold"
        )
    kept = np.where(mixtures < threshold, 0.0, mixtures)
    shares: Floats = kept / kept.sum(1, keepdims=True)
    return shares


def supply_counts(mixtures: Floats, supplies: Sequence[int]) -> Counts:
    """(N, M) rows each client gets of each task (spec 7, step 4).

    Each client asks for mixture x budget, budget = sum of supplies / N; requests for an over-asked task are
    scaled to its supply; cells are floored and leftovers stay unused. mixtures: (N, M), rows sum to 1."""
    supply = np.asarray(supplies, dtype=np.float64)
    requests = mixtures * (supply.sum() / mixtures.shape[0])
    asked = requests.sum(0)
    factors = np.where(asked > supply, supply / np.where(asked > 0, asked, 1.0), 1.0)
    counts: Counts = np.floor(requests * factors + 1e-9).astype(np.int64)
    return counts


def realised_mixtures(counts: Counts) -> Floats:
    """(N, M) shares of the counts; rows sum to 1, a client without rows has zeros."""
    totals = counts.sum(1, keepdims=True)
    return np.asarray(counts / np.where(totals > 0, totals, 1), dtype=np.float64)


def largest_remainder(weights: ArrayLike, total: int) -> Counts:
    """(M,) whole numbers that sum to `total`, proportional to the weights, by largest remainder.

    Ties go to the first. weights: (M,) >= 0, not all 0; computed exactly, so with whole-number weights of sum
    >= total no entry exceeds its weight. Raises ValueError for bad weights."""
    shares = [Fraction(w) for w in np.asarray(weights).tolist()]
    if total < 0 or not shares or min(shares) < 0 or sum(shares) == 0:
        got = f"weights {list(map(float, shares))} and total {total}"
        raise ValueError(f"largest remainder: got {got}, needs both >= 0 and the weights not all 0")
    quotas = [total * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda m: (counts[m] - quotas[m], m))
    for m in order[: total - sum(counts)]:
        counts[m] += 1
    return np.asarray(counts, dtype=np.int64)


def matched_counts(counts: Counts, n: int) -> Counts:
    """(N, M) counts of n rows per client in the proportions of `counts` (spec 7, step 5)."""
    return np.stack([largest_remainder(row, n) for row in counts])


def deal_rows(counts: Counts, supplies: Sequence[int], rng: np.random.Generator) -> Deal:
    """[client][task] -> ascending positions 0..supply-1 in random dealing, disjoint over clients.
    counts: (N, M), column sums at most the supplies (else ValueError)."""
    columns = []
    for m, (supply, stream) in enumerate(zip(supplies, rng.spawn(len(supplies)), strict=True)):
        if counts[:, m].sum() > supply:
            raise ValueError(f"partition: task {m} has {supply} rows, {counts[:, m].sum()} were to be dealt")
        order = stream.permutation(supply)
        ends = np.cumsum(counts[:, m])
        columns.append(
            [np.sort(order[end - count : end]) for end, count in zip(ends, counts[:, m], strict=True)]
        )
    return tuple(zip(*columns, strict=True))


def deal_with_reuse(counts: Counts, supplies: Sequence[int], rng: np.random.Generator) -> tuple[Deal, Counts]:
    """Like `deal_rows`, but a task whose supply is used up is dealt from its start again (spec 7, step 5).

    Within a client no position occurs twice. Returns the deal and (M,) how many rows of each task were dealt
    again. Raises ValueError where one client asks for more than a task's supply."""
    columns = []
    for m, (supply, stream) in enumerate(zip(supplies, rng.spawn(len(supplies)), strict=True)):
        if counts[:, m].max(initial=0) > supply:
            raise ValueError(
                f"partition: task {m} has {supply} rows, a client was to get {counts[:, m].max()}"
            )
        order = stream.permutation(supply)
        ends = np.cumsum(counts[:, m])
        columns.append(
            [
                np.sort(order[np.arange(end - count, end) % max(supply, 1)])
                for end, count in zip(ends, counts[:, m], strict=True)
            ]
        )
    return tuple(zip(*columns, strict=True)), np.maximum(counts.sum(0) - np.asarray(supplies), 0)


def dirichlet_by_class(
    label: NDArray[np.int64],
    n_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_examples: int = 1,
    setting: str = "alpha_inter",
) -> list[NDArray[np.int64]]:
    """Per client ascending positions, disjoint and together all (FedSPM spec 6, item 2).

    Each class's shuffled rows are cut in shares drawn from Dir(alpha, ..., alpha) over the clients; all is
    drawn anew, at most 100 times, while a client has fewer than min_examples rows. label: (n,) classes.
    setting: name of the key of [data] that holds alpha, for messages. Raises ValueError for alpha <= 0, no
    clients, or a client that stays too small."""
    if n_clients < 1:
        raise ValueError(f"partition: got {n_clients} clients, needs at least 1; correct data.clients")
    _check_concentration(setting, alpha)
    rows = [np.flatnonzero(label == k) for k in np.unique(label)]
    sizes = np.zeros(n_clients, dtype=np.int64)
    for _ in range(DRAWS):
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(n_clients)]
        for positions in rows:
            shares = rng.dirichlet(np.full(n_clients, float(alpha)))
            cuts = np.rint(shares.cumsum()[:-1] * len(positions)).astype(np.int64)
            for part, piece in zip(parts, np.split(rng.permutation(positions), cuts), strict=True):
                part.append(piece)
        sizes = np.asarray([sum(map(len, part)) for part in parts])
        if sizes.min() >= min_examples:
            return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
    raise ValueError(
        f"partition: client {int(sizes.argmin())} got {sizes.min()} examples in the last of {DRAWS} draws, "
        f"needs {min_examples} ({setting}={alpha}, {n_clients} clients, {len(label)} examples); raise "
        f"data.{setting} or lower data.min_examples or data.clients"
    )


def dirichlet_components(
    n: int, n_components: int, alpha: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], Floats]:
    """Components of one client's n rows: (n,) int64 in 0..C-1 at random, of sizes pi n rounded, and the drawn
    pi, (C,) from Dir(alpha, ..., alpha) (FedSPM spec 6, item 3). Raises ValueError for alpha <= 0."""
    _check_concentration("alpha_intra", alpha)
    pi = rng.dirichlet(np.full(n_components, float(alpha)))
    ends = np.rint(pi.cumsum() * n).astype(np.int64)
    ends[-1] = n
    component = np.repeat(np.arange(n_components), np.diff(ends, prepend=0))
    return rng.permutation(component).astype(np.int64), pi


def _check_concentration(name: str, alpha: float) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"partition: {name} is {alpha}, must be > 0 and finite; correct data.{name}")


def _check_sizes(n_clients: int, n_tasks: int) -> None:
    if n_clients < 1 or n_tasks < 1:
        raise ValueError(
            f"partition: got {n_clients} clients and {n_tasks} tasks, needs at least 1 of each; "
            "correct data.clients or data.tasks"
        )
