"""Language models whose next token can be said by hand: counters, with a cache and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.interface import Batch, Model, Outputs

END = 9


class PastOutputs(Outputs):
    """Outputs with what a cache needs."""

    past: Any = None


class Counter(Model):
    """The token after x_1 .. x_t is (x_1 + ... + x_t + t) mod 10; 9 ends. Padding must be masked.

    caches: whether it gives `past`. shift: is added to every next token, mod 10. Its tree is one number that
    scales how sure it is; the loss falls as it grows."""

    projections = ()
    vocabulary = n_classes = 10

    def __init__(self, *, caches: bool = False, shift: int = 0) -> None:
        self.caches, self.shift = caches, shift
        self.blocks = {"lora_A": (), "lora_B": ("sure",), "router": (), "head": ()}
        self.passes: list[tuple[int, int]] = []  # rows and tokens of each forward pass

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        return {"sure": torch.ones(())} if block == "lora_B" else {}

    def apply(self, tree: Any, batch: Batch, *, bank: Any = None, generator: Any = None) -> Outputs:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        self.passes.append((len(ids), ids.shape[1]))
        past: Any = batch.get("past")
        if past is None:
            total = ((ids + 1) * mask).cumsum(1)
            kept = ids.shape[1] - 1
        else:
            held, kept = past
            assert ids.shape[1] == 1 and mask.shape[1] == kept + 2
            total = held + ids + 1
            kept += 1
            assert torch.equal(batch["position_ids"][:, 0], mask.sum(1) - 1)
        following = (total + self.shift) % 10
        out = PastOutputs(F.one_hot(following, 10) * 5.0 * tree.get("sure", torch.ones(())))
        if self.caches and batch.get("use_cache"):
            object.__setattr__(out, "past", (total[:, -1:], kept))
        return out

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        counted = batch["response"][:, 1:].float()
        nats = F.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        return (nats * counted).sum(1) / counted.sum(1)

    def describe(self) -> dict[str, Any]:
        return {"kind": "counter"}
