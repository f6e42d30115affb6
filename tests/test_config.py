"""Configs: loading, overrides, method settings, and messages that say what to do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le

from fedprism import config
from fedprism.config import UserError
from fedprism.data.catalogue import ARRAYS
from fedprism.data.image_federation import NATURAL
from fedprism.models.vision import BACKBONES

MINIMAL = """
name = "demo"
seeds = [42]
[data]
tasks = ["sst2", "cola"]
[method]
names = ["fedsee", "fedit"]
"""
METHODS = ["fedsee", "fedit", "scaffold"]


@dataclass(frozen=True)
class Settings:
    """A method's config as a method file would have it."""

    rounds: Annotated[int, Ge(1)] = 10
    lr: Annotated[float, Gt(0)] = 5e-4
    fraction: Annotated[float, Ge(0), Le(1)] = 1.0
    align: Literal["none", "lstsq"] = "none"
    shared_pair: bool = True
    limit: int | None = None
    clips: tuple[float, ...] = (0.1, 0.1)
    title: str = "plain"


PRESETS: dict[str, dict[str, Any]] = {"default": {"align": "lstsq"}, "paper": {"lr": 1e-3, "rounds": 20}}


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "demo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, *overrides: str, text: str = MINIMAL) -> config.Experiment:
    return config.load(write(folder, text), overrides, methods=METHODS)


def complaint(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, *overrides, text=text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def resolve(shared: dict[str, Any] | None = None, own: dict[str, Any] | None = None) -> Settings:
    return config.resolve_method(Settings, PRESETS, shared or {}, own or {}, "fedsee")


def test_a_minimal_config_gets_the_defaults(tmp_path: Path) -> None:
    experiment = load(tmp_path)
    assert experiment.methods == ("fedsee", "fedit")
    assert experiment.seeds == (42,)
    assert experiment.data == config.DataConfig(tasks=("sst2", "cola"))
    assert experiment.model == config.ModelConfig()
    assert experiment.engine.threads == 2
    assert experiment.shared == {}


def test_shared_and_own_method_keys_are_told_apart(tmp_path: Path) -> None:
    text = MINIMAL + "rounds = 3\n[method.fedsee]\npreset = 'paper'\nlr = 0.1\n"
    experiment = load(tmp_path, text=text)
    assert experiment.shared == {"rounds": 3}
    assert experiment.own("fedsee") == {"preset": "paper", "lr": 0.1}
    assert experiment.own("fedit") == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.clients=7", 7),
        ("data.alpha=0.5", 0.5),
        ("data.alpha=5", 5.0),
        ("data.root=some/folder", "some/folder"),
        ('data.root="12"', "12"),
        ("data.root=", ""),
        ("data.root = a=b", "a=b"),
        ("data.root=2024-01-01", "2024-01-01"),
        ("model.projection_bias=false", False),
        ('data.tasks=["rte", "wic"]', ("rte", "wic")),
        ("data.tasks=[rte, wic]", ("rte", "wic")),
        ("model.head_scale=standard", "standard"),
        ("model.head_scale=2", 2.0),
        ("seeds=[1,2]", (1, 2)),
        ("engine.threads=4", 4),
    ],
)
def test_set_takes_values_of_every_type(tmp_path: Path, override: str, expected: Any) -> None:
    found: Any = load(tmp_path, override)
    for part in override.partition("=")[0].strip().split("."):
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


def test_set_reaches_method_tables_and_makes_missing_ones(tmp_path: Path) -> None:
    experiment = load(tmp_path, "method.lr=1e-3", "method.fedsee.align=lstsq", "method.fedsee.active=[1, 2]")
    assert experiment.shared == {"lr": 1e-3}
    assert experiment.own("fedsee") == {"align": "lstsq", "active": [1, 2]}


def test_a_later_set_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "data.clients=7", "data.clients=8").data.clients == 8


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.aplha=1", ["unknown key data.aplha", "did you mean alpha?"]),
        ("dta.alpha=1", ["unknown key dta", "did you mean data"]),
        ("engine.thread=1", ["engine.thread", "did you mean threads?"]),
        ("modle.rank=1", ["unknown key modle", "did you mean model"]),
        ("method.names=[fedse]", ["'fedse'", "did you mean fedsee"]),
        ("method.fedsie.lr=1", ["[method.fedsie]", "did you mean fedsee"]),
        ("data.partition=dirichlt", ["data.partition is 'dirichlt'", "did you mean dirichlet?"]),
        ("data.clients=0", ["data.clients is 0, must be >= 1"]),
        ("data.clients=2.5", ["data.clients is 2.5, must be a whole number"]),
        ("data.clients='5'", ["data.clients is '5', must be a whole number"]),
        ("data.clients=true", ["data.clients is True, must be a whole number"]),
        ("data.alpha=-1", ["data.alpha is -1, must be > 0"]),
        ("data.threshold=1.5", ["data.threshold is 1.5, must be <= 1"]),
        ("data.alpha='0.1'", ["data.alpha is '0.1', must be a number"]),
        ("data.root=3", ["data.root is 3, must be text in quotes"]),
        ("model.projection_bias=1", ["model.projection_bias is 1, must be true or false"]),
        ("model.projection_bias=True", ["model.projection_bias is 'True', must be true or false"]),
        ("model.head_scale=0", ["model.head_scale is 0", "> 0 or one of standard"]),
        ("data.tasks=sst2", ["data.tasks is 'sst2', must be a list"]),
        ("data.tasks=[]", ["data.tasks is [], must be a list of at least 1"]),
        ("data.tasks=[sst2, 3]", ["data.tasks[1] is 3, must be text"]),
        ("data.tasks=[sst2, sst2]", ["data.tasks", "sst2 more than once"]),
        ("data.public_only=[cola]", ["cola more than once"]),
        ("seeds=[1,1]", ["seeds has 1 more than once"]),
        ("seeds=[]", ["seeds is []", "at least 1"]),
        ("seeds=[-1]", ["seeds[0] is -1, must be >= 0"]),
        ("seeds=[1,x]", ["seeds[1] is 'x', must be a whole number"]),
        ("method.names=[]", ["method.names is []", "must be a list of methods"]),
        ("method.names=fedsee", ["method.names is 'fedsee'"]),
        ("name=../x", ["name is '../x'"]),
        ("data=3", ["data is 3, must be a table [data]"]),
        ("name.x=3", ["--set", "name", "'demo'"]),
        ("alpha", ["--set", "needs key=value"]),
        ("=3", ["--set", "needs key=value"]),
        ("data..alpha=3", ["--set", "needs key=value"]),
    ],
)
def test_mistakes_are_answered_in_one_line(tmp_path: Path, override: str, parts: list[str]) -> None:
    message = complaint(tmp_path, override)
    for part in parts:
        assert part in message


def test_several_mistakes_of_a_table_come_together(tmp_path: Path) -> None:
    message = complaint(tmp_path, "data.clients=0", "data.alpha=0")
    assert "data.clients is 0, must be >= 1; data.alpha is 0, must be > 0" in message


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert "method.names is missing" in complaint(tmp_path, text="name='x'\nseeds=[1]\n[data]\ntasks=['a']")
    assert "data.tasks is missing" in complaint(
        tmp_path, text="name='x'\nseeds=[1]\n[method]\nnames=['fedit']"
    )
    assert "seeds is missing" in complaint(tmp_path, text=MINIMAL.replace("seeds = [42]", ""))


def test_broken_toml_names_file_and_place(tmp_path: Path) -> None:
    message = complaint(tmp_path, text="name = \n")
    assert "demo.toml is not valid TOML" in message
    assert "line 1" in message


def test_a_file_that_is_not_text_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        config.load(path)


def test_dumped_and_loaded_configs_are_equal(tmp_path: Path) -> None:
    text = MINIMAL + "lr = 1e-05\nrounds = 3\n[method.fedsee]\npreset = 'paper'\nclips = [0.1, inf]\n"
    experiment = load(tmp_path, "data.alpha=0.1", "model.head_scale=standard", text=text)
    config.dump(experiment, tmp_path / "again.toml")
    again = config.load(tmp_path / "again.toml")
    assert again == experiment
    assert config.config_hash(again) == config.config_hash(experiment)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_the_hash_tells_experiments_apart(tmp_path: Path) -> None:
    assert config.config_hash(load(tmp_path)) == config.config_hash(load(tmp_path, "data.alpha=0.1"))
    assert config.config_hash(load(tmp_path)) != config.config_hash(load(tmp_path, "engine.threads=1"))


def test_own_beats_shared_beats_preset() -> None:
    assert resolve() == Settings(align="lstsq")
    assert resolve({"lr": 0.1}, {"preset": "paper"}) == Settings(lr=0.1, rounds=20)
    assert resolve({"lr": 0.1}, {"preset": "paper", "lr": 0.2}) == Settings(lr=0.2, rounds=20)
    assert resolve({"lr": 0.1, "beta": 3}) == Settings(lr=0.1, align="lstsq")
    assert resolve(own={"clips": [1, 2], "limit": 3}) == Settings(clips=(1.0, 2.0), limit=3, align="lstsq")


@pytest.mark.parametrize(
    ("shared", "own", "parts"),
    [
        ({}, {"rounds": 0}, ["config: method.fedsee.rounds is 0, must be >= 1"]),
        ({"rounds": 0}, {}, ["config: method.rounds is 0, must be >= 1"]),
        ({}, {"round": 1}, ["unknown key method.fedsee.round", "did you mean rounds?"]),
        ({}, {"preset": "papr"}, ["method.fedsee.preset is 'papr'", "did you mean paper?"]),
        ({}, {"align": "lsq"}, ["method.fedsee.align is 'lsq'", "none, lstsq", "did you mean lstsq?"]),
        ({}, {"rounds": "5"}, ["method.fedsee.rounds is '5', must be a whole number"]),
        ({}, {"limit": "x"}, ["method.fedsee.limit is 'x', must be a whole number"]),
    ],
)
def test_method_settings_are_checked(shared: dict[str, Any], own: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(shared, own)
    for part in parts:
        assert part in str(caught.value)


def test_a_preset_with_a_stray_key_is_refused() -> None:
    with pytest.raises(ValueError, match="preset 'paper' sets \\['beta'\\]"):
        config.resolve_method(Settings, {"paper": {"beta": 1}}, {}, {"preset": "paper"}, "fedsee")


def test_a_shared_key_that_no_method_reads_is_an_error() -> None:
    config.check_shared_used({"rounds": 1}, {"fedsee": Settings})
    with pytest.raises(UserError, match=r"method\.ronds is read by none of fedsee; did you mean rounds\?"):
        config.check_shared_used({"ronds": 1}, {"fedsee": Settings})
    with pytest.raises(UserError, match=r"preset.*under \[method\.<name>\]"):
        config.check_shared_used({"preset": "paper"}, {"fedsee": Settings})


def test_the_config_of_one_run_stands_for_itself(tmp_path: Path) -> None:
    text = MINIMAL + "rounds = 3\n[method.fedsee]\npreset = 'paper'\n"
    experiment = load(tmp_path, text=text)
    settings = resolve(experiment.shared, experiment.own("fedsee"))
    config.dump(config.for_run(experiment, "fedsee", 42, settings), tmp_path / "run.toml")
    alone = config.load(tmp_path / "run.toml", methods=METHODS)
    assert (alone.methods, alone.seeds, alone.shared) == (("fedsee",), (42,), {})
    assert resolve(alone.shared, alone.own("fedsee")) == settings


def test_configs_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setenv("FEDPRISM_CONFIGS", str(tmp_path))
    assert config.find(path) == path
    monkeypatch.chdir("/")
    for name in ("demo", "demo.toml", "configs/demo.toml"):
        assert config.find(name) == path
    with pytest.raises(UserError, match=r"'dmo' is no file and no shipped config; did you mean demo\?"):
        config.find("dmo")
    with pytest.raises(UserError, match="is a folder"):
        config.find(tmp_path)


def test_a_layout_written_down_is_read_and_written(tmp_path: Path) -> None:
    experiment = load(
        tmp_path, "data.partition=given", "data.clients=2", "data.mixtures=[[1, 0], [0.25, 0.75]]"
    )
    assert experiment.data.mixtures == ((1.0, 0.0), (0.25, 0.75))
    config.dump(experiment, tmp_path / "again.toml")
    assert config.load(tmp_path / "again.toml") == experiment


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.partition=given"], "data.mixtures is missing, data.partition = 'given' needs 12 rows"),
        (["data.mixtures=[[1, 0]]"], "data.mixtures is read with data.partition = 'given' only, which is"),
        (["data.partition=given", "data.mixtures=[[1.5, -0.5]]"], "data.mixtures[0] is [1.5, -0.5], must be"),
        (["data.partition=given", "data.mixtures=[1, 0]"], "data.mixtures[0] is 1, must be a list"),
    ],
)
def test_layouts_that_cannot_be_meant_are_refused(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    assert expected in complaint(tmp_path, *overrides)


def test_random_features_have_their_settings(tmp_path: Path) -> None:
    plain = load(tmp_path).model
    assert (plain.features, plain.rff_features, plain.rff_scale) == ("pooled", 512, 1.0)
    model = load(tmp_path, "model.features=rff", "model.rff_features=64", "model.rff_scale=2").model
    assert (model.features, model.rff_features, model.rff_scale) == ("rff", 64, 2.0)
    assert "model.features is 'rf', must be one of pooled, rff" in complaint(tmp_path, "model.features=rf")
    assert "model.rff_features is 0, must be >= 1" in complaint(tmp_path, "model.rff_features=0")
    assert "model.rff_scale is 0, must be >= 0.001" in complaint(tmp_path, "model.rff_scale=0")


# ---- images and tables ---------------------------------------------------------------------------

ARRAY = MINIMAL.replace('tasks = ["sst2", "cola"]', 'dataset = "{}"')


def test_a_config_may_name_every_data_set_of_arrays_and_every_backbone_that_there_is() -> None:
    assert {*config.IMAGES, *config.TABLES} == set(ARRAYS)
    assert set(config.CENTRED) == set(NATURAL)
    assert set(config.VISION_BACKBONES) == set(BACKBONES)


@pytest.mark.parametrize(
    ("dataset", "partition", "clients", "kind", "backbone"),
    [
        ("fashion_mnist", "dirichlet", 8, "vision", "resnet_narrow"),
        ("dermoscopy", "natural", 12, "vision", "resnet_narrow"),
        ("heart", "natural", 12, "mlp", "minilm"),
    ],
)
def test_a_data_set_brings_defaults_of_its_kind(
    tmp_path: Path, dataset: str, partition: str, clients: int, kind: str, backbone: str
) -> None:
    experiment = load(tmp_path, text=ARRAY.format(dataset))
    data, model = experiment.data, experiment.model
    assert (data.partition, data.clients) == (partition, clients)
    assert (model.kind, model.backbone, model.precision) == (kind, backbone, "fp32")
    assert (data.imputation, data.statistics) == ("federated", "federated")
    config.dump(experiment, tmp_path / "again.toml")
    assert config.load(tmp_path / "again.toml") == experiment


def test_centres_may_be_pooled_and_drawn_anew(tmp_path: Path) -> None:
    experiment = load(tmp_path, "data.partition=dirichlet", text=ARRAY.format("dermoscopy"))
    assert (experiment.data.partition, experiment.data.clients) == ("dirichlet", 8)


def test_a_config_of_text_is_written_as_it_always_was(tmp_path: Path) -> None:
    written = config.as_dict(load(tmp_path))
    assert list(written["data"]) == [
        "tasks", "public_only", "clients", "partition", "alpha", "threshold", "mixtures", "train_per_task",
        "public_per_task", "validation_per_client", "test_per_client", "min_examples", "root",
    ]  # fmt: skip
    assert list(written["model"]) == [
        "kind", "backbone", "rank", "lora_alpha", "dropout", "projection_bias", "router_per", "pool",
        "head_scale", "max_length", "precision", "features", "rff_features", "rff_scale", "cache_dir",
    ]  # fmt: skip


def test_every_key_is_read_by_some_kind_of_data_or_model() -> None:
    sets: dict[str, Any] = {"": "pure", "cifar10": "dirichlet", "dermoscopy": "natural", "heart": "natural"}
    made = [config.DataConfig(dataset=name, partition=kind) for name, kind in sets.items()]
    read = {key for data in made for key in config.data_keys(data)}
    assert read == {f.name for f in fields(config.DataConfig)}
    kinds: list[Any] = ["encoder", "probe", "vision", "mlp"]
    read = {key for kind in kinds for key in config.model_keys(config.ModelConfig(kind))}
    assert read == {f.name for f in fields(config.ModelConfig)}


@pytest.mark.parametrize(
    ("dataset", "overrides", "parts"),
    [
        ("fashion_mnist", ["data.tasks=[sst2]"], ["data.tasks and data.dataset are both given"]),
        ("fashion_mist", [], ["data.dataset has unknown 'fashion_mist'", "did you mean fashion_mnist?"]),
        ("", [], ["data.tasks is missing; name tasks of text there, or images or a table as data.dataset"]),
        (
            "heart",
            ["data.partition=dirichlet"],
            ["data.partition is 'dirichlet'", "'heart' it must be natural"],
        ),
        (
            "cifar10",
            ["data.partition=natural"],
            ["data.partition is 'natural'", "'cifar10' it must be dirichlet"],
        ),
        (
            "dermoscopy",
            ["data.partition=pure"],
            ["it must be dirichlet or natural; correct it or leave it out"],
        ),
        (
            "heart",
            ["data.alpha=0.1", "data.image_size=32"],
            [
                "data.alpha, data.image_size are set, which data.dataset = 'heart'",
                "never reads; leave them out",
            ],
        ),
        (
            "dermoscopy",
            ["data.tint=0.1"],
            ["data.tint is set, which data.dataset = 'dermoscopy' with partition = 'natural' never reads"],
        ),
        ("fashion_mnist", ["data.imputation=local"], ["data.imputation is set, which data.dataset = 'fash"]),
        ("fashion_mnist", ["data.train_fraction=1"], ["data.train_fraction is 1, must be < 1"]),
        ("fashion_mnist", ["data.image_size=7"], ["data.image_size is 7, must be >= 8"]),
        (
            "fashion_mnist",
            ["data.stored=float32"],
            ["data.stored is 'float32', must be one of uint8, float16"],
        ),
        (
            "fashion_mnist",
            ["model.kind=mlp"],
            ["model.kind is 'mlp', the clients hold images", "needs 'vision'"],
        ),
        ("fashion_mnist", ["model.kind=encoder"], ["model.kind is 'encoder'", "needs 'vision'"]),
        ("heart", ["model.kind=vision"], ["model.kind is 'vision', the clients hold a table", "needs 'mlp'"]),
        ("heart", ["model.backbone=lenet"], ["model.backbone is set, which model.kind = 'mlp' never reads"]),
        ("heart", ["model.rank=2"], ["model.rank is set, which model.kind = 'mlp' never reads"]),
        ("heart", ["model.hidden=[]"], ["model.hidden is [], must be a list of at least 1"]),
        ("heart", ["model.hidden=[8,0]"], ["model.hidden[1] is 0, must be >= 1"]),
        ("cifar10", ["model.backbone=resnet81"], ["model.backbone has unknown 'resnet81'", "mean resnet18"]),
        ("cifar10", ["model.router_backbone=lenets"], ["model.router_backbone has unknown", "mean lenet"]),
        ("cifar10", ["model.max_length=64"], ["model.max_length is set, which model.kind = 'vision' never"]),
    ],
)
def test_mistakes_about_images_and_tables_are_answered_in_one_line(
    tmp_path: Path, dataset: str, overrides: list[str], parts: list[str]
) -> None:
    message = complaint(tmp_path, *overrides, text=ARRAY.format(dataset))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.image_size=32", "data.image_size is set, which data.tasks never reads; leave it out"),
        (
            "data.partition=natural",
            "data.partition is 'natural', with data.tasks it must be dirichlet or pure or",
        ),
        ("data.tasks=[heart]", "data.tasks has 'heart', which is no text; set data.dataset = 'heart'"),
        (
            "model.kind=vision",
            "model.kind is 'vision', the clients hold text (data.tasks), which needs 'encoder'",
        ),
        ("model.kind=mlp", "model.kind is 'mlp', the clients hold text"),
        ("model.width=8", "model.width is set, which model.kind = 'encoder' never reads; leave it out"),
    ],
)
def test_text_refuses_what_images_and_tables_have(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in complaint(tmp_path, override)
    assert load(tmp_path, "data.tasks=[heart]", "data.root=mine").data.tasks == (
        "heart",
    )  # a task of one's own
