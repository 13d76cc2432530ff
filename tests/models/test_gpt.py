"""The model: what it computes, what it learns, what it weighs, what it refuses."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gape
from gape.models import gpt as module
from gape.models import loss
from tests.models.tiny import GATED, SCHEMES, VOCAB, config, matrices, model, tokens
from tests.wrong import each_wrong

PAPER = {"vocab_size": 50257, "n_layer": 6, "n_head": 8, "n_embd": 512, "context_length": 1024}


def test_it_is_the_plain_transformer() -> None:
    """Written out with torch's own parts, for NoPE: norm, causal attention, norm, GELU, added, embeddings tied."""
    gpt, ids = model("nope", bias=True, n_kv_head=None), tokens(2, 9)
    state = {name: x.detach() for name, x in gpt.state_dict().items()}
    layer = nn.TransformerEncoderLayer(
        48, 4, 192, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj": "attention.qkv", "self_attn.out_proj": "attention.out", "linear1": "mlp.up",
        "linear2": "mlp.down", "norm1": "attention_norm", "norm2": "mlp_norm",
    }  # fmt: skip
    x = state["embedding.weight"][ids]
    for index in range(2):
        ours = {
            theirs.replace("in_proj.", "in_proj_"): state[f"layers.{index}.{name}.{kind}"]
            for stem, name in names.items()
            for kind in ("weight", "bias")
            for theirs in (f"{stem}.{kind}",)
        }
        layer.load_state_dict(ours)
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64), is_causal=True)
    x = nn.functional.layer_norm(x, (48,), state["norm.weight"], state["norm.bias"])
    torch.testing.assert_close(gpt(ids).logits, x @ state["embedding.weight"].T, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("changed", [{}, {"reserve": 2}, {"reserve": 0}, {"position": "rope"}, {"bias": True}])
def test_papers_44m_has_44_5_million(changed: dict[str, Any]) -> None:
    with torch.device("meta"):
        gpt = gape.GPT(gape.GPTConfig(**PAPER | changed))
    assert abs(gpt.count_parameters() - 44.5e6) <= 0.2e6


def test_start_is_gpt2s() -> None:
    torch.manual_seed(0)
    gpt = gape.GPT(config(n_layer=8, n_embd=192, bias=True))
    for name, parameter in matrices(gpt).items():
        added = name.endswith(("out", "down"))
        assert float(parameter.detach().std()) == pytest.approx(0.005 if added else 0.02, rel=0.05), name
    assert float(gpt.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert all((module.bias == 0).all() for module in gpt.modules() if isinstance(module, nn.Linear | nn.LayerNorm))


@pytest.mark.parametrize("position", SCHEMES)
def test_every_parameter_gets_a_gradient(position: str) -> None:
    gpt, ids = model(position, bias=True).train(), tokens(2, 40)
    gpt(ids[:, :-1], ids[:, 1:].contiguous()).loss.backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A bias of the keys shifts all logits of a row alike, unless the scheme turns it.
        assert name.endswith("qkv.bias") or parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_saved_and_loaded_is_the_same(position: str, tmp_path: Path) -> None:
    """As safetensors, which refuses tensors that share memory, and with the configuration as JSON."""
    gpt, ids = model(position), tokens(2, 20)
    save_file(gpt.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(gpt.config.to_dict()))
    again = gape.GPT(gape.GPTConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))).double()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert (again(ids).logits == gpt(ids).logits).all()
    assert not [name for name in gpt.state_dict() if "gamma" in name or "beta" in name]


def test_loss_is_the_mean_over_targets_that_count() -> None:
    gpt, ids, targets = model(), tokens(2, 20), tokens(2, 20, seed=2)
    targets[0, 3:] = -100
    out = gpt(ids, targets)
    each = nn.functional.cross_entropy(out.logits.mT, targets.clamp(min=0), reduction="none")
    torch.testing.assert_close(out.loss, each[targets != -100].mean())
    assert gpt(ids).loss is None


def test_loss_is_float32_in_a_bfloat16_model() -> None:
    gpt, ids = model(dtype=torch.bfloat16), tokens(2, 20)
    out = gpt(ids, ids)
    assert out.logits.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.loss, nn.functional.cross_entropy(out.logits.float().flatten(0, 1), ids.flatten()), atol=1e-6, rtol=1e-6
    )


def test_few_logits_and_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices that divide nothing; the gradients too."""
    monkeypatch.setattr(loss, "LOSS_ROWS", 7)
    gpt, ids, targets = model(), tokens(2, 20), tokens(2, 20, seed=2)
    targets[:, :5] = -100
    losses, grads = [], []
    for keep in (0, 3):
        out = gpt(ids, targets, logits_to_keep=keep)
        assert out.logits.shape == (2, keep or 20, VOCAB)
        torch.testing.assert_close(out.logits, gpt(ids).logits[:, -keep:])
        losses.append(out.loss)
        grads.append(torch.autograd.grad(out.loss, list(gpt.parameters())))
    torch.testing.assert_close(losses[1], losses[0])
    for few, many in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(few, many)


@pytest.mark.parametrize("position", SCHEMES)
def test_targets_of_the_last_tokens_are_those_alone(position: str) -> None:
    """The last layer answers only these; loss, logits and gradients are those of targets that count nothing before."""
    gpt, ids, targets = model(position), tokens(2, 20), tokens(2, 20, seed=2)
    targets[:, :-3] = -100
    whole, last = gpt(ids, targets), gpt(ids, targets[:, -3:])
    assert last.logits.shape == (2, 3, VOCAB)
    torch.testing.assert_close(last.logits, whole.logits[:, -3:])
    torch.testing.assert_close(last.loss, whole.loss)
    for few, many in zip(
        *(torch.autograd.grad(out.loss, list(gpt.parameters())) for out in (last, whole)), strict=True
    ):
        torch.testing.assert_close(few, many)
    assert gpt(ids, targets[:, -3:], logits_to_keep=0).logits.shape == whole.logits.shape
    none = gpt.train()(ids, targets[:, :0])
    none.loss.backward()
    assert none.loss == 0


def test_an_output_layer_of_its_own() -> None:
    """Untied, logits and both losses go by the output layer."""
    gpt, ids, targets = model(tied=False), tokens(2, 20), tokens(2, 20, seed=2)
    assert gpt.count_parameters() == model().count_parameters() + VOCAB * gpt.config.n_embd
    normed = gpt.hidden(ids)
    torch.testing.assert_close(gpt(ids).logits, normed @ gpt.head.weight.T)
    torch.testing.assert_close(gpt(ids, targets, logits_to_keep=1).loss, gpt(ids, targets).loss)
    assert torch.autograd.grad(gpt(ids, targets, logits_to_keep=1).loss, gpt.head.weight)[0].abs().max() > 0


def test_a_large_vocabulary_is_trained_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are asked for."""
    gpt, ids, targets = model().train(), tokens(2, 20), tokens(2, 20, seed=2)
    assert gpt(ids, targets).logits.shape == (2, 20, VOCAB)
    monkeypatch.setattr(module, "LARGE_VOCABULARY", VOCAB - 1)
    out = gpt(ids, targets)
    assert out.logits.shape == (2, 0, VOCAB)
    torch.testing.assert_close(out.loss, gpt(ids, targets, logits_to_keep=0).loss)
    assert gpt(ids).logits.shape == gpt.eval()(ids, targets).logits.shape == (2, 20, VOCAB)


def test_dropout_is_for_training_alone() -> None:
    """On the embeddings and on the two things that each of two blocks adds."""
    gpt, ids, shares = model(dropout=0.5), tokens(2, 9), []
    assert (gpt(ids).logits == model()(ids).logits).all()
    for dropout in (m for m in gpt.modules() if isinstance(m, nn.Dropout)):
        dropout.register_forward_hook(lambda m, x, y: shares.append(float((y == 0).double().mean())))
    gpt.train()(ids)
    assert shares == pytest.approx([0.5] * 5, abs=0.1)


def test_gates_are_those_of_each_layer() -> None:
    gpt = gape.GPT(config(options={"gate_floor": 4.0}))
    assert [(index, gates.gate_floor) for index, gates in gpt.gates()] == [(0, (4.0,) * 4), (1, (4.0,) * 4)]
    assert not list(gape.GPT(config("rope")).gates())


@pytest.mark.parametrize("position", GATED)
def test_landmark_penalty_is_the_mean_landmark(position: str) -> None:
    gpt, ids = model(position), tokens(2, 20)
    seen = []
    for _, gates in gpt.gates():
        gates.landmark_projection.register_forward_hook(lambda m, x, y: seen.append(y.sigmoid()))
    gpt(ids)
    with pytest.raises(ValueError, match=r"^landmark_penalty: "):
        gpt.landmark_penalty()
    seen.clear()
    gpt.keep_landmarks()
    gpt(ids)
    penalty = gpt.landmark_penalty()
    torch.testing.assert_close(penalty, torch.stack(seen).mean())
    penalty.backward()
    assert all((gates.landmark_projection.bias.grad != 0).all() for _, gates in gpt.gates())
    with pytest.raises(ValueError, match=r"^landmark_penalty: "):
        gpt.landmark_penalty()
    with pytest.raises(ValueError, match=r"^position: "):
        model("rope").keep_landmarks()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
def test_compiles_whole_and_once(backend: str) -> None:
    """Forward and backward, the penalty included; a second compilation would be an error."""
    torch._dynamo.reset()
    gpt = model(dtype=torch.float32, n_layer=1).train()
    gpt.keep_landmarks()
    compiled = torch.compile(gpt, fullgraph=True, backend=backend)
    grads = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            ids, targets = tokens(2, 33, seed=step), tokens(2, 33, seed=step + 10)
            for name, made in (("eager", gpt), ("compiled", compiled)):
                loss = made(ids, targets).loss + gpt.landmark_penalty()
                grads[name] = torch.autograd.grad(loss, list(gpt.parameters()))
    for ours, theirs in zip(grads["compiled"], grads["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@each_wrong(
    vocab_size=(0,), n_layer=(1.0,), n_head=("4",), n_embd=(50,), n_kv_head=(3,), context_length=(0, None),
    position=("ropee", "alibi+gape"), reserve=(12, -1), bias=(1,), dropout=(1.0,), impl=("slow",), options=([1],),
)  # fmt: skip
def test_wrong_configuration_is_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        config(**{argument: value})


def test_wrong_option_is_named() -> None:
    with pytest.raises(ValueError, match=r"^gate_flor: .* gate_floor"):
        gape.GPT(config(options={"gate_flor": 1.0}))


def test_configuration_survives_json() -> None:
    first = config("longrope+gape", options={"factors": (1.0,) * 3, "gate_floor": [0.0, 1.0, 2.0, 4.0]})
    again = gape.GPTConfig.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again == first
    assert hash(again) == hash(first)
    assert next(gape.GPT(again).gates())[1].gate_floor == (0.0, 1.0, 2.0, 4.0)


def test_unknown_and_missing_keys_are_named() -> None:
    values = config().to_dict()
    with pytest.raises(ValueError, match=r"^n_heads: .* did you mean n_head\?"):
        gape.GPTConfig.from_dict(values | {"n_heads": 4})
    del values["context_length"]
    with pytest.raises(ValueError, match=r"^context_length: missing"):
        gape.GPTConfig.from_dict(values)


@torch.no_grad()
@pytest.mark.parametrize("keep", [5, -1, 1.0])
def test_a_wrong_number_to_keep_leaves_the_cache_alone(keep: object) -> None:
    gpt = model()
    cache = gpt.new_cache()
    with pytest.raises(ValueError, match=r"^keep: "):
        gpt.hidden(tokens(2, 4), cache=cache, keep=keep)
    assert cache.length == 0


@torch.no_grad()
def test_a_cache_can_be_pickled_and_copied() -> None:
    one, other, ids = model(), model(), tokens(1, 6)
    cache = one.new_cache()
    one(ids, cache=cache)
    expected = one(ids[:, :1], cache=deepcopy(cache)).logits
    assert torch.equal(one(ids[:, :1], cache=pickle.loads(pickle.dumps(cache))).logits, expected)
    with pytest.raises(ValueError, match="cache"):
        other(ids[:, :1], cache=deepcopy(cache))


@torch.no_grad()
def test_tokens_of_another_model_are_refused_in_a_cache() -> None:
    gpt, other = model(), model()
    cache = gpt.new_cache()
    gpt(tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match=r"^cache: "):
        other(tokens(1, 2), cache=cache)
    cache.truncate(0)
    other(tokens(1, 2), cache=cache)
    assert cache.length == 2


@each_wrong(
    ids=(torch.zeros(4).long(), torch.zeros(2, 4), torch.full((2, 4), VOCAB)),
    targets=(torch.zeros(2, 5).long(), torch.zeros(1, 4).long(), torch.full((2, 4), VOCAB)),
    positions=(torch.zeros(3).long(),),
    logits_to_keep=(-1, 5),
)
def test_wrong_input_is_named(argument: str, value: object) -> None:
    given = {"ids": tokens(2, 4)} | {argument: value}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        model()(**given)
