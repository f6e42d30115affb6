"""Low-rank pairs on the routed experts of a mixture-of-experts layer (FedTAR spec 2.1, 2.4).

transformers keeps all experts of a layer in two 3-D parameters and looks their forward pass up in a registry;
`experts_forward` is registered there. Tokens are sorted by expert and gathered once; every expert that got
tokens costs its own matrices and two thin ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "fedprism_low_rank"
KINDS = ("gate_up", "down")


@dataclass(frozen=True)
class Pair:
    """Low-rank factors of one matrix of every expert. down: A, (K, r, in).   up: B, (K, out, r)."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class Adapters:
    """What one forward pass adds to the frozen experts.

    pairs: (experts module, kind) -> its pair; what is missing stays frozen.   scale: s in W + s B A.
    dropout: rate on the input of the low-rank branch.   generator: of its masks; None switches it off."""

    pairs: Mapping[tuple[nn.Module, str], Pair]
    scale: float
    dropout: float = 0.0
    generator: torch.Generator | None = None


_CURRENT: ContextVar[Adapters | None] = ContextVar("adapters", default=None)


@contextmanager
def adapted(adapters: Adapters | None) -> Iterator[None]:
    """Experts see these adapters inside the block, and none after it, whatever happens in it."""
    token = _CURRENT.set(adapters)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def register() -> None:
    """Make `NAME` known to transformers as an implementation of experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _dropped(x: Tensor, now: Adapters) -> Tensor:
    """x with entries dropped and the others scaled up, as the generator says."""
    if now.generator is None or now.dropout == 0:
        return x
    keep = torch.rand(x.shape, generator=now.generator) >= now.dropout
    return x * keep.to(x.dtype) / (1 - now.dropout)


def _linear(
    x: Tensor, weight: Tensor, expert: int, pair: Pair | None, branch: Tensor, scale: float
) -> Tensor:
    """W_k x + s B_k (A_k branch) for the rows of one expert; branch: x after dropout."""
    y = F.linear(x, weight[expert])
    if pair is None:
        return y
    inner = F.linear(branch, pair.down[expert].to(x.dtype))
    return y + scale * F.linear(inner, pair.up[expert].to(x.dtype))


def experts_forward(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of every token's chosen experts, (tokens, hidden).

    module: an experts module of transformers with `gate_up_proj` (K, 2 inner, hidden), `down_proj`
    (K, hidden, inner) and `_apply_gate`.   hidden: (tokens, hidden).   top_k_index, top_k_weights:
    (tokens, k).
    Sums run over a token's slots in their order, so the result does not depend on other tokens."""
    now = _CURRENT.get()
    pairs = {kind: now.pairs.get((module, kind)) if now is not None else None for kind in KINDS}
    scale = now.scale if now is not None else 0.0
    n, k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    x = hidden[order // k]
    branch = x if now is None or pairs["gate_up"] is None else _dropped(x, now)
    parts, first = [], 0
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = slice(first, first + count)
        first += count
        both = _linear(x[rows], module.gate_up_proj, expert, pairs["gate_up"], branch[rows], scale)
        inner = module._apply_gate(both)
        through = inner if now is None or pairs["down"] is None else _dropped(inner, now)
        parts.append(_linear(inner, module.down_proj, expert, pairs["down"], through, scale))
    weighted = torch.cat(parts) * top_k_weights.reshape(-1)[order, None].to(x.dtype)
    return weighted[order.argsort()].view(n, k, -1).sum(1).to(hidden.dtype)


# --- PEFT's layout (`target_parameters`) --------------------------------------------------------------------


def to_peft(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's fused factors of one matrix of all experts: lora_A (K r, in), rows by expert, then rank; lora_B
    (out, K r), columns by rank, then expert.   down: (K, r, in).   up: (K, out, r)."""
    n_experts, rank, width = down.shape
    fused = up.permute(1, 2, 0).reshape(up.shape[1], rank * n_experts)
    return down.reshape(n_experts * rank, width).contiguous(), fused.contiguous()


def from_peft(lora_a: Tensor, lora_b: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Undo `to_peft`: (K, r, in) and (K, out, r). Raises ValueError if the factors do not fit n_experts."""
    rows, width = lora_a.shape
    if rows % n_experts or lora_b.shape[1] != rows:
        raise ValueError(
            f"peft: got lora_A {tuple(lora_a.shape)} and lora_B {tuple(lora_b.shape)} for {n_experts} "
            "experts, needs (K r, in) and (out, K r); export them with target_parameters of the experts"
        )
    rank = rows // n_experts
    up = lora_b.reshape(lora_b.shape[0], rank, n_experts).permute(2, 0, 1)
    return lora_a.reshape(n_experts, rank, width).contiguous(), up.contiguous()
