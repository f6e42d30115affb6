"""Small stand-ins for tests, with known answers: quadratic clients, a linear expert model, rows in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedprism.data.arrays import TableRows
from fedprism.engines.inprocess import InProcess
from fedprism.models.interface import Bank, Batch, Model, Outputs
from fedprism.models.mlp import load_mlp
from fedprism.protocol import Ask, Client, Facts, Method


class TinyRows:
    """Rows of tensors; batches as the product's rows give them."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select(self, index: Tensor) -> TinyRows:
        return TinyRows(**{name: value[index] for name, value in self.columns.items()})

    def batches(
        self,
        size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        made = 0
        for _ in range(epochs or 1) if steps is None else iter(int, 1):
            order = (
                torch.arange(len(self))
                if generator is None
                else torch.randperm(len(self), generator=generator)
            )
            for part in order.split(size):
                if steps is not None and made == steps:
                    return
                made += 1
                yield {name: value[part] for name, value in self.columns.items()}


class Quadratic(Model):
    """One weight w; example with (a, b) has loss a (w - b)^2 / 2."""

    projections = ()
    n_classes = 2

    def __init__(self) -> None:
        self.blocks = {"lora_A": (), "lora_B": ("w",), "router": (), "head": ()}

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        return {"w": torch.zeros(1, dtype=torch.float64)} if block == "lora_B" else {}

    def apply(self, tree: Any, batch: Batch, *, bank: Any = None, generator: Any = None) -> Outputs:
        return Outputs(tree["w"].expand(len(batch["b"])))

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return batch["a"] * (outputs.logits - batch["b"]) ** 2 / 2

    def describe(self) -> dict[str, Any]:
        return {}


class Linear(Model):
    """phi(x) = x; logits = (always-on + sum_m p_m(x) expert_m) x, with an optional shared down-projection.

    loss "ce": cross-entropy. loss "square": squared distance to `batch["y"]`, summed over outputs."""

    n_classes = 2

    def __init__(self, d: int = 3, outputs: int = 2, rank: int = 0, loss: str = "ce") -> None:
        self.d, self.outputs, self.rank, self.kind = d, outputs, rank, loss
        self.n_classes = outputs
        self.projections = ("p",)
        self.blocks = {
            "lora_A": ("lora_A.p",) if rank else (),
            "lora_B": ("lora_B.p",),
            "router": ("router.p.weight", "router.p.bias"),
            "head": (),
        }

    def init(self, block: str, seed: int, n_experts: int = 0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed % 2**62)
        inner = self.rank or self.d
        if block == "lora_A":
            return (
                {"lora_A.p": torch.randn(self.rank, self.d, generator=g) / self.d**0.5} if self.rank else {}
            )
        if block == "lora_B":
            return {"lora_B.p": torch.zeros(self.outputs, inner)}
        if block == "router":
            weight = torch.randn(n_experts, self.d, generator=g) * 0.1
            return {"router.p.weight": weight, "router.p.bias": torch.zeros(n_experts)}
        return {}

    def apply(self, tree: Any, batch: Batch, *, bank: Bank | None = None, generator: Any = None) -> Outputs:
        x = batch["x"]
        logits = torch.zeros(len(x), self.outputs, dtype=x.dtype)
        if "lora_B.p" in tree:
            logits = logits + self._down(tree, x) @ tree["lora_B.p"].T
        if bank is None:
            return Outputs(logits)
        n_experts = len(bank.weights) if bank.weights is not None else len(bank.router["router.p.bias"])
        if bank.weights is not None:
            p = bank.weights.to(x.dtype).expand(len(x), n_experts)
        else:
            score = x @ bank.router["router.p.weight"].T + bank.router["router.p.bias"]
            absent = torch.tensor([m not in bank.experts for m in range(n_experts)])
            p = score.masked_fill(absent, -torch.inf).softmax(1)
        u = self._down(bank.down, x)
        for m, expert in bank.experts.items():
            logits = logits + p[:, m : m + 1] * (u @ expert["lora_B.p"].T)
        if bank.weights is not None:
            return Outputs(logits)
        return Outputs(logits, p[None], torch.ones(len(x)))

    def _down(self, tree: Any, x: Tensor) -> Tensor:
        return x @ tree["lora_A.p"].T if "lora_A.p" in tree else x

    def per_example_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        if self.kind == "square":
            return (outputs.logits - batch["y"]).square().sum(1)
        return super().per_example_loss(outputs, batch)

    def describe(self) -> dict[str, Any]:
        return {"kind": "linear", "d": self.d}


def quadratic_clients(a: tuple[float, ...], b: tuple[float, ...]) -> dict[int, Client]:
    """One client per (a, b), each with a single example."""
    model = Quadratic()
    return {
        i: Client(i, model, {"train": TinyRows(a=torch.tensor([ai]).double(), b=torch.tensor([bi]).double())})
        for i, (ai, bi) in enumerate(zip(a, b, strict=True))
    }


def mixed_clients(
    n_clients: int = 4, n_tasks: int = 2, n: int = 24, d: int = 3, seed: int = 0, model: Model | None = None
) -> dict[int, Client]:
    """Linear tasks in orthogonal directions; client i holds mostly task i mod M. Includes -1 and -2."""
    g = torch.Generator().manual_seed(seed)
    model = model or Linear(d)
    truth = torch.linalg.qr(torch.randn(d, d, generator=g)).Q[:n_tasks]  # orthogonal: no task helps another

    def rows(tasks: Tensor) -> TinyRows:
        x = torch.randn(len(tasks), d, generator=g)
        label = ((x * truth[tasks]).sum(1) > 0).long()
        return TinyRows(x=x, label=label, task=tasks, row=torch.arange(len(tasks)))

    clients = {}
    for i in range(n_clients):
        home = torch.full((n,), i % n_tasks)
        other = torch.randint(n_tasks, (n,), generator=g)
        tasks = torch.where(torch.rand(n, generator=g) < 0.8, home, other)
        clients[i] = Client(
            i, model, {"train": rows(tasks), "validation": rows(tasks[:8]), "test": rows(tasks[:8])}
        )
    public = {f"task{m}": rows(torch.full((n,), m)) for m in range(n_tasks)}
    names = next(iter(public.values())).columns
    public["train"] = TinyRows(**{c: torch.cat([r.columns[c] for r in public.values()]) for c in names})
    pooled = TinyRows(**{c: torch.cat([k.data["train"].columns[c] for k in clients.values()]) for c in names})
    held = {
        f"task{m}": pooled.select(torch.nonzero(pooled.columns["task"] == m).flatten())
        for m in range(n_tasks)
    }
    clients[-1] = Client(-1, model, public)
    clients[-2] = Client(-2, model, {"train": pooled, **held})
    return clients


def table_clients(
    m: int = 3, C: int = 2, n: int = 40, d: int = 3, K: int = 2, seed: int = 0, model: Any = None
) -> dict[int, Client]:
    """Rows of a table from m clients of C hidden components each, and a small perceptron that reads them.

    Component c of client i has its own mean; its labels follow a direction that turns with c."""
    g = torch.Generator().manual_seed(seed)
    model = model or load_mlp(d, n_classes=K, width=4, router_width=3, hidden=(6,))
    means, directions = torch.randn(m, C, d, generator=g) * 1.5, torch.randn(C, d, K, generator=g)

    def rows(i: int, count: int, first: int) -> TableRows:
        component = torch.arange(count) % C
        x = means[i, component] + torch.randn(count, d, generator=g)
        score = torch.einsum("nd,ndk->nk", x - means[i, component], directions[component])
        full = torch.full((count,), i)
        ids = first + torch.randperm(count, generator=g)
        columns = {"label": score.argmax(1), "task": full * 0, "row": ids, "client": full}
        return TableRows({**columns, "component": component}, x)

    return {
        i: Client(
            i, model,
            {split: rows(i, count, 1000 * (3 * i + k)) for k, (split, count) in
             enumerate({"train": n + 4 * i, "validation": 8, "test": 12}.items())},
        )
        for i in range(m)
    }  # fmt: skip


def facts_of(participants: dict[int, Client], n_tasks: int = 2, seed: int = 0) -> Facts:
    ids = tuple(sorted(i for i in participants if i >= 0))
    tasks = tuple(f"task{m}" for m in range(n_tasks))
    return Facts(ids, tuple(participants[i].n for i in ids), tasks, tasks, seed)


def drive(
    method: Method,
    cfg: Any,
    participants: dict[int, Client],
    *,
    facts: Facts | None = None,
    state: Any = None,
    stop: int | None = None,
    seed: int = 0,
) -> list[Any]:
    """Run a method through the in-process engine; returns its RoundEnds (at most `stop`)."""
    facts = facts or facts_of(participants, seed=seed)
    if state is None:
        state = method.start(cfg, next(iter(participants.values())).model, facts)
    engine = InProcess(method.name, {p.name: p for p in method.phases}, participants, cfg, seed)
    server, replies, ends, now = method.server(cfg, state, facts.clients), None, [], state.round
    while stop is None or len(ends) < stop:
        try:
            event = server.send(replies)  # type: ignore[arg-type]
        except StopIteration:
            break
        if isinstance(event, Ask):
            replies = engine.carry(event, now)
        else:
            ends.append(event)
            replies, now = None, event.round + 1
    return ends
