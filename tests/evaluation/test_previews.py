"""Pictures of federations: every image and count is there, and no two labels lie on each other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fedprism.evaluation import plots, previews

COARSE = ("large_man-made_outdoor_things", "household_electrical_devices", "people", "insects")


@dataclass
class Cells:
    """As `data.preview` gives them."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    label_counts: NDArray[np.int64]

    @property
    def component_counts(self) -> NDArray[np.int64]:
        return self.label_counts.sum(2)


def cells(m: int, C: int, K: int, k: int = 8) -> Cells:
    """Random images; client 0 has one image fewer in its last component."""
    rng = np.random.default_rng(0)
    labels = np.arange(m * C * k).reshape(m, C, k) % K
    labels[0, -1, -1] = -1
    images = rng.integers(0, 256, (m, C, k, 8, 8, 3)).astype(np.uint8)
    return Cells(images, labels, rng.integers(0, 20_000, (m, C, K)))


def sheet(given: Cells, names: tuple[str, ...]) -> Figure:
    clients = [f"client {i}" for i in range(len(given.labels))]
    return previews.image_sheet(given, title="a title", note="Bars.", client_names=clients, class_names=names)


def texts(figure: Figure) -> list[Any]:
    """All texts that are shown, laid out."""
    with matplotlib.rc_context(plots.STYLE):
        figure.draw_without_rendering()
    found = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    found += [label for ax in figure.axes if ax.axison for label in ax.get_yticklabels()]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    return [text for text in found if text.get_text().strip()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other by more than a pixel, and texts beyond the edge of the figure."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.bbox.width, figure.bbox.height
    wrong = [(name, "the edge") for name, b in boxes if min(b.x0, b.y0) < 0 or b.x1 > width or b.y1 > height]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            wrong.append((one, other))
    return wrong


def lengths(ax: Any) -> list[float]:
    return [patch.get_width() for patch in ax.patches if isinstance(patch, Rectangle)]


@pytest.mark.parametrize(
    ("m", "C", "names"),
    [
        (8, 2, tuple(f"class {k}" for k in range(10))),
        (6, 1, ("MEL", "NV", "BCC", "AK")),
        (3, 2, COARSE * 5),
        (1, 1, COARSE[:2]),
    ],
)
def test_no_two_labels_of_a_sheet_lie_on_each_other(m: int, C: int, names: tuple[str, ...]) -> None:
    assert overlaps(sheet(cells(m, C, len(names)), names)) == []


def test_a_sheet_shows_every_image_above_its_label() -> None:
    given, names = cells(2, 2, 10), tuple(f"class {k}" for k in range(10))
    figure = sheet(given, names)
    strips = [ax for ax in figure.axes if ax.images]
    assert len(strips) == 2
    for i, ax in enumerate(strips):
        wanted = [(c, n) for c in range(2) for n in range(8) if given.labels[i, c, n] >= 0]
        assert len(ax.images) == len(ax.texts) == len(wanted) == (15 if i == 0 else 16)
        for (c, n), image, text in zip(wanted, ax.images, ax.texts, strict=True):
            assert np.array_equal(image.get_array(), given.images[i, c, n])
            assert text.get_text() == names[given.labels[i, c, n]]
            left, right, bottom, _ = image.get_extent()
            assert left < text.get_position()[0] < right
            assert 0 < text.get_position()[1] - bottom < 0.1  # inches; down is larger


def test_bars_of_a_sheet_are_as_long_as_their_counts() -> None:
    given = cells(3, 2, 4)
    figure = sheet(given, ("a", "b", "c", "d"))
    bars = [ax for ax in figure.axes if ax.patches]
    longest = given.label_counts.sum(1).max()
    for i, ax in enumerate(bars):
        shares, counts = lengths(ax)[:2], np.reshape(lengths(ax)[2:], (4, 2)).T
        assert np.allclose(
            np.array(shares) / sum(shares), given.label_counts[i].sum(1) / given.label_counts[i].sum()
        )
        assert np.allclose(counts / previews.ROOM, given.label_counts[i] / longest)


def test_a_sheet_of_many_clients_shows_the_first_and_says_so() -> None:
    figure = sheet(cells(20, 1, 4), ("a", "b", "c", "d"))
    assert len([ax for ax in figure.axes if ax.images]) == previews.MOST_CLIENTS
    assert any("Images of the first 12 of 20 clients." in text.get_text() for text in texts(figure))


@pytest.mark.parametrize(("m", "groups"), [(4, 2), (12, 9), (60, 3), (1, 1), (25, 14)])
def test_count_bars_add_up_and_keep_their_labels_apart(m: int, groups: int) -> None:
    counts = np.random.default_rng(1).integers(0, 900, (m, groups))
    figure = previews.count_bars(
        counts,
        title="a title",
        note="Bars.",
        client_names=[f"a hospital of some name {i}" for i in range(m)],
        groups=[f"task {g}" for g in range(groups)],
    )
    assert overlaps(figure) == []
    (ax,) = figure.axes
    assert np.allclose(np.reshape(lengths(ax), (groups, m)).T, counts)
    said = [text.get_text() for text in ax.texts]
    assert said[-m:] == [f"{total:,}" for total in counts.sum(1)]


def test_clients_without_any_row_have_no_bar() -> None:
    figure = previews.count_bars(
        np.zeros((2, 2), dtype=np.int64), title="t", note="n", client_names=["a", "b"], groups=["x", "y"]
    )
    assert sum(lengths(figure.axes[0])) == 0


def test_pictures_are_saved_twice_alike(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        written = previews.save_sheet(sheet(cells(1, 2, 2, k=2), ("a", "b")), tmp_path / name / "deep")
        assert [path.name for path in written] == ["data.png", "data.svg"]
        files.append([path.read_bytes() for path in written])
    assert files[0] == files[1]
    assert files[0][0].startswith(b"\x89PNG")
