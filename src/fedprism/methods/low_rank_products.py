"""Products of low-rank pairs, B A, without the dense matrices (baselines spec 20 and 21).

A *pair* is a tree with `lora_A.<p>` (..., q, in) and `lora_B.<p>` (..., out, q) for projections p; leading
dimensions (the experts of a layer) are batched. The width q is read from the shapes and may be 0. All sums
and decompositions run in float64; results come back in the type of what came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedprism.models.interface import Model
from fedprism.trees import Tree

VANISHING = 1e-9  # singular values below this part of the largest are float32 rounding of nothing
NEAR_ZERO = 1e-7  # below this part of the largest a singular direction is not determined in float32


def require_pairs(method: str, model: Model) -> None:
    """Raise ValueError in one line where a model has no low-rank pairs that `method` could average."""
    if not model.blocks.get("lora_A") or not model.blocks.get("lora_B"):
        raise ValueError(
            f"{method}: got a model without low-rank pairs, needs the blocks lora_A and lora_B; "
            'set model.kind = "encoder" or take method = "fedavg"'
        )


def projections(pair: Tree) -> Iterator[tuple[str, str]]:
    """Names (`lora_A.<p>`, `lora_B.<p>`) of the pairs in a tree, in the order of its A."""
    for down in pair:
        if down.startswith("lora_A."):
            yield down, "lora_B." + down.removeprefix("lora_A.")


def widen(tree: Tree, more: Tree) -> Tree:
    """The tree whose products are those of `tree` plus those of the pair `more`: factors joined along q.

    Entries of `tree` that `more` lacks stay as they are. Gradients flow to both."""
    wide = dict(tree)
    for down, up in projections(more):
        wide[down] = torch.cat([tree[down], more[down].to(tree[down].dtype)], -2)
        wide[up] = torch.cat([tree[up], more[up].to(tree[up].dtype)], -1)
    return wide


def no_product(like: Tree) -> Tree:
    """Pair of width 0 for the projections of `like`: its products are zero."""
    empty: Tree = {}
    for down, up in projections(like):
        empty[down], empty[up] = like[down][..., :0, :].clone(), like[up][..., :0].clone()
    return empty


def residual(pairs: Sequence[Tree], weights: Sequence[float], means: Tree) -> Tree:
    """sum_i rho_i B_i A_i - B A as stacked deviations: sum_i rho_i (B_i - B) (A_i - A) (baselines spec 20).

    pairs: the clients' trees. weights: non-negative, normalised here to rho. means: tree with the means A, B
    under the same weights. Returns a float64 pair of width n r, whose products have rank <= (n - 1) r."""
    total = float(sum(weights))
    stacked: Tree = {}
    for down, up in projections(means):
        a, b = means[down].double(), means[up].double()
        parts = list(zip(pairs, weights, strict=True))
        stacked[down] = torch.cat([pair[down].double() - a for pair, _ in parts], -2)
        stacked[up] = torch.cat([(pair[up].double() - b) * (w / total) for pair, w in parts], -1)
    return stacked


def compress(pair: Tree, dtype: torch.dtype = torch.float32) -> Tree:
    """The same products with the smallest widths: QR of both factors, SVD of the small core.

    The new width is the largest rank among the batched products, at most min(out, in); directions below
    `VANISHING` times the largest singular value go. The root of each singular value goes to either side."""
    small: Tree = {}
    for down, up in projections(pair):
        q_up, r_up = torch.linalg.qr(pair[up].double())  # (..., out, k), (..., k, q)
        q_down, r_down = torch.linalg.qr(pair[down].double().mT)  # (..., in, k'), (..., k', q)
        u, s, vh = torch.linalg.svd(r_up @ r_down.mT, full_matrices=False)
        rank = 0
        if s.numel():
            rank = int(((s > VANISHING * s[..., :1]) & (s > 0)).sum(-1).max())
        root = s[..., :rank].sqrt()
        small[up] = ((q_up @ u[..., :rank]) * root.unsqueeze(-2)).to(dtype)
        small[down] = (root.unsqueeze(-1) * (vh[..., :rank, :] @ q_down.mT)).to(dtype)
    return small


def product_norm(pair: Tree) -> float:
    """Euclidean norm of all products B A together, from the factors' Gram matrices."""
    total = 0.0
    for down, up in projections(pair):
        a, b = pair[down].double(), pair[up].double()
        total += float(((b.mT @ b) * (a @ a.mT)).sum())
    return math.sqrt(max(total, 0.0))


def widths(pair: Tree) -> dict[str, int]:
    """Projection -> width q of its factors."""
    return {down.removeprefix("lora_A."): pair[down].shape[-2] for down, _ in projections(pair)}


# --- refactorisation --------------------------------------------------------------------------------------


def refactorise(pair: Tree) -> tuple[Tree, int]:
    """The same products B A with orthonormal rows of A, the right singular vectors (baselines spec 21).

    B A = U S V^T, A <- V^T, B <- U S; rows of A by falling singular value, the entry of largest magnitude in
    each row positive. Where singular values are near zero, the rows that go with them continue the previous
    A's rows, made orthogonal to the others. Products with B = 0 keep their A and B. Needs r <= in. Returns
    the pair and how many products were refactorised."""
    new: Tree = {}
    done = 0
    for down, up in projections(pair):
        a, b = pair[down].double(), pair[up].double()
        q_down, r_down = torch.linalg.qr(a.mT)  # (..., in, r), (..., r, r): A in coordinates is r_down^T
        _, r_up = torch.linalg.qr(b)  # (..., k, r), k = min(out, r)
        _, s, vh = torch.linalg.svd(r_up @ r_down.mT, full_matrices=True)  # vh (..., r, r)
        turned = _completed(s, vh, r_down) @ q_down.mT
        largest = turned.gather(-1, turned.abs().argmax(-1, keepdim=True))
        turned = turned * torch.where(largest < 0, -1.0, 1.0)
        alive = b.flatten(-2).abs().amax(-1) > 0  # (...,)
        keep = alive[..., None, None]
        new[down] = torch.where(keep, turned, a).to(pair[down].dtype)
        new[up] = torch.where(keep, b @ (a @ turned.mT), b).to(pair[up].dtype)  # U S; exact where S is small
        done += int(alive.sum())
    return new, done


def _completed(s: Tensor, vh: Tensor, r_down: Tensor) -> Tensor:
    """(..., r, r) orthonormal rows: those of `vh` with a singular value, then what previous rows add.

    s: (..., k) singular values.   r_down: (..., r, r), its columns are the previous rows of A."""
    r = vh.shape[-1]
    ranks = ((s > NEAR_ZERO * s[..., :1]) & (s > 0)).sum(-1)
    if bool((ranks == r).all()):
        return vh
    rows = vh.reshape(-1, r, r).clone()
    previous = r_down.reshape(-1, r, r)
    for k, rank in enumerate(ranks.flatten().tolist()):
        if rank < r:  # the rows at the vanishing places first, then the others: QR takes what is new in each
            order = torch.cat([previous[k][:, rank:], previous[k][:, :rank]], 1)
            basis = torch.linalg.qr(torch.cat([rows[k, :rank].T, order], 1)).Q  # (r, r)
            rows[k, rank:] = basis[:, rank:].T
    return rows.view(vh.shape)
