"""FedAvg by the package `pfl`, for `fedavg_cnn.py`; run by a Python that has pfl and torch.

pfl_fedavg.py FOLDER PRECISION THREADS OUT

Its parts as they come: `FederatedAveraging`, `SimulatedBackend` weighted by data points, `PyTorchModel` (with
its `amp_dtype` for bf16), `CentralEvaluationCallback` over all clients' rows in one data set, which is less
work than a pass per client. A user's data set gives the rows of the plan instead of slices in their order;
pfl shuffles nothing. Clients' own evaluation before and after training happens in its round 0 only, which
does not count: the package has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F
from turns import Turns
from work import LeNet, Work, load, save


class Network(LeNet):
    """The network with the two functions that pfl asks for."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Clock(TrainingProcessCallback):
    """Knows the round, takes the turns, and writes the model to `out` when asked; stands behind the
    evaluation."""

    def __init__(self, turns: Turns, save_after: int, out: Path) -> None:
        self.round, self._turns, self._save_after, self._out = 0, turns, save_after, out

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._turns.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round = central_iteration + 1
        if self.round == self._save_after:
            save(self._out, dict(model.pytorch_model.state_dict()))
        found = aggregate_metrics.to_simple_dict()
        self._turns.done(accuracy=found.get("Central val | accuracy"))
        return not self._turns.wait(), Metrics()


class Planned(PyTorchTensorDataset):
    """A user's rows in the plan's order."""

    def __init__(self, work: Work, client: int, clock: Clock) -> None:
        super().__init__(work.images(client, "train"), user_id=str(client))
        self._work, self._client, self._clock = work, client, clock

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        x, y = self.raw_data
        for rows in self._work.plan(self._clock.round, self._client):
            yield x[rows], y[rows]


def main(folder: str, precision: str, threads: str, out: str) -> None:
    """All rounds, a turn each."""
    torch.set_num_threads(int(threads))
    turns, work = Turns(), load(folder)
    settings, clock = work.settings, Clock(turns, work.settings["save_after"], Path(out))
    users = {str(k): Planned(work, k, clock) for k in range(work.clients)}
    sampler = get_user_sampler("minimize_reuse", list(users))
    data = FederatedDataset(users.__getitem__, sampler)
    held = [work.images(k, "validation") for k in range(work.clients)]
    central = PyTorchTensorDataset((torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])))
    network = Network(work.start(), settings["padding"])
    model = PyTorchModel(
        network, work.optimizer, torch.optim.SGD(network.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if precision == "bf16" else None,
    )  # fmt: skip
    evaluation = NNEvalHyperParams(local_batch_size=settings["evaluated"])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=settings["rounds"], evaluation_frequency=settings["rounds"],
            train_cohort_size=work.clients, val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=settings["batch"], local_num_epochs=None, local_learning_rate=settings["lr"],
            local_num_steps=settings["steps"],
        ),
        evaluation,
        [CentralEvaluationCallback(central, evaluation), clock],
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
