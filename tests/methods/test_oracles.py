"""Answers that the code did not compute: closed forms, known optima, reductions to other methods."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedprism import trees
from fedprism.methods import fedavg, references, scaffold
from fedprism.training import LocalTraining, adamw, decay_rate, sgd, solve
from tests.tiny import TinyRows, drive, mixed_clients, quadratic_clients

A, B = (1.0, 4.0), (0.0, 1.0)  # two quadratics a (w - b)^2 / 2; their sum has its optimum at 4 / 5
STEPS = {"local_steps": 10, "lr": 0.05, "optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 1}


def test_fedavg_settles_at_the_fixed_point_of_its_own_map() -> None:
    # ten steps of 0.05 contract client i's error to r_i = (1 - 0.05 a_i)^10 of itself:
    # w = mean(r_i w + (1 - r_i) b_i)
    r = [(1 - 0.05 * a) ** 10 for a in A]
    fixed = sum((1 - ri) * b for ri, b in zip(r, B, strict=True)) / sum(1 - ri for ri in r)
    assert fixed == pytest.approx(0.68988, abs=5e-6)  # the published value
    ends = drive(fedavg.FEDAVG, fedavg.Config(rounds=30, **STEPS), quadratic_clients(A, B))
    assert float(ends[-1].state.w["w"]) == pytest.approx(fixed, abs=1e-12)


def test_scaffold_reaches_the_true_optimum_with_the_right_control_variates() -> None:
    clients = quadratic_clients(A, B)
    ends = drive(scaffold.METHOD, scaffold.Config(rounds=40, **STEPS), clients)
    assert float(ends[-1].state.x["w"]) == pytest.approx(0.8, abs=1e-9)
    # at the optimum c_i is client i's own gradient: 1 * (0.8 - 0) and 4 * (0.8 - 1)
    assert float(clients[0].state["c_i"]["w"]) == pytest.approx(0.8, abs=1e-9)
    assert float(clients[1].state["c_i"]["w"]) == pytest.approx(-0.8, abs=1e-9)
    assert float(ends[-1].state.c["w"]) == pytest.approx(0.0, abs=1e-9)


def test_scaffold_diverges_with_the_sign_of_the_correction_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scaffold, "sgd", lambda *args, correct, **kw: sgd(*args, correct=trees.scale(correct, -1.0), **kw)
    )
    clients = quadratic_clients(A, B)
    try:
        ends = drive(scaffold.METHOD, scaffold.Config(rounds=40, **STEPS), clients)
        assert abs(float(ends[-1].state.x["w"]) - 0.8) > 1.0
    except RuntimeError as fault:  # the loss overflowed and the client was named
        assert "client" in str(fault)


def test_scaffold_with_momentum_needs_the_corrected_denominator() -> None:
    a, b = (1.0, 4.0, 2.0, 0.5), (0.0, 1.0, -1.0, 3.0)
    optimum = sum(x * y for x, y in zip(a, b, strict=True)) / sum(a)
    cfg = scaffold.Config(rounds=40, **{**STEPS, "lr": 0.02}, momentum=0.9)
    ends = drive(scaffold.METHOD, cfg, quadratic_clients(a, b))
    assert float(ends[-1].state.x["w"]) == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, 10.0), (0.9, 41.381059609)])
def test_sgd_counts_the_weight_of_its_gradients(momentum: float, expected: float) -> None:
    # expected: sum_{s=1..10} sum_{k=s..10} momentum^(k-s), by hand: 10 without momentum m,
    # (1/(1-m)) (10 - m (1-m^10)/(1-m)) with it
    start = {"w": torch.zeros(1, dtype=torch.float64)}
    end, done = sgd(lambda tree, _b: (3.0 * tree["w"]).sum(), start, [None] * 10, 0.1, momentum=momentum)
    assert done.weight / 0.1 == pytest.approx(expected, rel=1e-9)
    assert float(end["w"]) == pytest.approx(-3.0 * done.weight)  # constant gradient 3
    assert float(start["w"]) == 0.0


def test_adamw_continued_equals_adamw_uninterrupted() -> None:
    def loss(tree: dict[str, torch.Tensor], target: float) -> torch.Tensor:
        return (tree["w"] - target).square().sum()

    start, targets = {"w": torch.tensor([1.0, -2.0])}, [0.5, 1.5, -1.0, 2.0]
    whole, _ = adamw(loss, start, targets, 0.1)
    half, done = adamw(loss, start, targets[:2], 0.1)
    rest, _ = adamw(loss, half, targets[2:], 0.1, state=done.optimizer)
    assert torch.equal(whole["w"], rest["w"])


def test_one_full_batch_step_is_gradient_descent_on_the_weighted_sum() -> None:
    clients = quadratic_clients(A, B)
    clients[1].data = {
        "train": TinyRows(a=torch.tensor([4.0, 4.0, 4.0]).double(), b=torch.ones(3).double())
    }  # n = 3
    cfg = fedavg.Config(**{**STEPS, "local_steps": 1, "lr": 0.1, "batch_size": 8}, rounds=1)
    ends = drive(fedavg.FEDAVG, cfg, clients)
    # gradient at 0: 1/4 * (1 * (0 - 0)) + 3/4 * (4 * (0 - 1)) = -3
    assert float(ends[-1].state.w["w"]) == pytest.approx(0.3, abs=1e-12)


def test_scaffold_of_one_client_is_fedavg_of_one_client() -> None:
    one = {**STEPS, "rounds": 5}
    a = drive(scaffold.METHOD, scaffold.Config(**one), quadratic_clients((2.0,), (1.5,)))
    b = drive(fedavg.FEDAVG, fedavg.Config(**one), quadratic_clients((2.0,), (1.5,)))
    assert float(a[-1].state.x["w"]) == pytest.approx(float(b[-1].state.w["w"]), abs=1e-12)


def test_scaffold_keeps_c_the_mean_of_the_clients_c() -> None:
    clients = quadratic_clients(A, B)
    for stop in (1, 2, 3):
        clients = quadratic_clients(A, B)
        ends = drive(scaffold.METHOD, scaffold.Config(rounds=9, **STEPS), clients, stop=stop)
        mean = (clients[0].state["c_i"]["w"] + clients[1].state["c_i"]["w"]) / 2
        assert float(ends[-1].state.c["w"]) == pytest.approx(float(mean), abs=1e-12)


def test_scaffold_refuses_adamw_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"needs 'sgd'; set method.scaffold.optimizer"):
        scaffold.Config(optimizer="adamw")


def test_local_only_equals_fedavg_of_one_client_and_ignores_the_others() -> None:
    cfg = {"rounds": 3, "lr": 0.1, "optimizer": "sgd", "batch_size": 8, "clip": 0.0}
    alone = {0: mixed_clients()[0]}
    drive(references.LOCAL_ONLY, references.LocalConfig(**cfg), alone)
    among = mixed_clients()
    drive(references.LOCAL_ONLY, references.LocalConfig(**cfg), among)
    assert torch.equal(alone[0].state["w"]["lora_B.p"], among[0].state["w"]["lora_B.p"])
    # FedAvg with one full-batch step a round has no shuffling to differ in
    full = {**cfg, "batch_size": 1000}
    alone = {0: mixed_clients()[0]}
    drive(references.LOCAL_ONLY, references.LocalConfig(**full), alone)
    fed = drive(fedavg.FEDAVG, fedavg.Config(**full), {0: mixed_clients()[0]})
    assert torch.allclose(alone[0].state["w"]["lora_B.p"], fed[-1].state.w["lora_B.p"], atol=1e-7)


def test_centralised_per_task_with_one_task_is_centralised_pooled() -> None:
    results = []
    for scope in ("task", "pooled"):
        clients = mixed_clients(n_tasks=1)
        cfg = references.CentralizedConfig(rounds=2, lr=0.1, batch_size=1000, scope=scope)
        from tests.tiny import facts_of

        ends = drive(references.CENTRALIZED, cfg, clients, facts=facts_of(clients, n_tasks=1))
        (tree,) = ends[-1].state.models.values()
        results.append(tree["lora_B.p"])
    assert torch.allclose(results[0], results[1], atol=1e-7)


def test_fine_tuning_for_zero_epochs_is_fedavg_and_leaves_the_global_tree_alone() -> None:
    clients = mixed_clients()
    cfg = fedavg.FineTuneConfig(rounds=1, lr=0.1, finetune_epochs=0)
    ends = drive(fedavg.FEDAVG_FT, cfg, clients)
    got = fedavg.serve(cfg, ends[-1].state)
    batch = next(clients[0].data["test"].batches(8))
    plain = fedavg.predictor(clients[0], got, cfg)(batch).logits
    assert torch.equal(plain, fedavg.fine_tuned(clients[0], got, cfg)(batch).logits)
    before = trees.copy(got["w"])
    tuned = dataclasses.replace(cfg, finetune_epochs=2)
    once = fedavg.fine_tuned(clients[0], got, tuned)(batch).logits
    assert not torch.equal(plain, once)
    assert all(torch.equal(before[name], got["w"][name]) for name in before)


def test_untrained_and_public_only_and_centralised_run_through_the_engine() -> None:
    clients = mixed_clients()
    (end,) = drive(references.UNTRAINED, references.UntrainedConfig(), clients)
    logits = references.untrained_predictor(clients[0], {}, None)(
        next(clients[0].data["test"].batches(8))
    ).logits
    assert torch.equal(logits, torch.zeros_like(logits)) and end.round == 0
    for method, config in (
        (references.PUBLIC_ONLY, references.PublicConfig),
        (references.CENTRALIZED, references.CentralizedConfig),
    ):
        cfg = config(rounds=30, lr=0.1, batch_size=8)
        ends = drive(method, cfg, clients)
        predict = method.predictor(clients[0], method.serve(cfg, ends[-1].state), cfg)
        rows = clients[-1].data["train"].batches(100)
        right = [float((predict(b).logits.argmax(1) == b["label"]).float().mean()) for b in rows]
        assert min(right) > 0.85, method.name  # separable tasks, each by its own model


WEIGHTS = {"weight": torch.tensor([2.0, -4.0]), "norm": torch.tensor([1.0, 3.0]), "bias": torch.tensor([5.0])}


def no_slope(tree: dict[str, torch.Tensor], _batch: None) -> torch.Tensor:
    return sum(((0.0 * value).sum() for value in tree.values()), start=torch.zeros(()))


def test_one_step_without_gradient_shrinks_exactly_the_decayed_tensors() -> None:
    for solver in (sgd, adamw):
        end, _ = solver(no_slope, WEIGHTS, [None], 0.5, weight_decay=decay_rate(0.25, {"weight"}))
        assert torch.equal(end["weight"], torch.tensor([1.75, -3.5]))  # (1 - 0.5 * 0.25) w
        assert torch.equal(end["norm"], WEIGHTS["norm"]) and torch.equal(end["bias"], WEIGHTS["bias"])
        end, _ = solver(no_slope, WEIGHTS, [None], 0.5, weight_decay=decay_rate(0.25, None))
        assert all(torch.equal(end[name], 0.875 * value) for name, value in WEIGHTS.items())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_solve_decays_what_it_is_told(optimizer: str) -> None:
    settings = LocalTraining(optimizer=optimizer, weight_decay=0.5, lr=0.5)  # type: ignore[arg-type]
    end, _ = solve(settings, no_slope, WEIGHTS, [None] * 2, 0.5, decayed=["norm"])
    assert torch.equal(end["norm"], torch.tensor([0.5625, 1.6875]))  # (1 - 0.25)^2 w
    assert torch.equal(end["weight"], WEIGHTS["weight"])
    end, _ = solve(settings, no_slope, WEIGHTS, [None], 0.5)
    assert all(torch.equal(end[name], 0.75 * value) for name, value in WEIGHTS.items())


def test_decay_with_momentum_follows_the_recursion() -> None:
    # d <- m d + (a w + k w), w <- w - lr d, by hand for two steps from w = 1, a = 1, k = 1, m = .5, lr = .1:
    # d = 2, w = .8; d = 1 + 1.6 = 2.6, w = .54. Without decay: d = 1, w = .9; d = .5 + .9 = 1.4, w = .76
    start = {name: torch.ones(1, dtype=torch.float64) for name in ("decayed", "free")}

    def loss(tree: dict[str, torch.Tensor], _batch: None) -> torch.Tensor:
        return (tree["decayed"].square() + tree["free"].square()).sum() / 2

    rate = decay_rate(1.0, {"decayed"})
    end, _ = sgd(loss, start, [None] * 2, 0.1, momentum=0.5, weight_decay=rate)
    assert float(end["decayed"]) == pytest.approx(0.54) and float(end["free"]) == pytest.approx(0.76)
    assert all(float(value) == 1.0 for value in start.values())
