"""Read image data sets into arrays: Fashion-MNIST, CIFAR-10/100, dermoscopy by centre, Fed-ISIC2019.

Fashion-MNIST and the dermoscopy subset ship with fedprism. A user's own folder may hold the same npz files,
or the data sets as their authors publish them in forms that need no pickle: Fashion-MNIST's idx files,
CIFAR's binary version, FLamby's folder of Fed-ISIC2019. Everything that is read is checked here.

*Fed-ISIC2019.* FLamby keeps the aspect ratio, so its images are of unequal shape; here each is cut to its
centred square and scaled to one size.
"""

from __future__ import annotations

import csv
import gzip
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprism.data.catalogue import ARRAYS
from fedprism.data.sources import dataset_root, verify_checksum

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

CIFAR_SIDE = 32
ISIC_CENTERS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")  # FLamby's 0..5
ISIC_FOLDERS = (
    "ISIC_2019_Training_Input_preprocessed",
    "ISIC_2019_Training_Input",
)  # the first that is there
ISIC_TABLES = ("train_test_split", "train_test_split.csv")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One image data set as read, checked: n images, the original train part before the test part where
    there is no centre.

    name. images: (n, height, width) grey or (n, height, width, 3) RGB, uint8. label: (n,) int64 in 0..K-1.
    test: (n,) bool, whether a row belongs to the original test part. class_names: K. fine: (n,) int64 finer
    classes, or None. fine_names: names of those. center: (n,) int64 who took the image, or None.
    center_names."""

    name: str
    images: Bytes
    label: Ints
    test: NDArray[np.bool_]
    class_names: tuple[str, ...]
    fine: Ints | None = None
    fine_names: tuple[str, ...] = ()
    center: Ints | None = None
    center_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, shape = len(self.images), self.images.shape
        if self.images.dtype != np.uint8 or not (len(shape) == 3 or (len(shape) == 4 and shape[3] == 3)):
            raise ValueError(
                f"data: {self.name} has images of shape {shape} and type {self.images.dtype}, needs "
                "(n, height, width) or (n, height, width, 3) in uint8; convert them"
            )
        if n == 0:
            raise ValueError(f"data: {self.name} has no images; fill its files or choose another data set")
        columns: list[tuple[str, NDArray[Any] | None, int]] = [
            ("label", self.label, len(self.class_names)),
            ("test", self.test, 2),
            ("fine label", self.fine, len(self.fine_names)),
            ("centre", self.center, len(self.center_names)),
        ]
        for what, values, bound in columns:
            if values is None:
                continue
            if values.shape != (n,):
                raise ValueError(
                    f"data: {self.name} has {n} images and {values.size} entries of {what}, needs one each; "
                    "replace the files"
                )
            if values.min() < 0 or values.max() >= bound:
                worst = values.min() if values.min() < 0 else values.max()
                raise ValueError(
                    f"data: {self.name} has the {what} {worst}, needs 0..{bound - 1}; correct or drop the row"
                )

    def __len__(self) -> int:
        return len(self.label)

    @property
    def grey(self) -> bool:
        """Whether the images have one channel."""
        return self.images.ndim == 3

    @property
    def n_classes(self) -> int:
        """K."""
        return len(self.class_names)


def load_images(name: str, root: str | Path | None = None, *, size: int = 32) -> LabelledImages:
    """Read and check one image data set.

    name: fashion_mnist, cifar10, cifar100 (labels: the 20 superclasses), dermoscopy or fed_isic. root:
    folder with the user's files; None or "" for the shipped ones, whose checksums are verified. size: side
    in pixels of fed_isic's images; others come as they are. Raises FileNotFoundError for missing files,
    ValueError for an unknown name, a wrong checksum, or content that does not fit."""
    if name not in LOADERS:
        raise ValueError(
            f"data: '{name}' is no image data set, needs one of {', '.join(LOADERS)}; correct data.dataset"
        )
    own = root is not None and str(root) != ""
    source = ARRAYS[name]
    if own:
        folder = Path(str(root)).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"data: folder {folder} does not exist; correct data.root")
    elif source.file:
        folder = dataset_root()
        if not (folder / source.file).is_file():
            raise FileNotFoundError(
                f"data: no {source.file} in {folder}; restore it, or set data.root to files of your own"
            )
        verify_checksum(folder / source.file, source.sha256)
    else:
        raise FileNotFoundError(
            f"data: {name} does not ship with fedprism; set data.root to the folder with {_FORMS[name]}"
        )
    return LOADERS[name](folder, size)


def _fashion_mnist(folder: Path, size: int) -> LabelledImages:
    path = folder / ARRAYS["fashion_mnist"].file
    if path.is_file():
        z = _npz(path, ("x_train", "y_train", "x_test", "y_test"))
        parts = [(z["x_train"], z["y_train"]), (z["x_test"], z["y_test"])]
    else:
        parts = []
        for part in ("train", "t10k"):
            found = [_one_of(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
            if found[0] is None or found[1] is None:
                raise _missing("fashion_mnist", folder)
            parts.append((_idx(found[0], 3), _idx(found[1], 1)))
    return _pooled("fashion_mnist", parts)


def _cifar10(folder: Path, size: int) -> LabelledImages:
    trains, test = sorted(folder.glob("cifar10_train*.npz")), folder / "cifar10_test.npz"
    if trains and test.is_file():
        read = [_npz(path, ("residual", "y")) for path in (*trains, test)]
        images = [decode_residual(z["residual"]) for z in read]
        labels = [z["y"] for z in read]
        return _pooled("cifar10", _train_and_test(images, labels))
    binary = _subfolder(folder, "cifar-10-batches-bin")
    trains, test = sorted(binary.glob("data_batch_*.bin")), binary / "test_batch.bin"
    if not trains or not test.is_file():
        raise _missing("cifar10", folder)
    read_binary = [_cifar_binary(path, 1) for path in (*trains, test)]
    return _pooled("cifar10", _train_and_test([x for x, _ in read_binary], [y[:, 0] for _, y in read_binary]))


def _cifar100(folder: Path, size: int) -> LabelledImages:
    paths = [folder / f"cifar100_{part}.npz" for part in ("train", "test")]
    if all(path.is_file() for path in paths):
        read = [_npz(path, ("residual", "y", "fine_to_coarse", "class_names")) for path in paths]
        images = [decode_residual(z["residual"]) for z in read]
        fine = [z["y"].astype(np.int64) for z in read]
        names = tuple(str(name) for name in read[0]["class_names"])
        for path, z, y in zip(paths, read, fine, strict=True):
            if z["fine_to_coarse"].shape != (len(names),) or y.max(initial=0) >= len(names):
                raise ValueError(
                    f"data: {path.name} has fine labels up to {y.max(initial=0)} and a map of "
                    f"{z['fine_to_coarse'].size}, needs {len(names)} classes in both; replace the file"
                )
        coarse = [z["fine_to_coarse"][y] for z, y in zip(read, fine, strict=True)]
    else:
        binary = _subfolder(folder, "cifar-100-binary")
        paths = [binary / f"{part}.bin" for part in ("train", "test")]
        if not all(path.is_file() for path in paths):
            raise _missing("cifar100", folder)
        read_binary = [_cifar_binary(path, 2) for path in paths]
        images = [x for x, _ in read_binary]
        coarse, fine = ([y[:, k].astype(np.int64) for _, y in read_binary] for k in (0, 1))
        listed = binary / "fine_label_names.txt"
        names = tuple(listed.read_text(encoding="utf-8").split()) if listed.is_file() else ()
        names = names or tuple(str(k) for k in range(100))
    parts = [(x, y) for x, y in zip(images, coarse, strict=True)]
    return _pooled("cifar100", parts, fine=np.concatenate(fine), fine_names=names)


def _dermoscopy(folder: Path, size: int) -> LabelledImages:
    path = folder / ARRAYS["dermoscopy"].file
    if not path.is_file():
        raise _missing("dermoscopy", folder)
    z = _npz(path, ("residual", "y", "center", "is_test", "center_names"))
    return LabelledImages(
        "dermoscopy",
        decode_residual(z["residual"]),
        z["y"].astype(np.int64),
        z["is_test"].astype(bool),
        ARRAYS["dermoscopy"].labels,
        center=z["center"].astype(np.int64),
        center_names=tuple(str(name) for name in z["center_names"]),
    )


def _fed_isic(folder: Path, size: int) -> LabelledImages:
    tables = [folder / name for name in ISIC_TABLES if (folder / name).is_file()]
    inputs = [folder / name for name in ISIC_FOLDERS if (folder / name).is_dir()]
    if not tables or not inputs:
        raise _missing("fed_isic", folder)
    with tables[0].open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"image", "target", "center", "fold"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"data: {tables[0].name} lacks the columns {', '.join(sorted(missing))}; needs image, "
                "target, center and fold, as FLamby writes it"
            )
        rows = list(reader)
    columns: dict[str, list[int]] = {"target": [], "center": []}
    for number, row in enumerate(rows):
        for column, values in columns.items():
            if not (row[column] or "").strip().isdigit():
                raise ValueError(
                    f"data: {tables[0].name}, row {number} (the first is 0) has the {column} "
                    f"'{row[column]}', needs a whole number >= 0; correct it"
                )
            values.append(int(row[column]))
        if row["fold"] not in ("train", "test"):
            raise ValueError(
                f"data: {tables[0].name}, row {number} (the first is 0) has the fold '{row['fold']}', needs "
                "train or test; correct it"
            )
    images = _jpegs([inputs[0] / f"{row['image']}.jpg" for row in rows], size)
    label, center = (np.asarray(columns[name], dtype=np.int64) for name in ("target", "center"))
    test = np.asarray([row["fold"] == "test" for row in rows])
    return LabelledImages(
        "fed_isic", images, label, test, ARRAYS["fed_isic"].labels, center=center, center_names=ISIC_CENTERS
    )


LOADERS: dict[str, Callable[[Path, int], LabelledImages]] = {
    "fashion_mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "dermoscopy": _dermoscopy,
    "fed_isic": _fed_isic,
}
_FORMS = {
    "fashion_mnist": "fashion_mnist.npz, or train-images-idx3-ubyte.gz and its three companions",
    "cifar10": "cifar10_train*.npz and cifar10_test.npz, or cifar-10-batches-bin (the binary version)",
    "cifar100": "cifar100_train.npz and cifar100_test.npz, or cifar-100-binary (the binary version)",
    "dermoscopy": "dermoscopy_ham10000.npz",
    "fed_isic": f"the table {ISIC_TABLES[0]} and the images in {ISIC_FOLDERS[0]} (FLamby's layout)",
}


def decode_residual(residual: Bytes) -> Bytes:
    """(n, height, width, 3) uint8 RGB from (3, n, height, width) uint8 residuals: the planes G, R-G and B-G,
    each as differences along rows and columns, modulo 256. Raises ValueError for another shape or type."""
    if residual.ndim != 4 or residual.shape[0] != 3 or residual.dtype != np.uint8:
        raise ValueError(
            f"data: got residuals of shape {residual.shape} and type {residual.dtype}, needs "
            "(3, n, height, width) in uint8; replace the file"
        )
    p = np.cumsum(np.cumsum(residual, axis=-2, dtype=np.uint8), axis=-1, dtype=np.uint8)
    return np.stack([p[1] + p[0], p[0], p[2] + p[0]], axis=-1)


def _pooled(
    name: str,
    parts: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    *,
    fine: Ints | None = None,
    fine_names: tuple[str, ...] = (),
) -> LabelledImages:
    """The original train and test parts, one after the other (FedSPM spec 6, item 1)."""
    (x_train, y_train), (x_test, y_test) = parts
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise ValueError(
            f"data: {name} has train images of shape {x_train.shape} and test images of {x_test.shape}, "
            "needs one size; replace the files"
        )
    return LabelledImages(
        name,
        np.concatenate([x_train, x_test]),
        np.concatenate([y_train, y_test]).astype(np.int64),
        np.repeat([False, True], [len(x_train), len(x_test)]),
        ARRAYS[name].labels,
        fine,
        fine_names,
    )


def _train_and_test(
    images: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """All files but the last are training files."""
    return [(np.concatenate(images[:-1]), np.concatenate(labels[:-1])), (images[-1], labels[-1])]


def _npz(path: Path, names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    """The named arrays of an npz file, read without pickle."""
    try:
        with np.load(path, allow_pickle=False) as z:
            missing = [name for name in names if name not in z.files]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            return {name: z[name] for name in names}
    except (
        ValueError,
        OSError,
        EOFError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
        LZMAError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data: {path.name} cannot be read ({reason}), needs an npz file with {', '.join(names)} and no "
            "objects; replace it"
        ) from error


def _idx(path: Path, axes: int) -> Bytes:
    """The array of an idx file of bytes, gzipped or not."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: {path.name} is no whole gzip file ({error}); replace it") from error
    header = 4 * (1 + axes)
    shape = tuple(np.frombuffer(raw[4:header], dtype=">u4").tolist())
    if raw[:4] != bytes((0, 0, 8, axes)) or len(shape) != axes or len(raw) - header != np.prod(shape):
        raise ValueError(
            f"data: {path.name} is no idx file of bytes with {axes} axes, or not whole; replace it"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def _cifar_binary(path: Path, n_labels: int) -> tuple[Bytes, Bytes]:
    """Images (n, 32, 32, 3) and labels (n, n_labels) of one file of CIFAR's binary version."""
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    row = n_labels + 3 * CIFAR_SIDE**2
    if not raw.size or raw.size % row:
        raise ValueError(
            f"data: {path.name} has {raw.size} bytes, needs a multiple of {row} (CIFAR's binary version); "
            "replace it"
        )
    table = raw.reshape(-1, row)
    planes = table[:, n_labels:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), table[:, :n_labels]


def _jpegs(paths: Sequence[Path], size: int) -> Bytes:
    """Centred squares of the pictures, scaled to (size, size); (n, size, size, 3) uint8."""
    if size < 1:
        raise ValueError(f"data: size is {size}, must be >= 1 pixel; correct data.image_size")
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            "data: fed_isic reads JPEG files, which needs the package pillow; install it: pip install pillow"
        ) from error
    gone = [path for path in paths if not path.is_file()]
    if gone:
        raise FileNotFoundError(
            f"data: {len(gone)} of {len(paths)} images are missing, the first is {gone[0].name} in "
            f"{gone[0].parent}; complete the folder or drop their rows from the table"
        )
    images = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    for k, path in enumerate(paths):
        try:
            with Image.open(path) as picture:
                side = min(picture.size)
                left, top = ((length - side) // 2 for length in picture.size)
                square = picture.convert("RGB").crop((left, top, left + side, top + side))
                images[k] = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR))
        except OSError as error:
            raise ValueError(f"data: {path.name} is no readable picture ({error}); replace it") from error
    return images


def _subfolder(folder: Path, name: str) -> Path:
    """The folder that the archive unpacks to, if it is there, else the folder itself."""
    return folder / name if (folder / name).is_dir() else folder


def _one_of(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _missing(name: str, folder: Path) -> FileNotFoundError:
    return FileNotFoundError(f"data: no {name} in {folder}; needs {_FORMS[name]}: correct data.root")
