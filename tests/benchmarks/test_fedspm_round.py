"""The rival of the round benchmark does the package's work: same images, same steps, same metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedspm_round
import pytest
import torch
from measuring import InThread, Pause
from rivals import file_loop
from safetensors.torch import load_file, save_file

from fedprism import api
from fedprism.data.image_federation import ArrayFederation, build_image_federation
from fedprism.methods.fedspm import FEDDRM_SEPARATE, OneComponentConfig, fit
from fedprism.models.networks import NetworkModel
from fedprism.models.vision import load_vision
from fedprism.protocol import Client, Facts

CFG = OneComponentConfig(local_steps=4, drm_steps=5, batch_size=16, lr=0.05)
SETTINGS = file_loop.Settings(rounds=2, steps=4, drm_steps=5, batch=16, lr=0.05, size=14, threads=1)


@pytest.fixture(scope="module")
def federation() -> ArrayFederation:
    return build_image_federation(dataset="fashion_mnist", clients=3, examples=700, size=14, seed=1)


@pytest.fixture(scope="module")
def model() -> NetworkModel:
    return load_vision("lenet_small", "lenet_small", image_size=14)


def test_the_rivals_images_are_the_packages_up_to_their_rounding_to_bytes(
    federation: ArrayFederation,
) -> None:
    levels = file_loop.raw_images(federation)
    scaled = build_image_federation(dataset="fashion_mnist", clients=8, examples=1000, size=16, seed=1)
    for built, size in ((federation, 14), (scaled, 16)):  # means of blocks; the same after interpolation
        settings = file_loop.Settings(rounds=1, size=size)
        for split in ("train", "test"):
            parts = file_loop.client_images(levels, built, split, settings)
            for part, client in zip(parts, built.clients, strict=True):
                x = torch.stack([part[k][0] for k in range(len(part))])
                torch.testing.assert_close(x, client[split].x(), atol=1.01 / 255, rtol=0)
                assert [int(part[k][1]) for k in range(len(part))] == client[split].columns["label"].tolist()


def test_one_local_update_of_the_rival_is_the_packages(
    federation: ArrayFederation, model: NetworkModel
) -> None:
    owner, seed = 1, 5
    sizes = tuple(len(client["train"]) for client in federation.clients)
    state = FEDDRM_SEPARATE.start(CFG, model, Facts((0, 1, 2), sizes, ("fashion_mnist",), (), seed))
    client = Client(owner, model, federation.clients[owner], {})
    head = model.init("head", 77)
    client.state["head"] = {f"0:{name}": value for name, value in head.items()}
    shared = {"theta": state.theta, "gamma": state.gamma, "xi": state.xi, "nu": state.nu, "tau": state.tau}
    client.generator.manual_seed(3)
    sent = fit(client, {**shared, "lr": CFG.lr}, CFG)

    classifier = file_loop.Classifier(model, seed)
    classifier.head.load_state_dict({name.removeprefix("head."): value for name, value in head.items()})
    router = file_loop.Router(model, 3, seed)
    router.table.load_state_dict({"weight": state.xi[:, 0], "bias": state.gamma[:, 0]})
    client.generator.manual_seed(3)
    walks = [client.batches(16, steps=steps, full=True) for steps in (CFG.local_steps, CFG.drm_steps)]
    drawn = [[(batch["x"], batch["label"], batch["client"]) for batch in walk] for walk in walks]
    log_prior = (torch.tensor(sizes) / sum(sizes)).log()
    loss = file_loop.fit_classifier(classifier, drawn[0], CFG.lr, SETTINGS)
    owner_loss = file_loop.fit_router(router, drawn[1], log_prior, CFG.lr, SETTINGS)

    def same(ours: Any, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(theirs.detach(), ours, atol=1e-5, rtol=0)

    for trees, module in ((sent["theta"], classifier), (sent["nu"], router)):
        theirs = dict(module.encoder.named_parameters())
        assert trees.keys() == {name.replace("/", ".") for name in theirs}
        for name, value in theirs.items():
            same(trees[name.replace("/", ".")], value)
    for name, value in classifier.head.named_parameters():
        same(client.state["head"][f"0:head.{name}"], value)
        assert (value.detach() - head[f"head.{name}"]).abs().max() > 1e-3  # it moved
    same(sent["gamma"][:, 0], router.table.bias)
    same(sent["xi"][:, 0], router.table.weight)
    assert loss == pytest.approx(sent["loss"], abs=1e-5)
    # log sum exp(log tau + s) - s_own in the package, minus log tau_own here: the cross-entropy of the owner
    assert owner_loss == pytest.approx(sent["drm_loss"] - torch.tensor(sizes[owner]).log().item(), abs=1e-4)


def test_the_server_averages_files_by_size(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 5.0)):
        save_file({"w": torch.tensor([value, 0.0])}, tmp_path / name)
    file_loop.average_files([tmp_path / "a", tmp_path / "b"], [30, 10], tmp_path / "mean")
    assert load_file(tmp_path / "mean")["w"].tolist() == [2.0, 0.0]


def test_accuracies_by_hand() -> None:
    """Two clients that always say 0 and 1; the router follows the sign of the only pixel."""
    always = [lambda x, k=k: torch.nn.functional.one_hot(torch.full((len(x),), k), 2).float() for k in (0, 1)]
    x = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
    label, owner = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 1, 1])
    rho = torch.tensor([0.25, 0.75])
    found = file_loop.accuracies(
        always, lambda x: torch.cat([-x, x], 1), [(x, label, owner)], torch.zeros(2), rho
    )
    # routed 0 0 1 1; answers 0 0 1 1: right, wrong, right, wrong. Own answers: 0 | 1 1 1 -> 1 of 1, 2 of 3
    assert found == {
        "system": 0.5,
        "routing": 0.75,
        "average": pytest.approx(0.25 + 0.75 * 2 / 3),
    }


@pytest.mark.slow
def test_the_rival_learns(federation: ArrayFederation, model: NetworkModel, tmp_path: Path) -> None:
    said: list[Any] = []
    settings = file_loop.Settings(
        rounds=8, steps=3, drm_steps=3, batch=32, lr=0.05, size=14, threads=torch.get_num_threads()
    )
    file_loop.run(model, federation, settings, tmp_path, said.append)
    assert said[-1]["loss"] < said[0]["loss"] - 0.3
    # few steps, else a client's own router loss says nothing: it falls to 0 where all claim every image
    assert said[-1]["drm_loss"] < said[0]["drm_loss"] - 0.05
    assert said[-1]["routing"] > 0.6 > said[0]["routing"]
    assert said[-1]["system"] > said[0]["system"] + 0.1
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 + 3 * 3


def test_turns_are_taken_and_faults_are_told() -> None:
    def body(pause: Pause) -> None:
        pause({"round": 0})
        raise ValueError("round 1 is broken")

    contestant = InThread(body)
    assert contestant.turn().facts == {"round": 0}
    with pytest.raises(ValueError, match="round 1 is broken"):
        contestant.turn()

    contestant = InThread(lambda pause: pause({}))
    contestant.turn()
    with pytest.raises(RuntimeError, match="ended before"):
        contestant.turn()


@pytest.mark.slow
def test_both_sides_run_on_one_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def remember(build: Any) -> Any:
        return lambda *args, **kwargs: seen.append(build(*args, **kwargs)) or seen[-1]

    monkeypatch.setattr(fedspm_round, "build_image_federation", remember(build_image_federation))
    monkeypatch.setattr(api, "build_image_federation", remember(build_image_federation))
    monkeypatch.setattr(fedspm_round, "PRECISIONS", {"fp32": fedspm_round.PRECISIONS["fp32"]})
    result = fedspm_round.measure(fedspm_round.TINY)
    assert len({federation.fingerprint for federation in seen}) == 1 and len(seen) == 2
    assert result["ratio"]["fp32"] > 0
    for name in ("rival", "fp32"):
        assert set(result["accuracy"][name]) == {"system", "routing", "average"}
        assert all(0 <= value <= 1 for value in result["accuracy"][name].values())
