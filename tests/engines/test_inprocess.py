"""The in-process engine alone: order, failures, what is counted, and where seeds come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tiny import TinyRows

from fedprism.engines.inprocess import InProcess
from fedprism.protocol import POOLED, PUBLIC, Ask, Body, Client, ClientFailure, Phase, phase


def clients(*ids: int) -> dict[int, Client]:
    return {i: Client(i, None, {"train": TinyRows(x=torch.zeros(2))}) for i in ids}


def engine(run: Phase | Callable[..., Body], *ids: int, seed: int = 0, **options: Any) -> InProcess:
    """An engine with the phase `work` over clients 0, 1, 2 or the given participants."""
    if isinstance(run, Phase):
        work = run
    else:
        work = Phase(run, "work", frozenset({"w"}), frozenset({"kept", "other"}), frozenset({"v"}))
    return InProcess("toy", {"work": work}, clients(*(ids or (0, 1, 2))), None, seed, **options)


def ask(*who: int, **options: Any) -> Ask:
    return Ask("work", who or (0, 1, 2), {"w": 1.0}, **options)


def number(client: Client, got: Body, cfg: Any) -> Body:
    return {"v": float(client.id)}


def draw(client: Client, got: Body, cfg: Any) -> Body:
    return {"v": torch.rand(4, generator=client.generator)}


# ---- order ---------------------------------------------------------------------------------------


def test_replies_come_sorted_by_client_whatever_the_order_of_the_ask() -> None:
    made = engine(number, 2, PUBLIC, 10, 0, POOLED)
    replies = made.carry(ask(10, 0, PUBLIC, 2, POOLED), 0)
    assert [r.client for r in replies] == [POOLED, PUBLIC, 0, 2, 10]
    assert [r.body["v"] for r in replies] == [-2.0, -1.0, 0.0, 2.0, 10.0]
    assert [r.error for r in replies] == [None] * 5


def test_only_those_who_are_asked_do_anything() -> None:
    done: list[int] = []

    def note(client: Client, got: Body, cfg: Any) -> Body:
        done.append(client.id)
        return {"v": 0}

    engine(note, 0, 1, 2, 3).carry(ask(3, 1), 0)
    assert done == [1, 3]


def test_each_participant_gets_what_all_get_and_its_own_part() -> None:
    @phase(receives=["w", "mine"], sends=["v"])
    def work(client: Client, got: Body, cfg: Any) -> Body:
        return {"v": (got["w"], got["mine"])}

    made = engine(work)
    replies = made.carry(ask(each={i: {"mine": 10 * i} for i in range(3)}), 0)
    assert [r.body["v"] for r in replies] == [(1.0, 0), (1.0, 10), (1.0, 20)]
    replies = made.carry(ask(1, each={1: {"mine": 0, "w": 5.0}}), 0)  # its own part wins
    assert replies[0].body["v"] == (5.0, 0)


def test_the_config_reaches_the_phase_and_the_watcher_hears_of_every_turn() -> None:
    heard: list[tuple[str, int, int, int]] = []

    def configured(client: Client, got: Body, cfg: Any) -> Body:
        assert cfg == "the config"
        return {"v": 0}

    made = engine(configured, 5, 7, on_client=lambda *turn: heard.append(turn))
    made.cfg = "the config"
    made.carry(ask(7, 5), 0)
    assert heard == [("work", 5, 0, 2), ("work", 7, 1, 2)]


# ---- failures ------------------------------------------------------------------------------------


def fails_at(where: int, fault: Exception) -> Callable[[Client, Body, Any], Body]:
    def work(client: Client, got: Body, cfg: Any) -> Body:
        client.state["kept"] = client.state.get("kept", 0) + 1
        if client.id == where:
            raise fault
        return {"v": client.id}

    return work


FAULTS = [
    ValueError("it broke"),
    KeyError("it broke"),
    FloatingPointError("it broke"),
    RuntimeError("it broke"),
    IndexError("it broke"),
    TypeError("it broke"),
    MemoryError("it broke"),
    OSError("it broke"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_failing_client_is_named_with_method_phase_and_round(fault: Exception) -> None:
    made = engine(fails_at(1, fault))
    with pytest.raises(ClientFailure, match=r"^toy, phase 'work', round 4, client 1: .*it broke") as caught:
        made.carry(ask(), 4)
    assert caught.value.__cause__ is fault
    assert made.participants[1].state == {}


@pytest.mark.parametrize(("who", "name"), [(PUBLIC, "public"), (POOLED, "pooled")])
def test_a_special_participant_that_fails_is_named_in_words(who: int, name: str) -> None:
    with pytest.raises(ClientFailure, match=rf"round 0, {name}: it broke"):
        engine(fails_at(who, ValueError("it broke")), who).carry(ask(who), 0)


def test_an_interruption_is_no_failure_of_a_client() -> None:
    with pytest.raises(KeyboardInterrupt):
        engine(fails_at(1, KeyboardInterrupt())).carry(ask(allow_missing=True), 0)  # type: ignore[arg-type]


def test_a_failure_that_is_allowed_is_a_reply_and_leaves_no_trace() -> None:
    made = engine(fails_at(1, ValueError("it broke")))
    before = torch.ones(2)
    made.participants[1].state["kept"] = before
    made.participants[1].state["other"] = 3
    replies = made.carry(ask(1, allow_missing=True), 2)
    assert (replies[0].client, replies[0].body) == (1, {})
    assert replies[0].error == "toy, phase 'work', round 2, client 1: it broke"
    state = made.participants[1].state
    assert state == {"kept": before, "other": 3}
    assert state["kept"] is before


def test_the_others_go_on_when_one_may_be_missing() -> None:
    made = engine(fails_at(1, ValueError("it broke")))
    for t in range(2):
        replies = made.carry(ask(allow_missing=True), t)
        assert [r.client for r in replies] == [0, 1, 2]
        assert [r.body for r in replies] == [{"v": 0}, {}, {"v": 2}]
        assert [r.error is None for r in replies] == [True, False, True]
    assert [made.participants[i].state for i in range(3)] == [{"kept": 2}, {}, {"kept": 2}]


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ({"v": float("nan")}, "v"),
        ({"v": float("-inf")}, "v"),
        ({"v": torch.tensor([1.0, float("inf")])}, "v"),
        ({"v": {"lora_B.p": torch.tensor(float("nan"))}}, r"v\.lora_B\.p"),
        ({"v": {2: {"w": torch.tensor([float("nan")], dtype=torch.bfloat16)}}}, r"v\.2\.w"),
        ({"v": [torch.ones(1), torch.tensor([float("nan")])]}, r"v\[1\]"),
    ],
)
def test_a_reply_that_is_not_finite_is_named(sent: Body, path: str) -> None:
    def work(client: Client, got: Body, cfg: Any) -> Body:
        client.state["kept"] = "something"
        return sent if client.id == 2 else {"v": 0}

    made = engine(work)
    expected = rf"toy, phase 'work', round 1, client 2: sent '{path}' .*not finite; lower the learning rate"
    with pytest.raises(ClientFailure, match=expected) as caught:
        made.carry(ask(), 1)
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert made.participants[2].state == {}
    assert made.participants[1].state == {"kept": "something"}


def test_a_reply_with_its_gradient_graph_is_refused() -> None:
    def work(client: Client, got: Body, cfg: Any) -> Body:
        return {"v": {"w": torch.ones(2, requires_grad=True) * 2}}

    with pytest.raises(ClientFailure, match=r"client 0: sent 'v\.w' with its gradient graph; detach it"):
        engine(work).carry(ask(), 0)


def test_a_reply_without_its_contract_is_refused() -> None:
    def work(client: Client, got: Body, cfg: Any) -> Body:
        return {"v": 0, "more": 1}

    with pytest.raises(
        ClientFailure, match=r"round 0, client 0: .*sent \['more', 'v'\].*undeclared \['more'\]"
    ):
        engine(work).carry(ask(), 0)


def test_unknown_phases_and_participants_are_named() -> None:
    made = engine(number)
    with pytest.raises(KeyError, match=r"method 'toy' has no phase 'play', has \['work'\]"):
        made.carry(Ask("play", [0], {}), 0)
    with pytest.raises(KeyError, match=r"method 'toy', phase 'work': no participants \[7, -1\]"):
        made.carry(ask(0, 7, PUBLIC), 0)
    assert made.take_costs() == ({}, {})


# ---- costs ---------------------------------------------------------------------------------------


@phase(receives=["w", "lr", "ids"], sends=["w", "n", "name", "examples"])
def train(client: Client, got: Body, cfg: Any) -> Body:
    return {"w": {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.float64)}, "n": 5, "name": "ab",
            "examples": 10 + client.id}  # fmt: skip


def test_bytes_and_examples_are_counted() -> None:
    made = InProcess("toy", {"train": train}, clients(0, 1, PUBLIC), None, 0)
    body = {"w": {"a": torch.zeros(3, dtype=torch.bfloat16)}, "lr": 0.1}
    each = {0: {"ids": [1, 2, 3]}, 1: {"ids": [4]}, PUBLIC: {"ids": []}}
    made.carry(Ask("train", [0, 1, PUBLIC], body, each), 0)
    costs, traffic = made.take_costs()
    # up: 3 floats of 4 bytes, 4 doubles of 8, two numbers of 8, two letters; down: 3 of 2, a number, the ids
    up, down = 12 + 32 + 16 + 2, 6 + 8
    assert traffic == {PUBLIC: [up, down], 0: [up, down + 24], 1: [up, down + 8]}
    cost = costs["train"]
    assert (cost.asked, cost.bytes_up, cost.bytes_down) == (3, 3 * up, 3 * down + 32)
    assert cost.examples == 10 + 11 + 9
    assert cost.seconds > 0
    assert set(cost.as_dict()) == {"seconds", "asked", "bytes_up", "bytes_down", "examples"}


def test_costs_add_up_over_asks_and_start_afresh_when_taken() -> None:
    made = InProcess("toy", {"train": train}, clients(0, 1), None, 0)
    body = {"w": {}, "lr": 0.1, "ids": []}
    made.carry(Ask("train", [0, 1], body), 0)
    made.carry(Ask("train", [1], body), 0)
    costs, traffic = made.take_costs()
    assert (costs["train"].asked, costs["train"].examples) == (3, 10 + 11 + 11)
    assert traffic == {0: [62, 8], 1: [124, 16]}
    assert made.take_costs() == ({}, {})
    made.carry(Ask("train", [0], body), 1)
    again, traffic = made.take_costs()
    assert (again["train"].asked, again["train"].examples, traffic) == (1, 10, {0: [62, 8]})
    assert costs["train"].asked == 3  # what was taken stays as it was


def test_a_missing_reply_costs_time_and_no_bytes() -> None:
    made = engine(fails_at(1, ValueError("it broke")))
    made.carry(ask(allow_missing=True), 0)
    costs, traffic = made.take_costs()
    assert (costs["work"].asked, costs["work"].bytes_up, costs["work"].bytes_down) == (3, 16, 16)
    assert traffic == {0: [8, 8], 2: [8, 8]}


# ---- randomness ----------------------------------------------------------------------------------


def drawn(made: InProcess, round: int = 0, who: tuple[int, ...] = (0, 1, 2)) -> dict[int, tuple[float, ...]]:
    return {r.client: tuple(r.body["v"].tolist()) for r in made.carry(ask(*who), round)}


def test_draws_differ_by_client_round_and_repeated_ask_and_by_seed() -> None:
    made = engine(draw)
    seen = [*drawn(made, 0).values(), *drawn(made, 0).values(), *drawn(made, 1).values()]
    seen += drawn(engine(draw, seed=1), 0).values()
    assert len(set(seen)) == 12


def test_draws_differ_by_phase() -> None:
    kinds = {n: Phase(draw, n, frozenset({"w"}), frozenset(), frozenset({"v"})) for n in ("work", "play")}
    made = InProcess("toy", kinds, clients(0), None, 0)
    values = [made.carry(Ask(name, [0], {"w": 1}), 0)[0].body["v"].tolist() for name in ("work", "play")]
    assert values[0] != values[1]


def test_a_phase_asked_again_after_another_one_draws_anew() -> None:
    kinds = {n: Phase(draw, n, frozenset({"w"}), frozenset(), frozenset({"v"})) for n in ("work", "play")}
    made = InProcess("toy", kinds, clients(0), None, 0)
    order = ("work", "play", "work", "play", "work")
    values = [tuple(made.carry(Ask(name, [0], {"w": 1}), 0)[0].body["v"].tolist()) for name in order]
    assert len(set(values)) == 5


def test_two_engines_draw_the_same_and_a_new_round_counts_its_asks_afresh() -> None:
    long, short = engine(draw), engine(draw)
    asked = [drawn(long, t) for t in (0, 0, 1, 1, 1, 2)]
    assert drawn(short, 1) == asked[2]  # as after a resume: nothing of round 0 is needed
    assert drawn(short, 1) == asked[3]
    assert drawn(short, 2) == asked[5]


def test_draws_depend_neither_on_who_else_is_asked_nor_on_what_was_drawn_before() -> None:
    alone = drawn(engine(draw), 3, (2,))[2]
    busy = engine(draw)
    for client in busy.participants.values():
        torch.rand(100, generator=client.generator)
    torch.manual_seed(99)
    assert drawn(busy, 3)[2] == alone
    assert drawn(engine(draw, 7, 2), 3, (2, 7))[2] == alone


def test_a_failure_does_not_shift_the_draws_of_later_asks() -> None:
    def sometimes(client: Client, got: Body, cfg: Any) -> Body:
        if client.id == 1:
            raise ValueError("it broke")
        return draw(client, got, cfg)

    replies = engine(sometimes).carry(ask(allow_missing=True), 0)
    assert tuple(replies[2].body["v"].tolist()) == drawn(engine(draw))[2]
