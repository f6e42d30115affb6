"""Low-rank pairs on routed experts: counts, gradients, a dense reference, PEFT's layout, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from fedprism.models.expert_lora import from_peft, to_peft
from fedprism.models.moe_lm import MoeLanguageModel, adapted_values, load_moe

V, HIDDEN, INNER, LAYERS, K, TOP = 23, 16, 12, 2, 5, 2


def qwen(**changes: Any) -> transformers.PreTrainedModel:
    """A random Qwen2-MoE of two layers with a shared expert."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=V, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=20, moe_intermediate_size=INNER,
        shared_expert_intermediate_size=20, num_experts=K, num_experts_per_tok=TOP,
        decoder_sparse_step=1, max_position_embeddings=64, initializer_range=0.3, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2MoeForCausalLM(config)


def olmoe() -> transformers.PreTrainedModel:
    config = transformers.OlmoeConfig(
        vocab_size=V, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=INNER, num_experts=K, num_experts_per_tok=TOP,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.OlmoeForCausalLM(config)


def mixtral() -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=INNER, num_local_experts=K, num_experts_per_tok=TOP,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(2)
    return transformers.MixtralForCausalLM(config)


FAMILIES = {"qwen2_moe": qwen, "olmoe": olmoe, "mixtral": mixtral}


def batch(b: int = 3, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(b, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0
    response = mask.bool().clone()
    response[:, :3] = False
    return {
        "input_ids": torch.randint(V, (b, length), generator=g), "attention_mask": mask, "response": response
    }  # fmt: skip


def random_tree(model: MoeLanguageModel, seed: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    fresh = {**model.init("lora_A", 1), **model.init("lora_B", 1)}
    return {name: 0.2 * torch.randn(value.shape, generator=g) for name, value in fresh.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_frozen_model_gives_the_logits_of_the_library(family: str) -> None:
    rows = batch()
    plain = FAMILIES[family]().eval()
    with torch.no_grad():
        expected = plain(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        model = MoeLanguageModel(FAMILIES[family](), rank=2)
        got = model.apply({}, rows).logits
        fresh = model.apply({**model.init("lora_A", 4), **model.init("lora_B", 4)}, rows).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(fresh, got)  # B = 0 changes nothing, bit for bit


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_equal_experts_whose_weights_were_changed(family: str) -> None:
    """The reference adds s B_k A_k to every expert's weights and runs the library's own experts."""
    rows, model = batch(), MoeLanguageModel(FAMILIES[family](), rank=2, lora_alpha=3.0)
    tree = random_tree(model)
    dense = FAMILIES[family]().eval()
    changed = MoeLanguageModel(FAMILIES[family](), rank=2)  # for its list of layers
    for name, (experts, kind) in changed._sites.items():
        delta = 1.5 * tree[f"lora_B.{name}"] @ tree[f"lora_A.{name}"]
        place = [module for module in dense.modules() if type(module) is type(experts)][int(name[0])]
        getattr(place, f"{kind}_proj").data += delta
    with torch.no_grad():
        expected = dense(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        got = model.apply(tree, rows).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_as_many_values_are_trained_as_the_formula_says() -> None:
    model = MoeLanguageModel(qwen(), rank=3)
    up = sum(value.numel() for value in model.init("lora_B", 0).values())
    down = sum(value.numel() for value in model.init("lora_A", 0).values())
    assert up == LAYERS * K * 3 * (2 * INNER + HIDDEN)
    assert down == LAYERS * K * 3 * (HIDDEN + INNER)
    assert model.describe()["blocks"] == {"lora_A": down, "lora_B": up}
    counted = adapted_values(qwen().config, 3)
    assert (counted["lora_B"], counted["lora_A"]) == (up, down)


def test_the_published_model_has_56_million_values_in_60_routed_experts() -> None:
    """FedTAR spec 2.2; nothing of it is allocated."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=5632, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4, decoder_sparse_step=1,
    )  # fmt: skip
    counted = adapted_values(config, 8)
    assert counted == {"lora_B": 56_033_280, "lora_A": 39_813_120, "experts": 60, "layers": 24}


def test_experts_that_got_tokens_get_gradients_and_the_others_none() -> None:
    rows, model = batch(b=1, length=4), MoeLanguageModel(qwen(), rank=2, dropout=0.0)
    rows["attention_mask"][:], rows["response"][:] = 1, True
    # (L, b, T - 1, TOP) of the frozen model; nothing is predicted from the last token
    used = model.routing({}, rows)[:, :, :-1].topk(TOP, -1).indices
    tree = {**model.init("lora_A", 1), **model.init("lora_B", 1)}
    leaves = {name: value.requires_grad_(True) for name, value in tree.items()}
    model.per_example_loss(model.apply(leaves, rows), rows).mean().backward()
    first = {int(expert) for expert in used[0].unique()}
    assert 0 < len(first) < K
    for kind in ("gate_up", "down"):
        up, down = leaves[f"lora_B.0.{kind}"].grad, leaves[f"lora_A.0.{kind}"].grad
        assert up is not None and down is not None
        assert {k for k in range(K) if bool(up[k].any())} == first
        assert not bool(down.any())  # B is zero
    random = {name: value.requires_grad_(True) for name, value in random_tree(model).items()}
    model.per_example_loss(model.apply(random, rows), rows).mean().backward()
    grads = random["lora_A.0.down"].grad
    assert grads is not None
    assert {k for k in range(K) if bool(grads[k].any())} == first
    assert all(parameter.grad is None for parameter in model.backbone.parameters())


def test_the_loss_is_the_mean_over_the_response_tokens() -> None:
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2)
    with torch.no_grad():
        outputs = model.apply({}, rows)
        log_p = outputs.logits.log_softmax(-1)
        got = model.per_example_loss(outputs, rows)
    for i in range(3):
        counted = [t for t in range(1, 7) if rows["response"][i, t]]
        nats = [-float(log_p[i, t - 1, rows["input_ids"][i, t]]) for t in counted]
        assert float(got[i]) == pytest.approx(sum(nats) / len(nats), abs=1e-5)


def test_routing_is_the_softmax_of_the_router_and_ignores_what_comes_later() -> None:
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2)
    p = model.routing({}, rows)
    assert p.shape == (LAYERS, 3, 7, K)
    torch.testing.assert_close(p.sum(-1), torch.ones(LAYERS, 3, 7))
    first = model.backbone.model.embed_tokens(rows["input_ids"])
    layer = model.backbone.model.layers[0]
    normed = layer.input_layernorm(first)
    rotary = model.backbone.model.rotary_emb(first, torch.arange(7)[None])
    attended = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
    hidden = layer.post_attention_layernorm(first + attended)
    expected = F.linear(hidden, layer.mlp.gate.weight).softmax(-1)
    torch.testing.assert_close(p[0, :2], expected[:2], rtol=1e-4, atol=1e-5)
    shorter = {name: value[:, :5] for name, value in rows.items()}
    torch.testing.assert_close(model.routing({}, shorter), p[:, :, :5], rtol=1e-4, atol=1e-5)


def test_dropout_follows_its_generator_and_is_off_without_one() -> None:
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2, dropout=0.5)
    tree = random_tree(model)
    with torch.no_grad():
        off = model.apply(tree, rows).logits
        a, b = (model.apply(tree, rows, generator=torch.Generator().manual_seed(7)).logits for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, off)


def test_wider_factors_keep_the_scale_of_the_configured_rank() -> None:
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2)
    tree, other = random_tree(model, 3), random_tree(model, 4)
    wide = {
        name: torch.cat([tree[name], other[name]], 1 if name.startswith("lora_A") else 2) for name in tree
    }
    merged = MoeLanguageModel(qwen(), rank=2)
    for site, (experts, kind) in merged._sites.items():
        add = other[f"lora_B.{site}"] @ other[f"lora_A.{site}"]
        getattr(experts, f"{kind}_proj").data += model.lora_alpha / model.rank * add
    with torch.no_grad():
        got, expected = model.apply(wide, rows).logits, merged.apply(tree, rows).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_nothing_hangs_on_after_a_failure() -> None:
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2)
    before = model.apply({}, rows).logits
    broken = {name: value[:, :, :1] for name, value in random_tree(model).items()}
    with pytest.raises(RuntimeError):
        model.apply(broken, rows)
    assert torch.equal(model.apply({}, rows).logits, before)


def test_kept_keys_and_values_give_the_logits_of_a_whole_pass() -> None:
    rows, model = batch(b=2, length=6), MoeLanguageModel(qwen(), rank=2)
    rows["attention_mask"][:] = 1
    tree = random_tree(model)
    with torch.no_grad():
        whole = model.apply(tree, rows).logits
        start = {"input_ids": rows["input_ids"][:, :4], "attention_mask": rows["attention_mask"][:, :4]}
        first = model.apply(tree, {**start, "use_cache": True})
        rest = {"input_ids": rows["input_ids"][:, 4:], "attention_mask": rows["attention_mask"]}
        second = model.apply(tree, {**rest, "past": first.past, "use_cache": True})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-4)


def test_factors_in_peft_s_layout_give_the_same_logits() -> None:
    peft = pytest.importorskip("peft")
    rows, model = batch(), MoeLanguageModel(qwen(), rank=2, lora_alpha=4.0)
    tree = random_tree(model)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_parameters=targets)
    other = peft.get_peft_model(qwen(), config).eval()
    state = dict(other.named_parameters())
    filled = 0
    for layer in range(LAYERS):
        found = {n: p for n, p in state.items() if f"layers.{layer}." in n and "lora_" in n}
        for kind, width in (("gate_up", 2 * INNER), ("down", HIDDEN)):
            a, b = to_peft(tree[f"lora_A.{layer}.{kind}"], tree[f"lora_B.{layer}.{kind}"])
            mine = [n for n, p in found.items() if "lora_B" in n and p.shape[0] == width]
            (name,) = mine
            state[name].data.copy_(b)
            state[name.replace("lora_B", "lora_A")].data.copy_(a)
            filled += 1
            back = from_peft(a, b, K)
            assert torch.equal(back[0], tree[f"lora_A.{layer}.{kind}"])
            assert torch.equal(back[1], tree[f"lora_B.{layer}.{kind}"])
    assert filled == 2 * LAYERS
    with torch.no_grad():
        expected = other(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        got = model.apply(tree, rows).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_dense_model_and_a_missing_folder_are_refused_in_one_line() -> None:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match="has no layer with routed experts") as refused:
        MoeLanguageModel(transformers.LlamaForCausalLM(config))
    assert "\n" not in str(refused.value)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_moe("./nowhere")
    model = MoeLanguageModel(qwen(), rank=2)
    with pytest.raises(ValueError, match="one factor of two"):
        model.apply(model.init("lora_A", 0), batch())
    with pytest.raises(ValueError, match="needs \\(K r, in\\)"):
        from_peft(torch.zeros(7, 3), torch.zeros(4, 7), 5)


def test_a_saved_model_is_loaded_with_its_tokenizer(tmp_path: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(tmp_path)
    original = qwen()
    original.save_pretrained(tmp_path)
    model = load_moe(str(tmp_path), rank=2, precision="fp32")
    assert model.tokenizer("a b")["input_ids"] == [1, 2]
    with torch.no_grad():
        expected = MoeLanguageModel(original, rank=2).apply({}, batch()).logits
        torch.testing.assert_close(model.apply({}, batch()).logits, expected)
