"""From a run directory to a router that answers: method, model and clients as the last round left them.

Nothing is trained and no data file is read. The directory holds all it takes: settings (config.toml), names
(federation.json), how a row becomes inputs (preprocessing.json) and the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprism import config as configs
from fedprism.config import Experiment
from fedprism.methods.registry import METHODS, get_method
from fedprism.models.mlp import load_mlp
from fedprism.protocol import Body, Client, generator
from fedprism.serving.route import Batch, Router
from fedprism.serving.rows import Preparation
from fedprism.storage import RunDirectory


def load(run: str | Path) -> Router:
    """The router of a finished run on a table.

    run: directory of one run, <experiment>/<method>/seed-<seed>. The threads of the process become the run's.
    Raises FileNotFoundError or ValueError, in one line with the way out, for what is no run, can't route, is
    not finished or has no table."""
    directory = RunDirectory.open(run)
    path = directory.path
    if not (path / "versions.json").is_file():
        raise ValueError(_choice(path))
    experiment = configs.load(path / "config.toml", methods=METHODS)
    (name,), (seed,) = experiment.methods, experiment.seeds
    method = get_method(name)
    if method.router is None:
        raise ValueError(f"route: {name} has no router; name a run of {', '.join(routing_methods())}")
    if experiment.data.dataset not in configs.TABLES:
        raise ValueError(
            f"route: the clients of {path} hold '{experiment.data.dataset}', which is no table; name a run "
            f"with data.dataset = {' or '.join(map(repr, configs.TABLES))}"
        )
    if not directory.complete:
        raise ValueError(f"route: {path} is not finished; finish it with: fedprism resume {path}")
    if not (path / "preprocessing.json").is_file():
        raise FileNotFoundError(
            f"route: {path / 'preprocessing.json'} is missing, an earlier version made this run; repeat it"
        )
    preparation = Preparation.of(directory.read_json("preprocessing.json"))
    federation = directory.read_json("federation.json")
    torch.set_num_threads(experiment.engine.threads)
    model = _model(directory, experiment, preparation.n_inputs, federation["n_classes"])
    restored = directory.load_checkpoint(method.state)
    if restored is None:
        raise FileNotFoundError(f"route: {path} has no checkpoint any more; repeat the run")
    last, state, kept = restored
    own = experiment.own(name)
    cfg = configs.resolve_method(method.config, method.presets, experiment.shared, own, name)
    served = method.serve(cfg, state)
    clients = [
        # a client that never took part draws what it drew when the run was measured
        Client(i, model, {}, dict(kept.get(i, {})), generator(seed, last, 0, "answer", i))
        for i in range(len(federation["client_names"]))
    ]
    return Router(
        client_names=tuple(federation["client_names"]),
        class_names=tuple(federation["class_names"]),
        preparation=preparation,
        scores=partial(_scores, method.router, model, served, cfg),
        predictors=[partial(_logits, method.predictor(client, served, cfg)) for client in clients],
        size=experiment.evaluation.batch_size,
        about={"run": str(path), "method": name, "seed": seed, "rounds": last + 1},
    )


def _scores(router: Callable[..., Tensor], model: Any, served: Body, cfg: Any, batch: Batch) -> Tensor:
    return router(model, served, batch, cfg)


def _logits(predict: Callable[[Batch], Any], batch: Batch) -> Tensor:
    logits: Tensor = predict(batch).logits
    return logits


def _model(directory: RunDirectory, experiment: Experiment, n_inputs: int, n_classes: int) -> Any:
    """The network of the run, in the precision that it had. Raises ValueError if its tensors differ now."""
    recorded, m = directory.read_json("model.json"), experiment.model
    model = load_mlp(
        n_inputs, n_classes=n_classes, width=m.width, router_width=m.router_width, hidden=m.hidden,
        precision=recorded["precision"],
    )  # fmt: skip
    now = model.describe()["blocks"]
    if now != recorded["blocks"]:
        raise ValueError(
            f"route: the network of {directory.path} had {recorded['blocks']} numbers, this version builds "
            f"{now}; repeat the run"
        )
    return model


def routing_methods() -> list[str]:
    """Names of the methods that have a router."""
    return [name for name in METHODS if get_method(name).router is not None]


def _choice(path: Path) -> str:
    """What to say about the directory of a whole experiment: which of its runs can route."""
    can = set(routing_methods())
    runs = [p.parent for p in sorted(path.glob("*/seed-*/versions.json")) if p.parent.parent.name in can]
    if runs:
        return f"route: {path} is an experiment; name one of its runs: {', '.join(map(str, runs))}"
    return f"route: {path} has no run that can route; name a run of {', '.join(sorted(can))}"
