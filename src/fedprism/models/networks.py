"""Networks as functions of named tensors, and the classifier with a routing encoder built on two of them.

A `Trunk` is a layout (name -> shape and fresh values) and a forward pass that reads a tree with these names;
it holds no tensor. An encoder is a trunk followed by linear - layer norm - ReLU to its width (FedSPM spec 6):
the layer norm bounds the length of the features, and with it the logits of heads and density ratios.

precision "bf16" runs trunks under `torch.autocast`; the last map of an encoder, heads and logits stay in
float32. Group and layer norms see one example at a time, so training and evaluation compute the same, and no
pass has a side effect: `torch.func.vmap` over stacked trees works.

Deviations: none. Where the paper is silent, norms start at scale 1 and shift 0, linear maps at torch's
default (entries uniform in +-1 / sqrt(fan in)), convolutions as `vision` says.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.encoder import resolve_precision
from fedprism.models.interface import Batch, FeatureModel, Tree

ENCODERS = ("encoder", "router_encoder")


@dataclass(frozen=True)
class Fresh:
    """Shape of a tensor and the distribution of its fresh values: normal with standard deviation `scale`,
    uniform in +-`scale`, or all equal to `scale`."""

    shape: tuple[int, ...]
    kind: Literal["normal", "uniform", "constant"]
    scale: float

    def draw(self, generator: torch.Generator) -> Tensor:
        """A float32 tensor of this distribution; "constant" draws nothing."""
        value = torch.full(self.shape, self.scale)
        if self.kind == "normal":
            return value.normal_(0, self.scale, generator=generator)
        if self.kind == "uniform":
            return value.uniform_(-self.scale, self.scale, generator=generator)
        return value


Layout = dict[str, Fresh]  # name -> fresh values, in the order in which they are drawn


def linear(name: str, n_in: int, n_out: int) -> Layout:
    """Layout of a linear map with bias: `<name>.weight` (n_out, n_in) and `<name>.bias` (n_out,)."""
    bound = 1 / math.sqrt(n_in)
    return {
        f"{name}.weight": Fresh((n_out, n_in), "uniform", bound),
        f"{name}.bias": Fresh((n_out,), "uniform", bound),
    }


def norm(name: str, n: int, scale: float = 1.0) -> Layout:
    """Layout of a group or layer norm over n channels; scale: where its multiplier starts."""
    return {
        f"{name}.weight": Fresh((n,), "constant", scale),
        f"{name}.bias": Fresh((n,), "constant", 0.0),
    }


def dense(name: str, n_in: int, n_out: int) -> Layout:
    """Layout of linear - layer norm - ReLU, see `apply_dense`."""
    return {**linear(f"{name}.linear", n_in, n_out), **norm(f"{name}.norm", n_out)}


def apply_dense(p: Tree, name: str, x: Tensor) -> Tensor:
    """(b, n_in) -> (b, n_out): linear - layer norm - ReLU with the tensors `<name>...` of p."""
    x = F.linear(x, p[f"{name}.linear.weight"], p[f"{name}.linear.bias"])
    return F.relu(F.layer_norm(x, x.shape[-1:], p[f"{name}.norm.weight"], p[f"{name}.norm.bias"]))


class Trunk(abc.ABC):
    """All of an encoder but its last map: x (b, *input_shape) -> (b, width).

    layout: the tensors it reads.   name: for the run record.   input_shape: of one example."""

    name: str
    input_shape: tuple[int, ...]
    width: int
    layout: Layout

    @abc.abstractmethod
    def __call__(self, p: Tree, x: Tensor) -> Tensor:
        """(b, width) from x (b, *input_shape); p: tensors by the names of `layout`. Changes nothing."""


class NetworkModel(FeatureModel):
    """A classifier on one trunk and a routing encoder on another, all of it trained.

    kind: for the run record.   trunk, router_trunk: for "encoder" and "router_encoder"; their inputs have one
    shape.   n_classes: K >= 2.   width: d_g >= 1.   router_width: d_h >= 1.   precision: of the trunks,
    "fp32", "bf16" or "auto" (bf16 where this processor has it).   facts: further entries of the run record.
    Raises ValueError for values outside these.

    Weight decay applies to weights of linear maps and convolutions, not to norms and biases (spec 6)."""

    def __init__(
        self,
        kind: str,
        trunk: Trunk,
        router_trunk: Trunk,
        *,
        n_classes: int,
        width: int,
        router_width: int,
        precision: str = "fp32",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        for what, value, least in (
            ("n_classes", n_classes, 2),
            ("width", width, 1),
            ("router_width", router_width, 1),
        ):
            if value < least:
                raise ValueError(f"{what}: got {value}, needs at least {least}")
        if trunk.input_shape != router_trunk.input_shape:
            raise ValueError(
                f"router_trunk: reads inputs of shape {router_trunk.input_shape}, needs "
                f"{trunk.input_shape}, as the trunk does"
            )
        self.kind, self.n_classes, self.width, self.router_width = kind, n_classes, width, router_width
        self.input_shape, self.precision = trunk.input_shape, resolve_precision(precision)
        self.trunks = dict(zip(ENCODERS, (trunk, router_trunk), strict=True))
        widths = dict(zip(ENCODERS, (width, router_width), strict=True))
        self._layouts: dict[str, Layout] = {
            block: {
                f"{block}.{name}": fresh
                for name, fresh in {**t.layout, **dense("projection", t.width, widths[block])}.items()
            }
            for block, t in self.trunks.items()
        }
        self._layouts["head"] = linear("head", width, n_classes)
        self.blocks = {
            **dict.fromkeys(("lora_A", "lora_B", "router"), ()),
            **{block: tuple(layout) for block, layout in self._layouts.items()},
        }
        self.decayed = frozenset(
            name
            for layout in self._layouts.values()
            for name, fresh in layout.items()
            if len(fresh.shape) > 1
        )
        self._facts = dict(facts or {})
        self._hash: str | None = None
        self._spread: float | None = None

    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """See `FeatureModel.init`."""
        if block not in self.blocks:
            raise KeyError(f"init: no block '{block}' among {sorted(self.blocks)}")
        digest = hashlib.sha256(f"{block} {seed}".encode()).digest()  # blocks of one seed are independent
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return {name: fresh.draw(generator) for name, fresh in self._layouts.get(block, {}).items()}

    def encode(self, tree: Tree, batch: Batch, block: str = "encoder") -> Tensor:
        """See `FeatureModel.encode`. batch: x (b, *input_shape)."""
        if block not in self.trunks:
            raise KeyError(f"encode: no encoder '{block}' among {list(ENCODERS)}")
        missing = [name for name in self.blocks[block] if name not in tree]
        if missing:
            raise ValueError(
                f"encode: the tree lacks {len(missing)} tensors ({missing[0]}, ...); nothing of this model "
                f"is frozen, add init('{block}', seed)"
            )
        x = batch["x"]
        if tuple(x.shape[1:]) != self.input_shape:
            shape = ", ".join(map(str, self.input_shape))
            raise ValueError(
                f"encode: got x of shape {tuple(x.shape)}, needs (b, {shape}); build the model for these "
                "inputs"
            )
        p = {name.removeprefix(f"{block}."): tree[name] for name in self.blocks[block]}
        low = self.precision == "bf16"
        with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
            hidden = self.trunks[block](p, x)
        return apply_dense(p, "projection", hidden.float() if low else hidden)

    def logit_spread(self, batch: Batch) -> float:
        """Mean over examples of the largest minus the smallest logit of the model as `trainable(0)` starts
        it; `describe` reports the last value."""
        with torch.no_grad():
            logits = self.apply(self.trainable(0), batch).logits
        self._spread = float((logits.amax(1) - logits.amin(1)).mean())
        return self._spread

    def describe(self) -> dict[str, Any]:
        """See `Model.describe`. Sizes are numbers of entries; weights_sha256 is of all blocks as seed 0
        starts them: nothing here is pretrained, and it changes where layout or initialisation do."""
        if self._hash is None:
            digest = hashlib.sha256()
            for block in self._layouts:
                for name, value in self.init(block, 0).items():
                    digest.update(f"{name} {tuple(value.shape)};".encode())
                    digest.update(value.numpy().tobytes())
            self._hash = digest.hexdigest()
        return {
            "kind": self.kind,
            "backbone": self.trunks["encoder"].name,
            "router_backbone": self.trunks["router_encoder"].name,
            "weights_sha256": self._hash,
            "precision": self.precision,
            "blocks": {
                block: sum(math.prod(fresh.shape) for fresh in layout.values())
                for block, layout in self._layouts.items()
            },
            "projections": [],
            "n_classes": self.n_classes,
            "width": self.width,
            "router_width": self.router_width,
            "input_shape": list(self.input_shape),
            "logit_spread": self._spread,
            **self._facts,
        }
