"""Other tools on models with gates: families of one's own, the way out for servers, mixed adapters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gape.hf
from gape.hf.families import TRANSFORMERS_4
from tests.hf.tiny import SIZES, tiny, tokens


def test_register_family_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match=r"model_type: .*AutoConfig\.register"):
        gape.hf.register_family("unheard", nn.Linear)
    with pytest.raises(ValueError, match="attention"):
        gape.hf.register_family("bloom", "BloomAttention")
    with pytest.raises(ValueError, match="LlamaAttention"):
        gape.hf.register_family("llama", nn.Linear)
    with pytest.raises(ValueError, match="rotation"):
        gape.hf.register_family("bloom", nn.Linear)


def test_yarn_without_gates_is_the_familys_own_for_servers_that_know_no_gates():
    bare = tiny("llama")
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    named = {"rope_scaling": settings} if TRANSFORMERS_4 else {"rope_parameters": {**settings, "rope_theta": 10000.0}}
    served = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 512}, **named)).eval()
    served.load_state_dict(bare.state_dict())
    model = gape.hf.inject(bare, context_length=128, position="yarn", factor=4.0)
    ids = tokens(1, 300)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, served(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_batch_of_several_adapters_with_gates_is_an_error(tmp_path):
    peft = pytest.importorskip("peft")
    base = gape.hf.inject(tiny("llama"), context_length=16)
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=2), adapter_name="first")
    model.add_adapter("second", gape.hf.lora_config(base, r=2))
    with pytest.raises((ValueError, TypeError, NotImplementedError)), torch.no_grad():
        model.eval()(tokens(), adapter_names=["first", "second"])
