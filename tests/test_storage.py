"""The run directory: exact round trips, and nothing half-written after a kill or on a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprism import storage
from fedprism.storage import RunDirectory, decode, encode


@dataclass(frozen=True)
class State:
    """Server state with a bit of everything."""

    round: int = 0
    w: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    extra: Any = None


def same(a: Any, b: Any) -> bool:
    """Equal down to types, order of keys, layout and bits."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.detach()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(b.contiguous().view(-1).view(torch.uint8))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        keys_equal = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys_equal and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def checkpoint(value: Any = None, round: int = 0) -> State:
    return State(round, {"a": torch.arange(3.0) + round}, {2: {"b": torch.ones(2)}, 0: {}}, value)


def tidy(run: RunDirectory) -> bool:
    """No temporary names are left."""
    return not [p for p in run.path.rglob(".*") if p.name != storage.MARKER]


TENSORS = [
    torch.tensor([1.0, -0.0, math.nan, math.inf]),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor([1, -(2**62)]),
    torch.tensor([True, False]),
    torch.tensor([0.1, 1e-30, 3e38]).bfloat16(),
    torch.tensor([0.1, 6e-8]).half(),
    torch.zeros(0, 4),
    torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t(),
    torch.ones(1).expand(5),
    torch.arange(10.0)[2:7:2],
    torch.tensor([1 + 2j]),
]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(TENSORS)
)
structures = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(structures)
@settings(max_examples=150, deadline=None)
def test_any_structure_comes_back_as_it_was(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors, "x"))
    assert same(decode(json.loads(text), tensors), value)


def test_checkpoints_come_back_bit_for_bit(run: RunDirectory) -> None:
    state = checkpoint({"many": TENSORS, 1: (1, [None, "é"]), "1": math.inf}, round=4)
    clients = {10: {"w": {"a": TENSORS[0]}, "n": 3}, 2: {}, -1: {"x": TENSORS[4]}}
    run.save_checkpoint(4, state, clients)
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    number, again, kept = loaded
    assert number == 4
    assert isinstance(again, State)
    for name in ("round", "w", "experts", "extra"):
        assert same(getattr(state, name), getattr(again, name))
    assert same(kept, clients)
    assert tidy(run)


def test_a_checkpoint_without_any_tensor_is_fine(run: RunDirectory) -> None:
    run.save_checkpoint(0, State(), {})
    assert run.load_checkpoint(State) == (0, State(), {})


def test_memory_that_is_shared_is_stored_once_and_views_are_kept_apart(run: RunDirectory) -> None:
    flat = torch.arange(1000.0)
    halves = {"left": flat[:500], "right": flat[500:], "square": flat[:4].view(2, 2)}
    run.save_checkpoint(0, State(), {k: {"tree": halves} for k in range(20)})
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert all(same(loaded[2][k]["tree"], halves) for k in range(20))
    assert (run.path / "checkpoints/round-0000/clients.safetensors").stat().st_size < 3 * 4000


def test_the_order_in_memory_is_kept(run: RunDirectory) -> None:
    moved = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).permute(2, 0, 1)
    run.save_checkpoint(0, State(extra=moved), {})
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert loaded[1].extra.stride() == moved.stride()
    assert same(loaded[1].extra, moved)


def test_tensors_with_gradients_are_stored_and_left_alone(run: RunDirectory) -> None:
    leaf = torch.ones(2, requires_grad=True)
    run.save_checkpoint(0, State(extra=leaf * 2), {0: {"leaf": leaf}})
    assert leaf.requires_grad
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert not loaded[2][0]["leaf"].requires_grad


@pytest.mark.parametrize("value", [np.float64(1), {1, 2}, object(), {(1, 2): 3}, {True: 1}, b"x"])
def test_what_can_not_be_stored_is_named(run: RunDirectory, value: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint: server\.extra"):
        run.save_checkpoint(0, State(extra=value), {})
    assert run.load_checkpoint(State) is None


def test_the_last_two_checkpoints_are_kept(run: RunDirectory) -> None:
    for k in (0, 1, 2, 10):
        run.save_checkpoint(k, checkpoint(round=k), {})
    assert run.checkpoint_rounds() == [2, 10]
    assert tidy(run)


def test_a_round_can_be_saved_again(run: RunDirectory) -> None:
    run.save_checkpoint(1, checkpoint("first"), {})
    run.save_checkpoint(1, checkpoint("second"), {})
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert loaded[1].extra == "second"
    assert run.checkpoint_rounds() == [1]


def test_a_damaged_checkpoint_is_an_error_with_a_way_out(run: RunDirectory) -> None:
    run.save_checkpoint(1, checkpoint(), {})
    file = run.path / "checkpoints/round-0001/server.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"round-0001 can't be read.*delete .*round-0001 to resume"):
        run.load_checkpoint(State)


def test_a_checkpoint_of_another_version_is_an_error(run: RunDirectory) -> None:
    @dataclass(frozen=True)
    class Other:
        w: int = 0

    run.save_checkpoint(1, checkpoint(), {})
    with pytest.raises(
        ValueError, match=r"has the fields \['experts', 'extra', 'round', 'w'\].*needs \['w'\]"
    ):
        run.load_checkpoint(Other)


# ---- interruptions -------------------------------------------------------------------------------


def dies_at(step: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process of its own that is killed at its `step`-th step to the disk; True if it was."""
    child = os.fork()
    if child == 0:
        left = step

        def stepping(original: Callable[..., Any]) -> Callable[..., Any]:
            def one(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return one

        try:
            for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "open", "fsync"):
                setattr(os, name, stepping(getattr(os, name)))
            for name in ("rename", "replace", "mkdir", "unlink", "write_text"):
                setattr(Path, name, stepping(getattr(Path, name)))
            storage.save_file = stepping(storage.save_file)  # type: ignore[assignment]
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WIFSIGNALED(status), "the child failed instead of being killed"
    return bool(os.WIFSIGNALED(status))


def test_a_kill_at_any_moment_of_a_checkpoint_leaves_a_whole_one(tmp_path: Path) -> None:
    for step in range(200):
        run = RunDirectory.create(tmp_path / f"{step}")
        for k in (1, 2):
            run.save_checkpoint(k, checkpoint("old", k), {0: {"k": k}})
        killed = dies_at(step, lambda run=run: run.save_checkpoint(3, checkpoint("new", 3), {0: {"k": 3}}))
        loaded = run.load_checkpoint(State)
        assert loaded is not None
        number, state, clients = loaded
        assert number in (2, 3)
        assert (state.round, state.extra) == (number, "new" if number == 3 else "old")
        assert same(state.w["a"], torch.arange(3.0) + number)
        assert clients == {0: {"k": number}}
        run.save_checkpoint(4, checkpoint(round=4), {})  # goes on, and cleans up
        assert tidy(run)
        assert len(run.checkpoint_rounds()) == 2
        if not killed:
            assert step > 10
            assert number == 3
            return
    pytest.fail("the checkpoint never finished")


def test_a_kill_at_any_moment_of_a_record_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    for step in range(20):
        run.write_json("x.json", {"old": step})
        killed = dies_at(step, lambda: run.write_json("x.json", "new"))
        assert run.read_json("x.json") in ({"old": step}, "new")
        if not killed:
            assert step > 2
            return
    pytest.fail("the record never finished")


def test_a_kill_at_any_moment_of_making_a_directory_leaves_none_or_a_usable_one(tmp_path: Path) -> None:
    for step in range(20):
        path = tmp_path / f"{step}" / "run"
        killed = dies_at(step, lambda path=path: RunDirectory.create(path) and None)
        again = RunDirectory.open(path) if path.exists() else RunDirectory.create(path)
        assert tidy(again)
        if not killed:
            assert step > 2
            return
    pytest.fail("the directory was never made")


def test_a_failure_between_write_and_rename_leaves_the_previous_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save_checkpoint(1, checkpoint("old"), {})

    def fails(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(2, checkpoint("new"), {})
    monkeypatch.undo()
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert (loaded[0], loaded[1].extra) == (1, "old")
    assert tidy(run)


# ---- a full disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_before", range(4))
def test_a_full_disk_while_saving_leaves_the_previous_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, calls_before: int
) -> None:
    run.save_checkpoint(1, checkpoint("old"), {})
    left = calls_before

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"round-0002: No space left.* MB are free") as caught:
        run.save_checkpoint(2, checkpoint("new"), {})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    loaded = run.load_checkpoint(State)
    assert loaded is not None
    assert (loaded[0], loaded[1].extra) == (1, "old")
    assert tidy(run)


def test_a_full_disk_met_by_the_tensor_writer_is_the_same_error(run: RunDirectory) -> None:
    run.save_checkpoint(1, checkpoint("old"), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"can't write .*round-0002: File too large; .* MB are free"
        ) as caught:
            run.save_checkpoint(2, State(extra=torch.zeros(1_000_000)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert run.checkpoint_rounds() == [1]
    assert tidy(run)


def test_a_full_disk_leaves_records_and_metrics_as_they_were(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_json("x.json", 1)
    run.append_metrics({"round": 0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))  # the line is torn after 5,000 bytes
    try:
        with pytest.raises(OSError, match=r"can't write .*x\.json"):
            run.write_json("x.json", "y" * 20_000)
        with pytest.raises(OSError, match=r"can't write .*metrics\.jsonl"):
            run.append_metrics({"round": 1, "text": "y" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.read_json("x.json") == 1
    assert (run.path / "metrics.jsonl").read_text() == '{"round": 0}\n'
    assert tidy(run)


# ---- metrics -------------------------------------------------------------------------------------


def test_metrics_are_read_back(run: RunDirectory) -> None:
    assert run.read_metrics() == []
    lines: list[dict[str, Any]] = [{"round": 0, "x": [1.5, None, "é\n"]}, {"round": 1, "x": {"a": -0.1}}]
    for line in lines:
        run.append_metrics(line)
    assert run.read_metrics() == lines


def test_numbers_of_numpy_and_torch_are_written_as_numbers(run: RunDirectory) -> None:
    run.append_metrics(
        {"round": np.int64(0), "a": np.float32(0.5), "m": np.eye(2), "t": torch.tensor([1, 2])}
    )
    run.write_json("x.json", {"nan": float("nan"), "b": np.bool_(True)})
    assert run.read_metrics() == [{"round": 0, "a": 0.5, "m": [[1.0, 0.0], [0.0, 1.0]], "t": [1, 2]}]
    assert math.isnan(run.read_json("x.json")["nan"])
    with pytest.raises(TypeError, match=r"not JSON-ready: builtins\.object"):
        run.append_metrics({"round": 1, "a": object()})
    assert len(run.read_metrics()) == 1


@pytest.mark.parametrize(
    "torn", ['{"round": 2, "x": 1', '{"round": 2}', '{"round": 2, "x"\n', "\0\0\0\n", "x" * 200_000]
)
def test_a_torn_last_line_is_dropped(run: RunDirectory, torn: str) -> None:
    for k in range(2):
        run.append_metrics({"round": k})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [line["round"] for line in run.read_metrics()] == [0, 1]
    run.truncate_metrics(1)
    run.append_metrics({"round": 2})
    assert [line["round"] for line in run.read_metrics()] == [0, 1, 2]


def test_a_line_added_behind_a_torn_one_replaces_it(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    run.append_metrics({"round": 1})
    assert run.read_metrics() == [{"round": 0}, {"round": 1}]


def test_a_damaged_line_in_the_middle_is_an_error(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").write_text('{"round": 0}\n{"rou\n{"round": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        run.read_metrics()


def test_metrics_of_later_rounds_are_cut(run: RunDirectory) -> None:
    for k in range(4):
        run.append_metrics({"round": k})
    run.truncate_metrics(1)
    assert [line["round"] for line in run.read_metrics()] == [0, 1]
    run.truncate_metrics(-1)
    assert run.read_metrics() == []


# ---- making and opening --------------------------------------------------------------------------


def test_an_existing_run_is_not_replaced_without_force(run: RunDirectory) -> None:
    run.write_json("summary.json", {})
    run.save_checkpoint(0, State(), {})
    with pytest.raises(FileExistsError, match=r"holds a run already.*fedprism resume.*--force"):
        RunDirectory.create(run.path)
    assert run.complete
    again = RunDirectory.create(run.path, force=True)
    assert [p.name for p in again.path.iterdir()] == [storage.MARKER]
    assert not again.complete


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunDirectory.open(RunDirectory.create(tmp_path / "run").path).path == tmp_path / "run"


@pytest.mark.parametrize("force", [False, True])
def test_what_fedprism_did_not_make_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "config.toml").write_text("mine")
    for path in (tmp_path, tmp_path / "config.toml"):
        with pytest.raises(FileExistsError, match="stays as it is; choose another --out"):
            RunDirectory.create(path, force=force)
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_force_follows_no_links_out_of_the_directory(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep").write_text("")
    (run.path / "link").symlink_to(elsewhere)
    RunDirectory.create(run.path, force=True)
    assert (elsewhere / "keep").exists()


def test_opening_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; name a directory that"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is no run"):
        RunDirectory.open(tmp_path)


def test_records_that_are_missing_or_broken_are_named(run: RunDirectory) -> None:
    with pytest.raises(FileNotFoundError, match=r"summary\.json is missing"):
        run.read_json("summary.json")
    run.write_text("summary.json", "{")
    with pytest.raises(ValueError, match=r"summary\.json is not JSON"):
        run.read_json("summary.json")


def test_versions_name_what_matters() -> None:
    found = storage.versions()
    assert {
        "fedprism",
        "python",
        "torch",
        "numpy",
        "transformers",
        "git_commit",
        "threads",
        "machine",
    } <= set(found)
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    json.dumps(found)
