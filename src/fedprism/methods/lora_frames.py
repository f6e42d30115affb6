"""Low-rank blocks from different clients: changes of their frame and averages over them (spec A16, A35).

A block B of a client was trained with the client's own A; under another A it computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedprism.models.interface import Model
from fedprism.trees import Tree


def align(B: Tree, A: Tree, A_new: Tree) -> Tree:
    """Least-squares change of frame (spec A35).

    B' = B A A_new^T (A_new A_new^T)^-1 minimises |B' A_new - B A|_F. B: names of lora_B. A, A_new: names of
    lora_A for the same projections. Blocks without an A are returned as they are."""
    moved = {}
    for name, b in B.items():
        frame = "lora_A" + name.removeprefix("lora_B")
        if frame in A:
            a, a_new = A[frame].double(), A_new[frame].double()
            target = b.double() @ a @ a_new.T
            b = torch.linalg.solve(a_new @ a_new.T, target.T).T.to(b.dtype)
        moved[name] = b
    return moved


@torch.no_grad()
def accuracies(model: Model, forms: Mapping[str, Tree], rows: Any, size: int) -> dict[str, float]:
    """Accuracy of each of several trees on the same rows, in batches of `size`."""
    return {
        form: sum(
            float((model.apply(tree, batch).logits.argmax(1) == batch["label"]).sum()) / len(rows)
            for batch in rows.batches(size)
        )
        for form, tree in forms.items()
    }


def average_rows(members: Sequence[Tree], users: Sequence[Sequence[int]]) -> Tree:
    """Mean of stacked-by-expert tensors, row m over the members listed in users[m] (spec A16).

    members: trees whose tensors have M rows. users: M lists of positions in `members`; where one is empty,
    all members count."""
    everyone = range(len(members))
    return {
        name: torch.stack(
            [
                torch.stack([members[k][name][m] for k in who or everyone]).mean(0)
                for m, who in enumerate(users)
            ]
        )
        for name in members[0]
    }
