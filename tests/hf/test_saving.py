"""Files: what is saved comes back to the bit, and nothing else does."""

from __future__ import annotations

import copy
import io
import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import gape.hf
from gape.hf.families import TRANSFORMERS_4
from gape.hf.gates import freeze
from tests.hf.tiny import FAMILIES, MIXTURES, each_family, opened, tiny, tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    opened(tiny("llama")).save_pretrained(tmp_path_factory.getbasetemp() / "model")
    return tmp_path_factory.getbasetemp() / "model"


@pytest.fixture
def saved(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "model")


def change(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_class_auto_class_and_file_agree_to_the_bit(saved):
    model, ids = opened(tiny("llama")), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        auto = AutoModelForCausalLM.from_pretrained(saved)
        own = type(model).from_pretrained(saved)
        bare = tiny("llama", seed=9)
        gape.hf.inject(bare, context_length=16)
        bare.load_state_dict(load_file(saved / "model.safetensors"))
        for loaded in (auto, own, bare):
            assert torch.equal(loaded.eval()(ids).logits, expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(auto.state_dict()[name], tensor), name
    gape.hf.remove(auto)
    assert type(auto).__name__ == "LlamaForCausalLM"


def test_other_gates_than_were_saved_are_an_error(saved):
    change(saved, lambda t: t["model.layers.1.self_attn.gape.strength"].add_(1e-3))
    with pytest.raises(ValueError, match="checksum"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_missing_gates_are_an_error(saved):
    change(saved, lambda t: t.pop("model.layers.0.self_attn.gape.landmark_projection.weight"))
    with pytest.raises(ValueError, match="missing"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_another_t_is_an_error(saved):
    config = json.loads((saved / "config.json").read_text())
    config["gape"]["context_length"] = 32
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="T = 16"):
        AutoModelForCausalLM.from_pretrained(saved)
    other = gape.hf.inject(tiny("llama"), context_length=32)
    with pytest.raises(ValueError, match="T = 16"):
        other.load_state_dict(load_file(saved / "model.safetensors"))


def test_a_config_without_t_or_with_unknown_settings_is_an_error(saved):
    config = json.loads((saved / "config.json").read_text())
    for wrong in ({"start": "identity"}, {**config["gape"], "other": 1}):
        (saved / "config.json").write_text(json.dumps({**config, "gape": wrong}))
        with pytest.raises(ValueError, match=r"config\.gape"):
            AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("floors", "expected"),
    [
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), [[1.0, 2.0, 3.0, 4.0]] * 2),
        ([[0.0, 0.0, 3.0, 4.0], [2.0]], [[0.0, 0.0, 3.0, 4.0], [2.0] * 4]),
    ],
    ids=["tensor", "by layer"],
)
def test_floors_are_saved(floors, expected, tmp_path):
    gape.hf.inject(tiny("llama"), context_length=16, gates={"gate_floor": floors}).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [list(layer.self_attn.gape.gate_floor) for layer in loaded.model.layers] == expected


def test_half_precision_on_disk_or_on_load_leaves_the_gates_alone(tmp_path):
    model = opened(tiny("llama"))
    model.save_pretrained(tmp_path / "single")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "single", dtype=torch.bfloat16)
    assert loaded.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    gates = loaded.model.layers[0].self_attn.gape
    assert torch.equal(gates.strength, model.model.layers[0].self_attn.gape.strength)
    loaded.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, loaded(tokens()).logits)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "cast")
    AutoModelForCausalLM.from_pretrained(tmp_path / "cast")


@pytest.mark.parametrize(("strength", "warnings"), [(0.0, 0), (2e-4, 1), (0.1, 0)])
def test_gates_that_learned_too_little_to_act_are_said_once(strength, warnings, tmp_path, caplog):
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates={"gate_floor": 4.0})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.gape.strength.fill_(strength)
    model.save_pretrained(tmp_path)
    if strength:
        gape.hf.ForgettingCache(model, eps=1e-3)
    assert sum(record.name == "gape.hf" for record in caplog.records) == warnings


def test_the_familys_own_class_refuses_it_and_names_what_reads_it(saved):
    with pytest.raises((KeyError, ValueError), match=r"gape\.hf"):
        LlamaForCausalLM.from_pretrained(saved)


@each_family
def test_no_keyword_lets_the_familys_own_class_load_it_without_gates(family, tmp_path):
    bare = tiny(family)
    base, activations = type(bare), activations_of(bare.config)
    opened(bare).save_pretrained(tmp_path)
    config = base.config_class.from_pretrained(tmp_path)
    config._attn_implementation = "eager"
    for options in ({"attn_implementation": "eager"}, {"config": config}):
        with pytest.raises(KeyError, match=r"gape\.hf"):
            base.from_pretrained(tmp_path, **options)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for own in (AutoConfig.from_pretrained(tmp_path), loaded.config, gape.hf.remove(loaded).config):
        assert activations_of(own) == activations
    loaded.save_pretrained(tmp_path)
    assert activations_of(base.from_pretrained(tmp_path).config) == activations


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_what_the_other_major_writes_of_rotations_is_read(family, tmp_path):
    parts = {"partial_rotary_factor": 0.5} if family in ("phi", "stablelm", "gpt_neox") else {}
    written = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0, **parts}}
    names = {"gpt_neox": {"rotary_emb_base": 777.0, "rotary_pct": 0.5}}
    named = names.get(family, {"rope_theta": 777.0, **parts})
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 77.0}
        written = {"rope_parameters": {"full_attention": written["rope_parameters"], "sliding_attention": local}}
        named["rope_local_base_freq"] = 77.0
    own, other = (named, written) if TRANSFORMERS_4 else (written, named)
    model = opened(tiny(family, **own))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("rope_scaling", *own)}
    (tmp_path / "config.json").write_text(json.dumps({**config, **other}))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(tokens()).logits
        torch.testing.assert_close(logits, model(tokens()).logits)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has one form of each tensor")
@pytest.mark.parametrize("family", [*MIXTURES, "gpt_neox"])
def test_tensors_are_named_as_the_familys_own_are(family, tmp_path):
    tiny(family).save_pretrained(tmp_path / "bare")
    model = opened(tiny(family))
    model.save_pretrained(tmp_path / "gated")
    bare, gated = (load_file(tmp_path / name / "model.safetensors") for name in ("bare", "gated"))
    assert sorted(bare) == [name for name in sorted(gated) if ".gape." not in name]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "gated", output_loading_info=True)
    assert not info["missing_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def activations_of(config):
    return [getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function")]


def test_quantised_projections_that_learned_are_frozen():
    model = gape.hf.inject(tiny("llama"), context_length=16, learn="gates+qk")
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    freeze(model, "gates+qk")
    learning = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.gape.strength)
    assert [parameter.requires_grad for parameter in learning] == [False, True, False, True]


def test_a_converted_gpt2_comes_back_without_learned_positions(tmp_path):
    model, ids = tiny("gpt2"), tokens(1, 200)
    gape.hf.inject(model, context_length=64, position="p-rope+gape", start="paper", fraction=0.5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="learned positions"):
        gape.hf.remove(loaded)
    assert "gape" in type(loaded.config).model_type


@pytest.mark.parametrize("arguments", [{}, {"position": "p-rope+gape"}])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_whole_model_is_pickled_and_copied(family, arguments):
    model, ids = opened(tiny(family), **arguments), tokens()
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    with torch.no_grad():
        expected = model(ids).logits
        for again in (torch.load(written, weights_only=False), copy.deepcopy(model)):
            assert (type(again), type(again.config)) == (type(model), type(model.config))
            assert torch.equal(again(ids).logits, expected)
            gape.hf.remove(again)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gates": {"gate_floor": 2.0}}, "gates = "),
        ({"position": "p-rope+gape"}, "position = 'p-rope\\+gape'"),
        ({"gates": {"learn_landmark": True}}, "gates = "),
    ],
)
def test_a_state_of_other_settings_is_an_error_that_names_them(saved, other, said):
    model = gape.hf.inject(tiny("llama"), context_length=16, **other)
    with pytest.raises(ValueError, match=said):
        model.load_state_dict(load_file(saved / "model.safetensors"), strict=False)


def test_no_tensor_has_a_name_that_old_versions_rename():
    for name in opened(tiny("llama")).state_dict():
        assert "gamma" not in name
        assert "beta" not in name
