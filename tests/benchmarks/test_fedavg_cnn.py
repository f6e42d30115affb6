"""What the FedAvg benchmark hands to its rivals is the package's work: same network, rows, steps and mean."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import fedavg_cnn
import pytest
import torch
from measuring import InProcess
from rivals import work
from torch.nn import functional as F

from fedprism.models.vision import load_vision
from fedprism.trees import Tree, mean

SETTING = replace(fedavg_cnn.TINY, steps=4, batch=100)  # more rows than some clients have: a short batch


@pytest.mark.parametrize(("size", "padding"), [(14, 2), (28, 0)])
def test_the_rivals_network_is_the_packages(size: int, padding: int) -> None:
    model = load_vision("lenet_small", "lenet_small", image_size=size)
    start = model.trainable(3)
    x = torch.rand(5, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    module = work.LeNet(start, padding)
    torch.testing.assert_close(module(x), model.apply(start, {"x": x}).logits, atol=1e-6, rtol=0)
    decayed = {name for name, value in module.named_parameters() if value.ndim > 1}
    assert decayed == model.decayed & start.keys()


@pytest.mark.slow
def test_a_plain_loop_over_the_work_comes_to_the_packages_model(tmp_path: Path) -> None:
    torch.set_num_threads(SETTING.threads)
    fedavg_cnn.hand_out(SETTING, tmp_path)
    handed = work.Work(tmp_path)
    w: Tree = handed.start()
    module = handed.network()
    for t in range(fedavg_cnn.UNCOUNTED):
        local, sizes = [], []
        for k in range(handed.clients):
            x, y = handed.images(k, "train")
            module.load_state_dict(w)
            sgd = handed.optimizer(module.parameters(), SETTING.lr)
            batches = list(handed.plan(t, k))
            assert len(batches) == SETTING.steps
            for rows in batches:
                sgd.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                sgd.step()
            local.append({name: value.clone() for name, value in module.state_dict().items()})
            sizes.append(len(x))
        w = mean(local, sizes)
    work.save(tmp_path / "model.npz", w)
    package = fedavg_cnn.package(SETTING, "fp32", tmp_path / "fp32")
    for _ in range(fedavg_cnn.UNCOUNTED):
        package.turn()
    run = tmp_path / "fp32" / "run"
    assert fedavg_cnn.relative_distance(run, tmp_path / "model.npz", tmp_path) < fedavg_cnn.FAR_APART
    work.save(tmp_path / "start.npz", handed.start())
    assert fedavg_cnn.relative_distance(run, tmp_path / "start.npz", tmp_path) == pytest.approx(1)


def test_a_driver_takes_turns_and_its_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "from turns import Turns\nturns = Turns()\nround = 0\n"
        "while turns.wait():\n    print('noise')\n    turns.done(round=round)\n    round += 1\n"
        "    if round == 2:\n        raise ValueError('broken on purpose')\n"
    )
    env = {"PYTHONPATH": str(fedavg_cnn.DRIVERS)}
    driver = InProcess([sys.executable, str(script)], tmp_path / "log.txt", env)
    try:
        first = driver.turn()
        assert first.facts == {"round": 0} and first.seconds >= 0
        assert driver.turn().facts == {"round": 1}
        with pytest.raises(RuntimeError, match=r"driver\.py failed.*broken on purpose"):
            driver.turn()
    finally:
        driver.abort()
    assert "noise" in (tmp_path / "log.txt").read_text()


def test_a_python_without_the_rivals_is_refused_in_one_line() -> None:
    with pytest.raises(SystemExit, match="can't run the rivals") as refused:
        fedavg_cnn.rival_versions(sys.executable)
    assert "\n" not in str(refused.value)
