"""The run directory: JSON records, metrics.jsonl, and checkpoints that are either whole or not there.

Everything is written to a temporary name, flushed to the disk and renamed, so a killed process or a full disk
leaves the files of before. Tensors are stored as safetensors, everything else as JSON; what comes back from a
checkpoint equals what went in, bit for bit, down to the types and order of dictionary keys.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MARKER = ".fedprism"  # present in every directory that fedprism made; only such a one is ever replaced
KEPT_CHECKPOINTS = 2
PACKAGES = ("fedprism", "torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors", "pydantic")

S = TypeVar("S")


# ---- structures with tensors <-> JSON and a flat table of tensors --------------------------------


def encode(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Turn a structure into JSON, moving its tensors into `tensors`.

    value: None, bool, int, float, str, tensors, and dicts (keys str or int), lists and tuples of these.
    tensors: filled with contiguous CPU copies under unique names; the same view of the same memory is stored
    once. path: where `value` stands, for messages and names. Raises TypeError naming where anything else is.
    """
    return _Encoder(tensors).encode(value, path)


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.seen: dict[tuple[Any, ...], str] = {}
        self.alive: list[Tensor] = []  # keeps addresses from being used again while they are keys

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) is dict:
            for key in value:
                if type(key) not in (str, int):
                    raise TypeError(f"checkpoint: {path} has the key {key!r}, keys must be str or int")
            return {"dict": [[key, self.encode(item, f"{path}.{key}")] for key, item in value.items()]}
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{path}.{k}") for k, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        raise TypeError(
            f"checkpoint: {path} is a {type(value).__module__}.{type(value).__qualname__}; state may hold "
            "tensors, numbers, text, None, and plain dicts, lists and tuples of them"
        )

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(f"checkpoint: {path} is not a dense tensor")
        # Dimensions by falling stride: the order in memory is kept, since sums in another order may differ.
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        value = value.detach().resolve_conj().resolve_neg().permute(order)
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or key not in self.seen:
            self.seen[key] = f"{len(self.tensors):06d}{path}"
            self.tensors[self.seen[key]] = value.cpu().clone(memory_format=torch.contiguous_format)
            self.alive.append(value)
        where: dict[str, Any] = {"tensor": self.seen[key]}
        if order != sorted(order):
            where["order"] = order
        return where


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "tensor" in value:
            stored = tensors[value["tensor"]]
            if "order" not in value:
                return stored
            return stored.permute([value["order"].index(d) for d in range(stored.dim())])
        ((kind, inside),) = value.items()
        if kind == "dict":
            return {key: decode(item, tensors) for key, item in inside}
        if kind == "tuple":
            return tuple(decode(item, tensors) for item in inside)
        if kind == "float":
            return float(inside)
        raise ValueError(f"checkpoint: unknown kind '{kind}'")
    return value


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own, aligned as any new tensor is."""
    return {name: value.clone() for name, value in load_file(path).items()}


# ---- files that are whole or not there -----------------------------------------------------------


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a full disk into an OSError whose one line names the path and the space left."""
    try:
        yield
    except safetensors.SafetensorError as fault:
        number = re.search(r"os error (\d+)", str(fault))
        if number is None:
            raise
        code = int(number.group(1))
        raise _disk_fault(code, os.strerror(code), path) from fault
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _disk_fault(fault.errno, os.strerror(fault.errno), path) from fault
        raise


def _disk_fault(code: int, reason: str, path: Path) -> OSError:
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    free = shutil.disk_usage(folder).free / 1e6
    return OSError(
        code, f"can't write {path}: {reason}; {free:.1f} MB are free there; make room, then resume the run"
    )


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_atomic(path: Path, text: str) -> None:
    """Write a text file in one step: whoever reads `path` sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _writing(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as JSON has them."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"not JSON-ready: {type(value).__module__}.{type(value).__qualname__}")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, default=_plain, indent=indent, ensure_ascii=False)


@dataclass(frozen=True)
class RunDirectory:
    """A directory that holds a run, or an experiment of several runs.

    Make one with `create` or `open`. Numbers that are not finite are written as NaN and Infinity, which
    Python's json reads."""

    path: Path

    @classmethod
    def create(cls, path: str | Path, *, force: bool = False) -> RunDirectory:
        """Make a new, empty directory. An empty one that exists already is taken.

        force: replace what an earlier run left there. Raises FileExistsError if something is there and may
        not be replaced; a directory that fedprism did not make is never replaced."""
        path = Path(path)
        if path.is_symlink() or path.exists():
            ours = path.is_dir() and (path / MARKER).is_file()
            empty = path.is_dir() and not any(path.iterdir())
            if ours and not force:
                raise FileExistsError(
                    f"{path} holds a run already; go on with it (fedprism resume {path}), "
                    "replace it with --force, or choose another --out"
                )
            if not ours and not empty:
                kind = "a directory with other files" if path.is_dir() else "a file"
                raise FileExistsError(
                    f"{path} is {kind}, not a run of fedprism's, and stays as it is; choose another --out"
                )
            if ours:
                for child in sorted(path.iterdir(), key=lambda p: p.name == MARKER):  # the marker last
                    if child.is_dir() and not child.is_symlink():
                        shutil.rmtree(child)
                    else:
                        child.unlink()
        with _writing(path):
            if path.is_dir():
                _write_atomic(path / MARKER, "made by fedprism\n")
            else:  # the directory appears together with its marker
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f".{path.name}.new")
                new.mkdir(exist_ok=True)
                _write_atomic(new / MARKER, "made by fedprism\n")
                new.rename(path)
            _sync(path.parent)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run or experiment. Raises FileNotFoundError if `path` is none."""
        path = Path(path)
        if not (path / MARKER).is_file():
            what = "is no run of fedprism's" if path.exists() else "does not exist"
            raise FileNotFoundError(f"{path} {what}; name a directory that `fedprism run` made")
        return cls(path)

    @property
    def complete(self) -> bool:
        """Whether summary.json, which is written last, is there."""
        return (self.path / "summary.json").is_file()

    # records

    def write_json(self, name: str, value: Any) -> None:
        """Write a record in one step. name: relative path. value: JSON-ready; numpy and torch numbers too."""
        _write_atomic(self.path / name, _json(value, indent=1) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a record. Raises FileNotFoundError if it isn't there, ValueError if it isn't JSON."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as fault:
            raise FileNotFoundError(f"{path} is missing; resume or repeat the run") from fault
        except json.JSONDecodeError as fault:
            raise ValueError(f"{path} is not JSON ({fault}); delete it and resume the run") from fault

    def write_text(self, name: str, text: str) -> None:
        """Write a text file in one step."""
        _write_atomic(self.path / name, text)

    # metrics

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl and flush it to the disk; on failure the file is as it was."""
        path = self._metrics
        new = not path.exists()
        with _writing(path), path.open("ab", buffering=0) as file:
            start = _whole_lines(path)
            file.truncate(start)
            try:
                rest = memoryview((_json(line) + "\n").encode())
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(start)
                raise
        if new:
            _sync(self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a last line that was torn by an interruption is left out.

        Raises ValueError for a damaged line before the last."""
        if not self._metrics.exists():
            return []
        raw = self._metrics.read_bytes().split(b"\n")[:-1]  # what stands behind the last newline is torn
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(raw, start=1):
            try:
                lines.append(json.loads(text))
            except ValueError as fault:
                if number < len(raw):
                    raise ValueError(f"{self._metrics}, line {number}: {fault}; repeat the run") from fault
        return lines

    def truncate_metrics(self, after_round: int) -> None:
        """Drop the lines of rounds later than `after_round` (-1 drops all), in one step."""
        kept = [line for line in self.read_metrics() if line["round"] <= after_round]
        _write_atomic(self._metrics, "".join(_json(line) + "\n" for line in kept))

    # checkpoints

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_rounds(self) -> list[int]:
        """Rounds that can be resumed from, ascending."""
        names = (re.fullmatch(r"round-(\d+)", p.name) for p in self._checkpoints.glob("round-*"))
        return sorted(int(match.group(1)) for match in names if match)

    def save_checkpoint(self, round: int, state: Any, clients: Mapping[int, Mapping[str, Any]]) -> None:
        """Store what a run needs to go on after `round`, then drop all but the last two checkpoints.

        state: the server's State, a dataclass. clients: id -> client state. Values as `encode` has them;
        TypeError names anything else. A failure leaves the earlier checkpoints as they were."""
        folder = self._checkpoints
        target = folder / f"round-{round:04d}"
        server: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        values = {f.name: getattr(state, f.name) for f in fields(state)}
        record = {
            "round": round,
            "state": encode(values, server, "server"),
            "clients": encode({int(c): dict(kept_by) for c, kept_by in clients.items()}, kept, "client"),
        }
        with _writing(target):
            if not folder.is_dir():
                folder.mkdir()
                _sync(self.path)
            self._sweep()
            temporary = folder / f".tmp-{target.name}"
            try:
                temporary.mkdir()
                save_file(server, temporary / "server.safetensors")
                save_file(kept, temporary / "clients.safetensors")
                (temporary / "state.json").write_text(json.dumps(record), encoding="utf-8")
                for file in temporary.iterdir():
                    _sync(file)
                _sync(temporary)
                if target.exists():
                    target.rename(folder / f".old-{target.name}")
                temporary.rename(target)
                _sync(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        for old in self.checkpoint_rounds()[:-KEPT_CHECKPOINTS]:
            name = f"round-{old:04d}"
            (folder / name).rename(folder / f".old-{name}")  # never visible half deleted
        self._sweep()

    def load_checkpoint(self, state_class: type[S]) -> tuple[int, S, dict[int, dict[str, Any]]] | None:
        """The newest checkpoint as (round, server state, client states), or None if there is none.

        state_class: the dataclass that was saved. Tensors come back on the CPU. Raises ValueError if the
        files are damaged or the class has other fields now."""
        rounds = self.checkpoint_rounds()
        if not rounds:
            return None
        folder = self._checkpoints / f"round-{rounds[-1]:04d}"
        way_out = f"delete {folder} to resume from an earlier round"
        try:
            record = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            values = decode(record["state"], _load(folder / "server.safetensors"))
            clients = decode(record["clients"], _load(folder / "clients.safetensors"))
            number = int(record["round"])
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as fault:
            raise ValueError(f"checkpoint {folder} can't be read ({fault}); {way_out}") from fault
        needed = {f.name for f in fields(state_class)}  # type: ignore[arg-type]
        if set(values) != needed:
            raise ValueError(
                f"checkpoint {folder} has the fields {sorted(values)}, this version of the method needs "
                f"{sorted(needed)}; repeat the run with --force"
            )
        return number, state_class(**values), clients

    def _sweep(self) -> None:
        """Remove what an interrupted write or a replaced checkpoint left behind."""
        for leftover in (*self._checkpoints.glob(".tmp-*"), *self._checkpoints.glob(".old-*")):
            shutil.rmtree(leftover)


def _whole_lines(path: Path) -> int:
    """Bytes up to and including the last newline of a file."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


# ---- versions ------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all. value: as for `RunDirectory.write_json`."""
    _write_atomic(path, _json(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    _write_atomic(path, text)


def versions() -> dict[str, Any]:
    """What produced a result: package versions (None where not installed), git commit of a checkout or None,
    threads of this process, machine type."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {
        **found,
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def _git_commit() -> str | None:
    """Commit of the checkout that this file belongs to, or None if it is none or has no commit yet."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    question = ["git", "-C", str(root), "rev-parse", "--verify", "-q", "HEAD"]
    asked = subprocess.run(question, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None
