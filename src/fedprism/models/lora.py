"""Low-rank layers, expert banks and routers on top of frozen linear maps (FedSEE spec 5).

An adapted projection computes, for every token vector x,

    h(x) = W0 x + s B^s A^s x + s sum_m p_m(x) B_m A^g x,        s = alpha / rank,

with all experts in one product: u = A^g x once, z = concat_m(p_m u), routed part = Bcat z (spec 5.3).
Trainable tensors are never stored here: `apply` of the model hands them over for one pass in a `ForwardPass`.
The dropout scale 1 / keep and s are folded into the small up-projections, so the wide tensors are touched
as rarely as possible.

Deviations: the dropout rate is rounded to a multiple of 2^-16 (masks are 16-bit integers compared with a
threshold); the scale uses the rounded rate, so the branch stays unbiased.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.models.interface import Bank, Tree

QUERY_VALUE = (  # names of the query and value maps inside one attention module, by family
    ("query", "value"),  # BERT, RoBERTa, ELECTRA, MiniLM
    ("q_lin", "v_lin"),  # DistilBERT
    ("q_proj", "v_proj"),
    ("query_proj", "value_proj"),  # DeBERTa v2 and v3
    ("q", "v"),  # MPNet
)
_LEVELS = 1 << 16


def dropout_threshold(rate: float) -> int:
    """Number of the 65,536 levels of a 16-bit draw that drop an entry at `rate` in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: got {rate}, needs a rate in [0, 1)")
    return round(rate * _LEVELS)


def keep_mask(
    shape: tuple[int, ...], threshold: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Random mask of zeros and ones, each entry zero with probability threshold / 65536.

    One 64-bit draw gives four entries: several times faster on a CPU than Bernoulli draws. The same state of
    `generator` gives the same mask, whatever the number of threads."""
    size = math.prod(shape)
    draws = torch.empty((size + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    levels = draws.view(torch.int16)[:size].view(shape)
    mask = torch.empty(shape, dtype=dtype)
    torch.ge(levels, threshold - _LEVELS // 2, out=mask)
    return mask


class ForwardPass:
    """What the adapted projections of one forward pass read, and the routing they leave behind.

    pair: tree with `lora_A.<p>` and `lora_B.<p>` of the always-on pair, or empty.
    bank: routed experts, or None.   mask: (b, T), 1 for real tokens.
    scale: s = alpha / rank.   dropout_threshold: see `keep_mask`.   generator: None switches dropout off.
    """

    def __init__(
        self,
        pair: Tree,
        bank: Bank | None,
        mask: Tensor,
        scale: float,
        dropout_threshold: int,
        generator: torch.Generator | None,
    ) -> None:
        self.pair, self.bank, self.mask, self.generator = pair, bank, mask, generator
        self.dropout_threshold = dropout_threshold if generator is not None else 0
        self.scale = scale * _LEVELS / (_LEVELS - self.dropout_threshold)
        self.experts = sorted(bank.experts) if bank is not None else []  # indices that are not masked
        self.routed = bank is not None and bank.weights is None
        self._routing: dict[str, list[Tensor]] = {}  # projection -> (b T, U) probabilities, one per use
        self._last: tuple[str, Tensor, Tensor] | None = None  # router, its input, its probabilities

    def route(self, projection: str, router: str, x: Tensor, tokens: Tensor) -> Tensor:
        """(n, U) probabilities of the unmasked experts for n token vectors.

        x: the module's input, identifies the tokens when query and value share a router.
        tokens: (n, d_in), x flattened, without dropout.   Masked experts have no row, so exactly zero."""
        bank = self.bank
        if bank is None:
            raise ValueError("route: this forward pass has no bank of experts")
        if self._last is not None and self._last[0] == router and self._last[1] is x:
            probabilities = self._last[2]
        else:
            weight, bias = bank.router[f"{router}.weight"], bank.router[f"{router}.bias"]
            if len(self.experts) < weight.shape[0]:
                rows = torch.tensor(self.experts, device=weight.device)
                weight, bias = weight.index_select(0, rows), bias.index_select(0, rows)
            logits = F.linear(tokens, weight.to(tokens.dtype), bias.to(tokens.dtype))
            probabilities = logits.float().softmax(-1)
            self._last = (router, x, probabilities)
        if x.shape[:-1] == self.mask.shape:  # not for the relative positions of DeBERTa
            self._routing.setdefault(projection, []).append(probabilities)
        return probabilities

    def usage_sum(self, projections: Iterable[str]) -> Tensor | None:
        """(P, b, M) routing probabilities summed over the real tokens of each example; None without a router.
        A projection that is used several times in a pass (layers with shared weights) reports the mean."""
        bank = self.bank
        if not self.routed or bank is None:
            return None
        b, length = self.mask.shape
        per_projection = []
        for name in projections:
            uses = self._routing[name]
            per_projection.append(uses[0] if len(uses) == 1 else torch.stack(uses).mean(0))
        probabilities = torch.stack(per_projection).view(-1, b, length, len(self.experts))
        real = self.mask.to(probabilities.dtype).view(1, b, 1, length)
        sums = (real @ probabilities).squeeze(2)  # (P, b, U)
        n_experts = next(iter(bank.router.values())).shape[0]
        if n_experts == len(self.experts):
            return sums
        full = sums.new_zeros(*sums.shape[:2], n_experts)
        return full.index_copy(2, torch.tensor(self.experts, device=sums.device), sums)


class AdaptedLinear(nn.Module):
    """A frozen linear map with the low-rank branches of the current `ForwardPass` (spec 5.1).

    base: frozen map, weight (d_out, d_in).   name: the projection, as in `lora_A.<name>`.
    router: name of its router, as in `<router>.weight`.   projection_bias: False drops the base's bias (A13).
    Without a current pass it computes the frozen map.
    """

    def __init__(self, base: nn.Linear, name: str, router: str, projection_bias: bool = True) -> None:
        super().__init__()
        self.base, self.name, self.router = base.requires_grad_(False), name, router
        self.projection_bias = projection_bias
        self.current: ForwardPass | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_in) -> (..., d_out)."""
        bias = self.base.bias if self.projection_bias else None
        now = self.current
        if now is None or not (now.pair or now.experts):
            return F.linear(x, self.base.weight, bias)
        tokens = x.reshape(-1, x.shape[-1])
        if torch.is_autocast_enabled("cpu"):
            tokens = tokens.to(torch.get_autocast_dtype("cpu"))
        h = F.linear(tokens, self.base.weight, bias)
        kept = tokens
        if now.generator is not None and now.dropout_threshold:  # one mask for A^s and A^g (A27)
            shape = (tokens.shape[0], tokens.shape[1])
            kept = tokens * keep_mask(shape, now.dropout_threshold, now.generator, tokens.dtype)
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        if now.pair:
            downs.append(now.pair[f"lora_A.{self.name}"])
            ups.append(now.pair[f"lora_B.{self.name}"])
        if now.bank is not None:
            downs.append(now.bank.down[f"lora_A.{self.name}"])
            experts = [now.bank.experts[m][f"lora_B.{self.name}"] for m in now.experts]
            if now.bank.weights is None:
                ups.extend(experts)
            else:  # one mixed up-projection for every token
                ups.append(torch.einsum("m,mor->or", now.bank.weights[now.experts], torch.stack(experts)))
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        z = F.linear(kept, down.to(kept.dtype))  # (n, r) or (n, 2r): shared, then routed
        if now.routed:
            p = now.route(self.name, self.router, x, tokens).to(z.dtype)  # (n, U)
            rank = downs[-1].shape[0]
            parts = [(p.unsqueeze(-1) * z[:, -rank:].unsqueeze(1)).flatten(1)]  # (n, U r)
            z = torch.cat([z[:, :-rank], *parts], 1) if now.pair else parts[0]
        up = (ups[0] if len(ups) == 1 else torch.cat(ups, 1)) * now.scale  # (d_out, columns of z)
        return h.addmm_(z, up.t().to(z.dtype)).view(*x.shape[:-1], -1)


def adapt_query_value(backbone: nn.Module, *, projection_bias: bool, router_per: str) -> list[AdaptedLinear]:
    """Replace the query and value maps of every attention module by `AdaptedLinear`, in place.

    They are found by structure: a module with two linear children named as in `QUERY_VALUE`. Projections are
    named `layer.<k>.query` and `layer.<k>.value` in the order of the modules, whatever the family calls them.
    router_per: "projection" or "layer" (one router shared by query and value, A14).
    Returns the adapted maps in order. Raises ValueError naming the linear layers seen if there is none."""
    if router_per not in ("projection", "layer"):
        raise ValueError(f"router_per: got '{router_per}', needs 'projection' or 'layer'")
    sites: list[tuple[nn.Module, str, str]] = []
    for module in backbone.modules():
        children = dict(module.named_children())
        for query, value in QUERY_VALUE:
            if isinstance(children.get(query), nn.Linear) and isinstance(children.get(value), nn.Linear):
                sites.append((module, query, value))
                break
    if not sites:
        seen = sorted(
            {
                re.sub(r"\b\d+\b", "*", name)
                for name, m in backbone.named_modules()
                if isinstance(m, nn.Linear)
            }
        )
        shown = ", ".join(seen[:20]) + (", ..." if len(seen) > 20 else "") if seen else "none"
        known = ", ".join("/".join(pair) for pair in QUERY_VALUE)
        raise ValueError(
            f"backbone: {type(backbone).__name__} has no attention module with linear children named "
            f"{known}; linear layers seen: {shown}; "
            "use an encoder of the BERT, RoBERTa, DistilBERT or MiniLM family"
        )
    adapted = []
    for k, (module, *names) in enumerate(sites):
        for child, role in zip(names, ("query", "value"), strict=True):
            projection = f"layer.{k}.{role}"
            router = f"router.{projection}" if router_per == "projection" else f"router.layer.{k}"
            layer = AdaptedLinear(getattr(module, child), projection, router, projection_bias)
            setattr(module, child, layer)
            adapted.append(layer)
    return adapted


def check_tree(tree: Tree, blocks: Mapping[str, tuple[str, ...]]) -> tuple[Tree, Tree]:
    """Split the tree given to `apply` into the always-on pair and the head's tensors.

    A tree holds all tensors of lora_A and lora_B or none of either, and any of the head's.
    Raises KeyError naming what is missing or unknown."""
    known = {*blocks["lora_A"], *blocks["lora_B"], *blocks["head"]}
    unknown = sorted(tree.keys() - known)
    if unknown:
        raise KeyError(
            f"apply: the tree holds {unknown[:3]}, needs names of lora_A, lora_B and head only; "
            "routers belong in a bank"
        )
    pair = {name: tree[name] for name in (*blocks["lora_A"], *blocks["lora_B"]) if name in tree}
    if pair and len(pair) < len(blocks["lora_A"]) + len(blocks["lora_B"]):
        missing = [name for name in (*blocks["lora_A"], *blocks["lora_B"]) if name not in tree]
        raise KeyError(f"apply: the pair lacks {missing[:3]}; give all of lora_A and lora_B, or none")
    return pair, {name: tree[name] for name in blocks["head"] if name in tree}


def check_bank(bank: Bank, blocks: Mapping[str, tuple[str, ...]]) -> None:
    """Raise KeyError or ValueError, naming the tensor or expert, where a bank does not fit the model."""
    if not bank.experts:
        raise ValueError("bank: got no experts, needs at least one (or pass bank=None)")
    needed: list[tuple[str, Mapping[str, Tensor], tuple[str, ...]]] = [
        ("down", bank.down, blocks["lora_A"]),
        *((f"expert {m}", expert, blocks["lora_B"]) for m, expert in bank.experts.items()),
    ]
    if bank.weights is None:
        needed.append(("router", bank.router, blocks["router"]))
    for what, tree, names in needed:
        missing = [name for name in names if name not in tree]
        if missing:
            raise KeyError(f"bank: {what} lacks {missing[:3]}, got {sorted(tree)[:3]}")
    n_experts = len(bank.weights) if bank.weights is not None else bank.router[blocks["router"][0]].shape[0]
    outside = [m for m in bank.experts if not 0 <= m < n_experts]
    if outside:
        raise ValueError(f"bank: got experts {outside}, needs indices in 0..{n_experts - 1}")
    if bank.weights is not None:
        nonzero = bank.weights.detach().nonzero().flatten().tolist()
        absent = [m for m in nonzero if m not in bank.experts]
        if absent:
            raise ValueError(f"bank: weights are not zero for experts {absent}, which the bank does not hold")


def init_down(names: Iterable[str], shapes: Mapping[str, tuple[int, int]], seed: int) -> Tree:
    """Kaiming-uniform (a = sqrt 5) down-projections; shapes: name -> (rank, d_in)."""
    generator = torch.Generator().manual_seed(seed)
    result = {name: torch.empty(shapes[name]) for name in names}
    for value in result.values():
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return result


def init_router(names: Iterable[str], widths: Mapping[str, int], n_experts: int, seed: int) -> Tree:
    """Routers with torch's default linear init: entries uniform in +-1 / sqrt(d_in).

    names: `<router>.weight` and `<router>.bias`.   widths: name -> d_in.   n_experts: rows, >= 1."""
    if n_experts < 1:
        raise ValueError(f"init router: got n_experts={n_experts}, needs at least 1")
    generator = torch.Generator().manual_seed(seed)
    result: Tree = {}
    for name in names:
        bound = 1 / math.sqrt(widths[name])
        shape = (n_experts, widths[name]) if name.endswith(".weight") else (n_experts,)
        result[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return result
