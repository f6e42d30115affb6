"""IFCA: whom a client chooses, what the server averages, how clusters begin; planted ones are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.data.arrays import TableRows
from fedprism.methods import ifca
from fedprism.methods.ifca import METHOD, Config, State, serve
from fedprism.models.mlp import load_mlp
from fedprism.protocol import Ask, Client, Reply, RoundEnd
from tests.tiny import (
    Linear,
    TinyRows,
    drive,
    facts_of,
    mixed_clients,
    quadratic_clients,
    table_clients,
)

PLAIN = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0}


def number(value: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([value], dtype=torch.float64)}


# --- choosing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("current", "expected"), [(None, 0), (1, 1), (0, 0), (2, 0)])
def test_ties_go_to_the_current_cluster_and_then_to_the_lowest(current: int | None, expected: int) -> None:
    assert ifca.lowest({0: 1.5, 1: 1.5, 2: 2.0}, current) == expected


def test_the_current_cluster_does_not_win_against_a_lower_loss() -> None:
    assert ifca.lowest({0: 1.0, 1: 0.9}, 0) == 1


def client_of(b_train: list[float], b_test: list[float]) -> Client:
    client = quadratic_clients((1.0,), (0.0,))[0]
    client.data = {
        split: TinyRows(a=torch.ones(len(b)).double(), b=torch.tensor(b).double())
        for split, b in (("train", b_train), ("validation", b_test), ("test", b_test))
    }
    return client


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_loss_is_over_the_whole_training_set_in_evaluation_mode(size: int) -> None:
    # losses (w - b)^2 / 2 at w = 0 and 2.5. Three of four rows, and all test rows, speak for 0; the mean over
    # the training set for 2.5: (0 + 0 + 0 + 50) / 4 = 12.5 against (3 * 3.125 + 28.125) / 4 = 9.375
    client = client_of([0.0, 0.0, 0.0, 10.0], [0.0, 0.0])
    plain, generators = client.model.apply, []

    class Watched:
        n_classes, blocks, trained = 2, client.model.blocks, client.model.trained
        per_example_loss = staticmethod(client.model.per_example_loss)

        def apply(self, tree: Any, batch: Any, *, generator: Any = None) -> Any:
            generators.append(generator)
            return plain(tree, batch)

    client.model = Watched()
    models = {0: number(0.0), 1: number(2.5)}
    assert ifca.training_losses(client, {}, models, size) == pytest.approx({0: 12.5, 1: 9.375})
    assert ifca.choose(client, {}, models, Config(batch_size=size)) == 1
    assert generators and set(generators) == {None}


def test_the_predictor_takes_the_model_of_least_training_loss_whatever_the_test_rows_say() -> None:
    client = client_of([4.0, 4.0], [0.0, 0.0])
    cfg = Config(n_clusters=2)
    got = serve(cfg, State(3, {0: number(0.0), 1: number(3.0)}, {}, 0, 0))
    predict = METHOD.predictor(client, got, cfg)
    assert predict({"b": torch.zeros(1)}).logits.tolist() == [3.0]
    client.state["cluster"] = 0
    same = serve(cfg, State(3, {0: number(5.0), 1: number(3.0)}, {}, 0, 0))  # 5 and 3 are as far from 4
    assert METHOD.predictor(client, same, cfg)({"b": torch.zeros(1)}).logits.tolist() == [5.0]


def test_a_loss_that_is_no_number_is_named() -> None:
    client = client_of([1.0], [1.0])
    with pytest.raises(FloatingPointError, match="cluster 1 is not a number"):
        ifca.training_losses(client, {}, {0: number(0.0), 1: number(float("nan"))}, 4)


# --- averaging ---------------------------------------------------------------------------------------------


def reply(client: int, choice: int, n: int, **w: float) -> Reply:
    tree = {name: torch.tensor([value], dtype=torch.float64) for name, value in w.items()}
    return Reply(client, {"choice": choice, "w": tree, "n": n, "loss": 1.0, "examples": 0})


def one_round(cfg: Config, state: State, replies: list[Reply]) -> RoundEnd:
    server = METHOD.server(cfg, state, [r.client for r in replies])
    assert next(server).phase == "update"
    end = server.send(replies)
    assert isinstance(end, RoundEnd)
    return end


@pytest.mark.parametrize(("average", "expected"), [("samples", 3.5), ("uniform", 3.0)])
def test_members_are_averaged_and_an_empty_cluster_keeps_its_bits(average: Any, expected: float) -> None:
    models = {0: number(1.0), 1: number(1 / 3), 2: number(-7.0)}
    cfg = Config(rounds=5, average=average)
    state = State(1, models, {}, 0, 0)
    end = one_round(cfg, state, [reply(0, 0, 1, w=2.0), reply(1, 2, 9, w=50.0), reply(2, 0, 3, w=4.0)])
    assert float(end.state.models[0]["w"]) == expected  # (2 + 3 * 4) / 4, or (2 + 4) / 2
    assert torch.equal(end.state.models[1]["w"], models[1]["w"])
    assert float(end.state.models[2]["w"]) == 50.0
    assert end.log["clusters"] == [[0, 2], [], [1]]


def test_a_shared_body_is_averaged_over_everybody_and_heads_within_clusters() -> None:
    state = State(1, {0: {"head": torch.zeros(1).double()}, 1: {"head": torch.ones(1).double()}},
                  {"body": torch.zeros(1).double()}, 0, 0)  # fmt: skip
    replies = [
        reply(0, 0, 1, body=8.0, head=1.0),
        reply(1, 1, 2, body=2.0, head=10.0),
        reply(2, 1, 1, body=0.0, head=40.0),
    ]
    end = one_round(Config(rounds=5, n_clusters=2, share_body=True), state, replies)
    assert float(end.state.body["body"]) == 3.0  # (8 + 2 * 2 + 0) / 4
    assert [float(end.state.models[j]["head"]) for j in (0, 1)] == [1.0, 20.0]


def test_a_model_nobody_chooses_stays_bit_for_bit_in_a_run() -> None:
    far = number(100 / 3)
    state = State(0, {0: number(0.0), 1: far}, {}, 0, 0)
    cfg = Config(rounds=6, n_clusters=2, init="independent", local_steps=4, lr=0.1, batch_size=1, **PLAIN)
    ends = drive(METHOD, cfg, quadratic_clients((1.0, 4.0), (0.5, 1.0)), state=state)
    for end in ends:
        assert torch.equal(end.state.models[1]["w"], far["w"])
    assert 0.5 < float(ends[-1].state.models[0]["w"]) < 1.0


def test_clients_on_two_sides_get_models_of_their_own_optima() -> None:
    # losses a (w - b)^2 / 2: two clients about -2, two about 3; each cluster ends where its members' FedAvg
    # does, sum (1 - r_i) b_i / sum (1 - r_i) with r_i = (1 - lr a_i)^steps
    a, b = (1.0, 2.0, 1.0, 4.0), (-2.0, -2.5, 3.0, 3.5)
    cfg = Config(rounds=40, n_clusters=2, init="independent", local_steps=5, lr=0.1, batch_size=1, **PLAIN)
    state = State(0, {0: number(-0.1), 1: number(0.1)}, {}, 0, 0)
    ends = drive(METHOD, cfg, quadratic_clients(a, b), state=state)
    r = [(1 - 0.1 * x) ** 5 for x in a]
    for j, members in enumerate(([0, 1], [2, 3])):
        expected = sum((1 - r[i]) * b[i] for i in members) / sum(1 - r[i] for i in members)
        assert float(ends[-1].state.models[j]["w"]) == pytest.approx(expected, abs=1e-9)
    assert ends[-1].log["clusters"] == [[0, 1], [2, 3]]


# --- first models ------------------------------------------------------------------------------------------


def preferences(choices: list[int], undecided: bool = False) -> list[Reply]:
    return [Reply(i, {"choice": j, "undecided": undecided}) for i, j in enumerate(choices)]


def test_models_are_redrawn_until_each_is_chosen_and_a_client_builds_them() -> None:
    cfg, state = Config(rounds=3, n_clusters=3), State(0, {j: number(0.0) for j in range(3)}, {}, 0, 5)
    server = METHOD.server(cfg, state, [0, 1, 2])
    ask = next(server)
    assert (ask.phase, list(ask.clients), ask.diagnostic) == ("prefer", [0, 1, 2], False)
    assert ask.body["seeds"] == ifca.draw_seeds(cfg, 5, 0)
    ask = server.send(preferences([0, 0, 2]))  # nobody likes model 1
    assert ask.phase == "prefer" and ask.body["seeds"] == ifca.draw_seeds(cfg, 5, 1)
    ask = server.send(preferences([2, 0, 1]))
    assert (ask.phase, list(ask.clients)) == ("build", [0])
    assert ask.body["seeds"] == ifca.draw_seeds(cfg, 5, 1)
    models = {j: number(float(j)) for j in range(3)}
    ask = server.send([Reply(0, {"body": {}, "models": models})])
    assert ask.phase == "update"
    assert all(ask.each[i]["models"] == models for i in range(3))
    end = server.send([reply(i, i, 1, w=9.0) for i in range(3)])
    assert (end.log["init"], end.log["draws"]) == ("redraw", 2) and "warning" not in end.log


def test_a_first_draw_that_is_balanced_needs_nobody_to_build_it() -> None:
    models = {j: number(float(j)) for j in range(2)}
    server = METHOD.server(Config(n_clusters=2), State(0, models, {}, 0, 5), [0, 1])
    next(server)
    ask = server.send(preferences([1, 0]))
    assert ask.phase == "update" and ask.each[0]["models"] is models


@pytest.mark.parametrize(("undecided", "draws"), [(False, 4), (True, 1)])
def test_without_a_balanced_draw_clients_train_in_random_groups_first(undecided: bool, draws: int) -> None:
    cfg = Config(rounds=6, n_clusters=2, max_draws=4, group_rounds=2)
    models = {j: number(float(j)) for j in range(2)}
    server = METHOD.server(cfg, State(0, models, {}, 0, 5), [0, 1, 2, 3])
    event, asked = next(server), 0
    while event.phase == "prefer":
        asked += 1
        event = server.send(preferences([0, 0, 0, 0], undecided))
    assert asked == draws
    groups = ifca.random_groups(cfg, [0, 1, 2, 3], 5)
    for t in range(4):
        offered = {i: sorted(event.each[i]["models"]) for i in range(4)}
        if t < 2:
            assert offered == {i: [groups[i]] for i in range(4)}  # the same groups, one model each
        else:
            assert offered == {i: [0, 1] for i in range(4)}
        end = server.send([reply(i, groups[i], 1, w=1.0) for i in range(4)])
        if t == 0:
            assert end.log["init"] == "random_groups" and end.log["draws"] == draws
            assert "2 rounds" in end.log["warning"]
        event = next(server)


@pytest.mark.parametrize(
    ("choices", "clusters", "min_share", "fits"),
    [
        ([0, 1, 1, 1, 1, 1, 1, 1], 2, 0.0, False),  # 12.5 % of the clients, needed 15 %
        ([0, 0, 1, 1, 1, 1, 1, 1], 2, 0.0, True),
        ([0, 0, 1, 1, 1, 1, 1, 1], 2, 0.35, False),  # the authors' share for two clusters
        ([0, 0, 0, 1, 1, 1, 1, 1], 2, 0.35, True),
        ([0, 1, 2, 2, 2, 2, 2, 2], 3, 0.0, True),  # 12.5 %, needed 10 %
        ([0, 1, 1, 1, 1, 1, 1, 1], 3, 0.0, False),
    ],
)
def test_a_draw_needs_its_share_of_clients_for_every_model(
    choices: list[int], clusters: int, min_share: float, fits: bool
) -> None:
    cfg = Config(n_clusters=clusters, min_share=min_share)
    assert ifca.accepted(cfg, preferences(choices)) is fits


def test_random_groups_are_balanced_and_follow_the_seed() -> None:
    cfg = Config(n_clusters=3)
    drawn = [ifca.random_groups(cfg, list(range(8)), seed) for seed in range(6)]
    for groups in drawn:
        sizes = sorted(list(groups.values()).count(j) for j in range(3))
        assert sizes == [2, 3, 3]
    assert len({tuple(groups.items()) for groups in drawn}) == 6


@pytest.mark.parametrize(
    ("rounds", "given", "expected"), [(200, 0, 20), (400, 0, 20), (10, 0, 1), (4, 0, 1), (10, 7, 7)]
)
def test_random_groups_last_20_rounds_but_at_most_a_tenth_of_the_run(
    rounds: int, given: int, expected: int
) -> None:
    assert Config(rounds=rounds, group_rounds=given).random_rounds == expected


def test_the_models_of_a_draw_differ_and_the_first_is_the_one_fedavg_starts_from() -> None:
    clients = table_clients()
    state = METHOD.start(Config(n_clusters=3), clients[0].model, facts_of(clients, seed=7))
    plain = clients[0].model.trainable(7)
    assert all(torch.equal(state.models[0][name], value) for name, value in plain.items())
    weights = [state.models[j]["head.weight"] for j in range(3)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def labelled_clients(n: int = 48) -> dict[int, Client]:
    """Four clients with one distribution of inputs; two of them have the labels the other way round."""
    g, model = (
        torch.Generator().manual_seed(2),
        load_mlp(2, n_classes=2, width=6, router_width=2, hidden=(8,)),
    )

    def rows(flip: bool, first: int) -> TableRows:
        x = torch.randn(n, 2, generator=g)
        label = ((x[:, 0] > 0) ^ flip).long()
        columns = {name: torch.zeros(n, dtype=torch.int64) for name in ("task", "client", "component")}
        return TableRows({"label": label, "row": first + torch.arange(n), **columns}, x)

    return {
        i: Client(i, model, {"train": rows(i % 2 == 1, 100 * i), "test": rows(i % 2 == 1, 1000 + 100 * i)})
        for i in range(4)
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("share_body", [False, True])
def test_two_label_permutations_are_separated_within_five_rounds(seed: int, share_body: bool) -> None:
    clients = labelled_clients()
    cfg = Config(
        rounds=5, n_clusters=2, local_epochs=4, batch_size=16, lr=0.1, share_body=share_body, **PLAIN
    )
    ends = drive(METHOD, cfg, clients, seed=seed)
    assert sorted(ends[-1].log["clusters"]) == [[0, 2], [1, 3]]
    got = serve(cfg, ends[-1].state)
    for client in clients.values():
        (batch,) = client.data["test"].batches(100)
        right = METHOD.predictor(client, got, cfg)(batch).logits.argmax(1) == batch["label"]
        assert float(right.float().mean()) > 0.85


def test_an_accepted_draw_is_what_the_first_round_trains() -> None:
    drawn = set()
    for seed in range(6):
        clients = labelled_clients()
        cfg = Config(rounds=1, n_clusters=2, min_share=0.5, local_epochs=1, batch_size=16, lr=0.01, **PLAIN)
        (end,) = drive(METHOD, cfg, clients, seed=seed)
        if end.log["init"] == "redraw":
            drawn.add(end.log["draws"])
            assert [len(members) for members in end.log["clusters"]] == [2, 2]  # as the draw was balanced
    assert max(drawn) > 1


def test_adapters_that_are_one_function_are_told_apart_by_random_groups() -> None:
    cfg = Config(rounds=6, n_clusters=2, local_epochs=3, batch_size=8, lr=0.3, **PLAIN)
    ends = drive(METHOD, cfg, mixed_clients(4, 2, n=40, model=Linear(3, rank=2)))
    assert (ends[0].log["init"], ends[0].log["draws"]) == ("random_groups", 1)
    assert "one function" in ends[0].log["warning"]
    assert [len(members) for members in ends[0].log["clusters"]] == [2, 2]
    stuck = drive(
        METHOD, replace(cfg, init="independent"), mixed_clients(4, 2, n=40, model=Linear(3, rank=2))
    )
    assert stuck[0].log["clusters"] == [[0, 1, 2, 3], []]  # ties, so everybody is in cluster 0


def test_redrawing_counts_in_the_communication_and_costs_numbers() -> None:
    from fedprism.engines.inprocess import InProcess

    clients = table_clients()
    cfg = Config(n_clusters=3)
    engine = InProcess("ifca", {p.name: p for p in METHOD.phases}, clients, cfg, 0)
    engine.carry(Ask("prefer", [0, 1, 2], {"seeds": ifca.draw_seeds(cfg, 0, 0)}), 0)
    _, traffic = engine.take_costs()
    assert traffic == {i: [8 + 8, 3 * 8] for i in range(3)}  # up: choice and undecided; down: seeds


# --- refusals ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"min_share is 0.6, 2 clusters can't all have that; set at most 0.5"
    ):
        Config(n_clusters=2, min_share=0.6)
    clients = mixed_clients(3)
    with pytest.raises(ValueError, match=r"n_clusters is 4 for 3 clients.*lower method.ifca.n_clusters"):
        METHOD.start(Config(n_clusters=4), clients[0].model, facts_of(clients))
    with pytest.raises(ValueError, match=r'share_body got a Linear.*model.kind = "vision" or "mlp"'):
        METHOD.start(Config(share_body=True), clients[0].model, facts_of(clients))
