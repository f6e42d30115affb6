"""The work that `fedavg_cnn.py` hands to the rivals (images, start, rows of every step, settings), and their
network.

Run by the rivals' own Python: imports nothing of fedprism. A folder holds `work.npz` and `work.json`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dense(nn.Module):
    """Linear - layer norm - ReLU."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(n_in, n_out), nn.LayerNorm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class Encoder(nn.Module):
    """Two convolutions, each normalised and pooled, and two dense layers; sizes as in `start`."""

    def __init__(self, start: dict[str, Tensor], padding: int) -> None:
        super().__init__()
        for k in (1, 2):
            n_out, n_in, side, _ = start[f"encoder.conv{k}.weight"].shape
            setattr(self, f"conv{k}", nn.Conv2d(n_in, n_out, side, padding=padding))
            setattr(self, f"norm{k}", nn.GroupNorm(min(16, n_out // 4), n_out))
        self.dense = Dense(*reversed(start["encoder.dense.linear.weight"].shape))
        self.projection = Dense(*reversed(start["encoder.projection.linear.weight"].shape))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.projection(self.dense(x.flatten(1)))


class LeNet(nn.Module):
    """The package's LeNet as a plain module whose tensors have the package's names, starting at `start`."""

    def __init__(self, start: dict[str, Tensor], padding: int) -> None:
        super().__init__()
        self.encoder = Encoder(start, padding)
        self.head = nn.Linear(*reversed(start["head.weight"].shape))
        self.load_state_dict(start)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Work:
    """A folder's work. settings: of the benchmark, with rounds, padding of the convolutions, and save_after:
    rounds after which the driver writes its model. clients: how many."""

    def __init__(self, folder: Path) -> None:
        self.settings: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
        with np.load(folder / "work.npz", allow_pickle=False) as z:
            self._arrays = {name: z[name] for name in z.files}
        self.clients: int = self.settings["clients"]
        lengths = self._arrays["plan_lengths"]  # (rounds, clients, steps)
        ends = lengths.reshape(-1).cumsum().reshape(lengths.shape)
        self._rows = torch.from_numpy(self._arrays["plan_rows"]).long()
        self._lengths, self._ends = lengths, ends

    def images(self, client: int, split: str) -> tuple[Tensor, Tensor]:
        """x (n, 3, side, side) float32 in [-1, 1] and labels (n,), finished once and for all."""
        levels = torch.from_numpy(self._arrays[f"x_{split}_{client}"])
        x = (levels.float() / 255 - 0.5) / 0.5
        return x, torch.from_numpy(self._arrays[f"y_{split}_{client}"]).long()

    def plan(self, round: int, client: int) -> Iterator[Tensor]:
        """The rows of each step's batch, as the package drew them."""
        for n, end in zip(self._lengths[round, client], self._ends[round, client], strict=True):
            yield self._rows[int(end - n) : int(end)]

    def start(self) -> dict[str, Tensor]:
        """The model's tensors before the first round."""
        return {
            name.removeprefix("start/"): torch.from_numpy(value.copy())
            for name, value in self._arrays.items()
            if name.startswith("start/")
        }

    def network(self) -> LeNet:
        """A fresh network at its start."""
        return LeNet(self.start(), self.settings["padding"])

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.SGD:
        """SGD with momentum that decays weights but not norms and biases."""
        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.settings["decay"]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=lr, momentum=self.settings["momentum"])


@functools.cache
def load(folder: str) -> Work:
    """The work of a folder, read once per process."""
    return Work(Path(folder))


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where asked for."""
    if precision == "bf16":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """A model's tensors, for the comparison with the package's."""
    np.savez(path, **{name: value.detach().numpy() for name, value in tensors.items()})
