"""Federations of images and hospitals: complete partitions, shifts and permutations, fingerprints,
refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedprism.data.image_federation import (
    ArrayFederation,
    build_image_federation,
    build_natural_federation,
    preview,
)
from fedprism.data.images import load_images

Images = dict[str, NDArray[np.uint8]]
SETTINGS: dict[str, Any] = {
    "dataset": "fashion_mnist",
    "clients": 4,
    "min_examples": 40,
    "size": 28,
    "seed": 3,
}


@pytest.fixture
def build(tmp_path: Path, images: Images) -> Callable[..., ArrayFederation]:
    """Builds over 600 random 28x28 images whose label is the row in its part modulo 10."""

    def build_with(**changes: Any) -> ArrayFederation:
        return build_image_federation(**{"root": tmp_path, **SETTINGS, **changes})

    return build_with


def ids(federation: ArrayFederation, *splits: str) -> list[list[int]]:
    return [
        [int(row) for split in splits for row in client[split].columns["row"]]
        for client in federation.clients
    ]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def original_labels() -> torch.Tensor:
    """Of the 420 training and 180 test images that the fixture writes."""
    return torch.cat([torch.arange(420) % 10, torch.arange(180) % 10])


# ---- who gets what -------------------------------------------------------------------------------


def test_clients_share_all_images_and_no_image_twice(build: Callable[..., ArrayFederation]) -> None:
    federation = build(validation_fraction=0.2)
    assert sorted(flat(ids(federation, "train", "validation", "test"))) == list(range(600))
    assert federation.n_classes == 10 and federation.tasks == ("fashion_mnist",)
    for i, client in enumerate(federation.clients):
        total = sum(len(rows) for rows in client.values())
        # 30 % to test, then 20 % of the others to validate
        assert len(client["test"]) == round(0.3 * total)
        assert len(client["validation"]) == round(0.2 * (total - len(client["test"])))
        for rows in client.values():
            assert (rows.columns["client"] == i).all() and (rows.columns["task"] == 0).all()
            assert torch.equal(rows.columns["row"], rows.columns["row"].sort().values)
    assert [len(client["validation"]) for client in build().clients] == [0] * 4


def test_components_have_the_sizes_that_were_drawn(build: Callable[..., ArrayFederation]) -> None:
    federation = build()
    for i, client in enumerate(federation.clients):
        component = torch.cat([rows.columns["component"] for rows in client.values()])
        sampled, realised = (federation.mixtures[name][i] for name in ("sampled", "realised"))
        assert sampled.sum() == pytest.approx(1)
        assert (component == 1).float().mean().item() == pytest.approx(realised[1])
        assert abs(realised[1] - sampled[1]) <= 0.5 / len(component) + 1e-9
    assert federation.cell_counts.sum() == 600
    assert federation.cell_counts.sum((1, 2)).tolist() == [
        len(rows) for rows in ids(federation, "train", "test")
    ]


def test_both_components_stand_in_training_and_test(build: Callable[..., ArrayFederation]) -> None:
    for client in build(alpha_intra=100.0).clients:  # about half and half
        for split in ("train", "test"):
            share = client[split].columns["component"].float().mean()
            assert 0.3 < share < 0.7  # standard deviation about 0.06 for some 70 test rows


def test_a_large_concentration_deals_every_class_evenly(build: Callable[..., ArrayFederation]) -> None:
    federation = build(alpha_inter=1e6, permute=False)
    assert (np.abs(federation.cell_counts.sum(1) - 15) <= 1).all()  # 60 images of a class over 4 clients


def test_fine_classes_can_be_dealt_in_place_of_superclasses(tmp_path: Path, cifar100: Images) -> None:
    settings: dict[str, Any] = {
        "dataset": "cifar100", "root": tmp_path, "clients": 2, "min_examples": 4, "seed": 0, "permute": False,
        "alpha_inter": 1e6,
    }  # fmt: skip
    coarse, fine = (build_image_federation(partition_on=on, **settings) for on in ("label", "fine"))
    assert coarse.n_classes == fine.n_classes == 20
    # Three images of each fine class, so dealing fine classes gives each client 1 or 2 of each: 5 to 10 of
    # the 15 of a superclass, while dealing superclasses gives 7 or 8.
    assert (np.abs(coarse.cell_counts.sum(1) - 7.5) <= 0.5).all()
    held = fine.cell_counts.sum(1)
    assert held.min() >= 5 and held.max() <= 10
    fine_labels = np.concatenate([cifar100["fine_train"], cifar100["fine_test"]])
    for rows in ids(fine, "train", "test"):
        counts = np.bincount(fine_labels[rows], minlength=100)
        assert counts.min() >= 1 and counts.max() <= 2


def test_a_subset_of_the_images_is_drawn_from_all_of_them(build: Callable[..., ArrayFederation]) -> None:
    rows = flat(ids(build(examples=240, min_examples=10), "train", "test"))
    assert len(set(rows)) == len(rows) == 240
    assert 40 < sum(row >= 420 for row in rows) < 105  # 72 expected of the original test part, deviation 5.5
    assert build(examples=600).fingerprint == build().fingerprint


# ---- shifts --------------------------------------------------------------------------------------


def test_labels_are_permuted_alike_in_training_and_test(build: Callable[..., ArrayFederation]) -> None:
    federation = build(validation_fraction=0.1)
    original = original_labels()
    assert federation.permutations.shape == (4, 2, 10)
    assert len({str(p.tolist()) for p in federation.permutations.reshape(8, 10)}) == 8
    for i, client in enumerate(federation.clients):
        for rows in client.values():
            at, component = rows.columns["row"].tolist(), rows.columns["component"].tolist()
            expected = [
                int(federation.permutations[i, c, original[k]]) for k, c in zip(at, component, strict=True)
            ]
            assert rows.columns["label"].tolist() == expected
    plain = build(permute=False)
    for client in plain.clients:
        for rows in client.values():
            assert torch.equal(rows.columns["label"], original[rows.columns["row"]])


def test_pixels_are_inverted_tinted_and_lit(build: Callable[..., ArrayFederation], images: Images) -> None:
    pool = np.concatenate([images["x_train"], images["x_test"]]) / 255
    line = np.linspace(1, -1, 28)
    for i, client in enumerate(build().clients):
        gains = np.array([1, 0.825, 0.65])[:: -1 if i & 1 else 1]
        down, across = line * (-1 if i & 2 else 1), line * (-1 if i & 4 else 1)
        light = 0.25 * (down[:, None] + across[None, :])
        for rows in (client["train"], client["test"]):
            x = pool[rows.columns["row"].numpy()]
            inverted = np.where(rows.columns["component"].numpy()[:, None, None] == 1, 1 - x, x)
            expected = np.clip(inverted[:, None] * gains[:, None, None] + light, 0, 1)
            assert np.abs(rows.x().numpy() - (2 * expected - 1)).max() <= 1 / 255 + 1e-6  # one rounding


def test_half_precision_storage_differs_by_a_rounding(build: Callable[..., ArrayFederation]) -> None:
    half, whole = build(stored="float16"), build()
    for a, b in zip(half.clients, whole.clients, strict=True):
        assert torch.equal(a["train"].columns["row"], b["train"].columns["row"])
        assert a["train"].inputs.dtype == torch.float16
        assert (a["train"].x() - b["train"].x()).abs().max() < 1.5 / 255
    assert half.fingerprint != whole.fingerprint


def test_shifts_can_be_switched_off(build: Callable[..., ArrayFederation], images: Images) -> None:
    pool = np.concatenate([images["x_train"], images["x_test"]])
    plain = build(invert=False, tint=0.0, ramp=0.0)
    for client in plain.clients:
        for rows in client.values():
            for channel in range(3):
                assert np.array_equal(rows.inputs[:, channel].numpy(), pool[rows.columns["row"].numpy()])
    assert len(build(clients=9, tint=0.0, ramp=0.0, min_examples=10).clients) == 9


@pytest.mark.parametrize("size", [14, 16, 28, 32])
def test_images_come_in_the_size_that_was_asked_for(build: Callable[..., ArrayFederation], size: int) -> None:
    (batch,) = build(size=size).clients[0]["train"].select([0, 1]).batches(2)
    assert batch["x"].shape == (2, 3, size, size)


# ---- the same everywhere -------------------------------------------------------------------------


def test_equal_settings_give_equal_fingerprints_in_every_process(
    build: Callable[..., ArrayFederation], tmp_path: Path
) -> None:
    program = (
        "import json, sys; from fedprism.data import build_image_federation\n"
        "f = build_image_federation(root=sys.argv[1], **json.loads(sys.argv[2]))\n"
        "print(f.fingerprint)"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), json.dumps(SETTINGS)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == build().fingerprint == build(min_examples=5).fingerprint


def test_fingerprint_follows_every_setting_and_every_pixel_and_label(
    build: Callable[..., ArrayFederation], tmp_path: Path, images: Images
) -> None:
    first = build().fingerprint
    changes: list[dict[str, Any]] = [
        {"seed": 4}, {"clients": 3}, {"alpha_inter": 1.1}, {"alpha_intra": 1.5}, {"examples": 590},
        {"train_fraction": 0.6}, {"validation_fraction": 0.1}, {"size": 14}, {"invert": False},
        {"permute": False}, {"tint": 0.3}, {"ramp": 0.2}, {"stored": "float16"},
    ]  # fmt: skip
    prints = {build(**change).fingerprint for change in changes}
    assert len(prints) == len(changes) and first not in prints
    bare = {"tint": 0.0, "ramp": 0.0}
    plain = build(**bare).fingerprint
    pixel = {name: value.copy() for name, value in images.items()}
    pixel["x_train"][17, 3, 4] ^= 1
    np.savez(tmp_path / "fashion_mnist.npz", **pixel)
    changed = build(**bare).fingerprint
    label = {name: value.copy() for name, value in images.items()}
    label["y_train"][17] = 8
    np.savez(tmp_path / "fashion_mnist.npz", **label)
    assert len({plain, changed, build(**bare).fingerprint}) == 3


def test_describe_is_json_and_agrees_with_the_rows(build: Callable[..., ArrayFederation]) -> None:
    federation = build()
    facts = json.loads(json.dumps(federation.describe()))
    assert facts["fingerprint"] == federation.fingerprint and facts["n_classes"] == 10
    assert [size["train"] for size in facts["client_sizes"]] == [n for (n,) in facts["counts"]]
    assert np.sum(facts["components"]) == 600 and facts["public_sizes"] == {} and facts["notes"] == []
    assert len(federation.pooled["train"]) == sum(n for (n,) in facts["counts"])
    assert federation.counts.shape == (4, 1) and dict(federation.public) == {}


def test_preview_shows_training_images_of_each_cell(build: Callable[..., ArrayFederation]) -> None:
    federation = build(alpha_intra=50.0)  # no small cells
    shown = preview(federation, 5)
    assert shown.images.shape == (4, 2, 5, 28, 28, 3) and shown.label_counts.shape == (4, 2, 10)
    assert shown.component_counts.tolist() == federation.describe()["components"]
    for i, client in enumerate(federation.clients):
        train = client["train"]
        for c in range(2):
            for k in range(5):
                (at,) = torch.nonzero(train.columns["row"] == int(shown.rows[i, c, k])).flatten().tolist()
                assert train.columns["component"][at] == c
                assert train.columns["label"][at] == int(shown.labels[i, c, k])
                assert np.array_equal(train.inputs[at].permute(1, 2, 0).numpy(), shown.images[i, c, k])
            assert len(set(shown.labels[i, c])) >= 4  # one label after another
    with pytest.raises(ValueError, match="got 0 examples"):
        preview(federation, 0)


def test_preview_leaves_gaps_where_a_cell_is_small(build: Callable[..., ArrayFederation]) -> None:
    federation = build(examples=60, min_examples=4, clients=2)
    shown = preview(federation, 40)
    for i, client in enumerate(federation.clients):
        n = torch.bincount(client["train"].columns["component"], minlength=2)
        for c in range(2):
            assert (shown.rows[i, c] >= 0).sum() == min(40, int(n[c]))
            assert not shown.images[i, c, int(n[c]) :].any() and (shown.labels[i, c, int(n[c]) :] == -1).all()


# ---- natural clients -----------------------------------------------------------------------------


def test_dermoscopy_has_its_centres_as_clients() -> None:
    federation = build_natural_federation(dataset="dermoscopy", validation_fraction=0.1, size=28, seed=0)
    assert federation.client_names == ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    sizes = [(len(c["train"]) + len(c["validation"]), len(c["test"])) for c in federation.clients]
    assert sizes == [(649, 173), (554, 114), (378, 107), (199, 33)]
    assert [len(c["validation"]) for c in federation.clients] == [65, 55, 38, 20]
    images = load_images("dermoscopy")
    rows = federation.clients[2]["test"]
    at = rows.columns["row"].numpy()
    assert (rows.columns["component"] == -1).all() and images.test[at].all()
    assert np.array_equal(rows.columns["label"].numpy(), images.label[at])
    assert np.array_equal(rows.inputs.permute(0, 2, 3, 1).numpy(), images.images[at])
    assert federation.cell_counts.shape == (4, 1, 7) and federation.cell_counts.sum() == 2207
    assert preview(federation, 3).images.shape == (4, 1, 3, 28, 28, 3)


def test_heart_has_four_hospitals_and_says_when_a_test_row_shows_its_owner() -> None:
    federation = build_natural_federation(dataset="heart", seed=0)
    assert federation.client_names == ("cleveland", "hungarian", "switzerland", "va")
    assert [len(c["train"]) for c in federation.clients] == [202, 196, 83, 133]
    (batch,) = federation.clients[2]["test"].batches(100)
    assert batch["x"].shape == (40, 23) and batch["x"].dtype == torch.float32
    assert "for routing set data.imputation and data.statistics to 'federated'" in federation.notes[0]
    assert build_natural_federation(dataset="heart", imputation="federated", seed=0).notes == ()
    with pytest.raises(ValueError, match="heart is a table, needs images"):
        preview(federation)


def test_validation_rows_have_no_part_in_the_heart_numbers() -> None:
    federation = build_natural_federation(dataset="heart", validation_fraction=0.25, seed=0)
    pooled = federation.pooled["train"].x()[:, :13]
    assert pooled.mean(0).abs().max() < 1e-5 and (pooled.std(0, correction=0) - 1).abs().max() < 1e-5
    assert len(pooled) == sum(n - round(n / 4) for n in (202, 196, 83, 133))


def test_flamby_centres_are_clients(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "ISIC_2019_Training_Input").mkdir()
    lines = ["image,target,center,fold"]
    for k in range(24):
        Image.new("RGB", (20, 16), (10 * k, 0, 0)).save(tmp_path / "ISIC_2019_Training_Input" / f"a{k}.jpg")
        lines.append(f"a{k},{k % 8},{k % 6},{'test' if k >= 18 else 'train'}")
    (tmp_path / "train_test_split").write_text("\n".join(lines))
    federation = build_natural_federation(dataset="fed_isic", root=tmp_path, size=32, seed=0)
    assert ids(federation, "train") == [[i, i + 6, i + 12] for i in range(6)]
    assert ids(federation, "test") == [[i + 18] for i in range(6)]
    assert federation.n_classes == 8 and federation.clients[0]["train"].inputs.shape == (3, 3, 32, 32)
    (tmp_path / "train_test_split").write_text("\n".join(lines[:19]))
    with pytest.raises(ValueError, match="centre bcn of fed_isic has 3 training and 0 test rows"):
        build_natural_federation(dataset="fed_isic", root=tmp_path, seed=0)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"alpha_inter": 0.01, "min_examples": 140},
            r"client \d got \d+ examples in the last of 100 draws, needs 140 \(alpha_inter=0.01, 4 clients, "
            r"600 examples\); raise data.alpha_inter or lower data.min_examples or data.clients",
        ),
        (
            {"clients": 9},
            "got 9 clients, the client shift tells 8 apart; lower data.clients, or set data.tint",
        ),
        ({"clients": 0}, "clients is 0, must be >= 1"),
        ({"alpha_inter": 0}, "alpha_inter is 0, must be > 0 and finite"),
        ({"alpha_intra": -1.0}, "alpha_intra is -1.0, must be > 0"),
        ({"alpha_inter": float("nan")}, "alpha_inter is nan"),
        ({"min_examples": 3}, "min_examples is 3, must be >= 4"),
        ({"examples": 0}, "examples is 0, must be >= 1"),
        ({"train_fraction": 1.0}, "train_fraction is 1.0, must be > 0 and < 1"),
        ({"train_fraction": 0.999}, r"client \d has \d+ rows and none for test, needs at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0, must be >= 0 and < 1"),
        ({"partition_on": "fine"}, "fashion_mnist has no fine labels, partition_on='fine' needs cifar100"),
        ({"partition_on": "class"}, "partition_on is 'class', needs one of label, fine"),
        ({"size": 20}, "size is 20, must divide 28"),
        ({"size": 0}, "size is 0, must be >= 1"),
        ({"tint": 2.0}, "tint is 2.0, must be >= 0 and <= 1"),
        ({"stored": "int8"}, "stored as 'int8'"),
        ({"seed": -1}, "seed is -1, must be >= 0"),
        ({"dataset": "heart"}, "'heart' is no image data set, needs one of fashion_mnist"),
    ],
)
def test_bad_settings_get_one_clear_line(
    build: Callable[..., ArrayFederation], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


def test_data_sets_without_centres_are_no_natural_federation() -> None:
    with pytest.raises(
        ValueError, match="'cifar10' has no centres, needs one of dermoscopy, fed_isic, heart"
    ):
        build_natural_federation(dataset="cifar10", seed=0)
    with pytest.raises(ValueError, match="statistics is 'mine', needs one of federated, local"):
        build_natural_federation(dataset="heart", statistics="mine", seed=0)
