"""A language model of one line: next-token logits of the current token through routed low-rank experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.interface import Batch, Model, Outputs
from fedprism.protocol import POOLED, Client
from tests.tiny import TinyRows


class TinyLanguage(Model):
    """logits_t = (W + sum_k p_k(x_t) s B_k A_k) x_t with x_t the token's vector and p a fixed router.

    Factors are 3-D: `lora_A.0.down` (K, r, d), `lora_B.0.down` (K, V, r); s = alpha / (configured r)."""

    projections = ()

    def __init__(self, vocabulary: int = 7, d: int = 4, experts: int = 3, rank: int = 2) -> None:
        g = torch.Generator().manual_seed(11)
        self.n_classes = self.vocabulary = vocabulary
        self.d, self.n_layers, self.n_experts, self.rank, self.scale = d, 1, experts, rank, 3.0 / rank
        self.embedding, self.base = torch.randn(vocabulary, d, generator=g), torch.zeros(vocabulary, d)
        self.router = torch.randn(experts, d, generator=g)
        self.blocks = {"lora_A": ("lora_A.0.down",), "lora_B": ("lora_B.0.down",), "router": (), "head": ()}

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed % 2**62)
        if block == "lora_A":
            return {
                "lora_A.0.down": torch.randn(self.n_experts, self.rank, self.d, generator=g) / self.d**0.5
            }
        if block == "lora_B":
            return {"lora_B.0.down": torch.zeros(self.n_experts, self.vocabulary, self.rank)}
        return {}

    def apply(self, tree: Any, batch: Batch, *, bank: Any = None, generator: Any = None) -> Outputs:
        x = self.embedding[batch["input_ids"]]  # (b, T, d)
        logits = x @ self.base.T
        if tree:
            p = (x @ self.router.T).softmax(-1)  # (b, T, K)
            inner = torch.einsum("btd,krd->btkr", x, tree["lora_A.0.down"])
            logits = logits + self.scale * torch.einsum("btk,btkr,kvr->btv", p, inner, tree["lora_B.0.down"])
        return Outputs(logits)

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        counts = batch["response"][:, 1:].float()
        nats = F.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        return (nats * counts).sum(1) / counts.sum(1)

    def describe(self) -> dict[str, Any]:
        return {"kind": "tiny language"}


def language_clients(n_clients: int = 3, n: int = 12, length: int = 6) -> dict[int, Client]:
    """Task m counts upwards in steps of m + 1 modulo the vocabulary; clients hold both, -2 all rows."""
    model = TinyLanguage()
    g = torch.Generator().manual_seed(3)

    def rows(count: int, first: int) -> TinyRows:
        task = torch.arange(count) % 2
        begin = torch.randint(model.vocabulary, (count, 1), generator=g)
        ids = (begin + torch.arange(length) * (task[:, None] + 1)) % model.vocabulary
        response = torch.zeros(count, length, dtype=torch.bool)
        response[:, 2:] = True
        return TinyRows(
            input_ids=ids, attention_mask=torch.ones_like(ids), response=response, task=task,
            label=torch.zeros(count, dtype=torch.int64), row=first + torch.arange(count),
        )  # fmt: skip

    clients = {}
    for i in range(n_clients):
        splits = {"train": n + 2 * i, "validation": 4, "test": 6}
        clients[i] = Client(
            i, model, {s: rows(c, 100 * i + 30 * k) for k, (s, c) in enumerate(splits.items())}
        )
    train = [c.data["train"].columns for c in clients.values()]
    pooled = TinyRows(**{name: torch.cat([part[name] for part in train]) for name in train[0]})
    tasks = {f"task{m}": pooled.select(torch.nonzero(pooled.columns["task"] == m).flatten()) for m in (0, 1)}
    clients[POOLED] = Client(POOLED, model, {"train": pooled, **tasks})
    return clients
