"""FedSPM at one component as a plain training script: modules, data loaders, model files. The rival of
`fedspm_round.py`, written the way public code of router methods for clients' mixtures does a round.

Same as in the package: networks and kernels (`models.vision` inside modules), data and split, distribution of
the start, rows per step, number of steps, optimiser (momentum from zero each round, decay on weights of
encoders and heads alone), losses, weighted means, and what is measured each round: average, system and
routing accuracy.

Different, and nothing else:

transforms    each image is made from its raw pixels when it is read (scaled, three channels, inverted,
              tinted, normalised), in training and in evaluation; the package keeps finished images as bytes.
              Constants of a client are computed once. The package rounds to whole levels, this does not
loading       a DataLoader per client stacks single images to batches; the package cuts a batch out of a
              tensor
model files   a client reads the shared model and its head from safetensors files and writes them back, every
              round; the server reads all of them and writes the mean. The package keeps trees in memory and
              writes one checkpoint per round
full models   each batch of outside queries goes through the full model of every client, and the router picks
              among the answers; the package encodes a query once for all heads. Average accuracy falls out of
              the same answers; the package scores clients on their own rows in a pass of its own
checks        none of losses and uploads, where the package looks for what is not finite

What would only cost time is left out: the test images are read once for all models, the router runs once per
image, loaders are made once, files lie where the caller says (a folder in memory will do).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from fedprism.data.image_federation import ArrayFederation
from fedprism.data.images import load_images
from fedprism.data.shifts import SIDE, planes
from fedprism.models.networks import NetworkModel


@dataclass(frozen=True)
class Settings:
    """What a round does. rounds: of the whole run, for the cosine schedule. steps, drm_steps: of the two
    solvers. batch: rows per step. lr: rate at round 0. decay: weight decay. evaluated: rows per forward pass
    of the evaluation. tint, ramp: strengths of the clients' shift. size: side of the images in pixels.
    workers: processes per loader, 0 for none. threads: of torch. seed: of start and order."""

    rounds: int
    steps: int = 10
    drm_steps: int = 15
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    drm_momentum: float = 0.95
    decay: float = 5e-4
    evaluated: int = 250
    tint: float = 0.35
    ramp: float = 0.25
    size: int = SIDE
    workers: int = 0
    threads: int = 2
    seed: int = 1


# --- data --------------------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, Tensor, int]]):
    """A client's images of one split, made at each access: (3, size, size) in [-1, 1], label, client.

    levels: (n, 1, side, side) raw bytes. labels: (n,). inverted: (n,) bool. client: 0..7."""

    def __init__(
        self, levels: Tensor, labels: Tensor, inverted: Tensor, client: int, settings: Settings
    ) -> None:
        self.levels, self.labels, self.inverted, self.client = levels, labels, inverted.tolist(), client
        self.size = settings.size
        blue, bottom, right = client & 1, client >> 1 & 1, client >> 2 & 1
        gains = torch.tensor([1.0, 1 - settings.tint / 2, 1 - settings.tint])
        self.gains = (gains.flip(0) if blue else gains)[:, None, None]
        line = torch.linspace(settings.ramp, -settings.ramp, self.size)
        down, across = (line.flip(0) if bottom else line), (line.flip(0) if right else line)
        self.ramps = down[:, None] + across[None, :]

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor, int]:
        x = self.levels[k : k + 1].float()
        side = x.shape[2]
        if side % self.size:
            x, side = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False), SIDE
        if side > self.size:
            x = F.avg_pool2d(x, side // self.size)
        x = x[0] / 255
        if self.inverted[k]:
            x = 1 - x
        x = (x * self.gains + self.ramps).clamp_(0, 1)
        return (x - 0.5) / 0.5, self.labels[k], self.client


def raw_images(federation: ArrayFederation) -> Tensor:
    """All of the data set's images as bytes, (n, 1 or 3, side, side); a row's id is its place among them."""
    return planes(load_images(federation.dataset).images)


def client_images(
    levels: Tensor, federation: ArrayFederation, split: str, settings: Settings
) -> list[Images]:
    """The clients' images of a split: the federation's rows, labels, components. levels: `raw_images`."""
    parts = []
    for k, client in enumerate(federation.clients):
        columns = client[split].columns
        part = Images(levels[columns["row"]], columns["label"], columns["component"] == 1, k, settings)
        parts.append(part)
    return parts


def take(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    """The loader's batches, starting over where it ends, exactly `steps` of them."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)


# --- networks ----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A network of the package as a module with parameters of its own, named with slashes for dots."""

    def __init__(self, model: NetworkModel, block: str, seed: int) -> None:
        super().__init__()
        self.model, self.block = model, block
        for name, value in model.init(block, seed).items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        tree: dict[str, Tensor] = {name.replace("/", "."): p for name, p in self.named_parameters()}
        return self.model.encode(tree, {"x": x}, self.block)


class Classifier(nn.Module):
    """A client's full model: shared encoder, private head."""

    def __init__(self, model: NetworkModel, seed: int) -> None:
        super().__init__()
        self.encoder = Encoder(model, "encoder", seed)
        self.head = nn.Linear(model.width, model.n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Which client an image belongs to: xi . h(x) + gamma of every client, before the prior."""

    def __init__(self, model: NetworkModel, n_clients: int, seed: int) -> None:
        super().__init__()
        self.encoder = Encoder(model, "router_encoder", seed)
        self.table = nn.Linear(model.router_width, n_clients)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.encoder(x))  # type: ignore[no-any-return]


def optimizer(
    module: nn.Module, lr: float, momentum: float, decay: float, plain: Iterable[nn.Parameter] = ()
) -> torch.optim.SGD:
    """SGD that decays weights (two axes or more), but not norms, biases and the parameters in `plain`."""
    exempt = {id(p) for p in plain} | {id(p) for p in module.parameters() if p.ndim < 2}
    decayed = [p for p in module.parameters() if id(p) not in exempt]
    rest = [p for p in module.parameters() if id(p) in exempt]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


# --- one round ---------------------------------------------------------------------------------------------


def fit_classifier(module: Classifier, batches: Iterable[Any], lr: float, settings: Settings) -> float:
    """SGD on the cross-entropy of the labels; changes the module, returns the mean loss in nats."""
    sgd = optimizer(module, lr, settings.momentum, settings.decay)
    losses = []
    for x, label, _ in batches:
        loss = F.cross_entropy(module(x), label)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def fit_router(
    module: Router, batches: Iterable[Any], log_prior: Tensor, lr: float, settings: Settings
) -> float:
    """SGD on the cross-entropy of the owner, log_prior (m,) added to the scores; as `fit_classifier`."""
    sgd = optimizer(module, lr, settings.drm_momentum, settings.decay, module.table.parameters())
    losses = []
    for x, _, owner in batches:
        loss = F.cross_entropy(module(x) + log_prior, owner)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def average_files(files: Sequence[Path], weights: Sequence[int], to: Path) -> None:
    """The weighted mean of model files, as a model file."""
    mean: dict[str, Tensor] = {}
    for file, weight in zip(files, weights, strict=True):
        for name, value in load_file(file).items():
            part = value * (weight / sum(weights))
            mean[name] = mean[name] + part if name in mean else part
    save_file(mean, to)


def accuracies(
    models: Sequence[Classifier], router: Router, batches: Iterable[Any], log_prior: Tensor, rho: Tensor
) -> dict[str, float]:
    """System, routing and average accuracy (FedSPM spec 5) on outside queries whose owners are known."""
    right = torch.zeros(len(models))
    asked = torch.zeros(len(models))
    system = routed = 0
    with torch.no_grad():
        for x, label, owner in batches:
            answers = torch.stack([model(x).argmax(1) for model in models])
            chosen = (router(x) + log_prior).argmax(1)
            place = torch.arange(len(label))
            system += int((answers[chosen, place] == label).sum())
            routed += int((chosen == owner).sum())
            right.index_add_(0, owner, (answers[owner, place] == label).float())
            asked.index_add_(0, owner, torch.ones(len(label)))
    n = float(asked.sum())
    return {"system": system / n, "routing": routed / n, "average": float((rho * right / asked).sum())}


def run(
    model: NetworkModel, federation: ArrayFederation, settings: Settings, folder: Path,
    pause: Callable[[Mapping[str, Any]], None],
) -> None:  # fmt: skip
    """All rounds; pause(facts) after each, with losses (nats) and accuracies (fractions).

    model: networks and their start. folder: for the model files."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    levels = raw_images(federation)
    train = client_images(levels, federation, "train", settings)
    sizes = [len(part) for part in train]
    m = len(train)
    loaders = [
        DataLoader(part, min(settings.batch, n), shuffle=True, drop_last=True, num_workers=settings.workers)
        for part, n in zip(train, sizes, strict=True)
    ]
    test: Dataset[Any] = ConcatDataset(client_images(levels, federation, "test", settings))
    outside = DataLoader(test, settings.evaluated, num_workers=settings.workers)
    rho = torch.tensor(sizes) / sum(sizes)
    log_prior = rho.log()

    classifier, router = Classifier(model, settings.seed), Router(model, m, settings.seed)
    nn.init.zeros_(router.table.bias)
    shared, routing = folder / "encoder.safetensors", folder / "router.safetensors"
    heads = [folder / f"head_{k}.safetensors" for k in range(m)]
    save_file(classifier.encoder.state_dict(), shared)
    save_file(router.state_dict(), routing)
    for head in heads:
        save_file(nn.Linear(model.width, model.n_classes).state_dict(), head)
    uploads = [(folder / f"encoder_{k}.safetensors", folder / f"router_{k}.safetensors") for k in range(m)]

    full = [Classifier(model, settings.seed) for _ in range(m)]
    for t in range(settings.rounds):
        lr = settings.lr * (1 + torch.cos(torch.tensor(torch.pi * t / settings.rounds)).item()) / 2
        loss = drm_loss = 0.0
        for k, loader in enumerate(loaders):
            classifier.encoder.load_state_dict(load_file(shared))
            classifier.head.load_state_dict(load_file(heads[k]))
            router.load_state_dict(load_file(routing))
            loss += rho[k].item() * fit_classifier(classifier, take(loader, settings.steps), lr, settings)
            batches = take(loader, settings.drm_steps)
            drm_loss += rho[k].item() * fit_router(router, batches, log_prior, lr, settings)
            save_file(classifier.encoder.state_dict(), uploads[k][0])
            save_file(classifier.head.state_dict(), heads[k])
            save_file(router.state_dict(), uploads[k][1])
        average_files([encoder for encoder, _ in uploads], sizes, shared)
        average_files([table for _, table in uploads], sizes, routing)
        for k, client in enumerate(full):
            client.encoder.load_state_dict(load_file(shared))
            client.head.load_state_dict(load_file(heads[k]))
        router.load_state_dict(load_file(routing))
        found = accuracies(full, router, outside, log_prior, rho)
        pause({"loss": loss, "drm_loss": drm_loss, **found})
