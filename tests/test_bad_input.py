"""Mistakes and full disks, from the command line: one line that helps, and the right exit status."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fedprism import api, cli
from fedprism import config as configs
from fedprism.storage import MARKER
from tests.tiny_text import Columns, Tiny, left_behind, rows, save_quietly, save_tokenizer, write_task


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DEBUG", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def root(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of the tasks, to be spoilt."""
    return Path(shutil.copytree(tiny.root, tmp_path / "tasks"))


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def the_line(result: Result, status: int) -> str:
    """The only line that was said; stops the test where it is not one line or the status is another."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    said = result.stderr.splitlines()
    assert len(said) == 1, result.stderr
    assert said[0].startswith("fedprism: ")
    return said[0].removeprefix("fedprism: ")


def refused(tiny: Tiny, *names: str, status: int = 2, options: tuple[str, ...] = (), **changes: Any) -> str:
    """What the command says to an experiment; nothing may be left behind."""
    path = tiny.write(Path("tiny.toml"), *names, **changes)
    line = the_line(call("run", path, "--out", "out", "--quiet", *options), status)
    assert not Path("out").exists()
    return line


def holds(line: str, *parts: str) -> None:
    """The line has these parts (regular expressions): what was got, what was needed, the way out."""
    for part in parts:
        assert re.search(part, line), f"{part!r} is not in {line!r}"


# ---- data ----------------------------------------------------------------------------------------


def test_a_task_without_a_file(tiny: Tiny) -> None:
    line = refused(tiny, data__tasks=["fruit", "metals"])
    holds(line, r"^data: no metals\.parquet or metals\.csv in ", r"did you mean metal\?$")


def test_a_folder_that_is_not_there(tiny: Tiny) -> None:
    line = refused(tiny, data__root="nowhere")
    holds(line, r"^data: folder nowhere does not exist", r"correct data\.root")


def test_a_file_that_is_no_table(tiny: Tiny, root: Path) -> None:
    (root / "metal.parquet").write_bytes(b"PAR1 nothing PAR1")
    holds(
        refused(tiny, data__root=str(root)), r"^data: metal\.parquet is not a readable parquet", "replace it"
    )


@pytest.mark.parametrize("split", ["train", "public", "test"])
def test_an_empty_split(split: str, tiny: Tiny, root: Path) -> None:
    sizes = {"train": 36, "public": 16, "validation": 6, "test": 24}
    write_task(root, "metal", rows("metal", **{**sizes, split: 0}))
    line = refused(tiny, data__root=str(root))
    holds(
        line, rf"^data: task 'metal' has no rows in split {split} of metal\.parquet", "give it such rows or"
    )


def test_a_task_without_any_rows(tiny: Tiny, root: Path) -> None:
    write_task(root, "metal", {"text_a": [], "text_b": [], "label": [], "split": []})
    holds(
        refused(tiny, data__root=str(root)),
        r"^data: metal\.parquet has no rows",
        "fill it or leave 'metal' out",
    )


def test_a_client_with_fewer_rows_than_a_batch(tiny: Tiny) -> None:
    line = refused(tiny, method__batch_size=64)
    holds(
        line,
        r"^partition: client \d got \d+ examples, needs 70, 64 to train on and 6 for validation \(alpha=1",
        r"; raise data\.alpha or data\.train_per_task, or lower data\.min_examples",
    )


def test_the_batches_of_every_method_are_looked_at_before_the_first_one_runs(tiny: Tiny) -> None:
    line = refused(tiny, "fedit", "local_only", method__local_only={"batch_size": 64})
    holds(line, r"^partition: client \d got \d+ examples, needs 70, ")


def test_the_data_of_every_seed_are_looked_at_before_the_first_one_runs(tiny: Tiny) -> None:
    alpha = {"data__alpha": 0.2, "data__threshold": 0.0}
    works: dict[bool, int] = {}  # a seed that gives each client a batch, and one that does not
    for seed in range(40):
        try:
            api._build(tiny.experiment(**alpha), seed, 8, api.Silent())
            works.setdefault(True, seed)
        except ValueError:
            works.setdefault(False, seed)
        if len(works) == 2:
            break
    line = refused(tiny, seeds=[works[True], works[False]], **alpha)
    holds(line, r"^partition: client \d got \d+ examples, needs 14, ")


def spoilt(where: str, label: int) -> Columns:
    columns = rows("metal")
    columns["label"][columns["split"].index(where)] = label
    return columns


def test_a_label_outside_the_classes(tiny: Tiny, root: Path) -> None:
    write_task(root, "metal", spoilt("test", 5))
    line = refused(tiny, data__root=str(root))
    holds(line, r"^data: task 'metal', row 58 .* has label 5, needs 0\.\.1; correct or drop the row$")


def test_a_gap_in_the_classes(tiny: Tiny, root: Path) -> None:
    write_task(root, "metal", spoilt("train", 7))
    line = refused(tiny, data__root=str(root))
    holds(line, r"^data: task 'metal' has the labels 0, 1, 7 .*, needs 0\.\.K-1", "; renumber the classes$")


def test_a_label_outside_the_classes_of_a_known_task(tiny: Tiny, root: Path) -> None:
    write_task(root, "sst2", {**spoilt("train", -1), "text_b": [None] * 82})
    line = refused(tiny, data__root=str(root), data__tasks=["fruit", "sst2"])
    holds(
        line,
        r"^data: task 'sst2', row 0 .* has label -1, needs 0\.\.1 \(negative, positive\); correct or drop",
    )


def test_more_tasks_than_clients_at_the_pure_end(tiny: Tiny) -> None:
    line = refused(tiny, data__partition="pure", data__clients=2)
    holds(
        line,
        r"^partition: 3 tasks, 2 clients: more tasks than clients",
        r"; raise data\.clients to 3 or drop",
    )


def test_the_same_task_twice(tiny: Tiny) -> None:
    path = tiny.write(Path("tiny.toml"))
    path.write_text(path.read_text().replace('"metal"', '"fruit"'))
    line = the_line(call("run", path, "--out", "out", "--quiet"), 2)
    holds(line, r"^config: data\.tasks and data\.public_only has fruit more than once; name each once$")


def test_more_test_rows_than_there_are(tiny: Tiny) -> None:
    line = refused(tiny, data__tasks=["fruit"], data__clients=1, data__test_per_client=25)
    holds(line, r"^data: client 0 needs 25 different test rows of task 'fruit', got 24", "lower .* to 24$")


# ---- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("alpha =", "alhpa =", [r"^config: unknown key data\.alhpa; did you mean alpha\?"]),
        ("[engine]", "[engin]", [r"^config: unknown key engin; did you mean engine\?"]),
        ("lr = 0.01", "learningrate = 0.01", [r"method\.learningrate is read by none of fedit; "]),
        ("lr = 0.01", "lrr = 0.01", [r"method\.lrr is read by none of fedit; did you mean lr\?"]),
        ("rounds = 4", "rounds = 0", [r"^config: method\.rounds is 0, must be >= 1$"]),
        ("rounds = 4", 'rounds = "4"', [r"^config: method\.rounds is '4', must be a whole number$"]),
        ("clients = 4", "clients = -4", [r"^config: data\.clients is -4, must be >= 1$"]),
        (
            "[method.scaffold]",
            "[method.scafold]",
            [r"\[method\.scafold\] belongs to no .* did you mean scaffold\?"],
        ),
        ('"fedit"', '"fedti"', [r"^config: method\.names has unknown 'fedti'; did you mean fedit"]),
        ("name =", "name", [r"^config: tiny\.toml is not valid TOML: .*line 1"]),
    ],
)
def test_a_typo_in_the_config(old: str, new: str, parts: list[str], tiny: Tiny) -> None:
    path = tiny.write(Path("tiny.toml"))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    holds(the_line(call("run", path, "--out", "out", "--quiet"), 2), *parts)
    assert not Path("out").exists()


def test_a_typo_in_a_method_s_own_settings(tiny: Tiny) -> None:
    line = refused(tiny, "fedsee", method__fedsee={"init_epoch": 1})
    holds(line, r"^config: unknown key method\.fedsee\.init_epoch; did you mean init_epochs")


def test_an_unknown_method_on_the_command_line(tiny: Tiny) -> None:
    holds(refused(tiny, options=("--methods", "fedse")), r"has unknown 'fedse'; did you mean fedsee")


def test_epochs_that_leave_fedsee_no_round(tiny: Tiny) -> None:
    line = refused(tiny, "fedsee", method__fedsee={"init_epochs": 5})
    holds(
        line,
        r"^config: method\.fedsee: 4 rounds x 1 epochs less 5 initial epochs leave no whole number",
        r"needs at least one",
        r"; change init_epochs, rounds or local_epochs .*, or set match_total_epochs = false$",
    )


def test_an_optimiser_that_a_method_can_not_use(tiny: Tiny) -> None:
    line = refused(tiny, "scaffold", method__optimizer="adamw")
    holds(
        line, r"method\.scaffold\.optimizer is 'adamw', SCAFFOLD needs 'sgd'; set method\.scaffold\.optimizer"
    )


def test_a_config_that_is_not_there(tiny: Tiny) -> None:
    tiny.write(Path("tiny.toml"))
    holds(the_line(call("run", "tinny.toml", "--quiet"), 2), r"^config: 'tinny\.toml' is no file")


# ---- the backbone --------------------------------------------------------------------------------


def test_a_backbone_that_is_not_there(tiny: Tiny) -> None:
    line = refused(tiny, model__backbone="./nowhere")
    holds(
        line,
        r"^backbone: no folder '\./nowhere'; give a folder saved by save_pretrained, a hub name or 'minilm'$",
    )


def test_a_backbone_folder_that_holds_no_model(tiny: Tiny, root: Path) -> None:
    line = refused(tiny, model__backbone=str(root))
    holds(
        line,
        r"^backbone: '.*tasks' is not a model, it has no config\.json; give a folder saved by save_pretr",
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{}"),
        ("config.json", b"{"),
        ("model.safetensors", b"short"),
        ("model.safetensors", None),
    ],
)
def test_a_backbone_folder_with_a_damaged_file(
    name: str, content: bytes | None, tiny: Tiny, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny.backbone, tmp_path / "backbone"))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    line = refused(tiny, model__backbone=str(folder))
    holds(
        line,
        r"^backbone: could not load '.*backbone' \(.+\); it needs config\.json, safetensors weights and ",
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of one layer: its query, key and value are one map."""
    from transformers import GPT2Config, GPT2Model

    folder = tmp_path_factory.mktemp("decoder")
    size = save_tokenizer(folder)
    tiny_gpt = GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0)
    save_quietly(GPT2Model(tiny_gpt), folder)
    return folder


UNSUPPORTED = (
    r"^backbone: GPT2Model has no attention module with linear children named query/value, ",
    r"; linear layers seen: ",
    r"; use an encoder of the BERT, RoBERTa, DistilBERT or MiniLM family$",
)


def test_a_backbone_whose_query_and_value_are_not_found(tiny: Tiny, decoder: Path) -> None:
    holds(refused(tiny, model__backbone=str(decoder)), *UNSUPPORTED)


def test_longer_texts_than_the_backbone_reads(tiny: Tiny) -> None:
    line = refused(tiny, model__max_length=40)
    holds(line, r"max_length: got 40, the backbone has 32 positions; lower max_length$")


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "phase"), [("fedit", "update"), ("fedsee", "initialize"), ("local_only", "train_alone")]
)
def test_a_client_whose_training_blows_up_is_named(name: str, phase: str, tiny: Tiny) -> None:
    path = tiny.write(Path("tiny.toml"), name, method__lr=1e30)
    line = the_line(call("run", path, "--out", "out", "--quiet"), 2)
    holds(line, rf"^{name}, phase '{phase}', round 0, client \d: ", "lower the learning rate$")
    assert "nan" in line or "not finite" in line
    assert not Path("out/summary.json").exists()


# ---- run directories -----------------------------------------------------------------------------


def test_an_existing_run_is_kept_without_force(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    path = tiny.write(Path("tiny.toml"), "untrained")
    assert call("run", path, "--out", "out", "--quiet").exit_code == 0
    before = left_behind(Path("out"))
    line = the_line(call("run", path, "--out", "out", "--quiet"), 2)
    holds(
        line,
        r"^out holds a run already; go on with it \(fedprism resume out\), replace it with --force, or ",
    )
    assert left_behind(Path("out")) == before
    assert call("run", path, "--out", "out", "--quiet", "--force").exit_code == 0


def test_a_directory_with_other_files_is_kept_with_force(tiny: Tiny) -> None:
    path = tiny.write(Path("tiny.toml"), "untrained")
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("mine")
    line = the_line(call("run", path, "--out", "out", "--quiet", "--force"), 2)
    holds(line, r"^out is a directory with other files, not a run of fedprism's, .*; choose another --out$")
    assert [p.name for p in Path("out").iterdir()] == ["thesis.tex"]


def test_resuming_what_can_not_be_resumed(tiny: Tiny) -> None:
    holds(
        the_line(call("resume", "nowhere", "--quiet"), 2), r"^nowhere does not exist; name a directory that"
    )
    Path("empty").mkdir()
    holds(
        the_line(call("resume", "empty", "--quiet"), 2),
        r"^empty is no run of fedprism's; name a directory that",
    )
    Path("empty", MARKER).touch()
    holds(
        the_line(call("resume", "empty", "--quiet"), 2), r"^resume: empty/config\.toml is missing, .*--force$"
    )


def test_a_damaged_checkpoint(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(Path("tiny.toml"), "fedit")
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    with monkeypatch.context() as patch:
        patch.setattr(api, "_summarise", interrupt)
        assert call("run", path, "--out", "out", "--quiet").exit_code == 130
    file = Path("out/fedit/seed-3") / "checkpoints/round-0003/server.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    line = the_line(call("resume", "out", "--quiet"), 2)
    holds(
        line,
        r"^checkpoint .*round-0003 can't be read \(.+\); delete .*round-0003 to resume from an earlier r",
    )
    shutil.rmtree(file.parent)
    assert call("resume", "out", "--quiet").exit_code == 0  # the way out leads out


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- a full disk ---------------------------------------------------------------------------------

FULL = r"(No space left on device|File too large)"


class Disk:
    """Lets `left` flushes through and then is full."""

    def __init__(self, left: int) -> None:
        self.left, self.flush = left, os.fsync

    def fsync(self, handle: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.flush(handle)


@pytest.mark.parametrize("flushes", [0, 2, 4, 9, 18, 20, 30, 43])
def test_a_disk_that_fills_up(
    flushes: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, plain_run: dict[str, Any]
) -> None:
    path = tiny.write(Path("tiny.toml"), "fedit")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Disk(flushes).fsync)
        line = the_line(call("run", path, "--out", "out", "--quiet"), 5)
    holds(line, rf"^can't write .*out.*: {FULL}; [\d.]+ MB are free there; make room, then resume the run$")
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    begun = Path("out", "config.toml").exists()
    again = ("resume", "out") if begun else ("run", path, "--out", "out", "--force")
    assert call(*again, "--quiet").exit_code == 0
    assert left_behind(Path("out/fedit/seed-3")) == plain_run
    assert not [p for p in Path("out").rglob(".*") if p.name != MARKER]


@pytest.fixture(scope="module")
def plain_run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What FedIT leaves behind when nothing happens."""
    out = tmp_path_factory.mktemp("plain") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "write_report", lambda dirs: dirs[0])
        api.run_experiment(tiny.experiment("fedit"), out)
    return left_behind(out / "fedit/seed-3")


def test_a_disk_too_full_for_the_report(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(Path("tiny.toml"), "untrained")
    with monkeypatch.context() as patch:
        patch.setattr(api, "write_report", full)
        line = the_line(call("run", path, "--out", "out", "--quiet"), 5)
    holds(line, rf"{FULL}", "make room, then resume the run$")
    monkeypatch.setattr(api, "write_report", lambda dirs: Path(dirs[0]) / "report.html")
    assert call("resume", "out", "--quiet").exit_code == 0


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_too_full_for_cached_features(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(Path("tiny.toml"), "fedit", model__kind="probe", model__cache_dir="cache")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, before[1]))
    try:
        line = the_line(call("run", path, "--out", "out", "--quiet"), 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    holds(line, rf"{FULL}", "make room, then resume the run$")


# ---- a process of its own ------------------------------------------------------------------------


def process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedprism.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


@pytest.mark.slow
def test_a_process_with_a_bad_backbone_says_one_line(tiny: Tiny, decoder: Path) -> None:
    path = tiny.write(Path("tiny.toml"), model__backbone=str(decoder))
    done = process("run", path, "--out", "out", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    holds(done.stderr.strip().removeprefix("fedprism: "), *UNSUPPORTED)


@pytest.mark.slow
def test_a_process_that_may_write_no_large_files_says_one_line(tiny: Tiny) -> None:
    path = tiny.write(Path("tiny.toml"))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_500, 2_500))

    done = process("run", path, "--out", "out", "--quiet", preexec_fn=limit)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.count("\n") == 1
    holds(done.stderr, r"^fedprism: can't write out/.*: File too large; .* make room, then resume the run$")


def test_the_configs_of_these_tests_are_themselves_sound(tiny: Tiny) -> None:
    assert configs.load(tiny.write(Path("tiny.toml"))) == tiny.experiment()


def test_random_features_asked_of_an_encoder(tiny: Tiny) -> None:
    line = refused(tiny, model__kind="encoder", model__features="rff")
    holds(line, r"^config: model\.features is 'rff', which the probe alone has", r"model\.kind = 'probe'")
