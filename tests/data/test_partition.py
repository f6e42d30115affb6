"""Partitions: hand-worked counts, disjoint and complete deals, refused settings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprism.data import partition as p


def test_largest_remainder_by_hand() -> None:
    # 10 * (5, 3, 1) / 9 = 5.56, 3.33, 1.11: floors 5, 3, 1, the one left goes to the largest rest, .56.
    assert p.largest_remainder([5, 3, 1], 10).tolist() == [6, 3, 1]
    # 7 / 3 each: the one left goes to the first of the equal rests.
    assert p.largest_remainder([1, 1, 1], 7).tolist() == [3, 2, 2]
    # 200 * (1, 999) / 1000 = 0.2, 199.8.
    assert p.largest_remainder([1, 999], 200).tolist() == [0, 200]
    assert p.largest_remainder([0.25, 0.0, 0.75], 4).tolist() == [1, 0, 3]
    assert p.largest_remainder([3, 4], 0).tolist() == [0, 0]


@pytest.mark.parametrize("weights, total", [([0, 0], 3), ([-1, 2], 3), ([], 1), ([1], -1)])
def test_largest_remainder_refuses_bad_weights(weights: list[int], total: int) -> None:
    with pytest.raises(ValueError, match="largest remainder: got weights"):
        p.largest_remainder(weights, total)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=6).filter(any), st.data())
def test_largest_remainder_never_exceeds_whole_number_weights(
    weights: list[int], data: st.DataObject
) -> None:
    total = data.draw(st.integers(0, sum(weights)))
    counts = p.largest_remainder(weights, total)
    exact = np.asarray(weights) * total / sum(weights)
    assert counts.sum() == total
    assert (counts <= weights).all() and (np.abs(counts - exact) < 1).all()


def test_threshold_by_hand() -> None:
    # .04 and .0 fall away, the rest is divided by .96; .05 itself stays.
    got = p.threshold_mixtures(np.array([[0.04, 0.72, 0.24], [0.05, 0.0, 0.95]]), 0.05)
    assert got == pytest.approx(np.array([[0.0, 0.75, 0.25], [0.05, 0.0, 0.95]]))


@pytest.mark.parametrize("threshold", [-0.1, 1 / 3, 0.5, float("nan")])
def test_threshold_that_could_empty_a_client_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold is .*must be >= 0 and < 1/3 for 3 tasks; lower"):
        p.threshold_mixtures(np.full((1, 3), 1 / 3), threshold)


def test_supply_by_hand() -> None:
    # Budget (10 + 20) / 3 = 10. Task 0 is asked 8 + 5 + 2 = 15 of 10: factor 2/3 gives 5.33, 3.33, 1.33.
    # Task 1 is asked 2 + 5 + 8 = 15 of 20: as asked.
    mixtures = np.array([[0.8, 0.2], [0.5, 0.5], [0.2, 0.8]])
    assert p.supply_counts(mixtures, [10, 20]).tolist() == [[5, 2], [3, 5], [1, 8]]
    # Budget 10; the task nobody asks for gives nothing, and whole requests lose nothing to rounding.
    assert p.supply_counts(np.array([[1.0, 0.0], [1.0, 0.0]]), [10, 10]).tolist() == [[5, 0], [5, 0]]
    assert p.supply_counts(np.full((7, 1), 1.0), [7 * 11]).tolist() == [[11]] * 7


def test_flooring_leaves_at_most_a_row_per_client_of_an_over_asked_task() -> None:
    # An over-asked task is scaled to its supply, so each of the k clients that hold it loses less than one
    # row to the floor: the total lies in (supply - k, supply]. Published, N = 12: 4993 to 4998 of 5000.
    over_asked = 0
    for seed in range(40):
        supplies = [5000, 5000, 4428, 5000, 5000, 5000]
        mixtures = p.threshold_mixtures(p.dirichlet_mixtures(0.1, 12, 6, np.random.default_rng(seed)), 0.05)
        counts = p.supply_counts(mixtures, supplies)
        asked = mixtures.sum(0) * sum(supplies) / 12
        for m, supply in enumerate(supplies):
            holders = int((mixtures[:, m] > 0).sum())
            expected = min(asked[m], supply)
            assert expected - holders - 1e-6 < counts[:, m].sum() <= expected + 1e-6
            over_asked += asked[m] > supply
            if asked[m] > supply and holders > 1:
                assert 4428 - 12 < counts[:, m].sum() <= supply
    assert over_asked > 40


def test_pure_end_takes_turns_and_gives_the_remainder_to_the_last_client() -> None:
    # N = 12, M = 6: client i holds task i mod 6, two clients each; 4429 = 2214 + 2215.
    counts = p.pure_counts([5000, 5000, 4429, 5000, 5000, 5000], 12)
    assert [np.flatnonzero(row).tolist() for row in counts] == [[i % 6] for i in range(12)]
    assert counts[[2, 8], 2].tolist() == [2214, 2215]
    assert counts.sum(0).tolist() == [5000, 5000, 4429, 5000, 5000, 5000]
    # N = 5, M = 2: task 0 has clients 0, 2, 4 (11 = 3 + 3 + 5), task 1 has 1 and 3.
    assert p.pure_counts([11, 4], 5).tolist() == [[3, 0], [0, 2], [3, 0], [0, 2], [5, 0]]


def test_more_tasks_than_clients_at_the_pure_end_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"6 tasks, 5 clients: more tasks than clients at the pure end; raise"
    ):
        p.pure_counts([10] * 6, 5)


@pytest.mark.parametrize("kind, alpha", [("pure", 0.0), ("dirichlet", 0.1), ("dirichlet", 100.0)])
def test_deal_is_disjoint_and_follows_the_counts(kind: str, alpha: float) -> None:
    supplies = [101, 57, 80]
    part = p.make_partition(kind, supplies, 7, alpha=alpha, threshold=0.05, rng=np.random.default_rng(3))
    for m, supply in enumerate(supplies):
        dealt = np.concatenate([part.deal[i][m] for i in range(7)])
        assert len(np.unique(dealt)) == len(dealt) == part.counts[:, m].sum()
        assert dealt.min(initial=0) >= 0 and dealt.max(initial=0) < supply
        assert [len(part.deal[i][m]) for i in range(7)] == part.counts[:, m].tolist()
        if kind == "pure":
            assert sorted(dealt.tolist()) == list(range(supply))
    for mixture in (part.sampled, part.thresholded, part.realised):
        assert mixture.shape == (7, 3) and mixture.sum(1) == pytest.approx(np.ones(7))
    assert part.realised == pytest.approx(part.counts / part.counts.sum(1, keepdims=True))


def test_dirichlet_has_the_moments_of_the_distribution() -> None:
    # Dir(a, ..., a) over M: mean 1/M, variance (1/M)(1 - 1/M) / (M a + 1). M = 4, a = .5: .0625.
    draws = p.dirichlet_mixtures(0.5, 20_000, 4, np.random.default_rng(0))
    assert draws.mean(0) == pytest.approx(np.full(4, 0.25), abs=0.01)
    assert draws.var(0) == pytest.approx(np.full(4, 0.0625), abs=0.003)


def test_a_used_up_supply_is_dealt_again_but_never_twice_to_one_client() -> None:
    # 25 rows asked of 10 and 6 of 6: 15 of the first are repeats, none of the second.
    counts = np.array([[8, 2], [9, 2], [8, 2]])
    deal, again = p.deal_with_reuse(counts, [10, 6], np.random.default_rng(1))
    assert again.tolist() == [15, 0]
    for i in range(3):
        assert [len(np.unique(deal[i][m])) for m in range(2)] == counts[i].tolist()
    times = np.bincount(np.concatenate([deal[i][0] for i in range(3)]), minlength=10)
    assert set(times.tolist()) == {2, 3}  # reuse is spread evenly
    assert sorted(np.concatenate([deal[i][1] for i in range(3)]).tolist()) == list(range(6))
    with pytest.raises(ValueError, match="has 7 rows, a client was to get 8"):
        p.deal_with_reuse(np.array([[8]]), [7], np.random.default_rng(1))


def test_dealing_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="task 0 has 3 rows, 4 were to be dealt"):
        p.deal_rows(np.array([[2], [2]]), [3], np.random.default_rng(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha is .*, must be > 0; raise data.alpha"):
        p.dirichlet_mixtures(alpha, 3, 2, np.random.default_rng(0))


def test_unknown_partition_and_no_clients_are_refused() -> None:
    options = {"alpha": 1.0, "threshold": 0.0, "rng": np.random.default_rng(0)}
    with pytest.raises(ValueError, match="got 'iid', needs one of dirichlet, pure"):
        p.make_partition("iid", [5], 1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 0 clients and 1 tasks"):
        p.make_partition("dirichlet", [5], 0, **options)  # type: ignore[arg-type]


def test_given_mixtures_are_dealt_as_written_whatever_the_threshold() -> None:
    # Budget (30 + 30) / 4 = 15. Task 0 is asked 15 + 7.5 + .3 + 0 = 22.8 of 30, so as asked, floored; task 1
    # is asked 0 + 7.5 + 14.7 + 15 = 37.2 of 30: factor 25/31 gives 6.04, 11.85, 12.09.
    written = [[1, 0], [0.5, 0.5], [0.02, 0.98], [0, 1]]
    part = p.make_partition(
        "given", [30, 30], 4, alpha=0.1, threshold=0.05, mixtures=written, rng=np.random.default_rng(0)
    )
    assert part.sampled.tolist() == part.thresholded.tolist() == np.array(written).tolist()
    assert part.counts.tolist() == [[15, 0], [7, 6], [0, 11], [0, 12]]
    dealt = np.concatenate([part.deal[i][1] for i in range(4)])
    assert len(set(dealt.tolist())) == 29


def test_given_mixtures_lose_their_rounding_but_no_more() -> None:
    thirds = p.given_mixtures([[0.3333333, 0.3333333, 0.3333333]], 1, 3)
    assert thirds.sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("mixtures", "complaint"),
    [
        ([], "got 0 mixtures, needs one row of 2 shares for each of the 2 clients"),
        ([[1, 0]], "got 1 mixtures, needs one row of 2 shares for each of the 2 clients"),
        ([[1, 0], [0.5, 0.3, 0.2]], r"client 1 got 3 shares, needs 2 .*correct data.mixtures\[1\]"),
        ([[1, 0], [0.5, 0.4]], r"client 1 got shares that sum to 0.9, needs 2 .*with sum 1"),
        ([[1.5, -0.5], [0, 1]], r"client 0 got the shares \[1.5, -0.5\], needs 2 .*>= 0"),
        ([[float("nan"), 1], [0, 1]], r"client 0 got the shares \[nan, 1.0\]"),
    ],
)
def test_given_mixtures_that_do_not_fit_are_refused(mixtures: list[list[float]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        p.given_mixtures(mixtures, 2, 2)
    assert "\n" not in str(caught.value)


def test_mixtures_with_another_partition_are_refused() -> None:
    for kind in ("pure", "dirichlet"):
        with pytest.raises(ValueError, match=f"mixtures with the partition '{kind}', needs 'given'"):
            p.make_partition(
                kind, [9, 9], 2, alpha=1.0, threshold=0.0, mixtures=[[1, 0], [0, 1]],
                rng=np.random.default_rng(0),
            )  # fmt: skip


# ---- by class ------------------------------------------------------------------------------------


def test_rows_of_a_class_are_cut_once_and_completely() -> None:
    label = np.arange(503) % 7
    parts = p.dirichlet_by_class(label, 5, 0.8, np.random.default_rng(0), min_examples=20)
    assert sorted(np.concatenate(parts).tolist()) == list(range(503))
    assert min(map(len, parts)) >= 20 and all((np.diff(part) > 0).all() for part in parts)


def test_rows_of_a_class_are_shuffled_before_they_are_cut() -> None:
    first, second = p.dirichlet_by_class(
        np.zeros(1000, dtype=np.int64), 2, 50.0, np.random.default_rng(0), min_examples=300
    )
    # Means of random rows out of 0..999 lie near 499.5, each within 5 standard errors of at most 17.
    assert abs(first.mean() - 499.5) < 85 and abs(second.mean() - 499.5) < 85


def test_shares_of_a_class_follow_the_dirichlet_law() -> None:
    # Dir(1, 1, 1, 1): mean 1/4, variance (1/4)(3/4)/(4 + 1) = 0.0375 of each client's share of a class.
    label = np.repeat(np.arange(400), 100)
    parts = p.dirichlet_by_class(label, 4, 1.0, np.random.default_rng(1))
    shares = np.stack([np.bincount(label[part], minlength=400) for part in parts]) / 100
    assert np.abs(shares.mean(1) - 0.25).max() < 0.04  # standard error 0.0097
    assert np.abs(shares.var(1) - 0.0375).max() < 0.01
    again = p.dirichlet_by_class(label, 4, 1.0, np.random.default_rng(1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_partition_is_drawn_anew_until_every_client_has_enough() -> None:
    label = np.repeat([0, 1], 100)
    first = p.dirichlet_by_class(label, 4, 0.5, np.random.default_rng(4))
    redrawn = p.dirichlet_by_class(label, 4, 0.5, np.random.default_rng(4), min_examples=30)
    assert min(map(len, first)) < 30 <= min(map(len, redrawn))
    with pytest.raises(ValueError, match=r"in the last of 100 draws, needs 50 \(alpha_inter=0.5, 4 clients"):
        p.dirichlet_by_class(label, 4, 0.5, np.random.default_rng(4), min_examples=50)
    with pytest.raises(ValueError, match="got 0 clients"):
        p.dirichlet_by_class(label, 0, 0.5, np.random.default_rng(4))


def test_components_are_random_rows_in_the_drawn_sizes() -> None:
    component, pi = p.dirichlet_components(1000, 2, 2.0, np.random.default_rng(0))
    assert abs((component == 1).sum() - 1000 * pi[1]) <= 0.5
    halves = [(component[a:b] == 1).mean() for a, b in ((0, 500), (500, 1000))]
    assert abs(halves[0] - halves[1]) < 0.13  # four standard errors of two random halves
    # Dir(2, 2): mean 1/2, variance (1/4)/(4 + 1) = 0.05.
    rng = np.random.default_rng(1)
    shares = np.array([p.dirichlet_components(10, 2, 2.0, rng)[1][0] for _ in range(2000)])
    assert abs(shares.mean() - 0.5) < 0.02 and abs(shares.var() - 0.05) < 0.006
