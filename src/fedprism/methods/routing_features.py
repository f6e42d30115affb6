"""What a mixture-of-experts router does on a client's data, as one vector (FedTAR, spec 4).

For every valid token g = softmax(router logits) over all K routed experts of a layer. Kept are sums over
tokens of g, of g g^T and of the entropy -sum_k g_k ln g_k, per layer, in float64; `vector` divides once.

The co-activation matrix is symmetric, so its upper triangle stands for it, off-diagonal entries times sqrt 2:
inner products of vectors are those of the full matrices, at half the length.

Deviations: where the paper is silent, features pool the layers, keep them all, or take one of them.
"balanced" divides the mean and the co-activation block by their norms and the entropy by ln K, with weight
0.3, because the literal vector is almost only entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ENTROPY_WEIGHT = 0.3  # of the entropy's block against the others in "balanced"

Parts = Literal["all", "mean", "coactivation"]
Scaling = Literal["literal", "balanced"]


@dataclass(eq=False)
class RoutingStats:
    """Sums over tokens, float64. g: (L, K). gg: (L, K, K). entropy: (L,) nats. tokens: (L,) counts."""

    g: Tensor
    gg: Tensor
    entropy: Tensor
    tokens: Tensor

    @staticmethod
    def empty(layers: int, experts: int) -> RoutingStats:
        """No tokens yet. layers, experts >= 1, experts per layer."""
        shapes = ((layers, experts), (layers, experts, experts), (layers,), (layers,))
        return RoutingStats(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def update(self, probabilities: Tensor, mask: Tensor | None = None) -> None:
        """Add the tokens of a batch. probabilities: (L, b, T, K), rows sum to 1. mask: (b, T), nonzero where
        the token is real; None: all are. Raises ValueError where shapes do not fit."""
        g = _real_tokens(probabilities, mask)
        if (g.shape[0], g.shape[2]) != tuple(self.g.shape):
            raise ValueError(
                f"routing: got {g.shape[0]} layers of {g.shape[2]} experts, needs {tuple(self.g.shape)}"
            )
        self.g += g.sum(1).cpu()
        self.gg += (g.mT @ g).cpu()
        self.entropy += torch.special.entr(g).sum((1, 2)).cpu()  # 0 ln 0 = 0
        self.tokens += g.shape[1]

    def merge(self, other: RoutingStats) -> RoutingStats:
        """The statistics of both; neither is changed."""
        return RoutingStats(
            self.g + other.g, self.gg + other.gg, self.entropy + other.entropy, self.tokens + other.tokens
        )

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """mu (L, K), co (L, K, K) and h (L,): means over tokens. Raises ValueError without tokens."""
        if not bool((self.tokens > 0).all()):
            raise ValueError("routing: got no tokens, needs at least one; give the client rows with text")
        n = self.tokens
        return self.g / n[:, None], self.gg / n[:, None, None], self.entropy / n

    def vector(
        self,
        layers: str = "per_layer",
        scaling: Scaling = "literal",
        parts: Parts = "all",
        *,
        layer: int = 0,
    ) -> Tensor:
        """(F,) float64 of norm 1. layers: "pooled" (means over layers), "per_layer" (all, joined) or "one"
        (number `layer`). parts: "mean" leaves the co-activation out, "coactivation" the mean; the entropy
        stays. F = K + K (K + 1) / 2 + 1, times L for per_layer."""
        mu, co, h = self.means()
        return unit(arrange(mu[None], co[None], h[None], layers, scaling, parts, layer=layer)[0])


def _real_tokens(probabilities: Tensor, mask: Tensor | None) -> Tensor:
    """(L, n, K) float64: the n real tokens of a batch (L, b, T, K)."""
    if probabilities.ndim != 4:
        raise ValueError(
            f"routing: got probabilities of shape {tuple(probabilities.shape)}, needs (L, b, T, K)"
        )
    if mask is None:
        return probabilities.flatten(1, 2).double()
    if mask.shape != probabilities.shape[1:3]:
        raise ValueError(
            f"routing: got a mask of shape {tuple(mask.shape)}, needs {tuple(probabilities.shape[1:3])}"
        )
    return probabilities[:, mask.bool()].double()


def keep_largest(probabilities: Tensor, k: int) -> Tensor:
    """The k largest probabilities of each token, scaled to sum to 1, the others 0 (features after top-k)."""
    values, at = probabilities.topk(min(k, probabilities.shape[-1]), -1)
    return torch.zeros_like(probabilities).scatter(-1, at, values / values.sum(-1, keepdim=True))


def example_means(probabilities: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """mu (b, L, K), co (b, L, K, K) and h (b, L) of each example over its own tokens, float64.

    An example without tokens has zeros. Arguments as in `RoutingStats.update`."""
    b, T = probabilities.shape[1:3]
    real = torch.ones(b, T, device=probabilities.device) if mask is None else (mask != 0)
    g = probabilities.double().permute(1, 0, 2, 3) * real.to(probabilities.device)[:, None, :, None].double()
    n = real.sum(1).clamp(min=1).double().to(g.device)  # (b,)
    mu, co = g.sum(2) / n[:, None, None], (g.mT @ g) / n[:, None, None, None]
    return mu, co, torch.special.entr(g).sum((2, 3)) / n[:, None]


def arrange(
    mu: Tensor, co: Tensor, h: Tensor, layers: str, scaling: Scaling, parts: Parts, *, layer: int = 0
) -> Tensor:
    """(b, F) vectors, not normalised, of b statistics: mu (b, L, K), co (b, L, K, K), h (b, L).

    Arguments as in `RoutingStats.vector`. Raises ValueError for a layer that is not there."""
    if layers == "pooled":
        mu, co, h = (m.mean(1, keepdim=True) for m in (mu, co, h))
    elif layers == "one":
        if not 0 <= layer < mu.shape[1]:
            raise ValueError(
                f"routing: got layer {layer}, needs one of 0..{mu.shape[1] - 1}; correct feature_layer"
            )
        mu, co, h = (m[:, layer : layer + 1] for m in (mu, co, h))
    packed, h = pack(co), h[..., None]
    if scaling == "balanced":
        n_layers, experts = mu.shape[1:]
        if experts < 2:
            raise ValueError("routing: got 1 expert per layer, needs 2 for balanced features; use literal")
        mu, packed = (m / _norms(m) for m in (mu, packed))
        h = h * (ENTROPY_WEIGHT / (torch.log(torch.tensor(float(experts))).item() * n_layers**0.5))
    chosen = {"all": (mu, packed, h), "mean": (mu, h), "coactivation": (packed, h)}[parts]
    return torch.cat(chosen, -1).flatten(1)


def _norms(block: Tensor) -> Tensor:
    """(b, 1, 1) norms of a block (b, L, n), 1 where the block is zero."""
    norms = block.flatten(1).norm(dim=1)[:, None, None]
    return torch.where(norms > 0, norms, 1.0)


def pack(square: Tensor) -> Tensor:
    """(..., K (K + 1) / 2): upper triangle of symmetric matrices (..., K, K), off-diagonals times sqrt 2."""
    K = square.shape[-1]
    row, column = torch.triu_indices(K, K)
    factor = torch.where(row == column, 1.0, 2.0**0.5).to(square)
    return square[..., row, column] * factor


def unpack(packed: Tensor, K: int) -> Tensor:
    """(..., K, K) symmetric matrices; undoes `pack`."""
    row, column = torch.triu_indices(K, K)
    factor = torch.where(row == column, 1.0, 0.5**0.5).to(packed)
    square = packed.new_zeros(*packed.shape[:-1], K, K)
    square[..., row, column] = packed * factor
    square[..., column, row] = packed * factor
    return square


def unit(vectors: Tensor) -> Tensor:
    """Vectors (..., F) divided by their norms; zeros stay."""
    norms = vectors.norm(dim=-1, keepdim=True)
    return vectors / torch.where(norms > 0, norms, 1.0)


def clipped_sum(vectors: Tensor, limit: float) -> Tensor:
    """(F,) sum over examples of (b, F) vectors, each scaled down to norm `limit` where it is longer.

    One record moves it by at most `limit` (added or removed) or 2 `limit` (replaced) (spec 7.2)."""
    factors = limit / vectors.norm(dim=1, keepdim=True).clamp(min=limit)
    total: Tensor = (vectors * factors).sum(0)
    return total
