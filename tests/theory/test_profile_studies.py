"""FedSPM's studies: yardsticks against answers known otherwise, and judged rows that fail when they must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.methods import density_ratio as ratio
from fedprism.theory import gaussian_clients as shipped
from fedprism.theory import profile_likelihood as exact
from fedprism.theory import profile_studies as studies
from fedprism.theory.mixture_geometry import Floats
from fedprism.theory.profile_likelihood import Feasible, Model, Sample, Tables, Training
from fedprism.theory.recovery_tables import Row


def rows_of(study: studies.Study) -> dict[str, Row]:
    return {row.setting: row for row in study.table.rows}


def one_pair(*ratios: float) -> Floats:
    """Tilts (n, 1, 1) of given density ratios."""
    return np.log(np.array(ratios)).reshape(-1, 1, 1)


# ---- yardsticks ----------------------------------------------------------------------------------


def test_the_smallest_mass_by_hand() -> None:
    assert studies.smallest_mass(one_pair(2.0, 0.5)) == pytest.approx(1 / 3)  # r = (1/3, 2/3), nothing else
    assert studies.smallest_mass(one_pair(2.0, 3.0)) == pytest.approx(-1.0)  # r = (2, -1)
    assert studies.smallest_mass(one_pair(1.0, 1.0, 1.0, 1.0)) == pytest.approx(0.25)
    assert studies.smallest_mass(one_pair(2.0)) == -np.inf  # r = 1 and r = 0
    # of (3, 1, 0): r = (t, 1 - 3 t, 2 t), so the smallest mass is largest for t = 1/4
    assert studies.smallest_mass(one_pair(3.0, 1.0, 1e-300)) == pytest.approx(1 / 4)


def test_limits_are_inclusive_named_and_not_passed_by_what_is_no_number() -> None:
    at = studies.limited("a", [0.25, 0.75], high=0.5)
    assert (at.ours, at.ok, at.tolerance) == (0.5, True, "at most 0.5")
    assert not studies.limited("a", [0.5, 0.6], high=0.5).ok  # few seeds earn no slack
    assert not studies.limited("a", [0.5, 0.6], low=0.56).ok
    assert studies.limited("a", [0.5], low=0.4).tolerance == "at least 0.4"
    assert not studies.limited("a", [float("nan")], high=1.0).ok


def test_the_least_monitor_is_that_of_the_true_model_on_many_draws() -> None:
    world = exact.gaussian_world()
    many = replace(world, sizes=world.sizes * 40)
    sample, truth = many.draw(5), many.truth()
    labels = truth.label_log_probs(sample)
    tau = many.sizes[:, None] * many.mixing
    J = exact.mean_monitor(truth.tables.tilts(sample.x), sample.owner, labels, tau)
    assert studies.least_monitor(world) == pytest.approx(J, abs=0.01)  # standard error 0.002


def test_drawn_routing_where_the_answer_is_clear() -> None:
    world = exact.gaussian_world()
    apart = replace(world, means=world.means + 40 * np.arange(4)[:, None, None])
    assert studies.drawn_routing(apart, 2000) == 1.0
    alike = replace(world, means=np.zeros_like(world.means))
    assert studies.drawn_routing(alike, 20_000) == pytest.approx(1200 / 3400, abs=0.01)  # the largest client


def test_the_solver_recursion_by_hand() -> None:
    assert studies.solver_recursion(2, 0.5) == (pytest.approx(2.5), pytest.approx(1.5**2 + 1))
    assert studies.solver_recursion(15, 0.0) == (15, 15)


def test_a_routing_curve_ends_with_the_model() -> None:
    world = exact.gaussian_world()
    run = exact.train(world.draw(3), Training(rounds=6, keep=3, rate=0.05), 3, n_classes=3)
    rounds, routing = studies.routing_curve(world, run, 3)
    assert rounds == [0, 3, 6]
    assert routing[-1] == exact.population_scores(world, run.model, points=81).routing
    assert routing[0] < routing[1] < routing[2]
    short = exact.train(world.draw(3), Training(rounds=6, keep=3, rate=0.05), 3, n_classes=3)
    assert studies.routing_curve(world, short, 3) == (rounds, routing)


def test_seeds_of_the_quick_laboratory_are_the_first() -> None:
    for name in ("checks", *studies.NAMES):
        full, quick = studies.seeds_of(name, False), studies.seeds_of(name, True)
        assert quick and full[: len(quick)] == quick
        assert len(full) > len(quick) or name == "S3"


# ---- S1 ------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1 with the settings that the acceptance needs, 25 rounds long."""
    kept = {name: studies.SETTINGS[name] for name in ("one", "two", "published")}
    monkeypatch.setattr(studies, "SETTINGS", kept)
    monkeypatch.setattr(studies, "QUICK_ROUNDS", dict.fromkeys(kept, 25))
    monkeypatch.setattr(studies, "DRAWN", ())
    monkeypatch.setattr(studies, "drawn_routing", lambda world, queries: 0.7646)


def test_the_ground_truth_passes_its_acceptance(short: None) -> None:
    study = studies.ground_truth([3], quick=True)
    rows = rows_of(study)
    judged = [row for row in rows.values() if row.tolerance != "shown"]
    assert len(judged) == 5
    assert all(row.ok for row in judged), judged
    assert rows["C = 2: routing below Bayes"].ours == pytest.approx(
        rows["Bayes, by quadrature: routing"].ours - rows["C = 2: routing"].ours
    )
    assert rows["C = 2, uniform prior: routing"].ours < rows["C = 2: routing"].ours
    assert study.curve["bayes"]["routing"] == rows["Bayes, by quadrature: routing"].ours


def test_a_wrong_truth_and_an_e_step_without_ratios_fail(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ratio.responsibilities
    monkeypatch.setattr(studies, "drawn_routing", lambda world, queries: 0.76)
    monkeypatch.setattr(ratio, "responsibilities", lambda labels, tilt, pi: original(labels, 0 * tilt, pi))
    rows = rows_of(studies.ground_truth([3], quick=True))
    assert not rows["Bayes, by quadrature: routing"].ok
    assert not rows["C = 2: routing above C = 1"].ok


# ---- S2 ------------------------------------------------------------------------------------------


def test_solvers_are_wrong_by_themselves_and_never_by_the_rule() -> None:
    study = studies.solver_trials([0, 3])
    rows = rows_of(study)
    assert study.table.ok
    assert rows["trf reports success, none exists"].ours == 1
    assert rows["hybr has residual < 1e-8, none exists"].ours == 1
    assert 0 < rows["share of 20 systems with a solution"].ours < 1


def by_residual(tilts: Floats, multipliers: Floats, iterations: int = 0, accept: Any = exact.accept) -> Any:
    found = accept(tilts, multipliers, iterations)
    small = found.residual < exact.RESIDUAL
    return Feasible(multipliers, found.residual, found.mass, found.smallest, iterations) if small else found


def too_short(tilts: Floats, tau: Floats, solve: Any = exact.solve_multipliers, **given: Any) -> Any:
    return solve(tilts, tau, limit=2)


@pytest.mark.parametrize(
    ("name", "mutant", "row"),
    [
        ("accept", by_residual, "accepted by the rule, none exists (any solver)"),
        ("solve_multipliers", too_short, "Newton finds none, one exists"),
    ],
)
def test_a_rule_or_a_solver_that_is_wrong_fails_the_study(
    name: str, mutant: Any, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, name, mutant)
    assert not rows_of(studies.solver_trials([0]))[row].ok


def test_a_system_on_the_edge_decides_nothing() -> None:
    """All ratios 0 but one of 1: only masses on that one row solve it, the smallest mass is 0."""
    tables = Tables(np.array([[0.0]]), np.array([[[1.0]]]))
    assert studies.try_solvers(tables, np.array([[0.0], [-800.0]]), np.array([[2.0]])) is None


def test_the_spread_compares_what_was_accepted() -> None:
    def answer(value: float, good: bool = True) -> Any:
        point = np.array([[value]])
        if good:
            return Feasible(point, 0, 1, 1, 1), True
        return exact.Infeasible("no", point, 0, 1, 1, 1), True

    trial = studies.Trial(True, {"Newton": answer(20.0), "hybr": answer(21.0), "trf": answer(90.0, False)})
    assert studies.solver_spread([trial]) == pytest.approx(1 / 20)
    assert studies.solver_spread([]) == 0


# ---- S3 and S4 -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("study", [studies.evaluation_modes, studies.momentum_study])
def test_an_uncalibrated_gamma_fails_the_studies_of_the_bridge(
    study: Callable[..., studies.Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study([0], quick=True).table.ok
    monkeypatch.setattr(ratio, "calibrate_gamma", lambda gamma, tau, parts: gamma)
    assert not study([0], quick=True).table.ok


# ---- S5 ------------------------------------------------------------------------------------------


def stand_in(error: float = 0.0, components: int = 2) -> studies.Ship:
    """The laboratory's trainer in the place of the shipped method, off by `error`."""

    def ship(sample: Sample, n_classes: int, seed: int, settings: Mapping[str, Any]) -> shipped.ShippedRun:
        batch = settings.get("batch_size", 128)
        training = Training(
            components=min(settings["n_components"], components), rounds=settings["rounds"],
            rate=settings["lr"], batch=None if batch >= len(sample.y) else batch,
        )  # fmt: skip
        d = sample.x.shape[1]
        start = exact.start_model(4, d, n_classes, training, np.random.default_rng(seed))
        run = exact.train(sample, training, seed, n_classes=n_classes, start=start)
        tables = replace(run.model.tables, gamma=run.model.tables.gamma + error)
        return shipped.ShippedRun(start, replace(run.model, tables=tables), run.monitor[:-1] + error)

    return ship


def test_the_study_of_the_shipped_method_holds_for_one_that_is_right() -> None:
    study = studies.shipped_method([0], stand_in(), quick=True)
    rows = rows_of(study)
    assert study.table.ok, study.table
    assert rows["whole batches, 2 rounds: largest difference from the trainer"].ours == 0


@pytest.mark.parametrize(
    ("ship", "failing"),
    [
        (stand_in(error=2e-3), {"whole batches, 2 rounds: largest difference from the trainer",
                                "whole batches: largest difference of J"}),
        (stand_in(components=1), {"C = 2: routing below Bayes", "C = 2: routing above C = 1"}),
    ],
)  # fmt: skip
def test_a_shipped_method_that_is_off_fails(ship: studies.Ship, failing: set[str]) -> None:
    rows = rows_of(studies.shipped_method([0], ship, quick=True))
    assert failing <= {name for name, row in rows.items() if not row.ok}


# ---- the world as clients ------------------------------------------------------------------------


def test_the_identity_model_encodes_nothing_and_classifies_linearly() -> None:
    model = shipped.IdentityModel(2, 3)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    head = model.init("head", 4)
    assert set(head) == set(model.blocks["head"])
    assert all(float(v.abs().max()) <= 2**-0.5 for v in head.values())
    assert model.init("encoder", 4) == model.init("router_encoder", 4) == {}
    assert torch.equal(model.encode({}, {"x": x}, "router_encoder"), x)
    expected = x @ head["head.weight"].T + head["head.bias"]
    assert torch.allclose(model.apply(head, {"x": x}).logits, expected)
    assert not torch.equal(model.init("head", 5)["head.bias"], head["head.bias"])
    with pytest.raises(KeyError, match="no encoder 'head'"):
        model.encode({}, {"x": x}, "head")


def test_a_learnt_model_has_every_head_in_its_place() -> None:
    heads = [
        {f"{c}:head.{name}": torch.full(shape, 10.0 * i + c)
         for c in range(2) for name, shape in (("weight", (3, 2)), ("bias", (3,)))}
        for i in range(4)
    ]  # fmt: skip
    gamma, xi = torch.arange(8.0).view(4, 2), torch.arange(16.0).view(4, 2, 2)
    tau = torch.tensor([[1.0, 3.0]]).expand(4, 2).double()
    model = shipped.learnt_model(gamma, xi, tau, heads)
    assert model.slopes.shape == (4, 2, 3, 2) and model.intercepts.shape == (4, 2, 3)
    assert (model.slopes[2, 1] == 21).all() and (model.intercepts[3, 0] == 30).all()
    assert model.tables.gamma.tolist() == gamma.tolist() and model.tables.xi.dtype == np.float64
    assert (model.pi == [0.25, 0.75]).all()


def test_the_largest_difference_sees_every_part() -> None:
    world = exact.gaussian_world()
    truth = world.truth()
    assert shipped.largest_difference(truth, truth) == 0
    moved: list[Model] = [
        replace(truth, tables=replace(truth.tables, gamma=truth.tables.gamma + 0.5)),
        replace(truth, tables=replace(truth.tables, xi=truth.tables.xi - 0.5)),
        replace(truth, pi=truth.pi + 0.5), replace(truth, intercepts=truth.intercepts - 0.5),
        replace(truth, slopes=truth.slopes + 0.5),
    ]  # fmt: skip
    for other in moved:
        assert shipped.largest_difference(truth, other) == pytest.approx(0.5)
