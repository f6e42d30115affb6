"""The phase that scores a method's predictor on a client's validation or test rows, and its collection.

Scores travel like any other reply: confusion counts per task, loss sums, expert usage. Nothing a client keeps
is changed by being scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedprism.evaluation.metrics import matthews_correlation
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

    keeps = frozenset().union(*(phase.keeps for phase in method.phases)) if method.phases else frozenset()
    return Phase(evaluate, "evaluate", frozenset(served) | ASKED, keeps, SENT)


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
