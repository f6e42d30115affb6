"""The geometry diagnostics: closed forms on quadratic tasks, a server driven by hand, a resumed text run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism import api
from fedprism.evaluation import geometry_plots
from fedprism.methods import fedsee_geometry as diagnostics
from fedprism.methods.fedsee_geometry import METHOD, Config, absorbed
from fedprism.models.interface import Bank
from fedprism.protocol import POOLED, Client, Facts, Reply
from tests.tiny import Linear, TinyRows, drive, facts_of, mixed_clients
from tests.tiny_text import Stopped, Tiny, Watch, left_behind

# Three linear tasks y = W_m x, W_m: (2, 2), over x = +-e_1, +-e_2: all have the same curvature, so a client's
# best map is exactly its mixture of the tasks' maps.
MAPS = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, -1.0]]])
INPUTS = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
COUNTS = torch.tensor([[2, 0, 0], [0, 2, 0], [0, 0, 2], [1, 1, 0], [1, 0, 1], [2, 1, 1]])
# Every batch is the whole set; the absorbed pair moves the optimum, not the barycentre.
SETTINGS: dict[str, Any] = {
    "projections": "all", "init_steps": 5, "steps": 200, "router_steps": 3, "batch_size": 64, "lr": 0.1,
    "weight_decay": 0.0, "clip": 0.0,
}  # fmt: skip


def rows(counts: Tensor) -> TinyRows:
    tasks = torch.repeat_interleave(torch.arange(3), counts)
    x = INPUTS.repeat(len(tasks), 1)
    tasks = tasks.repeat_interleave(4)
    return TinyRows(x=x, y=torch.einsum("nij,nj->ni", MAPS[tasks], x), task=tasks, label=tasks * 0)


def quadratic_federation(rank: int = 0) -> dict[int, Client]:
    model = Linear(d=2, outputs=2, rank=rank, loss="square")
    clients = {
        i: Client(i, model, {"train": rows(c), "validation": rows(c), "test": rows(c)})
        for i, c in enumerate(COUNTS)
    }
    eye = torch.eye(3, dtype=torch.int64)
    clients[POOLED] = Client(POOLED, model, {f"task{m}": rows(eye[m]) for m in range(3)})
    return clients


ALPHA = COUNTS.double() / COUNTS.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def logs() -> list[Any]:
    """Logs of the rounds up to routing."""
    clients = quadratic_federation()
    ends = drive(METHOD, Config(**SETTINGS), clients, facts=facts_of(clients, 3), stop=5)
    return [end.log for end in ends]


def test_adapters_of_quadratic_tasks_lie_at_their_clients_barycentres(logs: list[Any]) -> None:
    found = logs[3]
    assert found["mixtures"] == ALPHA.tolist()
    assert found["kinds"] == ["pure"] * 3 + ["edge"] * 2 + ["interior"]
    # The triangle of the maps has three sides of sqrt 2. Distances of the clients from the fixed choices:
    maps = MAPS.double().flatten(1)
    middle = maps.mean(0).expand(6, -1)
    shifts = [(ALPHA @ maps - ALPHA.roll(k, 1) @ maps).norm(dim=1) for k in (1, 2)]
    nothing = torch.zeros(6)
    wanted = {"hull": nothing, "true": nothing, "uniform": (ALPHA @ maps - middle).norm(dim=1),
              "shuffled": (shifts[0] + shifts[1]) / 2}  # fmt: skip
    for fit, distances in wanted.items():
        assert found["residuals"][fit][0] == pytest.approx((distances / 2**0.5).tolist(), abs=2e-3), fit
    assert torch.allclose(torch.tensor(found["weights"][0]).double(), ALPHA, atol=5e-3)
    assert found["diameters"] == pytest.approx([2**0.5], abs=2e-3)
    assert found["summary"]["edge_absent_mass"] < 5e-3
    assert found["holds"] == {"true < uniform < shuffled": True, "hull - affine < .02": True}


def test_fixed_weights_cost_what_the_closed_form_says(logs: list[Any]) -> None:
    # Loss of map V on task m, mean over the four inputs: |V - W_m|^2 / 2, each column is seen half the time.
    maps = MAPS.double().flatten(1)
    for name, mixed in (("true", ALPHA @ maps), ("uniform", maps.mean(0).expand(6, -1))):
        gaps = (mixed[:, None] - maps[None]).square().sum(2)  # (clients, tasks)
        wanted = (ALPHA * gaps).sum(1) / 2
        assert logs[4]["cross_entropy"][name] == pytest.approx(wanted.tolist(), abs=5e-3)
    assert logs[4]["means"]["true"]["pure"] == pytest.approx(0.0, abs=1e-3)
    assert logs[4]["means"]["uniform"]["pure"] == pytest.approx(1 / 3, abs=5e-3)  # |W_m - mean|^2 = 2/3


def test_every_block_starts_at_zero_over_the_absorbed_pair_and_takes_exactly_the_steps() -> None:
    clients = quadratic_federation(rank=2)
    cfg = Config(**{**SETTINGS, "steps": 7, "batch_size": 3})
    server = METHOD.server(cfg, METHOD.start(cfg, clients[0].model, facts_of(clients, 3)), range(6))
    ask: Any = next(server)
    A, B = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    bodies = [
        {"A": {"lora_A.p": A * k}, "B": {"lora_B.p": B * k}, "loss": 1.0, "examples": 1} for k in range(6)
    ]
    end: Any = server.send([Reply(i, body) for i, body in enumerate(bodies)])
    assert torch.equal(end.state.A["lora_A.p"], 2.5 * A)  # the mean of 0..5 is 2.5
    assert torch.equal(end.state.pair["lora_B.p"], 2.5 * B)
    assert torch.equal(end.state.pair["lora_A.p"], 2.5 * A)
    for task in ("task0", "task1", "task2"):
        ask = next(server) if task == "task0" else ask
        assert (ask.phase, list(ask.clients), ask.body["rows"]) == ("train_block", [POOLED], task)
        assert not ask.body["B"]["lora_B.p"].any()
        sent = diagnostics.train_block(clients[POOLED], dict(ask.body), cfg)
        assert sent["examples"] == 15  # seven steps over four rows in batches of 3: 3 1 3 1 3 1 3
        assert set(sent["B"]) == {"lora_B.p"}
        ask = server.send([Reply(POOLED, sent)])
    assert ask.round == 1 and sorted(ask.state.experts) == [0, 1, 2]
    ask = next(server)
    assert (ask.phase, list(ask.clients), ask.body["rows"]) == ("train_block", list(range(6)), "train")
    assert not ask.body["B"]["lora_B.p"].any()


@pytest.mark.parametrize("absorb", ["mean_of_factors", "mean_of_products"])
def test_the_absorbed_pair_is_the_averaged_update(absorb: str) -> None:
    g = torch.Generator().manual_seed(0)
    trained = [
        {"A": {"lora_A.p": torch.randn(2, 3, generator=g)}, "B": {"lora_B.p": torch.randn(2, 2, generator=g)}}
        for _ in range(4)
    ]
    A = torch.stack([one["A"]["lora_A.p"] for one in trained]).mean(0)
    mean_B = torch.stack([one["B"]["lora_B.p"] for one in trained]).mean(0)
    products = torch.stack([one["B"]["lora_B.p"] @ one["A"]["lora_A.p"] for one in trained]).mean(0)
    pair = absorbed(Config(absorb=absorb), {"lora_A.p": A}, trained)  # type: ignore[arg-type]
    update = pair["lora_B.p"] @ pair["lora_A.p"]
    assert torch.allclose(update, mean_B @ A if absorb == "mean_of_factors" else products, atol=1e-6)
    model = Linear(3, rank=2)  # and the model adds it to what an expert adds
    x = torch.randn(5, 3, generator=g)
    expert = torch.randn(2, 2, generator=g)
    bank = Bank({"lora_A.p": A}, {0: {"lora_B.p": expert}}, weights=torch.ones(1))
    assert torch.allclose(
        model.apply(pair, {"x": x}, bank=bank).logits, x @ (update + expert @ A).T, atol=1e-5
    )


def test_both_calibration_routers_start_alike_and_only_their_target_differs() -> None:
    used = {}
    for weight in (0.0, 20.0):
        clients = quadratic_federation()
        cfg = Config(**{**SETTINGS, "kl_weight": weight, "router_steps": 40, "router_lr_scale": 2.0})
        state = METHOD.start(cfg, clients[0].model, facts_of(clients, 3))
        experts = {m: {"lora_B.p": MAPS[m]} for m in range(3)}
        state = replace(state, round=5, experts=experts, mixtures=ALPHA)
        used[weight] = drive(METHOD, cfg, clients, facts=facts_of(clients, 3), state=state)[-1].log
    assert used[0.0]["uniform"] == used[0.0]["mixture"]  # without the term nothing tells them apart
    heavy = used[20.0]
    # A router's bias can reach any usage: its target, as far as the term goes. The middle is 4/3 from a pure
    # client's mixture, 2/3 from an edge one's and 1/3 from (.5, .25, .25).
    wanted = {"pure": 4 / 3, "edge": 2 / 3, "interior": 1 / 3, "all": 17 / 18}
    assert heavy["uniform"]["mismatch"] == pytest.approx(wanted, abs=0.05)
    assert heavy["mixture"]["mismatch"]["all"] < 0.1
    assert heavy["mixture"]["pure_correct_mass"] > 0.95 and heavy["mixture"]["edge_absent_mass"] < 0.05
    assert heavy["holds"] == {"mixture target closer than uniform": True}


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_rate_falls_to_zero_or_stays(schedule: str) -> None:
    # AdamW on a constant gradient moves by the rate in every step: .1 (1 + .75 + .5 + .25), or .1 each.
    cfg = Config(weight_decay=0.0, clip=0.0, schedule=schedule)  # type: ignore[arg-type]
    w, loss, _ = diagnostics.fit(cfg, lambda tree, _: tree["w"].sum(), {"w": torch.zeros(1)}, [0] * 4, 0.1, 4)
    assert float(w["w"]) == pytest.approx(-0.25 if schedule == "linear" else -0.4, abs=1e-5)
    assert loss == pytest.approx(-(0 + 0.1 + 0.175 + 0.225) / 4 if schedule == "linear" else -0.15, abs=1e-5)


def test_a_client_is_served_by_its_router_once_it_has_one() -> None:
    clients = mixed_clients(3, 2, n=20, model=Linear(3, rank=2))
    cfg = Config(projections="all", steps=4, router_steps=2, batch_size=8, lr=0.05)
    ends = drive(METHOD, cfg, clients, stop=4)
    got, batch = METHOD.serve(cfg, ends[-1].state), next(clients[0].data["test"].batches(8))
    model = clients[0].model
    alone = model.apply(ends[-1].state.pair, batch).logits
    assert torch.equal(METHOD.predictor(clients[0], got, cfg)(batch).logits, alone)
    drive(METHOD, cfg, clients, state=ends[-1].state)
    bank = Bank(got["A"], got["experts"], clients[0].state["router"])
    routed = model.apply(got["pair"], batch, bank=bank).logits
    assert torch.equal(METHOD.predictor(clients[0], got, cfg)(batch).logits, routed)
    assert not torch.equal(routed, alone)


def test_settings_without_a_triangle_are_refused_with_a_way_out() -> None:
    model = Linear(3)
    with pytest.raises(ValueError, match="clients hold 1 tasks, needs 2 or more"):
        METHOD.start(Config(projections="all"), model, Facts((0,), (5,), ("a", "b"), ("b",), 0))
    with pytest.raises(ValueError, match=r"no projection 'value' among \['lora_B.p'\].*projections = 'all'"):
        METHOD.start(Config(), model, Facts((0,), (5,), ("a", "b"), ("a", "b"), 0))


def test_tasks_that_no_client_holds_have_no_expert() -> None:
    facts = Facts((0, 1), (5, 5), ("a", "only_public", "b"), ("a", "b"), 0)
    state = METHOD.start(Config(projections="all"), Linear(3), facts)
    assert (state.tasks, state.held, state.n_tasks) == (("a", "b"), (0, 2), 3)


LAYOUT = {
    "data__partition": "given",
    "data__mixtures": [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5], [0.4, 0.2, 0.4]],
    "data__validation_per_client": 4,
    "method": {"names": ["fedsee_geometry"], "fedsee_geometry": {
        "steps": 3, "router_steps": 2, "batch_size": 4, "lr": 0.01}},
}  # fmt: skip


@pytest.mark.slow
def test_a_text_run_stopped_after_or_inside_a_round_ends_as_one_that_was_not(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "write_report", lambda *_: None)
    api.run_experiment(tiny.experiment(**LAYOUT), tmp_path / "whole")
    expected = left_behind(tmp_path / "whole/fedsee_geometry/seed-3")
    lines = expected["metrics.jsonl"]
    assert len(lines) == 6
    assert lines[3]["log"]["layers"] == ["layer.0.value", "layer.1.value"]
    assert lines[3]["log"]["kinds"] == ["pure", "pure", "edge", "interior"]
    for watch in (Watch(stop_after=1), Watch(stop_in=(2, "train_block")), Watch(stop_in=(5, "calibrate"))):
        out = tmp_path / f"stopped-{watch.stop_after}-{watch.stop_in and watch.stop_in[0]}"
        with pytest.raises(Stopped):
            api.run_experiment(tiny.experiment(**LAYOUT), out, progress=watch)
        api.resume_experiment(out)
        assert left_behind(out / "fedsee_geometry/seed-3") == expected
    written = geometry_plots.save_geometry(tmp_path / "whole", tmp_path / "plots")
    assert {path.name for path in written} == {
        f"geometry_{what}.{kind}" for what in ("plane", "residuals", "coordinates", "routing")
        for kind in ("png", "svg")
    }  # fmt: skip
    assert all(path.stat().st_size > 1000 for path in written)
    hull = lines[3]["log"]["summary"]["residual"]["hull"]
    table = geometry_plots.geometry_table(tmp_path / "whole/fedsee_geometry/seed-3")
    assert f"| residual, best hull fit | {hull:.3f} | 0.444 ± 0.029 |" in table
    with pytest.raises(FileNotFoundError, match="no finished run of fedsee_geometry"):
        geometry_plots.load_seeds(tmp_path)
