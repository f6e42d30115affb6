"""The command show-data: tables on the terminal, a picture on disk, for images, a table and text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fedprism import api, cli
from fedprism.evaluation import previews
from tests.tiny_text import Tiny

CONFIG = """name = "{name}"
seeds = [5, 6]
[data]
{data}
[method]
names = ["fedavg"]
rounds = 1
batch_size = 8
"""
HEART = CONFIG.format(name="heart", data='dataset = "heart"\nvalidation_fraction = 0.25')
CLOTHES = CONFIG.format(
    name="clothes",
    data='dataset = "fashion_mnist"\nroot = "."\nclients = 2\nmin_examples = 20\nimage_size = 28',
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DEBUG", raising=False)
    return tmp_path


def call(text: str, *options: str) -> Result:
    Path("c.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["show-data", "c.toml", "--quiet", *options])
    assert result.exit_code == 0, result.output
    return result


def test_hospitals_are_shown_as_tables_and_bars() -> None:
    result = call(HEART)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.startswith("heart, seed 5: heart, 4 clients\n")
    # the sizes that datasets/README.md names; a quarter of the training rows validates
    assert ["cleveland", "152", "50", "101", "303"] in lines
    assert ["switzerland", "62", "21", "40", "123"] in lines
    assert ["cleveland", "164", "139"] in lines
    assert ["switzerland", "8", "115"] in lines
    assert lines[-1] == ["picture:", "runs/heart-data/data.png", "and", "runs/heart-data/data.svg"]
    assert matplotlib.image.imread("runs/heart-data/data.png").shape[1] == 1600  # 8 inches
    assert not Path("runs/heart").exists()  # the place of the run stays free


def write_clothes() -> None:
    """120 random images, 12 of each class."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 80), ("test", 40)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(n) % 10
    np.savez("fashion_mnist.npz", **arrays)


def test_images_are_shown_with_components_and_a_legend() -> None:
    write_clothes()
    result = call(CLOTHES, "--out", "there", "--seed", "9", "--set", "data.permute=false")
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"client \d", line)]
    sizes, counts = rows[:2], rows[2:4]
    numbers = np.array([[int(cell) for cell in row[2:]] for row in sizes])  # train .. all, two components
    assert numbers[:, 3].sum() == 120
    assert (numbers[:, :3].sum(1) == numbers[:, 3]).all()
    assert (numbers[:, 4:].sum(1) == numbers[:, 3]).all()
    held = np.array([[int(cell) for cell in row[2:]] for row in counts])
    assert held.sum(0).tolist() == [12] * 10  # labels as they are, every image with some client
    assert "rows of each label over all splits:" in result.stdout
    assert "0 T-shirt/top; 1 Trouser; 2 Pullover" in result.stdout
    assert {p.name for p in Path("there").iterdir()} == {"data.png", "data.svg"}
    permuted = call(CLOTHES, "--out", "there", "--seed", "9").stdout
    assert "as the clients see the labels: each client and component has its own permutation" in permuted


def test_the_seed_is_the_first_of_the_config_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "save_sheet", lambda figure, folder: [])
    write_clothes()
    first, named, other = (call(CLOTHES, *words).stdout for words in ([], ["--seed", "5"], ["--seed", "6"]))
    assert first.startswith("clothes, seed 5: fashion_mnist, 2 clients\n")
    assert first == named
    assert other.startswith("clothes, seed 6: ")
    assert other.splitlines()[1:] != first.splitlines()[1:]
    assert call(CLOTHES, "--set", "seeds=[6]").stdout == other


def test_text_is_shown_by_task(tiny: Tiny) -> None:
    tiny.write(Path("tiny.toml"))
    result = CliRunner().invoke(cli.app, ["show-data", "tiny.toml", "--quiet", "--out", "out"])
    assert result.exit_code == 0, result.output
    federation = api.Workshop(tiny.experiment(), api.Silent()).get(3)[1]
    lines = [line.split() for line in result.stdout.splitlines()]
    for i, counts in enumerate(federation.counts.tolist()):
        assert ["client", str(i), str(sum(counts)), "6", "8", str(sum(counts) + 14)] in lines
        assert ["client", str(i), *map(str, counts)] in lines
    assert "training rows of each task:" in result.stdout


def test_listings_name_images_tables_and_their_models() -> None:
    runner = CliRunner()
    datasets = runner.invoke(cli.app, ["list", "datasets"]).stdout
    for name in ("fashion_mnist", "dermoscopy", "heart", "cifar10", "cifar100", "fed_isic", "sst2"):
        assert name in datasets
    models = runner.invoke(cli.app, ["list", "models"]).stdout.splitlines()
    listed = {line.split()[0]: line for line in models if line[:1].isalpha()}
    assert set(listed) == {"name", "encoder", "probe", "vision", "mlp"}
    assert "images" in listed["vision"] and "resnet_narrow" in listed["vision"]
    assert "a table" in listed["mlp"]
