"""Federations: who gets which rows, matched splits, public sets, the fingerprint, refused settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedprism.data.federation import Federation, build_text_federation
from fedprism.data.partition import largest_remainder

SETTINGS: dict[str, Any] = {
    "tasks": ["red", "green", "blue"],
    "clients": 4,
    "alpha": 1.0,
    "validation_per_client": 5,
    "test_per_client": 8,
    "min_examples": 4,
    "max_length": 16,
    "seed": 1,
}


@pytest.fixture
def build(folder: Path, tokenizer: Any) -> Callable[..., Federation]:
    def build_with(**changes: Any) -> Federation:
        return build_text_federation(**{"tokenizer": tokenizer, "root": folder, **SETTINGS, **changes})

    return build_with


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def ids(federation: Federation, split: str) -> list[list[int]]:
    return [client[split].columns["row"].tolist() for client in federation.clients]


def task_counts(rows: Any, n_tasks: int) -> list[int]:
    return np.bincount(rows.columns["task"].numpy(), minlength=n_tasks).tolist()


def test_train_and_validation_are_disjoint_and_come_from_the_train_split(
    build: Callable[..., Federation],
) -> None:
    # Each file holds 40 train, 10 public, 6 validation and 20 test rows, in this order; offsets 0, 76, 152.
    federation = build(partition="pure", clients=4)
    training = flat(ids(federation, "train") + ids(federation, "validation"))
    assert sorted(training) == [76 * m + i for m in range(3) for i in range(40)]
    for client in federation.clients:
        for split, low, high in (("train", 0, 40), ("validation", 0, 40), ("test", 56, 76)):
            rows = client[split].columns["row"]
            assert ((rows % 76 >= low) & (rows % 76 < high)).all()
            assert (client[split].columns["task"] == rows // 76).all()
            assert (client[split].columns["label"] == rows % 76 % 2).all()
    assert ids(federation, "train")[1] == sorted(ids(federation, "train")[1])


@pytest.mark.parametrize("seed", range(5))
def test_splits_follow_the_realised_mixture(build: Callable[..., Federation], seed: int) -> None:
    federation = build(alpha=0.5, seed=seed, min_examples=1)
    for i, client in enumerate(federation.clients):
        validation, train = (np.array(task_counts(client[split], 3)) for split in ("validation", "train"))
        allocation = validation + train
        assert validation.tolist() == largest_remainder(allocation, 5).tolist()
        assert task_counts(client["test"], 3) == largest_remainder(allocation, 8).tolist()
        assert federation.mixtures["realised"][i] == pytest.approx(allocation / allocation.sum())
        assert federation.counts[i].tolist() == train.tolist()
        assert len(set(client["test"].columns["row"].tolist())) == 8
    every = flat(ids(federation, "train") + ids(federation, "validation"))
    assert len(every) == len(set(every))


def test_test_rows_are_disjoint_over_clients_until_used_up_and_then_noted(
    build: Callable[..., Federation],
) -> None:
    enough = build(partition="pure", clients=6, test_per_client=10)
    rows = flat(ids(enough, "test"))
    assert len(set(rows)) == len(rows) == 60 and enough.notes == ()
    short = build(partition="pure", clients=6, test_per_client=15)
    assert len(set(flat(ids(short, "test")))) == 60
    assert all(len(set(client)) == 15 for client in ids(short, "test"))
    assert short.notes[0] == (
        "test: task red has 20 test rows, the clients were given 30: 10 of them repeat another client's"
    )
    assert len(short.notes) == 3
    with pytest.raises(ValueError, match="needs 21 different test rows of task 'red', got 20; lower"):
        build(partition="pure", clients=6, test_per_client=21)


def test_public_only_tasks_come_last_and_pool_their_rows(build: Callable[..., Federation]) -> None:
    federation = build(tasks=["green", "blue"], public_only=["red"])
    assert federation.tasks == ("green", "blue", "red")
    assert {name: len(rows) for name, rows in federation.public.items()} == {
        "train": 76, "green": 10, "blue": 10, "red": 56
    }  # fmt: skip
    assert task_counts(federation.public["train"], 3) == [10, 10, 56]
    assert federation.public["red"].columns["row"].tolist() == [152 + i for i in range(56)]
    for mixture in federation.mixtures.values():
        assert mixture.shape == (4, 3) and mixture.dtype == np.float64 and not mixture[:, 2].any()
        assert mixture.sum(1) == pytest.approx(np.ones(4))
    assert federation.public["red"].token_types is not None  # pairs beside single sentences
    assert int(federation.public["red"].token_types.max()) == 1


def test_subsampling_limits_rows_per_task(build: Callable[..., Federation]) -> None:
    federation = build(partition="pure", clients=3, train_per_task=12, public_per_task=3, public_only=())
    assert [len(client["train"]) for client in federation.clients] == [7, 7, 7]
    assert task_counts(federation.public["train"], 3) == [3, 3, 3]
    assert len(build(partition="pure", clients=3, train_per_task=1000).pooled["train"]) == 120 - 15
    other = build(partition="pure", clients=3, train_per_task=12, public_per_task=3, seed=2)
    assert ids(federation, "train") != ids(other, "train")


def test_rows_do_not_depend_on_the_tokenizer_or_its_settings(
    build: Callable[..., Federation], tokenizer: Any
) -> None:
    class Shifted(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *texts: Any, **options: Any) -> Any:
            encoded = super().__call__(*texts, **options)
            return {"input_ids": [[i + 1 for i in row] for row in encoded["input_ids"]]}

    plain, shifted, short = build(), build(tokenizer=Shifted()), build(max_length=8)
    for split in ("train", "validation", "test"):
        assert ids(plain, split) == ids(shifted, split) == ids(short, split)
    assert len({plain.fingerprint, shifted.fingerprint, short.fingerprint}) == 3
    assert shifted.public["train"].token_types is None


def test_validation_and_test_sizes_do_not_move_the_allocation(build: Callable[..., Federation]) -> None:
    def allocation(federation: Federation) -> list[set[int]]:
        return [
            set(a + b) for a, b in zip(ids(federation, "train"), ids(federation, "validation"), strict=True)
        ]

    assert allocation(build()) == allocation(build(validation_per_client=2, test_per_client=3))


def test_fingerprint_is_stable_and_sees_every_change(
    build: Callable[..., Federation], folder: Path, make_task: Callable[..., Any], write: Callable[..., Path]
) -> None:
    first = build().fingerprint
    assert build().fingerprint == first == build(min_examples=1).fingerprint
    changes: list[dict[str, Any]] = [
        {"seed": 2}, {"alpha": 0.9}, {"clients": 3}, {"tasks": ["green", "red", "blue"]},
        {"public_per_task": 9}, {"validation_per_client": 4}, {"test_per_client": 7}, {"max_length": 8},
        {"train_per_task": 39},
    ]  # fmt: skip
    prints = {build(**change).fingerprint for change in changes}
    assert len(prints) == len(changes) and first not in prints
    columns = make_task("blue")
    columns["label"][:2] = [1, 0]
    write(folder, "blue", columns)
    relabelled = build().fingerprint
    columns = make_task("blue")
    columns["text_a"] = [text.replace("blue", "navy") for text in columns["text_a"]]
    write(folder, "blue", columns)
    assert len({first, relabelled, build().fingerprint}) == 3


def test_fingerprint_is_the_same_in_another_process(build: Callable[..., Federation], folder: Path) -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from conftest import WordTokenizer\n"
        "from fedprism.data import build_text_federation\n"
        "f = build_text_federation(tokenizer=WordTokenizer(), root=sys.argv[2], **json.loads(sys.argv[3]))\n"
        "print(f.fingerprint)"
    )
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, str(here), str(folder), json.dumps(SETTINGS)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == build().fingerprint


def test_describe_is_json_and_agrees_with_the_rows(build: Callable[..., Federation]) -> None:
    federation = build(public_only=())
    facts = json.loads(json.dumps(federation.describe()))
    assert facts["fingerprint"] == federation.fingerprint and facts["tasks"] == ["red", "green", "blue"]
    assert np.sum(facts["counts"], 1).tolist() == [size["train"] for size in facts["client_sizes"]]
    assert {size["validation"] for size in facts["client_sizes"]} == {5}
    assert facts["public_sizes"] == {"red": 10, "green": 10, "blue": 10}
    assert np.array(facts["mixtures"]["realised"]).shape == (4, 3)
    assert len(federation.pooled["train"]) == np.sum(facts["counts"])
    assert federation.n_classes == 2


def test_more_classes_of_one_task_count_for_all(
    build: Callable[..., Federation], folder: Path, make_task: Callable[..., Any], write: Callable[..., Path]
) -> None:
    columns = make_task("three")
    columns["label"] = [i % 3 for i in range(76)]
    write(folder, "three", columns)
    assert build(tasks=["red", "three"]).n_classes == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"partition": "pure", "clients": 12, "min_examples": 6},
            r"client 0 got 10 examples, needs 11, 6 to train on and 5 for validation \(pure, 12 clients\); "
            r"raise data.train_per_task, or lower data.min_examples, data.validation_per_client "
            r"or data.clients",
        ),
        (
            {"alpha": 0.05, "min_examples": 64, "validation_per_client": 0},
            r"client \d got \d+ examples, needs 64 \(alpha=0.05, 4 clients\); raise data.alpha or "
            r"data.train_per_task, or lower data.min_examples or data.clients",
        ),
        ({"partition": "pure", "clients": 2}, "3 tasks, 2 clients: more tasks than clients at the pure end"),
        ({"tasks": []}, "got no tasks, needs one or more"),
        ({"public_only": ["red"]}, "got 'red' twice"),
        ({"tasks": ["red", "train"]}, "got a task called 'train'"),
        ({"clients": 0}, "got 0 clients and 3 tasks"),
        ({"train_per_task": 0}, "train_per_task is 0, must be >= 1"),
        ({"min_examples": 0}, "min_examples is 0, must be >= 1"),
        ({"test_per_client": -1}, "test_per_client is -1, must be >= 0"),
        ({"seed": -1}, "seed is -1, must be >= 0"),
        ({"max_length": 3}, "max_length is 3, must be >= 8"),
        ({"threshold": 0.4}, "threshold is 0.4"),
    ],
)
def test_bad_settings_get_one_clear_line(
    build: Callable[..., Federation], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


def test_public_only_task_needs_rows_but_no_test_split(
    build: Callable[..., Federation], folder: Path, make_task: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write(folder, "bare", make_task("bare", train=2, public=0, validation=0, test=0))
    assert len(build(public_only=["bare"]).public["bare"]) == 2
    write(folder, "bare", make_task("bare", train=0, public=0, validation=0))
    with pytest.raises(
        ValueError, match=r"task 'bare' has only test rows in bare.parquet, needs rows in train"
    ):
        build(public_only=["bare"])


def test_shipped_tasks_at_the_pure_end(tokenizer: Any) -> None:
    federation = build_text_federation(
        tasks=["sst2", "wic"], public_only=["wnli"], clients=4, partition="pure", validation_per_client=200,
        test_per_client=200, min_examples=64, max_length=16, tokenizer=tokenizer, seed=42,
    )  # fmt: skip
    # 5000 / 2 and 4428 / 2, less 200; WNLI pools 435 + 100 + 100.
    assert [len(client["train"]) for client in federation.clients] == [2300, 2014, 2300, 2014]
    assert len(federation.public["wnli"]) == 635 and federation.notes == ()


def test_a_given_layout_is_what_the_clients_hold(build: Callable[..., Federation]) -> None:
    # 40 rows of each of three tasks over three clients: a budget of 40 rows each. Task 0 is asked for
    # 40 + 20 = 60 of 40 rows, so two thirds: 26 and 13; task 1 for 20; task 2 for 40.
    federation = build(
        partition="given", clients=3, mixtures=[[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]], validation_per_client=4
    )
    held = [
        [
            sum(pair)
            for pair in zip(*(task_counts(client[s], 3) for s in ("train", "validation")), strict=True)
        ]
        for client in federation.clients
    ]
    assert held == [[26, 0, 0], [13, 20, 0], [0, 0, 40]]
    assert federation.mixtures["thresholded"].tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert federation.mixtures["realised"][1] == pytest.approx([13 / 33, 20 / 33, 0])


def test_a_given_layout_with_too_few_rows_names_the_way_out(build: Callable[..., Federation]) -> None:
    with pytest.raises(ValueError, match=r"client 0 got .*\(given, 2 clients\); raise data.train_per_task"):
        build(partition="given", clients=2, mixtures=[[1, 0, 0], [0, 0.5, 0.5]], train_per_task=4)
    with pytest.raises(ValueError, match="got 0 mixtures, needs one row of 3 shares"):
        build(partition="given", clients=2)
