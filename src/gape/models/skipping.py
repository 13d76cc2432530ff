"""Attention that skips what provably has no weight, for a whole model: how it is run, not what it is.

Under plain causality a kernel skips tiles of keys that can hold no more than eps of a query's attention, forward and
backward alike: `docs/results/proofs.md` has the proof. Nothing of it is saved with a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gape.ops.limits import DECODE_QUERIES
from gape.utils.validation import invalid_argument, weight

#: The implementation that skips.
IMPL = "triton"


class Skips:
    """Mixed into attention layers, which then can skip tiles of keys.

    `skips` is the attention that a query may lose to skipped tiles, 0 skips none: set by :func:`skip`, never saved.
    Otherwise the implementation `impl` runs.
    """

    skips: float = 0.0
    impl: str

    @property
    def gates(self) -> Any:
        """The layer's gates; None without, and then nothing is ever skipped."""
        raise NotImplementedError

    @property
    def never_skips(self) -> str | None:
        """Why no kernel can skip anything in this layer; None where one can."""
        return None

    def how(self, queries: int) -> dict[str, Any]:
        """The implementation for so many queries, and what it may drop: nothing where there are few."""
        if not self.skips or self.gates is None or queries <= DECODE_QUERIES:
            return {"impl": self.impl}
        return {"impl": IMPL, "eps": self.skips}


def skip(model: nn.Module, eps: float) -> None:
    """From now on, let every layer with gates skip tiles of keys: in training, in prefill, chunk by chunk too.

    The Triton kernel runs, and skips where tokens come in index order without documents or a mask. Up to 16 queries,
    which is decoding, nothing is skipped.

    Args:
        model: a GPT, a model that :func:`gape.hf.inject` has put gates into, or any with layers of :class:`Skips`.
        eps: the attention that a query may lose in each layer and head, from 0 to below 1; 0 skips nothing.

    Raises:
        ValueError: an argument is out of range, no layer has gates, or one that has them cannot skip. The model is then
            as it was.
    """
    eps = weight("eps", eps)
    layers = _gated(model)
    reason = cannot_skip(model)
    if eps and reason is not None:
        raise ValueError(f"model: got {type(model).__name__} with a layer that {reason}, expected none that does")
    for layer in layers:
        layer.skips = eps


def cannot_skip(model: nn.Module) -> str | None:
    """What a layer with gates does that keeps kernels from skipping; None where no layer does."""
    return next((reason for layer in _gated(model) if (reason := layer.never_skips)), None)


@contextmanager
def skipping(model: nn.Module, eps: float) -> Iterator[None]:
    """A context in which :func:`skip` holds; each layer then is as it was before."""
    layers = _gated(model)
    previous = [layer.skips for layer in layers]
    skip(model, eps)
    try:
        yield
    finally:
        for layer, eps_before in zip(layers, previous, strict=True):
            layer.skips = eps_before


def _gated(model: nn.Module) -> list[Skips]:
    layers: list[Skips] = [x for x in model.modules() if isinstance(x, Skips) and x.gates is not None]
    if not layers:
        raise invalid_argument("model", type(model).__name__, "one with gates, which alone tell what has no weight")
    return layers
