"""Recovery without anchors: folds, verdicts by hand, and quick cells whose order theory tells."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from fedprism.methods.affine_span import merge
from fedprism.theory import recovery_without_anchors
from fedprism.theory.mixture_geometry import Instance, affine_height, make_instance, sample_uploads
from fedprism.theory.recovery_without_anchors import (
    CLIENT_SIZES,
    ESTIMATES,
    POOLS,
    PUBLIC_SIZES,
    Cell,
    public_folds,
    study,
    study_cell,
)

SMALL: dict[str, Any] = {"d": 8, "r": 4, "l": 3, "M": 3, "N": 5}


# ---- public sets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "folds", "sizes"),
    [(20, 5, [4] * 5), (8, 5, [2, 2, 2, 1, 1]), (3, 5, [1, 1, 1]), (2, 5, [1, 1]), (7, 2, [4, 3])],
)
def test_folds_are_nearly_equal_and_hold_every_example_once(n: int, folds: int, sizes: list[int]) -> None:
    world = make_instance(0, **SMALL)
    sets = public_folds(world, n, np.random.default_rng(0), folds=folds)
    assert [[part.n for part in parts] for parts in sets] == [sizes] * 3
    for parts in sets:
        for part in parts:
            assert (part.S.shape, part.C.shape) == ((4, 4), (3, 4))
            assert np.linalg.matrix_rank(part.S) == min(part.n, 4)


def test_folds_come_from_the_task_s_own_law() -> None:
    # E phi phi' = Phi, E y phi' = theta Phi, E |y|^2 = tr(theta Phi theta') + l sigma^2
    world, n = make_instance(1, **SMALL), 40_000
    for theta, parts in zip(
        world.experts, public_folds(world, n, np.random.default_rng(2), folds=4), strict=True
    ):
        whole = merge(parts)
        top = float(np.linalg.eigvalsh(world.phi)[-1])
        assert np.abs(whole.S - world.phi).max() < 6 * top * (2 / n) ** 0.5
        assert np.abs(whole.C - theta @ world.phi).max() < 0.35
        energy = float(np.trace(theta @ world.phi @ theta.T)) + 3 * world.sigma**2
        assert whole.energy == pytest.approx(energy, rel=0.04)
        assert whole.loss(theta) == pytest.approx(3 * world.sigma**2, rel=0.04)
        first, second = parts[0].S, parts[1].S
        assert np.abs(first - second).max() > 1e-4  # folds are different examples


def test_a_noiseless_public_set_has_labels_of_the_expert_exactly() -> None:
    world = make_instance(1, **SMALL)
    still = Instance(world.A, world.experts, world.alpha, 0.0)
    for theta, parts in zip(still.experts, public_folds(still, 9, np.random.default_rng(3)), strict=True):
        assert all(part.loss(theta) == pytest.approx(0.0, abs=1e-9) for part in parts)


# ---- verdicts by hand ----------------------------------------------------------------------------


def cell(**errors: tuple[float, ...]) -> Cell:
    given = {"convex": (3.0, 5.0), "affine": (2.0, 1.0), "auto": (0.1, 0.1), "public only": (4.0, 4.0)}
    return Cell("pool", 500, 20, {**given, **errors}, {})


def test_the_best_rival_is_one_of_three_by_mean_error() -> None:
    assert cell(posterior=(1.0, 1.0)).best_rival == "affine"  # "auto" and the posterior are no rivals
    assert cell(posterior=(1.0, 1.0), convex=(1.4, 1.4)).best_rival == "convex"
    assert cell(**{"posterior": (9.0, 9.0), "public only": (0.0, 2.9)}).best_rival == "public only"
    assert cell(posterior=(1.0, 1.0)).mean("convex") == 4.0


def test_excess_and_verdict_by_hand() -> None:
    # affine (2, 1): gaps 1 and 0, mean .5, standard deviation 1 / sqrt 2, standard error 1 / 2
    found = cell(posterior=(3.0, 1.0))
    assert found.excess == pytest.approx((0.5, 0.5))
    assert found.holds  # .5 <= 2 * .5
    assert cell(posterior=(3.3, 1.1)).holds  # gaps 1.3 and .1: .7 lies between one and two errors of .6
    assert not cell(posterior=(4.0, 2.0)).holds  # gaps 2 and 1: 1.5 > 2 * .5
    steady = cell(posterior=(2.2, 1.2))  # gaps .2 and .2: no doubt, and more than 5 % of 1.5
    assert steady.excess == pytest.approx((0.2, 0.0))
    assert not steady.holds
    assert cell(posterior=(2.07, 1.07)).holds  # .07 <= .075
    assert not cell(posterior=(2.08, 1.08)).holds
    better = cell(posterior=(1.0, 0.5))
    assert better.excess[0] == pytest.approx(-0.75)
    assert better.holds


def test_one_seed_has_no_standard_error() -> None:
    one = Cell("pool", 500, 20, {"convex": (2.0,), "affine": (3.0,), "auto": (2.0,), "posterior": (2.11,),
                                 "public only": (9.0,)}, {})  # fmt: skip
    assert one.excess == pytest.approx((0.11, 0.0))
    assert not one.holds


def test_a_cell_as_a_dict_says_what_it_found() -> None:
    found = cell(posterior=(3.0, 1.0)).as_dict()
    assert found["means"] == {
        "convex": 4.0, "affine": 1.5, "auto": pytest.approx(0.1), "posterior": 2.0, "public only": 4.0
    }  # fmt: skip
    assert (found["pool"], found["n_i"], found["n_m"], found["best_rival"]) == ("pool", 500, 20, "affine")
    assert (found["excess"], found["excess_standard_error"]) == pytest.approx((0.5, 0.5))
    assert found["holds"] is True


# ---- quick cells ---------------------------------------------------------------------------------


def test_in_an_interior_pool_the_affine_span_recovers_what_no_convex_combination_reaches() -> None:
    found = study_cell("interior, gamma .5", 20_000, 20, [0])
    world = make_instance(0, **POOLS["interior, gamma .5"])
    # a convex combination of uploads holds at most the largest share a of a task, so with exact uploads it
    # stays (1 - a) times the task's height over the others' hull away from its optimum
    floor = (1 - float(world.alpha.max(0).min())) * affine_height(world.experts)
    assert found.mean("convex") > floor - 0.2 > 2  # uploads from 20 000 samples are within 0.2 of exact
    assert found.mean("affine") < 0.25 * found.mean("convex")
    assert found.mean("auto") == found.mean("affine")
    assert found.mean("posterior") < 0.25 * found.mean("convex")
    assert found.mean("public only") > 3  # 20 examples for 16 features
    assert found.chosen["auto: affine"] == 6
    assert sum(count for name, count in found.chosen.items() if name.startswith("posterior")) == 6


def test_with_a_large_public_set_the_posterior_is_as_good_as_the_public_set_alone() -> None:
    found = study_cell("interior, gamma .5", 20_000, 1000, [0])
    assert found.mean("posterior") <= 1.05 * found.mean("public only")
    # least squares: E |error|^2 = l sigma^2 tr(Phi^-1) / (n - r - 1), and the largest of six tasks is near it
    world = make_instance(0)
    typical = (12 * 0.25 * float(np.trace(np.linalg.inv(world.phi))) / (1000 - 17)) ** 0.5
    assert typical < found.mean("public only") < 1.25 * typical
    assert found.mean("affine") > found.mean("posterior")  # what 20 000 samples leave off the span


def test_clients_that_are_all_alike_leave_the_posterior_to_the_public_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gamma = 1: uploads are noise around zero, far smaller than the experts, and tell nothing about a task
    monkeypatch.setattr(recovery_without_anchors, "POOLS", {"uniform": {"anchors": False, "gamma": 1.0}})
    found = study_cell("uniform", 20_000, 50, [0])
    assert found.mean("convex") > 3
    assert found.mean("posterior") <= 1.05 * found.mean("public only")


def test_pure_anchors_keep_the_posterior_at_the_convex_expert() -> None:
    found = study_cell("pure anchors", 500, 20, [0])
    assert found.best_rival == "convex"
    assert found.holds
    assert found.chosen["posterior: convex"] == 6


def test_a_cell_repeats_and_its_seeds_are_independent_of_each_other() -> None:
    both = study_cell("interior, gamma .5", 100, 6, [0, 3], **SMALL)
    alone = study_cell("interior, gamma .5", 100, 6, [3], **SMALL)
    assert set(both.errors) == set(ESTIMATES)
    for name in ESTIMATES:
        assert len(both.errors[name]) == 2
        assert both.errors[name][1] == alone.errors[name][0]
        assert both.errors[name][0] != both.errors[name][1]


def test_uploads_and_public_sets_have_streams_of_their_own_for_every_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: list[float] = []

    def noted(draw: Any) -> Any:
        def wrapper(world: Instance, n: int, rng: np.random.Generator) -> Any:
            first.append(deepcopy(rng).random())
            return draw(world, n, rng)

        return wrapper

    monkeypatch.setattr(recovery_without_anchors, "sample_uploads", noted(sample_uploads))
    monkeypatch.setattr(recovery_without_anchors, "public_folds", noted(public_folds))
    study_cell("pure anchors", 6, 6, [0, 1], **SMALL)
    assert len(set(first)) == len(first) == 4


def test_the_study_has_every_cell_and_tells_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def noted(*given: Any) -> Cell:
        asked.append(given)
        return cell(posterior=(1.0, 1.0))

    monkeypatch.setattr(recovery_without_anchors, "study_cell", noted)
    told: list[str] = []
    assert len(study([4], on_done=told.append)) == len(told) == 5 * 2 * 5
    assert len(set(told)) == 50
    assert asked == [(pool, n_i, n_m, [4]) for pool in POOLS for n_i in CLIENT_SIZES for n_m in PUBLIC_SIZES]
    assert told[1] == "pure anchors, n_i = 500, n_m = 20"
    assert len(study([4], pools=["pure anchors"], client_sizes=[7], public_sizes=[2, 3])) == 2


def test_refusals_are_one_line() -> None:
    with pytest.raises(ValueError, match="got n = 1, needs at least 2 examples to hold one out") as a:
        public_folds(make_instance(0, **SMALL), 1, np.random.default_rng(0))
    with pytest.raises(
        ValueError, match="got pool 'muddy', needs one of pure anchors, anchors, impurity"
    ) as b:
        study_cell("muddy", 500, 20, [0])
    with pytest.raises(ValueError, match="uploads: got 3 samples per client, needs at least r = 4") as c:
        study_cell("pure anchors", 3, 20, [0], **SMALL)
    assert "\n" not in f"{a.value}{b.value}{c.value}"
