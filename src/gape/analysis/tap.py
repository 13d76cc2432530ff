"""Queries, keys and gates of a model's attention layers while it runs, and the attention weights of some queries.

The model is ours, or one of `transformers` with gates of `gape.hf.inject`. It runs its fused kernels as usual; weights
are computed apart from it, for a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gape.gates import GAPEGates
from gape.models.attention import GAPEAttention
from gape.ops import inputs, reference
from gape.ops.inputs import Problem, Visibility, bias_dtype
from gape.ops.plain import rate_bias
from gape.positions.base import Scheme
from gape.positions.biases import GRAPE, FoX
from gape.positions.gated import Gated
from gape.utils.validation import invalid_argument


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one attention layer attended with in one forward pass, detached.

    Attributes:
        scheme: the layer's positional scheme; None where a model of transformers rotates by itself.
        q, k, v: (B, Hq, Nq, D) and (B, Hk, Nk, D) as they enter the dot product, and (B, Hk, Nk, Dv).
        q_side, k_side: (B, Hq, Nq) and (B, H, Nk), the scheme's numbers per query and key, or None. For gated
            schemes these are the query gate g and the landmark l.
        scale, visibility: the softmax scale, and which queries see which keys.
        gates, context_length: the layer's gates, None without, and their T.
    """

    scheme: Scheme | None
    q: Tensor
    k: Tensor
    v: Tensor
    q_side: Tensor | None
    k_side: Tensor | None
    scale: float
    visibility: Visibility
    gates: GAPEGates | None = None
    context_length: float = 1.0

    @property
    def gate(self) -> Tensor | None:
        """The query gate g, (B, Hq, Nq), None without gates."""
        return None if self.gates is None else self.q_side

    @property
    def landmark(self) -> Tensor | None:
        """The landmark l, (B, Hk, Nk), None without gates."""
        return None if self.gates is None else self.k_side

    @property
    def rate(self) -> Tensor | None:
        """Γ·g/T, the logits a query takes off an unprotected key per token of distance, (B, Hq, Nq), or None."""
        return None if self.gate is None else self.problem(0, self.visibility.n_q).rate

    @property
    def adds_bias(self) -> bool:
        """Whether the scheme adds logits of its own, besides those of gates."""
        own = isinstance(self.scheme, FoX | GRAPE)
        return self.scheme is not None and (own or type(self.scheme).bias is not Scheme.bias)

    def problem(self, start: int, stop: int) -> Problem:
        """Queries start … stop − 1 as a problem of the operator; without gates they are zero."""
        part = self.visibility.rows(start, stop)
        q, k, v = self.q[:, :, start:stop], self.k[:, :, : part.n_k], self.v[:, :, : part.n_k]
        dtype = bias_dtype(q.dtype)
        gate, landmark = q.new_zeros(q.shape[:3], dtype=dtype), k.new_zeros(k.shape[:3], dtype=dtype)
        amplitude = gate.new_zeros(q.size(1))
        if self.gates is not None and self.gate is not None and self.landmark is not None:
            gate, landmark = self.gate[:, :, start:stop].to(dtype), self.landmark[:, :, : part.n_k].to(dtype)
            amplitude = self.gates.amplitude.detach().to(dtype)
        return Problem(
            q=q, k=k, v=v, gate=gate, landmark=landmark, amplitude=amplitude,
            context_length=self.context_length, scale=self.scale, visibility=part,
        )  # fmt: skip

    @torch.no_grad()
    def weights(self, start: int, stop: int, head: int | None = None) -> Tensor:
        """The attention of queries start … stop − 1, of all heads or of one, to the keys that any of them may see.

        Returns:
            (B, Hq or 1, stop − start, n) in float32 (float64 beside float64), n ≤ Nk: keys after the last of these
            queries are left out where the order is that of the tensors. A row that sees nothing is zero.
        """
        problem = self.problem(start, stop)
        bias = self._bias(problem.visibility, start, stop)
        if head is not None:
            bias = bias if bias is None or bias.dim() < 3 or bias.size(-3) == 1 else bias.narrow(-3, head, 1)
            problem = _one_head(problem, head)
        logits = reference.logits(problem)
        return reference.visible_softmax(logits if bias is None else logits + bias, problem.visibility.mask())

    def _bias(self, part: Visibility, start: int, stop: int) -> Tensor | None:
        """What the scheme adds to the logits besides the gates, broadcastable to (B, Hq, stop − start, n)."""
        if isinstance(self.scheme, FoX) and self.k_side is not None:
            decay = self.k_side[..., : part.n_k]
            # Counted from the newest key, so that the keys that matter carry small numbers.
            return (decay[..., -1:] - decay).to(bias_dtype(self.q.dtype)).unsqueeze(-2)
        if self.scheme is None:
            return None
        i, j = self.visibility.positions()
        i, j = i[..., start:stop], j[..., : part.n_k]
        if isinstance(self.scheme, GRAPE):
            return rate_bias(*self.scheme.rates(self.q[:, :, start:stop], self.k[:, :, : part.n_k]), i, j)
        return self.scheme.bias(i, j)


def _one_head(problem: Problem, head: int) -> Problem:
    """The problem of one query head."""
    shared = head // (problem.q.size(1) // problem.k.size(1))
    q, gate = (x[:, head : head + 1] for x in (problem.q, problem.gate))
    k, v, landmark = (x[:, shared : shared + 1] for x in (problem.k, problem.v, problem.landmark))
    amplitude = problem.amplitude[head : head + 1]
    return replace(problem, q=q, k=k, v=v, gate=gate, landmark=landmark, amplitude=amplitude)


Receiver = Callable[[int, Attended], None]


@contextmanager
def tap(model: nn.Module, receive: Receiver) -> Iterator[None]:
    """While open, call `receive(layer, attended)` whenever an attention layer of the model has run.

    Layers are counted from 0 in the order of `model.modules()`; layers that transformers runs by itself are left out.
    A method of each layer, or of its scheme, is wrapped, and unwrapped on leaving, so taps may be nested; classes and
    other models are not touched. Meant for models that are not compiled. A cache in pages attends by itself, and is
    not received.

    Raises:
        ValueError: the model has neither :class:`gape.GAPEAttention` layers nor gates of :func:`gape.hf.inject`, or one
            of its layers caps its logits.
    """
    with ExitStack() as stack:
        for index, layer in enumerate(_layers(model)):
            stack.enter_context(_tap_layer(layer, index, receive))
        yield


def attended(model: nn.Module, ids: Tensor, **options: Any) -> list[Attended]:
    """Run the model on integer ids (B, N), with options of its own, and return what each layer attended with, in order.

    The model is a :class:`gape.GPT`, a module with :class:`gape.GAPEAttention` layers, or one of transformers that
    :func:`gape.hf.inject` has put gates into; of a :class:`gape.hf.GapeForCausalLM` its `gpt`. No gradients.

    Raises:
        ValueError: as :func:`tap`, or a cache in the options kept a layer from being received.
    """
    layers: dict[int, Attended] = {}
    with torch.no_grad(), tap(model, layers.__setitem__):
        model(ids, **options)
    if len(layers) < len(_layers(model)):
        expected = "None or a dense one, since one in pages attends by itself"
        raise invalid_argument("cache", options.get("cache"), expected)
    return [layers[index] for index in sorted(layers)]


def _layers(model: nn.Module) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, GAPEAttention) or _is_injected(module)]
    if not layers:
        expected = "one with GAPEAttention layers or gates of gape.hf.inject"
        raise invalid_argument("model", type(model).__name__, expected)
    return layers


def _is_injected(module: nn.Module) -> bool:
    """Whether `gape.hf.inject` changed an attention module; does not import transformers."""
    return hasattr(module, "gape_wiring")


@contextmanager
def _tap_layer(layer: Any, index: int, receive: Receiver) -> Iterator[None]:
    """While open, `receive` gets what a layer attended with."""
    if _is_injected(layer):
        if layer.softcap is not None:
            raise invalid_argument("model", type(layer).__name__, "layers that do not cap their logits")
        with _replace_attribute(layer, "attend", _wrap_layer(layer, index, receive)):
            yield
        return
    with (
        _replace_attribute(layer, "stepwise", True),
        _replace_attribute(layer.scheme, "attend", _wrap_scheme(layer.scheme, index, receive)),
    ):
        yield


@contextmanager
def _replace_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """While open, an attribute of the instance hides what the name meant before."""
    own = vars(module)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)


def _wrap_scheme(scheme: Scheme, index: int, receive: Receiver) -> Callable[..., Tensor]:
    attend = scheme.attend

    def wrapped(
        q: Tensor, k: Tensor, v: Tensor, q_side: Tensor | None, k_side: Tensor | None, **options: Any
    ) -> Tensor:
        y = attend(q, k, v, q_side, k_side, **options)
        visible = {name: value for name, value in options.items() if name not in ("scale", "impl", "eps")}
        record = Attended(
            scheme=scheme, q=q.detach(), k=k.detach(), v=v.detach(), q_side=_detach(q_side),
            k_side=_detach(k_side), scale=options["scale"], visibility=inputs.visibility(q, k, **visible),
        )  # fmt: skip
        if isinstance(scheme, Gated):
            record = replace(record, gates=scheme.gates, context_length=scheme.context_length)
        receive(index, record)
        return y

    return wrapped


def _wrap_layer(layer: Any, index: int, receive: Receiver) -> Callable[..., Any]:
    """The method `attend` of an injected layer, which also gives `receive` its arguments."""
    from gape.hf import masks  # noqa: PLC0415

    attend, wiring = layer.attend, layer.gape_wiring

    def wrapped(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, landmark: Tensor | None, *,
        q_positions: Tensor, k_positions: Tensor | None, mask: Tensor | None,
    ) -> Any:  # fmt: skip
        y = attend(q, k, v, gate, landmark, q_positions=q_positions, k_positions=k_positions, mask=mask)
        mask = None if mask is None else masks.as_bool(masks.first_keys(mask, k.size(2)))
        in_order = mask is not None and masks.is_next_chunk(q_positions, k_positions, mask)
        visible = {} if in_order else masks.visibility(q_positions, k_positions, mask, q.size(2))
        record = Attended(
            scheme=wiring.scheme, q=q.detach(), k=k.detach(), v=v.detach(), q_side=_detach(gate),
            k_side=_detach(landmark), scale=wiring.family.layout.scale(layer),
            visibility=inputs.visibility(q, k, **visible), gates=layer.gates,
            context_length=float(wiring.context_length),
        )  # fmt: skip
        receive(index, record)
        return y

    return wrapped


def _detach(side: Tensor | None) -> Tensor | None:
    return None if side is None else side.detach()
