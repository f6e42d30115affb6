"""Mixture-of-experts causal language models of transformers, with low-rank pairs on every routed expert.

Qwen2-MoE, OLMoE, Mixtral and their like: layers whose experts are two stacked parameters and whose router is
a module `gate` beside them. Router, attention, norms, embeddings and shared experts stay frozen (FedTAR
spec 2). The usual convention is kept: A reads the input, B writes the output.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.models.encoder import resolve_precision, weights_hash
from fedprism.models.expert_lora import KINDS, NAME, Adapters, Pair, adapted, register
from fedprism.models.interface import Bank, Batch, LanguageModel, Outputs, Tree


def routed_layers(model: nn.Module) -> list[tuple[Any, nn.Module]]:
    """(experts, gate) of every layer with routed experts, in the model's order. Raises ValueError, one line,
    for a dense model or experts in a form that is not known."""
    found = []
    for module in model.modules():
        experts, gate = getattr(module, "experts", None), getattr(module, "gate", None)
        if experts is None or not isinstance(gate, nn.Module):
            continue
        stacked = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
        if any(not isinstance(weight, Tensor) or weight.ndim != 3 for weight in stacked):
            raise ValueError(
                f"moe_lm: the experts are a {type(experts).__name__} without stacked gate_up_proj and "
                "down_proj; needs a Qwen2-MoE, OLMoE or Mixtral style model"
            )
        found.append((experts, gate))
    if not found:
        raise ValueError(
            f"moe_lm: {type(model).__name__} has no layer with routed experts; needs a mixture-of-experts "
            'model such as Qwen2-MoE, OLMoE or Mixtral (dense text encoders: model.kind = "encoder")'
        )
    return found


class MoeLanguageModel(LanguageModel):
    """A frozen mixture-of-experts language model with low-rank pairs on its routed experts.

    backbone: a causal language model of transformers; frozen, its experts run through `expert_lora`.
    tokenizer: the matching one, None if the caller tokenises.   name: for the run record.
    rank: r >= 1.   lora_alpha: s = lora_alpha / rank.   dropout: rate in [0, 1) on the low-rank branch.
    a_init_std: of A's normal entries; None for 1 / sqrt(in).   max_length: tokens per example.
    precision: "fp32", "bf16" (the frozen weights; factors and logits stay float32) or "auto".
    Raises ValueError, one line each, for values outside these or a model without routed experts.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokenizer: Any = None,
        name: str = "custom",
        rank: int = 8,
        lora_alpha: float = 16.0,
        dropout: float = 0.05,
        a_init_std: float | None = None,
        max_length: int | None = None,
        precision: str = "fp32",
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank: got {rank}, needs at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: got {dropout}, needs a rate in [0, 1)")
        layers = routed_layers(backbone)
        register()
        config: Any = backbone.config
        config._experts_implementation = NAME
        self.precision = resolve_precision(precision)
        self.backbone = backbone.eval().requires_grad_(False)
        if self.precision == "bf16":
            self.backbone = self.backbone.to(torch.bfloat16)
        self.experts = [experts for experts, _ in layers]
        self.gates = [gate for _, gate in layers]
        self.tokenizer, self.name, self.max_length = tokenizer, name, max_length
        self.rank, self.lora_alpha, self.dropout = rank, float(lora_alpha), float(dropout)
        self.a_init_std = a_init_std
        self.n_layers = len(layers)
        self.n_experts = int(self.experts[0].gate_up_proj.shape[0])
        self.vocabulary = self.n_classes = int(config.vocab_size)
        self._sites = {
            f"{layer}.{kind}": (experts, kind) for layer, experts in enumerate(self.experts) for kind in KINDS
        }
        self.blocks = {
            "lora_A": tuple(f"lora_A.{site}" for site in self._sites),
            "lora_B": tuple(f"lora_B.{site}" for site in self._sites),
            "router": (),
            "head": (),
        }
        self._hash = weights_hash(self.backbone)
        self._spread: float | None = None

    def _weight(self, site: str) -> Tensor:
        experts, kind = self._sites[site]
        weight: Tensor = getattr(experts, f"{kind}_proj")
        return weight  # (K, out, in)

    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """See `LanguageModel`. A ~ Normal(0, a_init_std^2), every tensor from its name and `seed`; B = 0."""
        result: Tree = {}
        if block not in self.blocks:
            raise KeyError(f"init: no block '{block}' among {sorted(self.blocks)}")
        for name in self.blocks[block]:
            weight = self._weight(name.partition(".")[2])
            if block == "lora_B":
                result[name] = torch.zeros(weight.shape[0], weight.shape[1], self.rank)
                continue
            key = hashlib.sha256(f"{name}\x1f{seed}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
            std = self.a_init_std or 1 / math.sqrt(weight.shape[2])
            shape = (weight.shape[0], self.rank, weight.shape[2])
            result[name] = std * torch.randn(shape, generator=generator)
        return result

    def _adapters(self, tree: Tree, generator: torch.Generator | None) -> Adapters | None:
        """The tree's factors by layer. Raises ValueError for names that no layer has, or an A without B."""
        known = {*self.blocks["lora_A"], *self.blocks["lora_B"]}
        strange = sorted(set(tree) - known)
        alone = [site for site in self._sites if (f"lora_A.{site}" in tree) != (f"lora_B.{site}" in tree)]
        if strange or alone:
            raise ValueError(
                f"apply: the tree has {strange[:3]} that no layer has and {alone[:3]} with one factor of two"
                f"; needs A and B of the same layers, names as in {self.blocks['lora_A'][0]}"
            )
        pairs = {
            where: Pair(tree[f"lora_A.{site}"], tree[f"lora_B.{site}"])
            for site, where in self._sites.items()
            if f"lora_A.{site}" in tree
        }
        return Adapters(pairs, self.lora_alpha / self.rank, self.dropout, generator) if pairs else None

    def apply(
        self,
        tree: Tree,
        batch: Batch,
        *,
        bank: Bank | None = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """See `Model.apply`: logits (b, T, V) float32, logits[:, t] predicts token t + 1.

        batch: input_ids, attention_mask (b, T). With `use_cache` true, keys and values come back as
        `Outputs.past`; with `past`, input_ids are the tokens after it and attention_mask covers all of them.
        Raises ValueError for a bank or a tree that does not fit."""
        if bank is not None:
            raise ValueError("apply: got a bank of experts, this model has its own; pass bank=None")
        extra = {"past_key_values": batch["past"]} if batch.get("past") is not None else {}
        keep = bool(batch.get("use_cache", False))
        with adapted(self._adapters(tree, generator)):
            out = self.backbone(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=keep, **extra
            )
        return Outputs(out.logits.float(), past=out.past_key_values if keep else None)

    def routing(self, tree: Tree, batch: Batch) -> Tensor:
        """See `LanguageModel.routing`."""
        b, length = batch["input_ids"].shape
        with torch.no_grad(), _watched(self.gates) as seen:
            self.apply(tree, {name: batch[name] for name in ("input_ids", "attention_mask")})
        return torch.stack([logits.float().softmax(-1).view(b, length, -1) for logits in seen])

    def logit_spread(self, batch: Batch) -> float:
        """Mean over tokens of the largest minus the smallest logit of the frozen model."""
        with torch.no_grad():
            logits = self.apply({}, batch).logits[batch["attention_mask"].bool()]
        self._spread = float((logits.amax(1) - logits.amin(1)).mean())
        return self._spread

    def describe(self) -> dict[str, Any]:
        """See `Model.describe`."""
        sizes = {
            block: sum(
                self._weight(name.partition(".")[2]).shape[0]
                * self.rank
                * self._weight(name.partition(".")[2]).shape[2 if block == "lora_A" else 1]
                for name in self.blocks[block]
            )
            for block in ("lora_A", "lora_B")
        }
        return {
            "kind": "moe_lm", "backbone": self.name, "weights_sha256": self._hash,
            "precision": self.precision, "blocks": sizes, "projections": [], "n_classes": self.vocabulary,
            "n_layers": self.n_layers, "n_experts": self.n_experts, "rank": self.rank,
            "lora_alpha": self.lora_alpha, "dropout": self.dropout, "logit_spread": self._spread,
        }  # fmt: skip


@contextlib.contextmanager
def _watched(gates: list[nn.Module]) -> Iterator[list[Tensor]]:
    """The routers' logits (tokens, K) of a forward pass inside the block, in the order of the layers."""
    seen: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _, __, out: seen.append(out[0].detach())) for gate in gates]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def adapted_values(config: Any, rank: int) -> dict[str, int]:
    """Numbers of trainable values of a model with this configuration, computed without allocating it.

    config: of a Qwen2-MoE, OLMoE or Mixtral style model.   rank: r >= 1.   Returns "lora_B" (d where B alone
    is trained), "lora_A", "experts" (K per layer) and "layers"."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = routed_layers(model)
    weights = [getattr(experts, f"{kind}_proj") for experts, _ in layers for kind in KINDS]
    return {
        "lora_B": sum(w.shape[0] * w.shape[1] * rank for w in weights),
        "lora_A": sum(w.shape[0] * w.shape[2] * rank for w in weights),
        "experts": weights[0].shape[0],
        "layers": len(layers),
    }


def load_moe(
    backbone: str,
    *,
    rank: int = 8,
    lora_alpha: float = 16.0,
    dropout: float = 0.05,
    a_init_std: float | None = None,
    max_length: int | None = None,
    precision: str = "auto",
) -> MoeLanguageModel:
    """Load a mixture-of-experts language model and its tokenizer; the other arguments as `MoeLanguageModel`.

    backbone: a local folder saved by save_pretrained, or a hub name such as "Qwen/Qwen1.5-MoE-A2.7B". Only
    safetensors weights are read. Raises ValueError or FileNotFoundError, one line, if it can't be used."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(backbone).expanduser()
    if not folder.exists() and (backbone.startswith((".", "/", "~")) or backbone.count("/") > 1):
        raise FileNotFoundError(
            f"backbone: no folder '{backbone}'; give a folder saved by save_pretrained or a hub name"
        )
    source = str(folder) if folder.exists() else backbone
    dtype = torch.bfloat16 if resolve_precision(precision) == "bf16" else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as fault:
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise ValueError(
            f"backbone: could not load '{backbone}' ({reason[:160]}); it needs config.json, safetensors "
            "weights and a tokenizer in a local folder or on the hub"
        ) from None
    return MoeLanguageModel(
        model, tokenizer=tokenizer, name=backbone, rank=rank, lora_alpha=lora_alpha, dropout=dropout,
        a_init_std=a_init_std, max_length=max_length, precision=precision,
    )  # fmt: skip
