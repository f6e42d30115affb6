"""Components of clients on an encoder model: class probabilities, density ratios, the two losses of FedSPM.

b examples, n rows, m clients, C components, K classes; d_g and d_h features of the encoders "encoder" (theta)
and "router_encoder" (nu). Heads of a client are one tree with names `c:head...`. An encoder shared by all
components is a tree as the model names it; with one per component the names are `c:...`.
Sources: FedSPM Sec. 2 and App. B, spec 1.2 to 2.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedprism.methods.density_ratio import (
    drm_loss,
    match_centroids,
    mix_predictions,
    tilt,
)
from fedprism.models.interface import Batch, FeatureModel
from fedprism.protocol import derive_seed
from fedprism.trees import Tree, join, mean, split


@dataclass(frozen=True)
class Components:
    """model: with encoder, head and routing encoder.   n: C.   separate: one pair of encoders each (Cx)."""

    model: FeatureModel
    n: int
    separate: bool = False

    def encoders(self, block: str, seed: int) -> Tree:
        """Fresh tensors of one encoder, or of C different ones, from `seed` alone."""
        if not self.separate:
            return self.model.init(block, seed)
        return join(
            {str(c): self.model.init(block, derive_seed(seed, "component", c)) for c in range(self.n)}
        )

    def heads(self, seed: int) -> Tree:
        """C fresh heads, independent of one another, from `seed` alone."""
        return join({str(c): self.model.init("head", derive_seed(seed, c)) for c in range(self.n)})

    def features(self, tree: Tree, batch: Batch, block: str) -> Tensor:
        """(b, d) of the shared encoder, or (b, C, d) of one per component."""
        if not self.separate:
            return self.model.encode(tree, batch, block)
        return torch.stack([self.model.encode(part, batch, block) for part in self._parts(tree)], 1)

    def class_log_probs(self, theta: Tree, head: Tree, batch: Batch) -> Tensor:
        """log P_c(k | x) in nats, (b, C, K), Eq. (2)."""
        g = self.features(theta, batch, "encoder")
        parts = enumerate(self._parts(head))
        logits = [self.model.classify(part, g if g.ndim == 2 else g[:, c]) for c, part in parts]
        return torch.stack(logits, 1).log_softmax(2)

    def log_ratios(self, got: Mapping[str, Any], batch: Batch) -> Tensor:
        """gamma_ic + xi_ic . h_c(x), (b, m, C), Eq. (3). got: gamma (m, C), xi (m, C, d_h), the tree nu."""
        return tilt(got["gamma"], got["xi"], self.features(got["nu"], batch, "router_encoder"))

    def look(
        self, got: Mapping[str, Any], head: Tree, rows: Any, size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Log ratios (b, m, C) and log-probabilities of the labels (b, C) of `size` rows after another, in
        order, without gradients. got: theta besides what `log_ratios` takes."""
        for batch in rows.batches(size):
            with torch.inference_mode():
                log_p = self.class_log_probs(got["theta"], head, batch)
                seen = self.log_ratios(got, batch), of_label(log_p, batch["label"])
            yield seen

    def supervised_loss(self, tree: Tree, batch: Batch, w: Tensor) -> Tensor:
        """-Q1_i / n_i over a batch: cross-entropy weighted by w (b, C), whose rows sum to 1. tree: parts
        "theta" and "head"."""
        part = split(tree, ("theta", "head"))
        log_p = of_label(self.class_log_probs(part["theta"], part["head"], batch), batch["label"])
        return -(w * log_p).sum(1).mean()

    def density_ratio_loss(self, tree: Tree, batch: Batch, i: int, w: Tensor, totals: Tensor) -> Tensor:
        """-Q2~_i / n_i over a batch of client i (Sec. 2.3). tree: parts "table" (gamma, xi) and "nu".
        w: (b, C). totals: tau as `floored_totals` gives it, (m, C)."""
        part = split(tree, ("table", "nu"))
        tilts = self.log_ratios({**part["table"], "nu": part["nu"]}, batch)
        return drm_loss(tilts, i, w, totals, check=False).mean()

    def mixed(self, q: Tensor | None, theta: Tree, head: Tree, batch: Batch) -> Tensor:
        """log sum_c q_c(x) P_c(k | x), (b, K). q: (b, C), rows sum to 1, or None for C = 1."""
        log_p = self.class_log_probs(theta, head, batch)
        return log_p[:, 0] if q is None else mix_predictions(q, log_p)

    def _parts(self, tree: Tree) -> list[Tree]:
        return list(split(tree, [str(c) for c in range(self.n)]).values())


def of_label(log_probs: Tensor, label: Tensor) -> Tensor:
    """(b, C) of (b, C, K): the entries of each example's label. label: (b,) classes."""
    return log_probs.gather(2, label[:, None, None].expand(-1, log_probs.shape[1], 1)).squeeze(2)


def purity(w: Tensor, component: Tensor | None) -> tuple[float, float]:
    """Share of rows explained by the majority true component of their most probable component, and the share
    of the largest true component (spec 5). w: (n, C). component: (n,); -1 and -1 where nobody knows it."""
    if component is None or int(component.min()) < 0:
        return -1.0, -1.0
    table = torch.zeros(w.shape[1], int(component.max()) + 1, dtype=torch.int64)
    table.index_put_((w.argmax(1), component), torch.tensor(1), accumulate=True)
    return int(table.amax(1).sum()) / len(w), int(table.sum(0).max()) / len(w)


def agreed_centroids(centroids: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Centroids by which all clients can number their components, (C, p): each client's (C, p) are matched to
    those of the largest client (the first of equals), then averaged by size."""
    largest = centroids[max(range(len(sizes)), key=lambda i: (sizes[i], -i))]
    return mean([{"c": own[match_centroids(own, largest)]} for own in centroids], sizes)["c"]
