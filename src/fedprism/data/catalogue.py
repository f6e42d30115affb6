"""Every data set fedprism can read by name: what it is, its classes, rows, licence; file, size and checksum
of the ones that ship. Text tasks are described in `sources.py`; images, tables and instructions here.
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


@dataclass(frozen=True)
class InstructionSource:
    """Instructions for language models that ship with fedprism.

    name: as in `data.sources`. what: the data set in words. levels: what a category can be, the default first
    ("one": the whole source is one). splits: rows of each part; clients train on "train" alone. licence:
    short form; the whole note stands beside the file. commercial: whether the licence plainly allows
    commercial use. sha256, bytes: of the parquet file."""

    name: str
    what: str
    levels: tuple[str, ...]
    splits: Mapping[str, int]
    licence: str
    commercial: bool
    sha256: str
    bytes: int

    @property
    def file(self) -> str:
        """File name below `dataset_root()`."""
        return f"{self.name}.parquet"

    @property
    def rows(self) -> int:
        """Rows over all parts."""
        return sum(self.splits.values())


INSTRUCTIONS: dict[str, InstructionSource] = {
    source.name: source
    for source in (
        InstructionSource(
            name="dolly",
            what="Dolly, instructions in 8 categories (subset)",
            levels=("categories", "one"),
            splits={"train": 4_800, "test": 600},
            licence="CC BY-SA 3.0",
            commercial=True,
            sha256="84ed2e1457ddad6b9991eafbfaa53504a775a612c10a4b99f9f0be208806dbe7",
            bytes=1_552_995,
        ),
        InstructionSource(
            name="gsm8k",
            what="GSM8K, grade school mathematics (subset)",
            levels=("one",),
            splits={"train": 3_000, "test": 600},
            licence="MIT",
            commercial=True,
            sha256="bd61a354af903785236b63ec0ad8438b122f12b2859189ac21ce79a91ddbeb65",
            bytes=574_669,
        ),
        InstructionSource(
            name="bbh",
            what="BIG-Bench Hard, 27 tasks of reasoning",
            levels=("one", "groups", "tasks"),
            splits={"train": 5_210, "test": 1_301},
            licence="MIT",
            commercial=True,
            sha256="e621fa6d1ab7302b0e4342d087a0f84c5a803ca4fd340caac356b21ec23cf450",
            bytes=244_433,
        ),
        InstructionSource(
            name="mmlu",
            what="MMLU, multiple choice in 57 subjects (subset)",
            levels=("one", "subjects"),
            splits={"train": 285, "validation": 455, "test": 1_425},
            licence="MIT",
            commercial=True,
            sha256="55ff660230ea29254b70b2ad51128e28ba5fbdef12b53c9580188473a4e9a591",
            bytes=316_067,
        ),
    )
}

DATASETS: dict[str, TextSource | ArraySource | InstructionSource] = {**TEXT_TASKS, **ARRAYS, **INSTRUCTIONS}
