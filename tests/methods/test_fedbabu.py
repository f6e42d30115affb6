"""FedBABU: the head never moves while the body is trained, and a copy of both is fine-tuned to predict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.methods.fedbabu import METHOD, Config, predictor, serve, start
from fedprism.models.interface import Outputs
from fedprism.protocol import Client, Reply
from tests.models import tiny_encoders
from tests.tiny import Linear, drive, facts_of, mixed_clients, table_clients

HEAD = {"head.weight", "head.bias"}
HEAVY = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "clip": 0.0, "lr": 0.05}


class Watched:
    """A model that notes the trees it is applied to."""

    def __init__(self, model: Any) -> None:
        self.model, self.trees = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def apply(self, tree: Any, batch: Any, **kw: Any) -> Outputs:
        self.trees.append(tree)
        return self.model.apply(tree, batch, **kw)


def watched_clients() -> dict[int, Client]:
    clients = table_clients()
    for client in clients.values():
        client.model = Watched(client.model)
    return clients


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_head_is_the_servers_first_one_on_every_client_and_no_gradient_ever_reaches_it() -> None:
    clients = watched_clients()
    first = clients[0].model.init("head", 5)
    drive(
        METHOD, Config(rounds=3, batch_size=16, **HEAVY), clients, seed=5
    )  # decay and momentum would move it
    for client in clients.values():
        assert len(client.model.trees) == 3 * -(-client.n // 16)
        for tree in client.model.trees:
            assert same({name: tree[name] for name in HEAD}, first)
            for name in HEAD:
                assert not tree[name].requires_grad and tree[name].grad is None
            assert tree["encoder.dense0.linear.weight"].requires_grad


def test_heads_are_no_part_of_what_travels() -> None:
    clients = table_clients()
    cfg = Config(rounds=2, batch_size=16, **HEAVY)
    ends = drive(METHOD, cfg, clients)
    names = set(clients[0].model.blocks["encoder"])
    assert set(ends[-1].state.body) == names == set(serve(cfg, ends[-1].state)["body"])
    sent = METHOD.phases[0](clients[0], {"body": ends[-1].state.body, "seed": 0, "lr": 0.1}, cfg)
    assert set(sent["body"]) == names


def test_the_body_follows_torch_with_a_head_that_needs_no_gradient() -> None:
    client = table_clients(m=1)[0]
    tree = {name: value.clone() for name, value in client.model.trainable(0).items()}
    body = [name for name in tree if name not in HEAD]
    for name in body:
        tree[name].requires_grad_()
    groups = [
        {"params": [tree[n] for n in body if tree[n].ndim > 1], "weight_decay": 0.1},
        {"params": [tree[n] for n in body if tree[n].ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    rows = client.data["train"]
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(client.model.apply(tree, {"x": rows.x()}).logits, rows.columns["label"]).backward()
        optimizer.step()
    (end,) = drive(METHOD, Config(rounds=1, local_steps=4, batch_size=100, **HEAVY), {0: client})
    for name in body:
        assert torch.allclose(end.state.body[name], tree[name], atol=1e-6)


@pytest.mark.parametrize(("average", "expected"), [("samples", 3.5), ("uniform", 3.0)])
def test_the_server_averages_bodies(average: Any, expected: float) -> None:
    state = METHOD.state(0, {"a": torch.zeros(1)}, 0)
    server = METHOD.server(Config(rounds=1, average=average), state, [0, 1])
    assert set(next(server).body) == {"body", "seed", "lr"}
    end = server.send(
        [
            Reply(i, {"body": {"a": torch.tensor([value])}, "n": n, "loss": 1.0, "examples": 1})
            for i, (value, n) in enumerate([(2.0, 1), (4.0, 3)])
        ]
    )
    assert float(end.state.body["a"]) == expected


def tuned(client: Client, cfg: Config, got: dict[str, Any]) -> dict[str, Tensor]:
    """The tree that the client predicts with."""
    client.generator.manual_seed(3)
    predict = predictor(client, got, cfg)
    client.model.trees.clear()
    predict(next(client.data["test"].batches(4)))
    (tree,) = client.model.trees
    return dict(tree)


@pytest.mark.parametrize(("given", "rate"), [(0.0, 0.05), (0.002, 0.002)])
def test_fine_tuning_is_an_epoch_at_the_initial_rate_or_its_own_from_fresh_momentum(
    given: float, rate: float
) -> None:
    # the cosine has brought the rate near 0 by then; one full batch, so one step of the rate it began with
    client = watched_clients()[0]
    cfg = Config(
        rounds=3, batch_size=100, schedule="cosine", finetune_lr=given, **{**HEAVY, "weight_decay": 0.0}
    )
    got = {"body": client.model.init("encoder", 0), "seed": 0}
    tree = {name: x.clone().requires_grad_() for name, x in client.model.trainable(0).items()}
    rows = client.data["train"]
    F.cross_entropy(client.model.apply(tree, {"x": rows.x()}).logits, rows.columns["label"]).backward()
    mine = tuned(client, cfg, got)
    assert tree.keys() == mine.keys()
    for name, value in tree.items():
        assert torch.allclose(mine[name], value.detach() - rate * value.grad, atol=1e-7)
        assert not torch.equal(mine[name], value)


@pytest.mark.parametrize("scope", ["full", "head"])
def test_what_fine_tuning_moves_is_its_scope_and_always_a_copy(scope: Any) -> None:
    clients = watched_clients()
    cfg = Config(rounds=1, batch_size=16, finetune_scope=scope, **HEAVY)
    ends = drive(METHOD, cfg, clients)
    got, client = serve(cfg, ends[-1].state), clients[0]
    before = {name: value.clone() for name, value in got["body"].items()}
    first, again = (tuned(client, cfg, got) for _ in range(2))
    assert same(first, again) and same(got["body"], before) and client.state == {}
    head = client.model.init("head", got["seed"])
    assert not torch.equal(first["head.weight"], head["head.weight"])
    kept = [name for name in before if torch.equal(first[name], before[name])]
    assert kept == (list(before) if scope == "head" else [])


def test_zero_epochs_score_the_untuned_model_and_only_training_rows_tune() -> None:
    clients = watched_clients()
    cfg = Config(rounds=1, batch_size=16, **HEAVY)
    ends = drive(METHOD, cfg, clients)
    got, client = serve(cfg, ends[-1].state), clients[1]
    whole = tuned(client, cfg, got)
    untuned = tuned(client, replace(cfg, finetune_epochs=0), got)
    assert same(untuned, {**got["body"], **client.model.init("head", 0)})
    client.data = {"train": client.data["train"], "test": client.data["test"]}  # no validation rows to use
    assert same(tuned(client, cfg, got), whole)
    client.data = {"train": clients[0].data["train"], "test": client.data["test"]}
    assert not same(tuned(client, cfg, got), whole)


def test_on_adapters_the_frozen_head_stays_in_training_and_moves_in_fine_tuning() -> None:
    model = tiny_encoders.model()
    cfg = Config(batch_size=8, **HEAVY)
    state = start(cfg, model, facts_of(table_clients()))
    assert set(state.body) == {*model.blocks["lora_A"], *model.blocks["lora_B"]}
    batch = tiny_encoders.batch()

    class Rows:
        def __len__(self) -> int:
            return len(batch["label"])

        def batches(self, size: int, **_: Any) -> Any:
            return iter([batch])

    client = Client(0, Watched(model), {"train": Rows(), "test": Rows()})
    METHOD.phases[0](client, {"body": state.body, "seed": 0, "lr": 0.1}, cfg)
    assert all(not set(tree) & set(model.blocks["head"]) for tree in client.model.trees)
    tree = tuned(client, cfg, serve(cfg, state))
    assert set(tree) == set(state.body) | set(model.blocks["head"])
    frozen = model.init("head", 0)
    assert not torch.equal(tree["head.out.weight"], frozen["head.out.weight"])
    assert same(model.init("head", 0), frozen)  # the model's own head is not touched


def test_fine_tuning_a_head_that_is_not_there_is_refused_with_a_way_out() -> None:
    clients = mixed_clients()
    with pytest.raises(
        ValueError, match=r'fedbabu: the model is a Linear without a head.*model.kind = "vision"'
    ):
        start(Config(finetune_scope="head"), Linear(3, rank=2), facts_of(clients))
    assert start(Config(finetune_scope="head", finetune_epochs=0), Linear(3), facts_of(clients)).round == 0
