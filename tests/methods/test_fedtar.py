"""FedTAR's rounds: limits that are FFA-LoRA bit for bit or to rounding, hand-driven servers, its refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.methods.fedtar import METHOD, PAPER, Config, aggregate
from fedprism.methods.lora_averaging import FFA_LORA, FFAConfig
from fedprism.protocol import Ask, Reply, RoundEnd
from tests.tiny import Linear, drive, facts_of, mixed_clients
from tests.tiny_moe import RoutedLinear, routed_clients

LOCAL: dict[str, Any] = {
    "rounds": 3, "lr": 0.3, "local_steps": 4, "batch_size": 8, "clip": 2.0, "optimizer": "sgd",
    "weight_decay": 0.0,
}  # fmt: skip


def final(method: Any, cfg: Any) -> torch.Tensor:
    state = drive(method, cfg, routed_clients())[-1].state
    return (state.b if method is METHOD else state.shared)["lora_B.p"]


@pytest.mark.parametrize(
    "settings",
    [
        {"projection": "none", "tau": 0.0, "size_aware": True},
        {"projection": "none", "n_clusters": 1},
        {"projection": "none", "clustering": False},
        {"clustering": False},
        {"rho_p": 1e14},
        {"projection": "none", "clustering": False, "delta_mode": "absolute"},
        {"projection": "none", "clustering": False, "granularity": "layer"},
    ],
)
def test_limits_are_ffa_lora_on_the_same_batches(settings: dict[str, Any]) -> None:
    reference = final(FFA_LORA, FFAConfig(**LOCAL, weights="uniform"))
    torch.testing.assert_close(final(METHOD, Config(**LOCAL, **settings)), reference, atol=1e-6, rtol=0)


def test_weighting_by_examples_is_ffa_lora_s() -> None:
    clients = routed_clients()
    clients[2].data["train"] = clients[2].data["train"].select(torch.arange(10))
    reference = drive(FFA_LORA, FFAConfig(**LOCAL), clients)[-1].state.shared
    cfg = Config(**LOCAL, client_weights="examples", clustering=False)
    torch.testing.assert_close(drive(METHOD, cfg, clients)[-1].state.b, reference, atol=1e-6, rtol=0)


def replies(deltas: Any, sizes: Any = None) -> list[Reply]:
    return [
        Reply(
            k,
            {"delta": {"lora_B.0.down": torch.tensor(d)}, "n": 1 if sizes is None else sizes[k], "loss": 0.0},
        )
        for k, d in enumerate(deltas)
    ]


def test_two_groups_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    deltas = [[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [0.0, 1.0]]
    cfg = Config(projection="none", n_clusters=2, tau=0.0)
    step, facts = aggregate(cfg, features, [0, 1, 2, 3], replies(deltas))
    torch.testing.assert_close(step["lora_B.0.down"], torch.tensor([1.5, 0.5]))  # each group a half
    assert facts["labels"] == [0, 0, 0, 1] and facts["group_weights"] == [0.5, 0.5]
    step, _ = aggregate(Config(projection="none", n_clusters=2, tau=0.0, size_aware=True), features,
                        [0, 1, 2, 3], replies(deltas))  # fmt: skip
    torch.testing.assert_close(step["lora_B.0.down"], torch.tensor([2.25, 0.25]))
    # one coordinate, two groups: the affine map with no ridge passes the clustered average whole
    step, _ = aggregate(
        Config(n_clusters=2, tau=0.0, rho_z=0.0, rho_p=0.0), features, [0, 1, 2, 3], replies(deltas)
    )
    torch.testing.assert_close(step["lora_B.0.down"], torch.tensor([1.5, 0.5]))
    # the literal one keeps what lies along the difference (3, -1): (1.5, .5).(3, -1) / 10 = .4 of it
    literal = Config(projection="literal", n_clusters=2, tau=0.0, rho_z=0.0, rho_p=0.0)
    step, facts = aggregate(literal, features, [0, 1, 2, 3], replies(deltas))
    torch.testing.assert_close(step["lora_B.0.down"], torch.tensor([1.2, -0.4]))
    assert facts["beta_sum"] == pytest.approx(0, abs=1e-12)


def test_layers_have_coefficients_of_their_own() -> None:
    features = torch.eye(3).double()
    got = [
        Reply(
            k,
            {"delta": {"lora_B.0.down": torch.full((2,), float(k)), "lora_B.1.down": torch.ones(2)}, "n": 1},
        )
        for k in range(3)
    ]
    cfg = Config(projection="literal", granularity="layer", r_task=2, n_clusters=3)
    step, facts = aggregate(cfg, features, [0, 1, 2], got)
    assert list(facts["layers"]) == ["0", "1"]
    torch.testing.assert_close(step["lora_B.1.down"], torch.zeros(2), atol=1e-6, rtol=0)  # identical clients
    assert facts["notes"][-1].startswith("layer 1: projection: 0.0% of the mean's norm is left")


def test_the_server_asks_for_features_once_or_every_few_rounds() -> None:
    def phases(**settings: Any) -> list[tuple[str, list[int]]]:
        cfg = Config(rounds=4, n_clusters=2, participation=0.75, **settings)
        clients = routed_clients(4)
        state = METHOD.start(cfg, clients[0].model, facts_of(clients))
        walk, asked, answer = METHOD.server(cfg, state, (0, 1, 2, 3)), [], None
        while True:
            try:
                event = walk.send(answer)  # type: ignore[arg-type]
            except StopIteration:
                return asked
            if isinstance(event, RoundEnd):
                answer = None
                continue
            assert isinstance(event, Ask)
            asked.append((event.phase, list(event.clients)))
            answer = [
                Reply(c, {"c": torch.eye(4)[c].double()} if event.phase == "features" else
                      {"delta": {"lora_B.p": torch.ones(2, 2)}, "n": 1, "loss": 0.0})
                for c in event.clients
            ]  # fmt: skip

    once = phases()
    assert [name for name, _ in once] == ["features", *["update"] * 4]
    assert once[0][1] == [0, 1, 2, 3] and all(len(who) == 3 for _, who in once[1:])
    assert [name for name, _ in phases(refresh=2)] == ["features", "update", "update"] * 2


def test_groups_follow_the_tasks() -> None:
    log = drive(METHOD, Config(**LOCAL, n_clusters=3), routed_clients())[-1].log["fedtar"]
    assert log["labels"] == [0, 1, 2, 0, 1, 2]  # client i holds mostly task i mod 3
    assert log["beta_sum"] == pytest.approx(1) and log["clients"] == list(range(6))
    json.dumps(log)


def test_a_run_learns() -> None:
    clients = routed_clients()
    seen = clients[0].model.init("lora_A", 0)["lora_A.p"][0]  # a direction that A reads
    for k in range(6):
        columns = clients[k].data["train"].columns
        columns["label"] = (columns["x"] @ seen > 0).long()
    ends = drive(METHOD, Config(**{**LOCAL, "rounds": 12}), clients)
    assert ends[-1].log["train_loss"] < 0.9 * ends[0].log["train_loss"]


def test_clipped_features_of_examples_are_their_mean() -> None:
    clients, cfg = routed_clients(3), Config(feature_clip=10.0, feature_split="train")
    got = {"b": RoutedLinear().init("lora_B", 0), "seed": 0}
    c = METHOD.phases[0](clients[0], got, cfg)["c"]
    plain = METHOD.phases[0](clients[0], got, Config(feature_split="train"))["c"]
    torch.testing.assert_close(c / c.norm(), plain)  # one token per example: both means are the same
    tight = METHOD.phases[0](clients[0], got, Config(feature_clip=0.01, feature_split="train"))["c"]
    assert float(tight.norm()) <= 0.01


def test_few_held_out_rows_give_way_to_training_rows() -> None:
    clients, got = routed_clients(3), {"b": RoutedLinear().init("lora_B", 0), "seed": 0}
    assert len(clients[0].data["validation"]) == 8
    held, train = (
        METHOD.phases[0](clients[0], got, Config(feature_split=s))["c"] for s in ("heldout", "train")
    )
    assert torch.equal(held, train)
    clients[0].data = {**clients[0].data, "validation": clients[1].data["train"]}
    moved = METHOD.phases[0](clients[0], got, Config())["c"]
    expected = METHOD.phases[0](clients[1], got, Config(feature_split="train"))["c"]
    torch.testing.assert_close(moved, expected)


def test_the_paper_s_rate_is_named_in_the_first_round() -> None:
    ends = drive(METHOD, Config(**{**PAPER, "rounds": 2, "r_task": 4}), routed_clients())
    assert ends[0].log["fedtar"]["notes"][0] == (
        "lr: with lr = 1e-05, clip = 2 and 5 steps B moves by at most 0.0001 per round; "
        "raise method.fedtar.lr (0.1 to 3)"
    )
    assert not any(note.startswith("lr") for note in ends[1].log["fedtar"]["notes"])
    assert ends[1].log["b_norm"] <= 2e-4
    assert np.isclose(ends[0].log["fedtar"]["beta_sum"], 0)


def test_refusals_are_one_line() -> None:
    clients = routed_clients(10)
    facts = facts_of(clients)
    with pytest.raises(ValueError, match=r"^fedtar: got r_task = 10, needs at most N - 1 = 9 for 10 clients"):
        METHOD.start(Config(r_task=10), clients[0].model, facts)
    with pytest.raises(ValueError, match=r"^fedtar: got 2 clients per round, needs at least 3"):
        METHOD.start(Config(participation=0.2), clients[0].model, facts)
    with pytest.raises(ValueError, match=r"^fedtar: got a model without routed low-rank experts"):
        METHOD.start(Config(), Linear(3), facts_of(mixed_clients()))
