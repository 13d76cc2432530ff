"""What an injection would change, and what runs in a model that has gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gape.cache.layer import PagedLayer
from gape.hf import masks
from gape.hf.attention import InjectedAttention
from gape.hf.cache import extra_width
from gape.hf.families import Family, family_of, window_of
from gape.hf.gates import Settings
from gape.hf.implementations import OPERATOR_OF, supported_name
from gape.hf.paged import PagesForTransformers
from gape.ops import explain as explain_operator
from gape.utils.validation import invalid_argument, whole


@dataclass(frozen=True, kw_only=True)
class InjectionPlan:
    """What :func:`gape.hf.inject` would do.

    Attributes:
        layers: layers that change, and all there are.
        parameters: numbers added, and the model's own.
        gate_flops, own_flops: operations per token that reading the gates adds in all layers, and those of the model's
            matrix products, attention left out.
        cache_bytes: bytes per token that the cache grows by, and its own.
        implementation: the name in `attn_implementation`.
        backend: what runs, as :func:`gape.explain` says it.
    """

    model: str
    settings: Settings
    layers: tuple[int, int]
    parameters: tuple[int, int]
    gate_flops: int
    own_flops: int
    cache_bytes: tuple[int, int]
    implementation: str
    backend: str

    def __str__(self) -> str:
        added, own = self.parameters
        growth, before = self.cache_bytes
        settings = self.settings
        return "\n".join(
            (
                f"{self.model}: {self.layers[0]} of {self.layers[1]} layers, T = {settings.context_length}, "
                f"positions {settings.position or 'its own + gates'}, start {settings.start}",
                f"parameters   {added:+,} beside {own:,} ({added / own:+.4%})",
                f"operations   {self.gate_flops:+,} per token beside {self.own_flops:,} ({self.share:+.4%}) "
                "without attention",
                f"cache        {growth:+,} bytes per token beside {before:,}",
                f"attention    {self.implementation}: {self.backend}",
            )
        )

    @property
    def share(self) -> float:
        """Operations added, beside the model's own."""
        return self.gate_flops / self.own_flops


def injection_plan(model: Any, family: Family, settings: Settings) -> InjectionPlan:
    """The plan of a checked injection."""
    modules = family.modules(model)
    n_heads, n_kv_heads, width = family.layout.sizes(modules[0])
    changed = len(modules) if settings.layers is None else len(settings.layers)
    gated = changed if settings.gated else 0
    own = sum(p.numel() for p in model.parameters())
    # Each learned gate has a weight vector and a bias, each query head an amplitude and a strength.
    learns = (settings.gates.get("learn_gate", True), settings.gates.get("learn_landmark", True))
    readers = n_heads * bool(learns[0]) + n_kv_heads * bool(learns[1])
    added = gated * (readers * (width + 1) + 2 * n_heads)
    if family.model_type == "gpt2" and settings.position is not None:
        added -= model.transformer.wpe.weight.numel()
    like = _floating(next(model.parameters()))
    cache_growth = gated * n_kv_heads * extra_width(like.dtype) * like.element_size()
    name = supported_name(model.config._attn_implementation)
    # A few hundred tokens of the model's dtype on its device.
    tensors = _operator_tensors(256, 256, (n_heads, n_kv_heads, width), like)
    return InjectionPlan(
        model=type(model).__name__,
        settings=settings,
        layers=(changed, len(modules)),
        parameters=(added, own),
        gate_flops=2 * gated * readers * width,
        own_flops=2 * own,
        cache_bytes=(cache_growth, 2 * len(modules) * n_kv_heads * width * like.element_size()),
        implementation=name,
        backend=_operator_plan(tensors, context_length=1, impl=OPERATOR_OF[name]),
    )


def _operator_tensors(queries: int, keys: int, sizes: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """q, k, v, gate, landmark and amplitude of these sizes (Hq, Hk, D), all zero."""
    n_heads, n_kv_heads, width = sizes
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    q = torch.zeros(1, n_heads, queries, width, dtype=like.dtype, device=device)
    k = torch.zeros(1, n_kv_heads, keys, width, dtype=like.dtype, device=device)
    gates = [torch.zeros(size, device=device) for size in (q.shape[:3], k.shape[:3], (n_heads,))]
    return [q, k, k, *gates]


def _operator_plan(tensors: list[Tensor], **arguments: Any) -> str:
    """What the operator would run, or why it would refuse."""
    q, k, v, gate, landmark, amplitude = tensors
    try:
        return str(explain_operator(q, k, v, gate, landmark, amplitude, **arguments))
    except ValueError as error:
        return str(error)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What runs in a model with gates under the attention `implementation`, for a prompt of `tokens`.

    `prefill` and `decode` (one token after it) have sentences, and the layers that each is true of.
    """

    implementation: str
    tokens: int
    prefill: Mapping[str, tuple[int, ...]]
    decode: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        lines = [f"attn_implementation {self.implementation}"]
        for title, sentences in ((f"{self.tokens:,} tokens", self.prefill), ("one new token", self.decode)):
            for sentence, layers in sentences.items():
                several = len(self.prefill) > 1 or len(self.decode) > 1
                lines.append(f"{title}{f', layers {_ranges(layers)}' if several else ''}: {sentence}")
        return "\n".join(lines)


@torch.no_grad()
def explain(model: Any, tokens: int = 4096, cache: PagesForTransformers | None = None) -> ModelPlan:
    """Say what a model with gates runs for an unpadded prompt and for each new token.

    Nothing attends; tensors of the size of q and k of one layer are allocated. Whether single tokens are replayed from
    a captured graph, :meth:`gape.hf.ForgettingCache.explain` says.

    Args:
        model: that :func:`gape.hf.inject` has put gates into.
        tokens: length of the prompt, without what is cached.
        cache: of the model, in pages; None for one of transformers, which is empty.

    Raises:
        ValueError: a model without gates, a number of tokens below 1, or a cache of another model.
    """
    whole("tokens", tokens)
    if cache is not None and not isinstance(cache, PagesForTransformers):
        raise invalid_argument("cache", type(cache).__name__, "one in pages, or None for one of transformers")
    modules = family_of(model).modules(model)
    if not any(isinstance(module, InjectedAttention) for module in modules):
        raise invalid_argument("model", type(model).__name__, "one with gates, as gape.hf.inject makes it")
    like = _floating(next(model.parameters()))
    return ModelPlan(
        implementation=supported_name(model.config._attn_implementation),
        tokens=tokens,
        prefill=_by_sentence(modules, lambda module: _layer_plan(model, module, tokens, tokens, like, cache)),
        decode=_by_sentence(modules, lambda module: _layer_plan(model, module, 1, tokens + 1, like, cache)),
    )


def _layer_plan(model: Any, module: Any, queries: int, keys: int, like: Tensor, cache: Any) -> str:
    """What an attention layer runs for the last queries of so many tokens, in a sentence."""
    if not isinstance(module, InjectedAttention) or module.gates is None:
        return f"no gates, attention of transformers ({module.config._attn_implementation})"
    if cache is not None:
        return _paged_plan(model, module, queries, like, cache.layer(module.layer_idx, module.gape))
    how = module.how(queries)
    if how["impl"] == "reference":
        return f"the definition, dense (attn_implementation {module.config._attn_implementation})"
    if module.softcap is not None:
        return "the definition, dense (logits are capped)"
    wiring, window = module.gape_wiring, window_of(module)
    mask = None
    if window is not None and window < keys:
        # A cache has the keys of the window alone.
        keys = window if queries == 1 else keys
        index = torch.arange(keys, device=like.device)
        distance = index[-queries:, None] - index
        mask = ((distance >= 0) & (distance < window))[None, None]
    tensors = _operator_tensors(queries, keys, wiring.family.layout.sizes(module), like)
    positions = torch.arange(keys, device=tensors[0].device)
    visibility = masks.visibility(positions[-queries:], positions, mask, queries)
    return _operator_plan(tensors, context_length=wiring.context_length, **how, **visibility)


def _paged_plan(model: Any, module: Any, queries: int, like: Tensor, layer: PagedLayer) -> str:
    """The same through a cache in pages."""
    sizes = module.gape_wiring.family.layout.sizes(module)
    q, k, v, *_ = _operator_tensors(queries, queries, sizes, like)
    positions = torch.arange(layer.length, layer.length + queries, device=q.device)
    rotation = next((m for m in model.modules() if hasattr(m, "rope_type")), None)
    embeddings = None if rotation is None else rotation(q[:, 0], positions[None])
    step = module.step(q, positions, embeddings)
    return str(layer.explain(q, k, v, positions, lambda: module.rotate(q, k, positions, q, embeddings), step=step))


def _by_sentence(modules: list[Any], describe: Callable[[Any], str]) -> dict[str, tuple[int, ...]]:
    """The layers by what is true of them."""
    layers: dict[str, tuple[int, ...]] = {}
    known: dict[tuple[Any, ...], str] = {}
    for number, module in enumerate(modules):
        injected = isinstance(module, InjectedAttention)
        kind = (injected and module.gates is not None, window_of(module))
        if kind not in known:
            known[kind] = describe(module)
        layers[known[kind]] = (*layers.get(known[kind], ()), number)
    return layers


def _ranges(numbers: tuple[int, ...]) -> str:
    """Rising numbers in few words: "0-3, 5"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _floating(parameter: Tensor) -> Tensor:
    """A parameter, or a tensor like those that a quantised one is read as."""
    if parameter.is_floating_point():
        return parameter
    return torch.empty(0, dtype=torch.bfloat16, device=parameter.device)
