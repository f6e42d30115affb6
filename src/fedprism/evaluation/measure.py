"""The phases that score a method: each client's predictor on its own rows, and everyone on outside queries.

Scores travel like any other reply: confusion counts per task, loss sums, expert usage, answers. Nothing a
client keeps is changed by being scored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedprism.evaluation.metrics import matthews_correlation, system_report
from fedprism.models.interface import Batch, FeatureModel
from fedprism.protocol import Body, Client, Method, Phase, Reply

ASKED = frozenset({"split", "size", "n_tasks"})
SENT = frozenset({"confusion", "loss", "usage", "tokens"})


def evaluation_phase(method: Method, served: Sequence[str]) -> Phase:
    """The phase "evaluate" of a method. served: names in the body of `method.serve`.

    It sends confusion (T, C, C) counts [task, true, predicted], loss (T,) sums in nats, usage (T, P, M)
    routing probability summed over real tokens and tokens (T,); without a router the last two are empty."""

    def evaluate(client: Client, got: Body, cfg: Any) -> Body:
        server = {name: got[name] for name in served}
        predict = method.predictor(client, server, cfg)
        n_tasks, n_classes = got["n_tasks"], client.model.n_classes
        confusion = torch.zeros(n_tasks, n_classes, n_classes, dtype=torch.int64)
        loss = torch.zeros(n_tasks, dtype=torch.float64)
        usage, tokens = torch.zeros(0), torch.zeros(n_tasks, dtype=torch.float64)
        with torch.no_grad():
            for batch in client.data[got["split"]].batches(got["size"]):
                out = predict(batch)
                cell = (batch["task"] * n_classes + batch["label"]) * n_classes + out.logits.argmax(1)
                confusion += torch.bincount(cell, minlength=confusion.numel()).view_as(confusion)
                loss.index_add_(0, batch["task"], client.model.per_example_loss(out, batch).double())
                if out.usage_sum is not None and out.tokens is not None:
                    per_example = out.usage_sum.double().transpose(0, 1)  # (b, P, M)
                    if usage.numel() == 0:
                        usage = torch.zeros(n_tasks, *per_example.shape[1:], dtype=torch.float64)
                    usage.index_add_(0, batch["task"], per_example)
                    tokens.index_add_(0, batch["task"], out.tokens.double())
        return {"confusion": confusion, "loss": loss, "usage": usage, "tokens": tokens}

    return Phase(evaluate, "evaluate", frozenset(served) | ASKED, _kept(method), SENT)


def _kept(method: Method) -> frozenset[str]:
    return frozenset(name for phase in method.phases for name in phase.keeps)


def collect(replies: Sequence[Reply], tasks: Sequence[str], projections: Sequence[str]) -> dict[str, Any]:
    """JSON-ready evaluation: accuracy and mean loss per client, scores per task over all clients, usage.

    Accuracies are fractions. Raises ValueError naming a client without rows."""
    empty = [r.client for r in replies if int(r.body["confusion"].sum()) == 0]
    if empty:
        raise ValueError(f"evaluation: clients {empty} have no rows to score")
    right = [r.body["confusion"].diagonal(dim1=1, dim2=2).sum(1) for r in replies]  # (T,) each
    count = [r.body["confusion"].sum((1, 2)) for r in replies]
    total = torch.stack([r.body["confusion"] for r in replies]).sum(0)
    per_task = {
        task: {
            "correct": int(total[k].diagonal().sum()),
            "n": int(total[k].sum()),
            "matthews": matthews_correlation(total[k].numpy()),
        }
        for k, task in enumerate(tasks)
        if int(total[k].sum())
    }
    result: dict[str, Any] = {
        "accuracy": [int(r.sum()) / int(n.sum()) for r, n in zip(right, count, strict=True)],
        "loss": [float(r.body["loss"].sum() / n.sum()) for r, n in zip(replies, count, strict=True)],
        "n": [int(n.sum()) for n in count],
        "per_task": per_task,
    }
    routed = [r for r in replies if r.body["usage"].numel()]
    if routed:
        usage = torch.stack([r.body["usage"] for r in routed]).sum(0)  # (T, P, M)
        tokens = torch.stack([r.body["tokens"] for r in routed]).sum(0)
        result["usage"] = {
            "projections": list(projections),
            "experts": list(tasks)[: usage.shape[2]],
            "per_task": {
                task: (usage[k] / tokens[k]).tolist() for k, task in enumerate(tasks) if float(tokens[k]) > 0
            },
            "per_client": [
                (r.body["usage"].sum(0) / r.body["tokens"].sum()).mean(0).tolist()
                if r.body["usage"].numel()
                else None
                for r in replies
            ],
        }
    return result


# --- queries whose owner nobody knows (FedSPM spec 5) ------------------------------------------------------

QUERY = ("x", "task")


def answer_phase(method: Method, served: Sequence[str]) -> Phase:
    """The phase "answer" of a method: a client's predictor on queries from outside, hard labels (n,) int64.

    served: names in the body of `method.serve`. It also gets the queries' columns (`pooled_queries`)."""

    def answer(client: Client, got: Body, cfg: Any) -> Body:
        predict = method.predictor(client, {name: got[name] for name in served}, cfg)
        with torch.no_grad():
            answers = [predict(batch).logits.argmax(1) for batch in _batches(got, got["size"])]
        return {"answers": torch.cat(answers)}

    asked = frozenset(served) | frozenset(QUERY) | {"size"}
    return Phase(answer, "answer", asked, _kept(method), frozenset({"answers"}))


def _batches(queries: Mapping[str, Any], size: int) -> Iterator[Batch]:
    for at in range(0, len(queries["x"]), size):
        yield {name: queries[name][at : at + size] for name in QUERY}


def pooled_queries(clients: Sequence[Client], split: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """All clients' rows of a split as outside queries: columns, labels (n,) and owners (n,), by client."""
    rows = [client.data[split] for client in clients]
    queries = {
        "x": torch.cat([part.x() for part in rows]),
        "task": torch.cat([part.columns["task"] for part in rows]),
    }
    labels = torch.cat([part.columns["label"] for part in rows])
    owners = torch.cat([torch.full((len(part),), k) for k, part in enumerate(rows)])
    return queries, labels, owners


def collect_answers(
    replies: Sequence[Reply], queries: Mapping[str, Tensor], labels: Tensor, owners: Tensor, *,
    method: Method, cfg: Any, model: Any, served: Body, size: int,
) -> dict[str, Any]:  # fmt: skip
    """JSON-ready `metrics.system_report` of the clients' answers, by the method's router where it has one."""
    scores = None
    if method.router is not None:
        with torch.inference_mode():
            parts = [method.router(model, served, batch, cfg) for batch in _batches(queries, size)]
        scores = torch.cat(parts).double().numpy()
    answers = torch.stack([reply.body["answers"] for reply in replies]).numpy()
    return system_report(answers, labels.numpy(), owners.numpy(), scores, model.n_classes)


def encoding_once(model: Any) -> Any:
    """The same model, whose encoders run once per batch of queries however many clients' heads read them.

    Features are kept by the very tensors they were computed from, so encoders of a client's own get their
    own. Without gradients only; other models come back as they are."""
    if not isinstance(model, FeatureModel):
        return model
    seen: dict[Any, tuple[Any, Tensor]] = {}

    def encode(tree: Any, batch: Batch, block: str = "encoder") -> Tensor:
        x, parts = batch["x"], [tree[name] for name in model.blocks.get(block, ()) if name in tree]
        if torch.is_grad_enabled() or len(parts) != len(model.blocks.get(block, ())):
            return model.encode(tree, batch, block)
        key = block, x.data_ptr(), x.shape, tuple(part.data_ptr() for part in parts)
        if key not in seen:  # what is kept beside the features holds those addresses
            seen[key] = (x, parts), model.encode(tree, batch, block)
        return seen[key][1]

    once = copy.copy(model)
    once.encode = encode  # type: ignore[method-assign]
    return once
