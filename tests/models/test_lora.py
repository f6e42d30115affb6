"""Adapted projections against loops, real PEFT layers and numerical facts (FedSEE spec 5 and 14)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.models import lora
from fedprism.models.interface import Bank, Tree
from fedprism.models.lora import AdaptedLinear, ForwardPass

D_IN, D_OUT, RANK, M, SCALE = 12, 10, 3, 4, 2.0


def tensors(seed: int = 0) -> tuple[AdaptedLinear, Tensor, Tree, Bank]:
    """One adapted map, (2, 5, D_IN) tokens, a pair and a bank, all random."""
    torch.manual_seed(seed)
    layer = AdaptedLinear(nn.Linear(D_IN, D_OUT), "p", "router.p")
    own = {"lora_A.p": torch.randn(RANK, D_IN), "lora_B.p": torch.randn(D_OUT, RANK)}
    bank = Bank(
        down={"lora_A.p": torch.randn(RANK, D_IN)},
        experts={m: {"lora_B.p": torch.randn(D_OUT, RANK)} for m in range(M)},
        router={"router.p.weight": torch.randn(M, D_IN), "router.p.bias": torch.randn(M)},
    )
    return layer, torch.randn(2, 5, D_IN), own, bank


def run(
    layer: AdaptedLinear,
    x: Tensor,
    own: Tree,
    bank: Bank | None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Tensor, ForwardPass]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    threshold = lora.dropout_threshold(dropout)
    now = ForwardPass(own, bank, torch.ones(x.shape[:2]), SCALE, threshold, generator)
    layer.current = now
    try:
        return layer(x), now
    finally:
        layer.current = None


def by_loop(layer: AdaptedLinear, x: Tensor, own: Tree, bank: Bank, kept: Tensor | None = None) -> Tensor:
    """h(x) of spec 5.1 with one matmul per expert, in float64. kept: x after dropout."""
    wide = x.double()
    branch = wide if kept is None else kept.double()
    h = F.linear(wide, layer.base.weight.double(), layer.base.bias.double())
    if own:
        h = h + SCALE * branch @ own["lora_A.p"].double().T @ own["lora_B.p"].double().T
    logits = wide @ bank.router["router.p.weight"].double().T + bank.router["router.p.bias"].double()
    absent = [m for m in range(M) if m not in bank.experts]
    logits[..., absent] = -torch.inf
    p = logits.softmax(-1)
    for m, expert in bank.experts.items():
        routed = branch @ bank.down["lora_A.p"].double().T @ expert["lora_B.p"].double().T
        h = h + SCALE * p[..., m : m + 1] * routed
    return h


@pytest.mark.parametrize("with_pair", [True, False])
@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3), (2,)])
def test_routed_output_equals_a_loop_over_experts(with_pair: bool, present: tuple[int, ...]) -> None:
    layer, x, own, bank = tensors()
    own = own if with_pair else {}
    bank = Bank(bank.down, {m: bank.experts[m] for m in present}, bank.router)
    h, now = run(layer, x, own, bank)
    expected = by_loop(layer, x, own, bank)
    assert (h.double() - expected).abs().max() < 1e-6 * expected.abs().max()
    usage = now.usage_sum(["p"])
    assert usage is not None
    assert usage.shape == (1, 2, M)
    assert torch.equal(
        usage[..., [m for m in range(M) if m not in present]], torch.zeros(1, 2, M - len(present))
    )
    assert torch.allclose(usage.sum(-1), torch.full((1, 2), 5.0))


def test_one_hot_router_is_plain_lora_with_that_expert() -> None:
    layer, x, _, bank = tensors()
    bias = torch.tensor([0.0, 0.0, 500.0, 0.0])
    bank.router.update({"router.p.weight": torch.zeros(M, D_IN), "router.p.bias": bias})
    routed, _ = run(layer, x, {}, bank)
    plain, _ = run(layer, x, {**bank.down, "lora_B.p": bank.experts[2]["lora_B.p"]}, None)
    assert torch.allclose(routed, plain, atol=1e-6)


def test_fixed_weights_mix_the_experts_for_every_token() -> None:
    layer, x, own, bank = tensors()
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2], requires_grad=True)
    h, now = run(layer, x, own, Bank(bank.down, bank.experts, weights=weights))
    with torch.no_grad():
        mixed = sum(w * bank.experts[m]["lora_B.p"] for m, w in enumerate(weights))
        expected = F.linear(x, layer.base.weight, layer.base.bias)
        expected = expected + SCALE * x @ own["lora_A.p"].T @ own["lora_B.p"].T
        expected = expected + SCALE * x @ bank.down["lora_A.p"].T @ mixed.T
    assert torch.allclose(h, expected, rtol=1e-5, atol=1e-4)
    assert now.usage_sum(["p"]) is None
    h.sum().backward()
    assert weights.grad is not None and weights.grad.abs().min() > 0


def test_a_zero_weight_stands_for_a_missing_expert_and_another_weight_does_not() -> None:
    layer, x, _, bank = tensors()
    blocks = {
        "lora_A": ("lora_A.p",),
        "lora_B": ("lora_B.p",),
        "router": ("router.p.weight", "router.p.bias"),
        "head": (),
    }
    some = {m: bank.experts[m] for m in (0, 2)}
    lora.check_bank(Bank(bank.down, some, weights=torch.tensor([0.4, 0.0, 0.6, 0.0])), blocks)
    with pytest.raises(ValueError, match=r"not zero for experts \[3\]"):
        lora.check_bank(Bank(bank.down, some, weights=torch.tensor([0.4, 0.0, 0.3, 0.3])), blocks)
    with pytest.raises(ValueError, match=r"experts \[7\]"):
        lora.check_bank(Bank(bank.down, {7: bank.experts[0]}, bank.router), blocks)
    with pytest.raises(ValueError, match="no experts"):
        lora.check_bank(Bank(bank.down, {}, bank.router), blocks)
    with pytest.raises(KeyError, match="router lacks"):
        lora.check_bank(Bank(bank.down, some), blocks)
    assert run(layer, x, {}, Bank(bank.down, some, bank.router))[0].isfinite().all()


def test_gradients_equal_those_of_the_loop() -> None:
    layer, x, own, bank = tensors()
    leaves = [x, *own.values(), *bank.down.values(), *bank.router.values()]
    leaves += [expert["lora_B.p"] for expert in bank.experts.values()]
    for leaf in leaves:
        leaf.requires_grad_(True)
    direction = torch.randn(2, 5, D_OUT)
    fast = torch.autograd.grad((run(layer, x, own, bank)[0] * direction).sum(), leaves)
    slow = torch.autograd.grad((by_loop(layer, x, own, bank) * direction).sum(), leaves)
    for a, b in zip(fast, slow, strict=True):
        assert (a - b).abs().max() < 2e-6 * b.abs().max()


def test_one_dropout_mask_serves_both_down_projections_and_not_the_router() -> None:
    layer, x, own, bank = tensors()
    threshold = lora.dropout_threshold(0.4)
    mask = lora.keep_mask((10, D_IN), threshold, torch.Generator().manual_seed(3), torch.float32)
    assert 0 < mask.mean() < 1
    kept = (x.view(10, D_IN) * mask).view(x.shape) / (1 - threshold / 65536)
    h, _ = run(layer, x, own, bank, dropout=0.4, seed=3)
    expected = by_loop(layer, x, own, bank, kept)
    assert (h.double() - expected).abs().max() < 2e-6 * expected.abs().max()


def test_dropout_masks_have_the_rate_and_depend_on_the_generator_alone() -> None:
    threshold = lora.dropout_threshold(0.1)
    first, again, other = (
        lora.keep_mask((333, 301), threshold, torch.Generator().manual_seed(s), torch.float32)
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 1.0}
    dropped = 1 - first
    assert abs(dropped.mean() - 0.1) < 0.004  # four standard deviations of 100,233 draws
    for lane in range(4):  # four entries come from one draw; each must have the rate, and be independent
        assert abs(dropped.flatten()[lane::4].mean() - 0.1) < 0.008
    together = dropped.flatten()[:100_000].view(-1, 4)
    assert torch.corrcoef(together.T).fill_diagonal_(0).abs().max() < 0.03
    assert lora.keep_mask((50, 4), 0, torch.Generator(), torch.float32).all()
    with pytest.raises(ValueError, match=r"rate in \[0, 1\)"):
        lora.dropout_threshold(1.0)


def test_dropout_leaves_the_mean_of_the_branch_unchanged() -> None:
    layer, x, own, _ = tensors()
    x = x[:1, :1].expand(40_000, 1, D_IN)
    dropped, _ = run(layer, x, own, None, dropout=0.3, seed=0)
    plain, _ = run(layer, x[:1], own, None)
    error = (dropped.double().mean(0) - plain[0]).abs() / (dropped.double().std(0) / 200)
    assert error.max() < 5  # standard errors


def test_without_bias_the_frozen_map_loses_its_bias_only() -> None:
    layer, x, own, bank = tensors()
    with_bias, _ = run(layer, x, own, bank)
    layer.projection_bias = False
    without, _ = run(layer, x, own, bank)
    assert torch.allclose(with_bias - without, layer.base.bias.expand_as(with_bias), atol=1e-4)
    assert torch.allclose(layer(x), x @ layer.base.weight.T, atol=1e-6)
    assert not layer.base.weight.requires_grad


def test_initial_values_are_the_standard_ones() -> None:
    down = lora.init_down(["a", "b"], {"a": (4, 400), "b": (4, 400)}, seed=0)
    assert down["a"].abs().max() <= 1 / 20 and down["a"].abs().max() > 0.9 / 20
    assert not torch.equal(down["a"], down["b"])
    router = lora.init_router(["r.weight", "r.bias"], {"r.weight": 400, "r.bias": 400}, 5, seed=0)
    assert router["r.weight"].shape == (5, 400) and router["r.bias"].shape == (5,)
    assert max(value.abs().max() for value in router.values()) <= 1 / 20
    with pytest.raises(ValueError, match="n_experts=0"):
        lora.init_router(["r.bias"], {"r.bias": 4}, 0, seed=0)
