"""What an injection would do: parameters, cost and backend, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gape.hf import packing
from gape.hf.attend import KNOWN, our_name
from gape.hf.families import Family
from gape.hf.settings import Settings
from gape.ops import explain


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What :func:`gape.hf.inject` would do.

    Attributes:
        model: class of the model.
        settings: of the injection.
        layers: layers that change, and all there are.
        parameters: numbers added, and the model's own.
        gate_flops: operations per token that reading the gates adds, all layers.
        own_flops: operations per token of the model's matrix products, attention left out.
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
        more, cache = self.cache_bytes
        settings = self.settings
        return "\n".join(
            (
                f"{self.model}: {self.layers[0]} of {self.layers[1]} layers, T = {settings.context_length}, "
                f"positions {settings.position or 'its own + gates'}, start {settings.start}",
                f"parameters   {added:+,} beside {own:,} ({added / own:+.4%})",
                f"operations   {self.gate_flops:+,} per token beside {self.own_flops:,} ({self.share:+.4%}) "
                "without attention",
                f"cache        {more:+,} bytes per token beside {cache:,}",
                f"attention    {self.implementation}: {self.backend}",
            )
        )

    @property
    def share(self) -> float:
        """Operations added, beside the model's own."""
        return self.gate_flops / self.own_flops


def planned(model: Any, family: Family, settings: Settings) -> Plan:
    """The plan of a checked injection."""
    modules = family.modules(model)
    n_heads, n_kv_heads, width = family.layout.sizes(modules[0])
    changed = len(modules) if settings.layers is None else len(settings.layers)
    gated = changed if settings.gated else 0
    own = sum(p.numel() for p in model.parameters())
    # A weight vector and a bias per head whose gate learns, an amplitude and a strength per query head.
    learns = (settings.gates.get("learn_gate", True), settings.gates.get("learn_landmark", True))
    readers = n_heads * bool(learns[0]) + n_kv_heads * bool(learns[1])
    added = gated * (readers * (width + 1) + 2 * n_heads)
    if family.model_type == "gpt2" and settings.position is not None:
        added -= model.transformer.wpe.weight.numel()
    parameter = next(model.parameters())
    like = parameter if parameter.is_floating_point() else torch.empty(0, dtype=torch.bfloat16)
    carried = gated * n_kv_heads * packing.columns(like.dtype) * like.element_size()
    name = our_name(model.config._attn_implementation)
    return Plan(
        model=type(model).__name__,
        settings=settings,
        layers=(changed, len(modules)),
        parameters=(added, own),
        gate_flops=2 * gated * readers * width,
        own_flops=2 * own,
        cache_bytes=(carried, 2 * len(modules) * n_kv_heads * width * like.element_size()),
        implementation=name,
        backend=_backend(name, n_heads, n_kv_heads, width, like),
    )


def _backend(name: str, n_heads: int, n_kv_heads: int, width: int, like: torch.Tensor) -> str:
    """What would attend over a few hundred tokens of the model's dtype, where it is."""
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    q, k = (torch.zeros(1, heads, 256, width, dtype=like.dtype, device=device) for heads in (n_heads, n_kv_heads))
    gate, landmark = (torch.zeros(1, heads, 256, device=device) for heads in (n_heads, n_kv_heads))
    amplitude = torch.ones(n_heads, device=device)
    try:
        return str(explain(q, k, k, gate, landmark, amplitude, context_length=1, impl=KNOWN[name]))
    except ValueError as error:
        return str(error)
