"""The phases that score a language model: under teacher forcing on the clients' rows, and on benchmarks.

Benchmarks are questions that no client holds. Who serves one model to everybody is asked once, through the
first client; where clients differ (`Method.personal`), each is asked and the scores are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedprism.evaluation.generation import NOTHING, decode_greedily
from fedprism.evaluation.text_scores import SCORES, stems
from fedprism.models.interface import Batch
from fedprism.protocol import Body, Client, Method, Phase, Reply

ASKED = frozenset({"split", "size", "n_tasks"})
SENT = frozenset({"correct", "tokens", "loss", "examples_of"})
QUESTIONS = ("input_ids", "attention_mask", "row", "task", "label")
SHOWN = 3  # answers that a run's metrics keep of each benchmark
SHOWN_LETTERS = 200  # of each of them


def _kept(method: Method) -> frozenset[str]:
    return frozenset(name for phase in method.phases for name in phase.keeps)


def language_phase(method: Method, served: Sequence[str]) -> Phase:
    """The phase "evaluate" of a method with a language model. served: names in the body of `method.serve`.

    It sends, by task, correct (T,) and tokens (T,): response tokens that are the likeliest given all before
    them, and response tokens; loss (T,): sum over examples of the mean nats per response token; examples_of
    (T,): examples."""

    def evaluate(client: Client, got: Body, cfg: Any) -> Body:
        predict = method.predictor(client, {name: got[name] for name in served}, cfg)
        n = got["n_tasks"]
        correct, tokens, examples = (torch.zeros(n, dtype=torch.int64) for _ in range(3))
        loss = torch.zeros(n, dtype=torch.float64)
        with torch.no_grad():
            for batch in client.data[got["split"]].batches(got["size"]):
                out = predict(batch)
                counted = batch["response"][:, 1:]
                right = (out.logits[:, :-1].argmax(-1) == batch["input_ids"][:, 1:]) & counted
                task = batch["task"]
                correct.index_add_(0, task, right.sum(1).cpu())
                tokens.index_add_(0, task, counted.sum(1).cpu())
                loss.index_add_(0, task, client.model.per_example_loss(out, batch).double().cpu())
                examples += torch.bincount(task, minlength=n)
        return {"correct": correct, "tokens": tokens, "loss": loss, "examples_of": examples}

    return Phase(evaluate, "evaluate", frozenset(served) | ASKED, _kept(method), SENT)


def collect_language(replies: Sequence[Reply], tasks: Sequence[str]) -> dict[str, Any]:
    """JSON-ready evaluation, with the keys of `measure.collect`.

    accuracy: per client, fraction of response tokens predicted right. loss: per client, mean over examples
    of the nats per response token. n: examples. per_task: correct and n in response tokens, loss and examples
    over all clients. Raises ValueError naming clients without rows."""
    empty = [r.client for r in replies if int(r.body["examples_of"].sum()) == 0]
    if empty:
        raise ValueError(f"evaluation: clients {empty} have no rows to score")
    total = {name: torch.stack([r.body[name] for r in replies]).sum(0) for name in SENT}
    return {
        "accuracy": [int(r.body["correct"].sum()) / int(r.body["tokens"].sum()) for r in replies],
        "loss": [float(r.body["loss"].sum() / r.body["examples_of"].sum()) for r in replies],
        "n": [int(r.body["examples_of"].sum()) for r in replies],
        "per_task": {
            task: {
                "correct": int(total["correct"][k]),
                "n": int(total["tokens"][k]),
                "loss": float(total["loss"][k] / total["examples_of"][k]),
                "examples": int(total["examples_of"][k]),
            }
            for k, task in enumerate(tasks)
            if int(total["examples_of"][k])
        },
    }


# --- benchmarks --------------------------------------------------------------------------------------------


def questions(batch: Batch) -> dict[str, Tensor]:
    """All rows of a benchmark, as one padded batch gives them, in the order of their column `row`."""
    order = batch["row"].argsort()
    names = [*QUESTIONS, *(["response"] if "response" in batch else [])]
    return {name: batch[name][order] for name in names}


def _batches(got: Body, size: int, names: Sequence[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Positions and batches of the questions, by length, each cut to its longest row."""
    lengths = got["attention_mask"].sum(1)
    for at in torch.split(torch.argsort(lengths, stable=True), size):
        width = int(lengths[at].max())
        yield at, {name: got[name][at, :width] if got[name].ndim > 1 else got[name][at] for name in names}


def question_loss_phase(method: Method, served: Sequence[str]) -> Phase:
    """The phase "question_loss": a client's predictor on questions with responses; nats (n,) float64, the
    mean per response token of each."""
    names = (*QUESTIONS, "response")

    def question_loss(client: Client, got: Body, cfg: Any) -> Body:
        predict = method.predictor(client, {name: got[name] for name in served}, cfg)
        nats = torch.zeros(len(got["input_ids"]), dtype=torch.float64)
        with torch.no_grad():
            for at, batch in _batches(got, got["size"], names):
                nats[at] = client.model.per_example_loss(predict(batch), batch).double().cpu()
        return {"nats": nats}

    asked = frozenset({*served, *names, "size"})
    return Phase(question_loss, "question_loss", asked, _kept(method), frozenset({"nats"}))


def generation_phase(method: Method, served: Sequence[str]) -> Phase:
    """The phase "generate": a client's predictor answers questions; generated (n, new_tokens) int64, see
    `generation.decode_greedily`."""

    def generate(client: Client, got: Body, cfg: Any) -> Body:
        predict = method.predictor(client, {name: got[name] for name in served}, cfg)
        answers = torch.full((len(got["input_ids"]), got["new_tokens"]), NOTHING, dtype=torch.int64)
        for at, batch in _batches(got, got["size"], QUESTIONS):
            answers[at] = decode_greedily(
                predict, batch, end=got["end"], new_tokens=got["new_tokens"]
            ).cpu()  # fmt: skip
        return {"generated": answers}

    asked = frozenset({*served, *QUESTIONS, "size", "end", "new_tokens"})
    return Phase(generate, "generate", asked, _kept(method), frozenset({"generated"}))


def texts_of(generated: Tensor, tokenizer: Any) -> list[str]:
    """The answers as texts; generated: (n, new_tokens), -1 behind the end."""
    return [
        str(tokenizer.decode([i for i in row if i != NOTHING], skip_special_tokens=True))
        for row in generated.tolist()
    ]


def score_answers(metric: str, answers: Sequence[Sequence[str]], references: Sequence[str]) -> dict[str, Any]:
    """JSON-ready score of free answers: mean over clients and questions.

    metric: a name in `text_scores.SCORES`. answers: per client n texts. references: n texts. Returns
    {"metric", "score": 0..1, "n", "examples"} and "per_client" where there are several, for ROUGE-L
    "stemming"."""
    rate = SCORES[metric]
    means = [
        sum(rate(text, wanted) for text, wanted in zip(texts, references, strict=True)) / len(references)
        for texts in answers
    ]
    shown = [
        {"answer": text[:SHOWN_LETTERS], "reference": wanted[:SHOWN_LETTERS]}
        for text, wanted in list(zip(answers[0], references, strict=True))[:SHOWN]
    ]
    result = {**_mean(metric, means, len(references)), "examples": shown}
    return {**result, "stemming": stems()} if metric == "rouge_l" else result


def score_choices(
    nats: Sequence[Tensor], references: Sequence[str], letters: Sequence[str]
) -> dict[str, Any]:
    """JSON-ready accuracy of choices by the highest log-likelihood per token, lowest letter among ties.

    nats: per client (n * len(letters),), the letters of a question in turn. references: n letters."""
    means = []
    for mine in nats:
        chosen = mine.view(len(references), len(letters)).argmin(1).tolist()
        means.append(
            sum(letters[k] == wanted for k, wanted in zip(chosen, references, strict=True)) / len(references)
        )
    return _mean("choice", means, len(references))


def _mean(metric: str, means: Sequence[float], n: int) -> dict[str, Any]:
    result = {"metric": metric, "score": sum(means) / len(means), "n": n}
    return {**result, "per_client": list(means)} if len(means) > 1 else result
