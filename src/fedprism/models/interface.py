"""What a method may ask of a model: named blocks, a functional forward pass, a loss.

Models are functional: trainable tensors live in trees outside the model, the model itself holds only
frozen weights. One model object serves every client of a run. `Model` is what every method can train and
score; `FeatureModel` is a classifier head on an encoder of its own, with a second encoder for routing;
`LanguageModel` predicts tokens and routes each of them to experts.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tree = dict[str, Tensor]
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Bank:
    """Routed experts as one forward pass sees them (FedSEE spec 5.1).

    down: the shared down-projections A^g, names of `blocks["lora_A"]`; empty where a model has none.
    experts: expert index -> tree with the names of `blocks["lora_B"]`. Indices that are missing are masked:
        they get exactly zero probability.
    router: tree with the names of `blocks["router"]` (M outputs each); ignored when `weights` is given.
    weights: (M,) fixed mixing weights for every token and projection, instead of a router.
    """

    down: Tree
    experts: Mapping[int, Tree]
    router: Tree = field(default_factory=dict)
    weights: Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """Result of a forward pass over a batch of b examples.

    logits: (b, n_classes), float32.
    usage_sum: (P, b, M) routing probabilities summed over the real tokens of each example, for P adapted
        projections in the order of `Model.projections`; None without a router. Gradients flow through it.
    tokens: (b,) number of real (not padding) tokens of each example; None without a router.
    past: keys and values of a language model that was asked to keep them (`LanguageModel.apply`).
    """

    logits: Tensor
    usage_sum: Tensor | None = None
    tokens: Tensor | None = None
    past: Any = None

    @property
    def usage(self) -> Tensor:
        """(P, M) mean routing probability over the batch's real tokens; rows sum to 1 (spec 5.2)."""
        if self.usage_sum is None or self.tokens is None:
            raise ValueError("usage: this forward pass had no router; pass a bank with a router")
        return self.usage_sum.sum(1) / self.tokens.sum()


class Model(abc.ABC):
    """A frozen backbone with named trainable blocks.

    blocks: block name -> names of its tensors. Blocks: "lora_A" (down-projections; may be empty), "lora_B"
        (up-projections), "router", "head".  A tree given to `apply` may hold any of lora_A, lora_B and head;
        a missing head is the frozen one, missing lora_A and lora_B mean "no always-on pair".
    projections: names of the P adapted projections; the tensor `lora_A.<p>`, `lora_B.<p>`,
        `router.<p>.weight`, `router.<p>.bias` belong to projection p.
    trained: blocks that a method without a view of its own trains as one tree, in this order.
    decayed: names of the tensors that weight decay applies to; None means all.
    """

    blocks: Mapping[str, tuple[str, ...]]
    projections: tuple[str, ...]
    n_classes: int
    trained: tuple[str, ...] = ("lora_A", "lora_B")
    decayed: Collection[str] | None = None

    def trainable(self, seed: int) -> Tree:
        """Fresh tensors of every block in `trained`, each from `seed`."""
        return {name: value for block in self.trained for name, value in self.init(block, seed).items()}

    @abc.abstractmethod
    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """Fresh tensors of one block, from `seed` alone. lora_A: Kaiming uniform (a = sqrt 5); lora_B: zeros;
        router: default linear init with `n_experts` rows; head: the frozen head's values."""

    @abc.abstractmethod
    def apply(
        self,
        tree: Tree,
        batch: Batch,
        *,
        bank: Bank | None = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """Forward pass. tree: always-on pair (and head). bank: routed experts on top of it.
        generator: source of dropout masks in training; None switches dropout off. Changes nothing."""

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """(b,) cross-entropy in nats against `batch["label"]`."""
        return F.cross_entropy(outputs.logits.float(), batch["label"], reduction="none")

    def prepare(self, rows: Any) -> Any:
        """Turn a data split into the form that `apply` reads (cached features, say). Default: unchanged."""
        return rows

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON facts for the run record: backbone, weights' hash, sizes of blocks, head's logit spread."""


class FeatureModel(Model):
    """A linear head on the features of a trained encoder, and a second encoder whose features route.

    Blocks: "encoder" (theta of FedSPM), "head" (linear, d_g -> K: `head.weight` (K, d_g), `head.bias` (K,)),
        "router_encoder" (nu); lora_A, lora_B and router are empty, nothing is frozen.
    width: d_g, features per example of "encoder".   router_width: d_h, of "router_encoder".
    """

    projections = ()
    trained = ("encoder", "head")
    width: int
    router_width: int

    @abc.abstractmethod
    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """Fresh tensors of one block, from its name and `seed` alone, so `init("head", other)` is one more
        independent head and `init("encoder", other)` an encoder of one more component. The head is torch's
        default linear init, entries uniform in +-1 / sqrt(d_g); blocks without tensors give {}."""

    @abc.abstractmethod
    def encode(self, tree: Tree, batch: Batch, block: str = "encoder") -> Tensor:
        """(b, d) features of batch["x"] by the encoder `block` ("encoder": d = width, or "router_encoder":
        d = router_width), in float32 (float64 where tree and x are). tree holds its tensors and may hold
        others. No row depends on the others. Raises KeyError for another block, ValueError if tensors are
        missing from the tree or x has another shape."""

    def classify(self, tree: Tree, features: Tensor) -> Tensor:
        """(b, K) logits of (b, width) features by the head in `tree` (which may hold other tensors)."""
        missing = [name for name in self.blocks["head"] if name not in tree]
        if missing:
            raise ValueError(f"classify: the tree lacks {missing}; add init('head', seed)")
        return F.linear(features, tree["head.weight"], tree["head.bias"])

    def apply(
        self,
        tree: Tree,
        batch: Batch,
        *,
        bank: Bank | None = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """The head on the encoder's features; both stand in `tree`. Nothing is random, so training and
        evaluation compute the same. Raises ValueError for a bank."""
        if bank is not None:
            raise ValueError(
                f"apply: got a bank of {len(bank.experts)} experts, this model has no projections to route; "
                "pass bank=None"
            )
        return Outputs(self.classify(tree, self.encode(tree, batch)))


class LanguageModel(Model):
    """A causal language model with routed experts, frozen but for low-rank pairs on the experts' matrices.

    Blocks: "lora_A" with names `lora_A.<layer>.gate_up` (K, r, hidden), `lora_A.<layer>.down` (K, r, inner),
        "lora_B" with `lora_B.<layer>.gate_up` (K, 2 inner, r), `lora_B.<layer>.down` (K, hidden, r); router
        and head are empty. The rank is read off the tensors at every call, the scale stays that of the
        configured one.
    n_layers: L layers with routed experts.   n_experts: K of them per layer, shared ones not counted.
    vocabulary: V = n_classes.   tokenizer: of the model.
    A batch holds input_ids (b, T) padded on the right, attention_mask (b, T) and response (b, T) bool: the
        tokens whose prediction counts.
    """

    projections = ()
    n_layers: int
    n_experts: int
    vocabulary: int
    tokenizer: Any

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """(b,) mean nats per response token, each predicted from the tokens before it; 0 without any."""
        counts = batch["response"][:, 1:].to(torch.float32)
        nats = F.cross_entropy(
            outputs.logits[:, :-1].float().transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        return (nats * counts).sum(1) / counts.sum(1).clamp(min=1)

    @abc.abstractmethod
    def routing(self, tree: Tree, batch: Batch) -> Tensor:
        """(L, b, T, K) float32 router probabilities of every layer before top-k, padding included (FedTAR
        spec 4). Without gradients."""
