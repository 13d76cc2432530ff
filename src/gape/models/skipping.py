"""Attention that leaves away what provably has no weight, for a whole model: how it is run, not what it is.

Under plain causality a kernel skips tiles of keys that can hold no more than eps of a query's attention, forward and
backward alike: `docs/skipping.md` has the proof. Nothing of it is saved with a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gape.models.attention import GAPEAttention, Skipping
from gape.ops.checks import refuse, weight

#: Implementations that skip.
IMPLS = ("triton", "flex")


def skip(model: nn.Module, eps: float, *, impl: str = "triton") -> None:
    """From now on, let every layer with gates leave tiles of keys away: in training, in prefill, chunk by chunk too.

    Up to 16 queries, which is decoding, nothing is skipped. "triton" skips where tokens come in index order without
    documents or a mask, and elsewhere leaves nothing away; "flex" skips in every layout.

    Args:
        model: a GPT, or any module with :class:`gape.GAPEAttention` layers.
        eps: the attention that a query may lose in each layer and head, from 0 to below 1; 0 skips nothing.
        impl: "triton" or "flex".

    Raises:
        ValueError: an argument is out of range, or no layer has gates.
    """
    eps = weight("eps", eps)
    if impl not in IMPLS:
        raise refuse("impl", impl, f"one of {IMPLS}")
    for layer in _gated(model):
        layer.skips = Skipping(eps, impl) if eps else None


@contextmanager
def skipping(model: nn.Module, eps: float, *, impl: str = "triton") -> Iterator[None]:
    """A context in which :func:`skip` holds; each layer then is as it was before.

    Raises:
        ValueError: as :func:`skip`.
    """
    layers = _gated(model)
    before = [layer.skips for layer in layers]
    skip(model, eps, impl=impl)
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.skips = was


def _gated(model: nn.Module) -> list[GAPEAttention]:
    layers = [layer for layer in model.modules() if isinstance(layer, GAPEAttention) and layer.gates is not None]
    if not layers:
        raise refuse("model", type(model).__name__, "one with gates, which alone tell what has no weight")
    return layers
