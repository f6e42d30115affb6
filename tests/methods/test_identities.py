"""Settings in which one method is another: the same bits, or the same numbers where sums round otherwise.

A row names two methods of the registry with their settings and says where each keeps its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.methods.registry import get_method
from fedprism.protocol import Client
from tests.tiny import Linear, TinyRows, drive, mixed_clients, table_clients

Answer = dict[str, Tensor]
World = Callable[[], dict[int, Client]]
Read = Callable[[Any, Any, Any, dict[int, Client]], Answer]  # (method, cfg, last state, clients)

# --- worlds ------------------------------------------------------------------------------------------------


class InOrder(TinyRows):
    """Rows whose batches come in one order, whatever the generator: phases of other names draw alike."""

    def batches(self, size: int, *, generator: Any = None, **walk: Any) -> Any:
        return super().batches(size, generator=None, **walk)


def tables() -> dict[int, Client]:
    """Three clients with a table and a perceptron of encoder and head."""
    return table_clients()


def tables_in_order() -> dict[int, Client]:
    """The same, without shuffling."""
    clients = table_clients()
    for client in clients.values():
        client.data = {split: InOrder(x=rows.x(), **rows.columns) for split, rows in client.data.items()}
    return clients


def one_table() -> dict[int, Client]:
    """A federation of one client."""
    return table_clients(m=1)


def one_adapter() -> dict[int, Client]:
    """A federation of one client with low-rank adapters, whose rows come in one order."""
    clients = {0: mixed_clients(1, 2, n=20, model=Linear(3, rank=2))[0]}
    clients[0].data = {split: InOrder(**rows.columns) for split, rows in clients[0].data.items()}
    return clients


def adapters() -> dict[int, Client]:
    """Clients with low-rank adapters, whose head is frozen."""
    return {i: c for i, c in mixed_clients(3, 2, n=20, model=Linear(3, rank=2)).items() if i >= 0}


# --- where a method keeps its answer -----------------------------------------------------------------------


def of_state(*path: Any) -> Read:
    """A tree in the last server state: of_state("models", 0) is state.models[0]."""

    def read(method: Any, cfg: Any, state: Any, clients: dict[int, Client]) -> Answer:
        value = getattr(state, path[0])
        for key in path[1:]:
            value = value[key]
        return dict(value)

    return read


def of_clients(name: str, shape: tuple[int, ...] | None = None) -> Read:
    """What every client keeps under `name`: a tree, or a tensor, seen in the given shape."""

    def read(method: Any, cfg: Any, state: Any, clients: dict[int, Client]) -> Answer:
        found = {}
        for i, client in clients.items():
            value = client.state[name]
            parts = {name: value.reshape(shape or value.shape)} if isinstance(value, Tensor) else value
            found |= {f"{i}:{key}": part for key, part in parts.items()}
        return found

    return read


def predictions(method: Any, cfg: Any, state: Any, clients: dict[int, Client]) -> Answer:
    """Logits of every client's predictor on its test rows."""
    got, logits = method.serve(cfg, state), {}
    for i, client in clients.items():
        client.generator.manual_seed(17)
        predict = method.predictor(client, got, cfg)
        with torch.no_grad():
            parts = [predict(batch).logits for batch in client.data["test"].batches(5)]
        logits[str(i)] = torch.cat(parts)
    return logits


def log_probabilities(method: Any, cfg: Any, state: Any, clients: dict[int, Client]) -> Answer:
    """Log-probabilities of every client's predictor; methods may differ in a constant per row of logits."""
    return {i: x.log_softmax(1) for i, x in predictions(method, cfg, state, clients).items()}


# --- the identities ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A method with its settings and where its answer is."""

    method: str
    read: Read
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """left = right in a world. within: largest difference; 0 = bit for bit."""

    left: Side
    right: Side
    world: World
    within: float = 0.0
    shared: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = self.left.read.__name__ if self.left.read in (predictions, log_probabilities) else "trees"
        return f"{self.left.method}={self.right.method}-{self.world.__name__}-{where}"


FEDAVG = Side("fedavg", of_state("w"))
LOCAL = Side("local_only", predictions, {"persist_optimizer": False})
ONE_GAUSSIAN = {"n_gaussians": 1, "pretrain_rounds": 0, "average": "samples"}
ROWS = [
    Identity(Side("fedprox", of_state("w"), {"mu": 0.0}), FEDAVG, tables),
    Identity(Side("fedprox", of_state("w"), {"mu": 0.0}), FEDAVG, adapters),
    Identity(Side("fedprox", of_state("w"), {"mu": 0.0}), FEDAVG, tables, shared={"participation": 0.5}),
    # SCAFFOLD adds c - c_i, which is zero here, and x + (y - x): sums that round
    Identity(Side("scaffold", of_state("x")), FEDAVG, one_table, within=2e-6),
    # the personal branch of Ditto and local training, in other phases, draw other orders; here there is one
    Identity(Side("ditto", of_clients("v"), {"lam": 0.0}),
             Side("local_only", of_clients("w"), {"persist_optimizer": False}), tables_in_order),
    Identity(Side("ditto", of_clients("v"), {"lam": 0.0, "split": "sequential"}),
             Side("local_only", of_clients("w"), {"persist_optimizer": False}), tables_in_order),
    Identity(Side("ditto", predictions, {"lam": 0.0}),
             Side("local_only", predictions, {"persist_optimizer": False}), tables_in_order),
    Identity(Side("ditto", of_state("w"), {"lam": 3.0}), FEDAVG, tables),
    Identity(Side("ifca", of_state("models", 0), {"n_clusters": 1}), FEDAVG, tables),
    Identity(Side("ifca", of_state("models", 0), {"n_clusters": 1}), FEDAVG, tables,
             shared={"participation": 0.5}),
    Identity(Side("ifca", predictions, {"n_clusters": 1}), Side("fedavg", predictions), tables),
    Identity(Side("ifca", predictions, {"n_clusters": 1, "share_body": True}), Side("fedavg", predictions),
             tables),
    Identity(Side("ifca", of_state("models", 0), {"n_clusters": 1, "init": "random_groups"}), FEDAVG, tables),
    Identity(Side("ifca", of_state("models", 0), {"n_clusters": 1}), Side("fedit", of_state("w")), adapters),
    Identity(Side("fedavg_ft", predictions, {"finetune_epochs": 0}), Side("fedavg", predictions), tables),
    Identity(Side("fedavg_ft", of_state("w"), {"finetune_epochs": 2}), FEDAVG, tables),
    Identity(Side("fedem", of_state("components", 0), {"n_components": 1}), FEDAVG, tables),
    Identity(Side("fedem", of_state("components", 0), {"n_components": 1}), FEDAVG, tables,
             shared={"participation": 0.5}),
    Identity(Side("fedem", of_state("components", 0), {"n_components": 1}), FEDAVG, adapters),
    Identity(Side("fedem", log_probabilities, {"n_components": 1}), Side("fedavg", log_probabilities),
             tables, within=1e-6),  # mixed in float64
    # one client that learns labels alone: the client head gets no gradient
    Identity(Side("feddrm", predictions, {"lam": 1.0}), Side("fedavg", predictions), one_table, within=2e-6),
    # one Gaussian tells no rows apart, and clients weigh as in FedEM
    Identity(Side("fedgmm", of_state("components", 1), ONE_GAUSSIAN),
             Side("fedem", of_state("components", 1)), tables, within=2e-6),
    Identity(Side("fedgmm", of_clients("pi", (3,)), ONE_GAUSSIAN), Side("fedem", of_clients("pi")),
             tables, within=1e-6),
    Identity(Side("fedgmm", log_probabilities, ONE_GAUSSIAN), Side("fedem", log_probabilities),
             tables, within=5e-6),
    # adapters under a frozen head: FedBABU has nothing to hold still that FedAvg moves
    Identity(Side("fedbabu", of_state("body")), FEDAVG, adapters),
    Identity(Side("fedbabu", predictions, {"finetune_epochs": 2}),
             Side("fedavg_ft", predictions, {"finetune_epochs": 2}), adapters),
    Identity(Side("fedit", of_state("w")), FEDAVG, adapters),
    Identity(Side("fedsvd", of_state("up"), {"period": 0}), Side("ffa_lora", of_state("shared")), adapters),
    Identity(Side("fedsvd", predictions, {"period": 0}), Side("ffa_lora", predictions), adapters,
             shared={"participation": 0.5, "weights": "uniform"}),
    Identity(Side("fedsvd", predictions, {"period": 9}), Side("ffa_lora", predictions), adapters),
    Identity(Side("fedex_lora", of_state("w")), Side("fedit", of_state("w")), one_adapter),
    Identity(Side("fedit", predictions), LOCAL, one_adapter),
    Identity(Side("fedex_lora", predictions), LOCAL, one_adapter),
    Identity(Side("fedsa_lora", predictions), LOCAL, one_adapter),
]  # fmt: skip
SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.5, "weight_decay": 0.01, "clip": 1.0, "lr": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01, "clip": 1.0, "lr": 0.01},
}


def answer(side: Side, identity: Identity, solver: dict[str, Any]) -> Answer:
    method = get_method(side.method)
    settings = {"rounds": 3, "local_epochs": 2, "batch_size": 16, "schedule": "cosine", **solver}
    settings |= identity.shared
    settings = {
        name: value for name, value in settings.items() if name in {f.name for f in fields(method.config)}
    }
    clients = identity.world()
    cfg = method.config(**{**settings, **side.settings})
    return side.read(method, cfg, drive(method, cfg, clients, seed=4)[-1].state, clients)


SGD_ALONE = {"scaffold"}
CASES = [
    pytest.param(row, solver, id=f"{row}-{name}")
    for row in ROWS
    for name, solver in SOLVERS.items()
    if name == "sgd" or not SGD_ALONE & {row.left.method, row.right.method}
]


@pytest.mark.parametrize(("identity", "solver"), CASES)
def test_one_method_is_another(identity: Identity, solver: dict[str, Any]) -> None:
    left, right = (answer(side, identity, solver) for side in (identity.left, identity.right))
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        if identity.within:
            assert float((value - right[name]).abs().max()) <= identity.within, name
        else:
            assert torch.equal(value, right[name]), name


def differing() -> list[Identity]:
    """Rows of neighbours that are not equal: the comparison can fail."""
    return [
        Identity(Side("fedprox", of_state("w"), {"mu": 0.1}), FEDAVG, tables),
        Identity(Side("ditto", of_clients("v"), {"lam": 1.0}),
                 Side("local_only", of_clients("w"), {"persist_optimizer": False}), tables_in_order),
        Identity(Side("ifca", of_state("models", 0), {"n_clusters": 2}), FEDAVG, tables),
        Identity(Side("fedavg_ft", predictions, {"finetune_epochs": 1}), Side("fedavg", predictions), tables),
        Identity(Side("fedbabu", predictions, {"finetune_epochs": 0}), Side("fedavg", predictions), tables),
        Identity(Side("scaffold", of_state("x")), FEDAVG, tables),
        Identity(Side("fedem", of_state("components", 0), {"n_components": 2}), FEDAVG, tables),
        Identity(Side("fedsvd", predictions, {"period": 1}), Side("ffa_lora", predictions), adapters),
        Identity(Side("fedex_lora", predictions), Side("fedit", predictions), adapters),
        Identity(Side("fedsa_lora", predictions), Side("fedit", predictions), adapters),
        Identity(Side("ffa_lora", predictions), Side("fedit", predictions), adapters),
    ]  # fmt: skip


@pytest.mark.parametrize("identity", differing(), ids=str)
def test_and_is_not_with_other_settings(identity: Identity) -> None:
    left, right = (answer(side, identity, SOLVERS["sgd"]) for side in (identity.left, identity.right))
    assert any(float((value - right[name]).abs().max()) > 1e-4 for name, value in left.items())
