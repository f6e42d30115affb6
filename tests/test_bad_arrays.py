"""Images and tables that can't be used, from the command line: one line that helps, status 2, nothing left
behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from fedprism import api, cli
from fedprism import config as configs
from fedprism.config import IMAGES, TABLES
from fedprism.data.sources import dataset_root
from fedprism.methods.registry import METHODS

METHOD = '[method]\nnames = ["fedavg"]\nrounds = 1\nbatch_size = 8\nlr = 0.01\n'
MODEL = '[model]\nbackbone = "lenet_small"\nrouter_backbone = "lenet_small"\n'
CLOTHES = f"""name = "clothes"
seeds = [3]
[data]
dataset = "fashion_mnist"
root = "files"
clients = 3
min_examples = 20
image_size = 14
{MODEL}{METHOD}"""
SKIN = f"""name = "skin"
seeds = [3]
[data]
dataset = "dermoscopy"
root = "files"
image_size = 14
{MODEL}{METHOD}"""
HEART = f"""name = "heart"
seeds = [3]
[data]
dataset = "heart"
root = "files"
{METHOD}"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the data, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DEBUG", raising=False)
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def refusal(text: str, *options: str, command: str = "run") -> str:
    """The one line that the command says to a config; nothing may be left behind."""
    Path("bad.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli.app, [command, "bad.toml", "--out", "out", "--quiet", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert not Path("out").exists()
    return line.removeprefix("fedprism: ")


def write_clothes(folder: Path, n: int = 120, **changes: Any) -> None:
    """A fashion_mnist.npz of random images whose labels go round; arrays may be changed."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, size in (("train", n), ("test", n // 2)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(size) % 10).astype(np.uint8)
    np.savez(folder / "fashion_mnist.npz", **{**arrays, **changes})


def write_skin(folder: Path, centers: list[int]) -> None:
    """A dermoscopy file with a row per entry of `centers`, every other one a test row."""
    n = len(centers)
    np.savez(
        folder / "dermoscopy_ham10000.npz",
        residual=np.zeros((3, n, 28, 28), dtype=np.uint8),
        y=np.arange(n) % 7,
        center=np.array(centers),
        is_test=np.arange(n) % 2 == 1,
        center_names=np.array(["north", "south"]),
    )


def write_heart(folder: Path, change: Callable[[dict[str, list[Any]]], None]) -> None:
    """The shipped table, changed."""
    columns = pyarrow.parquet.read_table(dataset_root() / "heart_disease.parquet").to_pydict()
    change(columns)
    pyarrow.parquet.write_table(pa.table(columns), folder / "heart_disease.parquet")


def test_the_configs_of_these_tests_are_themselves_sound(files: Path) -> None:
    write_clothes(files)
    write_skin(files, [0] * 20 + [1] * 20)
    write_heart(files, lambda columns: None)
    for text in (CLOTHES, SKIN, HEART):
        Path("good.toml").write_text(text, encoding="utf-8")
        made = configs.load("good.toml", methods=METHODS)
        model, federation = api.Workshop(made, api.Silent()).get(3)
        assert model.n_classes == federation.n_classes == {"clothes": 10, "skin": 7, "heart": 2}[made.name]


# ---- files ---------------------------------------------------------------------------------------


def test_a_folder_without_the_files(files: Path) -> None:
    line = refusal(CLOTHES)
    assert re.match(
        r"data: no fashion_mnist in .*files; needs fashion_mnist\.npz, or .*correct data\.root", line
    )


def test_an_archive_that_was_cut_short(files: Path) -> None:
    write_clothes(files)
    path = files / "fashion_mnist.npz"
    path.write_bytes(path.read_bytes()[:1000])
    line = refusal(CLOTHES)
    assert re.match(
        r"data: fashion_mnist\.npz cannot be read \(.*\), needs an npz file with .*; replace it$", line
    )


def test_images_of_two_sizes(files: Path) -> None:
    write_clothes(files, x_test=np.zeros((60, 32, 32), dtype=np.uint8))
    line = refusal(CLOTHES)
    assert "train images of shape (120, 28, 28) and test images of (60, 32, 32), needs one size" in line


def test_images_that_are_not_square(files: Path) -> None:
    write_clothes(files, x_train=np.zeros((120, 28, 20), np.uint8), x_test=np.zeros((60, 28, 20), np.uint8))
    assert "got images of 28x20 pixels, needs square ones; crop them" in refusal(CLOTHES)


def test_pixels_that_are_no_numbers(files: Path) -> None:
    pixels = np.zeros((120, 28, 28), dtype=np.float32)
    pixels[7, 3, 3] = np.nan
    write_clothes(files, x_train=pixels, x_test=pixels[:60])
    line = refusal(CLOTHES)
    assert "type float32, needs (n, height, width) or (n, height, width, 3) in uint8; convert them" in line


def test_a_label_that_no_class_has(files: Path) -> None:
    write_clothes(files, y_train=np.full(120, 10))
    assert "fashion_mnist has the label 10, needs 0..9; correct or drop the row" in refusal(CLOTHES)


def test_a_class_that_no_client_holds(files: Path) -> None:
    write_clothes(files, y_train=np.arange(120) % 9, y_test=np.arange(60) % 9)
    line = refusal(CLOTHES)
    assert line.startswith(
        "data: no client has a row of Ankle boot, needs each of the 10 classes of fashion_mnist"
    )
    assert line.endswith("once; complete the files")


def test_so_few_examples_that_a_class_is_lost(files: Path) -> None:
    y = np.arange(60) % 9
    y[0] = 9  # one of 180 images
    write_clothes(files, y_train=np.arange(120) % 9, y_test=y)
    line = refusal(CLOTHES, "--set", "data.examples=40", "--set", "data.clients=1")
    assert line == (
        "data: no client has a row of Ankle boot, needs each of the 10 classes of fashion_mnist once; raise "
        "data.examples, or complete the files"
    )


def test_a_centre_with_a_single_row(files: Path) -> None:
    write_skin(files, [0] * 20 + [1])
    line = refusal(SKIN)
    assert line.startswith(
        "data: centre south of dermoscopy has 1 training and 0 test rows, needs at least 1 of each"
    )


def test_a_client_with_a_single_row(files: Path) -> None:
    line = refusal(CLOTHES, "--set", "data.min_examples=1")
    assert line == "data: min_examples is 1, must be >= 4; correct it"
    write_clothes(files)
    line = refusal(CLOTHES, "--set", "data.clients=8", "--set", "data.min_examples=0")
    assert re.match(
        r"partition: client \d got \d+ examples .*, needs 50 .*; raise data\.alpha_inter or lower", line
    )


def test_a_hospital_too_small_for_a_validation_row(files: Path) -> None:
    write_heart(files, lambda columns: None)
    line = refusal(HEART, "--set", "data.validation_fraction=0.005")
    assert line == (
        "data: switzerland has too few training rows for one of validation with data.validation_fraction = "
        "0.005; raise it or set it to 0"
    )


def test_a_gap_in_a_column_that_is_never_missing(files: Path) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["age"] = [float("nan") if k == 11 else float(v) for k, v in enumerate(columns["age"])]

    write_heart(files, change)
    line = refusal(HEART)
    assert line == "data: heart_disease.parquet, row 11 (the first is 0) has no age; drop the row"


def test_a_value_that_is_not_finite(files: Path) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["thalach"] = [float("inf") if k == 11 else v for k, v in enumerate(columns["thalach"])]

    write_heart(files, change)
    assert "needs (n, d) finite float32" in refusal(HEART)


def test_a_label_that_is_missing(files: Path) -> None:
    write_heart(files, lambda columns: columns["label"].__setitem__(4, None))
    assert "has other labels than 0, 1" in refusal(HEART)


def test_a_table_of_one_label(files: Path) -> None:
    write_heart(files, lambda columns: columns.__setitem__("label", [0] * len(columns["label"])))
    assert refusal(HEART).startswith(
        "data: no client has a row of disease, needs each of the 2 classes of heart"
    )


def test_fed_isic_without_a_folder(files: Path) -> None:
    text = SKIN.replace("dermoscopy", "fed_isic")
    assert re.match(
        r"data: no fed_isic in .*files; needs the table .* \(FLamby's layout\): correct", refusal(text)
    )
    line = refusal(text.replace('root = "files"\n', ""))
    assert re.match(
        r"data: fed_isic does not ship with fedprism; set data\.root to the folder with the table", line
    )
    line = refusal(text.replace('"files"', '"nowhere"'))
    assert line == "data: folder nowhere does not exist; correct data.root"


# ---- settings ------------------------------------------------------------------------------------


def test_a_data_set_that_is_not_known() -> None:
    line = refusal(CLOTHES.replace('"fashion_mnist"', '"fashion-mnist"'))
    assert line.startswith(
        "config: data.dataset has unknown 'fashion-mnist'; did you mean fashion_mnist? known:"
    )
    assert all(name in line for name in (*IMAGES, *TABLES))


@pytest.mark.parametrize("command", ["run", "show-data"])
def test_a_size_that_the_images_can_not_have(files: Path, command: str) -> None:
    write_clothes(files)
    line = refusal(CLOTHES, "--set", "data.image_size=20", command=command)
    assert line == "shifts: size is 20, must divide 28 (the images' side) or 32; correct data.image_size"
    line = refusal(CLOTHES, "--set", "data.image_size=4", command=command)
    assert line == "config: data.image_size is 4, must be >= 8"


def test_more_clients_than_shifts() -> None:
    line = refusal(CLOTHES, "--set", "data.clients=9")
    assert line == (
        "data: got 9 clients, the client shift tells 8 apart; lower data.clients, or set data.tint and "
        "data.ramp to 0"
    )


def test_fine_labels_of_a_data_set_without_them(files: Path) -> None:
    write_clothes(files)
    line = refusal(CLOTHES, "--set", "data.partition_on=fine")
    assert line.startswith("data: fashion_mnist has no fine labels, partition_on='fine' needs cifar100")


@pytest.mark.parametrize("method", ["fedsee", "public_only"])
def test_a_method_that_needs_public_data(method: str) -> None:
    line = refusal(HEART, "--methods", method)
    assert line.startswith(f"config: method {method} learns from public rows whose task is known")


def test_the_best_round_by_validation_rows_that_are_not_there() -> None:
    line = refusal(HEART + '[evaluation]\nselect = "best_validation"\ntest_every = 1\n')
    assert line.startswith("config: evaluation.select = 'best_validation' needs validation rows, which")


def test_a_picture_where_no_folder_can_be(files: Path) -> None:
    Path("bad.toml").write_text(HEART, encoding="utf-8")
    Path("file").write_text("")
    result = CliRunner().invoke(cli.app, ["show-data", "bad.toml", "--out", "file/there", "--quiet"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "show-data: --out file/there can't be a folder" in result.stderr
