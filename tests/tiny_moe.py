"""A linear model with a routed mixture in name: low-rank pair, and a fixed router that tells tasks apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedprism.protocol import Client
from tests.tiny import Linear, mixed_clients


class RoutedLinear(Linear):
    """`Linear` with a low-rank pair; `routing` is a fixed softmax of the inputs in L layers of K experts."""

    def __init__(self, d: int = 3, rank: int = 2, layers: int = 2, experts: int = 4) -> None:
        super().__init__(d, rank=rank)
        self.n_layers, self.n_experts = layers, experts
        g = torch.Generator().manual_seed(5)
        self.router = torch.randn(layers, experts, d, generator=g)

    def routing(self, tree: Any, batch: Any) -> Tensor:
        return torch.einsum("bd,lkd->lbk", batch["x"], self.router).softmax(-1)[:, :, None]


def routed_clients(n_clients: int = 6, n: int = 40, seed: int = 0, n_tasks: int = 3) -> dict[int, Client]:
    """Clients of up to three tasks whose inputs lie around centres, so that the router tells them apart."""
    clients = mixed_clients(n_clients, n_tasks, n=n, d=3, seed=seed, model=RoutedLinear())
    for client in clients.values():
        for rows in client.data.values():
            rows.columns["x"] = rows.columns["x"] * 0.3 + 1.5 * torch.eye(3)[rows.columns["task"]]
    return clients
