"""What inject takes and refuses, and that distances, windows and caps mean what the operator says."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import gape.hf
from gape.hf.families import TRANSFORMERS_4
from gape.hf.gates import RetrofitGates
from gape.hf.implementations import masked_attention
from tests.hf.tiny import SIZES, opened, tiny, tokens


def unchanged(model, before):
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize(
    ("family", "arguments", "said"),
    [
        ("llama", {}, "context_length"),
        ("llama", {"context_length": 0}, "context_length"),
        ("llama", {"context_length": 10**20}, "context_length"),
        ("llama", {"context_length": 16, "position": "alibi+gape"}, "position"),
        ("llama", {"context_length": 16, "layers": [2]}, "layers"),
        ("llama", {"context_length": 16, "layers": []}, "layers"),
        ("llama", {"context_length": 16, "learn": "some"}, "learn"),
        ("llama", {"context_length": 16, "start": "cold"}, "start"),
        ("llama", {"context_length": 16, "gates": {"flor": 1}}, "flor"),
        ("llama", {"context_length": 16, "gates": {"gate_floor": -1.0}}, "gate_floor"),
        ("llama", {"context_length": 16, "gates": {"gate_floor": [[1.0]]}}, "gate_floor: .*each of the 2 layers"),
        ("llama", {"context_length": 16, "gates": {"gate_floor": [[1.0], [1.0, 2.0]]}}, "gate_floor"),
        ("gemma3", {"context_length": 16, "position": "rope+gape"}, "position"),
        ("llama", {"context_length": 16, "fraction": 0.5}, "fraction"),
        ("llama", {"context_length": 16, "position": "rope+gape", "fraction": 0.5}, "fraction"),
        ("llama", {"context_length": 16, "position": "rope", "layers": [0]}, "layers"),
        ("llama", {"context_length": 16, "position": "rope", "gates": {"gate_floor": 1.0}}, "gates: .*rope has no"),
        ("gpt2", {"context_length": 129}, "rope"),
        ("cohere", {"context_length": 16, "position": "yarn+gape"}, "position: .*neighbouring"),
        ("gpt_neox", {"context_length": 16, "position": "yarn+gape"}, "position: .*part of each head"),
    ],
)
def test_what_is_wrong_is_refused_and_the_model_stays(family, arguments, said):
    model = tiny(family)
    before, own = copy.deepcopy(model.state_dict()), type(model)
    with pytest.raises(ValueError, match=said):
        gape.hf.inject(model, **arguments)
    assert type(model) is own
    assert not hasattr(model.config, "gape")
    assert unchanged(model, before)


def test_other_models_and_models_with_gates_are_refused():
    with pytest.raises(ValueError, match="llama"):
        gape.hf.inject(torch.nn.Linear(2, 2), context_length=16)
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="BertModel"):
        gape.hf.inject(bert, context_length=16)
    sinks = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=2))
    with pytest.raises(ValueError, match="attention sink"):
        gape.hf.inject(sinks, context_length=16)
    with torch.device("meta"):
        config = transformers.Gemma3Config(text_config=SIZES, vision_config={"num_hidden_layers": 1})
        images = transformers.Gemma3ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="both directions"):
        gape.hf.inject(images, context_length=16)
    with pytest.raises(ValueError, match="LlamaModel"):
        gape.hf.inject(tiny("llama").model, context_length=16)
    gated = gape.hf.inject(tiny("llama"), context_length=16)
    with pytest.raises(ValueError, match="remove"):
        gape.hf.inject(gated, context_length=16)
    with pytest.raises(ValueError, match="inject"):
        gape.hf.remove(tiny("llama"))


def test_forwards_that_were_put_in_are_refused_by_who_did():
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"attention of layer 1, expected that of its class"):
        gape.hf.inject(model, context_length=16)
    attention._hf_hook = None
    with pytest.raises(ValueError, match="accelerate"):
        gape.hf.inject(model, context_length=16)


def test_quantised_projections_take_gates_but_do_not_learn():
    model = tiny("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="quantised"):
        gape.hf.inject(model, context_length=16, learn="gates+qk")
    gape.hf.inject(model, context_length=16, learn="gates")
    gates = model.model.layers[0].self_attn.gape
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in gates.parameters())


def test_the_dry_run_says_what_would_be_added_and_changes_nothing(capsys):
    model = tiny("llama")
    own = sum(p.numel() for p in model.parameters())
    gape.hf.inject(model, context_length=16, layers=[-1], dry_run=True)
    assert "parameters" in capsys.readouterr().out
    assert type(model).__name__ == "LlamaForCausalLM"
    plan = gape.hf.plan(model, context_length=16, layers=[-1])
    gape.hf.inject(model, context_length=16, layers=[-1])
    assert plan.parameters == (sum(p.numel() for p in model.parameters()) - own, own)
    assert plan.layers == (1, 2)
    ids = tokens(1, 9)
    with torch.no_grad():
        kept = model(ids, use_cache=True).past_key_values
    widths = [kept.layers[i].keys.size(-1) for i in (0, 1)]
    assert plan.cache_bytes[0] == 4 * 2 * (widths[1] - widths[0])


def test_which_parameters_learn():
    for which, said in (("gates", "gape"), ("gates+qk", "q_proj"), ("all", "mlp")):
        model = gape.hf.inject(tiny("qwen3"), context_length=16, learn=which)
        named = {name for name, p in model.named_parameters() if p.requires_grad}
        assert any(said in name for name in named)
        chosen = {id(p) for p in gape.hf.parameters(model, which)}
        assert chosen == {id(p) for name, p in model.named_parameters() if name in named}
    chosen = {id(p) for p in gape.hf.parameters(model, "gates+qk")}
    assert any("q_norm" in name for name, p in model.named_parameters() if id(p) in chosen)
    with pytest.raises(ValueError, match="which"):
        gape.hf.parameters(model, "some")


def test_remove_gives_back_what_was_frozen():
    model = tiny("llama")
    model.lm_head.weight.requires_grad_(False)
    gape.hf.remove(gape.hf.inject(model, context_length=16, learn="gates"))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


def test_another_model_of_the_same_config_stays_as_it_is():
    first = tiny("llama")
    second = type(first)(first.config)
    gape.hf.inject(first, context_length=16)
    assert second.config.model_type == "llama"
    assert not hasattr(second.config, "gape")
    gape.hf.inject(second, context_length=32)
    assert first.config.gape["context_length"] == 16


def test_the_plan_counts_only_what_learns():
    model, fixed = tiny("llama"), {"learn_gate": False}
    plan = gape.hf.plan(model, context_length=16, gates=fixed)
    gape.hf.inject(model, context_length=16, gates=fixed)
    assert sum(plan.parameters) == sum(p.numel() for p in model.parameters())


def test_dropout_that_is_left_out_is_said(caplog):
    gape.hf.inject(tiny("llama", attention_dropout=0.1), context_length=16, layers=[1])
    assert "dropout" in caplog.text


@pytest.mark.parametrize(("start", "warnings"), [("identity", 1), ("paper", 0)])
def test_a_floor_under_gates_that_cannot_act_is_said(start, warnings, caplog):
    gape.hf.inject(tiny("llama"), context_length=16, start=start, gates={"gate_floor": 4.0})
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("position", [None, "rope"])
def test_additive_masks_hide_what_they_hide(position):
    model, ids = tiny("llama"), tokens(1, 12)
    hidden = ~torch.ones(12, 12, dtype=torch.bool).tril()
    hidden[4:, 2:4] = True
    mask = torch.zeros(1, 1, 12, 12).masked_fill(hidden, -1e9)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        gape.hf.inject(model, context_length=16, position=position)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, atol=1e-5, rtol=1e-4)


def test_layers_that_are_not_rotated_stay_so():
    model, ids = tiny("smollm3"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        gape.hf.inject(model, context_length=16, position="rope+gape")
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)


def test_distances_are_of_positions_and_divided_by_t():
    """One layer by hand: its output is the operator over the model's own q, k and v."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = opened(tiny("llama"))
    layer, ids = model.model.layers[0], tokens(1, 10)
    positions = torch.tensor([[0, 1, 2, 5, 6, 9, 12, 13, 40, 41]])
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    at = layer.self_attn
    q, k, v = (p(x).view(1, 10, -1, 8).transpose(1, 2) for p in (at.q_proj, at.k_proj, at.v_proj))
    gate, landmark = at.gape(q, k)
    embeddings = model.model.rotary_emb(x, positions)
    q, k = apply_rotary_pos_emb(q, k, *embeddings)
    where = positions[0]
    expected = gape.gated_attention(
        q, k, v, gate, landmark, at.gape.amplitude, context_length=16, q_positions=where, k_positions=where,
        impl="reference",
    )  # fmt: skip
    actual, _ = at(x, position_embeddings=embeddings, attention_mask=None, position_ids=positions)
    torch.testing.assert_close(actual, at.o_proj(expected.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-4)


ROTATIONS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rescaled_rotations_stay_as_they_are(kind):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **ROTATIONS[kind]}
    name = "rope_scaling" if TRANSFORMERS_4 else "rope_parameters"
    model, ids = tiny("llama", **{name: scaling}), tokens(1, 60)
    with torch.no_grad():
        expected = model(ids).logits
        gape.hf.inject(model, context_length=16)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
    gape.hf.remove(model)
    with pytest.raises(ValueError, match="plain"):
        gape.hf.inject(model, context_length=16, position="p-rope+gape")


def test_capped_logits_and_windows_are_kept():
    for implementation in ("eager", "sdpa") if transformers.Gemma2ForCausalLM._supports_sdpa else ("eager",):
        model, ids = tiny("gemma2", implementation), tokens(1, 24)
        with torch.no_grad():
            expected = model(ids).logits
            gape.hf.inject(model, context_length=16, layers=[0])
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


def test_the_models_implementation_is_honoured():
    for implementation, name in (("sdpa", "sdpa"), ("eager", "eager"), ("flex_attention", "gape")):
        model = gape.hf.inject(tiny("llama", implementation), context_length=16)
        assert model.config._attn_implementation == name
    ids = tokens()
    model = opened(tiny("llama"))
    with torch.no_grad():
        expected = model(ids).logits
        for name in ("gape", "gape_split", "gape_reference", "eager"):
            model.set_attn_implementation(name)
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-3)
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="attention_mask"):
        masked_attention(
            q, q, q, None, name="gape", q_positions=ids[0, :3], k_positions=ids[0, :3], mask=ids, scale=1.0
        )
    flash = tiny("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        gape.hf.inject(flash, context_length=16)


def test_a_name_that_shows_later_tokens_is_stopped(monkeypatch):
    model = opened(tiny("llama"))
    monkeypatch.setattr("gape.hf.implementations._CHECKED", set())
    monkeypatch.setattr("gape.hf.masks.visibility", lambda q, k, mask, n: {"is_causal": False})
    with pytest.raises(RuntimeError, match="later"):
        model(tokens())


def test_rounding_caches_are_refused():
    model, ids = opened(tiny("llama")), tokens(1, 4)

    class RoundingLayer(transformers.cache_utils.DynamicLayer):
        pass

    cache = transformers.DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [RoundingLayer(), RoundingLayer()], None
    with pytest.raises(ValueError, match="RoundingLayer"):
        model(ids, past_key_values=cache)


def test_rotations_may_be_replaced_and_come_back():
    model, ids = tiny("llama"), tokens()
    with torch.no_grad():
        own = model(ids).logits
        # RoPE of the model's own base is the model's own rotation.
        gape.hf.inject(model, context_length=16, position="rope+gape")
        torch.testing.assert_close(model(ids).logits, own, atol=1e-5, rtol=1e-4)
        gape.hf.remove(model)
        gape.hf.inject(model, context_length=16, position="p-rope", fraction=0.5)
        assert not any(isinstance(module, RetrofitGates) for module in model.modules())
        assert not torch.allclose(model(ids).logits, own, atol=1e-3)
        gape.hf.remove(model)
        assert torch.equal(model(ids).logits, own)


@pytest.mark.parametrize("position", ["rope+gape", "p-rope", "nope+gape"])
def test_gpt2_leaves_its_learned_positions_and_reads_on(position):
    model, ids = tiny("gpt2"), tokens(1, 300)
    before = copy.deepcopy(model.state_dict())
    gape.hf.inject(model, context_length=128, position=position)
    assert not any("wpe" in name for name in model.state_dict())
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :250], use_cache=True)
        rest = model(ids[:, 250:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), whole, atol=2e-5, rtol=1e-4)
    gape.hf.remove(model)
    assert unchanged(model, before)


def test_gpt2s_positions_come_back_in_the_dtype_the_model_has_by_then():
    model = gape.hf.inject(tiny("gpt2"), context_length=128, position="rope+gape").to(torch.bfloat16)
    gape.hf.remove(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_gpt2_past_its_learned_positions_says_what_to_do():
    model = gape.hf.inject(tiny("gpt2"), context_length=128)
    with torch.no_grad(), pytest.raises(ValueError, match=r"extend_positions"):
        model(tokens(1, 129))
    short = tiny("gpt2")
    ids = tokens(1, 128)
    with torch.no_grad():
        expected = short(ids).logits
        gape.hf.extend_positions(short, 512)
        torch.testing.assert_close(short(ids).logits, expected)
        gape.hf.inject(short, context_length=512)
        assert short(tokens(1, 512)).logits.shape == (1, 512, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_keeps_gates_exact_and_decodes_as_it_reads(dtype):
    model = opened(tiny("llama").to(dtype), context_length=8)
    assert model.model.layers[0].self_attn.gape.strength.dtype == torch.float32
    ids = tokens(1, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :20], use_cache=True)
        steps = [model(ids[:, i : i + 1], past_key_values=first.past_key_values).logits for i in range(20, 40)]
        actual = torch.cat([first.logits, *steps], dim=1)
        exact = opened(tiny("llama"), context_length=8).to(torch.float32)(ids, use_cache=False).logits
    off = (whole.float() - exact).abs().max()
    assert (actual.float() - exact).abs().max() < 2 * off + 1e-3


def test_gates_are_in_the_mode_of_their_layer():
    for training in (False, True):
        model = gape.hf.inject(tiny("llama").train(training), context_length=16)
        assert {module.training for module in model.modules()} == {training}


@pytest.mark.parametrize(
    ("family", "position", "options", "longer"),
    [("llama", "yarn+gape", {"factor": 8}, 1024), ("llama", "pi", {}, 512), ("gpt2", "ntk+gape", {"factor": 2}, 256),
     ("llama", "rope+gape", {}, 128), ("llama", None, {}, 128)],
)  # fmt: skip
def test_a_scheme_that_extends_says_so_in_max_position_embeddings(family, position, options, longer, tmp_path):
    model = tiny(family)
    before = model.config.to_dict()
    gape.hf.inject(model, context_length=128, position=position, **options)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == loaded.config.max_position_embeddings == longer
    for again in (model, *(() if family == "gpt2" else (loaded,))):
        assert gape.hf.remove(again).config.max_position_embeddings == 128
    # What transformers writes down when it saves.
    assert {**model.config.to_dict(), "architectures": None, "dtype": before["dtype"]} == before


@pytest.mark.parametrize(
    ("family", "length", "warns"), [("llama", 16, True), ("llama", 128, False), ("gpt2", 16, False)]
)
def test_yarn_warns_where_t_is_not_the_models_own_context(family, length, warns, caplog):
    with caplog.at_level("WARNING", logger="gape.hf"):
        gape.hf.inject(tiny(family), context_length=length, position="yarn")
    assert any("max_position_embeddings = 128" in record.getMessage() for record in caplog.records) == warns


@torch.no_grad()
def test_settings_of_before_capped_logits_are_read() -> None:
    model = gape.hf.inject(tiny("llama"), context_length=16, layers=[0])
    expected = model(tokens()).logits
    del model.config.gape["softcap"]
    torch.testing.assert_close(model(tokens()).logits, expected)
