"""Layers of `transformers` as caches in pages see them, with bounds on their queries that hold for any text.

Bounds are read off the modules themselves, of whatever family.

Norms and projections are called with a few inputs, so that their classes need not be known: a norm that scales is its
answer to equal numbers, and a projection is affine. Shapes: E width, H heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gape.cache.bounds import Limits, least_rates, limits_of_maps
from gape.cache.eviction import EvictionRule
from gape.cache.gpt import gpt_specs, refuse_without_floors
from gape.cache.layer import LayerSpec
from gape.hf.families import rotated_part
from gape.models.cuda_graphs import settings
from gape.positions.rotary import Rotary
from gape.utils.validation import invalid_argument

#: What decoder layers call the norm that their attention reads from.
_NORMS = ("input_layernorm", "ln_1", "attention_norm")
#: Large enough for what a norm adds to its divisor to vanish beside it.
_LARGE = 1e4


class InjectedLayer(NamedTuple):
    """An injected attention layer: the layer that it is a child of, which has the norm before it, and the module."""

    parent: Any
    module: Any
    spec: LayerSpec


def injected_layers(model: Any) -> list[InjectedLayer]:
    """The layers with gates of :func:`gape.hf.inject`, in order; none of them may cap its logits or have a window."""
    from gape.hf.attention import InjectedAttention  # noqa: PLC0415

    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, InjectedAttention) or module.gates is None:
            continue
        number, layout = module.layer_idx, module.gape_wiring.family.layout
        if module.not_plain_attention is not None:
            raise ValueError(f"model: layer {number} {module.not_plain_attention}, expected none that does")
        n_heads, n_kv_heads, _ = layout.sizes(module)
        spec = LayerSpec(
            owner=module.gates, number=number, n_heads=n_heads, n_kv_heads=n_kv_heads, scale=layout.scale(module),
            gates=module.gates, context_length=module.context_length, impl=module.impl,
        )  # fmt: skip
        layers.append(InjectedLayer(model.get_submodule(name.rpartition(".")[0]), module, spec))
    return layers


def layer_specs(model: Any, rule: EvictionRule | None) -> list[LayerSpec]:
    """The layers of a model with gates as a cache sees them, with the bounds that a rule needs.

    Refused are models without gates, layers that cap logits or have a window, and floors or gates that are missing.
    """
    from gape.hf.modeling_gape import GapeForCausalLM  # noqa: PLC0415

    if isinstance(model, GapeForCausalLM):
        return gpt_specs(model.gpt, rule)
    layers = injected_layers(model)
    if not layers:
        expected = "one with gates: of gape.hf.inject, or a gape.hf.GapeForCausalLM"
        raise invalid_argument("model", type(model).__name__, expected)
    bare = set(range(model.config.num_hidden_layers)) - {layer.spec.number for layer in layers}
    if rule is not None and bare and not rule.partial:
        raise ValueError(f"model: layer {min(bare)} has no gates and evicts nothing; expected some, or partial=True")
    limits: Sequence[Limits | None] = [None] * len(layers)
    if rule is not None and rule.bounds == "weights":
        limits = injected_limits(model, layers)
    specs = [
        replace(layer.spec, least_rate=None if rule is None else least_rates(layer.spec), limits=each)
        for layer, each in zip(layers, limits, strict=True)
    ]
    refuse_without_floors(specs, rule)
    return specs


#: Bounds of layers whose weights have not changed since: working them out takes longer than a short prompt.
_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, Limits]] = WeakKeyDictionary()


def injected_limits(model: Any, layers: Sequence[InjectedLayer]) -> list[Limits]:
    """Bounds on the queries of layers of a model, worked out once for weights as they are."""
    own = _own_stretch(model)
    weights = [
        [x for m in (layer.module, *_norms(layer.parent)) for x in (*m.parameters(), *m.buffers())] for layer in layers
    ]
    limits = []
    for layer, contents in zip(layers, _contents(weights), strict=True):
        module, spec = layer.module, layer.spec
        scheme = module.gape_wiring.scheme
        stretch = own if scheme is None else (float(getattr(scheme, "attention_scale", 1.0)), True)
        adapters = [settings(part) for part in module.modules()]
        growth = tuple(scheme.growth) if isinstance(scheme, Rotary) else (1.0,) * spec.n_heads
        fixed = (spec.scale, spec.context_length, spec.gates.gate_floor, spec.gates.init_gate_bias)
        key = (contents, adapters, stretch, growth, fixed)
        known = _KNOWN.get(module)
        if known is None or known[0] != key:
            known = _KNOWN[module] = key, _limits(layer, *stretch).grown(growth)
        limits.append(known[1])
    return limits


@torch.no_grad()
def _contents(groups: Sequence[Sequence[Tensor]]) -> list[list[object]]:
    """What tells the contents of groups of tensors from others: where they lie, how often they were written, norms.

    Writing to `x.data` is counted nowhere, so that norms are needed too. They are read together.
    """
    floating = [x for group in groups for x in group if x.is_floating_point()]
    norms = [x.to(floating[0].device) for x in torch._foreach_norm(floating, 2, dtype=torch.float64)]
    sizes = iter(torch.stack(norms).tolist())

    def content(x: Tensor) -> object:
        version = None if x.is_inference() else x._version
        return x.data_ptr(), version, x.dtype, next(sizes) if x.is_floating_point() else None

    return [[content(x) for x in group] for group in groups]


def _norms(parent: Any) -> list[nn.Module]:
    """The norms that attention may read from."""
    return [getattr(parent, name) for name in _NORMS if hasattr(parent, name)]


@torch.no_grad()
def _limits(layer: InjectedLayer, stretch: float, evenly: bool) -> Limits:
    parent, module, spec = layer
    if getattr(module, "q_layernorm", None) is not None:
        raise invalid_argument("model", type(module).__name__, "no q_layernorm; bounds='queries' takes any norm")
    if hasattr(module, "q_norm"):
        # Normed behind the projection, so nothing before it matters. A norm over all heads may leave one alone.
        width = module.gape_wiring.family.layout.sizes(module)[2]
        query, key = (_norm_of_heads(getattr(module, name), width) for name in ("q_norm", "k_norm"))
        if spec.gates.key_center is not None:
            key = key + spec.gates.key_center.double().norm(dim=-1).max().cpu()
        reach = spec.scale * stretch * query * torch.ones(spec.n_heads, dtype=torch.float64)
        product = reach * stretch * key
        return Limits(rate=least_rates(spec), reach=reach, own=product, jitter=product)
    norm = next(iter(_norms(parent)), None)
    if norm is None:
        expected = "a norm before the projections; bounds='queries' needs none"
        raise invalid_argument("model", type(parent).__name__, expected)
    size = int(module.config.hidden_size)
    shift = torch.zeros(size, dtype=torch.float64)
    if isinstance(norm, nn.LayerNorm):
        gain = shift + 1 if norm.weight is None else norm.weight.detach().cpu().double()
        shift = shift if norm.bias is None else norm.bias.detach().cpu().double()
    else:
        gain = _gain(norm, size)
    queries, keys = _maps(module, gain, shift)
    if isinstance(norm, nn.LayerNorm):
        # z has mean 0, so what all coordinates share adds nothing.
        queries, keys = ((A - A.mean(-1, keepdim=True), a) for A, a in (queries, keys))
    return limits_of_maps(spec, queries, keys, stretch=stretch, evenly=evenly)


def _norm_of_heads(norm: Any, width: int) -> Tensor:
    """The largest Euclidean norm of a head (width,) behind a norm of q or of k, over each head or over all at once."""
    size = norm.weight.numel() if norm.weight.dim() == 1 else width
    largest: Tensor = _gain(norm, size).abs().max() * size**0.5
    return largest


def _own_stretch(model: Any) -> tuple[float, bool]:
    """The most that a model's own rotation multiplies q and k by, and whether all coordinates alike, by 1 or more."""
    # A model may have several rotations, with names before the word; the one that stretches most bounds all.
    attributes = (item for rotation in model.modules() for item in vars(rotation).items())
    factors = [1.0, *(float(value) for name, value in attributes if name.endswith("attention_scaling"))]
    most = max(factors)
    return most, min(factors) == 1.0 and (most == 1.0 or rotated_part(model.config) == 1.0)


def _gain(norm: nn.Module, width: int) -> Tensor:
    """What a norm by the root of the mean square multiplies with, (width,) in float64; others are refused."""
    ones = torch.full((1, width), _LARGE)
    parameter = next(norm.parameters(), ones)
    ones = ones.to(parameter)
    alone = torch.zeros_like(ones)
    alone[0, 0] = _LARGE
    gain: Tensor
    gain, turned, single = (norm(x).cpu().double()[0] for x in (ones, -ones, alone))
    close = 1e-2 if ones.dtype in (torch.bfloat16, torch.float16) else 1e-4
    expected = torch.zeros_like(gain)
    expected[0] = gain[0] * width**0.5
    size = gain.abs().max() * width**0.5
    if not torch.allclose(turned, -gain) or (single - expected).abs().max() > close * size:
        raise invalid_argument(
            "norm", norm, "nn.LayerNorm or a norm by the root of the mean square; bounds='queries' takes any norm"
        )
    return gain


def _maps(module: Any, gain: Tensor, shift: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(A, a) and (B, b), (H, D, E) and (H, D) in float64: q and k of an input gain ⊙ z + shift are affine in z."""
    twin = copy.deepcopy(module)
    # Projections in few bits have a dtype of their own for what they read.
    if all(parameter.is_floating_point() for parameter in twin.parameters()):
        twin.double()
    a, b = _projected(twin, shift[None])
    # A weight in half precision would vanish beside a bias that is added to it.
    for name, constant in (*twin.named_parameters(), *twin.named_buffers()):
        if name.endswith(("bias", "key_center")):
            constant.zero_()
    A, B = _projected(twin, torch.diag(gain))
    return (A.transpose(1, 2), a[:, 0]), (B.transpose(1, 2), b[:, 0])


def _projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (H, N, D) in float64 that a layer makes of x (N, E)."""
    like = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    with torch.autocast(like.device.type, enabled=False):
        q, k, _ = module.project(x.to(like)[None])
    return q[0].cpu().double(), k[0].cpu().double()
