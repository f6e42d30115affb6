"""What every method owes: two runs equal bit for bit, resuming equals not stopping, inputs unchanged."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from fedprism.engines.inprocess import InProcess
from fedprism.evaluation.measure import ASKED, evaluation_phase
from fedprism.methods.registry import METHODS, get_method
from fedprism.protocol import Ask, Client, tensors_in
from fedprism.storage import RunDirectory
from tests.tiny import Linear, drive, facts_of, mixed_clients, table_clients
from tests.tiny_moe import routed_clients

SETTINGS: dict[str, dict[str, Any]] = {
    "fedsee": {
        "rounds": 4,
        "init_epochs": 1,
        "batch_size": 8,
        "lr": 0.05,
        "public_batch": 8,
        "extract_steps": 6,
    },
    "fedspm": {
        "rounds": 4,
        "batch_size": 8,
        "local_steps": 3,
        "drm_steps": 2,
        "n_components": 2,
        "init": "kmeans",
        "warm_rounds": 2,
        "calibrate_gamma": 1,
    },
    "feddrm_separate": {"rounds": 4, "batch_size": 8, "local_steps": 3, "drm_steps": 2},
    "fedgmm": {
        "rounds": 3,
        "pretrain_rounds": 2,
        "n_gaussians": 2,
        "n_components": 2,
        "feature_dim": 2,
        "batch_size": 8,
        "lr": 0.05,
    },
    "scaffold": {"rounds": 4, "batch_size": 8, "lr": 0.05, "momentum": 0.5},
    "fedprox": {"rounds": 4, "batch_size": 8, "lr": 0.05, "straggler_fraction": 0.5},
    "ditto": {"rounds": 4, "batch_size": 8, "lr": 0.05, "split": "sequential", "budget": "halved"},
    "ifca": {"rounds": 4, "batch_size": 8, "lr": 0.05, "n_clusters": 2, "share_body": True},
    "fedtar": {"rounds": 4, "batch_size": 8, "participation": 0.75, "refresh": 2, "n_clusters": 2},
    "fedsee_geometry": {"projections": "all", "steps": 6, "router_steps": 4, "batch_size": 8, "lr": 0.05},
}
DEFAULT: dict[str, Any] = {"rounds": 4, "batch_size": 8, "lr": 0.05}
# Methods of models with an encoder and a head.
ON_TABLES: set[str] = {"fedspm", "feddrm_separate", "ifca", "fedbabu", "fedgmm", "feddrm"}
ON_EXPERTS: set[str] = {"fedtar"}  # methods of models with routed experts


def prepared(name: str) -> tuple[Any, Any, dict[int, Client]]:
    method = get_method(name)
    if name in ON_EXPERTS:
        clients = routed_clients(4, n=20, n_tasks=2)
    else:
        clients = table_clients() if name in ON_TABLES else mixed_clients(3, 2, n=20, model=Linear(3, rank=2))
    return method, method.config(**SETTINGS.get(name, DEFAULT)), clients


def bits(value: Any) -> list[tuple[str, bytes]]:
    """Every tensor of a structure, with its path and bytes."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {name: getattr(value, name) for name in asdict(value)}
    return [(path, tensor.numpy().tobytes()) for path, tensor in tensors_in(value)]


def kept(clients: dict[int, Client]) -> list[Any]:
    return [(who, bits(client.state)) for who, client in sorted(clients.items())]


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_are_equal_bit_for_bit(name: str) -> None:
    results = []
    for _ in range(2):
        method, cfg, clients = prepared(name)
        ends = drive(method, cfg, clients)
        results.append((bits(ends[-1].state), kept(clients), [dict(end.log) for end in ends]))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_the_clients_does_not_matter(name: str) -> None:
    method, cfg, clients = prepared(name)
    forward = bits(drive(method, cfg, clients)[-1].state)
    method, cfg, clients = prepared(name)
    backward = dict(reversed(clients.items()))
    assert bits(drive(method, cfg, backward, facts=facts_of(clients))[-1].state) == forward


@pytest.mark.parametrize("name", METHODS)
def test_resuming_from_the_disk_equals_not_stopping(name: str, tmp_path: Any) -> None:
    method, cfg, clients = prepared(name)
    ends = drive(method, cfg, clients)
    expected = (bits(ends[-1].state), kept(clients))
    total = cfg.total_rounds
    assert len(ends) == total
    for stop in range(1, total):
        method, cfg, clients = prepared(name)
        first = drive(method, cfg, clients, stop=stop)
        directory = RunDirectory.create(tmp_path / f"{name}-{stop}")
        directory.save_checkpoint(stop - 1, first[-1].state, {who: c.state for who, c in clients.items()})
        restored = directory.load_checkpoint(method.state)
        assert restored is not None
        _, state, states = restored
        _, _, fresh = prepared(name)
        for who, mine in states.items():
            fresh[who].state.update(mine)
        ends = drive(method, cfg, fresh, state=state)
        assert (bits(ends[-1].state), kept(fresh)) == expected, f"stopped after {stop} rounds"


@pytest.mark.parametrize("name", METHODS)
def test_inputs_and_frozen_rows_stay_as_they_were(name: str) -> None:
    method, cfg, clients = prepared(name)
    facts = facts_of(clients)
    data = [(who, split, bits(rows.columns)) for who, c in clients.items() for split, rows in c.data.items()]
    state = method.start(cfg, clients[0].model, facts)
    start = bits(state)
    ends = drive(method, cfg, clients, state=state, facts=facts)
    assert bits(state) == start  # servers make new trees
    for before, after in pairwise(ends):
        assert before.round + 1 == after.round
    assert data == [
        (who, split, bits(rows.columns)) for who, c in clients.items() for split, rows in c.data.items()
    ]


@pytest.mark.parametrize("name", METHODS)
def test_scoring_twice_gives_the_same_and_changes_nothing_a_client_keeps(name: str) -> None:
    method, cfg, clients = prepared(name)
    ends = drive(method, cfg, clients)
    body = method.serve(cfg, ends[-1].state)
    phase = evaluation_phase(method, tuple(body))
    before = kept(clients)
    engine = InProcess(name, {"evaluate": phase}, clients, cfg, seed=0)
    got = {**body, "split": "test", "size": 4, "n_tasks": 2}
    assert set(got) == set(body) | ASKED
    scores = []
    for _ in range(2):  # within one round, as validation and test are
        replies = engine.carry(Ask("evaluate", facts_of(clients).clients, got, diagnostic=True), 3)
        scores.append([bits(reply.body) for reply in replies])
    assert scores[0] == scores[1] and kept(clients) == before


def test_a_phase_that_breaks_its_contract_is_named() -> None:
    method, cfg, clients = prepared("fedavg")
    with pytest.raises(ValueError, match=r"phase 'update', client 0: received \['w'\].*missing \['lr'\]"):
        method.phases[0](clients[0], {"w": {}}, cfg)
    clients[0].state["secret"] = 1
    with pytest.raises(ValueError, match=r"keeps .*secret"):
        method.phases[0](clients[0], {"w": {"lora_B.p": torch.zeros(2, 3)}, "lr": 0.1}, cfg)


def test_a_client_whose_training_blows_up_is_named_and_never_averaged() -> None:
    method, cfg, clients = prepared("fedavg")
    clients[1].data["train"].columns["x"] *= float("nan")
    with pytest.raises(
        RuntimeError, match=r"fedavg, phase 'update', round 0, client 1: .*lower the learning rate"
    ):
        drive(method, cfg, clients)
