"""Pictures of a federation before anything is trained: images of every client and component, and bars of what
clients hold.

Figures are laid out in inches, so that pictures and letters keep their size however many clients there are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedprism.evaluation.plots import INK, PALETTE, STYLE, WIDTH, save

Ints = NDArray[np.int64]

MOST_CLIENTS = 12  # clients whose images are drawn
CELL, CAPTION_LINE = 0.74, 0.105  # inches: side of a picture with its gap, height of a line below it
HEADER, BAR, GAP = 0.28, 0.15, 0.16  # inches: a client's name, one bar, between clients
SIDE, ROOM, EDGE = 0.98, 2.2, 0.15  # inches: component names, longest bar, margin
LETTER = 0.056  # inches: about the width of a small letter
SMALL = 6.5  # points


class Cells(Protocol):
    """Images and counts per client and component, as `data.preview` gives them."""

    @property
    def images(self) -> NDArray[np.uint8]:
        """(m, C, k, height, width, 3)."""

    @property
    def labels(self) -> Ints:
        """(m, C, k), -1 where there is no image."""

    @property
    def label_counts(self) -> Ints:
        """(m, C, K)."""

    @property
    def component_counts(self) -> Ints:
        """(m, C)."""


def image_sheet(
    cells: Cells, *, title: str, note: str, client_names: Sequence[str], class_names: Sequence[str]
) -> Figure:
    """A block per client: its images with their labels, a row per component, beside bars of its components
    and labels. At most `MOST_CLIENTS` clients.

    title, note: first and second line. client_names: m. class_names: K."""
    m, C, k = cells.labels.shape
    shown, K = min(m, MOST_CLIENTS), len(class_names)
    captions = [_wrapped(name, 15) for name in class_names]
    row = CELL + CAPTION_LINE * max(1 + caption.count("\n") for caption in captions) + 0.06
    component_bar = 0.3 if C > 1 else 0.0
    body = max(C * row, component_bar + K * BAR + 0.05)
    block, top = HEADER + body + GAP, 0.62
    side = SIDE if C > 1 else 0.0
    names = 0.1 + LETTER * max(map(len, (*(_shortened(name, 24) for name in class_names), "components")))
    bars = names + ROOM + 0.4
    width = EDGE + side + k * CELL + 0.2 + bars + EDGE
    height = top + shown * block + EDGE
    if m > shown:
        note += f" Images of the first {shown} of {m} clients."
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))

        def axes(left: float, down: float, wide: float, tall: float) -> Any:
            """Axes at a place in inches from the top left; data coordinates are inches likewise."""
            ax = figure.add_axes((left / width, 1 - (down + tall) / height, wide / width, tall / height))
            ax.set(xlim=(0, wide), ylim=(tall, 0))
            ax.axis("off")
            return ax

        page = axes(0, 0, width, height)
        page.text(EDGE, 0.2, title, fontsize=12, fontweight="bold", va="center")
        page.text(EDGE, 0.43, note, fontsize=8, va="center")
        largest = max(1, int(cells.label_counts.sum(1).max()))
        for i in range(shown):
            down = top + i * block
            page.plot([EDGE, width - EDGE], [down - GAP / 2] * 2, color="#dddddd", lw=0.8)
            rows = f"{int(cells.label_counts[i].sum()):,} rows"
            page.text(EDGE, down + 0.1, client_names[i], fontsize=9.5, fontweight="bold", va="center")
            page.text(EDGE + side + k * CELL - 0.1, down + 0.1, rows, fontsize=8, va="center", ha="right")
            ax = axes(EDGE + side, down + HEADER, k * CELL, C * row)
            for c in range(C):
                if C > 1:
                    of = f"component {c}\n{int(cells.component_counts[i, c]):,} rows"
                    y = down + HEADER + c * row + (CELL - 0.1) / 2
                    page.text(EDGE, y, of, fontsize=7.5, va="center", color=PALETTE[c], linespacing=1.4)
                for n in np.flatnonzero(cells.labels[i, c] >= 0):
                    x, y = n * CELL, c * row
                    extent = (x, x + CELL - 0.1, y + CELL - 0.1, y)
                    ax.imshow(cells.images[i, c, n], extent=extent, aspect="auto", interpolation="nearest")
                    text = captions[cells.labels[i, c, n]]
                    middle = x + (CELL - 0.1) / 2
                    ax.text(
                        middle, y + CELL - 0.07, text, fontsize=SMALL - 0.7, ha="center", va="top",
                        linespacing=1.0,
                    )  # fmt: skip
            ax.set(xlim=(0, k * CELL), ylim=(C * row, 0))  # imshow moves them
            ax = axes(width - EDGE - bars, down + HEADER, bars, body)
            _client_bars(ax, names, cells.label_counts[i], class_names, largest, component_bar)
    return figure


def _client_bars(
    ax: Any, begin: float, counts: Ints, class_names: Sequence[str], largest: int, below: float
) -> None:
    """A bar of the components' shares, and under it a bar of counts per label.

    begin: inches, where bars begin. counts: (C, K). largest: count of the longest bar. below: inches that the
    first bar takes, 0 for none."""
    if below:
        left, total = begin, max(1, int(counts.sum()))
        for c, n in enumerate(counts.sum(1)):
            wide = ROOM * n / total
            ax.barh(0.08, wide, 0.17, left=left, color=PALETTE[c], lw=0)
            if n / total > 0.12:
                ax.text(
                    left + wide / 2, 0.085, f"{100 * n / total:.0f} %", fontsize=SMALL, color="white",
                    ha="center", va="center",
                )  # fmt: skip
            left += wide
        ax.text(begin - 0.06, 0.085, "components", fontsize=SMALL, ha="right", va="center")
    for k, name in enumerate(class_names):
        y, left = below + (k + 0.5) * BAR, begin
        ax.text(begin - 0.06, y, _shortened(name, 24), fontsize=SMALL, ha="right", va="center")
        for c, n in enumerate(counts[:, k]):
            ax.barh(y, ROOM * n / largest, BAR * 0.72, left=left, color=PALETTE[c], lw=0)
            left += ROOM * n / largest
        ax.text(left + 0.04, y, f"{int(counts[:, k].sum()):,}", fontsize=SMALL, va="center")


def count_bars(
    counts: Ints, *, title: str, note: str, client_names: Sequence[str], groups: Sequence[str]
) -> Figure:
    """A bar per client, made of its rows of each group (labels of a table, tasks of text).

    counts: (m, G). title, note: first and second line. client_names: m. groups: G names."""
    m, _ = counts.shape
    bar = 0.27 if m <= 40 else 0.15  # inches
    legend = 0.2 * (1 + (len(groups) - 1) // 5)
    top, bottom = 0.66 + legend, 0.5
    height = top + m * bar + bottom
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        figure.text(0.02, 1 - 0.2 / height, title, fontsize=12, fontweight="bold", va="center")
        figure.text(0.02, 1 - 0.43 / height, note, fontsize=8, va="center")
        letters = max(len(_shortened(name, 24)) for name in client_names)
        left = 0.25 + 0.075 * letters  # inches
        ax = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + 0.6) / WIDTH, m * bar / height))
        total, largest = counts.sum(1), max(1, int(counts.sum(1).max()))
        start = np.zeros(m)
        for g, name in enumerate(groups):
            colour = PALETTE[g % len(PALETTE)]
            hatch = "///" if g >= len(PALETTE) else None
            ax.barh(range(m), counts[:, g], 0.74, left=start, color=colour, label=name, lw=0, hatch=hatch)
            for i in range(m) if bar > 0.2 else ():
                if counts[i, g] >= 0.05 * largest:
                    middle = start[i] + counts[i, g] / 2
                    ax.text(
                        middle, i, f"{int(counts[i, g]):,}", fontsize=7.5, color="white", ha="center",
                        va="center",
                    )  # fmt: skip
            start += counts[:, g]
        for i in range(m):
            ax.text(total[i] + 0.01 * largest, i, f"{int(total[i]):,}", fontsize=7.5, va="center", color=INK)
        ax.set_yticks(
            range(m), [_shortened(name, 24) for name in client_names], fontsize=8 if bar > 0.2 else 6
        )
        ax.set(xlim=(0, largest), ylim=(m - 0.5, -0.5), xlabel="rows")
        ax.tick_params(axis="y", length=0)
        figure.legend(
            loc="upper left", bbox_to_anchor=(0.0175, 1 - 0.54 / height), ncols=min(5, len(groups)),
            frameon=False, handlelength=1, handleheight=1, fontsize=8, borderpad=0, borderaxespad=0.2,
        )  # fmt: skip
    return figure


def save_sheet(figure: Figure, folder: str | Path, name: str = "data") -> list[Path]:
    """Save a figure as PNG and SVG in a folder, made if missing; returns the paths written."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in written:
        save(figure, path, path.suffix[1:])
    return written


def _wrapped(name: str, letters: int) -> str:
    """A name over at most two lines of so many letters."""
    lines = textwrap.wrap(name.replace("_", " "), letters)
    return "\n".join([lines[0], _shortened(" ".join(lines[1:]), letters)] if len(lines) > 1 else lines)


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: letters - 1].rstrip("_ ") + "…"
