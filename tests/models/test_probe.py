"""Linear heads on cached features: numbers by hand, cache hits, features that depend on their text alone."""

from __future__ import annotations

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
from fedprism.models.probe import ProbeModel, default_cache_dir, standardise


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
