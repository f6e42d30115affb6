"""Encoders of table rows: sizes, equality with torch's modules, gradients, training."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import drive
from torch import Tensor, nn

from fedprism.data.arrays import TableRows
from fedprism.methods import fedavg
from fedprism.models.mlp import load_mlp
from fedprism.protocol import Client


def table(n: int, f: int = 5, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, f, generator=g)
    return {"x": x, "label": (x[:, 0] > 0).long()}


def test_sizes_follow_the_formula() -> None:
    model = load_mlp(5, n_classes=3, width=16, router_width=8)
    hidden = (5 * 64 + 3 * 64) + (64 * 64 + 3 * 64)  # weight; bias and norm
    sizes = {
        "encoder": hidden + 64 * 16 + 3 * 16,
        "router_encoder": hidden + 64 * 8 + 3 * 8,
        "head": 16 * 3 + 3,
    }
    facts = model.describe()
    assert facts["blocks"] == sizes
    for block, size in sizes.items():
        assert sum(v.numel() for v in model.init(block, 0).values()) == size
    assert (facts["kind"], facts["backbone"], facts["hidden"]) == ("mlp", "mlp-64-64", [64, 64])


def test_the_encoder_equals_torch_modules() -> None:
    model = load_mlp(5, hidden=(7, 6), width=4)
    tree = model.trainable(2)
    layers: list[nn.Module] = []
    for name, n_in, n_out in (("dense0", 5, 7), ("dense1", 7, 6), ("projection", 6, 4)):
        linear, norm = nn.Linear(n_in, n_out), nn.LayerNorm(n_out)
        for module, part in ((linear, "linear"), (norm, "norm")):
            module.load_state_dict({k: tree[f"encoder.{name}.{part}.{k}"] for k in ("weight", "bias")})
        layers += [linear, norm, nn.ReLU()]
    batch = table(9)
    torch.testing.assert_close(model.encode(tree, batch), nn.Sequential(*layers)(batch["x"]))
    assert model.apply(tree, batch).logits.shape == (9, 2)


def test_rows_do_not_depend_on_their_company() -> None:
    model, batch = load_mlp(5), table(11)
    nu = model.init("router_encoder", 1)
    whole = model.encode(nu, batch, "router_encoder")
    assert whole.shape == (11, 32)
    alone = torch.cat([model.encode(nu, {"x": x[None]}, "router_encoder") for x in batch["x"]])
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)


def test_every_gradient_passes_the_numerical_check() -> None:
    model = load_mlp(3, n_classes=2, width=3, hidden=(4,))
    tree = {name: value.double() for name, value in model.trainable(0).items()}
    names, x = list(tree), table(4, 3)["x"].double()

    def logits(*values: Tensor) -> Tensor:
        return model.apply(dict(zip(names, values, strict=True)), {"x": x}).logits

    assert torch.autograd.gradcheck(logits, [tree[name].requires_grad_(True) for name in names])


def test_fedavg_learns_a_half_space() -> None:
    model = load_mlp(5)
    participants = {}
    for i, n in enumerate((20, 30, 40)):
        batch = table(n, seed=i)
        zero = torch.zeros(n, dtype=torch.int64)
        columns = {"label": batch["label"], "task": zero, "row": zero, "client": zero + i, "component": zero}
        participants[i] = Client(i, model, {"train": TableRows(columns, batch["x"])})
    cfg = fedavg.Config(rounds=8, local_epochs=2, lr=0.05, optimizer="sgd", momentum=0.9, batch_size=10)
    ends = drive(fedavg.FEDAVG, cfg, participants)
    held_out = table(400, seed=9)
    right = model.apply(ends[-1].state.w, held_out).logits.argmax(1) == held_out["label"]
    assert float(right.float().mean()) > 0.85  # chance is 1/2


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="n_features: got 0, needs at least 1"):
        load_mlp(0)
    for hidden in ((), (4, 0)):
        with pytest.raises(ValueError, match=r"hidden: got \["):
            load_mlp(3, hidden=hidden)
    model = load_mlp(3)
    with pytest.raises(ValueError, match=r"\(2, 5\), needs \(b, 3\)"):
        model.encode(model.trainable(0), table(2, 5))
