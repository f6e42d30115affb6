"""Routing features: worked by hand, ranges, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch

from fedprism.methods.routing_features import (
    RoutingStats,
    arrange,
    clipped_sum,
    example_means,
    keep_largest,
    pack,
    unit,
    unpack,
)

L, B, T, K = 3, 4, 5, 6


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) < torch.tensor([5, 3, 1, 4])[:, None]
    return torch.randn(L, B, T, K, generator=g).softmax(-1), mask.long()


def stats_of(p: torch.Tensor, mask: torch.Tensor | None = None) -> RoutingStats:
    stats = RoutingStats.empty(p.shape[0], p.shape[-1])
    stats.update(p, mask)
    return stats


def test_two_tokens_by_hand() -> None:
    p = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])  # one layer, one example, two tokens
    mu, co, h = stats_of(p).means()
    torch.testing.assert_close(mu, torch.tensor([[0.75, 0.25]]).double())
    torch.testing.assert_close(co, torch.tensor([[[0.625, 0.125], [0.125, 0.125]]]).double())
    torch.testing.assert_close(h, torch.tensor([math.log(2) / 2]).double())
    raw = torch.tensor([0.75, 0.25, 0.625, 0.125 * math.sqrt(2), 0.125, math.log(2) / 2]).double()
    torch.testing.assert_close(stats_of(p).vector(), raw / raw.norm())
    mean = raw[[0, 1, 5]]
    torch.testing.assert_close(stats_of(p).vector(parts="mean"), mean / mean.norm())
    co = raw[2:]
    torch.testing.assert_close(stats_of(p).vector(parts="coactivation"), co / co.norm())


def test_balanced_by_hand() -> None:
    p = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    mu, co = torch.tensor([3.0, 1.0]) / math.sqrt(10), torch.tensor([5.0, math.sqrt(2), 1.0]) / math.sqrt(28)
    whole = torch.cat([mu, co, torch.tensor([0.3 * 0.5])]).double()  # the entropy is half of ln 2
    torch.testing.assert_close(
        stats_of(p).vector(scaling="balanced"), whole / whole.norm(), atol=1e-7, rtol=0
    )


def test_statistics_have_their_ranges() -> None:
    mu, co, h = stats_of(*drawn()).means()
    torch.testing.assert_close(mu.sum(1), torch.ones(L).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(co.sum((1, 2)), torch.ones(L).double(), atol=1e-6, rtol=0)
    assert (torch.linalg.eigvalsh(co) > -1e-12).all() and (co == co.mT).all()
    assert (h >= 0).all() and (h <= math.log(K)).all()


def test_padding_and_the_cut_into_batches_do_not_matter() -> None:
    p, mask = drawn()
    whole = stats_of(p, mask)
    p2 = p.clone()
    p2[:, mask == 0] = 7.0  # whatever stands in the padding
    assert torch.equal(stats_of(p2, mask).gg, whole.gg)
    parts = stats_of(p[:, :1], mask[:1]).merge(stats_of(p[:, 1:], mask[1:]))
    for layers in ("pooled", "per_layer", "one"):
        torch.testing.assert_close(parts.vector(layers), whole.vector(layers), atol=1e-14, rtol=0)
    assert whole.tokens.tolist() == [13.0] * L


@pytest.mark.parametrize(("layers", "length"), [("pooled", 28), ("per_layer", 84), ("one", 28)])
def test_lengths_and_norms(layers: str, length: int) -> None:
    vector = stats_of(*drawn()).vector(layers)
    assert vector.shape == (length,) and math.isclose(float(vector.norm()), 1)  # 6 + 21 + 1 per layer


def test_one_layer_is_that_layer_and_pooling_is_the_mean() -> None:
    p, mask = drawn()
    torch.testing.assert_close(stats_of(p, mask).vector("one", layer=2), stats_of(p[2:], mask).vector())
    mu, co, h = stats_of(p, mask).means()
    raw = torch.cat([mu.mean(0), pack(co.mean(0)), h.mean()[None]])
    torch.testing.assert_close(stats_of(p, mask).vector("pooled"), raw / raw.norm())


def test_packing_keeps_inner_products() -> None:
    a, b = (torch.randn(3, K, K, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    a, b = a + a.mT, b + b.mT
    torch.testing.assert_close((pack(a) * pack(b)).sum(1), (a * b).sum((1, 2)))
    torch.testing.assert_close(unpack(pack(a), K), a)


def test_example_means_are_each_example_s_own_statistics() -> None:
    p, mask = drawn()
    found = arrange(*example_means(p, mask), "per_layer", "literal", "all")
    for k in range(B):
        alone = stats_of(p[:, k : k + 1], mask[k : k + 1])
        torch.testing.assert_close(unit(found[k]), alone.vector())


def test_one_example_moves_the_clipped_sum_by_no_more_than_the_limit() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.1, 0.0]]).double()
    torch.testing.assert_close(clipped_sum(rows, 0.5), torch.tensor([0.3 + 0.1, 0.4]).double())
    assert float((clipped_sum(rows, 0.5) - clipped_sum(rows[1:], 0.5)).norm()) <= 0.5 + 1e-12


def test_after_top_k_the_largest_probabilities_share_one() -> None:
    kept = keep_largest(torch.tensor([0.5, 0.2, 0.3]), 2)
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.0, 0.375]))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="got no tokens, needs at least one"):
        RoutingStats.empty(1, 2).vector()
    with pytest.raises(ValueError, match=r"needs \(3, 2\)"):
        RoutingStats.empty(3, 2).update(torch.ones(1, 1, 1, 2))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 2\), needs \(4, 5\)"):
        stats_of(drawn()[0], torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"got layer 9, needs one of 0\.\.2"):
        stats_of(*drawn()).vector("one", layer=9)
