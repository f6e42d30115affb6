"""Linear heads on cached features: numbers by hand, cache hits, features that depend on their text alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import tiny_encoders as tiny
from torch import Tensor

from fedprism.models.interface import Bank
from fedprism.models.probe import FourierFeatures, ProbeModel, default_cache_dir, standardise


@dataclass(frozen=True)
class Texts:
    """A data split in memory with the interface that `prepare` needs."""

    ids: Tensor  # (n, T)
    lengths: Tensor  # (n,)
    row: Tensor  # (n,)
    features: Tensor | None = None

    @property
    def columns(self) -> dict[str, Tensor]:
        return {"row": self.row}

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for part in self.lengths.argsort().split(size) if len(self.lengths) else ():
            width = int(self.lengths[part].max())
            mask = (torch.arange(width) < self.lengths[part, None]).long()
            yield {"input_ids": self.ids[part, :width] * mask, "attention_mask": mask, "row": self.row[part]}

    def with_features(self, features: Tensor) -> Texts:
        return replace(self, features=features)

    def take(self, index: list[int]) -> Texts:
        return Texts(self.ids[index], self.lengths[index], self.row[index])


def texts(n: int = 40, length: int = 19, seed: int = 0) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    return Texts(
        torch.randint(5, tiny.VOCABULARY, (n, length), generator=generator),
        torch.randint(2, length + 1, (n,), generator=generator),
        torch.randperm(1000, generator=generator)[:n],
    )


def probe(folder: Path, **settings: Any) -> ProbeModel:
    return ProbeModel(tiny.backbone(), cache_dir=folder, **settings)


def prepared(m: ProbeModel, rows: Texts) -> Tensor:
    found = m.prepare(rows).features
    assert isinstance(found, Tensor)
    return found


def test_logits_and_usage_equal_numbers_computed_with_numpy(tmp_path: Path) -> None:
    m = probe(tmp_path, n_classes=3)
    rows = texts(6)
    phi = prepared(m, rows)
    own = tiny.filled(m.init("lora_B", 0), 1)
    experts = {k: tiny.filled(m.init("lora_B", 0), 2 + k) for k in (0, 2)}
    router = tiny.filled(m.init("router", 0, 3), 9)
    outputs = m.apply(own, {"features": phi}, bank=Bank({}, experts, router))
    for k in range(6):
        x = phi[k].double().numpy()
        assert x[-1] == 1.0
        np.testing.assert_allclose([x[:-1].mean(), x[:-1].var()], [0, 1], atol=1e-4)
        score = (
            router["router.head.weight"].double().numpy() @ x + router["router.head.bias"].double().numpy()
        )
        weight = np.exp(score - score.max()) * np.array([1, 0, 1])
        weight = weight / weight.sum()
        expected = own["lora_B.head"].double().numpy() @ x
        for e in (0, 2):
            expected = expected + weight[e] * (experts[e]["lora_B.head"].double().numpy() @ x)
        np.testing.assert_allclose(outputs.logits[k], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outputs.usage_sum[0, k], weight, atol=1e-5)  # type: ignore[index]
    assert outputs.usage_sum is not None and torch.equal(outputs.usage_sum[..., 1], torch.zeros(1, 6))
    assert torch.equal(outputs.tokens, torch.ones(6))  # type: ignore[arg-type]
    fixed = m.apply(own, {"features": phi}, bank=Bank({}, experts, weights=torch.tensor([0.25, 0.0, 0.75])))
    mixed = own["lora_B.head"] + 0.25 * experts[0]["lora_B.head"] + 0.75 * experts[2]["lora_B.head"]
    assert torch.allclose(fixed.logits, phi @ mixed.T, atol=1e-4)
    assert fixed.usage_sum is None


def test_features_are_the_standardised_pooled_states_in_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = texts()
    reference = tiny.backbone().eval()
    for pool in ("mean", "first"):
        found = prepared(probe(tmp_path, pool=pool), rows)
        for k in range(0, 40, 7):
            ids = rows.ids[k : k + 1, : int(rows.lengths[k])]
            states = reference(input_ids=ids).last_hidden_state[0].detach()
            pooled = states.mean(0) if pool == "mean" else states[0]
            expected = (pooled - pooled.mean()) / (pooled.var(correction=0) + 1e-5).sqrt()
            assert torch.allclose(found[k, :-1], expected, atol=1e-5)


def test_a_cache_hit_gives_the_same_bits_without_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = texts()
    first = prepared(probe(tmp_path), rows)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 1 and files[0].endswith(".safetensors")  # and no temporary file
    again = probe(tmp_path)

    def fail(batch: object) -> Tensor:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(again.encoder, "hidden", fail)
    assert torch.equal(prepared(again, rows), first)
    part = [30, 2, 2, 17]
    assert torch.equal(prepared(again, rows.take(part)), first[part])  # another split of the same texts
    with pytest.raises(AssertionError, match="encoder ran"):
        again.prepare(texts(3, seed=5))


def test_a_feature_does_not_depend_on_what_else_is_encoded(tmp_path: Path) -> None:
    rows = texts()
    together = prepared(probe(tmp_path / "a"), rows)
    alone = torch.cat([prepared(probe(tmp_path / "b"), rows.take([k])) for k in range(0, 40, 9)])
    assert torch.allclose(alone, together[::9], atol=1e-6)


def test_precision_pool_and_backbone_have_their_own_cache(tmp_path: Path) -> None:
    rows = texts(4)
    plain = prepared(probe(tmp_path), rows)
    others = [probe(tmp_path, pool="first"), probe(tmp_path, precision="bf16"),
              ProbeModel(tiny.backbone(seed=3), cache_dir=tmp_path)]  # fmt: skip
    found = [prepared(m, rows) for m in others]
    assert all(not torch.equal(plain, f) for f in found)
    assert torch.allclose(plain, found[1], atol=0.2)
    assert len(list(tmp_path.iterdir())) == 4


def test_damaged_cache_files_are_named(tmp_path: Path) -> None:
    rows = texts(4)
    probe(tmp_path).prepare(rows)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"damaged .*delete the file") as caught:
        probe(tmp_path).prepare(rows)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


def test_texts_as_long_as_the_positions_and_empty_splits_work(tmp_path: Path) -> None:
    m = probe(tmp_path)
    assert prepared(m, texts(3, length=37)).isfinite().all()  # 40 positions: padded to 40, not beyond
    assert prepared(m, texts(3).take([])).shape == (0, tiny.WIDTH + 1)


def test_heads_start_at_zero_and_blocks_are_named(tmp_path: Path) -> None:
    m = probe(tmp_path, n_classes=100)
    assert m.init("lora_A", 0) == {} and m.init("head", 0) == {}
    assert m.blocks["lora_A"] == () and m.projections == ("head",)
    zero = m.init("lora_B", 0)
    batch = {"features": prepared(m, texts(5)), "label": torch.arange(5)}
    assert torch.equal(m.apply(zero, batch).logits, torch.zeros(5, 100))
    assert torch.equal(m.apply({}, batch).logits, torch.zeros(5, 100))
    assert m.per_example_loss(m.apply(zero, batch), batch).allclose(torch.tensor(100.0).log())
    assert m.describe()["blocks"] == {"lora_A": 0, "lora_B": 1700, "router_per_expert": 18, "head": 0}
    with pytest.raises(ValueError, match="call prepare"):
        m.apply(zero, tiny.batch())
    with pytest.raises(KeyError, match="lora_A, lora_B and head only"):
        m.apply({**zero, "other": torch.zeros(1)}, batch)


def test_linear_heads_train_well_on_the_features(tmp_path: Path) -> None:
    """Gradient descent reaches a label rule that is linear in the features."""
    m = probe(tmp_path)
    phi = prepared(m, texts(200))
    label = (phi @ torch.linspace(-1, 1, tiny.WIDTH + 1) > 0).long()
    head = m.init("lora_B", 0)["lora_B.head"].requires_grad_(True)
    for _ in range(200):
        loss = m.per_example_loss(m.apply({"lora_B.head": head}, {"features": phi}), {"label": label}).mean()
        (gradient,) = torch.autograd.grad(loss, head)
        head = (head - 0.5 * gradient).detach().requires_grad_(True)
    accuracy = (m.apply({"lora_B.head": head}, {"features": phi}).logits.argmax(1) == label).float().mean()
    assert accuracy > 0.95


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"
    monkeypatch.delenv("FEDPRISM_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "fedprism"


def test_standardise_gives_unit_variance_and_a_constant() -> None:
    found = standardise(torch.tensor([[1.0, 3.0], [10.0, -10.0]]))
    assert torch.allclose(found, torch.tensor([[-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]), atol=1e-4)


# ---- random Fourier features ---------------------------------------------------------------------


def vectors(n: int, d: int, seed: int = 0) -> Tensor:
    return standardise(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)))[:, :-1]


@pytest.mark.parametrize("scale", [0.7, 1.0, 2.0])
def test_products_of_random_features_are_the_gaussian_kernel(scale: float) -> None:
    d, n_features = 24, 20_000
    x = vectors(30, d)
    x[1] = x[0] + 0.3 * x[2]  # a close pair among far ones
    features = FourierFeatures(d, n_features, scale, seed=5)(x).double().numpy()
    z = x.double().numpy()
    squared = ((z[:, None] - z[None]) ** 2).sum(-1)
    kernel = np.exp(-squared / (2 * scale**2 * d))
    error = features @ features.T / d - kernel
    # 2 cos cos has variance at most 1.5 around its mean; 5 deviations for the 465 different pairs
    assert np.abs(error).max() < 5 * math.sqrt(1.5 / n_features)
    assert np.abs(error).max() > 0.1 / math.sqrt(n_features)


def test_random_features_are_as_large_as_the_vectors_they_replace() -> None:
    x = vectors(400, 48)
    for n_features in (32, 512):
        features = FourierFeatures(48, n_features, 1.0, seed=1)(x)
        assert features.shape == (400, n_features) and features.dtype == torch.float32
        assert float((features**2).sum(1).mean()) == pytest.approx(48, rel=0.1)
        assert float(features.abs().max()) <= math.sqrt(2 * 48 / n_features) + 1e-6


def test_unrelated_vectors_lie_the_stated_distance_apart() -> None:
    z = vectors(60, 400).double()
    distances = torch.pdist(z) / math.sqrt(2 * 400)
    assert distances.min() > 0.85 and distances.max() < 1.15


def test_a_random_feature_is_the_written_formula() -> None:
    drawn = FourierFeatures(5, 3, 2.0, seed=9)
    z = vectors(2, 5)
    for k in range(2):
        for j in range(3):
            inner = sum(float(w) * float(v) for w, v in zip(drawn.weight[j], z[k], strict=True))
            expected = math.sqrt(2 * 5 / 3) * math.cos(inner + float(drawn.phase[j]))
            assert float(drawn(z)[k, j]) == pytest.approx(expected, abs=1e-6)
    assert bool(((drawn.phase >= 0) & (drawn.phase < 2 * math.pi)).all())
    wide = FourierFeatures(5, 3, 4.0, seed=9)
    assert torch.allclose(wide.weight * 2, drawn.weight) and torch.equal(wide.phase, drawn.phase)


def test_directions_are_standard_normal_and_phases_uniform() -> None:
    drawn = FourierFeatures(30, 4000, 0.5, seed=2)
    directions = drawn.weight * 0.5 * math.sqrt(30)  # 120,000 numbers
    assert abs(float(directions.mean())) < 5 / math.sqrt(120_000)
    assert float(directions.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / 120_000))
    assert float(drawn.phase.mean()) == pytest.approx(math.pi, abs=5 * math.pi / math.sqrt(3 * 4000))
    assert float(drawn.phase.var()) == pytest.approx(math.pi**2 / 3, rel=0.1)


def test_a_seed_fixes_the_random_features_and_another_changes_them(tmp_path: Path) -> None:
    rows = texts()
    settings = {"features": "rff", "rff_features": 24, "seed": 4}
    first = prepared(probe(tmp_path, **settings), rows)
    assert torch.equal(prepared(probe(tmp_path, **settings), rows), first)
    other = prepared(probe(tmp_path, **{**settings, "seed": 5}), rows)
    assert float((other - first)[:, :-1].abs().mean()) > 0.1
    assert FourierFeatures(8, 4, 1.0, 4).hash != FourierFeatures(8, 4, 1.0, 5).hash


@pytest.mark.slow
def test_a_seed_gives_the_same_random_features_in_another_process() -> None:
    code = (
        "import json, torch; from fedprism.models.probe import FourierFeatures; torch.manual_seed(77); "
        "f = FourierFeatures(16, 40, 1.5, 12); print(json.dumps([f.hash, f(torch.eye(16)).tolist()]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = FourierFeatures(16, 40, 1.5, 12)
    assert json.loads(run.stdout) == [here.hash, here(torch.eye(16)).tolist()]


def test_the_random_features_of_a_seed_stay_as_they_are() -> None:
    """Numbers of an earlier process, written down: a resumed run must find the features it began with."""
    drawn = FourierFeatures(3, 2, 1.0, seed=0)
    weight = [[-0.3954496644593775, 0.16271415539841697, -0.6335525796340563],
              [0.07198838168744297, -0.13306905968254354, 1.0528293722430297]]  # fmt: skip
    assert drawn.weight.numpy() == pytest.approx(np.array(weight), abs=1e-12)
    assert drawn.phase.tolist() == pytest.approx([1.6966141695461492, 0.15381517864632854], abs=1e-12)


def test_random_features_come_from_the_cached_pooled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = texts()
    pooled = prepared(probe(tmp_path), rows)
    m = probe(tmp_path, features="rff", rff_features=7, rff_scale=1.5, seed=3, n_classes=3)

    def fail(batch: object) -> Tensor:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(m.encoder, "hidden", fail)
    assert torch.equal(m.features(rows), pooled)  # one cache for both kinds
    found = prepared(m, rows)
    assert found.shape == (40, 8)
    assert torch.equal(found[:, -1], torch.ones(40))
    assert torch.equal(found[:, :-1], FourierFeatures(tiny.WIDTH, 7, 1.5, 3)(pooled[:, :-1]))
    assert prepared(m, rows.take([])).shape == (0, 8)
    assert m.init("lora_B", 0)["lora_B.head"].shape == (3, 8)
    assert m.apply(m.init("lora_B", 0), {"features": found}).logits.shape == (40, 3)


def test_the_description_says_which_features_a_probe_has(tmp_path: Path) -> None:
    plain = probe(tmp_path, seed=3).describe()
    assert plain["features"] == "pooled" and "rff" not in plain
    found = probe(tmp_path, features="rff", rff_features=7, rff_scale=1.5, seed=3).describe()
    assert (found["features"], found["blocks"]["lora_B"]) == ("rff", 2 * 8)
    expected = FourierFeatures(tiny.WIDTH, 7, 1.5, 3).hash
    assert found["rff"] == {"n_features": 7, "scale": 1.5, "seed": 3, "sha256": expected}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "fourier"}, "features: got 'fourier', needs one of pooled, rff"),
        ({"features": "rff", "rff_features": 0}, "rff_features: got 0, needs at least 1"),
        ({"features": "rff", "rff_scale": 0.0}, "rff_scale: got 0.0, needs a finite number above 0"),
        ({"features": "rff", "rff_scale": math.inf}, "rff_scale: got inf, needs a finite number above 0"),
    ],
)
def test_features_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe(tmp_path, **settings)


def test_linear_heads_on_random_features_fit_a_rule_that_linear_heads_on_vectors_cannot() -> None:
    z = vectors(400, 4, seed=1)
    label = (z[:, 0] * z[:, 1] > 0).double()  # no linear rule is better than chance
    reached = []
    for phi in (z, FourierFeatures(4, 300, 0.5, 0)(z)):
        phi = torch.cat([phi, torch.ones(400, 1)], 1).double()
        train, test = phi[:300], phi[300:]
        gram = train.T @ train + 1.0 * torch.eye(phi.shape[1], dtype=torch.float64)
        head = torch.linalg.solve(gram, train.T @ (2 * label[:300] - 1))
        reached.append(float(((test @ head > 0) == (label[300:] > 0)).double().mean()))
    assert reached[0] < 0.7 and reached[1] > 0.85
