"""The house rules that can be read off the source: who imports whom, where asks stand, what is never used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from fedprism import config
from fedprism.methods.registry import METHODS, get_method

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedprism"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Folder or module (the most specific entry holds) -> what of ours it may import; a folder ends with ".*".
MAY_IMPORT: dict[str, list[str]] = {
    "trees": [],
    "protocol": [],
    "training": ["privacy", "trees"],
    "privacy": ["trees"],
    "models": ["models.*", "trees"],
    "data": ["data.*"],
    "methods": ["trees", "protocol", "training", "privacy", "models.interface", "methods.*"],
    "engines": ["engines.*", "protocol", "trees"],
    "evaluation": ["evaluation.*", "protocol", "trees", "models.interface"],
    "evaluation.measure": ["evaluation.metrics", "protocol", "trees", "models.interface"],
    "evaluation.metrics": ["protocol", "trees", "models.interface"],
    "evaluation.reports": [
        "storage",
        "evaluation.metrics",
        "evaluation.plots",
        "evaluation.geometry_plots",
        "evaluation.outside_plots",
        "evaluation.page",
    ],
    "evaluation.plots": ["storage", "evaluation.metrics"],
    "evaluation.page": ["storage", "evaluation.metrics", "evaluation.plots"],
    "evaluation.laboratory": ["evaluation.plots"],
    "evaluation.previews": ["evaluation.plots"],
    "evaluation.outside_plots": ["storage", "evaluation.metrics", "evaluation.plots"],
    "evaluation.geometry_plots": ["storage", "evaluation.metrics", "evaluation.plots"],
    "theory": ["theory.*", "trees", "methods.*", "models.interface"],
    "serving": ["serving.*", "storage", "models.*", "methods.registry", "config", "protocol"],
    "config": ["trees"],
    "storage": ["trees"],
    "api": ["*"],
    "cli": [
        "api",
        "config",
        "methods.registry",
        "evaluation.reports",
        "evaluation.plots",
        "evaluation.laboratory",
    ],
}
METHOD_FILES = {target.partition(":")[0].removeprefix("fedprism.methods.") for target in METHODS.values()}
LONG_METHODS = {"fedsee": 400, "fedgmm": 400, "fedspm": 385}


def module_name(path: Path) -> str:
    """Dotted name below fedprism: "methods.fedsee"; "methods" for the folder's __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree, parsed once."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def resolve(dotted: str) -> str:
    """The module that a dotted name belongs to: "trees.add" is in "trees"."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of ours that a file imports, wherever in it; "" is the package itself."""
    found: set[str] = set()
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {
            resolve(n.removeprefix("fedprism").removeprefix("."))
            for n in names
            if n.split(".")[0] == "fedprism"
        }
    return frozenset(found)


def allowed(name: str, imported: str) -> bool:
    key = name
    while key not in MAY_IMPORT:
        key = key.rpartition(".")[0]
    patterns = MAY_IMPORT[key]
    return any(
        pattern in ("*", imported) or (pattern.endswith(".*") and (imported + ".").startswith(pattern[:-1]))
        for pattern in patterns
    )


def calls(found: list[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """The calls among nodes, with the dotted name of what is called."""
    for node in found:
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_every_module_has_a_place_in_the_table() -> None:
    for name in MODULES:
        if name:
            assert name.split(".")[0] in MAY_IMPORT, f"{name} stands in no row of the table"


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_modules_import_only_what_they_may(name: str) -> None:
    wrong = {found for found in imports(MODULES[name]) if not allowed(name, found)}
    assert not wrong, f"{name} imports {sorted(wrong)}"


@pytest.mark.parametrize("name", sorted(METHOD_FILES))
def test_methods_know_no_other_methods(name: str) -> None:
    others = {f"methods.{other}" for other in METHOD_FILES - {name}} | {"methods.registry"}
    assert not imports(MODULES[f"methods.{name}"]) & others


def test_numerical_cores_know_no_methods() -> None:
    for name, path in MODULES.items():
        folder, _, file = name.partition(".")
        if folder == "methods" and file and file not in METHOD_FILES:
            assert not imports(path) & {f"methods.{method}" for method in METHOD_FILES}, name


def test_there_are_no_cycles() -> None:
    graph = {name: imports(path) - {name, ""} for name, path in MODULES.items()}
    while graph:
        leaves = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert leaves, f"cycle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


def test_init_files_hold_only_exports() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                exports = isinstance(node, (ast.Import, ast.ImportFrom)) or (
                    isinstance(node, ast.Assign)
                    and ast.unparse(node.targets[0]) in ("__all__", "__version__")
                )
                assert docstring or exports, f"{path}: {ast.unparse(node)[:80]}"


def asks_elsewhere(found: list[ast.AST]) -> list[int]:
    """Lines with an `Ask(` that does not stand directly behind `yield`."""
    behind_yield = {id(node.value) for node in found if isinstance(node, ast.Yield)}
    return [
        c.lineno for c, name in calls(found) if name.split(".")[-1] == "Ask" and id(c) not in behind_yield
    ]


def test_every_ask_stands_directly_behind_yield() -> None:
    sample = "def f():\n  x = yield Ask('a')\n  y = Ask('b')\n  yield y\n  yield p.Ask('c')"
    assert asks_elsewhere(list(ast.walk(ast.parse(sample)))) == [3]
    for name, path in MODULES.items():
        if name.startswith("methods."):
            assert asks_elsewhere(nodes(path)) == [], name


@pytest.mark.parametrize("name", sorted(n.partition(".")[2] for n in MODULES if n.startswith("methods.")))
def test_method_files_keep_their_budget(name: str) -> None:
    lines = len(MODULES[f"methods.{name}"].read_text(encoding="utf-8").splitlines())
    assert lines <= LONG_METHODS.get(name, 300)


def test_nothing_is_read_or_written_in_formats_that_run_code() -> None:
    forbidden = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    folders = ("src", "tests", "examples", "benchmarks", "experiments")
    for path in (p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))):
        for node in nodes(path):
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & forbidden, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
        for node, called in calls(nodes(path)):
            assert called not in ("torch.load", "torch.save", "eval", "exec"), f"{path}:{node.lineno}"
            for keyword in node.keywords:
                assert not (keyword.arg == "allow_pickle" and ast.unparse(keyword.value) == "True"), path


# ---- every field of a config is read -------------------------------------------------------------


def reads(paths: list[Path]) -> set[str]:
    """Names that are read as an attribute of something in these files."""
    return {
        node.attr
        for path in paths
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("section", [*config.SECTIONS, "experiment"])
def test_every_field_of_an_experiment_is_read(section: str) -> None:
    section_class = config.SECTIONS.get(section, config.Experiment)
    read = reads([path for name, path in MODULES.items() if name in ("api", "cli")])
    if section == "experiment":
        read |= reads([MODULES["config"]])  # `method` is read through properties
    unread = [f.name for f in fields(section_class) if f.name not in read]
    assert not unread, f"nothing reads {unread} of [{section}]"


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_method_is_read(name: str) -> None:
    file = METHODS[name].partition(":")[0].removeprefix("fedprism.")
    mine = [MODULES[file], MODULES["training"]]
    mine += [MODULES[found] for found in imports(MODULES[file]) if found.startswith("methods.")]
    read = reads(mine)
    unread = [f.name for f in fields(get_method(name).config) if f.name not in read]
    assert not unread, f"nothing reads {unread} of {name}"
