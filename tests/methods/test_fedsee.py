"""FedSEE's protocol on small models: what stays frozen, what travels, what sums to what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprism import api
from fedprism.evaluation import plots, reports
from fedprism.methods import fedsee
from fedprism.methods.fedsee import Config, assign
from fedprism.methods.lora_frames import align
from fedprism.models.interface import Bank
from fedprism.protocol import Ask, Reply, payload_bytes
from tests.tiny import Linear, drive, facts_of, mixed_clients
from tests.tiny_text import Tiny

FAST: dict[str, Any] = {
    "rounds": 4, "init_epochs": 2, "batch_size": 8, "lr": 0.05, "public_batch": 8, "extract_steps": 10,
}  # fmt: skip


def fresh(rank: int = 2, n_clients: int = 4) -> dict[int, Any]:
    return mixed_clients(n_clients, model=Linear(3, rank=rank))


def test_assign_by_hand() -> None:
    column = torch.tensor([0.1, 0.3, 0.02, 0.08])  # sum 0.5
    usable, c, active = assign(column, Config(active=2))
    assert usable == [0, 1, 2, 3] and c.tolist() == pytest.approx([0.2, 0.6, 0.04, 0.16])
    assert active == [0, 1]
    usable, c, active = assign(column, Config(usable=2, active=0, tau=0.3))
    assert usable == [0, 1] and c.tolist() == pytest.approx([0.25, 0.75, 0, 0]) and active == [1]
    # ties to the lower index; nobody reaches tau
    assert assign(torch.ones(3), Config(tau=0.9))[2] == [0]
    assert assign(torch.ones(3), Config(tau=0.9, empty_active="none"))[2] == []


def test_alignment_is_the_least_squares_change_of_frame() -> None:
    g = torch.Generator().manual_seed(0)
    A, new, B = torch.randn(2, 5, generator=g), torch.randn(2, 5, generator=g), torch.randn(3, 2, generator=g)
    moved = align({"lora_B.p": B}, {"lora_A.p": A}, {"lora_A.p": new})["lora_B.p"]
    reference = torch.linalg.lstsq(new.T.double(), (B @ A).T.double()).solution.T
    assert torch.allclose(moved.double(), reference, atol=1e-5)
    assert torch.allclose(align({"lora_B.p": B}, {"lora_A.p": A}, {"lora_A.p": A})["lora_B.p"], B, atol=1e-5)
    assert align({"lora_B.p": B}, {}, {})["lora_B.p"] is B  # a model without A has no frame


@pytest.mark.parametrize("rank", [0, 2])
def test_marginals_hold_after_every_extraction_and_after_smoothing(rank: int) -> None:
    ends = drive(fedsee.METHOD, Config(**FAST), fresh(rank))
    assert [end.round for end in ends] == [0, 1, 2]  # four epochs, two of them initial
    for end in ends:
        C = torch.tensor(end.log["contributions"])
        assert float((C.sum(1) - 1).abs().max()) < 1e-6 and float((C.sum(0) - 0.5).abs().max()) < 1e-3
        smooth = torch.tensor(end.log["smoothed"])
        assert (
            float((smooth.sum(1) - 1).abs().max()) < 1e-6 and float((smooth.sum(0) - 0.5).abs().max()) < 1e-3
        )
        assert all(k >= -1e-9 for k in end.log.get("kl", [])) and end.log["column_residual"] < 1e-3


def test_smoothing_gives_lambda_to_the_new_matrix() -> None:
    ends = drive(fedsee.METHOD, Config(**FAST, smoothing=0.9), fresh())
    old, new = torch.tensor(ends[0].log["contributions"]), torch.tensor(ends[1].log["contributions"])
    assert torch.allclose(torch.tensor(ends[1].log["smoothed"]), 0.1 * old + 0.9 * new, atol=1e-12)


def test_a_client_step_leaves_passive_experts_alone_and_trains_their_router_rows() -> None:
    clients = fresh()
    cfg = Config(**FAST, active=1)
    first = drive(fedsee.METHOD, cfg, clients, stop=1)[-1].state
    experts = {m: {k: v.clone() for k, v in tree.items()} for m, tree in first.experts.items()}
    usable, c, active = assign(first.C[:, 0], cfg)
    got = {"A": first.A, "head": {}, "experts": first.experts, "pair": {}, "router": {}, "n_experts": 2,
           "usable": usable, "active": active, "target": c, "lr": 0.05}  # fmt: skip
    sent = fedsee.update(clients[0], got, cfg)
    (trained,) = active
    passive = 1 - trained
    assert set(sent["blocks"]) == {trained}
    assert all(torch.equal(experts[passive][k], first.experts[passive][k]) for k in experts[passive])
    assert not torch.equal(sent["blocks"][trained]["lora_B.p"], experts[trained]["lora_B.p"])
    clients[0].generator.manual_seed(1)
    untrained = fedsee.update(clients[0], got, replace(cfg, lr=1e-12, router_lr_scale=1e-3))
    clients[0].generator.manual_seed(1)
    moved = fedsee.update(clients[0], {**got, "lr": 0.05}, cfg)
    change = (moved["router"]["router.p.weight"] - untrained["router"]["router.p.weight"]).abs().sum(1)
    assert float(change[passive]) > 1e-4


def test_bytes_up_are_the_active_blocks_the_pair_and_the_router() -> None:
    sizes = {}
    for active in (1, 2):
        clients = fresh()
        cfg = Config(**FAST, active=active, tau=0.0)
        state = drive(fedsee.METHOD, cfg, clients, stop=1)[-1].state
        usable, c, trained = assign(state.C[:, 0], cfg)
        got = {"A": state.A, "head": {}, "experts": state.experts, "pair": {}, "router": {}, "n_experts": 2,
               "usable": usable, "active": trained, "target": c, "lr": 0.05}  # fmt: skip
        sent = fedsee.update(clients[0], got, cfg)
        sizes[active] = payload_bytes({k: sent[k] for k in ("blocks", "pair", "router")})
    block, pair, router = (
        2 * 2 * 4,
        (2 * 3 + 2 * 2) * 4,
        (2 * 3 + 2) * 4,
    )  # B (2,2); A (2,3) and B; weight and bias
    assert sizes == {1: block + pair + router, 2: 2 * block + pair + router}


def test_the_server_by_hand_with_written_replies() -> None:
    """No client, no engine: the replies are written here, and the averages worked on paper."""
    cfg = Config(rounds=2, init_epochs=1, frame_rows=0, align_init="none", table_rows=0)
    model = Linear(2, rank=1)
    facts = facts_of({}, n_tasks=2)
    facts = replace(facts, clients=(0, 1), sizes=(5, 5))
    state = fedsee.start(cfg, model, facts)
    server = fedsee.server(cfg, state, facts.clients)
    ask = next(server)
    assert (
        isinstance(ask, Ask)
        and ask.phase == "initialize"
        and set(ask.body) == {"A", "B", "head", "epochs", "lr"}
    )

    def reply(i: int, a: float, b: float) -> Reply:
        tree = {"A": {"lora_A.p": torch.tensor([[a, 0.0]])}, "B": {"lora_B.p": torch.tensor([[b], [0.0]])}}
        return Reply(i, {**tree, "head": {}, "n": 5, "loss": 1.0, "examples": 5})

    ask = server.send([reply(0, 1.0, 10.0), reply(1, 3.0, 20.0)])
    assert isinstance(ask, Ask) and ask.phase == "extract" and list(ask.clients) == [-1]
    assert ask.body["A"]["lora_A.p"].tolist() == [[2.0, 0.0]]  # the mean of the A's
    assert ask.body["pool"].tolist() == [[10.0, 0.0], [20.0, 0.0]]
    assert ask.body["omega"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    omega = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double()
    experts = {0: {"lora_B.p": torch.tensor([[11.0], [0.0]])}, 1: {"lora_B.p": torch.tensor([[19.0], [0.0]])}}
    extra = {"losses": torch.zeros(1, 2), "table": torch.zeros(0, 0), "residual": 0.0, "norms": (0.0, 0.0),
             "hull": (), "examples": 0}  # fmt: skip
    end = server.send([Reply(-1, {"experts": experts, "omega": omega, **extra})])
    assert end.round == 0 and end.state.C.tolist() == omega.tolist()
    ask = next(server)
    assert isinstance(ask, Ask) and ask.phase == "update" and ask.body["pair"] == {}
    assert ask.each[0]["active"] == [0] and ask.each[1]["active"] == [1]
    assert ask.each[0]["target"].tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("init", ["paper", "federated", "fixed"])
def test_every_way_to_initialise_runs_and_fixed_never_trains_the_shared_factor(init: Any) -> None:
    clients = fresh()
    before = Linear(3, rank=2).init("lora_A", 0)
    ends = drive(fedsee.METHOD, Config(**FAST, init=init), clients)
    A = ends[0].state.A
    assert torch.equal(A["lora_A.p"], before["lora_A.p"]) == (init == "fixed")
    assert max(ends[0].log["frame_drift"]) < (1e-6 if init == "fixed" else 10)


@pytest.mark.parametrize(
    "switch",
    [
        {"calibration": "uniform"}, {"calibration": "none"}, {"shared_pair": False}, {"usable": 1},
        {"extraction": "independent"}, {"reg": "entropy"}, {"reg": "none"}, {"keep_previous": True},
        {"router_init": "zero"}, {"router_average": "users", "usable": 1}, {"average_A": "samples"},
        {"block_clip": 0.0, "row_clip": 0.0}, {"public_batch": 0}, {"evaluate": "broadcast"},
        {"init_lr_A_scale": 0.1}, {"participation": 0.5}, {"active": 0, "tau": 0.0},
        {"empty_active": "none", "smoothing": 1.0, "tau": 0.5},
        {"head_init": "train_init"}, {"match_total_epochs": False},
    ],
)  # fmt: skip
def test_every_switch_runs_and_predicts(switch: dict[str, Any]) -> None:
    clients = fresh()
    cfg = Config(**{**FAST, **switch})
    ends = drive(fedsee.METHOD, cfg, clients)
    assert len(ends) == cfg.total_rounds == (5 if "match_total_epochs" in switch else 3)
    for i in range(4):
        batch = next(clients[i].data["test"].batches(8))
        out = fedsee.predictor(clients[i], fedsee.serve(cfg, ends[-1].state), cfg)(batch)
        assert bool(torch.isfinite(out.logits).all())
        if out.usage_sum is not None:
            assert torch.allclose(out.usage.sum(1), torch.ones(1), atol=1e-5)


def test_partial_participation_leaves_absent_columns() -> None:
    ends = drive(fedsee.METHOD, Config(**FAST, participation=0.5), fresh())
    took_part = {int(i) for i in ends[1].log["active"]}
    absent = [i for i in range(4) if i not in took_part]
    assert len(took_part) == 2
    before, after = torch.tensor(ends[0].log["smoothed"]), torch.tensor(ends[1].log["smoothed"])
    assert torch.equal(before[:, absent], after[:, absent])
    new = torch.tensor(ends[1].log["contributions"])
    assert new.shape == (2, 2) and float((new.sum(0) - 1.0).abs().max()) < 1e-3  # M / N_t = 1


def test_a_large_calibration_weight_brings_usage_to_the_target() -> None:
    distance = {}
    for weight in (0.0, 5.0):
        clients = fresh()
        cfg = Config(**{**FAST, "rounds": 12}, kl_weight=weight, active=0, tau=0.0)
        ends = drive(fedsee.METHOD, cfg, clients)
        gaps = []
        for i in range(4):
            state = ends[-1].state
            bank = Bank(state.A, state.sent, clients[i].state["router"])
            batch = next(clients[i].data["train"].batches(100))
            usage = clients[i].model.apply(clients[i].state["pair"], batch, bank=bank).usage
            gaps.append(float((usage[0].double() - torch.tensor(ends[-1].log["assigned"][i])).abs().sum()))
        distance[weight] = sum(gaps)
    assert distance[5.0] < 0.5 * distance[0.0]


def test_pure_clients_are_recognised_and_every_expert_is_best_on_its_own_task() -> None:
    clients = mixed_clients(6, 2, n=64, model=Linear(3))
    cfg = Config(**{**FAST, "rounds": 8, "extract_steps": 100, "block_clip": 1.0, "row_clip": 1.0, "lr": 0.1})
    ends = drive(fedsee.METHOD, cfg, clients)
    used = torch.tensor(ends[-1].log["assigned"])
    assert used.argmax(1).tolist() == [0, 1, 0, 1, 0, 1]
    table = torch.tensor(ends[-1].log["public_losses"])
    assert table.argmin(0).tolist() == [0, 1]  # on every task its own expert is the best


def test_epochs_that_do_not_fit_are_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="set match_total_epochs = false"):
        _ = Config(rounds=2, init_epochs=5).total_rounds


def test_a_round_in_which_nobody_trains_an_expert_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"round 1; lower method\.fedsee\.tau"):
        drive(fedsee.METHOD, Config(**FAST, empty_active="none", tau=1.0), fresh())


def test_previous_experts_in_the_pool_leave_contributions_with_row_sums_of_one() -> None:
    ends = drive(fedsee.METHOD, Config(**FAST, keep_previous=True), fresh())
    for end in ends:
        assert float((torch.tensor(end.log["contributions"]).sum(1) - 1).abs().max()) < 1e-9


def test_a_client_that_was_never_asked_is_served_by_the_averages() -> None:
    clients = fresh()
    cfg = Config(**FAST, participation=0.25)
    ends = drive(fedsee.METHOD, cfg, clients)
    (never, *_) = [i for i in range(4) if "adapter" in clients[i].state]
    got = fedsee.serve(cfg, ends[-1].state)
    batch = next(clients[never].data["test"].batches(8))
    bank = Bank(got["A"], got["experts"], got["router"])
    expected = clients[never].model.apply(got["pair"], batch, bank=bank).logits
    assert torch.equal(fedsee.predictor(clients[never], got, cfg)(batch).logits, expected)


# ---- experts outside the hull, and experts for some tasks only -----------------------------------


@pytest.mark.parametrize("public_batch", [0, 8])
@pytest.mark.parametrize("hull", ["affine", "auto", "posterior"])
def test_experts_outside_the_hull_run_and_the_log_says_which_was_taken(hull: Any, public_batch: int) -> None:
    clients = fresh()
    cfg = Config(**{**FAST, "public_batch": public_batch}, hull=hull, hull_steps=5)
    ends = drive(fedsee.METHOD, cfg, clients)
    assert len(ends) == 3
    allowed = {"affine": {"affine"}, "auto": {"affine", "convex"}}.get(
        hull, {"affine", "convex", "posterior"}
    )
    for end in ends:
        assert len(end.log["hull"]) == 2  # one word per expert
        assert {name.split()[0] for name in end.log["hull"]} <= allowed
        C = torch.tensor(end.log["contributions"])  # those of the convex program all the same
        assert float((C.sum(1) - 1).abs().max()) < 1e-6
    batch = next(clients[0].data["test"].batches(8))
    out = fedsee.predictor(clients[0], fedsee.serve(cfg, ends[-1].state), cfg)(batch)
    assert bool(torch.isfinite(out.logits).all())


def test_the_published_hull_logs_no_words_and_an_affine_one_gives_other_experts() -> None:
    flat = {
        hull: drive(fedsee.METHOD, Config(**FAST, hull=hull, hull_steps=20), fresh(), stop=1)[0]
        for hull in ("convex", "affine")
    }
    assert flat["convex"].log["hull"] == []
    convex, affine = (torch.stack([e["lora_B.p"] for e in flat[h].state.experts.values()]) for h in flat)
    assert convex.shape == affine.shape
    assert float((convex - affine).abs().max()) > 1e-3


def test_two_experts_for_three_tasks_run_to_the_end() -> None:
    clients = mixed_clients(4, 3, d=3, model=Linear(3, rank=2))
    cfg = Config(**FAST, experts=2)
    ends = drive(fedsee.METHOD, cfg, clients, facts=facts_of(clients, n_tasks=3))
    assert len(ends) == 3
    state = ends[-1].state
    assert state.tasks == ("task0", "task1")
    assert sorted(state.experts) == [0, 1]
    for end in ends:
        C = torch.tensor(end.log["contributions"])
        assert C.shape == (2, 4)
        assert C.sum(0).tolist() == pytest.approx([0.5] * 4, abs=1e-3)  # M / N with M = 2
        assert torch.tensor(end.log["public_losses"]).shape == (2, 2)
    assert all(len(row) == 2 for row in ends[-1].log["assigned"])


def test_more_experts_than_public_sets_are_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^fedsee: got 9 experts, 2 public sets; needs 1 to as many"):
        fedsee.start(Config(**FAST, experts=9), Linear(3), facts_of(fresh()))
    with pytest.raises(ValueError, match="got 9 experts, 3 public sets; needs 1 to as many") as fault:
        api.run_experiment(tiny.experiment("fedsee", method__fedsee__experts=9), tmp_path / "run")
    assert "\n" not in str(fault.value)


def test_a_run_with_fewer_experts_than_tasks_is_reported_with_zeros_for_the_rest(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")  # all its pictures
    threads = torch.get_num_threads()
    try:
        few = {"method__fedsee__experts": 2, "method__fedsee__hull": "auto", "method__fedsee__hull_steps": 2}
        experiment = tiny.experiment("fedsee", method__rounds=3, **few)
        summary = api.run_experiment(experiment, tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    (run,) = summary["runs"]
    assert run["complete"]
    estimated, given = (np.array(run["mixture"][key]) for key in ("estimated", "partitioner"))
    assert estimated.shape == given.shape == (4, 3)
    assert (estimated[:, 2] == 0).all()
    assert estimated[:, :2].sum(1) == pytest.approx(1.0)
    assert run["mixture"]["mae"] == pytest.approx(float(np.abs(estimated - given).mean()))
    assert np.array(run["public_losses"]).shape == (2, 2)
    figure = plots.public_losses(reports.load_experiment(tmp_path / "run"), "fedsee")
    assert figure is not None
    drawn = figure.axes[0]
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["fruit", "metal"]
    cells = [float(text.get_text().removesuffix(" ●")) for text in drawn.texts]
    assert cells == pytest.approx(np.ravel(run["public_losses"]), abs=6e-4)


def test_a_public_set_of_one_row_is_refused_before_training_where_experts_may_leave_the_hull() -> None:
    facts = replace(facts_of(fresh()), public_sizes=(5, 1))
    fedsee.start(Config(**FAST), Linear(3), facts)
    with pytest.raises(ValueError, match=r"^fedsee: a public set of one row, hull needs 2 or more of each"):
        fedsee.start(Config(**FAST, hull="affine"), Linear(3), facts)
