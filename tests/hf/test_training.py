"""Training as people do it: Trainer, checkpointed activations, compiled, with LoRA."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import gape.hf
from gape.hf.gates import Settings, refuse_other_settings
from tests.hf.tiny import opened, tiny, tokens, train

FAMILIES = ("gpt2", "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_with_checkpointed_activations_and_with_a_cache(family):
    actual = []
    for checkpointed, arguments in ((False, {"use_cache": False}), (True, {}), (False, {"use_cache": True})):
        model = opened(tiny(family)).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        ids = tokens(2, 12)
        model(input_ids=ids, labels=ids, **arguments).loss.backward()
        actual.append({name: p.grad for name, p in model.named_parameters()})
    for other in actual[1:]:
        for name, gradient in actual[0].items():
            assert gradient is not None, name
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("arguments", [{}, {"position": "yarn"}, {"position": "p-rope+gape"}])
def test_windows_that_are_read_at_once_take_no_mask_tensor(arguments, monkeypatch):
    from gape.hf.attention import InjectedAttention

    masks, attend = [], InjectedAttention.attend
    monkeypatch.setattr(
        InjectedAttention, "attend", lambda *args, **given: masks.append(given["mask"]) or attend(*args, **given)
    )
    model = gape.hf.LanguageModel(gape.hf.inject(tiny("llama"), context_length=16, **arguments))
    ids = tokens(2, 25)
    for training in (True, False):
        model.train(training)
        model(ids[:, :-1], targets=ids[:, 1:])
    assert masks == [None] * 4


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_logits_and_saves_bare_names(tmp_path):
    model, ids = opened(tiny("llama")), tokens()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-4)
    compiled.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_parameter_groups_hold_what_learns_with_gates_at_ten_times_the_rate():
    model = gape.hf.inject(tiny("llama"), context_length=16, learn="gates+qk")
    groups = gape.hf.parameter_groups(model, lr=1e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    gates = {id(p) for p in gape.hf.parameters(model, "gates")}
    learning = {id(p) for p in gape.hf.parameters(model, "gates+qk")}
    assert rates == {p: (1e-2, 0.0) if p in gates else (1e-3, 0.1) for p in learning}


@pytest.mark.parametrize(
    ("learns", "arguments", "match"),
    [
        (True, {"lr": 0.0}, "lr: got"),
        (True, {"lr": 1e-3, "gate_rate": -1.0}, "gate_rate: got"),
        (False, {"lr": 1e-3}, "require a gradient"),
    ],
)
def test_parameter_groups_refuse_bad_rates_and_models_in_which_nothing_learns(learns, arguments, match):
    with pytest.raises(ValueError, match=match):
        gape.hf.parameter_groups(tiny("llama").requires_grad_(learns), **arguments)


def trainer_of(model, path, **changes):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 2}
    settings |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **changes}
    return Trainer(model=model, args=TrainingArguments(output_dir=str(path), **settings), train_dataset=rows)


def test_the_trainer_trains_and_saves(tmp_path):
    model = gape.hf.inject(tiny("llama"), context_length=16, learn="gates")
    trainer = trainer_of(model, tmp_path, learning_rate=1e-2)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert bool(loaded.model.layers[0].self_attn.gape.strength.any())
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_lora_keeps_and_trains_the_gates(family, tmp_path):
    peft = pytest.importorskip("peft")
    base = gape.hf.inject(tiny(family), context_length=16)
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=2))
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("strength" in name for name in learning)
    assert all("lora" in name or "gape" in name for name in learning)
    assert not any("mlp" in name for name in learning)
    train(model, rate=1e-2)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    fresh = peft.PeftModel.from_pretrained(gape.hf.inject(tiny(family), context_length=16), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(fresh(tokens()).logits, model(tokens()).logits, atol=0, rtol=0)
        merged = fresh.merge_and_unload()
        torch.testing.assert_close(merged(tokens()).logits, model(tokens()).logits, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    other = gape.hf.inject(tiny(family), context_length=16, gates={"gate_floor": 2.0})
    with pytest.raises((ValueError, RuntimeError), match="other settings than the model's gates = "):
        peft.PeftModel.from_pretrained(other, tmp_path)


@pytest.mark.parametrize("own", [False, True], ids=["LoraConfig", "lora_config"])
def test_an_adapter_names_the_gates_that_its_base_lacks(own, tmp_path):
    peft = pytest.importorskip("peft")
    tiny("llama").save_pretrained(tmp_path / "bare")
    base = gape.hf.inject(AutoModelForCausalLM.from_pretrained(tmp_path / "bare"), context_length=16)
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, gape.hf.lora_config(base, r=2) if own else plain).save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"gape\.hf\.inject"):
        peft.PeftModel.from_pretrained(tiny("llama"), tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"gape\.hf\.inject"):
        peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        # Warnings of the libraries about one another are not ours.
        warnings.simplefilter("error", UserWarning)
        peft.PeftModel.from_pretrained(gape.hf.inject(tiny("llama"), context_length=16), tmp_path / "adapter")


@pytest.mark.parametrize("own", [False, True], ids=["LoraConfig", "lora_config"])
def test_adapters_of_other_gates_are_refused_as_first_and_as_second(own, tmp_path):
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = opened(tiny("llama"))
    config = gape.hf.lora_config(base, r=2) if own else copy.copy(plain)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"context_length: .* T = 16"):
        peft.PeftModel.from_pretrained(opened(tiny("llama"), context_length=64), tmp_path)
    models = [opened(tiny("llama"), context_length=64) for _ in range(2)]
    models[0].add_adapter(copy.copy(plain), "first")
    models[1] = peft.get_peft_model(models[1], copy.copy(plain))
    for model in models:
        with pytest.raises(ValueError, match="context_length"):
            model.load_adapter(tmp_path, "second")


def test_gates_of_an_adapter_that_does_not_name_them_are_compared_too(tmp_path):
    peft = pytest.importorskip("peft")
    base = opened(tiny("llama"))
    peft.get_peft_model(base, gape.hf.lora_config(base, r=2)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "exclude_modules": None}))
    with pytest.raises(ValueError, match="context_length"):
        opened(tiny("llama"), context_length=64).load_adapter(tmp_path)


def test_a_config_of_an_adapter_serves_several_models():
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for length in (16, 64):
        peft.get_peft_model(opened(tiny("llama"), context_length=length), plain)
    assert plain.exclude_modules is None


@pytest.mark.parametrize("exclude", ["model.layers.1.*", ["layers.1.self_attn.q_proj"]], ids=["pattern", "names"])
def test_an_adapter_with_excluded_modules_of_its_own_names_its_gates_too(exclude, tmp_path):
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=exclude)
    model = peft.get_peft_model(opened(tiny("llama")), plain)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(opened(tiny("llama")), tmp_path)
    assert set(again.state_dict()) == set(model.state_dict())
    with pytest.raises(ValueError, match="context_length"):
        peft.PeftModel.from_pretrained(opened(tiny("llama"), context_length=64), tmp_path)


def test_it_is_told_where_an_adapter_freezes_gates_that_do_nothing(caplog):
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(opened(tiny("llama")), plain)
    assert not caplog.records
    peft.get_peft_model(gape.hf.inject(tiny("llama"), context_length=16), plain)
    assert "lora_config" in caplog.text


def test_the_trainer_resumes_where_a_part_learns(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    model = gape.hf.inject(tiny("llama"), context_length=16, learn="gates+qk")
    trainer_of(model, tmp_path, max_steps=1, **saving).train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    trainer_of(loaded, tmp_path, max_steps=2, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert {name.split(".")[4] for name, p in loaded.named_parameters() if p.requires_grad} == {
        "gape", "q_proj", "k_proj",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_base_of_four_bits_leaves_the_gates_alone_and_they_learn(tmp_path):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny("llama", **sizes).save_pretrained(tmp_path / "bare")
    opened(tiny("llama", **sizes)).save_pretrained(tmp_path / "gated")
    four = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "gated", **four)
    attention = loaded.model.layers[0].self_attn
    assert (attention.q_proj.weight.dtype, attention.gape.strength.dtype) == (torch.uint8, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "bare", **four)
    with pytest.raises(ValueError, match="quantised"):
        gape.hf.inject(base, context_length=16)
    gape.hf.inject(base, context_length=16, learn="gates")
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(base), gape.hf.lora_config(base, r=2))
    train(model, rate=1e-2)
    moved = [p for name, p in model.named_parameters() if "modules_to_save" in name and name.endswith("strength")]
    assert len(moved) == 2
    assert all(bool((p.abs() > 1e-4).all()) for p in moved)


def test_generation_samples_and_searches_beams():
    model, ids = opened(tiny("llama")), tokens(2, 6)
    mask = torch.ones_like(ids)
    torch.manual_seed(0)
    sampled = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=5)
    assert sampled.shape == (2, 11)
    settings = {"attention_mask": mask, "do_sample": False, "num_beams": 3, "max_new_tokens": 6}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


def test_targets_may_be_those_of_the_last_tokens():
    model = gape.hf.LanguageModel(tiny("llama"))
    ids, targets = torch.randint(model.config.vocab_size, (2, 9)), torch.full((2, 9), -100)
    targets[:, -2:] = ids[:, :2]
    torch.testing.assert_close(model(ids, targets[:, -2:]).loss, model(ids, targets).loss)
    with pytest.raises(ValueError, match=r"^targets: "):
        model(ids, torch.zeros(2, 10, dtype=torch.long))


@pytest.mark.parametrize("floor", [4, 4.0])
def test_equal_numbers_are_one_setting(floor: float) -> None:
    own = Settings(context_length=16, gates={"gate_floor": floor}, options={"factors": [1.0, 2]})
    others = [Settings(context_length=16, gates={"gate_floor": x}, options={"factors": [1, 2.0]}) for x in (4, 4.0)]
    assert all(other.fingerprint() == own.fingerprint() for other in others)
    refuse_other_settings(own.fingerprint(), own, "a layer")
    with pytest.raises(ValueError, match=r"^a layer was trained under other settings than the model's gates = "):
        refuse_other_settings(Settings(context_length=16, options={"factors": [1, 2]}).fingerprint(), own, "a layer")


def test_the_trainers_log_has_horizons_and_landmarks_of_every_layer(tmp_path):
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates={"init_landmark_bias": -9.0})
    trainer = trainer_of(model, tmp_path)
    trainer.add_callback(gape.hf.GateCallback(trainer))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "gates/layer_0/horizon" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4]
    # Γ = 1, g near softplus(-3), landmarks closed: a key loses a nat after about T / g tokens.
    expected = 16 / float(torch.nn.functional.softplus(torch.tensor(-3.0)))
    for layer in (0, 1):
        assert logs[0][f"gates/layer_{layer}/horizon"] == pytest.approx(expected, rel=0.1)
        assert logs[0][f"gates/layer_{layer}/landmarks"] == 0.0
    assert not any(module._forward_hooks for module in model.modules())


def test_the_callback_refuses_a_trainer_of_a_model_without_gates(tmp_path):
    with pytest.raises(ValueError, match=r"gape\.hf\.inject"):
        gape.hf.GateCallback(trainer_of(tiny("llama"), tmp_path))


@pytest.mark.parametrize("arguments", [{}, {"position": "yarn+gape", "factor": 2.0, "gates": {"gate_floor": 1.0}}])
def test_an_adapter_puts_its_own_gates_into_a_bare_base(arguments, tmp_path):
    peft = pytest.importorskip("peft")
    base = gape.hf.inject(tiny("llama"), context_length=16, layers=None, **arguments)
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=2))
    train(model, rate=1e-2)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = gape.hf.load_adapter(tiny("llama"), tmp_path).eval()
    gated = gape.hf.load_adapter(gape.hf.inject(tiny("llama"), context_length=16, **arguments), tmp_path).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        assert torch.equal(loaded(tokens()).logits, expected)
        assert torch.equal(gated(tokens()).logits, expected)
        torch.testing.assert_close(loaded.merge_and_unload()(tokens()).logits, expected, atol=1e-4, rtol=1e-4)
        # Without the adapter it is the base, gates and all that inject changed included.
        without = gated.unload()
        assert type(without).__name__ == "GapeLlamaForCausalLM"


def test_load_adapter_refuses_adapters_without_gates(tmp_path):
    peft = pytest.importorskip("peft")
    plain = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    peft.get_peft_model(tiny("llama"), peft.LoraConfig(**plain)).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="names no gates"):
        gape.hf.load_adapter(tiny("llama"), tmp_path / "bare")
    peft.get_peft_model(opened(tiny("llama")), peft.LoraConfig(**plain)).save_pretrained(tmp_path / "gates")
    base = tiny("llama")
    with pytest.raises(ValueError, match="holds no gates"):
        gape.hf.load_adapter(base, tmp_path / "gates")
    assert type(base).__name__ == "LlamaForCausalLM"


def test_a_plain_trainer_with_parameter_groups_moves_gates_faster(tmp_path):
    moved = {}
    for rate in (1.0, 10.0):
        model = gape.hf.inject(tiny("llama"), context_length=16)
        trainer = trainer_of(model, tmp_path, max_steps=2)
        trainer.optimizer = torch.optim.AdamW(gape.hf.parameter_groups(model, lr=1e-3, gate_rate=rate))
        trainer.train()
        moved[rate] = float(model.model.layers[0].self_attn.gape.strength.detach().abs().mean())
    # Adam moves a parameter by about its rate, whatever the gradient.
    assert moved[10.0] == pytest.approx(10 * moved[1.0], rel=0.1)
