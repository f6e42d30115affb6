"""Image classifiers with a routing encoder: ResNet and LeNet forms with group norms (FedSPM spec 6).

    resnet18       3x3 stem, no max-pool, stages 64-128-256-512 of two basic blocks each, global average pool
    resnet_narrow  the same with stages 16-32-64 of one block each, for small processors
    lenet          conv5x5(32), conv5x5(64), each with norm - ReLU - max-pool 2; linear(512) - norm - ReLU
    lenet_small    the same with 8 and 16 channels and linear(128), for images of 14 or 16 pixels

each followed by linear - layer norm - ReLU to the encoder's width. Group norms have 16 groups, or as many as
give four channels each where a layer has fewer than 64 (8 of 32 channels, 16 of 64, as the spec has them).
Batch norm is wrong here: it would average running statistics of shifted clients, and the E-step would see
other features than the training step.

Choices where the paper is silent: convolutions of ResNets have no bias and start as in He et al. 2015
(normal, variance 2 / fan out); the last norm of each residual branch starts at scale 0, so every block starts
as ReLU of its shortcut. LeNet's convolutions have a bias and start at torch's default (uniform in
+-1 / sqrt(fan in)); they are unpadded, as in the original, on images of 28 pixels or more and keep the size
(padding 2) on smaller ones, whose second pooling would have nothing left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.interface import Tree
from fedprism.models.networks import Fresh, Layout, NetworkModel, Trunk, apply_dense, dense, norm

CHANNELS = 3
SMALLEST_IMAGE = 8  # pixels; two poolings or three strides of 2 leave at least one
UNPADDED_FROM = 28  # pixels


def groups(channels: int) -> int:
    """Groups of the group norm over `channels` (a multiple of 4, above 64 of 16): channels/4, at most 16."""
    return min(16, channels // 4)


def group_norm(p: Tree, name: str, x: Tensor) -> Tensor:
    """Group norm of x (b, c, h, w) with the tensors `<name>...` of p."""
    return F.group_norm(x, groups(x.shape[1]), p[f"{name}.weight"], p[f"{name}.bias"])


def _he_conv(name: str, n_in: int, n_out: int, side: int) -> Layout:
    return {f"{name}.weight": Fresh((n_out, n_in, side, side), "normal", math.sqrt(2 / (n_out * side**2)))}


def _conv_with_bias(name: str, n_in: int, n_out: int, side: int) -> Layout:
    bound = 1 / math.sqrt(n_in * side**2)
    return {
        f"{name}.weight": Fresh((n_out, n_in, side, side), "uniform", bound),
        f"{name}.bias": Fresh((n_out,), "uniform", bound),
    }


def _laid_out(x: Tensor, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


@dataclass(frozen=True)
class _Unit:
    """A basic block: two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where `mapped`."""

    name: str
    n_in: int
    n_out: int
    stride: int

    @property
    def mapped(self) -> bool:
        return self.stride > 1 or self.n_in != self.n_out

    def layout(self) -> Layout:
        main = {
            **_he_conv(f"{self.name}.conv1", self.n_in, self.n_out, 3),
            **norm(f"{self.name}.norm1", self.n_out),
            **_he_conv(f"{self.name}.conv2", self.n_out, self.n_out, 3),
            **norm(f"{self.name}.norm2", self.n_out, scale=0.0),
        }
        if not self.mapped:
            return main
        shortcut = f"{self.name}.shortcut"
        return {
            **main,
            **_he_conv(shortcut, self.n_in, self.n_out, 1),
            **norm(f"{shortcut}_norm", self.n_out),
        }

    def __call__(self, p: Tree, x: Tensor) -> Tensor:
        branch = F.conv2d(x, p[f"{self.name}.conv1.weight"], stride=self.stride, padding=1)
        branch = F.relu(group_norm(p, f"{self.name}.norm1", branch))
        branch = F.conv2d(branch, p[f"{self.name}.conv2.weight"], padding=1)
        branch = group_norm(p, f"{self.name}.norm2", branch)
        if self.mapped:
            x = F.conv2d(x, p[f"{self.name}.shortcut.weight"], stride=self.stride)
            x = group_norm(p, f"{self.name}.shortcut_norm", x)
        return F.relu(branch + x)


class ResNet(Trunk):
    """ResNet of basic blocks for small images (He et al. 2016, the form for 32x32).

    name: for the run record.   image_size: side in pixels.   stages: channels of each stage, see `groups`;
    every stage but the first halves the image.   blocks: basic blocks per stage, >= 1.
    channels_last: memory layout of the activations; the numbers agree up to rounding."""

    def __init__(
        self, name: str, image_size: int, stages: tuple[int, ...], blocks: int, channels_last: bool = False
    ) -> None:
        self.name, self.input_shape = name, (CHANNELS, image_size, image_size)
        self.width, self.channels_last = stages[-1], channels_last
        units = []
        n_in = stages[0]
        for s, channels in enumerate(stages):
            for b in range(blocks):
                units.append(_Unit(f"stage{s}.{b}", n_in, channels, 2 if s and not b else 1))
                n_in = channels
        self._units = tuple(units)
        self.layout = {**_he_conv("stem", CHANNELS, stages[0], 3), **norm("stem_norm", stages[0])}
        for unit in units:
            self.layout |= unit.layout()

    def __call__(self, p: Tree, x: Tensor) -> Tensor:
        """(b, channels of the last stage) from x (b, 3, s, s): means over the last feature map."""
        x = F.conv2d(_laid_out(x, self.channels_last), p["stem.weight"], padding=1)
        x = F.relu(group_norm(p, "stem_norm", x))
        for unit in self._units:
            x = unit(p, x)
        return x.mean((2, 3))


class LeNet(Trunk):
    """LeNet form: two 5x5 convolutions, each normalised and max-pooled, and one dense layer.

    name: for the run record.   image_size: side in pixels.   channels: of the convolutions, see `groups`.
    hidden: width of the dense layer.   channels_last: as in `ResNet`."""

    def __init__(
        self, name: str, image_size: int, channels: tuple[int, int], hidden: int, channels_last: bool = False
    ) -> None:
        self.name, self.input_shape = name, (CHANNELS, image_size, image_size)
        self.width, self.channels_last = hidden, channels_last
        self._padding = 0 if image_size >= UNPADDED_FROM else 2
        side = image_size
        for _ in channels:
            side = (side + 2 * self._padding - 4) // 2
        first, second = channels
        self.layout = {
            **_conv_with_bias("conv1", CHANNELS, first, 5),
            **norm("norm1", first),
            **_conv_with_bias("conv2", first, second, 5),
            **norm("norm2", second),
            **dense("dense", second * side**2, hidden),
        }

    def __call__(self, p: Tree, x: Tensor) -> Tensor:
        """(b, hidden) from x (b, 3, s, s)."""
        x = _laid_out(x, self.channels_last)
        for k in (1, 2):
            x = F.conv2d(x, p[f"conv{k}.weight"], p[f"conv{k}.bias"], padding=self._padding)
            x = F.max_pool2d(F.relu(group_norm(p, f"norm{k}", x)), 2)
        return apply_dense(p, "dense", x.flatten(1))


BACKBONES = ("resnet18", "resnet_narrow", "lenet", "lenet_small")


def build_trunk(backbone: str, image_size: int, channels_last: bool = False) -> Trunk:
    """The trunk of a name in `BACKBONES`. image_size: side in pixels, at least 8.
    Raises ValueError for another name or a smaller size."""
    if image_size < SMALLEST_IMAGE:
        raise ValueError(f"image_size: got {image_size}, needs at least {SMALLEST_IMAGE} pixels")
    if backbone == "resnet18":
        return ResNet(backbone, image_size, (64, 128, 256, 512), 2, channels_last)
    if backbone == "resnet_narrow":
        return ResNet(backbone, image_size, (16, 32, 64), 1, channels_last)
    if backbone == "lenet":
        return LeNet(backbone, image_size, (32, 64), 512, channels_last)
    if backbone == "lenet_small":
        return LeNet(backbone, image_size, (8, 16), 128, channels_last)
    raise ValueError(f"backbone: got '{backbone}', needs one of {', '.join(BACKBONES)}")


def load_vision(
    backbone: str = "resnet18",
    router_backbone: str = "lenet",
    *,
    n_classes: int = 10,
    width: int = 32,
    router_width: int = 32,
    image_size: int = 32,
    precision: str = "fp32",
    channels_last: bool = False,
) -> NetworkModel:
    """An image classifier with a routing encoder; nothing is loaded or drawn until `init`.

    backbone, router_backbone: names in `BACKBONES`.   n_classes: K >= 2.   width: d_g >= 1.
    router_width: d_h >= 1.   image_size: side of the images in pixels, at least 8; batches hold x
    (b, 3, image_size, image_size) in about [-1, 1].   precision: "fp32", "bf16" or "auto" (bf16 where this
    processor has it; name it on a graphics card).   channels_last: memory layout of the activations.
    Raises ValueError for values outside these."""
    return NetworkModel(
        "vision",
        build_trunk(backbone, image_size, channels_last),
        build_trunk(router_backbone, image_size, channels_last),
        n_classes=n_classes,
        width=width,
        router_width=router_width,
        precision=precision,
        facts={"image_size": image_size, "channels_last": channels_last},
    )
