"""Images and hospitals as federations: dual heterogeneity by construction, or the clients that the data
have.

Which rows go where depends on the seed and the data settings alone; each purpose draws from a stream of its
own. All shifts are applied once, here; training and test rows of a client and component get the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprism.data import shifts
from fedprism.data.arrays import UNKNOWN_COMPONENT, ArrayRows, ImageRows, TableRows
from fedprism.data.federation import CLIENT_SPLITS, fingerprint_rows, rng_for
from fedprism.data.images import LabelledImages, load_images
from fedprism.data.partition import Counts, Floats, dirichlet_by_class, dirichlet_components
from fedprism.data.tables import load_heart, preprocessing, scalings

COMPONENTS = 2  # true components of the dual heterogeneity
PARTITION_ON = ("label", "fine")
NATURAL = ("dermoscopy", "fed_isic", "heart")


@dataclass(frozen=True, eq=False)
class ArrayFederation:
    """Everything a run knows about image or table data; the same face as a federation of text.

    dataset: its name. class_names: K. clients: per client its rows as `train`, `validation` (may be empty)
    and `test`. client_names: m. grey: whether the images had one channel. n_components: true components, 1
    where they are unknown. mixtures: `sampled` and `realised` (over all of a client's rows), (m, C) float64.
    permutations: (m, C, K) int64 of the labels, identity where none were applied. preprocessing: of a table,
    see `tables.preprocessing`; else None. notes: what a reader of results has to know."""

    dataset: str
    class_names: tuple[str, ...]
    clients: tuple[Mapping[str, ArrayRows], ...]
    client_names: tuple[str, ...]
    n_components: int
    mixtures: Mapping[str, Floats]
    permutations: Tensor
    grey: bool = False
    preprocessing: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """One task: the data set."""
        return (self.dataset,)

    @property
    def n_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def public(self) -> Mapping[str, ArrayRows]:
        """The server holds no data."""
        return {}

    @cached_property
    def pooled(self) -> dict[str, ArrayRows]:
        """All clients' training rows as one split `train`."""
        return {"train": type(self.clients[0]["train"]).concat([client["train"] for client in self.clients])}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the data set's name, its classes and, per client and split, of columns and stored
        inputs. Equal federations have equal fingerprints in every process."""
        header = ["fedprism array federation 1", self.dataset, self.class_names]
        return fingerprint_rows(header, [(f"client {i}", client) for i, client in enumerate(self.clients)])

    @cached_property
    def counts(self) -> Counts:
        """(m, 1) int64 training rows of each client and the one task."""
        return np.asarray([[len(client["train"])] for client in self.clients], dtype=np.int64)

    @cached_property
    def cell_counts(self) -> Counts:
        """(m, C, K) int64 rows of each client, component and label as a client sees it, over all its
        splits."""
        C, K = self.n_components, self.n_classes
        cells = np.zeros((len(self.clients), C, K), dtype=np.int64)
        for i, client in enumerate(self.clients):
            for rows in client.values():
                cell = rows.columns["component"].clamp(min=0) * K + rows.columns["label"]
                cells[i] += torch.bincount(cell, minlength=C * K).view(C, K).numpy()
        return cells

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for the run record: fingerprint, dataset, tasks, n_classes, class_names,
        client_names, client_sizes (per client and split), counts (m x 1 training rows), components (m x C
        rows), mixtures, permutations, public_sizes (none) and notes."""
        return {
            "fingerprint": self.fingerprint,
            "dataset": self.dataset,
            "tasks": list(self.tasks),
            "n_classes": self.n_classes,
            "class_names": list(self.class_names),
            "client_names": list(self.client_names),
            "client_sizes": [{split: len(rows) for split, rows in client.items()} for client in self.clients],
            "counts": self.counts.tolist(),
            "components": self.cell_counts.sum(2).tolist(),
            "mixtures": {name: mixture.tolist() for name, mixture in self.mixtures.items()},
            "permutations": self.permutations.tolist(),
            "public_sizes": {},
            "notes": list(self.notes),
        }


def build_image_federation(
    *,
    dataset: str,
    clients: int = 8,
    alpha_inter: float = 1.0,
    alpha_intra: float = 2.0,
    min_examples: int = 50,
    partition_on: str = "label",
    examples: int | None = None,
    train_fraction: float = 0.7,
    validation_fraction: float = 0.0,
    size: int = 32,
    invert: bool = True,
    permute: bool = True,
    tint: float = shifts.TINT,
    ramp: float = shifts.RAMP,
    stored: str = "uint8",
    root: str | Path | None = None,
    seed: int,
) -> ArrayFederation:
    """Build a federation of images with heterogeneity between and inside clients (FedSPM spec 6).

    dataset: fashion_mnist, cifar10 or cifar100 (any image data set will do; its original train and test
    parts are pooled). clients: m >= 1, at most 8 with a client shift. alpha_inter > 0: Dirichlet
    concentration of each class over the clients. alpha_intra > 0: of the two components inside a client.
    min_examples: rows that every client must get, >= 4. partition_on: "label", or "fine" for the finer
    classes of cifar100. examples: at most so many images of the pool, drawn at random; None for all.
    train_fraction: of a client's rows, in (0, 1), the others are its test rows. validation_fraction: of its
    training rows, in [0, 1). size: side of the images in pixels, see `shifts.resize`. invert, permute:
    whether component 1 is inverted, and whether each client and component has its own permutation of the
    labels. tint, ramp: strengths of the client shift, 0 and 0 for none. stored: "uint8" or "float16". root:
    folder with the user's files, None or "" for the shipped ones. seed: >= 0. Raises ValueError or
    FileNotFoundError, one line each, for settings or files that cannot give this."""
    _check_settings(clients, train_fraction, validation_fraction, min_examples, examples, seed, size)
    shifts.check_strengths(tint, ramp)
    if clients > shifts.MOST_CLIENTS and (tint or ramp):
        raise ValueError(
            f"data: got {clients} clients, the client shift tells {shifts.MOST_CLIENTS} apart; lower "
            "data.clients, or set data.tint and data.ramp to 0"
        )
    if partition_on not in PARTITION_ON:
        raise ValueError(
            f"data: partition_on is '{partition_on}', needs one of {', '.join(PARTITION_ON)}; correct it"
        )
    pool = load_images(dataset, root, size=size)
    classes = pool.fine if partition_on == "fine" else pool.label
    if classes is None:
        raise ValueError(
            f"data: {dataset} has no fine labels, partition_on='fine' needs cifar100; "
            "set data.partition_on='label'"
        )
    used = np.arange(len(pool))
    if examples is not None and examples < len(pool):
        used = np.sort(rng_for(seed, "examples").permutation(len(pool))[:examples])
    parts = dirichlet_by_class(
        classes[used], clients, alpha_inter, rng_for(seed, "clients"), min_examples=min_examples
    )
    drawn = shifts.label_permutations(clients, COMPONENTS, pool.n_classes, rng_for(seed, "labels"))
    permutations = drawn if permute else torch.arange(pool.n_classes).expand_as(drawn)
    holders: list[dict[str, ArrayRows]] = []
    sampled, realised = np.zeros((clients, COMPONENTS)), np.zeros((clients, COMPONENTS))
    for i, part in enumerate(parts):
        rows = used[part]
        component, sampled[i] = dirichlet_components(
            len(rows), COMPONENTS, alpha_intra, rng_for(seed, "components", i)
        )
        realised[i] = np.bincount(component, minlength=COMPONENTS) / len(rows)
        at = torch.from_numpy(component)
        x = shifts.resize(shifts.planes(pool.images[rows]), size)
        if invert:
            x = shifts.component_shift(x, at, grey=pool.grey)
        x = shifts.client_shift(x, i, tint=tint, ramp=ramp)
        label = shifts.permute_labels(torch.from_numpy(pool.label[rows]), at, permutations[i])
        whole = ImageRows(_columns(label, rows, i, at), shifts.store(x, stored))
        test = _chosen(len(rows), 1 - train_fraction, rng_for(seed, "test", i))
        holders.append(_split(whole, test, validation_fraction, seed, i))
    return ArrayFederation(
        dataset=dataset,
        class_names=pool.class_names,
        clients=tuple(holders),
        client_names=tuple(f"client {i}" for i in range(clients)),
        n_components=COMPONENTS,
        mixtures={"sampled": sampled, "realised": realised},
        permutations=permutations,
        grey=pool.grey,
    )


def build_natural_federation(
    *,
    dataset: str,
    validation_fraction: float = 0.0,
    size: int = 32,
    imputation: str = "local",
    statistics: str = "federated",
    stored: str = "uint8",
    root: str | Path | None = None,
    seed: int,
) -> ArrayFederation:
    """Build a federation whose clients are the centres that made the data; no shift is added.

    dataset: dermoscopy (4 centres), fed_isic (6; the user's folder) or heart (4 hospitals). Training and
    test rows are those of the data set. validation_fraction: of a client's training rows, drawn at random,
    in [0, 1). size: side of the images in pixels; for dermoscopy see `shifts.resize`. imputation,
    statistics: for heart, see `tables.scalings`. stored: "uint8" or "float16" images. root:
    folder with the user's files, None or "" for the shipped ones. seed: >= 0. Raises ValueError or
    FileNotFoundError, one line each, for settings or files that cannot give this."""
    if dataset not in NATURAL:
        raise ValueError(
            f"data: '{dataset}' has no centres, needs one of {', '.join(NATURAL)}; correct data.dataset"
        )
    _check_settings(1, 0.5, validation_fraction, 4, None, seed, size)
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] | None = None
    inputs: list[Tensor]
    if dataset == "heart":
        table = load_heart(root)
        members = _members(table.center, table.center_names, table.test, dataset)
        outside = [
            ~table.test[rows] & ~_validation(~table.test[rows], validation_fraction, seed, i)
            for i, rows in enumerate(members)
        ]
        values = [table.values[rows] for rows in members]
        each = scalings(values, outside, imputation=imputation, statistics=statistics)
        inputs = [torch.from_numpy(s.inputs(v)).float() for s, v in zip(each, values, strict=True)]
        facts = preprocessing(values, outside, each)
        kind: type[ArrayRows] = TableRows
        pool: Any = table
        if "local" in (imputation, statistics):
            notes = (
                "heart: a hospital's own numbers fill or scale its test rows, which can give away whose they "
                "are; for routing set data.imputation and data.statistics to 'federated'",
            )
    else:
        images = load_images(dataset, root, size=size)
        members = _members(images.center, images.center_names, images.test, dataset)
        inputs = [_natural_images(images, rows, size, stored) for rows in members]
        kind, pool = ImageRows, images
    holders = []
    for i, (rows, x) in enumerate(zip(members, inputs, strict=True)):
        label = torch.from_numpy(pool.label[rows])
        unknown = torch.full_like(label, UNKNOWN_COMPONENT)
        whole = kind(_columns(label, rows, i, unknown), x)
        holders.append(_split(whole, pool.test[rows], validation_fraction, seed, i))
    K, m = len(pool.class_names), len(members)
    return ArrayFederation(
        dataset=dataset,
        class_names=pool.class_names,
        clients=tuple(holders),
        client_names=pool.center_names,
        n_components=1,
        mixtures={"sampled": np.ones((m, 1)), "realised": np.ones((m, 1))},
        permutations=torch.arange(K).expand(m, 1, K),
        preprocessing=facts,
        notes=notes,
    )


@dataclass(frozen=True, eq=False)
class Preview:
    """What a federation looks like, per client and component.

    images: (m, C, k, height, width, 3) uint8, black where a cell has fewer than k. labels: (m, C, k) int64
    as a client sees them, -1 where there is no image. rows: (m, C, k) int64 ids, -1 likewise. label_counts:
    (m, C, K) and component_counts: (m, C), int64, over all splits."""

    images: NDArray[np.uint8]
    labels: Counts
    rows: Counts
    label_counts: Counts
    component_counts: Counts


def preview(federation: ArrayFederation, examples: int = 8) -> Preview:
    """The first `examples` training images of each client and component, one label after another so that
    classes differ, and all counts. Raises ValueError for a table, or examples < 1."""
    if examples < 1:
        raise ValueError(f"preview: got {examples} examples, needs at least 1")
    first = federation.clients[0]["train"]
    if not isinstance(first, ImageRows):
        raise ValueError(f"preview: {federation.dataset} is a table, needs images; print its counts instead")
    m, C = len(federation.clients), federation.n_components
    height, width = first.inputs.shape[2:]
    images = np.zeros((m, C, examples, height, width, 3), dtype=np.uint8)
    labels, ids = np.full((m, C, examples), -1), np.full((m, C, examples), -1)
    for i, client in enumerate(federation.clients):
        train = client["train"]
        for c in range(C):
            mine = torch.nonzero(train.columns["component"].clamp(min=0) == c).flatten()
            label = train.columns["label"][mine]
            turn = torch.zeros_like(label)  # how many of the same label stand before
            for k in label.unique():
                turn[label == k] = torch.arange(int((label == k).sum()))
            at = mine[torch.argsort(turn * federation.n_classes + label, stable=True)][:examples]
            x = shifts.store(shifts.unit_range(train.inputs[at]))
            images[i, c, : len(at)] = x.permute(0, 2, 3, 1).numpy()
            labels[i, c, : len(at)] = train.columns["label"][at].numpy()
            ids[i, c, : len(at)] = train.columns["row"][at].numpy()
    counts = federation.cell_counts
    return Preview(images, labels, ids, counts, counts.sum(2))


def _columns(label: Tensor, rows: NDArray[np.int64], client: int, component: Tensor) -> dict[str, Tensor]:
    return {
        "label": label,
        "task": torch.zeros_like(label),
        "row": torch.from_numpy(rows.astype(np.int64)),
        "client": torch.full_like(label, client),
        "component": component,
    }


def _chosen(n: int, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(n,) bool: round(fraction n) rows at random."""
    chosen = np.zeros(n, dtype=bool)
    chosen[rng.permutation(n)[: int(np.rint(fraction * n))]] = True
    return chosen


def _validation(train: NDArray[np.bool_], fraction: float, seed: int, client: int) -> NDArray[np.bool_]:
    """(n,) bool: the share of the client's training rows that validates."""
    held = np.zeros(len(train), dtype=bool)
    held[train] = _chosen(int(train.sum()), fraction, rng_for(seed, "validation", client))
    return held


def _split(
    rows: ArrayRows, test: NDArray[np.bool_], validation_fraction: float, seed: int, client: int
) -> dict[str, ArrayRows]:
    held = _validation(~test, validation_fraction, seed, client)
    masks = dict(zip(CLIENT_SPLITS, (~test & ~held, held, test), strict=True))
    for split in ("train", "test"):
        if not masks[split].any():
            raise ValueError(
                f"data: client {client} has {len(rows)} rows and none for {split}, needs at least 1; raise "
                "data.min_examples or change the fractions"
            )
    return {split: rows.select(torch.from_numpy(mask)) for split, mask in masks.items()}


def _members(
    center: NDArray[np.int64] | None, names: tuple[str, ...], test: NDArray[np.bool_], dataset: str
) -> list[NDArray[np.int64]]:
    """Rows of each centre; every centre has some to train and some to test on."""
    if center is None:
        raise ValueError(f"data: {dataset} has no centres; choose one of {', '.join(NATURAL)}")
    members = [np.flatnonzero(center == i).astype(np.int64) for i in range(len(names))]
    for name, rows in zip(names, members, strict=True):
        n_test = int(test[rows].sum())
        if not 0 < n_test < len(rows):
            raise ValueError(
                f"data: centre {name} of {dataset} has {len(rows) - n_test} training and {n_test} test rows, "
                "needs at least 1 of each; complete the files"
            )
    return members


def _natural_images(images: LabelledImages, rows: NDArray[np.int64], size: int, stored: str) -> Tensor:
    return shifts.store(shifts.resize(shifts.planes(images.images[rows]), size), stored)


def _check_settings(
    clients: int,
    train_fraction: float,
    validation_fraction: float,
    min_examples: int,
    examples: int | None,
    seed: int,
    size: int,
) -> None:
    for name, value, least in (
        ("clients", clients, 1),
        ("min_examples", min_examples, 4),
        ("examples", examples, 1),
        ("seed", seed, 0),
        ("size", size, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"data: {name} is {value}, must be >= {least}; correct it")
    if not 0 < train_fraction < 1:
        raise ValueError(f"data: train_fraction is {train_fraction}, must be > 0 and < 1; correct it")
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"data: validation_fraction is {validation_fraction}, must be >= 0 and < 1; correct it"
        )
