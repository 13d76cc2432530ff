"""Our classes in the common tests of transformers; `test_transformers_suite.py` puts this file into a checkout of it.

What is left out, and why, is in `LEFT_OUT`: by name, for all classes or for one.
"""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gape.hf import GapeConfig, GapeForCausalLM
from gape.hf.gates import Settings
from gape.hf.save_load import config_class, model_class

from ...generation.test_utils import GenerationTesterMixin
from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

WIDER = "cached keys are wider: they carry their landmark and position"
LEFT_OUT = {
    "test_model_weights_reload_no_missing_tied_weights": "loads files without gates, which is an error here",
}
OF_GPT = dict.fromkeys(
    (
        "test_gradient_checkpointing_enable_disable", "test_training_gradient_checkpointing",
        "test_training_gradient_checkpointing_use_reentrant_false",
        "test_training_gradient_checkpointing_use_reentrant_true",
    ),
    "asks for layers of a class of transformers; ours are its own, and tested in test_gpt.py",
)  # fmt: skip
OF_LLAMA = {
    "test_inherits_generation_mixin": "the class inherits it from Llama's",
    "test_keep_in_fp32_modules": "T beside the gates is an integer",
    "test_init_weights_can_init_buffers": "T is saved, and a file without it is an error here",
} | dict.fromkeys(
    (
        "test_assisted_decoding_matches_greedy_search_0_random", "test_assisted_decoding_matches_greedy_search_1_same",
        "test_assisted_decoding_sample", "test_past_key_values_format",
        "test_beam_search_generate_dict_outputs_use_cache", "test_greedy_generate_dict_outputs_use_cache",
        "test_generate_compilation_all_outputs", "test_generate_from_inputs_embeds_with_static_cache",
        "test_generate_with_static_cache",
    ),
    WIDER,
)  # fmt: skip


class Tester:
    """What the mixins ask of a tester."""

    def __init__(self, config: Any) -> None:
        self.config, self.batch_size, self.seq_length, self.is_training = config, 3, 7, True
        self.num_hidden_layers, self.hidden_size, self.num_attention_heads, self.vocab_size = 2, 32, 4, 99

    def get_config(self) -> Any:
        """A config of its own for every test."""
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """A config and a batch."""
        sizes = [self.batch_size, self.seq_length]
        inputs = {"input_ids": ids_tensor(sizes, 99), "attention_mask": random_attention_mask(sizes)}
        return self.get_config(), inputs


class Common(ModelTesterMixin, GenerationTesterMixin):
    """The mixins, with what they cannot know of classes outside transformers."""

    made_config: ClassVar[Any]
    left_out: ClassVar[dict[str, str]]

    def setUp(self) -> None:
        self.model_tester = Tester(self.made_config)
        reason = (LEFT_OUT | self.left_out).get(self._testMethodName)
        if reason is not None:
            self.skipTest(reason)

    def _prepare_for_class(self, inputs: dict[str, Any], model: Any, return_labels: bool = False) -> dict[str, Any]:
        prepared = super()._prepare_for_class(inputs, model, return_labels=return_labels)
        if return_labels:
            prepared["labels"] = torch.zeros(prepared["input_ids"].shape, dtype=torch.long)
        return prepared


class GapeModelTest(Common, unittest.TestCase):
    """Our GPT."""

    all_model_classes = (GapeForCausalLM,)
    all_generative_model_classes = (GapeForCausalLM,)
    left_out = OF_GPT
    made_config = GapeConfig(
        vocab_size=99, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, context_length=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip

    def test_config(self) -> None:
        ConfigTester(self, config_class=GapeConfig, n_embd=32).run_common_tests()


class GapeLlamaModelTest(Common, unittest.TestCase):
    """A Llama with gates."""

    all_model_classes = (model_class(LlamaForCausalLM),)
    all_generative_model_classes = (model_class(LlamaForCausalLM),)
    left_out = OF_LLAMA
    made_config = config_class(LlamaConfig)(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        gape=Settings(context_length=16, start="paper").to_dict(),
    )  # fmt: skip


del Common
