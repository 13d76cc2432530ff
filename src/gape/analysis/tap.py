"""Queries, keys and gates of a model's attention layers while it runs, and the attention weights of some queries.

The model runs its fused kernels as usual; weights are computed apart from it, for a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gape.models.attention import GAPEAttention
from gape.ops import inputs, reference
from gape.ops.inputs import Problem, Visibility, bias_dtype
from gape.positions.base import Scheme
from gape.positions.fox import FoX
from gape.positions.gated import Gated
from gape.utils.validation import invalid_argument


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one attention layer attended with in one forward pass.

    Attributes:
        scheme: the layer's positional scheme.
        q, k: (B, Hq, Nq, D) and (B, Hk, Nk, D) as they enter the dot product, detached.
        q_side, k_side: (B, Hq, Nq) and (B, H, Nk), the scheme's numbers per query and key, or None. For gated
            schemes these are the query gate g and the landmark l.
        scale: the softmax scale.
        seen: which queries see which keys.
    """

    scheme: Scheme
    q: Tensor
    k: Tensor
    q_side: Tensor | None
    k_side: Tensor | None
    scale: float
    seen: Visibility

    @property
    def gate(self) -> Tensor | None:
        """The query gate g, (B, Hq, Nq), None without gates."""
        return self.q_side if isinstance(self.scheme, Gated) else None

    @property
    def landmark(self) -> Tensor | None:
        """The landmark l, (B, Hk, Nk), None without gates."""
        return self.k_side if isinstance(self.scheme, Gated) else None

    @property
    def rate(self) -> Tensor | None:
        """Γ·g/T, the logits a query takes off an unprotected key per token of distance, (B, Hq, Nq), or None."""
        return None if self.gate is None else self.problem(0, self.seen.n_q).rate

    def problem(self, start: int, stop: int) -> Problem:
        """Queries start … stop − 1 as a problem of the operator; without gates they are zero."""
        part = self.seen.rows(start, stop)
        q, k = self.q[:, :, start:stop], self.k[:, :, : part.n_k]
        dtype = bias_dtype(q.dtype)
        gate, landmark = q.new_zeros(q.shape[:3], dtype=dtype), k.new_zeros(k.shape[:3], dtype=dtype)
        amplitude, context_length = gate.new_zeros(q.size(1)), 1.0
        if isinstance(self.scheme, Gated) and self.q_side is not None and self.k_side is not None:
            gate, landmark = self.q_side[:, :, start:stop].to(dtype), self.k_side[:, :, : part.n_k].to(dtype)
            amplitude, context_length = self.scheme.gates.amplitude.detach().to(dtype), self.scheme.context_length
        return Problem(
            q=q, k=k, v=k, gate=gate, landmark=landmark, amplitude=amplitude,
            context_length=context_length, scale=self.scale, seen=part,
        )  # fmt: skip

    @torch.no_grad()
    def weights(self, start: int, stop: int) -> Tensor:
        """The attention of queries start … stop − 1 to the keys that any of them may see.

        Returns:
            (B, Hq, stop − start, n) in float32 (float64 beside float64), n ≤ Nk: later keys than the last of these
            queries are left out where the order is that of the tensors. A row that sees nothing is zero.
        """
        problem = self.problem(start, stop)
        bias = self._bias(problem.seen, start, stop)
        logits = reference.logits(problem)
        return reference.visible_softmax(logits if bias is None else logits + bias, problem.seen.mask())

    def _bias(self, part: Visibility, start: int, stop: int) -> Tensor | None:
        """What the scheme adds to the logits besides the gates, broadcastable to (B, Hq, stop − start, n)."""
        if isinstance(self.scheme, FoX) and self.k_side is not None:
            decay = self.k_side[..., : part.n_k]
            # Counted from the newest key, so that the keys that matter carry small numbers.
            return (decay[..., -1:] - decay).to(bias_dtype(self.q.dtype)).unsqueeze(-2)
        i, j = self.seen.positions()
        return self.scheme.bias(i[..., start:stop], j[..., : part.n_k])


Receiver = Callable[[int, Attended], None]


@contextmanager
def tap(model: nn.Module, receive: Receiver) -> Iterator[None]:
    """While open, call `receive(layer, attended)` whenever an attention layer of the model has run.

    Layers are counted from 0 in the order of `model.modules()`. Each layer's own scheme is wrapped, and unwrapped on
    leaving, so taps may be nested; classes and other models are not touched. Meant for models that are not compiled.
    Decoding with a cache whose keys carry the bias does not call the scheme, and is not received.

    Raises:
        ValueError: the model has no :class:`gape.GAPEAttention`.
    """
    layers = _layers(model)
    before = [(layer.stepwise, layer.scheme.__dict__.get("attend")) for layer in layers]
    for index, layer in enumerate(layers):
        # An attribute of the instance hides the method of the class until it is deleted.
        layer.stepwise = True
        layer.scheme.__dict__["attend"] = _wrapped(layer.scheme, index, receive)
    try:
        yield
    finally:
        for layer, (stepwise, attend) in zip(layers, before, strict=True):
            layer.stepwise = stepwise
            del layer.scheme.__dict__["attend"]
            if attend is not None:
                layer.scheme.__dict__["attend"] = attend


def attended(model: nn.Module, ids: Tensor, **options: Any) -> list[Attended]:
    """Run the model on ids (B, N) and return what each layer attended with, first layer first.

    The options go to the model. Nothing carries gradients.

    Raises:
        ValueError: the model has no :class:`gape.GAPEAttention`, or a cache in the options kept a layer from calling
            its scheme.
    """
    layers: dict[int, Attended] = {}
    with torch.no_grad(), tap(model, layers.__setitem__):
        model(ids, **options)
    if len(layers) < len(_layers(model)):
        raise invalid_argument(
            "cache", options.get("cache"), "None, since keys that carry the bias do not pass through the scheme"
        )
    return [layers[index] for index in sorted(layers)]


def _layers(model: nn.Module) -> list[GAPEAttention]:
    layers = [module for module in model.modules() if isinstance(module, GAPEAttention)]
    if not layers:
        raise invalid_argument("model", type(model).__name__, "a module with GAPEAttention layers")
    return layers


def _wrapped(scheme: Scheme, index: int, receive: Receiver) -> Callable[..., Tensor]:
    attend = scheme.attend

    def wrapped(
        q: Tensor, k: Tensor, v: Tensor, q_side: Tensor | None, k_side: Tensor | None, **options: Any
    ) -> Tensor:
        y = attend(q, k, v, q_side, k_side, **options)
        visibility = {name: value for name, value in options.items() if name not in ("scale", "impl", "eps")}
        seen = inputs.visibility(q, k, **visibility)
        q_side, k_side = (None if side is None else side.detach() for side in (q_side, k_side))
        q, k = q.detach(), k.detach()
        scale = options["scale"]
        receive(index, Attended(scheme=scheme, q=q, k=k, q_side=q_side, k_side=k_side, scale=scale, seen=seen))
        return y

    return wrapped
