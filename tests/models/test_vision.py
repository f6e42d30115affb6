"""Image encoders: sizes by formula, equality with torch modules, gradients, precision, training by FedAvg."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import drive, facts_of
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism import trees
from fedprism.data.arrays import ImageRows
from fedprism.methods import fedavg, references, scaffold
from fedprism.models.encoder import native_bf16
from fedprism.models.interface import Bank, FeatureModel, Tree
from fedprism.models.networks import NetworkModel
from fedprism.models.vision import BACKBONES, LeNet, ResNet, build_trunk, groups, load_vision
from fedprism.protocol import Client

SIZES = (14, 16, 28, 32)


def images(n: int, size: int = 16, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, size, size, generator=g) * 2 - 1
    return {"x": x, "label": torch.randint(10, (n,), generator=g)}


def shaken(tree: Tree, seed: int = 1) -> Tree:
    """The tree with noise on every tensor, so that no norm scale is zero and no bias either."""
    g = torch.Generator().manual_seed(seed)
    return {name: v + 0.3 * torch.randn(v.shape, generator=g, dtype=v.dtype) for name, v in tree.items()}


def small(**settings: Any) -> NetworkModel:
    return load_vision("resnet_narrow", "lenet_small", **{"image_size": 14, "width": 8, **settings})


def tiny_model(trunk: Any, router: Any) -> NetworkModel:
    return NetworkModel("vision", trunk, router, n_classes=3, width=5, router_width=4)


# ---- sizes -----------------------------------------------------------------------------------------------


def dense_size(n_in: int, n_out: int) -> int:
    return n_in * n_out + n_out + 2 * n_out  # weight, bias, layer norm


def lenet_size(first: int, second: int, hidden: int, side: int) -> int:
    convolutions = 25 * 3 * first + 25 * first * second + 3 * (first + second)  # weights; bias and norm
    return convolutions + dense_size(second * side**2, hidden)


def count(model: FeatureModel, block: str) -> int:
    return trees.count(model.init(block, 0))


@pytest.mark.parametrize("size", SIZES)
def test_resnet18_has_the_published_number_of_parameters(size: int) -> None:
    # 11,173,962 is the ResNet-18 of the 32x32 form with a ten-class layer on 512 features
    published = 11_173_962 - (512 * 10 + 10)
    layout = build_trunk("resnet18", size).layout
    assert sum(math.prod(fresh.shape) for fresh in layout.values()) == published
    sizes = load_vision("resnet18", image_size=size).describe()["blocks"] if size == 32 else {}
    assert sizes.get("encoder", published + dense_size(512, 32)) == published + dense_size(512, 32)


@pytest.mark.parametrize(("size", "side"), [(14, 3), (16, 4), (28, 4), (32, 5)])
def test_lenets_have_the_parameters_of_their_formula(size: int, side: int) -> None:
    # side: unpadded (s - 4) / 2 twice from 28 pixels on, s / 2 twice below
    model = load_vision("lenet", "lenet_small", image_size=size, width=64, router_width=16)
    assert count(model, "encoder") == lenet_size(32, 64, 512, side) + dense_size(512, 64)
    assert count(model, "router_encoder") == lenet_size(8, 16, 128, side) + dense_size(128, 16)
    assert count(model, "head") == 64 * 10 + 10


def test_the_narrow_resnet_has_the_parameters_of_its_formula() -> None:
    stem = 27 * 16 + 32
    first = 2 * 9 * 16 * 16 + 4 * 16
    second = 9 * 16 * 32 + 9 * 32 * 32 + 16 * 32 + 6 * 32  # two convolutions, a mapped shortcut, three norms
    third = 9 * 32 * 64 + 9 * 64 * 64 + 32 * 64 + 6 * 64
    model = small(width=32)
    assert count(model, "encoder") == stem + first + second + third + dense_size(64, 32)
    facts = model.describe()
    assert facts["blocks"] == {block: count(model, block) for block in ("encoder", "router_encoder", "head")}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backbone", [b for b in BACKBONES if b != "resnet18"])
def test_shapes_at_every_image_size(backbone: str, size: int) -> None:
    model = load_vision(backbone, "lenet_small", image_size=size, n_classes=7, width=12, router_width=6)
    tree = {**model.trainable(0), **model.init("router_encoder", 0)}
    batch = images(3, size)
    assert model.encode(tree, batch).shape == (3, 12)
    assert model.encode(tree, batch, "router_encoder").shape == (3, 6)
    out = model.apply(tree, batch)
    assert out.logits.shape == (3, 7) and out.logits.dtype == torch.float32
    assert out.usage_sum is None and model.projections == ()


@pytest.mark.parametrize("size", SIZES)
def test_resnet18_runs_at_every_image_size(size: int) -> None:
    trunk = build_trunk("resnet18", size)
    g = torch.Generator().manual_seed(0)
    p = {name: fresh.draw(g) for name, fresh in trunk.layout.items()}
    with torch.inference_mode():
        assert trunk(p, images(1, size)["x"]).shape == (1, 512)


def test_group_norms_have_the_groups_of_the_specification() -> None:
    assert [groups(c) for c in (32, 64, 128, 512)] == [8, 16, 16, 16]


# ---- against torch's own modules -------------------------------------------------------------------------


class Block(nn.Module):
    """A basic block from torch's modules."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups(n_out), n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups(n_out), n_out)
        if stride > 1 or n_in != n_out:
            self.shortcut = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut_norm = nn.GroupNorm(groups(n_out), n_out)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(branch + (self.shortcut_norm(self.shortcut(x)) if hasattr(self, "shortcut") else x))


class Projection(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(n_in, n_out), nn.LayerNorm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class ModuleResNet(nn.Module):
    """Stages of 8 and 16 channels with two blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.GroupNorm(2, 8)
        self.stage0 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.stage1 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.projection = Projection(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage1(self.stage0(F.relu(self.stem_norm(self.stem(x)))))
        return self.projection(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ModuleLeNet(nn.Module):
    def __init__(self, side: int, padding: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 5, padding=padding), nn.GroupNorm(1, 4)
        self.conv2, self.norm2 = nn.Conv2d(4, 8, 5, padding=padding), nn.GroupNorm(2, 8)
        self.dense, self.projection = Projection(8 * side**2, 6), Projection(6, 4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm1(self.conv1(x))))
        x = self.pool(F.relu(self.norm2(self.conv2(x))))
        return self.projection(self.dense(x.flatten(1)))


@pytest.mark.parametrize(("size", "side", "padding"), [(14, 3, 2), (28, 4, 0)])
def test_encoders_equal_torch_modules_with_the_same_tensors(size: int, side: int, padding: int) -> None:
    model = tiny_model(ResNet("r", size, (8, 16), 2), LeNet("l", size, (4, 8), 6))
    tree = shaken({**model.init("encoder", 0), **model.init("router_encoder", 0)})
    batch = images(4, size)
    for block, module in (("encoder", ModuleResNet()), ("router_encoder", ModuleLeNet(side, padding))):
        mine = {n.removeprefix(f"{block}."): v for n, v in tree.items() if n.startswith(f"{block}.")}
        module.load_state_dict(mine)  # strict: the names are the same
        torch.testing.assert_close(model.encode(tree, batch, block), module(batch["x"]), rtol=1e-5, atol=1e-6)


# ---- initial values --------------------------------------------------------------------------------------


def test_initial_values_come_from_block_and_seed_alone() -> None:
    torch.manual_seed(1)
    first = small().init("encoder", 5)
    torch.manual_seed(2)
    second = small().init("encoder", 5)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["encoder.stem.weight"], small().init("encoder", 6)["encoder.stem.weight"])
    heads = [small().init("head", seed)["head.weight"] for seed in (0, 1, 2**62 + 1)]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])
    twins = load_vision("lenet_small", "lenet_small", image_size=14)
    theta, nu = twins.init("encoder", 0), twins.init("router_encoder", 0)
    assert not torch.equal(theta["encoder.conv1.weight"], nu["router_encoder.conv1.weight"])
    assert twins.init("lora_A", 0) == twins.init("lora_B", 0) == {}


def test_initial_values_have_their_distributions() -> None:
    model = load_vision("resnet18", "lenet", image_size=28)
    tree = {**model.trainable(0), **model.init("router_encoder", 0)}
    conv = tree["encoder.stage3.1.conv2.weight"]  # 2.4 million draws: standard deviation sqrt(2 / (9 * 512))
    assert float(conv.std()) == pytest.approx(math.sqrt(2 / (9 * 512)), rel=5e-3)
    assert abs(float(conv.mean())) < 1e-4
    for name, fan in (("head.weight", 32), ("router_encoder.conv2.weight", 800), ("head.bias", 32)):
        bound = 1 / math.sqrt(fan)
        assert 0.7 * bound < float(tree[name].abs().max()) <= bound
    assert all(bool((v == 0).all()) for n, v in tree.items() if n.endswith("norm2.weight") and ".stage" in n)
    assert bool((tree["encoder.stage1.0.shortcut_norm.weight"] == 1).all())


def test_residual_branches_start_silent() -> None:
    model, batch = small(), images(3, 14)
    tree = model.trainable(0)
    branches = [n for n in tree if ".conv" in n or ".norm1." in n]
    assert branches
    changed = {n: v + 1 if n in branches else v for n, v in tree.items()}
    assert torch.equal(model.encode(tree, batch), model.encode(changed, batch))
    louder = {n: v + 0.5 if n.endswith("norm2.weight") else v for n, v in tree.items()}
    assert not torch.allclose(model.encode(tree, batch), model.encode(louder, batch))


def test_the_last_layer_norm_bounds_the_features() -> None:
    model = small(router_width=9)
    nu = model.init("router_encoder", 0)
    for factor in (1.0, 1e3):
        x = {"x": images(20, 14)["x"] * factor}
        # a vector of mean 0 and variance 1 over d entries has length sqrt d, and ReLU shortens it
        assert float(model.encode(nu, x, "router_encoder").norm(dim=1).max()) <= 3.0 + 1e-4


# ---- what group norms promise ----------------------------------------------------------------------------


def test_features_do_not_depend_on_mode_order_or_company() -> None:
    model, batch = small(), images(9, 14)
    tree = shaken({**model.trainable(0), **model.init("router_encoder", 0)})
    evaluated = model.apply(tree, batch).logits
    assert torch.equal(model.apply(tree, batch, generator=torch.Generator()).logits, evaluated)
    with torch.inference_mode():
        assert torch.equal(model.apply(tree, batch).logits, evaluated)
    order = torch.tensor([4, 0, 8, 1, 7, 2, 6, 3, 5])
    for block in ("encoder", "router_encoder"):
        whole = model.encode(tree, batch, block)
        moved = model.encode(tree, {"x": batch["x"][order]}, block)
        torch.testing.assert_close(moved, whole[order], rtol=1e-5, atol=1e-6)
        alone = torch.cat([model.encode(tree, {"x": x[None]}, block) for x in batch["x"]])
        torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)
        assert float(whole.std(0).max()) > 0.01  # they do differ between examples


@pytest.mark.parametrize("block", ["encoder", "router_encoder"])
def test_gradients_equal_finite_differences(block: str) -> None:
    model = tiny_model(ResNet("r", 8, (4, 8), 1), LeNet("l", 8, (4, 8), 6))
    double = {n: v.double() for n, v in shaken(model.init(block, 0)).items()}
    x = images(3, 8)["x"].double()
    probe = torch.randn(model.encode(double, {"x": x}, block).shape, dtype=torch.float64)

    def value(tree: Tree) -> Tensor:
        return (model.encode(tree, {"x": x}, block) * probe).sum()

    leaves = {n: v.clone().requires_grad_(True) for n, v in double.items()}
    value(leaves).backward()  # type: ignore[no-untyped-call]
    g = torch.Generator().manual_seed(3)
    for name in double:  # along a random direction of each tensor by itself
        direction = torch.randn(double[name].shape, generator=g, dtype=torch.float64)
        ahead, behind = (value({**double, name: double[name] + e * direction}) for e in (1e-6, -1e-6))
        slope = float((leaves[name].grad * direction).sum())  # type: ignore[operator]
        assert float(ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_logits_and_losses_are_those_of_the_head() -> None:
    model, batch = small(), images(6, 14)
    tree = model.trainable(3)
    features = model.encode(tree, batch)
    by_hand = features @ tree["head.weight"].T + tree["head.bias"]
    out = model.apply(tree, batch)
    torch.testing.assert_close(out.logits, by_hand)
    log_p = by_hand.double().log_softmax(1)
    losses = model.per_example_loss(out, batch)
    torch.testing.assert_close(losses.double(), -log_p[torch.arange(6), batch["label"]], rtol=1e-5, atol=1e-6)


def test_stacked_clients_under_vmap_equal_the_loop() -> None:
    model, batch = small(), images(4, 14)
    clients = [shaken(model.trainable(k), k) for k in range(3)]
    stacked = {name: torch.stack([c[name] for c in clients]) for name in clients[0]}

    def loss(tree: Tree, x: Tensor) -> Tensor:
        return model.per_example_loss(model.apply(tree, {"x": x}), batch).mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(stacked, batch["x"])
    for k, client in enumerate(clients):
        alone = torch.func.grad(loss)(client, batch["x"])
        for name, value in alone.items():
            torch.testing.assert_close(gradients[name][k], value, rtol=1e-3, atol=1e-5)


def test_channels_last_changes_rounding_only() -> None:
    tree = shaken({**small().trainable(0), **small().init("router_encoder", 0)})
    batch = images(4, 14)
    last = small(channels_last=True)
    for block in ("encoder", "router_encoder"):
        expected = small().encode(tree, batch, block)
        torch.testing.assert_close(last.encode(tree, batch, block), expected, rtol=1e-5, atol=1e-5)
    assert last.describe()["weights_sha256"] == small().describe()["weights_sha256"]


@pytest.mark.skipif(not native_bf16(), reason="this processor has no bfloat16 instructions")
def test_bf16_stays_close_and_leaves_heads_in_float32() -> None:
    tree, batch = small().trainable(0), images(8, 14)
    low = small(precision="bf16")
    leaves = {n: v.clone().requires_grad_(True) for n, v in tree.items()}
    logits = low.apply(leaves, batch).logits
    assert logits.dtype == torch.float32 and low.precision == "bf16"
    exact = small().apply(tree, batch).logits
    assert 0 < float((logits.detach() - exact).abs().max()) < 0.05
    logits.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves.values())


def test_auto_precision_follows_the_processor() -> None:
    assert small(precision="auto").precision == ("bf16" if native_bf16() else "fp32")


# ---- record and errors -----------------------------------------------------------------------------------


def test_the_record_tells_initialisations_apart() -> None:
    facts = small().describe()
    assert (facts["kind"], facts["backbone"], facts["image_size"]) == ("vision", "resnet_narrow", 14)
    assert small().describe() == facts
    assert small(width=9).describe()["weights_sha256"] != facts["weights_sha256"]
    model, batch = small(), images(16, 14)
    logits = model.apply(model.trainable(0), batch).logits
    spread = model.logit_spread(batch)
    assert spread == pytest.approx(float((logits.max(1).values - logits.min(1).values).mean()))
    assert model.describe()["logit_spread"] == spread


def test_mistakes_are_named_with_the_way_out() -> None:
    model = small()
    tree = model.trainable(0)
    with pytest.raises(ValueError, match=r"\(2, 3, 16, 16\), needs \(b, 3, 14, 14\)"):
        model.encode(tree, images(2, 16))
    with pytest.raises(ValueError, match=r"lacks .* add init\('router_encoder', seed\)"):
        model.encode(tree, images(2, 14), "router_encoder")
    with pytest.raises(ValueError, match=r"lacks \['head.weight', 'head.bias'\]"):
        model.apply(model.init("encoder", 0), images(2, 14))
    with pytest.raises(ValueError, match="pass bank=None"):
        model.apply(tree, images(2, 14), bank=Bank({}, {}))
    with pytest.raises(KeyError, match="no encoder 'head'"):
        model.encode(tree, images(2, 14), "head")
    with pytest.raises(KeyError, match="no block 'nu'"):
        model.init("nu", 0)
    with pytest.raises(ValueError, match="backbone: got 'vgg', needs one of resnet18"):
        load_vision("vgg")
    with pytest.raises(ValueError, match="image_size: got 7, needs at least 8"):
        load_vision(image_size=7)
    for wrong in ({"n_classes": 1}, {"width": 0}, {"router_width": 0}, {"precision": "fp8"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
            small(**wrong)
    with pytest.raises(ValueError, match=r"router_trunk: .*\(3, 8, 8\), needs \(3, 14, 14\)"):
        tiny_model(ResNet("r", 14, (4,), 1), LeNet("l", 8, (4, 8), 6))


# ---- training --------------------------------------------------------------------------------------------


def clients_of(model: FeatureModel, sizes: tuple[int, ...]) -> dict[int, Client]:
    participants = {}
    for i, n in enumerate(sizes):
        g = torch.Generator().manual_seed(i)
        label = torch.arange(n) % 2
        bright = (label * 150)[:, None, None, None]
        pixels = bright + torch.randint(100, (n, 3, 14, 14), generator=g)
        zero = torch.zeros(n, dtype=torch.int64)
        columns = {
            "label": label,
            "task": zero,
            "row": torch.arange(n),
            "client": zero + i,
            "component": zero,
        }
        rows = ImageRows(columns, pixels.to(torch.uint8))
        participants[i] = Client(i, model, {"train": rows, "test": rows})
    return participants


PLAIN: dict[str, Any] = {"optimizer": "sgd", "batch_size": 8, "clip": 0.0, "weight_decay": 0.0}


def test_fedavg_with_rate_zero_returns_the_start() -> None:
    model = small(n_classes=2)
    participants = clients_of(model, (8, 8, 16))  # shares 1/4, 1/4, 1/2: their means are exact
    start = fedavg.start(None, model, facts_of(participants))
    assert set(start.w) == {*model.blocks["encoder"], *model.blocks["head"]}
    ends = drive(fedavg.FEDAVG, fedavg.Config(rounds=2, lr=0.0, **PLAIN), participants)
    assert all(torch.equal(ends[-1].state.w[name], value) for name, value in start.w.items())


def test_fedavg_learns_bright_from_dark() -> None:
    model = small(n_classes=2)
    participants = clients_of(model, (12, 16, 8))
    cfg = fedavg.Config(rounds=6, local_steps=2, lr=0.2, momentum=0.9, **PLAIN)
    ends = drive(fedavg.FEDAVG, cfg, participants)
    losses = [end.log["train_loss"] for end in ends]
    assert losses[0] > 0.4 and losses[-1] < 0.2
    batch = next(participants[0].data["test"].batches(100))
    predict = fedavg.predictor(participants[0], {"w": ends[-1].state.w}, cfg)
    assert torch.equal(predict(batch).logits.argmax(1), batch["label"])


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "local_only"])
def test_methods_decay_weights_but_not_norms_and_biases(name: str) -> None:
    model = small(n_classes=2)
    after = []
    for decay in (0.0, 0.5):
        participants = clients_of(model, (8,))
        settings = {**PLAIN, "rounds": 1, "local_steps": 1, "lr": 0.1, "weight_decay": decay}
        if name == "fedavg":
            after.append(drive(fedavg.FEDAVG, fedavg.Config(**settings), participants)[-1].state.w)
        elif name == "scaffold":
            after.append(drive(scaffold.METHOD, scaffold.Config(**settings), participants)[-1].state.x)
        else:
            drive(references.LOCAL_ONLY, references.LocalConfig(**settings), participants)
            after.append(participants[0].state["w"])
    start = model.trainable(0)
    for tensor, value in start.items():
        # one step: w - lr (g + decay w), with the same g in both runs
        shrunk = 0.05 * value if value.ndim > 1 else torch.zeros_like(value)
        torch.testing.assert_close(after[0][tensor] - after[1][tensor], shrunk, rtol=1e-4, atol=1e-6)
        assert value.ndim > 1 or torch.equal(after[0][tensor], after[1][tensor])
    assert {n for n in start if n in model.decayed} == {n for n, v in start.items() if v.ndim > 1}
