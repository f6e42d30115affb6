"""Classifier with a routing encoder for rows of a table: two small multilayer perceptrons.

Each encoder is (linear - layer norm - ReLU) per hidden layer, then the same once more to its width. Layer
norm takes the place of batch norm for the reason that `vision` gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedprism.models.interface import Tree
from fedprism.models.networks import Layout, NetworkModel, Trunk, apply_dense, dense


class Perceptron(Trunk):
    """Hidden layers of linear - layer norm - ReLU.

    n_features: f, of one row, >= 1.   hidden: widths of the layers, at least one, each >= 1.
    Raises ValueError for values outside these."""

    def __init__(self, n_features: int, hidden: Sequence[int]) -> None:
        if n_features < 1:
            raise ValueError(f"n_features: got {n_features}, needs at least 1")
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden: got {list(hidden)}, needs at least one width, each at least 1")
        self.name = "mlp-" + "-".join(map(str, hidden))
        self.input_shape, self.width = (n_features,), hidden[-1]
        self._names = tuple(f"dense{k}" for k in range(len(hidden)))
        self.layout: Layout = {}
        for name, n_in, n_out in zip(self._names, (n_features, *hidden[:-1]), hidden, strict=True):
            self.layout |= dense(name, n_in, n_out)

    def __call__(self, p: Tree, x: Tensor) -> Tensor:
        """(b, last hidden width) from x (b, n_features)."""
        for name in self._names:
            x = apply_dense(p, name, x)
        return x


def load_mlp(
    n_features: int,
    *,
    n_classes: int = 2,
    width: int = 32,
    router_width: int = 32,
    hidden: Sequence[int] = (64, 64),
    precision: str = "fp32",
) -> NetworkModel:
    """A classifier of table rows with a routing encoder; nothing is drawn until `init`.

    n_features: f >= 1; batches hold x (b, f), standardised.   n_classes: K >= 2.   width: d_g >= 1.
    router_width: d_h >= 1.   hidden: widths of the hidden layers of both encoders.   precision: "fp32",
    "bf16" or "auto".   Raises ValueError for values outside these."""
    return NetworkModel(
        "mlp",
        Perceptron(n_features, hidden),
        Perceptron(n_features, hidden),
        n_classes=n_classes,
        width=width,
        router_width=router_width,
        precision=precision,
        facts={"hidden": list(hidden)},
    )
