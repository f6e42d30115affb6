"""Scores, differences and mixture errors against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import matthews_corrcoef

from fedprism.evaluation import metrics
from fedprism.theory.mixture_geometry import relative_dispersion


def run(method: str, seed: int, clients: list[float], fingerprint: str = "f", **more: Any) -> dict[str, Any]:
    test = metrics.score({"accuracy": clients, "per_task": {"a": {"correct": 3, "n": 4}}})
    return {"method": method, "seed": seed, "fingerprint": fingerprint, "test": test, **more}


def test_overall_and_worst_fractions_round_the_number_of_clients_up() -> None:
    clients = [0.9, 0.5, 0.7, 0.6, 0.8]
    assert metrics.overall(clients) == pytest.approx(0.7)
    assert metrics.worst_fraction(clients, 0.5) == pytest.approx(0.6)  # ceil(5/2) = 3: .5 .6 .7
    assert metrics.worst_fraction(clients, 0.25) == pytest.approx(0.55)  # ceil(5/4) = 2: .5 .6
    assert metrics.worst_fraction([0.3], 0.25) == pytest.approx(0.3)


def test_worst_fraction_counts_exactly_where_the_product_is_whole() -> None:
    # 0.1 * 30 is 3.0000000000000004 in binary; the lowest 3 of 0..29 have mean 1.
    assert metrics.worst_fraction(np.arange(30.0), 0.1) == pytest.approx(1.0)


@pytest.mark.parametrize("clients", [[], [[0.5]], [0.5, math.nan]])
def test_scores_refuse_what_is_no_list_of_accuracies(clients: Any) -> None:
    with pytest.raises(ValueError, match="overall"):
        metrics.overall(clients)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_worst_fraction_refuses_fractions_outside_its_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        metrics.worst_fraction([0.5], fraction)


def test_weighted_overall_weights_by_examples() -> None:
    assert metrics.weighted_overall([0.5, 0.9], [300, 100]) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="counts"):
        metrics.weighted_overall([0.5, 0.9], [1])


def test_task_accuracy_pools_examples_and_leaves_empty_tasks_out() -> None:
    counts = {"a": {"correct": 3, "n": 4}, "b": {"correct": 0, "n": 0}, "c": 0.5}
    assert metrics.task_accuracies(counts) == {"a": 0.75, "c": 0.5}


def test_spread_divides_by_n_minus_1() -> None:
    assert metrics.spread([1, 2, 3]) == {"mean": 2.0, "sd": 1.0, "n": 3, "values": [1.0, 2.0, 3.0]}
    assert metrics.spread([4])["sd"] is None
    with pytest.raises(ValueError, match="no values"):
        metrics.spread([])


def test_paired_differences_use_common_seeds_only() -> None:
    found = metrics.paired_differences({42: 0.7, 43: 0.8}, {42: 0.75, 43: 0.7, 44: 0.9})
    assert found["values"] == pytest.approx([-0.05, 0.1])
    assert found["mean"] == pytest.approx(0.025)
    assert found["sd"] == pytest.approx(0.15 / math.sqrt(2))  # two values 0.15 apart
    with pytest.raises(ValueError, match="none in common"):
        metrics.paired_differences({1: 0.5}, {2: 0.5})


def test_matthews_correlation_of_two_classes_by_hand() -> None:
    confusion = [[5, 1], [2, 4]]  # TN 5, FP 1, FN 2, TP 4
    assert metrics.matthews_correlation(confusion) == pytest.approx(
        (4 * 5 - 1 * 2) / math.sqrt(5 * 6 * 6 * 7)
    )
    assert metrics.matthews_correlation([[3, 0], [0, 2]]) == 1.0
    assert metrics.matthews_correlation([[0, 3], [2, 0]]) == -1.0
    assert metrics.matthews_correlation([[7, 0], [2, 0]]) == 0.0  # one class predicted: not defined
    with pytest.raises(ValueError, match="square"):
        metrics.matthews_correlation([[1, 2, 3], [1, 2, 3]])


def test_matthews_correlation_of_many_classes_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 200)
    predictions = np.where(rng.random(200) < 0.6, labels, rng.integers(0, 4, 200))
    confusion = metrics.confusion_counts(labels, predictions, 4)
    assert confusion.sum() == 200
    assert confusion[1, 2] == ((labels == 1) & (predictions == 2)).sum()
    assert metrics.matthews_correlation(confusion) == pytest.approx(matthews_corrcoef(labels, predictions))


def test_confusion_counts_refuse_classes_outside_the_range() -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        metrics.confusion_counts([0, 2], [0, 1], 2)


def test_balanced_tasks_can_be_estimated_exactly() -> None:
    assert metrics.best_feasible_mae([[1, 0], [0, 1], [0.3, 0.7], [0.7, 0.3]]) == pytest.approx(0, abs=1e-9)


def test_best_feasible_error_of_two_clients_by_hand() -> None:
    # Rows and columns of c sum to 1: c = [[1-t, t], [t, 1-t]]. Against [[1, 0], [.5, .5]] the error is
    # 2t + 2|t - .5| >= 1 for t in [0, .5]: a mean of 1/4 over four cells.
    assert metrics.best_feasible_mae([[1, 0], [0.5, 0.5]]) == pytest.approx(0.25)


def test_best_feasible_error_of_the_small_run() -> None:
    # FedSEE spec 13: six clients, three pure, task totals 1.84, 2.33, 1.83 against 2: .037.
    mixed = [0.84 / 3, 1.33 / 3, 0.83 / 3]
    assert metrics.best_feasible_mae([[1, 0, 0], [0, 1, 0], [0, 0, 1], mixed, mixed, mixed]) == pytest.approx(
        0.037, abs=5e-4
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(2, 6), st.integers(0, 10_000))
def test_best_feasible_error_equals_its_closed_form(n: int, m: int, seed: int) -> None:
    # Mass can always move inside a row from a task with too much to one with too little, and every unit that
    # is too much must move: the optimum is sum_m |total_m - N/M| / (N M). Not how the program finds it.
    alpha = np.random.default_rng(seed).dirichlet(np.full(m, 0.4), size=n)
    closed = np.abs(alpha.sum(0) - n / m).sum() / (n * m)
    assert metrics.best_feasible_mae(alpha) == pytest.approx(closed, abs=1e-8)


def test_mixture_report_by_hand() -> None:
    found = metrics.mixture_report([[0.8, 0.2], [0.6, 0.4]], [[1, 0], [0.5, 0.5]], [[0.9, 0.1], [0.5, 0.5]])
    assert found["mae"] == pytest.approx(0.15)  # .2 .2 .1 .1
    assert found["mae_realised"] == pytest.approx(0.1)  # .1 .1 .1 .1
    assert found["slope"] == pytest.approx(0.6)  # (.5 * .8 - .5 * .2) / (.25 + .25)
    assert found["pure_argmax_accuracy"] == 1.0
    assert found["best_feasible_mae"] == pytest.approx(0.25)


def test_mixture_report_averages_the_matrices_of_the_rounds() -> None:
    rounds = [[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]]]
    found = metrics.mixture_report(rounds, [[1, 0], [0, 1]], [[1, 0], [0, 1]])
    np.testing.assert_allclose(found["estimated"], [[0.8, 0.2], [0.3, 0.7]])
    assert found["mae"] == pytest.approx(0.25)  # not the mean of the rounds' ranks, but here equal to it


def test_mixture_report_has_no_pure_score_without_pure_clients_and_no_slope_without_variation() -> None:
    found = metrics.mixture_report([[0.6, 0.4]], [[0.5, 0.5]], [[0.5, 0.5]])
    assert found["pure_argmax_accuracy"] is None
    assert found["slope"] is None


def test_mixture_report_finds_a_pure_client_that_is_mistaken() -> None:
    true = [[1, 0], [0, 1]]
    assert metrics.mixture_report([[0.4, 0.6], [0.1, 0.9]], true, true)["pure_argmax_accuracy"] == 0.5


@pytest.mark.parametrize("bad", [[[0.5, 0.6]], [[1.5, -0.5]], [[0.5, 0.25, 0.25]], [0.5, 0.5]])
def test_mixture_report_refuses_what_is_no_mixture(bad: Any) -> None:
    with pytest.raises(ValueError, match="mixture_report"):
        metrics.mixture_report(bad, [[0.5, 0.5]], [[0.5, 0.5]])


def test_summarise_runs_gives_spreads_over_seeds() -> None:
    runs = [
        run("x", 1, [0.5, 0.7], seconds=10, mixture={"mae": 0.1}),
        run("y", 1, [0.4, 0.4]),
        run("x", 2, [0.7, 0.9], seconds=30, mixture={"mae": 0.3}),
    ]
    first, second = metrics.summarise_runs(runs)
    assert (first["label"], first["seeds"], second["label"]) == ("x", [1, 2], "y")
    assert first["test"]["overall"]["mean"] == pytest.approx(0.7)
    assert first["test"]["overall"]["sd"] == pytest.approx(0.2 / math.sqrt(2))
    assert first["test"]["worst_25"]["values"] == pytest.approx([0.5, 0.7])
    assert first["test"]["per_task"]["a"]["mean"] == 0.75
    assert first["seconds"]["mean"] == 20
    assert first["mixture"]["mae"]["mean"] == pytest.approx(0.2)
    assert second["test"]["overall"]["sd"] is None
    assert second["seconds"] is None and second["mixture"]["mae"] is None


def test_paired_summary_pairs_equal_federations_only() -> None:
    runs = [
        run("ref", 1, [0.6, 0.8]), run("ref", 2, [0.5, 0.5]),
        run("x", 1, [0.7, 0.8]), run("x", 2, [0.9, 0.9], fingerprint="another"),
    ]  # fmt: skip
    (entry,) = metrics.paired_summary(runs, "ref")
    assert (entry["label"], entry["seeds"], entry["unpaired"]) == ("x", [1], [2])
    assert entry["overall"]["mean"] == pytest.approx(0.05)
    assert entry["worst_50"]["mean"] == pytest.approx(0.1)
    with pytest.raises(KeyError, match="nobody"):
        metrics.paired_summary(runs, "nobody")


def test_negative_transfer_counts_clients_below_their_local_training() -> None:
    runs = [
        run("local_only", 1, [0.6, 0.8, 0.5]), run("local_only", 2, [0.6, 0.8, 0.5]),
        run("x", 1, [0.5, 0.9, 0.5]), run("x", 2, [0.5, 0.7, 0.6]),
    ]  # fmt: skip
    (entry,) = metrics.negative_transfer(runs)
    assert entry["below"]["values"] == [1, 2]  # an equal client is not below
    assert entry["n_clients"] == 3
    assert entry["difference"]["values"] == pytest.approx([0, -0.1 / 3])
    assert metrics.negative_transfer(runs[2:]) == []


def test_fingerprint_conflicts_are_per_seed() -> None:
    runs = [run("x", 1, [1]), run("y", 1, [1]), run("x", 2, [1], "g"), run("y", 2, [1], "h")]
    assert metrics.fingerprint_conflicts(runs) == {2: {"g": ["x"], "h": ["y"]}}


def test_the_reference_is_fedsee_where_there_is_one() -> None:
    assert (
        metrics.reference_label([run("x", 1, [1]), run("fedsee", 1, [1], label="fedsee (b)")]) == "fedsee (b)"
    )
    assert metrics.reference_label([run("x", 1, [1]), run("y", 1, [1])]) == "x"
    assert metrics.reference_label([]) is None


# ---- covariance dispersion -----------------------------------------------------------------------


def diagonal(*tasks: list[float]) -> torch.Tensor:
    """Second moments of tasks with uncorrelated features."""
    return torch.stack([torch.diag(torch.tensor(values, dtype=torch.float64)) for values in tasks])


def test_second_moments_are_means_over_a_task_s_examples_of_all_clients() -> None:
    first = (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 2]))
    second = (torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
    moments, counts = metrics.second_moments([first, second], 3)
    assert counts.tolist() == [2, 0, 1]
    assert moments.dtype == torch.float64
    # task 0: ((1, 2)(1, 2)' + (3, 0)(3, 0)') / 2;  task 2: (0, 1)(0, 1)'
    assert moments.tolist() == [[[5, 1], [1, 2]], [[0, 0], [0, 0]], [[0, 0], [0, 1]]]
    with pytest.raises(ValueError, match=r"parts of \[2, 3\] features"):
        metrics.second_moments([first, (torch.ones(1, 3), torch.tensor([0]))], 3)
    with pytest.raises(ValueError, match="needs one number"):
        metrics.second_moments([], 3)


def test_dispersion_of_two_diagonal_tasks_by_hand() -> None:
    # Differences 1 and -3; smallest eigenvalue 1, largest 5; mean diag(1.5, 3.5), trace 5.
    found = metrics.covariance_dispersion(diagonal([1, 5], [2, 2]))
    assert found == {
        "rho": pytest.approx(3), "gap": pytest.approx(3), "floor": pytest.approx(1), "top": pytest.approx(5),
        "relative_gap": pytest.approx(3 / 3.5), "effective_rank": pytest.approx(5 / 3.5),
        "dimension": 2, "span": 2,
    }  # fmt: skip


def test_dispersion_leaves_out_directions_that_no_task_has() -> None:
    found = metrics.covariance_dispersion(diagonal([1, 0, 5], [2, 0, 2]))
    assert (found["rho"], found["dimension"], found["span"]) == (pytest.approx(3), 3, 2)


def test_a_task_without_a_direction_that_another_has_makes_rho_infinite() -> None:
    found = metrics.covariance_dispersion(diagonal([1, 0], [1, 4]))
    assert found["rho"] is None and found["floor"] == pytest.approx(0, abs=1e-12)
    assert (found["gap"], found["relative_gap"]) == (pytest.approx(4), pytest.approx(2))


def test_equal_tasks_and_a_single_task_have_no_dispersion() -> None:
    phi = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    for moments in (phi[None], torch.stack([phi, phi, phi])):
        found = metrics.covariance_dispersion(moments)
        assert found["rho"] == found["gap"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("moments", [torch.zeros(2, 3, 3), torch.ones(2, 3, 2), torch.ones(3, 3)])
def test_dispersion_of_nothing_is_refused(moments: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="covariance_dispersion: got"):
        metrics.covariance_dispersion(moments)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_dispersion_is_the_theory_s_where_features_span_the_space(seed: int, n_tasks: int, d: int) -> None:
    x = np.random.default_rng(seed).standard_normal((n_tasks, 3 * d, d))
    moments = np.einsum("mni,mnj->mij", x, x) / (3 * d)
    found = metrics.covariance_dispersion(torch.from_numpy(moments))
    assert found["span"] == d
    assert found["rho"] == pytest.approx(relative_dispersion(moments), rel=1e-8, abs=1e-12)
    assert 0 <= found["relative_gap"] <= n_tasks + 1e-9
    assert 1 - 1e-9 <= found["effective_rank"] <= d + 1e-9


def test_client_optima_lie_within_rho_diameters_of_the_barycentre() -> None:
    """The statement itself, by least squares with a shared null direction, for clients of three tasks."""
    rng = np.random.default_rng(4)
    basis = np.linalg.qr(rng.standard_normal((5, 4)))[0]  # the features span 4 of 5 dimensions
    nearest = np.inf
    for _ in range(200):
        inner = np.stack([np.diag(rng.uniform(1, 1.5, 4)) for _ in range(3)])
        turn = np.linalg.qr(rng.standard_normal((4, 4)))[0]
        inner[0] = turn @ inner[0] @ turn.T
        moments = basis @ inner @ basis.T
        optima = rng.standard_normal((3, 2, 4)) @ basis.T
        alpha = rng.dirichlet(np.ones(3))
        mixed = np.einsum("m,mij->ij", alpha, moments)
        own = np.einsum("m,mab,mbc->ac", alpha, optima, moments) @ np.linalg.pinv(mixed)
        away = np.linalg.norm(own - np.einsum("m,mij->ij", alpha, optima))
        diameter = max(np.linalg.norm(a - b) for a in optima for b in optima)
        rho = metrics.covariance_dispersion(torch.from_numpy(moments))["rho"]
        nearest = min(nearest, rho * diameter - away)
        assert away <= rho * diameter
    assert nearest < 1.5  # the bound has something to hold


def test_summaries_hold_the_dispersion_of_the_runs_that_have_one() -> None:
    facts = {"rho": None, "gap": 2.0, "floor": 0.0, "top": 5.0, "relative_gap": 0.5, "effective_rank": 3.0}
    runs = [
        run("a", 1, [0.5], covariance_dispersion={**facts, "dimension": 9, "span": 8, "rows": {"x": 7}}),
        run("a", 2, [0.5], covariance_dispersion={**facts, "rho": 4.0, "gap": 4.0}),
        run("b", 1, [0.5]),
    ]
    first, second = metrics.summarise_runs(runs)
    assert first["covariance_dispersion"]["gap"]["values"] == [2.0, 4.0]
    assert first["covariance_dispersion"]["rho"]["values"] == [4.0]
    assert set(second["covariance_dispersion"].values()) == {None}
