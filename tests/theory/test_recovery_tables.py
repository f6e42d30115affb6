"""The synthetic tables pass on few seeds, their verdicts can fail, and broken worlds make them fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedprism.theory import mixture_geometry as geometry
from fedprism.theory import recovery_tables as tables
from fedprism.theory.mixture_geometry import Instance, extract, make_instance, upload_programs
from fedprism.theory.recovery_tables import SHOWN, Row, Table, Tolerance, judge, judge_largest


@cache
def quick(id: str) -> Table:
    """A table of the quick run, computed once for all tests."""
    return tables.run_tables(ids=[id], quick=True)[0]


def fresh(id: str) -> Table:
    return tables.run_tables(ids=[id], quick=True)[0]


def missed(table: Table) -> list[str]:
    return [row.setting for row in table.rows if not row.ok]


@pytest.mark.parametrize("id", tables.EXPERIMENTS)
def test_every_table_passes_in_the_quick_run(id: str) -> None:
    table = quick(id)
    assert table.id == id
    assert missed(table) == []
    assert table.ok
    assert table.rows
    assert table.seeds == (() if id in ("T9", "T10") else (0, 1, 2))
    assert "stopped" not in table.note  # every program converged
    assert len({row.setting for row in table.rows}) == len(table.rows)


def test_all_nineteen_tables_are_there() -> None:
    assert list(tables.EXPERIMENTS) == [f"T{k}" for k in range(1, 20)]


@pytest.mark.slow
def test_every_table_passes_over_the_full_seeds() -> None:
    for table in tables.run_tables():
        assert missed(table) == [], table.id
        assert all("+" not in row.tolerance for row in table.rows)  # eight seeds or more: nothing added


@pytest.mark.slow
def test_seeds_0_to_7_miss_only_the_three_rows_that_the_docstring_names() -> None:
    found = [
        (table.id, row) for table in tables.run_tables(range(8), ids=["T1", "T4"]) for row in missed(table)
    ]
    assert found == [("T1", "n_i = 1000"), ("T1", "n_i = 20000"), ("T4", "ε = 0.2")]


# ---- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tolerance", "ours", "verdict"),
    [
        (Tolerance(relative=0.04), 1.039, True),
        (Tolerance(relative=0.04), 1.041, False),
        (Tolerance(relative=0.04), 0.959, False),
        (Tolerance(absolute=0.02), 1.019, True),
        (Tolerance(absolute=0.02), 0.979, False),
        (Tolerance(between=(4, 11)), 4.0, True),
        (Tolerance(between=(4, 11)), 3.9, False),
        (Tolerance(between=(4, 11)), 11.1, False),
        (Tolerance(absolute=1.0, published=0.02), 1.1, False),
        (Tolerance(absolute=1.0, published=0.02), 1.21, True),
        (SHOWN, 50.0, True),
        (SHOWN, float("nan"), False),
        (Tolerance(relative=0.04), float("nan"), False),
    ],
)
def test_a_tolerance_accepts_what_lies_within_it(tolerance: Tolerance, ours: float, verdict: bool) -> None:
    assert tolerance.accepts(ours, expected=1.0, published=1.2) is verdict


def test_a_tolerance_without_a_value_to_compare_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="±4 % got no value to compare with, needs one"):
        Tolerance(relative=0.04).accepts(1.0, None)


def test_tolerances_read_as_words() -> None:
    assert Tolerance(relative=0.08).text() == "±8 %"
    assert Tolerance(absolute=0.02).text(0.01) == "±0.02 + 0.01"
    assert Tolerance(relative=1e-9).text() == "±1e-09 relative"
    assert Tolerance(between=(20, 36)).text() == "20 to 36"
    assert Tolerance(absolute=0.001, published=0.02).text() == "±0.001, published ±0.02"
    assert SHOWN.text(0.5) == "shown"


def test_a_row_holds_mean_and_sample_deviation_and_widens_by_two_standard_errors() -> None:
    row = judge("x", [1.0, 2.0, 3.0, 4.0], Tolerance(absolute=0.1), expected=2.0, reference_sd=0.3)
    assert row == Row("x", None, 2.0, 2.5, pytest.approx((5 / 3) ** 0.5), "±0.1 + 0.3", False)  # .5 > .1 + .3
    assert judge("x", [1.0, 2.0, 3.0, 4.0], Tolerance(absolute=0.1), expected=2.15, reference_sd=0.3).ok
    own = judge("x", [1.0, 2.0, 3.0, 4.0], Tolerance(absolute=0.1), expected=2.0)
    assert own.ok  # two standard errors of the sample: 1.29
    assert judge("x", [5.0], SHOWN).sd == 0.0


def test_eight_seeds_get_no_more_room_than_the_reference_states() -> None:
    values = np.array([1.0, 2.0] * 4)
    row = judge("x", values, Tolerance(absolute=0.1), expected=1.3, reference_sd=5.0)
    assert (row.tolerance, row.ok) == ("±0.1", False)


def test_an_exact_claim_is_judged_by_its_worst_case() -> None:
    assert judge_largest("x", np.array([0.0, -2e-3]), 1e-3).ok is False
    assert judge_largest("x", np.array([[0.0, 5e-4]]), 1e-3) == Row(
        "x", None, 0, 5e-4, 0, "at most 0.001", True
    )
    assert judge_largest("x", np.array([np.nan]), 1.0).ok is False


def test_a_table_with_one_missed_row_is_not_ok() -> None:
    good = Row("a", None, 1.0, 1.0, 0.0, "±1 %", True)
    assert Table("T0", "", "", (0,), (good,)).ok
    assert not Table("T0", "", "", (0,), (good, replace(good, ok=False))).ok


# ---- broken worlds fail ------------------------------------------------------------------------


def change_worlds(monkeypatch: pytest.MonkeyPatch, change: Callable[[Instance], Instance]) -> None:
    monkeypatch.setattr(tables, "make_instance", lambda *args, **named: change(make_instance(*args, **named)))


def test_a_spectrum_from_one_down_to_one_over_kappa_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    change_worlds(monkeypatch, lambda world: replace(world, A=world.A / world.kappa**0.5))
    assert "q" in missed(fresh("T18"))
    assert "n_i = 1000" in missed(fresh("T1"))


def test_half_the_label_noise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    change_worlds(monkeypatch, lambda world: replace(world, sigma=world.sigma / 2))
    assert missed(fresh("T7"))


def test_task_optima_of_the_wrong_width_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    change_worlds(monkeypatch, lambda world: replace(world, experts=world.experts * 1.2))
    for label in ("T2", "T5", "T14"):
        assert missed(fresh(label))


def test_a_linear_term_without_its_factor_two_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(*args: Any) -> tuple[np.ndarray, np.ndarray]:
        G, b = upload_programs(*args)
        return G, b / 2

    monkeypatch.setattr(tables, "upload_programs", halved)
    for label in ("T2", "T9", "T10", "T11"):
        assert missed(fresh(label))


def test_mixture_estimates_that_are_uniform_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "estimate_mixtures", lambda uploads, *_: np.full((len(uploads), 6), 1 / 6))
    assert len(missed(fresh("T19"))) == 2  # the mixtures and the risk of routing by them


def test_identity_scored_with_names_forgiven_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "identity_error", tables.vertex_set_error)
    assert missed(fresh("T12")) == ["SPA, task identity"]


def test_projection_that_stops_off_the_supervised_vertices_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """T12 claims the same set to three decimals."""
    project = tables.successive_projection
    monkeypatch.setattr(tables, "successive_projection", lambda *args: project(*args) + 0.1 / 192**0.5)
    assert "vertex set, distance from supervised" in missed(fresh("T12"))


def test_a_risk_norm_that_forgets_phi_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost q is summed by hand and so does not change with the norm that the router's risk uses."""
    monkeypatch.setattr(geometry, "phi_norm2", lambda C, phi: (C**2).sum((-2, -1)))
    failed = missed(fresh("T18"))
    assert [setting for setting in failed if setting.startswith("τ")] == [
        f"τ = {tau:g}" for tau in tables.ROUTER_STEPS
    ]


def test_a_change_with_kappa_fails_where_all_clients_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """No expected value for random experts with drawn clients: their change with kappa is what is judged."""
    whole = [row for row in quick("T8").rows if row.setting.startswith("random experts, all clients")]
    assert [row.expected for row in whole] == [None, None, None, None, 0.0]
    assert [row.tolerance for row in whole] == ["shown"] * 4 + ["at most 0.001"]

    def wider(*args: Any, **named: Any) -> Instance:
        world = make_instance(*args, **named)
        return replace(world, experts=world.experts * (1 + 1e-3 * np.log(world.kappa)))

    monkeypatch.setattr(tables, "make_instance", wider)
    assert "random experts, all clients, largest change with κ of a seed" in missed(fresh("T8"))


# ---- constructions -----------------------------------------------------------------------------


def test_anchor_gaps_are_distances_from_the_mean_of_the_others() -> None:
    experts = np.array([[[0.0, 0.0]], [[4.0, 0.0]], [[2.0, 6.0]]])
    assert_allclose(tables.anchor_gaps(experts), np.sqrt([3**2 + 3**2, 3**2 + 3**2, 6**2]))


def test_the_cost_of_a_uniform_router_by_hand() -> None:
    """A = (1 1; 0 2), so Phi = (2 2; 2 4). Tasks (0, 0) and (2, 4): each (1, 2) from the centre, and
    (1, 2) Phi (1, 2)' = 2 + 8 + 16 = 26."""
    experts = np.array([[[0.0, 0.0]], [[2.0, 4.0]]])
    assert_allclose(tables.centre_cost(experts, np.array([[1.0, 1.0], [0.0, 2.0]])), [26, 26])


def test_published_numbers_are_those_of_the_paper() -> None:
    assert [row.published for row in quick("T5").rows] == [0, 0.6, 1.2, 2.4, 3.6, 4.8]


def test_tasks_on_eigendirections_give_mixtures_the_condition_number_of_phi() -> None:
    world = tables.eigendirection_experts(make_instance(0, kappa=50.0), size=2.0)
    flat = world.experts.reshape(6, -1)
    weighted = (world.experts @ world.phi).reshape(6, -1)
    gram = weighted @ flat.T
    assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-10)
    assert np.diag(gram).max() / np.diag(gram).min() == pytest.approx(50)
    assert_allclose(flat @ flat.T, 2 * np.eye(6), atol=1e-12)  # 2 apart: squared norm 2


def test_the_face_world_weighs_each_task_by_its_level() -> None:
    world = tables.face_world((1.0, 100.0), ((0.8, 0.2),), 6.0)
    assert_allclose(world.phi, np.diag([1, 100]))
    miss = world.optima[0] - world.experts[0]  # 18 * .2^2 * (1 + 100)
    assert np.trace(miss @ world.phi @ miss.T) == pytest.approx(72.72)
    assert (miss**2).sum() == pytest.approx(18 * 0.08)


def test_the_error_at_the_face_starts_at_the_bound() -> None:
    """kappa = 1: the anchor is best, its error .2 * 6 equals the bound sqrt(1) * .2 * 6."""
    assert quick("T9").rows[0].ours == pytest.approx(1.2, abs=1e-6)


def test_rows_of_one_seed_share_their_tasks() -> None:
    """Exact recovery is linear in the impurity while the anchor has all the weight."""
    rows = quick("T2").rows
    assert rows[2].ours == pytest.approx(2 * rows[1].ours, rel=1e-9)


def test_recovery_is_that_of_the_shipped_extraction() -> None:
    pools = tables.identity_pools([0, 1], anchors=True)
    _, experts, note = tables.recover(pools)
    for found, pool in zip(experts, pools, strict=True):
        assert_allclose(found, extract(pool.uploads, pool.S, pool.C).experts, atol=1e-4)
    assert note == ""


# ---- runs --------------------------------------------------------------------------------------


def test_the_quick_run_uses_three_seeds_and_leaves_out_large_samples() -> None:
    assert [row.setting for row in quick("T1").rows if not row.setting.startswith("ratio")] == [
        "n_i = 200", "n_i = 1000", "n_i = 5000", "n_i = 20000"
    ]  # fmt: skip
    assert all("32000" not in row.setting for label in ("T15", "T16") for row in quick(label).rows)
    assert "+" in quick("T1").rows[0].tolerance


def test_runs_repeat_and_report_each_table() -> None:
    done: list[str] = []
    first = tables.run_tables([4, 2], ids=["T18", "T5"], on_done=done.append)
    assert done == [table.id for table in first] == ["T5", "T18"]
    assert first == tables.run_tables([4, 2], ids=["T5", "T18"])
    assert first != tables.run_tables([4, 3], ids=["T5", "T18"])


@pytest.mark.parametrize(
    ("seeds", "ids", "message"),
    [
        ([], None, r"seeds are \[\], needs different whole numbers"),
        ([1, 1], None, r"seeds are \[1, 1\], needs different"),
        ([-1], None, r"seeds are \[-1\], needs .* at least 0"),
        ([0], ["T20", "x"], r"got T20, x, needs ids from T1 to T19"),
    ],
)
def test_impossible_runs_are_refused(seeds: list[int], ids: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables.run_tables(seeds, ids=ids)


# ---- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tables.CURVES)
def test_figures_are_json_of_lists_of_one_length(name: str) -> None:
    curve = tables.CURVES[name]([quick(label) for label in tables.EXPERIMENTS])
    assert json.loads(json.dumps(curve, allow_nan=False)) == curve
    series = list(curve.values()) if isinstance(next(iter(curve.values())), dict) else [curve]
    for lists in series:
        assert len({len(values) for values in lists.values()}) == 1
        assert len(next(iter(lists.values()))) >= 3


def test_figures_hold_the_rows_of_their_tables() -> None:
    impurity = tables.recovery_against_impurity([quick(label) for label in ("T2", "T3", "T4", "T5")])
    assert impurity["bound"]["x"] == [0, 0.05, 0.1, 0.2, 0.3, 0.4]
    assert_allclose(impurity["bound"]["ours"], [0, 0.6, 1.2, 2.4, 3.6, 4.8], atol=1e-9)
    assert impurity["n_1000"]["published"][0] == 0.167
    cost = tables.uniform_routing_cost([quick("T18")])
    assert_allclose(np.array(cost["ours"]), cost["ours"][-1] * np.array(cost["x"]) ** 2)
    names = tables.identity_against_set_error([quick(label) for label in ("T11", "T12", "T13", "T14")])
    assert names["method"] == ["supervised", "SPA", "clustering"] * 2
    assert names["anchors"] == [True] * 3 + [False] * 3
    assert names["published_identity"] == [0.287, 5.658, 5.507, 3.760, 3.818, 3.815]
    size = tables.nonidentifiability_against_size([quick(label) for label in ("T15", "T16", "T17")])
    assert size["clients"]["x"] == [12, 24, 36, 60]
    assert size["with_anchors"]["ours"][-1] < 0.1 < 3 < size["without_anchors"]["ours"][-1]


def test_a_figure_names_the_tables_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"got no T16, T17, needs T15, T16, T17; run those tables"):
        tables.nonidentifiability_against_size([quick("T15")])
