"""Our GPT as a model of `transformers`: its config, its caches, its generation, its Trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gape.hf.attend import Sides, attend, made_mask, our_name, refuse_paged, try_causality
from gape.hf.attending import AttendingCache
from gape.hf.card import write_card
from gape.hf.forgetting import pads
from gape.hf.saving import gate_checksum, refuse_missing
from gape.hf.wrap import remember
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig
from gape.models.gpt import GPT, Block
from gape.positions import Scheme, is_gated
from gape.utils.validation import invalid_argument

_FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}


class GapeConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of :class:`GapeForCausalLM`: the fields of :class:`gape.GPTConfig`, and those of `transformers`.

    Args:
        **kwargs: any of both. Without sizes it is the paper's 44M model.

    Raises:
        ValueError: for a value that GPTConfig refuses; names it.
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


class GapeForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """:class:`gape.GPT` with the interface of `transformers`: `generate`, caches, `Trainer`, saving.

    Its tensors are those of the GPT, under the prefix `gpt.`. Where the embedding is also the output layer, it is one
    tensor under one name. FoX, whose keys carry a running sum, runs without a cache only.
    """

    config_class = GapeConfig
    base_model_prefix = "gpt"
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
        config._attn_implementation = our_name(config._attn_implementation)
        kept: Any = getattr(self, "_keep_in_fp32_modules_strict", None)
        self._keep_in_fp32_modules_strict = {*(kept or ()), "scheme"}

    @classmethod
    def from_gpt(cls, gpt: GPT) -> GapeForCausalLM:
        """The same model, sharing the tensors of `gpt`."""
        model = cls(GapeConfig(**gpt.config.to_dict()))
        model.gpt = gpt
        model.train(gpt.training)
        return model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a GPT draws its own when it is made, and a load that misses any is refused."""

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.gpt.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put another embedding in its place, for another vocabulary."""
        self.gpt.embedding = value
        self.gpt.config = dataclasses.replace(self.gpt.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer; None where the embedding is that, and there is nothing to tie."""
        return self.gpt.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Put another output layer in its place, for another vocabulary; the embedding no longer is that.

        Raises:
            ValueError: it has a bias, which a GPT has no place for.
        """
        if value.bias is not None:
            raise invalid_argument("value", value, "a linear layer without a bias")
        self.gpt.head, self.config.tied = value, False
        self.gpt.config = dataclasses.replace(self.gpt.config, tied=False)

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
        told = self.states(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        x = told.last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.gpt.logits(x if isinstance(rows, int) else x[:, rows])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=told.past_key_values,
            hidden_states=told.hidden_states,
            attentions=told.attentions,
        )
        wanted = return_dict if return_dict is not None else getattr(self.config, "return_dict", True)
        return out if wanted else out.to_tuple()

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
        keeps = self._asked("output_hidden_states", output_hidden_states)
        looks = self._asked("output_attentions", output_attentions)
        positions, mask, told = self._surroundings(x, attention_mask, position_ids, cache)
        x = self.gpt.dropout(x)
        before, weights = [], []
        for index, block in enumerate(self.gpt.blocks()):
            before += [x] if keeps else []
            given = (block, x, positions, mask, cache, index, told)
            x, found = self._gradient_checkpointing_func(self._block, *given) if checkpointed else self._block(*given)
            weights += [found] if looks else []
        x = self.gpt.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=(*before, x) if keeps else None,
            attentions=tuple(weights) if looks else None,
        )

    def _surroundings(
        self, x: Tensor, real: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Positions of these tokens, the mask that layers are handed, and what caches of transformers 4 are told."""
        positions = self._positions(x, real, position_ids, cache)
        told = {"cache_position": torch.arange(x.size(1), device=x.device) + _length(cache)}
        if isinstance(cache, AttendingCache):
            return positions, pads(real, x), told
        return positions, made_mask(self.config, x, real, positions, cache), told

    def _cache_for(self, given: Any, wanted: bool) -> Any:
        """The cache that was given, or an empty one where one is wanted and the scheme runs with it."""
        fox = self.config.position == "fox"
        if given is not None and fox:
            raise invalid_argument(
                "past_key_values", given, "None, since FoX runs without a cache; use_cache=False in generate"
            )
        return DynamicCache() if given is None and wanted and not fox else given

    def _block(
        self, block: Block, x: Tensor, positions: Tensor, mask: Any, cache: Any, layer: int, told: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """One layer, as :meth:`gape.models.gpt.Block.forward` has it."""
        y, weights = self._attend(block.attention, block.attention_norm(x), positions, mask, cache, layer, told)
        x = x + block.dropout(y)
        return x + block.dropout(block.mlp(block.mlp_norm(x))), weights

    def _attend(
        self,
        attention: GAPEAttention,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        layer: int,
        told: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        scheme, name = attention.scheme, self.config._attn_implementation
        q, k, v = _projected(attention, x)
        try_causality(name, q)
        held = None
        if isinstance(cache, AttendingCache) and attention.gates is not None:
            held = cache.layer(layer, attention.gates, q.size(2))
            y = held.attend_projected(q, k, v, positions)
            if y is not None:
                return attention.out(y.transpose(1, 2).flatten(2)), None
        q, gate = scheme.queries(q, positions, x)
        k, side = scheme.keys(k, positions, x, None)
        gates, sides = attention.gates, None
        landmark = side if gates is not None else None
        if held is not None and gate is not None and landmark is not None:
            y = held.attend(q, k, v, gate, landmark, positions, mask)
            return attention.out(y.transpose(1, 2).flatten(2)), None
        # A bias of the scheme's own goes by positions too.
        own, width = type(scheme).attend is not Scheme.attend, attention.head_dim
        k, v, landmark, k_positions = remember(cache, layer, k, v, landmark, positions, told, width, placed=own)
        if gates is not None and gate is not None and landmark is not None:
            sides = Sides(gate, landmark, gates.amplitude, attention.context_length)

        def plain(q: Tensor, k: Tensor, v: Tensor, **seen: Any) -> Tensor:
            return scheme.attend(q, k, v, gate, side, **seen)

        y, weights = attend(
            q, k, v, sides, name=name, q_positions=positions, k_positions=k_positions, mask=mask,
            scale=attention.scale, plain=plain, auto=attention.impl, skips=attention.skips,
        )  # fmt: skip
        return attention.out(y.transpose(1, 2).flatten(2)), weights

    def _positions(self, x: Tensor, real: Tensor | None, given: Tensor | None, cache: Any) -> Tensor:
        """Positions (N,) or (B, N) of these tokens."""
        batch, n = x.shape[:2]
        if given is None and real is not None and real.dim() == 2 and not self._dense(real):
            given = (real.long().cumsum(-1) - 1).clamp(min=0)[:, -n:]
        if given is None:
            return torch.arange(n, device=x.device) + _length(cache)
        if given.dim() == 1 or given.size(0) == batch > 1:
            return given
        if given.size(0) != 1:
            raise invalid_argument("position_ids", given, f"an integer tensor (1 or {batch}, {n})")
        return given[0]

    def _dense(self, real: Tensor) -> bool:
        """Whether a mask of pads (B, N) hides nothing; a compiled graph may not look."""
        return not torch.compiler.is_compiling() and bool(real.all())

    def _asked(self, name: str, given: bool | None) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`; also stores the checksum of the scheme's tensors and writes a model card."""
        self.config.gate_checksum = gate_checksum(kwargs.get("state_dict") or self.state_dict())
        self.config.saved_length = self.config.context_length
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_card(Path(save_directory), self)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; tensors that are missing, gates that are not those saved, or another T are an error.

        Raises:
            ValueError: says which.
        """
        told = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        where = str(pretrained_model_name_or_path)
        refuse_missing(info, where)
        if info["missing_keys"]:
            raise ValueError(f"{where}: {sorted(info['missing_keys'])[0]} is missing")
        length = model.config.saved_length
        if length not in (None, model.config.context_length):
            # max_position_embeddings is another name for it, which people raise to read further.
            raise invalid_argument(
                "context_length", model.config.context_length, f"{length}, the T that {where} was saved with"
            )
        stored = model.config.gate_checksum
        if is_gated(model.config.position) and stored not in (None, gate_checksum(model.state_dict())):
            raise ValueError(f"{where}: the gates are not those that were saved: their checksum differs")
        return (model, info) if told else model


def _length(cache: Any) -> int | Tensor:
    """Tokens that a cache holds."""
    return 0 if cache is None else cache.get_seq_length()


def _projected(attention: GAPEAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, N, width) of x (B, N, E)."""
    heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
    widths = (attention.content_dim, attention.content_dim, attention.head_dim)
    parts = attention.qkv(x).split([h * w for h, w in zip(heads, widths, strict=True)], dim=-1)
    q, k, v = (part.unflatten(-1, (h, w)).transpose(1, 2) for part, h, w in zip(parts, heads, widths, strict=True))
    return q, k, v
