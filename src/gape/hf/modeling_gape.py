"""Our GPT as a model of `transformers`: with its configs, caches, generation and Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gape.hf.attention import attend_in_transformers
from gape.hf.cache import refuse_uneven
from gape.hf.implementations import gate_values, masked_attention, refuse_paged, supported_name
from gape.hf.masks import causal_mask
from gape.hf.paged import PagesForTransformers, with_pages
from gape.hf.save_load import AutoMapped, GatedModel
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig
from gape.models.gpt import GPT, Block
from gape.positions import is_gated
from gape.positions.base import Side
from gape.utils.validation import invalid_argument

_FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}


class GapeConfig(AutoMapped, PretrainedConfig):  # type: ignore[misc]
    """The config of :class:`GapeForCausalLM`: the fields of :class:`gape.GPTConfig`, and those of `transformers`.

    Without sizes it is the paper's 44M model. A ValueError names a value that GPTConfig refuses.
    """

    model_type = "gape_gpt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "context_length",
    }

    def __init__(self, **kwargs: Any) -> None:
        renamed = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        sizes = {"vocab_size": 50257, "n_layer": 6, "n_head": 8, "n_embd": 512, "context_length": 1024}
        own = sizes | {name: renamed.pop(name) for name in list(renamed) if name in _FIELDS}
        values = GPTConfig.from_dict(own).to_dict()
        self.gate_checksum = renamed.pop("gate_checksum", None)
        self.saved_length = renamed.pop("saved_length", None)
        self.use_cache = renamed.pop("use_cache", True)
        for name, value in values.items():
            setattr(self, name, value)
        renamed.setdefault("tie_word_embeddings", False)
        super().__init__(**renamed)

    @property
    def num_key_value_heads(self) -> int:
        """Key heads of a layer."""
        return self.gpt().kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.gpt().head_dim

    def gpt(self) -> GPTConfig:
        """The same as a :class:`gape.GPTConfig`."""
        return GPTConfig.from_dict({name: getattr(self, name) for name in _FIELDS})


class GapeForCausalLM(GatedModel, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """:class:`gape.GPT` with the interface of `transformers`: `generate`, caches, `Trainer`, saving.

    Its tensors are those of the GPT, under the prefix `gpt.`. Where the embedding is also the output layer, it is one
    tensor under one name. FoX, whose keys carry a running sum, runs without a cache only.
    """

    config_class = GapeConfig
    base_model_prefix = "gpt"
    #: Without position_ids rows count from their first token.
    counts_by_mask = True
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self, config: GapeConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(config.gpt())
        self.gradient_checkpointing = False
        self.post_init()
        config._attn_implementation = supported_name(config._attn_implementation)
        in_fp32: Any = getattr(self, "_keep_in_fp32_modules_strict", None)
        self._keep_in_fp32_modules_strict = {*(in_fp32 or ()), "scheme"}

    @classmethod
    def from_gpt(cls, gpt: GPT) -> GapeForCausalLM:
        """The same model, sharing the tensors of `gpt`."""
        model = cls(GapeConfig(**gpt.config.to_dict()))
        model.gpt = gpt
        model.train(gpt.training)
        return model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a GPT draws its weights in its constructor, and a load that misses any is refused."""

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.gpt.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding, for another vocabulary."""
        self.gpt.embedding = value
        self.gpt.config = dataclasses.replace(self.gpt.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer; None where the embedding is the output layer, and there is nothing to tie."""
        return self.gpt.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the output layer, for another vocabulary, by one without a bias, no longer tied to the embedding."""
        if value.bias is not None:
            raise invalid_argument("value", value, "a linear layer without a bias")
        self.gpt.head, self.config.tied = value, False
        self.gpt.config = dataclasses.replace(self.gpt.config, tied=False)

    @with_pages
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As causal language models of `transformers` take it.

        Without position_ids a row counts from its first token that is no pad. Restarting position_ids (and neither mask
        nor cache) are packed documents, which do not see each other.
        """
        refuse_paged(kwargs)
        output = self.states(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt.logits(output.last_hidden_state[:, rows])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        as_dict = return_dict if return_dict is not None else getattr(self.config, "return_dict", True)
        return out if as_dict else out.to_tuple()

    def states(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        *,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """What the output layer reads, `last_hidden_state` (B, N, E); arguments as in :meth:`forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: expected exactly one of them")
        x: Tensor = self.gpt.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        checkpointed = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not checkpointed
        cache = self._cache_for(past_key_values, use_cache)
        if cache is not None:
            refuse_uneven(cache, 0, x.size(1))
        with_states = self._option("output_hidden_states", output_hidden_states)
        with_weights = self._option("output_attentions", output_attentions)
        positions = self._positions(x, attention_mask, position_ids, cache)
        mask = self._mask(x, attention_mask, positions, cache)
        cache_position = torch.arange(x.size(1), device=x.device) + _length(cache)
        x = self.gpt.dropout(x)
        hidden, weights = [], []
        for index, block in enumerate(self.gpt.blocks()):
            hidden += [x] if with_states else []
            arguments = (block, index, x, positions, mask, cache, cache_position)
            x, layer_weights = (
                self._gradient_checkpointing_func(self._block, *arguments) if checkpointed else self._block(*arguments)
            )
            weights += [layer_weights] if with_weights else []
        x = self.gpt.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=(*hidden, x) if with_states else None,
            attentions=tuple(weights) if with_weights else None,
        )

    def _mask(self, x: Tensor, real: Tensor | None, positions: Tensor, cache: Any) -> Tensor | None:
        """The mask of x (B, N, E) for :func:`gape.hf.attention.attend_in_transformers`."""
        if isinstance(cache, PagesForTransformers):
            # A captured step has a mask of one number.
            return real if real is not None and real.shape[1:] == (1, 1, 1) else cache.begin(real, x)
        mask: Tensor | None = causal_mask(self.config, x, real, positions, cache)
        return mask

    def _cache_for(self, given: Any, wanted: bool) -> Any:
        """The given cache, or an empty one where one is wanted and the scheme runs with it."""
        fox = self.config.position == "fox"
        if given is not None and fox:
            expected = "None, since FoX runs without a cache; use_cache=False in generate"
            raise invalid_argument("past_key_values", given, expected)
        return DynamicCache() if given is None and wanted and not fox else given

    def _block(
        self,
        block: Block,
        index: int,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        cache_position: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One block, as :meth:`gape.models.gpt.Block.forward` has it."""
        attention = block.attention
        y, weights = attend_in_transformers(
            attention, block.attention_norm(x), positions, mask, cache, owner=attention, number=index,
            config=self.config, attend=self._attend(attention),
            cache_position=cache_position,
            # Keys with a reserve are narrower than values; a bias of the scheme's own needs positions too.
            key_width=attention.head_dim, stores_positions=attention.scheme.adds_to_logits,
        )  # fmt: skip
        x = x + block.dropout(y)
        return x + block.dropout(block.mlp(block.mlp_norm(x))), weights

    def _attend(self, layer: GAPEAttention) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Attention of a layer under masks of `transformers`."""

        def attend(
            q: Tensor, k: Tensor, v: Tensor, gate: Side, side: Side, **visibility: Any
        ) -> tuple[Tensor, Tensor | None]:
            def plain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
                return layer.scheme.attend(q, k, v, gate, side, **arguments)

            values = gate_values(layer, gate, side) if layer.gates is not None else None
            return masked_attention(
                q, k, v, values, name=self.config._attn_implementation, scale=layer.scale, plain=plain,
                auto=layer.impl, skips=layer.skips, **visibility,
            )  # fmt: skip

        return attend

    def _positions(self, x: Tensor, real: Tensor | None, given: Tensor | None, cache: Any) -> Tensor:
        """Positions (N,) or (B, N) of these tokens."""
        batch, n = x.shape[:2]
        # A compiled graph cannot read whether the mask hides anything.
        graph = torch.compiler.is_compiling()
        if given is None and real is not None and real.dim() == 2 and (graph or not bool(real.all())):
            given = (real.long().cumsum(-1) - 1).clamp(min=0)[:, -n:]
        if given is None:
            return torch.arange(n, device=x.device) + _length(cache)
        if given.dim() == 1 or given.size(0) == batch > 1:
            return given
        if given.size(0) != 1:
            raise invalid_argument("position_ids", given, f"an integer tensor (1 or {batch}, {n})")
        return given[0]

    def _option(self, name: str, given: bool | None) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def _store_checksum(self, checksum: str) -> None:
        self.config.gate_checksum, self.config.saved_length = checksum, self.config.context_length

    def _check_loaded(self, info: Mapping[str, Any], path: str) -> str | None:
        if info["missing_keys"]:
            raise ValueError(f"{path}: {sorted(info['missing_keys'])[0]} is missing")
        config = self.config
        if config.saved_length not in (None, config.context_length):
            # max_position_embeddings is another name for it, which users raise to read longer texts.
            expected = f"{config.saved_length}, the T that {path} was saved with"
            raise invalid_argument("context_length", config.context_length, expected)
        return config.gate_checksum if is_gated(config.position) else None


def _length(cache: Any) -> int | Tensor:
    """Tokens that a cache holds."""
    return 0 if cache is None else cache.get_seq_length()
