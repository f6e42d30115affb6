"""Tiny encoders with random weights, a batch for them, and random blocks: no downloads, milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from fedprism.models.encoder import EncoderModel
from fedprism.models.interface import Bank, Tree

VOCABULARY, WIDTH, LAYERS = 60, 16, 2


def backbone(family: str = "bert", seed: int = 0) -> Any:
    """An encoder of the family with two layers, width 16 and weights large enough to matter."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 40, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(seed)
    if family == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes))
    if family == "roberta":
        return transformers.RobertaModel(transformers.RobertaConfig(**sizes, pad_token_id=1))
    if family == "electra":
        return transformers.ElectraModel(transformers.ElectraConfig(**sizes, embedding_size=8))
    if family == "mpnet":
        return transformers.MPNetModel(transformers.MPNetConfig(**sizes, pad_token_id=1))
    if family == "deberta":
        return transformers.DebertaV2Model(
            transformers.DebertaV2Config(
                **sizes, relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=True
            )
        )
    if family == "distilbert":
        return transformers.DistilBertModel(
            transformers.DistilBertConfig(
                vocab_size=VOCABULARY,
                dim=WIDTH,
                n_layers=LAYERS,
                n_heads=2,
                hidden_dim=24,
                max_position_embeddings=40,
                initializer_range=0.3,
            )
        )
    raise KeyError(family)


def model(family: str = "bert", **settings: Any) -> EncoderModel:
    """An `EncoderModel` on a tiny backbone; dropout .5 unless given, so that a mask shows."""
    return EncoderModel(backbone(family), **{"rank": 3, "dropout": 0.5, "seed": 1, **settings})


def batch(b: int = 5, length: int = 7, seed: int = 0, pad: int = 0) -> dict[str, Tensor]:
    """Random tokens with lengths from 2 to `length`, the first row full."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (b,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(5, VOCABULARY, (b, length), generator=generator)
    return {
        "input_ids": torch.where(mask.bool(), ids, pad),
        "attention_mask": mask,
        "label": torch.randint(0, 2, (b,), generator=generator),
    }


def filled(tree: Tree, seed: int, std: float = 0.3) -> Tree:
    """Normal values with the names and shapes of `tree`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) * std for name, value in tree.items()}


def pair(m: EncoderModel, seed: int = 10) -> Tree:
    """A random always-on pair."""
    return filled({**m.init("lora_A", 0), **m.init("lora_B", 0)}, seed)


def bank(m: EncoderModel, n_experts: int = 3, present: tuple[int, ...] | None = None) -> Bank:
    """Random experts and routers; only the experts in `present` are not masked."""
    held = range(n_experts) if present is None else present
    return Bank(
        down=filled(m.init("lora_A", 0), 20),
        experts={k: filled(m.init("lora_B", 0), 30 + k) for k in held},
        router=filled(m.init("router", 0, n_experts), 40),
    )
