"""The Gaussian world as clients of the shipped method: a model whose encoders are the identity.

With g = h = identity FedSPM's density-ratio model of `profile_likelihood.gaussian_world` is exact, and all
that the method learns is the tables, the mixing weights and linear heads; `learnt_model` reads them off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprism.methods.density_ratio import mixing_weights
from fedprism.models.interface import Batch, FeatureModel, Tree
from fedprism.theory.mixture_geometry import Floats
from fedprism.theory.profile_likelihood import Model, Tables
from fedprism.trees import split


class IdentityModel(FeatureModel):
    """A linear head on the inputs themselves; both encoders are the identity and have no tensors.

    d: inputs, >= 1. n_classes: K >= 2."""

    def __init__(self, d: int, n_classes: int) -> None:
        self.width = self.router_width = d
        self.n_classes = n_classes
        names = ("encoder", "router_encoder", "lora_A", "lora_B", "router")
        self.blocks = {**dict.fromkeys(names, ()), "head": ("head.weight", "head.bias")}

    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        if block != "head":
            return {}
        draw = torch.Generator().manual_seed(seed % 2**63)
        bound = self.width**-0.5
        shapes = {"head.weight": (self.n_classes, self.width), "head.bias": (self.n_classes,)}
        return {
            name: torch.empty(shape).uniform_(-bound, bound, generator=draw) for name, shape in shapes.items()
        }

    def encode(self, tree: Tree, batch: Batch, block: str = "encoder") -> Tensor:
        if block not in ("encoder", "router_encoder"):
            raise KeyError(f"encode: no encoder '{block}', needs encoder or router_encoder")
        return batch["x"]

    def describe(self) -> dict[str, Any]:
        return {"kind": "identity", "width": self.width, "n_classes": self.n_classes}


@dataclass(frozen=True, eq=False)
class ShippedRun:
    """What the shipped method did. start, model: before the first and after the last round. monitor: (T,) J
    that each round begins with."""

    start: Model
    model: Model
    monitor: Floats


def learnt_model(gamma: Tensor, xi: Tensor, tau: Tensor, heads: Sequence[Mapping[str, Tensor]]) -> Model:
    """Tables gamma (m, C), xi (m, C, d), totals tau (m, C) and each client's head tree (names `c:head...`) in
    the shape of the laboratory's models, in float64."""

    def numbers(tensor: Tensor) -> Floats:
        out: Floats = tensor.detach().double().numpy()
        return out

    C = gamma.shape[1]
    parts = [list(split(dict(head), [str(c) for c in range(C)]).values()) for head in heads]
    bias, weight = (
        np.stack([[numbers(part[f"head.{name}"]) for part in mine] for mine in parts])
        for name in ("bias", "weight")
    )
    return Model(Tables(numbers(gamma), numbers(xi)), numbers(mixing_weights(tau)), bias, weight)


def largest_difference(a: Model, b: Model) -> float:
    """Largest absolute difference of tables, mixing weights and heads."""
    pairs = [
        (a.tables.gamma, b.tables.gamma), (a.tables.xi, b.tables.xi), (a.pi, b.pi),
        (a.intercepts, b.intercepts), (a.slopes, b.slopes),
    ]  # fmt: skip
    return max(float(np.abs(x - y).max()) for x, y in pairs)
