"""Dual heterogeneity of images as tensor expressions (FedSPM spec 6, items 4 to 6 and 8).

Images are float32, (n, 3, height, width), in [0, 1]. Scaling is exact on whole-number levels, the other
steps are single products, sums and roundings: the bits do not depend on the machine or on threads.

*Choices where the source is silent.* To 32x32 by bilinear interpolation, not by zero padding: padding would
draw a black frame around the white background of an inverted image, a mark of the component that the images
do not have; interpolation commutes with the inversion. Scaling comes first, so ramps run over the final
image. Bit 0 of a client's index is its lowest: 0 red- and 1 blue-dominant; bit 1: 0 top and 1 bottom
brightened; bit 2: 0 left and 1 right. Both ramps are added, each with the full strength.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

BITS = 3
MOST_CLIENTS = 2**BITS  # each has a shift of its own
TINT = 0.35
RAMP = 0.25
SIDE = 32  # the side that smaller images are enlarged to
STORED = {"uint8": torch.uint8, "float16": torch.float16}


def planes(images: NDArray[np.uint8]) -> Tensor:
    """(n, channels, height, width) uint8, with 1 or 3 channels, from uint8 images, (n, height, width) grey or
    (n, height, width, 3). Raises ValueError for another shape."""
    x = torch.from_numpy(np.ascontiguousarray(images))
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] == 3:
        return x.permute(0, 3, 1, 2)
    raise ValueError(
        f"shifts: got images of shape {tuple(x.shape)}, needs (n, height, width) or (n, height, width, 3)"
    )


def resize(levels: Tensor, size: int) -> Tensor:
    """The images with sides of `size` pixels, (n, 3, size, size) float32 in [0, 1].

    Means over blocks where size divides the side (28 to 14, 32 to 16); else bilinear to 32x32 first (28 to
    32, 28 to 16). Grey images get three equal channels. levels: (n, 1 or 3, side, side) uint8; sums of such
    numbers are exact. Raises ValueError for images that are not square, or a size that divides neither their
    side nor 32."""
    height, width = levels.shape[2:]
    if height != width:
        raise ValueError(f"shifts: got images of {height}x{width} pixels, needs square ones; crop them")
    if size < 1 or (height % size and SIDE % size):
        raise ValueError(
            f"shifts: size is {size}, must divide {height} (the images' side) or {SIDE}; correct "
            "data.image_size"
        )
    x = levels.float()
    if height % size:
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False, antialias=False)
    if x.shape[2] > size:
        x = F.avg_pool2d(x, x.shape[2] // size)
    return (x / 255).expand(-1, 3, -1, -1)


def component_shift(x: Tensor, component: Tensor, *, grey: bool) -> Tensor:
    """The component shift (spec 6, item 4): component 0 stays, component 1 is inverted; its own inverse.

    x: (n, 3, h, w) in [0, 1]. component: (n,) int64 in 0..1. grey: invert all channels (1 - x), which suits
    grey images; else the green channel only."""
    if len(component) and (int(component.min()) < 0 or int(component.max()) > 1):
        raise ValueError(f"shifts: component is {int(component.max())}, must be 0 or 1")
    channels = torch.tensor([True, True, True] if grey else [False, True, False])
    inverted = (component == 1)[:, None] & channels  # (n, 3)
    return torch.where(inverted[:, :, None, None], 1 - x, x)


def client_shift(x: Tensor, client: int, *, tint: float = TINT, ramp: float = RAMP) -> Tensor:
    """The shift of one client's images by the bits of its index (spec 6, item 5), clipped to [0, 1].

    Channel gains (1, 1 - tint/2, 1 - tint), or reversed; then ramp times a line from +1 to -1 along either
    axis. x: (n, 3, h, w) in [0, 1]. client: 0..7. tint: [0, 1]. ramp: >= 0. With tint = ramp = 0 nothing
    changes, for any client. Raises ValueError for values out of range."""
    check_strengths(tint, ramp)
    if tint == 0 and ramp == 0:
        return x
    if not 0 <= client < MOST_CLIENTS:
        raise ValueError(
            f"shifts: client {client} has no shift of its own, needs 0..{MOST_CLIENTS - 1}; lower "
            f"data.clients to {MOST_CLIENTS}, or set data.tint and data.ramp to 0"
        )
    blue, bottom, right = ((client >> bit) & 1 for bit in range(BITS))
    gains = torch.tensor([1, 1 - tint / 2, 1 - tint])
    down, across = ((1 - 2 * torch.arange(side) / max(side - 1, 1)) * ramp for side in x.shape[2:])
    vertical = (down.flip(0) if bottom else down)[:, None]
    horizontal = across.flip(0) if right else across
    tinted = x * (gains.flip(0) if blue else gains)[:, None, None]
    return (tinted + (vertical + horizontal)).clamp(0, 1)


def check_strengths(tint: float, ramp: float) -> None:
    """Raises ValueError unless tint is in [0, 1] and ramp >= 0 and finite."""
    if not 0 <= tint <= 1:
        raise ValueError(f"shifts: tint is {tint}, must be >= 0 and <= 1; correct data.tint")
    if not 0 <= ramp < float("inf"):
        raise ValueError(f"shifts: ramp is {ramp}, must be >= 0 and finite; correct data.ramp")


def label_permutations(n_clients: int, n_components: int, n_classes: int, rng: np.random.Generator) -> Tensor:
    """(m, C, K) int64 independent uniform permutations of the labels (spec 6, item 6): label k of a row of
    client i and component c becomes entry (i, c, k)."""
    drawn = [rng.permutation(n_classes) for _ in range(n_clients * n_components)]
    return torch.from_numpy(np.stack(drawn).astype(np.int64)).view(n_clients, n_components, n_classes)


def inverse_permutations(permutations: Tensor) -> Tensor:
    """(m, C, K) int64 permutations that undo the given ones."""
    return permutations.argsort(dim=2)


def permute_labels(label: Tensor, component: Tensor, permutations: Tensor) -> Tensor:
    """(n,) int64 labels of one client after its permutations. label: (n,) in 0..K-1. component: (n,) in
    0..C-1. permutations: (C, K)."""
    return permutations[component, label]


def store(x: Tensor, kind: str = "uint8") -> Tensor:
    """Images in [0, 1] as they are kept: "uint8" (rounded to 1/255) or "float16"."""
    if kind not in STORED:
        raise ValueError(f"shifts: got images to be stored as '{kind}', needs one of {', '.join(STORED)}")
    return (x * 255).round().to(torch.uint8) if kind == "uint8" else x.to(torch.float16)


def unit_range(stored: Tensor) -> Tensor:
    """float32 in [0, 1] from images as they are kept, uint8 or float16."""
    return stored.float() / 255 if stored.dtype == torch.uint8 else stored.float()


def normalise(x: Tensor) -> Tensor:
    """(x - 0.5) / 0.5 (spec 6, item 8): [0, 1] to [-1, 1]."""
    return (x - 0.5) / 0.5
