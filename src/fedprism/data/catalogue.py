"""Every data set fedprism can read by name: what it is, its classes, rows, licence; file, size and checksum
of the ones that ship. Text tasks are described in `sources.py`; images and tables here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedprism.data.sources import TEXT_TASKS, TextSource


@dataclass(frozen=True)
class ArraySource:
    """A data set of images or of a table.

    name: as in `data.dataset`. what: the data set in words. labels: class names, in order of the label.
    splits: rows of each original part, "train" and "test". licence: short form; for shipped files the whole
    note stands beside the file. commercial: whether the licence plainly allows commercial use. file, sha256,
    bytes: of the shipped file; empty and 0 where the user brings the files."""

    name: str
    what: str
    labels: tuple[str, ...]
    splits: Mapping[str, int]
    licence: str
    commercial: bool
    file: str = ""
    sha256: str = ""
    bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows over both parts."""
        return sum(self.splits.values())


ARRAYS: dict[str, ArraySource] = {
    source.name: source
    for source in (
        ArraySource(
            name="fashion_mnist",
            what="Fashion-MNIST, 28x28 grey images of clothes (class-balanced subset)",
            labels=(
                "T-shirt/top",
                "Trouser",
                "Pullover",
                "Dress",
                "Coat",
                "Sandal",
                "Shirt",
                "Sneaker",
                "Bag",
                "Ankle boot",
            ),
            splits={"train": 20_000, "test": 5_000},
            licence="MIT",
            commercial=True,
            file="fashion_mnist.npz",
            sha256="091f44c3266f5d51600f74cf13ddb460feb33e98c5169b75e0376b53861fbd4e",
            bytes=9_489_538,
        ),
        ArraySource(
            name="dermoscopy",
            what="HAM10000 dermoscopy, 28x28 colour images, 4 centres (subset)",
            labels=("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
            splits={"train": 1_774, "test": 433},
            licence="CC BY-NC 4.0",
            commercial=False,
            file="dermoscopy_ham10000.npz",
            sha256="823778dd1d2fbf0c5ff232e4a085c4bd9332c93465697e577294f63caceb0c46",
            bytes=2_756_988,
        ),
        ArraySource(
            name="heart",
            what="UCI Heart Disease, 13 attributes, 4 hospitals",
            labels=("no disease", "disease"),
            splits={"train": 614, "test": 306},
            licence="CC BY 4.0",
            commercial=True,
            file="heart_disease.parquet",
            sha256="51b753c9a89e8930710e60947df945c0701bf0433ac7637502e14873c29e925f",
            bytes=11_516,
        ),
        ArraySource(
            name="cifar10",
            what="CIFAR-10, 32x32 colour images (your files, data.root)",
            labels=(
                "airplane",
                "automobile",
                "bird",
                "cat",
                "deer",
                "dog",
                "frog",
                "horse",
                "ship",
                "truck",
            ),
            splits={"train": 50_000, "test": 10_000},
            licence="none stated",
            commercial=False,
        ),
        ArraySource(
            name="cifar100",
            what="CIFAR-100 by its 20 superclasses, 32x32 colour images (your files, data.root)",
            labels=(
                "aquatic_mammals",
                "fish",
                "flowers",
                "food_containers",
                "fruit_and_vegetables",
                "household_electrical_devices",
                "household_furniture",
                "insects",
                "large_carnivores",
                "large_man-made_outdoor_things",
                "large_natural_outdoor_scenes",
                "large_omnivores_and_herbivores",
                "medium_mammals",
                "non-insect_invertebrates",
                "people",
                "reptiles",
                "small_mammals",
                "trees",
                "vehicles_1",
                "vehicles_2",
            ),
            splits={"train": 50_000, "test": 10_000},
            licence="none stated",
            commercial=False,
        ),
        ArraySource(
            name="fed_isic",
            what="Fed-ISIC2019 dermoscopy, 6 centres (your files in FLamby's layout, data.root)",
            labels=("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"),
            splits={"train": 18_597, "test": 4_650},
            licence="CC BY-NC 4.0",
            commercial=False,
        ),
    )
}

DATASETS: dict[str, TextSource | ArraySource] = {**TEXT_TASKS, **ARRAYS}
