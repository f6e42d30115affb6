"""Privacy: accounts against closed forms and brute force, clipping by hand, noise measured, budgets kept."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm as normal
from torch import Tensor

from fedprism import privacy, trees
from fedprism.privacy import Release, SeededNoise, gaussian_delta, gaussian_epsilon, gaussian_ratio
from fedprism.protocol import Client
from fedprism.storage import decode, encode
from fedprism.training import (
    PrivateFeatures,
    PrivateTraining,
    adamw,
    budget_of,
    dp_sgd,
    private_mean,
    private_solve,
    sgd,
    solve,
    spent_of,
)
from tiny import TinyRows, quadratic_clients, table_clients

needs_pld = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="needs the extra `privacy`"
)
ACCOUNTANTS = [pytest.param("pld", marks=needs_pld), "rdp"]


def seeded(seed: int = 0) -> SeededNoise:
    return SeededNoise(torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------- accounts


@pytest.mark.parametrize(
    ("epsilon", "ratio"), [(0.0, 0.5), (0.5, 0.3), (1.0, 1.0), (6.0, 1.3095), (3.0, 4.0)]
)
def test_delta_is_the_hockey_stick_divergence_of_two_normals(epsilon: float, ratio: float) -> None:
    def excess(x: float) -> float:
        return max(normal.pdf(x, ratio) - math.exp(epsilon) * normal.pdf(x), 0.0)

    cross = epsilon / ratio + ratio / 2  # where the densities' ratio is e^epsilon
    by_integral = quad(excess, cross, cross + 15, epsabs=1e-14)[0]
    assert gaussian_delta(epsilon, ratio) == pytest.approx(by_integral, rel=1e-6, abs=1e-13)
    by_formula = normal.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * normal.cdf(
        -ratio / 2 - epsilon / ratio
    )
    assert gaussian_delta(epsilon, ratio) == pytest.approx(by_formula, rel=1e-6, abs=1e-13)


def test_published_constants_of_epsilon_6() -> None:
    m = gaussian_ratio(6.0, 1e-5)  # spec 7.1
    assert m == pytest.approx(1.3095, abs=5e-5)
    assert 1 / m == pytest.approx(0.764, abs=5e-4)
    assert math.sqrt(100) / m == pytest.approx(7.64, abs=5e-3)


def test_noise_on_a_whole_client_drowns_it() -> None:
    m = gaussian_ratio(6.0, 1e-5)
    assert privacy.noise_to_signal(m, 3_661) == pytest.approx(92, abs=0.5)  # features, sent once
    assert privacy.noise_to_signal(m, 56_000_000) == pytest.approx(11_400, abs=50)  # an update, sent once
    assert privacy.noise_to_signal(m / 10, 56_000_000) == pytest.approx(114_000, abs=500)  # of 100 rounds


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0])
def test_ratio_and_epsilon_are_inverse_and_err_to_the_safe_side(epsilon: float, delta: float) -> None:
    m = gaussian_ratio(epsilon, delta)
    assert gaussian_delta(epsilon, m) <= delta < gaussian_delta(epsilon, m * (1 + 1e-9))
    assert gaussian_epsilon(delta, m) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(gaussian_epsilon(delta, m), m) <= delta


def test_tiny_deltas_keep_their_digits() -> None:
    """Epsilon 20, ratio 1: the divergence is phi(19.5) times the integral of a smooth positive function."""

    def integrand(t: float) -> float:
        return math.exp(-19.5 * t - t * t / 2) * -math.expm1(-t)

    smooth = quad(integrand, 0, 10, epsabs=0, epsrel=1e-12)[0]
    assert gaussian_delta(20.0, 1.0) == pytest.approx(smooth * normal.pdf(19.5), rel=1e-9, abs=0)


def test_no_release_and_no_information_cost_nothing() -> None:
    assert privacy.spent_epsilon([], 1e-5) == 0.0
    assert privacy.spent_epsilon([Release(0.0, 1.0, 5), Release(3.0, 0.5, 0)], 1e-5) == 0.0
    assert gaussian_epsilon(0.5, 1e-3) == 0.0


def test_releases_of_all_data_compose_by_their_squares() -> None:
    releases = [Release(0.3, 1.0, 4), Release(0.8)]
    assert privacy.compose_ratios([3.0, 4.0]) == 5.0
    assert privacy.spent_epsilon(releases, 1e-5) == gaussian_epsilon(1e-5, math.sqrt(4 * 0.09 + 0.64))


@pytest.mark.parametrize("by", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("n", "tight", "bound"), [(1_382, 0.616, 0.653), (300, 1.18, 1.24), (5_200, 0.472, 0.507)]
)
def test_published_multipliers_of_500_steps(by: str, n: int, tight: float, bound: float) -> None:
    z = tight if by == "pld" else bound  # three digits, so 0.5 % around them
    less, more = (
        privacy.spent_epsilon([Release(1 / (z * f), 16 / n, 500)], 1e-5, by) for f in (0.995, 1.005)
    )
    assert more < 6.0 < less


@pytest.mark.parametrize(
    ("order", "z", "q"), [(2, 0.6, 0.01), (3, 1.0, 0.2), (8, 2.0, 0.05), (16, 1.2, 0.01)]
)
def test_renyi_divergence_of_whole_orders_is_the_binomial_sum(order: int, z: float, q: float) -> None:
    moment = math.fsum(
        math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp(k * (k - 1) / (2 * z * z))
        for k in range(order + 1)
    )
    assert privacy.sampled_renyi(order, 1 / z, q) == pytest.approx(math.log(moment) / (order - 1), rel=1e-9)


def test_renyi_divergence_of_all_data_is_the_gaussians() -> None:
    assert privacy.sampled_renyi(2.5, 0.4, 1.0) == pytest.approx(2.5 * 0.16 / 2)
    assert privacy.sampled_renyi(2.5, 0.4, 1 - 1e-12) == pytest.approx(2.5 * 0.16 / 2, rel=1e-6)


@needs_pld
@pytest.mark.parametrize(("z", "q", "steps"), [(0.8, 0.02, 100), (2.0, 0.2, 40), (1.0, 0.5, 3)])
def test_renyi_bound_lies_above_the_tight_account(z: float, q: float, steps: int) -> None:
    releases = [Release(0.4), Release(1 / z, q, steps)]
    tight, bound = (privacy.spent_epsilon(releases, 1e-5, by) for by in ("pld", "rdp"))
    assert tight < bound < 1.5 * tight


def hockey_stick(epsilon: float, m: float, z: float, q: float) -> float:
    """delta of one release of all data (ratio m) with one of a Poisson sample (ratio 1 / z), by a 2-D grid;
    the larger of adding and removing the record."""
    x, y = np.linspace(-9, 9 + m, 1501), np.linspace(-9 * z, 9 * z + 1, 1501)
    without = np.outer(normal.pdf(x), normal.pdf(y, 0, z))
    inside = np.outer(normal.pdf(x, m), (1 - q) * normal.pdf(y, 0, z) + q * normal.pdf(y, 1, z))
    cell = (x[1] - x[0]) * (y[1] - y[0])
    return max(
        cell * np.clip(a - math.exp(epsilon) * b, 0, None).sum()
        for a, b in ((inside, without), (without, inside))
    )


@needs_pld
def test_features_and_updates_share_one_account_as_brute_force_has_it() -> None:
    epsilon = privacy.spent_epsilon([Release(0.7), Release(1 / 0.8, 0.3)], 1e-3, "pld")
    assert hockey_stick(epsilon, 0.7, 0.8, 0.3) == pytest.approx(1e-3, rel=0.01)
    alone = privacy.spent_epsilon([Release(1 / 0.8, 0.3)], 1e-3, "pld")
    assert hockey_stick(alone, 0.7, 0.8, 0.3) > 2e-3  # leaving the features out would promise too much


@pytest.mark.parametrize("by", ACCOUNTANTS)
def test_noise_for_a_budget_is_enough_and_hardly_more(by: str) -> None:
    z = privacy.noise_for(3.0, 1e-5, rate=0.1, steps=20, besides=[Release(0.3)], by=by)
    enough, less = (
        privacy.spent_epsilon([Release(0.3), Release(1 / x, 0.1, 20)], 1e-5, by) for x in (z, z * (1 - 2e-4))
    )
    assert enough <= 3.0 < less


def test_epsilon_out_of_reach_is_one_clear_line() -> None:
    with pytest.raises(
        ValueError, match=r"epsilon 0\.001 at delta 1e-05 is out of reach .*raise epsilon"
    ) as e:
        privacy.noise_for(0.001, 1e-5, rate=0.1, steps=10, by="rdp")
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="lower the share of the features"):
        privacy.noise_for(1.0, 1e-5, rate=0.1, steps=10, besides=[Release(5.0)], by="rdp")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gaussian_ratio(0.0, 1e-5), "epsilon is 0.0, must be > 0"),
        (lambda: gaussian_ratio(1.0, 1.0), r"delta is 1.0, must be in \(0, 1\)"),
        (lambda: gaussian_epsilon(1e-5, math.inf), "must be >= 0 and finite"),
        (lambda: privacy.spent_epsilon([Release(1.0, 0.5)], 1e-5, "guess"), "needs 'pld' or 'rdp'"),
        (lambda: privacy.noise_for(1.0, 1e-5, rate=0.0, steps=3), "rate 0.0 and 3 steps"),
        (lambda: privacy.plan(1.0, 1e-5, steps=0), "0 steps of rate 1.0"),
        (lambda: privacy.plan(1.0, 1e-5, steps=1, releases=1), "feature_share is 0.0"),
        (lambda: privacy.noise_source("dice", torch.Generator()), "must be 'seeded' or 'secure'"),
        (lambda: privacy.clipped_sum(torch.tensor([[math.nan]]), 1.0), "not finite"),
    ],
)
def test_wrong_values_are_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------------------------------------- budgets


def test_gaussian_budget_splits_the_squared_ratio() -> None:
    budget = privacy.plan(6.0, 1e-5, steps=100, releases=4, feature_share=0.2)
    m = gaussian_ratio(6.0, 1e-5)
    assert 4 * budget.feature_ratio**2 == pytest.approx(0.2 * m * m)
    assert 100 * budget.update_ratio**2 == pytest.approx(0.8 * m * m)
    after, spent = budget.charge(steps=100, releases=4)
    assert spent == pytest.approx(6.0, rel=1e-9)
    assert (after.steps, after.releases) == (100, 4)


def test_budget_counts_up_and_refuses_to_be_passed() -> None:
    budget = privacy.plan(4.0, 1e-5, steps=10, rate=0.2, releases=1, feature_share=0.1, by="rdp")
    budget, first = budget.charge(releases=1)
    assert first == gaussian_epsilon(1e-5, budget.feature_ratio)
    budget, half = budget.charge(steps=5)
    budget, all_of_it = budget.charge(steps=5)
    assert 0 < first < half < all_of_it <= 4.0 * (1 + 1e-6)
    with pytest.raises(ValueError, match=r"40 more steps .* would spend epsilon .* of 4 .*stop here"):
        budget.charge(steps=40)
    assert budget.steps == 10  # the refused steps are not counted


def test_budget_without_planned_features_releases_none() -> None:
    with pytest.raises(ValueError, match="plans no features"):
        privacy.plan(4.0, 1e-5, steps=10).charge(releases=1)


# ---------------------------------------------------------------------------------------------- mechanisms


def test_clipping_by_hand() -> None:
    tree = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}  # norm 5
    clipped = privacy.clip_tree(tree, 1.0)
    assert torch.allclose(trees.flatten(clipped), torch.tensor([0.6, 0.8]))
    assert trees.flatten(privacy.clip_tree(tree, 6.0)).tolist() == [3.0, 4.0]
    with pytest.raises(FloatingPointError, match="not finite"):
        privacy.clip_tree({"a": torch.tensor([math.inf])}, 1.0)


def test_feature_sum_is_clipped_per_record_over_all_its_entries() -> None:
    values = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[0.1, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    total = privacy.clipped_sum(values, 1.0)
    assert total.dtype == torch.float64
    assert torch.allclose(total, torch.tensor([[0.7, 0.0], [0.0, 0.8]], dtype=torch.float64))


def test_symmetric_part() -> None:
    square = torch.tensor([[[1.0, 4.0], [2.0, 5.0]]])
    assert privacy.symmetrise(square).tolist() == [[[1.0, 3.0], [3.0, 5.0]]]


def test_noise_has_the_asked_spread_and_does_not_depend_on_the_order_of_names() -> None:
    tree = {"b": torch.zeros(30_000), "a": torch.full((10_000,), 7.0)}
    noisy = privacy.add_noise(tree, 0.5, seeded())
    assert list(noisy) == ["b", "a"]
    assert float(noisy["b"].std()) == pytest.approx(0.5, rel=0.02)
    assert float(noisy["a"].mean()) == pytest.approx(7.0, abs=0.02)
    other = privacy.add_noise({name: tree[name] for name in ("a", "b")}, 0.5, seeded())
    assert torch.equal(other["a"], noisy["a"])
    assert not torch.equal(noisy["a"][:100] - 7.0, noisy["b"][:100])


def test_secure_noise_is_normal_and_never_the_same() -> None:
    source = privacy.noise_source("secure", torch.Generator().manual_seed(0))
    first, second = source.normal((200, 200)), source.normal((200, 200))
    assert not torch.equal(first, second)
    assert float(first.std()) == pytest.approx(1.0, abs=0.03)
    assert float((first < -1.0).double().mean()) == pytest.approx(0.158655, abs=0.012)  # Phi(-1), 6 std
    uniform = source.uniform(40_000)
    assert bool(((uniform >= 0) & (uniform < 1)).all())
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)


# ---------------------------------------------------------------------------------------------- DP-SGD


class Counted(TinyRows):
    """Rows that note how many were selected."""

    chosen: list[int]

    def select(self, index: Tensor) -> TinyRows:
        self.chosen.append(len(index))
        return super().select(index)


def pull(tree: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean of (w - b)^2 / 2: the gradient of one record is w - b."""
    return ((tree["w"] - batch["b"]) ** 2 / 2).sum(-1).mean()


def test_one_step_by_hand() -> None:
    # From w = 0 the gradients are -1 and -10, clipped to -2; their sum -3 over 2 records; w = 0.1 * 1.5.
    rows, start = TinyRows(b=torch.tensor([[1.0], [10.0]])), {"w": torch.zeros(1)}
    w, done = dp_sgd(pull, start, rows, 0.1, clip=2.0, noise=0.0, rate=1.0, steps=1, source=seeded())
    assert w["w"].tolist() == pytest.approx([0.15])
    assert start["w"].tolist() == [0.0]
    assert (done.steps, done.examples, done.loss) == (1, 2, 0.0)
    assert done.weight == pytest.approx(0.1)


@pytest.mark.parametrize("rate", [0.5, 1e-12])
def test_noise_on_zero_gradients_is_z_times_clip_over_the_expected_sample(rate: float) -> None:
    def flat(tree: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return (tree["w"] * 0.0).sum()

    rows = TinyRows(b=torch.zeros(8, 1))
    w, _ = dp_sgd(
        flat, {"w": torch.zeros(40_000)}, rows, 1.0, clip=3.0, noise=0.5, rate=rate, steps=1, source=seeded()
    )
    # At rate 1e-12 the sample is empty: the step is a noisy one all the same.
    assert float(w["w"].std()) == pytest.approx(0.5 * 3.0 / (rate * 8), rel=0.02)
    assert abs(float(w["w"].mean())) < 5 * 0.5 * 3.0 / (rate * 8) / 200


def test_sample_sizes_are_binomial() -> None:
    rows = Counted(b=torch.zeros(50, 1))
    rows.chosen = []
    dp_sgd(pull, {"w": torch.zeros(1)}, rows, 0.1, clip=1.0, noise=1.0, rate=0.1, steps=600, source=seeded(3))
    sizes = np.array(rows.chosen + [0] * (600 - len(rows.chosen)))  # an empty sample selects nothing
    assert sizes.mean() == pytest.approx(5.0, abs=4 * math.sqrt(4.5 / 600))
    assert sizes.var() == pytest.approx(4.5, rel=0.25)
    assert 0 < (sizes == 0).mean() < 0.03  # 0.9^50 = 0.005


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_noise_and_clipping_it_is_full_batch_training_of_the_model(optimizer: Any) -> None:
    client = table_clients()[0]
    rows, start = client.data["train"], client.model.trainable(0)
    settings = {"momentum": 0.5} if optimizer == "sgd" else {}
    w, _ = dp_sgd(
        client.loss, start, rows, 0.05, clip=1e6, noise=0.0, rate=1.0, steps=3, source=seeded(),
        optimizer=optimizer, weight_decay=0.01, **settings,
    )  # fmt: skip
    whole = [next(rows.batches(len(rows)))] * 3
    if optimizer == "sgd":
        want, _ = sgd(client.loss, start, whole, 0.05, momentum=0.5, weight_decay=0.01)
    else:
        want, _ = adamw(client.loss, start, whole, 0.05, weight_decay=0.01, clip=None)
    assert trees.norm(trees.sub(w, want)) < 1e-4 * trees.norm(trees.sub(want, start))


def test_records_are_clipped_one_by_one_through_a_model() -> None:
    client = table_clients()[0]
    rows, start = client.data["train"], client.model.trainable(0)
    w, _ = dp_sgd(client.loss, start, rows, 1.0, clip=0.3, noise=0.0, rate=1.0, steps=1, source=seeded())
    total = trees.zeros(start)
    for k in range(len(rows)):
        leaves = {name: value.clone().requires_grad_(True) for name, value in start.items()}
        loss = client.loss(leaves, next(rows.select(torch.tensor([k])).batches(1)))
        found = torch.autograd.grad(loss, list(leaves.values()))
        size = math.sqrt(sum(float(g.square().sum()) for g in found))
        factor = min(1.0, 0.3 / size)
        total = {n: total[n] + factor * g for n, g in zip(leaves, found, strict=True)}
    want = {n: start[n] - total[n] / len(rows) for n in start}
    assert all(torch.allclose(w[n], want[n], atol=1e-6) for n in w)
    together, _ = dp_sgd(
        client.loss, start, rows, 1.0, clip=0.3, noise=0.0, rate=1.0, steps=1, source=seeded(), at_once=7
    )
    assert all(torch.allclose(together[n], w[n], atol=1e-6) for n in w)


def test_model_that_records_cannot_share_says_so() -> None:
    def branching(tree: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return tree["w"].sum() if bool(batch["b"].sum() > 0) else -tree["w"].sum()

    rows = TinyRows(b=torch.ones(4, 1))
    with pytest.raises(ValueError, match="set dp_micro_batch = 1") as e:
        dp_sgd(
            branching, {"w": torch.ones(1)}, rows, 0.1, clip=1.0, noise=0.0, rate=1.0, steps=1,
            source=seeded(), at_once=2,
        )  # fmt: skip
    assert "\n" not in str(e.value)


def test_wrong_settings_of_dp_sgd_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rate 1\.5"):
        dp_sgd(
            pull, {"w": torch.zeros(1)}, TinyRows(b=torch.zeros(2, 1)), 0.1, clip=1.0, noise=1.0, rate=1.5,
            steps=1, source=seeded(),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- clients

CFG = PrivateTraining(rounds=3, local_steps=2, batch_size=4, lr=0.1, optimizer="sgd", weight_decay=0.0)


def test_off_is_the_plain_solver_bit_for_bit() -> None:
    first, second = table_clients()[0], table_clients()[0]
    start = first.model.trainable(0)
    w, done = private_solve(CFG, first, first.loss, start, 0.1)
    want, plain = solve(CFG, second.loss, start, CFG.batches(second), 0.1, decayed=second.model.decayed)
    assert all(torch.equal(w[n], want[n]) for n in want)
    assert done.loss == plain.loss
    assert first.state == {} and spent_of(first) == 0.0


def test_a_client_spends_its_budget_over_the_planned_rounds_and_no_further() -> None:
    client = table_clients()[0]
    cfg, start = replace(CFG, dp="record"), client.model.trainable(0)
    seen = []
    for _ in range(3):
        tree, done = private_solve(cfg, client, client.loss, start, 0.1)
        client.state = decode(*_through_storage(client.state))
        seen.append(spent_of(client))
    assert 0 < seen[0] < seen[1] < seen[2] <= 6.0 * (1 + 1e-6)
    assert seen[2] > 5.9
    assert done.loss == 0.0 and done.examples == 8  # expected, not drawn
    assert budget_of(cfg, client).steps == 6
    with pytest.raises(ValueError, match="would spend epsilon"):
        private_solve(replace(cfg, local_steps=20), client, client.loss, start, 0.1)
    assert spent_of(client) == seen[2]
    assert trees.norm(trees.sub(tree, start)) > 0


def _through_storage(state: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return encode(state, tensors), tensors


def test_smaller_clients_get_more_noise() -> None:
    cfg = replace(CFG, dp="record")
    ratios = []
    for n in (12, 48):
        client = table_clients()[0]
        client.data = {"train": TinyRows(b=torch.zeros(n, 1))}
        ratios.append(budget_of(cfg, client).update_ratio)
    assert ratios[0] < ratios[1]


def test_delta_that_would_publish_a_record_is_refused() -> None:
    client = table_clients()[0]
    with pytest.raises(ValueError, match=r"must be below 1 / n .*lower delta"):
        budget_of(replace(CFG, dp="record", delta=0.5), client)


@pytest.mark.filterwarnings("ignore:dp = 'client'")
def test_an_update_of_unit_client_is_clipped_and_noised() -> None:
    cfg = replace(CFG, dp="client", rounds=4, local_steps=1, dp_clip=0.1)
    ends = []
    for optimum in (3.0, -3.0):  # one step of rate 1 reaches it; the same seed gives the same noise
        client = quadratic_clients((1.0,), (optimum,))[0]
        client.generator.manual_seed(5)
        w, done = private_solve(cfg, client, client.loss, {"w": torch.zeros(1, dtype=torch.float64)}, 1.0)
        ends.append(float(w["w"]))
        assert (done.loss, done.weight, done.optimizer) == (0.0, 0.0, {})
        assert spent_of(client) == pytest.approx(gaussian_epsilon(1e-5, gaussian_ratio(6.0, 1e-5) / 2))
    assert ends[0] - ends[1] == pytest.approx(0.2, rel=1e-6)
    assert ends[0] != pytest.approx(0.1, rel=1e-3)


def test_noise_of_unit_client_is_measured_as_the_warning_says() -> None:
    client, start = quadratic_clients((1.0,), (3.0,))[0], {"w": torch.zeros(20_000)}
    cfg = replace(CFG, dp="client", rounds=4, dp_clip=0.1)
    std = 2 * 0.1 * math.sqrt(4) / gaussian_ratio(6.0, 1e-5)
    ratio = std * math.sqrt(20_000) / 0.1
    with pytest.warns(UserWarning, match=f"20000 values of client 0's update is {ratio:.3g} times"):
        w, _ = private_solve(cfg, client, lambda tree, batch: (tree["w"] * 0.0).sum(), start, 0.1)
    assert float(w["w"].std()) == pytest.approx(std, rel=0.03)


@dataclass(frozen=True)
class WithFeatures(PrivateFeatures):
    """A method that sends features twice."""

    @property
    def feature_releases(self) -> int:
        return 2


def feature_client(n: int) -> Client:
    client = quadratic_clients((1.0,), (3.0,))[0]
    client.data = {"train": TinyRows(a=torch.ones(n), b=torch.ones(n))}
    return client


@pytest.mark.parametrize(("unit", "sensitivity"), [("record", 0.5 / 40), ("client", 2 * 0.5)])
def test_feature_noise_is_the_sensitivity_over_the_planned_ratio(unit: Any, sensitivity: float) -> None:
    client = feature_client(40)
    cfg = WithFeatures(
        rounds=2, local_steps=2, batch_size=4, dp=unit, feature_share=0.2, optimizer="sgd", weight_decay=0.0
    )
    total = torch.full((20_000,), 40.0, dtype=torch.float64)
    released = private_mean(cfg, client, total, 40, 0.5)
    ratio = gaussian_ratio(6.0, 1e-5) * math.sqrt(0.2 / 2)
    assert float(released.mean()) == pytest.approx(1.0, abs=5 * sensitivity / ratio / math.sqrt(20_000))
    assert float(released.std()) == pytest.approx(sensitivity / ratio, rel=0.03)
    assert spent_of(client) == gaussian_epsilon(1e-5, ratio)
    private_mean(cfg, client, total, 40, 0.5)
    assert spent_of(client) == gaussian_epsilon(1e-5, ratio * math.sqrt(2))


def test_features_and_updates_of_a_client_spend_one_budget() -> None:
    client = feature_client(40)
    cfg = WithFeatures(rounds=2, local_steps=2, batch_size=4, dp="record", feature_share=0.2)
    start, total = {"w": torch.zeros(1, dtype=torch.float64)}, torch.ones(3, dtype=torch.float64)
    for _ in range(2):
        private_mean(cfg, client, total, 40, 0.5)
        private_solve(cfg, client, client.loss, start, 0.1)
    assert 5.9 < spent_of(client) <= 6.0 * (1 + 1e-6)
    with pytest.raises(ValueError, match="would spend epsilon"):
        for _ in range(3):
            private_mean(cfg, client, total, 40, 0.5)


@pytest.mark.parametrize(("n", "limit"), [(40, 0.0), (0, 1.0)])
def test_features_that_nothing_bounds_are_not_released(n: int, limit: float) -> None:
    client = feature_client(40)
    cfg = WithFeatures(dp="record")
    with pytest.raises(ValueError, match="set feature_clip"):
        private_mean(cfg, client, torch.ones(3), n, limit)
    assert client.state == {}


def test_features_without_privacy_are_the_mean() -> None:
    client = feature_client(4)
    total = torch.tensor([2.0, 6.0], dtype=torch.float64)
    assert private_mean(WithFeatures(), client, total, 4, 1.0).tolist() == [0.5, 1.5]
    assert client.state == {}
