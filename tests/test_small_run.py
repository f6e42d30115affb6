"""FedSEE on real text, about two minutes (FedSEE spec 14, item 10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedprism import api, config
from fedprism.evaluation.metrics import mixture_report
from fedprism.methods.registry import METHODS
from fedprism.storage import RunDirectory

CONFIG = """
name = "two_easy_tasks"
seeds = [5]
[data]
tasks = ["sst2", "qqp"]
clients = 4
partition = "pure"
train_per_task = 320
public_per_task = 120
validation_per_client = 8
test_per_client = 8
[model]
max_length = 24
precision = "auto"
[method]
names = ["fedsee"]
rounds = 3
local_epochs = 1
lr = 5e-3
batch_size = 16
[method.fedsee]
init_epochs = 2
public_batch = 8
table_rows = 60
block_clip = 0.1
row_clip = 0.1
"""


@pytest.mark.slow
def test_pure_clients_are_recognised_on_real_text(tmp_path: Path) -> None:
    recipe = tmp_path / "easy.toml"
    recipe.write_text(CONFIG, encoding="utf-8")
    experiment = config.load(recipe, methods=METHODS)
    directory = RunDirectory.create(tmp_path / "run")
    watch = api.Silent()
    api.run_method(experiment, "fedsee", 5, directory, api.Workshop(experiment, watch), watch)
    lines: list[dict[str, Any]] = directory.read_metrics()
    true = np.array(directory.read_json("federation.json")["mixtures"]["thresholded"])
    raw = [np.array(line["log"]["contributions"]).T for line in lines]  # (N, M), client totals M / N
    raw = [c / c.sum(1, keepdims=True) for c in raw]
    assert (raw[-1].argmax(1) == true.argmax(1)).all()
    errors = [mixture_report(c, true, true)["mae"] for c in raw]
    uniform = 1 / 2  # error of a server that knows nothing: (1/2 + 1/2) / 2
    assert errors[-1] < errors[0] < uniform  # with the published clips every call moves a little further
    table = np.array(lines[-1]["log"]["public_losses"])  # experts x tasks
    assert table.argmin(0).tolist() == [0, 1]  # on every task its own expert is the best
    assert all(np.isfinite(value) for line in lines for value in line["log"].get("kl", []))
