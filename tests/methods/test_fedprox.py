"""FedProx on quadratics, whose local steps have a closed form, and the work of stragglers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fedprism.methods import fedprox
from fedprism.methods.fedprox import METHOD, Config, State
from tests.tiny import drive, quadratic_clients, table_clients

A, B = (1.0, 4.0), (0.0, 1.0)
PLAIN = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 1}


def prox_steps(w: float, a: float, b: float, mu: float, lr: float, steps: int) -> float:
    """Where `steps` gradient steps on a (w - b)^2 / 2 + mu (w - anchor)^2 / 2 lead from the anchor w.

    The sum is a quadratic of curvature a + mu about (a b + mu w) / (a + mu); each step scales the distance to
    that point by 1 - lr (a + mu)."""
    centre = (a * b + mu * w) / (a + mu)
    return centre + (1 - lr * (a + mu)) ** steps * (w - centre)


@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_every_round_follows_the_closed_form(mu: float) -> None:
    cfg = Config(rounds=4, local_steps=6, lr=0.05, mu=mu, **PLAIN)
    ends, w = drive(METHOD, cfg, quadratic_clients(A, B)), 0.0
    for end in ends:
        w = sum(prox_steps(w, a, b, mu, 0.05, 6) for a, b in zip(A, B, strict=True)) / 2
        assert float(end.state.w["w"]) == pytest.approx(w, abs=1e-12)


def test_a_large_mu_holds_the_client_at_the_model_it_received() -> None:
    cfg = Config(rounds=1, local_steps=200, lr=5e-5, mu=1e4, **PLAIN)
    for a, b in ((4.0, 1.0), (1.0, 7.0)):
        (end,) = drive(METHOD, cfg, quadratic_clients((a,), (b,)))
        assert float(end.state.w["w"]) == pytest.approx(a * b / (a + 1e4), rel=1e-9)  # the minimum, near 0


def test_under_adamw_the_term_pulls_to_the_received_model_and_not_to_zero() -> None:
    # minimum of w^2 / 2 + (w - 3)^2 / 2 is 1.5; a preconditioner moves no minimum, decay towards zero would
    cfg = Config(
        rounds=1, local_steps=600, lr=0.01, mu=1.0, optimizer="adamw", weight_decay=0.0, batch_size=1
    )
    state = State(0, {"w": torch.tensor([3.0], dtype=torch.float64)}, 0)
    (end,) = drive(METHOD, cfg, quadratic_clients((1.0,), (0.0,)), state=state)
    assert float(end.state.w["w"]) == pytest.approx(1.5, abs=0.01)


def test_the_distance_is_one_between_factors() -> None:
    w = {"lora_A.p": torch.tensor([[2.0, 2.0]]), "lora_B.p": torch.tensor([[3.0]])}
    anchor = {"lora_A.p": torch.tensor([[1.0, 0.0]]), "lora_B.p": torch.tensor([[0.0]])}
    assert float(fedprox.squared_distance(w, anchor)) == 1.0 + 4.0 + 9.0


def test_the_anchor_gets_no_gradient_and_w_gets_twice_the_difference() -> None:
    w, anchor = ({"w": torch.tensor([v], requires_grad=True)} for v in (5.0, 2.0))
    fedprox.squared_distance(w, anchor).backward()
    assert anchor["w"].grad is None and float(w["w"].grad) == 6.0


@pytest.mark.parametrize(("share", "steps"), [(1.0, 10), (0.0, 1), (0.5, 5), (0.999, 9)])
def test_a_straggler_does_its_share_of_the_steps(share: float, steps: int) -> None:
    client = quadratic_clients((2.0,), (1.0,))[0]
    cfg = Config(local_steps=10, mu=0.3, **PLAIN)
    sent = METHOD.phases[0](client, {"w": {"w": torch.zeros(1).double()}, "lr": 0.1, "share": share}, cfg)
    assert sent["examples"] == steps  # one example per step
    assert float(sent["w"]["w"]) == pytest.approx(prox_steps(0.0, 2.0, 1.0, 0.3, 0.1, steps), abs=1e-12)


def test_a_straggler_of_whole_epochs_walks_the_first_batches_of_its_epochs() -> None:
    cfg = Config(local_epochs=2, batch_size=16, lr=0.01, mu=0.0)
    seen = {}
    for share in (1.0, 0.5):
        client = table_clients(m=1)[0]  # 40 rows: 16 + 16 + 8, twice
        rows: list[list[int]] = []
        client.loss = lambda tree, batch, c=client, r=rows: (  # type: ignore[method-assign]
            r.append(batch["row"].tolist()),
            c.model.per_example_loss(c.model.apply(tree, batch), batch).mean(),
        )[1]
        METHOD.phases[0](client, {"w": client.model.trainable(0), "lr": 0.01, "share": share}, cfg)
        seen[share] = rows
    assert [len(rows) for rows in seen[1.0]] == [16, 16, 8, 16, 16, 8]
    assert seen[0.5] == seen[1.0][:3]  # 1 + int(0.5 * 5)


def test_stragglers_are_drawn_by_seed_and_round_and_are_averaged_like_others() -> None:
    cfg = Config(rounds=8, local_steps=10, lr=0.05, straggler_fraction=0.5, mu=0.0, **PLAIN)
    a, b = (1.0, 4.0, 2.0, 0.5), (0.0, 1.0, -1.0, 3.0)
    ends = drive(METHOD, cfg, quadratic_clients(a, b))
    slow = [end.log["stragglers"] for end in ends]
    assert all(len(who) == 2 for who in slow) and len({tuple(who) for who in slow}) > 1
    for before, after in pairwise(ends):
        share = fedprox.shares(cfg, before.state, [0, 1, 2, 3])
        assert [who for who, part in share.items() if part < 1] == after.log["stragglers"]
        w = float(before.state.w["w"])
        moved = [prox_steps(w, a[i], b[i], 0.0, 0.05, 1 + int(share[i] * 9)) for i in range(4)]
        assert float(after.state.w["w"]) == pytest.approx(sum(moved) / 4, abs=1e-12)


@pytest.mark.parametrize(("fraction", "n", "expected"), [(0.0, 4, 0), (0.3, 10, 3), (1.0, 3, 3)])
def test_the_number_of_stragglers_is_the_fraction_of_the_round(
    fraction: float, n: int, expected: int
) -> None:
    share = fedprox.shares(Config(straggler_fraction=fraction), State(2, {}, 5), list(range(n)))
    assert len(share) == n and sum(part < 1 for part in share.values()) == expected
    assert all(0 <= part <= 1 for part in share.values())
