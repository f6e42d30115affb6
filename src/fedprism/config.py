"""Experiments as TOML: dataclasses of what a run needs, loading, overrides, one-line messages for mistakes.

A method's own settings are a frozen dataclass in the method's file; this module turns tables into instances
of such classes (`resolve_method`) without knowing any method. Everything else of an experiment is here.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

# Data sets of arrays and backbones of images, by name: what a config may say is checked before data are read.
IMAGES = ("fashion_mnist", "cifar10", "cifar100", "dermoscopy", "fed_isic")
TABLES = ("heart",)
CENTRED = ("dermoscopy", "fed_isic", "heart")  # they have clients of their own: partition "natural"
VISION_BACKBONES = ("resnet18", "resnet_narrow", "lenet", "lenet_small")

T = TypeVar("T")


class UserError(ValueError):
    """A mistake in a config, a file or an option. Its text is one line: what was got, needed, the way out."""


@dataclass(frozen=True)
class DataConfig:
    """Which clients there are and what they hold: tasks of text, or one data set of images or of a table.

    Which keys are read depends on that (`data_keys`); the others must be left out of a config."""

    # text: tasks of the clients; expert m belongs to tasks[m]. Either these or `dataset`.
    tasks: Annotated[tuple[str, ...], MinLen(1)] = ()
    public_only: tuple[str, ...] = ()  # tasks with a public set that no client holds; their experts come last
    clients: Count = 12  # number of clients, >= 1; drawn clients of images: 8 where a config leaves it out
    # text: mixed clients drawn at random, one task per client, or a layout of your own, written down in
    # `mixtures`. Images: "dirichlet" = heterogeneity between and inside clients by construction. "natural" =
    # the centres that made the data, without shifts; the default of a data set that has them.
    partition: Literal["dirichlet", "pure", "given", "natural"] = "dirichlet"
    alpha: Positive = 0.1  # dirichlet: concentration, > 0; small = nearly pure clients
    threshold: Fraction = 0.05  # dirichlet: shares below it become 0
    # given: a row per client with its share of each of `tasks`, >= 0, sum 1: [[1, 0], [0.5, 0.5]]. A task
    # that is asked for more than its rows gives everyone less of it, in proportion.
    mixtures: tuple[tuple[Annotated[float, Ge(0)], ...], ...] = ()
    train_per_task: CountOrZero = 0  # training rows per task over all clients; 0 = all there are
    public_per_task: CountOrZero = 0  # public rows per task; 0 = all there are
    validation_per_client: Count = 200  # rows per client
    test_per_client: Count = 200  # rows per client
    # Text: smallest training set of a client, in rows; 0 = one batch of the method. Images: smallest number
    # of rows of a client over all splits, >= 4; 0 = 50.
    min_examples: CountOrZero = 0
    root: str = ""  # folder of the data files; "" = the ones that come with fedprism
    dataset: str = ""  # images or a table, one of IMAGES and TABLES; "" = text, see `tasks`
    alpha_inter: Positive = 1.0  # images: concentration of each class over the clients, > 0
    alpha_intra: Positive = 2.0  # images: concentration of the two components inside a client, > 0
    partition_on: Literal["label", "fine"] = (
        "label"  # images: classes to spread; fine = cifar100's finer ones
    )
    examples: CountOrZero = 0  # images: at most so many in all, drawn at random; 0 = all there are
    train_fraction: Annotated[float, Gt(0), Lt(1)] = 0.7  # images: of a client's rows, the others are test
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.0  # of a client's training rows; 0 = none
    image_size: Annotated[int, Ge(8)] = 32  # images: side in pixels; must divide the images' side or 32
    invert: bool = True  # images: component 1 is inverted (grey images) or its green channel is
    permute: bool = True  # images: each client and component has its own permutation of the labels
    tint: Fraction = 0.35  # images: strength of the clients' red or blue cast
    ramp: Annotated[float, Ge(0)] = (
        0.25  # images: strength of the clients' ramps of brightness, in [0, 1] units
    )
    stored: Literal["uint8", "float16"] = "uint8"  # images: how pixels are kept in memory
    # table: missing values are filled with, and columns scaled by, numbers of all clients' training rows
    # ("federated") or the client's own ("local", which can give away whose a row is).
    imputation: Literal["federated", "local"] = "federated"
    statistics: Literal["federated", "local"] = "federated"


@dataclass(frozen=True)
class ModelConfig:
    """A frozen text backbone and what is trained on it, or a network of images or of a table, all trained.

    Which keys are read depends on `kind` (`model_keys`)."""

    # Text: LoRA inside the encoder, or heads on its frozen features. "vision" reads images, "mlp" a table. A
    # config that leaves it out gets the kind that fits the data.
    kind: Literal["encoder", "probe", "vision", "mlp"] = "encoder"
    # text: "minilm", a hub name, or a local folder. vision: one of VISION_BACKBONES, "resnet_narrow" where a
    # config leaves it out.
    backbone: str = "minilm"
    rank: Count = 4  # rank of the low-rank pairs
    lora_alpha: Positive = 8.0  # their scale is lora_alpha / rank
    dropout: Annotated[float, Ge(0), Le(0.99)] = 0.1  # on the input of the low-rank branch
    projection_bias: bool = True  # keep the pretrained bias of the adapted projections
    router_per: Literal["projection", "layer"] = "projection"  # a router each, or one for query and value
    pool: Literal["mean", "first"] = "mean"  # which tokens the head reads
    head_scale: Positive | Literal["standard"] = (
        1.0  # spread of the frozen head's random weights; "standard" = .02
    )
    max_length: Annotated[int, Ge(8)] = 128  # tokens per example, special tokens included
    # auto = bf16 where the processor has it natively; vision and mlp: fp32 where a config leaves it out
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    features: Literal["pooled", "rff"] = "pooled"  # probe: the heads see it, or random Fourier features of it
    rff_features: Annotated[int, Ge(1), Le(65_536)] = 512  # probe: number of random features
    rff_scale: Annotated[float, Ge(1e-3), Le(1e3)] = (
        1.0  # probe: kernel width, in units of sqrt(pooled entries)
    )
    cache_dir: str = ""  # probe: folder of cached features; "" = $FEDPRISM_CACHE or ~/.cache/fedprism
    router_backbone: str = "lenet"  # vision: of the routing encoder, one of VISION_BACKBONES
    width: Count = 32  # vision, mlp: features per example of the encoder, d_g
    router_width: Count = 32  # vision, mlp: features per example of the routing encoder, d_h
    hidden: Annotated[tuple[Count, ...], MinLen(1)] = (64, 64)  # mlp: widths of both encoders' hidden layers
    channels_last: bool = False  # vision: memory layout of the activations; speed only, up to rounding


@dataclass(frozen=True)
class EngineConfig:
    """How the run is carried out. The thread count is part of the result's identity: sums depend on it."""

    threads: Count = 2  # threads of the process, >= 1
    checkpoint_every: Count = 1  # rounds between checkpoints, >= 1


@dataclass(frozen=True)
class EvaluationConfig:
    """When the clients are scored, and in what batches."""

    validation_every: CountOrZero = 1  # rounds; 0 = last round only
    test_every: CountOrZero = 0  # rounds; 0 = last round only
    batch_size: Count = 64  # rows per forward pass
    # Which round is reported; "best_validation" needs both splits scored every round.
    select: Literal["final", "best_validation"] = "final"


@dataclass(frozen=True)
class Experiment:
    """Methods times seeds over one federation recipe.

    method: the raw [method] table: "names" (methods to run), plain keys shared by all methods, and one table
    per method with keys of its own. `resolve_method` turns it into the config of one method."""

    name: str
    seeds: Annotated[tuple[CountOrZero, ...], MinLen(1)]
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods to run, in order."""
        return tuple(self.method["names"])

    @property
    def shared(self) -> dict[str, Any]:
        """Settings meant for every method that has a field of that name."""
        return {k: v for k, v in self.method.items() if k != "names" and not isinstance(v, Mapping)}

    def own(self, name: str) -> dict[str, Any]:
        """Settings of one method alone, its "preset" among them."""
        return dict(self.method.get(name, {}))


# What each kind of data and of model reads.
_DRAWN_IMAGES = (
    "dataset", "clients", "partition", "alpha_inter", "alpha_intra", "min_examples", "partition_on",
    "examples", "train_fraction", "validation_fraction", "image_size", "invert", "permute", "tint", "ramp",
    "stored", "root",
)  # fmt: skip
_NATURAL_IMAGES = ("dataset", "partition", "validation_fraction", "image_size", "stored", "root")
_TABLE = ("dataset", "partition", "validation_fraction", "imputation", "statistics", "root")
_VISION = ("kind", "backbone", "router_backbone", "width", "router_width", "channels_last", "precision")
_MLP = ("kind", "width", "router_width", "hidden", "precision")


def data_keys(data: DataConfig) -> tuple[str, ...]:
    """Names of the keys of [data] that the kind of data reads, in the order of the fields."""
    if not data.dataset:
        names = {f.name for f in fields(DataConfig)}
        names -= {*_DRAWN_IMAGES, *_TABLE} - {"clients", "partition", "min_examples", "root"}
    elif data.dataset in TABLES:
        names = set(_TABLE)
    else:
        names = set(_NATURAL_IMAGES if data.partition == "natural" else _DRAWN_IMAGES)
    return tuple(f.name for f in fields(DataConfig) if f.name in names)


def model_keys(model: ModelConfig) -> tuple[str, ...]:
    """Names of the keys of [model] that its kind reads, in order; text kinds share theirs."""
    text = {f.name for f in fields(ModelConfig)} - ({*_VISION, *_MLP} - {"kind", "backbone", "precision"})
    names = {"vision": set(_VISION), "mlp": set(_MLP)}.get(model.kind, text)
    return tuple(f.name for f in fields(ModelConfig) if f.name in names)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "evaluation": EvaluationConfig,
}


def config_root() -> Path:
    """Folder of the shipped configs: $FEDPRISM_CONFIGS, else the checkout's, else the installed package's."""
    given = os.environ.get("FEDPRISM_CONFIGS")
    if given:
        return Path(given)
    package = Path(__file__).resolve().parent
    checkout = package.parents[1] / "configs"
    return checkout if checkout.is_dir() else package / "_configs"


def find(name: str | Path) -> Path:
    """The file meant by `name`: a path, or the name of a shipped config (with or without .toml).

    Raises UserError, offering the nearest names, if there is neither."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = {p.stem: p for p in sorted(config_root().glob("*.toml"))}
    stem = path.name.removesuffix(".toml")
    if path.parent in (Path(), Path("configs")) and stem in shipped:
        return shipped[stem]
    what = "is a folder" if path.is_dir() else "is no file"
    raise UserError(f"config: '{name}' {what} and no shipped config; {_offer(stem, shipped, 'shipped')}")


def load(
    path: str | Path, overrides: Sequence[str] = (), *, methods: Iterable[str] | None = None
) -> Experiment:
    """Read an experiment from TOML.

    path: a file. overrides: "a.b=c" each, c as a TOML value or else a bare string. methods: the names of all
    methods there are; with it, unknown names in `method.names` and unknown [method.X] tables are errors.
    Raises UserError for anything that can't be used, in one line with the nearest names or the range."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config: {path} is no file; name a TOML file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as fault:
        raise UserError(f"config: {path} is not valid TOML: {_one_line(str(fault))}") from fault
    except UnicodeDecodeError as fault:
        raise UserError(f"config: {path} is not UTF-8 text; save it as UTF-8") from fault
    for text in overrides:
        _override(raw, text)
    return parse(raw, methods=methods)


def parse(raw: Mapping[str, Any], *, methods: Iterable[str] | None = None) -> Experiment:
    """Turn the tables of a config into an Experiment; errors as in `load`."""
    _check_names("", raw, [f.name for f in fields(Experiment)])
    for section in (*SECTIONS, "method"):
        if section in raw and not isinstance(raw[section], Mapping):
            raise UserError(f"config: {section} is {raw[section]!r}, must be a table [{section}]")
    for name, section_class in SECTIONS.items():
        _check_names(f"{name}.", raw.get(name, {}), [f.name for f in fields(section_class)])
    known = None if methods is None else list(methods)
    _check_method_table(raw.get("method", {}), known)
    tables = _with_defaults(raw)
    parts: dict[str, Any] = {
        name: _validate(cls, tables[name], f"{name}.{{}}".format) for name, cls in SECTIONS.items()
    }
    head = _validate(_Head, {k: raw[k] for k in ("name", "seeds") if k in raw}, str)
    if not re.fullmatch(r"\w[\w.-]*", head.name):
        raise UserError(f"config: name is {head.name!r}, must name a folder: letters, digits, _ - .")
    experiment = Experiment(head.name, head.seeds, method=dict(raw["method"]), **parts)
    _check_data(raw.get("data", {}), experiment.data)
    _check_model(raw.get("model", {}), experiment)
    for what, values in (
        ("seeds", experiment.seeds),
        ("method.names", experiment.methods),
        ("data.tasks and data.public_only", (*experiment.data.tasks, *experiment.data.public_only)),
    ):
        twice = sorted({str(v) for v in values if list(values).count(v) > 1})
        if twice:
            raise UserError(f"config: {what} has {', '.join(twice)} more than once; name each once")
    _check_mixtures(experiment.data)
    return experiment


def _with_defaults(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of a config's sections, with the defaults that depend on the kind of data or model."""
    tables = {name: dict(raw.get(name, {})) for name in SECTIONS}
    data, model = tables["data"], tables["model"]
    dataset = data.get("dataset")
    if dataset in CENTRED:
        data.setdefault("partition", "natural")
    if dataset in IMAGES and data.get("partition") != "natural":
        data.setdefault("clients", 8)
    if dataset in (*IMAGES, *TABLES):
        model.setdefault("kind", "mlp" if dataset in TABLES else "vision")
    if model.get("kind") == "vision":
        model.setdefault("backbone", "resnet_narrow")
    if model.get("kind") in ("vision", "mlp"):
        model.setdefault("precision", "fp32")
    return tables


def _check_data(given: Mapping[str, Any], data: DataConfig) -> None:
    """Tasks or a data set, a partition it has, and no key that it never reads. given: the raw table."""
    known = (*IMAGES, *TABLES)
    if data.tasks and data.dataset:
        raise UserError(
            "config: data.tasks and data.dataset are both given, needs one of them; keep tasks for text, or "
            "dataset for images or a table"
        )
    if not data.tasks and not data.dataset:
        raise UserError(
            "config: data.tasks is missing; name tasks of text there, or images or a table as data.dataset "
            f"({', '.join(known)})"
        )
    if data.dataset and data.dataset not in known:
        raise UserError(
            f"config: data.dataset has unknown '{data.dataset}'; {_offer(data.dataset, known)} (text goes by "
            "data.tasks)"
        )
    arrays = [task for task in (*data.tasks, *data.public_only) if task in known and not data.root]
    if arrays:
        raise UserError(
            f"config: data.tasks has '{arrays[0]}', which is no text; set data.dataset = '{arrays[0]}'"
        )
    needs: tuple[str, ...] = ("dirichlet", "pure", "given") if data.tasks else ("dirichlet", "natural")
    if data.dataset in TABLES:
        needs = ("natural",)
    elif data.dataset and data.dataset not in CENTRED:
        needs = ("dirichlet",)
    what = f"data.dataset = '{data.dataset}'" if data.dataset else "data.tasks"
    if data.partition not in needs:
        raise UserError(
            f"config: data.partition is '{data.partition}', with {what} it must be {' or '.join(needs)}; "
            "correct it or leave it out"
        )
    kind = f"{what} with partition = '{data.partition}'" if data.dataset in CENTRED else what
    _check_read("data", given, data_keys(data), kind)


def _check_model(given: Mapping[str, Any], experiment: Experiment) -> None:
    """A model that reads the data, and no key that it never reads. given: the raw table."""
    data, model = experiment.data, experiment.model
    fitting: tuple[str, ...] = ("encoder", "probe")
    what = "text (data.tasks)"
    if data.dataset in IMAGES:
        fitting, what = ("vision",), f"images (data.dataset = '{data.dataset}')"
    elif data.dataset in TABLES:
        fitting, what = ("mlp",), f"a table (data.dataset = '{data.dataset}')"
    if model.kind not in fitting:
        raise UserError(
            f"config: model.kind is '{model.kind}', the clients hold {what}, which needs "
            f"{' or '.join(repr(kind) for kind in fitting)}; correct model.kind or the data"
        )
    if model.kind == "vision":
        for key, name in (("backbone", model.backbone), ("router_backbone", model.router_backbone)):
            if name not in VISION_BACKBONES:
                raise UserError(f"config: model.{key} has unknown '{name}'; {_offer(name, VISION_BACKBONES)}")
    _check_read("model", given, model_keys(model), f"model.kind = '{model.kind}'")


def _check_read(section: str, given: Mapping[str, Any], read: Sequence[str], kind: str) -> None:
    """Raises UserError for keys that nothing would read; empty text is as good as none."""
    stray = [f"{section}.{key}" for key, value in given.items() if key not in read and value != ""]
    if stray:
        raise UserError(
            f"config: {', '.join(stray)} {'are' if len(stray) > 1 else 'is'} set, which {kind} never reads; "
            f"leave {'them' if len(stray) > 1 else 'it'} out"
        )


def _check_mixtures(data: DataConfig) -> None:
    """Mixtures and the partition "given" need each other; whether the rows fit is the partition's to say."""
    if data.partition == "given" and not data.mixtures:
        raise UserError(
            f"config: data.mixtures is missing, data.partition = 'given' needs {data.clients} rows (clients) "
            f"of {len(data.tasks)} shares (tasks); write them down or choose another partition"
        )
    if data.mixtures and data.partition != "given":
        raise UserError(
            f"config: data.mixtures is read with data.partition = 'given' only, which is "
            f"'{data.partition}'; set it to 'given' or drop data.mixtures"
        )


@dataclass(frozen=True)
class _Head:
    """The plain keys at the top of a config."""

    name: Annotated[str, MinLen(1)]
    seeds: Annotated[tuple[CountOrZero, ...], MinLen(1)]


def _check_method_table(table: Mapping[str, Any], known: list[str] | None) -> None:
    names = table.get("names")
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) for n in names):
        got = "is missing" if names is None else f"is {names!r}"
        raise UserError(f'config: method.names {got}, must be a list of methods, like ["fedsee", "fedit"]')
    if known is None:
        return
    for name in names:
        if name not in known:
            raise UserError(f"config: method.names has unknown '{name}'; {_offer(name, known)}")
    for name, value in table.items():
        if isinstance(value, Mapping) and name not in known:
            raise UserError(f"config: [method.{name}] belongs to no method; {_offer(name, known)}")


def resolve_method(
    config_class: type[T],
    presets: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    name: str,
) -> T:
    """The config of one method: its preset, then `shared`, then `own`, the later ones winning.

    config_class: frozen dataclass; ranges come from Annotated fields. presets: preset name -> field values;
    "default" may be absent (no values). shared: [method] keys; those that this class lacks are skipped
    (`check_shared_used` finds those that nobody reads). own: [method.<name>] keys, "preset" among them.
    Raises UserError for an unknown preset or own key, or a value of the wrong type or range."""
    names = [f.name for f in fields(config_class)]  # type: ignore[arg-type]
    own = dict(own)
    preset = own.pop("preset", "default")
    if preset != "default" and preset not in presets:
        offer = _offer(str(preset), {"default", *presets}, "presets")
        raise UserError(f"config: method.{name}.preset is {preset!r}; {offer}")
    _check_names(f"method.{name}.", own, [*names, "preset"])
    start = presets.get(preset, {})
    stray = sorted(set(start) - set(names))
    if stray:
        raise ValueError(f"method '{name}': preset '{preset}' sets {stray}, which its config does not have")
    values = {**start, **{k: v for k, v in shared.items() if k in names}, **own}
    from_shared = set(shared) - set(own)
    return _validate(
        config_class, values, lambda key: f"method.{key}" if key in from_shared else f"method.{name}.{key}"
    )


def check_shared_used(shared: Mapping[str, Any], config_classes: Mapping[str, type]) -> None:
    """Raise UserError for a plain [method] key that the config of none of the run's methods has.

    config_classes: method name -> its config class."""
    read = sorted({f.name for cls in config_classes.values() for f in fields(cls)})
    for key in shared:
        if key not in read:
            if key == "preset":
                way_out = "write it under [method.<name>]"
            else:
                way_out = _offer(key, read)
            raise UserError(f"config: method.{key} is read by none of {', '.join(config_classes)}; {way_out}")


def for_run(experiment: Experiment, method: str, seed: int, settings: Any) -> Experiment:
    """The experiment that is one run: one method, one seed, every setting of the method written out.

    settings: the method's resolved config (`resolve_method`). A setting that is None stays to its preset."""
    own = {"preset": experiment.own(method).get("preset", "default"), **asdict(settings)}
    table = {"names": [method], method: {k: v for k, v in own.items() if v is not None}}
    return replace(experiment, seeds=(seed,), method=table)


def as_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain tables, in the order in which a config is written, without unread keys."""
    data, model = asdict(experiment.data), asdict(experiment.model)
    return {
        "name": experiment.name,
        "seeds": list(experiment.seeds),
        "data": {key: data[key] for key in data_keys(experiment.data)},
        "model": {key: model[key] for key in model_keys(experiment.model)},
        "method": experiment.method,
        "engine": asdict(experiment.engine),
        "evaluation": asdict(experiment.evaluation),
    }


def dumps(experiment: Experiment) -> str:
    """The experiment as TOML, complete: `load` gives an equal experiment back."""
    return tomli_w.dumps(as_dict(experiment))


def dump(experiment: Experiment, path: str | Path) -> None:
    """Write `dumps(experiment)` to a file, replacing it in one step."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(dumps(experiment), encoding="utf-8")
    temporary.replace(path)


def config_hash(experiment: Experiment) -> str:
    """sha256 (hex) of everything an experiment says; equal configs have equal hashes, however written."""
    canonical = json.dumps(as_dict(experiment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- overrides -----------------------------------------------------------------------------------


def _override(raw: dict[str, Any], text: str, example: str = "method.lr=0.01") -> None:
    """Apply "a.b=c" to nested tables, creating tables on the way."""
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise UserError(f"--set: got '{text}', needs key=value, for example {example}")
    table = raw
    for depth, part in enumerate(path[:-1], start=1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set: '{text}' needs a table {'.'.join(path[:depth])}, which is {inner!r}")
        table = inner
    table[path[-1]] = _value(value.strip())


def parse_settings(texts: Sequence[str], *, example: str = "method.lr=0.01") -> dict[str, Any]:
    """Settings "a=c" as a table, c as in `load`. Raises UserError for a text without "=" or a name."""
    table: dict[str, Any] = {}
    for text in texts:
        _override(table, text, example)
    return table


def _value(text: str) -> Any:
    """A TOML value, also .5 and 5. for numbers; a list may have bare words; the rest are bare strings."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return float(text) if re.fullmatch(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", text) else text
    value = parsed["value"]
    if set(parsed) != {"value"} or isinstance(value, (datetime.date, datetime.time)):
        return text
    return value


# ---- messages ------------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _offer(wrong: str, known: Iterable[str], word: str = "known") -> str:
    """'did you mean ...; known: ...' for a name that is none of `known`."""
    known = sorted(known)
    folded = {name.casefold(): name for name in known}
    near = [folded[n] for n in difflib.get_close_matches(wrong.casefold(), folded, n=3, cutoff=0.6)]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}{word}: {', '.join(known) or 'none'}"


def _check_names(prefix: str, got: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in got:
        if key not in known:
            raise UserError(f"config: unknown key {prefix}{key}; {_offer(key, known)}")


def _validate(config_class: type[T], values: Mapping[str, Any], where: Callable[[str], str]) -> T:
    """An instance of a dataclass from TOML values, without turning one type into another.

    where(key) -> dotted name of a field for messages. A whole number may stand where a fraction is asked."""
    adapter: TypeAdapter[T] = TypeAdapter(config_class)
    text = json.dumps(dict(values), default=_no_json)  # JSON mode: arrays may become tuples, and nothing else
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as fault:
        faults: dict[str, list[Any]] = {}
        for error in fault.errors(include_url=False):
            faults.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
        lines = [
            _describe(where(key) if key else "", found, values.get(key)) for key, found in faults.items()
        ]
        raise UserError("config: " + "; ".join(lines)) from fault


def _no_json(value: Any) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):
        return f"{value}"
    raise TypeError(f"a config value can't be a {type(value).__name__}: {value!r}")


WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": 'text in quotes, like "this"',
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
}
RANGES = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _describe(name: str, errors: Sequence[Any], value: Any) -> str:
    """'a.b is 0, must be >= 1' for all errors of one field (several where it accepts several types)."""
    if errors[0]["type"] == "missing":
        return f"{name} is missing"
    if not name:
        return _one_line(str(errors[0]["msg"]))
    needs = []
    for error in errors:
        kind, facts = error["type"], error.get("ctx", {})
        if kind in WORDS:
            need = WORDS[kind]
        elif kind == "literal_error":
            choices = re.findall(r"'([^']*)'", str(facts["expected"]))
            near = difflib.get_close_matches(str(value), choices, n=1)
            need = f"one of {', '.join(choices)}" + (f" (did you mean {near[0]}?)" if near else "")
        elif kind in RANGES:
            sign, key = RANGES[kind]
            need = f"{sign} {facts[key]:g}"
        elif kind == "too_short":
            need = f"a list of at least {facts['min_length']}"
        else:
            need = _one_line(str(error["msg"]))
        if need not in needs:
            needs.append(need)
    index = next((part for part in errors[0]["loc"][1:] if isinstance(part, int)), None)
    if index is not None and isinstance(value, (list, tuple)):
        name, value = f"{name}[{index}]", value[index]
    return f"{name} is {value!r}, must be {' or '.join(needs)}"
