"""Caches in pages for models of `transformers` with gates: give one to `generate` or to the model as `past_key_values`.

Layers with gates attend through the cache, which has the keys in :class:`gape.cache.paged.PagedCache`. On a GPU single
tokens are replayed from a captured graph; :meth:`PagesForTransformers.explain` says whether they are.

Shapes: B rows, n new tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from gape.cache.eviction import EvictionRule
from gape.cache.layer import PagedLayer
from gape.cache.paged import PagedCache
from gape.hf.bounds import layer_specs
from gape.hf.families import LLAMA_LIKE, TRANSFORMERS_4
from gape.hf.gates import warn_of_idle
from gape.hf.masks import memoized, real_tokens, refuse_pads_behind
from gape.models.cuda_graphs import captured_logits, model_cannot
from gape.utils.validation import invalid_argument

#: Outputs that a captured step does not have.
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
#: Arguments of a forward pass under which a step may be captured, and the values that change nothing.
_PLAIN = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}
#: Rotations that read positions to choose their frequencies have one of these words in their name.
_READING_ROTATIONS = ("dynamic", "longrope")


class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer with gates, as `transformers` sees it. Its keys are never handed out."""

    is_croppable = True

    def __init__(self, pages: PagedLayer) -> None:
        super().__init__()
        self.pages = pages

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: pages are taken as tokens come."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused with a ValueError: layers that use this cache attend through it."""
        raise _another_model()

    def get_seq_length(self) -> int:
        """Tokens that have come, cached or not."""
        return self.pages.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Keys that a mask speaks of, and the first of them: all that have come, cached or not."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.pages.length + new, 0

    def get_max_length(self) -> int:
        """−1: there is no limit."""
        return -1

    #: Its name in transformers 4.
    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused with a ValueError: beams would share keys that each of them evicts."""
        raise ValueError("num_beams: got beams, expected 1 with a cache in pages")

    #: Other ways to choose rows, likewise.
    batch_select_indices = batch_repeat_interleave = reorder_cache


class PagesForTransformers(Cache):  # type: ignore[misc]
    """What both caches in pages have in common; make a :class:`FullCache` or a :class:`ForgettingCache`.

    Attributes:
        pages: the keys of layers with gates.
        real: which of the tokens of the current call are no pads, bool (B, n); None: all.
    """

    def __init__(self, model: Any, rule: EvictionRule | None) -> None:
        self.pages = PagedCache(model, layer_specs, rule)
        self.real: Tensor | None = None
        #: Pads of each row among the tokens so far, int64 (B,); None: there are none.
        self._pads: Tensor | None = None
        count = int(getattr(model.config, "num_hidden_layers", 0))
        super().__init__(layers=self._layers(max(count, len(self.pages.layers))))

    def _layers(self, count: int) -> list[Any]:
        """Layers with gates in pages; others keep their keys as `transformers` does."""
        paged = {layer.spec.number: PagedCacheLayer(layer) for layer in self.pages.layers}
        return [paged.get(number) or DynamicLayer() for number in range(count)]

    def _with_pages(self, pages: PagedCache) -> Any:
        clone = copy(self)
        clone.pages, clone.real = pages, None
        clone.layers = clone._layers(len(self.layers))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with pages of its own, for the same model."""
        clone = self._with_pages(deepcopy(self.pages, memo))
        clone.layers = [
            mine if isinstance(mine, PagedCacheLayer) else deepcopy(layer, memo)
            for mine, layer in zip(clone.layers, self.layers, strict=True)
        ]
        return clone

    def layer(self, number: int, owner: Any) -> PagedLayer:
        """The cache of the layer with these gates; a ValueError where it was made for another model."""
        layer = self.layers[number] if number < len(self.layers) else None
        if not isinstance(layer, PagedCacheLayer) or layer.pages.spec.owner is not owner:
            raise _another_model()
        return layer.pages

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use, and of layers without gates."""
        plain = [x for layer in self._plain for x in (layer.keys, layer.values) if x is not None]
        return self.pages.nbytes + sum(int(x.nbytes) for x in plain)

    @property
    def num_keys(self) -> list[list[int]]:
        """Keys that each layer with gates and key head has cached, the largest number of any row."""
        return self.pages.num_keys

    @property
    def realised_eps(self) -> float:
        """The most attention that any query of any layer and head can have lost to eviction."""
        return self.pages.realised_eps

    def explain(self) -> str:
        """How the cache works now, in a few lines: what is evicted, and whether single tokens are captured."""
        rule, why = self.pages.rule, self.pages.uncaptured
        evicts = "keeps every key" if rule is None else f"evicts by {rule}"
        steps = "captured" if why is None else f"not captured: {why}"
        return f"pages of 64 keys, {evicts}\n{self.nbytes:,} bytes\nsingle tokens: {steps}"

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget so many of the last tokens, as a number below 0; one above 0 is how many of the first stay.

        0 removes nothing, but in transformers 4, where it is how many stay.

        Raises:
            ValueError: keys were evicted that a token there could see.
        """
        # Assisted decoding of some versions counts on the device.
        tokens_to_remove = int(tokens_to_remove)
        length = min(layer.length for layer in self.pages.layers)
        if tokens_to_remove < 0:
            left = max(0, length + tokens_to_remove)
        else:
            left = min(length, tokens_to_remove) if tokens_to_remove or TRANSFORMERS_4 else length
        self.pages.truncate(left)
        for layer in self._plain:
            removed = left - int(layer.get_seq_length())
            if removed < 0:
                # Layers of transformers understand a number below 0 in every version.
                layer.crop(removed)

    def reset(self) -> None:
        """Forget everything."""
        self.pages.reset()
        self.real = self._pads = None
        # Layers of transformers 4 keep their length through a reset of their own.
        self.layers[:] = self._layers(len(self.layers))

    @property
    def _plain(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedCacheLayer)]

    def step(self, model: Any, run: Any, arguments: dict[str, Any]) -> Any:
        """The output of a call with one token a row, replayed from a captured step; None, and nothing done, where not.

        `run(ids, positions)` gives the logits (B, 1, V) of a step of the model, whose forward pass has these arguments.
        """
        ids = arguments.get("input_ids")
        if ids is None or ids.size(1) != 1:
            return None
        self.pages.uncaptured = self._call_cannot(model, arguments)
        if self.pages.uncaptured is not None:
            return None
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.full_like(ids, self.pages.length)
        logits = captured_logits(
            model, self.pages, run, ids, positions.expand(ids.shape), lambda: model_obstacle(model)
        )
        return None if logits is None else CausalLMOutputWithPast(logits=logits, past_key_values=self)

    def _call_cannot(self, model: Any, arguments: dict[str, Any]) -> str | None:
        """Why a call cannot come from a captured step; None where it can."""
        if self._plain:
            return "a layer has no gates, and keeps its keys as transformers does"
        mask = arguments.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                return "the attention mask is no (batch, tokens)"
            positions = arguments.get("position_ids")
            if not (_no_pads(mask) if positions is None else bool(mask[:, -1].all())):
                return "rows have pads, and position_ids are not given or the token is a pad"
        wanted = next((name for name in _OUTPUTS if getattr(model.config, name, False)), None)
        if wanted is not None or not getattr(model.config, "return_dict", True):
            return f"the config sets {wanted or 'return_dict'}"
        ignored = ("input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position")
        for name, value in arguments.items():
            plain = _PLAIN.get(name, (None, False))
            if name not in ignored and (isinstance(value, Tensor) or value not in plain):
                return f"{name} is given"
        return None

    def begin(self, mask: Any, tokens: Tensor) -> Tensor | None:
        """Take note of pads before a call with ids (B, n) or embeddings (B, n, E); the mask to call the model with."""
        self.real = None
        if mask is not None:
            self._note_pads(mask, tokens.size(1))
        if self._plain:
            return mask  # type: ignore[no-any-return]
        # A mask with four dimensions is taken as it is: `transformers` then makes none of tokens × keys.
        return torch.ones(tokens.size(0), 1, 1, 1, dtype=torch.bool, device=tokens.device)

    def _note_pads(self, mask: Any, n: int) -> None:
        length = self.pages.layers[0].length
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.size(1) != length + n:
            expected = f"(batch, {length + n}), 0 for pads, with a cache in pages of {length} tokens"
            raise invalid_argument("attention_mask", mask, expected)
        if not _no_pads(mask):
            visible = mask != 0
            refuse_pads_behind(visible)
            self._refuse_hidden_tokens(visible[:, :length])
            self._pads, real = (~visible).sum(1), visible[:, length:]
            self.real = None if bool(real.all()) else real

    def _refuse_hidden_tokens(self, visible: Tensor) -> None:
        """Refuse a mask (B, tokens so far) that hides other tokens than the pads among them."""
        length = visible.size(1)
        pads = 0 if self._pads is None or not length else self._pads.clamp(max=length)
        if bool(((~visible).sum(1) != pads).any()):
            raise ValueError(
                "attention_mask: hides cached tokens that were no pads, expected the mask of earlier calls"
            )

    def real_tokens(self, mask: Tensor | None, n: int, batch: int) -> Tensor | None:
        """Which of the n new tokens are no pads, bool (B, n), by the mask that a layer got; None: all."""
        ours = mask is not None and mask.size(-1) == 1
        if ours and (self.real is not None or n > 1 or self.pages.layers[-1].length):
            return self.real
        # Somebody called the model's body, with a mask of transformers.
        return real_tokens(mask, n, batch)


class FullCache(PagesForTransformers):
    """A cache in pages that keeps every key. Batches, left padding and chunked prefill work, beams do not.

    Args:
        model: a :class:`gape.hf.GapeForCausalLM`, or a model that :func:`gape.hf.inject` was called on.

    Raises:
        ValueError: no layer has gates, or one that has caps its logits or has a window; names the layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, None)


class ForgettingCache(PagesForTransformers):
    """A cache in pages that evicts keys for good once no future query can attend to them.

    Use a new one, or :meth:`fresh`, for every text. Batches, left padding and chunked prefill work, beams do not.

    Args:
        model: a :class:`gape.hf.GapeForCausalLM`, or a model that :func:`gape.hf.inject` was called on; its gates have
            a floor.
        eps, bounds, partial, max_keys, max_bytes: as in :class:`gape.cache.gpt.ForgettingCache`. With `partial`,
            heads without a floor and layers without gates keep all their keys.

    Raises:
        ValueError: an argument is out of range, a head has no floor or an amplitude of 0, or a layer caps its logits or
            has a window; names layer and head.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eps: float | None = None,
        bounds: str = "weights",
        partial: bool = False,
        max_keys: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        rule = EvictionRule(eps=eps, max_keys=max_keys, max_bytes=max_bytes, bounds=bounds, partial=partial)
        super().__init__(model, rule)
        warn_of_idle(model)

    def fresh(self, eps: float | None = None) -> ForgettingCache:
        """An empty cache of the same model and rule (but for another eps), with bounds for its weights as they are now.

        Raises:
            ValueError: eps is out of range.
        """
        clone: ForgettingCache = self._with_pages(self.pages.fresh(eps))
        return clone

    def evict(self) -> None:
        """Evict now what the next tokens can do without. Otherwise that is done every 64 tokens or more."""
        self.pages.evict()


def with_pages(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a causal language model, for calls with a cache in pages too.

    One token a row is replayed from a captured step where that can be. Otherwise the model is called with a mask of one
    number, and the cache hides pads.
    """
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((each for each in given if isinstance(each, PagesForTransformers)), None)
        if cache is None:
            return forward(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        arguments.pop("self", None)

        def run(ids: Tensor, positions: Tensor) -> Tensor:
            mask = torch.ones(ids.size(0), 1, 1, 1, dtype=torch.bool, device=ids.device)
            inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
            logits: Tensor = forward(self, attention_mask=mask, **inputs).logits
            return logits

        output = cache.step(self, run, arguments)
        if output is None:
            tokens = arguments.get("input_ids")
            tokens = arguments["inputs_embeds"] if tokens is None else tokens
            mask = arguments.pop("attention_mask", None)
            # A model that counts positions by the mask begins by itself.
            mask = mask if getattr(self, "counts_by_mask", False) else cache.begin(mask, tokens)
            try:
                output = forward(self, attention_mask=mask, **arguments)
            finally:
                cache.real = None
        return output

    return call


def model_obstacle(model: Any) -> str | None:
    """Why single tokens of a model cannot be captured; None where they can."""
    from gape.hf.modeling_gape import GapeForCausalLM  # noqa: PLC0415

    kind = str(model.config.model_type).removeprefix("gape_")
    modules = list(model.modules())
    if not isinstance(model, GapeForCausalLM):
        if kind not in LLAMA_LIKE:
            return f"models of type {kind} are not captured, only {', '.join(LLAMA_LIKE)}"
        rotations = [str(getattr(module, "rope_type", None)) for module in modules]
        reading = next((name for name in rotations if any(word in name for word in _READING_ROTATIONS)), None)
        if reading is not None:
            return f"rotations of type {reading} read positions"
    kinds = {type(weight) for weight in model.parameters()} - {nn.Parameter}
    if kinds:
        return f"it is not known whether a {kinds.pop().__qualname__} can be captured"
    places = {str(x.device) for x in (*model.parameters(), *model.buffers())}
    if len(places) > 1:
        return f"the model is on {' and '.join(sorted(places))}"
    homes = (
        "gape.", "torch.nn.", "transformers.activations", f"transformers.models.{kind}.", "peft.tuners.lora.",
        # Wraps gates that are saved with an adapter.
        "peft.utils.other",
    )  # fmt: skip
    return model_cannot(
        modules, model.get_input_embeddings().weight, lambda module: type(module).__module__.startswith(homes)
    )


def _no_pads(mask: Tensor) -> bool:
    """Whether a mask (B, tokens) hides nothing."""
    return memoized(mask, "_gape_no_pads", lambda: bool((mask != 0).all()))


def _another_model() -> ValueError:
    return ValueError("past_key_values: a cache in pages serves the model it was made for, and no other")
