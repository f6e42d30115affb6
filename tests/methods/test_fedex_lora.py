"""FedEx-LoRA against a simulation that averages dense products, and the residual where models read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.methods.fedex_lora import METHOD, Config, State
from fedprism.methods.low_rank_products import no_product, widen, widths
from fedprism.protocol import Client, Reply, payload_bytes
from tests.models import tiny_encoders
from tests.tiny import Linear, TinyRows, drive, facts_of
from tests.tiny_language import TinyLanguage

PLAIN: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "weight_decay": 0.0, "batch_size": 99}
SHAPES = {"wide": ((), 3, 5), "square": ((), 4, 4), "experts": ((3,), 6, 4)}  # leading, out, in


def dense(tree: dict[str, Tensor], name: str) -> Tensor:
    return tree[f"lora_B.{name}"].double() @ tree[f"lora_A.{name}"].double()


def random_tree(g: torch.Generator, r: int = 2) -> dict[str, Tensor]:
    tree = {}
    for name, (lead, out, inner) in SHAPES.items():
        tree[f"lora_A.{name}"] = torch.randn(*lead, r, inner, generator=g)
        tree[f"lora_B.{name}"] = torch.randn(*lead, out, r, generator=g)
    return tree


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_three_rounds_equal_an_exact_average_of_products(weights: Any) -> None:
    """After each round: B A + residual = earlier residual + sum_i rho_i B_i A_i, whatever clients send."""
    g = torch.Generator().manual_seed(0)
    n = (1, 2, 5)
    rho = [k / 8 for k in n] if weights == "examples" else [1 / 3] * 3
    w = random_tree(g)
    server = METHOD.server(Config(rounds=3, weights=weights), State(0, w, no_product(w), 0), (0, 1, 2))
    base = {name: torch.zeros(*lead, out, inner).double() for name, (lead, out, inner) in SHAPES.items()}
    for t in range(3):
        ask: Any = server.send(None) if t else next(server)  # type: ignore[arg-type]
        assert set(ask.body["residual"]) == set(w)
        sent = [random_tree(g) for _ in n]
        replies = [
            Reply(i, {"w": tree, "n": n[i], "loss": 1.0, "examples": 1}) for i, tree in enumerate(sent)
        ]
        end: Any = server.send(replies)
        state = end.state
        for name, (_, out, inner) in SHAPES.items():
            exact = base[name] + sum(p * dense(tree, name) for p, tree in zip(rho, sent, strict=True))
            mean = {k: sum(p * tree[k].double() for p, tree in zip(rho, sent, strict=True)) for k in w}
            assert torch.allclose(state.w[f"lora_A.{name}"].double(), mean[f"lora_A.{name}"], atol=1e-6)
            now = dense(widen(state.w, state.residual), name)
            assert torch.allclose(now, exact, atol=3e-6)
            base[name] = exact - mean[f"lora_B.{name}"] @ mean[f"lora_A.{name}"]
            assert widths(state.residual)[name] <= min(out, inner)
        assert end.log["residual_width"] == max(widths(state.residual).values())
        size = torch.stack([(v**2).sum() for v in base.values()]).sum().sqrt()
        assert end.log["residual_norm"] == pytest.approx(float(size), rel=1e-5)


def regressions(outputs: int) -> dict[int, Client]:
    model, g = Linear(4, outputs=outputs, rank=1, loss="square"), torch.Generator().manual_seed(6)
    clients = {}
    for i, n in enumerate((6, 10, 4)):
        x, y = torch.randn(n, 4, generator=g), torch.randn(n, outputs, generator=g)
        rows = TinyRows(x=x, y=y)
        clients[i] = Client(i, model, {"train": rows, "test": rows})
    return clients


def descend(w: Tensor, a: Tensor, b: Tensor, x: Tensor, y: Tensor, lr: float, steps: int) -> tuple[Any, ...]:
    """Gradient steps of A and B on mean |(W + B A) x - y|^2 with W merged and fixed; gradients by hand."""
    for _ in range(steps):
        slope = 2 / len(x) * ((x @ (w + b @ a).T - y).T @ x)  # d loss / d (B A), (out, in)
        a, b = a - lr * b.T @ slope, b - lr * slope @ a.T
    return a, b


@pytest.mark.parametrize("outputs", [3, 4])
def test_training_goes_on_from_the_merged_weights(outputs: int) -> None:
    """The whole method against dense arithmetic: merged W, exact averages, three rounds of three steps."""
    clients = regressions(outputs)
    cfg = Config(rounds=3, local_steps=3, lr=0.05, **PLAIN)
    ends = drive(METHOD, cfg, clients)
    a, b = (clients[0].model.init(block, 0)[f"{block}.p"].double() for block in ("lora_A", "lora_B"))
    w = torch.zeros(outputs, 4).double()
    for end in ends:
        trained = []
        for c in clients.values():
            x, y = (c.data["train"].columns[name].double() for name in ("x", "y"))
            trained.append((len(x) / 20, *descend(w, a, b, x, y, 0.05, 3)))
        a, b = sum(p * mine for p, mine, _ in trained), sum(p * mine for p, _, mine in trained)
        w = w + sum(p * up @ down for p, down, up in trained) - b @ a
        assert torch.allclose(dense(end.state.residual, "p"), w, atol=1e-6)
        assert torch.allclose(dense(end.state.w, "p"), b @ a, atol=1e-6)
    assert float(w.abs().max()) > 1e-3  # there was something to make up for
    got = METHOD.serve(cfg, ends[-1].state)
    batch = clients[1].data["test"].columns
    logits = METHOD.predictor(clients[1], got, cfg)(batch).logits
    assert torch.allclose(logits.double(), batch["x"].double() @ (w + b @ a).T, atol=1e-5)


def test_the_residual_goes_to_everyone_also_after_a_missed_round_and_is_counted() -> None:
    clients = regressions(3)
    cfg = Config(rounds=4, lr=0.05, participation=0.6, **PLAIN)  # two clients of three
    state = METHOD.start(cfg, clients[0].model, facts_of(clients))
    asked: list[Any] = []
    for _ in range(4):
        ask: Any = next(METHOD.server(cfg, state, (0, 1, 2)))
        asked.append(ask)
        assert ask.body["residual"] is state.residual and not ask.each
        width = widths(state.residual)["p"]
        assert payload_bytes(ask.body) == 4 * (1 + width) * (4 + 3) + 8  # A and B, as wide as both; the rate
        (end,) = drive(METHOD, cfg, clients, state=state, stop=1)
        state = end.state
    assert len({tuple(ask.clients) for ask in asked}) > 1 and widths(state.residual)["p"] == 3
    assert not any(client.state for client in clients.values())


def test_an_encoder_reads_the_residual_under_the_scale_of_its_own_rank() -> None:
    """Wider factors are merged weights: base + s B A + s R with s = alpha / 3, though there are 8 columns."""
    model, merged = (tiny_encoders.model(rank=3, lora_alpha=6.0) for _ in range(2))
    g = torch.Generator().manual_seed(1)
    pair, more = {}, {}
    for name, value in {**model.init("lora_A", 0), **model.init("lora_B", 0)}.items():
        axis = 0 if name.startswith("lora_A") else 1
        shape = list(value.shape)
        pair[name] = torch.randn(shape, generator=g) * 0.2
        shape[axis] = 5
        more[name] = torch.randn(shape, generator=g) * 0.2
    for layer in merged.layers:
        layer.base.weight.data += 2.0 * more[f"lora_B.{layer.name}"] @ more[f"lora_A.{layer.name}"]
    batch = tiny_encoders.batch()
    with torch.no_grad():
        expected = merged.apply(pair, batch).logits
        assert torch.allclose(model.apply(widen(pair, more), batch).logits, expected, atol=1e-5)
        assert not torch.allclose(model.apply(pair, batch).logits, expected, atol=1e-2)


def test_routed_experts_read_the_residual_too() -> None:
    model = TinyLanguage(rank=2)
    g = torch.Generator().manual_seed(2)
    pair = {name: torch.randn(v.shape, generator=g) for name, v in model.trainable(0).items()}
    more = {
        "lora_A.0.down": torch.randn(3, 4, 4, generator=g),
        "lora_B.0.down": torch.randn(3, 7, 4, generator=g),
    }
    batch = {"input_ids": torch.arange(7)[None]}
    one, two = (model.apply(tree, batch).logits for tree in (pair, more))
    assert torch.allclose(model.apply(widen(pair, more), batch).logits, one + two, atol=1e-4)  # no base
