"""Averaging baselines and references on a language model: 3-D factors, logits (b, T, V)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedprism.methods.references import CENTRALIZED, CentralizedConfig
from fedprism.methods.registry import get_method
from tests.tiny import drive, facts_of
from tests.tiny_language import TinyLanguage, language_clients

SETTINGS: dict[str, dict[str, Any]] = {
    "centralized": {"scope": "pooled"}, "fedprox": {"mu": 0.01}, "scaffold": {"lr": 0.3},
}  # fmt: skip
NAMES = ("centralized", "local_only", "fedavg", "fedit", "fedprox", "scaffold", "ffa_lora", "fedsa_lora",
         "fedex_lora", "fedsvd")  # fmt: skip


def run(name: str, **settings: Any) -> tuple[Any, ...]:
    clients, method = language_clients(), get_method(name)
    given = {
        "rounds": 3,
        "lr": 0.05,
        "batch_size": 4,
        "local_epochs": 2,
        **SETTINGS.get(name, {}),
        **settings,
    }
    cfg = method.config(**given)
    return method, cfg, clients, drive(method, cfg, clients, facts=facts_of(clients))


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline_learns_to_count(name: str) -> None:
    """From ln 7 = 1.946 nats, the untrained model's uniform guess, to clearly less on test rows."""
    method, cfg, clients, ends = run(name)
    got = method.serve(cfg, ends[-1].state)
    for i in (0, 1, 2):
        batch = clients[i].data["test"].columns
        out = method.predictor(clients[i], got, cfg)(batch)
        assert out.logits.shape == (6, 6, 7)
        assert float(clients[i].model.per_example_loss(out, batch).mean()) < 1.6


def test_the_untrained_model_guesses() -> None:
    method, cfg, clients, ends = run("untrained")
    batch = clients[0].data["test"].columns
    out = method.predictor(clients[0], method.serve(cfg, ends[-1].state), cfg)(batch)
    loss = clients[0].model.per_example_loss(out, batch)
    assert torch.allclose(loss, torch.full((6,), 7.0).log())


def test_each_text_is_read_by_the_model_of_its_task() -> None:
    clients, cfg = language_clients(), CentralizedConfig()
    model, g = clients[0].model, torch.Generator().manual_seed(1)
    models = {
        name: {k: torch.randn(v.shape, generator=g) for k, v in model.trainable(0).items()}
        for name in ("one", "two")
    }
    batch = {**clients[0].data["test"].columns, "use_cache": True}  # tasks 0, 1, 0, 1, ...
    logits = CENTRALIZED.predictor(clients[0], {"models": models, "order": ["two", "one"]}, cfg)(batch).logits
    for k in range(6):
        alone = model.apply(models["one" if k % 2 else "two"], {"input_ids": batch["input_ids"][k : k + 1]})
        assert torch.allclose(logits[k], alone.logits[0], atol=1e-6)


def test_one_pooled_model_gets_the_batch_as_it_is() -> None:
    """A text that is being written carries its past, which no part of a batch could; tasks may be unknown."""
    seen: list[Any] = []

    class Watching(TinyLanguage):
        def apply(self, tree: Any, batch: Any, **more: Any) -> Any:
            seen.append(batch)
            return super().apply(tree, batch, **more)

    clients = language_clients()
    clients[0].model = Watching()
    got = {"models": {"train": clients[0].model.trainable(0)}, "order": ["train"]}
    batch = {**clients[0].data["test"].columns, "task": torch.full((6,), 9), "past": object()}
    CENTRALIZED.predictor(clients[0], got, CentralizedConfig(scope="pooled"))(batch)
    assert seen[0] is batch
