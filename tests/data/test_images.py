"""Image files: the shipped ones are what the table says, own folders in each form, one clear line for bad
ones."""

from __future__ import annotations

import gzip
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedprism.data.catalogue import ARRAYS, DATASETS, INSTRUCTIONS
from fedprism.data.images import ISIC_CENTERS, decode_residual, load_images
from fedprism.data.sources import TEXT_TASKS, dataset_root

SHIPPED = [source for source in ARRAYS.values() if source.file]
Images = dict[str, NDArray[np.uint8]]


# ---- what ships ----------------------------------------------------------------------------------


def test_catalogue_lists_texts_images_tables_and_instructions() -> None:
    assert set(DATASETS) == set(TEXT_TASKS) | set(ARRAYS) | set(INSTRUCTIONS)
    assert {"fashion_mnist", "cifar10", "cifar100", "dermoscopy", "fed_isic", "heart"} == set(ARRAYS)
    readme = (dataset_root() / "README.md").read_text()
    for source in ARRAYS.values():
        assert source.what and source.licence and source.rows > 0 and f"`{source.name}`" in readme
    assert not DATASETS["dermoscopy"].commercial and not DATASETS["fed_isic"].commercial


@pytest.mark.parametrize("source", SHIPPED, ids=lambda source: source.name)
def test_shipped_file_has_its_size_checksum_and_note(source: Any) -> None:
    path = dataset_root() / source.file
    assert path.stat().st_size == source.bytes
    readme = (dataset_root() / "README.md").read_text()
    assert f"{source.sha256}  {source.file}" in readme and f"{source.bytes:,}" in readme
    note = (dataset_root() / f"{path.stem}.LICENSE.md").read_text()
    assert all(f"## {part}" in note for part in ("Origin", "Licence", "Citation", "Changes", "Caveats"))
    warned = "NON-COMMERCIAL. This file is outside the project's Apache-2.0 licence" in note
    assert warned == (source.name == "dermoscopy") == (not source.commercial)


def test_shipped_fashion_mnist_is_balanced() -> None:
    images = load_images("fashion_mnist")
    assert images.images.shape == (25_000, 28, 28) and images.grey and images.n_classes == 10
    assert np.bincount(images.label[~images.test]).tolist() == [2000] * 10
    assert np.bincount(images.label[images.test]).tolist() == [500] * 10
    trousers, bags = (images.images[images.label == k].mean() for k in (1, 8))
    assert trousers < bags  # trousers are narrow: more black around them


def test_shipped_dermoscopy_has_four_centres() -> None:
    images = load_images("dermoscopy")
    assert images.images.shape == (2207, 28, 28, 3) and not images.grey
    assert images.center is not None
    counts = np.stack([np.bincount(images.center[images.test == side]) for side in (False, True)])
    assert dict(zip(images.center_names, counts.T.tolist(), strict=True)) == {
        "rosendahl": [649, 173],
        "vidir_modern": [554, 114],
        "vidir_molemax": [378, 107],
        "vienna_dias": [199, 33],
    }
    assert images.class_names == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    red, green, blue = images.images.reshape(-1, 3).mean(0)
    assert red > green and red > blue  # skin


def test_changed_shipped_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: Images
) -> None:
    assert len(load_images("fashion_mnist", tmp_path)) == 600  # one's own folder is not checked
    monkeypatch.setenv("FEDPRISM_DATASETS", str(tmp_path))
    with pytest.raises(ValueError, match=r"fashion_mnist.npz has SHA-256 .*shipped file has 091f44c3266f"):
        load_images("fashion_mnist")
    with pytest.raises(FileNotFoundError, match=r"no dermoscopy_ham10000.npz in .*; restore it, or set"):
        load_images("dermoscopy")


# ---- forms of files ------------------------------------------------------------------------------


def test_residuals_by_hand() -> None:
    # G = [[10, 20], [30, 45]]; R - G is -10 and B - G is 5 everywhere.
    residual = np.array([[[[10, 10], [20, 5]]], [[[246, 0], [0, 0]]], [[[5, 0], [0, 0]]]], dtype=np.uint8)
    (image,) = decode_residual(residual)
    assert image[..., 0].tolist() == [[0, 10], [20, 35]]
    assert image[..., 1].tolist() == [[10, 20], [30, 45]]
    assert image[..., 2].tolist() == [[15, 25], [35, 50]]


def test_residuals_give_every_pixel_back(encode: Callable[..., NDArray[np.uint8]]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 7, 6, 3), dtype=np.uint8)
    assert np.array_equal(decode_residual(encode(images)), images)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = struct.pack(">4B", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = header + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_original_fashion_files_give_the_same_as_the_npz(tmp_path: Path, images: Images, end: str) -> None:
    whole = load_images("fashion_mnist", tmp_path)
    assert np.array_equal(whole.images, np.concatenate([images["x_train"], images["x_test"]]))
    assert whole.test.tolist() == [False] * 420 + [True] * 180
    (tmp_path / "fashion_mnist.npz").unlink()
    for part, stem in (("train", "train"), ("test", "t10k")):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte{end}", images[f"x_{part}"])
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte{end}", images[f"y_{part}"])
    again = load_images("fashion_mnist", tmp_path)
    assert np.array_equal(again.images, whole.images) and np.array_equal(again.label, whole.label)


def write_binary(path: Path, images: NDArray[np.uint8], *labels: NDArray[np.uint8]) -> None:
    """CIFAR's binary version: label bytes, then the red, green and blue plane, row by row."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    path.write_bytes(np.concatenate([np.stack(labels, axis=1), planes], axis=1).astype(np.uint8).tobytes())


def test_cifar10_from_its_binary_version_and_from_residuals(
    tmp_path: Path, encode: Callable[..., NDArray[np.uint8]]
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    label = (np.arange(30) % 10).astype(np.uint8)
    files = (("data_batch_1.bin", 0, 10), ("data_batch_2.bin", 10, 20), ("test_batch.bin", 20, 30))
    binary = tmp_path / "cifar-10-batches-bin"
    binary.mkdir()
    for name, a, b in files:
        write_binary(binary / name, images[a:b], label[a:b])
    for name, a, b in (("train0", 0, 10), ("train1", 10, 20), ("test", 20, 30)):
        np.savez(tmp_path / f"cifar10_{name}.npz", residual=encode(images[a:b]), y=label[a:b])
    for folder in (binary, tmp_path):  # the second holds both forms, and reads the residuals
        read = load_images("cifar10", folder)
        assert np.array_equal(read.images, images) and np.array_equal(read.label, label)
        assert read.test.tolist() == [False] * 20 + [True] * 10
    for path in tmp_path.glob("*.npz"):
        path.unlink()
    assert np.array_equal(
        load_images("cifar10", tmp_path).images, images
    )  # the folder above the unpacked one


def test_cifar100_has_superclasses_as_labels_and_keeps_the_fine_ones(
    tmp_path: Path, cifar100: Images
) -> None:
    read = load_images("cifar100", tmp_path)
    fine = np.concatenate([cifar100["fine_train"], cifar100["fine_test"]])
    assert read.n_classes == 20 and read.fine is not None and read.fine_names[99] == "fine 99"
    assert np.array_equal(read.fine, fine) and np.array_equal(read.label, fine % 20)
    binary = tmp_path / "own" / "cifar-100-binary"
    binary.mkdir(parents=True)
    for part in ("train", "test"):
        write_binary(
            binary / f"{part}.bin",
            cifar100[f"x_{part}"],
            cifar100[f"fine_{part}"] % 20,
            cifar100[f"fine_{part}"],
        )
    again = load_images("cifar100", tmp_path / "own")
    assert np.array_equal(again.images, read.images) and np.array_equal(again.label, read.label)
    assert again.fine is not None and np.array_equal(again.fine, read.fine)
    assert again.fine_names[7] == "7"


# ---- Fed-ISIC2019 --------------------------------------------------------------------------------

HEADER = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"


def isic_row(name: str, target: int, center: int, fold: str) -> str:
    one_hot = ",".join("1.0" if k == target else "0.0" for k in range(9))
    return f"{name},{one_hot},{target},{center},{fold},{fold}_{center}"


@pytest.fixture
def isic(tmp_path: Path) -> Path:
    """FLamby's layout: per centre three training images and a test image, 60x40 or 40x60, a red square
    between blue ends; class = centre."""
    from PIL import Image

    folder = tmp_path / "isic"
    inputs = folder / "ISIC_2019_Training_Input_preprocessed"
    inputs.mkdir(parents=True)
    lines = [HEADER]
    for center in range(6):
        for k in range(4):
            name = f"ISIC_{center:03d}{k}" + ("_downsampled" if center == 4 else "")
            pixels = np.zeros((40, 60, 3), dtype=np.uint8)
            pixels[..., 2] = 255
            pixels[:, 10:50] = (255, 0, 0)
            picture = Image.fromarray(pixels if k % 2 else pixels.transpose(1, 0, 2))
            picture.save(inputs / f"{name}.jpg", quality=95, subsampling=0)
            lines.append(isic_row(name, center, center, "test" if k == 3 else "train"))
    (folder / "train_test_split").write_text("\n".join(lines) + "\n")
    return folder


def test_flamby_folder_gives_centred_squares_with_centre_and_fold(isic: Path) -> None:
    read = load_images("fed_isic", isic, size=16)
    assert read.images.shape == (24, 16, 16, 3) and read.n_classes == 8
    assert read.center is not None and np.bincount(read.center).tolist() == [4] * 6
    assert np.array_equal(read.label, read.center) and read.center_names == ISIC_CENTERS
    assert read.test.tolist() == [False, False, False, True] * 6
    red, green, blue = (read.images[:, 2:-2, 2:-2, k] for k in range(3))  # JPEG blurs the border
    assert red.min() > 245 and green.max() < 10 and blue.max() < 10


def test_flamby_folder_without_pillow_says_what_to_install(
    isic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs the package pillow; install it: pip install pillow$"):
        load_images("fed_isic", isic)


def replaced(old: str, new: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        table = folder / "train_test_split"
        text = table.read_text()
        assert old in text
        table.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (replaced(",center,", ",centre,"), "train_test_split lacks the columns center; needs image, target"),
        (replaced(",0,0,train", ",x,0,train"), r"row 0 \(the first is 0\) has the target 'x', needs a whole"),
        (replaced(",0,0,train", ",0,-1,train"), "has the center '-1', needs a whole number >= 0"),
        (replaced(",0,0,train", ",0,0,dev"), "has the fold 'dev', needs train or test"),
        (replaced(",0,0,train", ",8,0,train"), "fed_isic has the label 8, needs 0..7"),
        (replaced(",0,0,train", ",0,6,train"), "fed_isic has the centre 6, needs 0..5"),
        (
            lambda folder: (folder / "ISIC_2019_Training_Input_preprocessed" / "ISIC_0010.jpg").unlink(),
            "1 of 24 images are missing, the first is ISIC_0010.jpg in",
        ),
        (
            lambda folder: (folder / "ISIC_2019_Training_Input_preprocessed" / "ISIC_0010.jpg").write_bytes(
                b"x"
            ),
            "ISIC_0010.jpg is no readable picture",
        ),
        (lambda folder: (folder / "train_test_split").unlink(), "no fed_isic in .*; needs the table"),
        (lambda folder: (folder / "train_test_split").write_text(HEADER), "fed_isic has no images"),
    ],
)
def test_bad_flamby_folder_gets_one_clear_line(
    isic: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(isic)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load_images("fed_isic", isic, size=8)
    assert "\n" not in str(caught.value)


# ---- bad files -----------------------------------------------------------------------------------


def test_unknown_names_and_missing_folders(tmp_path: Path) -> None:
    for name, root, message in (
        ("mnist", None, "'mnist' is no image data set, needs one of fashion_mnist, cifar10"),
        (
            "cifar10",
            None,
            "cifar10 does not ship with fedprism; set data.root to the folder with cifar10_train",
        ),
        ("cifar10", tmp_path / "gone", "folder .*gone does not exist; correct data.root"),
        ("fashion_mnist", tmp_path, "no fashion_mnist in .*; needs fashion_mnist.npz, or train-images"),
        ("cifar10", tmp_path, "no cifar10 in .*; needs cifar10_train.*binary version"),
        ("cifar100", tmp_path, "no cifar100 in .*; needs cifar100_train.npz"),
        ("dermoscopy", tmp_path, "no dermoscopy in .*; needs dermoscopy_ham10000.npz"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            load_images(name, root)
        assert "\n" not in str(caught.value)


GOOD: dict[str, Any] = {
    "x_train": np.zeros((4, 28, 28), dtype=np.uint8),
    "y_train": np.arange(4),
    "x_test": np.zeros((2, 28, 28), dtype=np.uint8),
    "y_test": np.arange(2),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"y_train": None}, r"fashion_mnist.npz cannot be read \(it lacks y_train\), needs an npz file with"),
        ({"y_train": np.array([None] * 4, dtype=object)}, "cannot be read .*allow_pickle=False.*no objects"),
        ({"y_train": np.arange(3)}, "has 6 images and 5 entries of label, needs one each"),
        ({"y_train": np.array([0, 1, 2, 10])}, "has the label 10, needs 0..9; correct or drop the row"),
        ({"y_train": np.array([0, 1, 2, -3])}, "has the label -3, needs 0..9"),
        ({"x_test": np.zeros((2, 32, 32), dtype=np.uint8)}, "train images of shape .*, needs one size"),
        ({"x_train": np.zeros((4, 28, 28)), "x_test": np.zeros((2, 28, 28))}, "type float64, needs"),
        ({name: value[:0] for name, value in GOOD.items()}, "fashion_mnist has no images"),
    ],
)
def test_bad_npz_gets_one_clear_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        load_images("fashion_mnist", tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_are_cut_short(tmp_path: Path, images: Images) -> None:
    path = tmp_path / "fashion_mnist.npz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"fashion_mnist.npz cannot be read"):
        load_images("fashion_mnist", tmp_path)
    path.unlink()
    np.save(tmp_path / "array.npy", np.zeros(3))
    shutil.move(tmp_path / "array.npy", path)
    with pytest.raises(ValueError, match=r"fashion_mnist.npz cannot be read"):
        load_images("fashion_mnist", tmp_path)
    path.unlink()
    for part, stem in (("train", "train"), ("test", "t10k")):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte", images[f"x_{part}"])
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", images[f"y_{part}"])
    short = tmp_path / "train-images-idx3-ubyte"
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte is no idx file of bytes with 3 axes"):
        load_images("fashion_mnist", tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * 3072)
    (tmp_path / "test_batch.bin").write_bytes(b"\0" * 3073)
    with pytest.raises(ValueError, match=r"data_batch_1.bin has 3072 bytes, needs a multiple of 3073"):
        load_images("cifar10", tmp_path)
    with pytest.raises(ValueError, match=r"residuals of shape \(2, 3, 3\) .*, needs"):
        decode_residual(np.zeros((2, 3, 3), dtype=np.uint8))
