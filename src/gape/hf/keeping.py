"""A cache for models of `transformers` with gates that keeps everything, in keys that carry the bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gape.cache.kv import KVCache
from gape.hf.attending import AttendingCache, AttendingLayer, in_working_precision
from gape.hf.forgetting import places_of
from gape.ops import gated_attention
from gape.ops.carried import carried_attention, carried_form, carry, uncarried
from gape.utils.validation import invalid_argument, whole

#: Names under which keys carry the bias.
CARRYING = "gape, gape_split or sdpa"


class KeepingCacheLayer(AttendingLayer):
    """The cache of one layer with gates, in a :class:`gape.cache.kv.KVCache`."""

    held: KVCache

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, positions: Tensor, real: Tensor | None
    ) -> Tensor:
        """Add tokens and attend to all, as :meth:`gape.hf.attending.AttendingLayer.attend` says.

        Raises:
            ValueError: the implementation of attention is one that wants landmarks beside the keys.
        """
        seat = self.seat
        refused = _refused([seat], k)
        if refused is not None:
            raise refused
        q, k, v = in_working_precision(q, k, v)
        where, told, documents = self._where(positions, real, k.size(0))
        form: dict[str, Any] = {"form": "split", "context_length": seat.context_length}
        kept = self.held.append(carry(k, landmark, where, width=seat.head_dim, **form), v, None, told, documents)
        seen: dict[str, Any] = {
            "q_positions": told, "q_documents": documents,
            "k_positions": kept.positions, "k_documents": kept.documents,
        }  # fmt: skip
        amplitude, how = seat.gates.amplitude, seat.how(q.size(2))
        if "eps" not in how:
            return carried_attention(q, kept.k, kept.v, gate, amplitude, where, scale=seat.scale, **form, **seen)
        content, marks = uncarried(kept.k, seat.content_dim)
        told_of = {"context_length": seat.context_length, "scale": seat.scale, **how, **seen}
        return gated_attention(q, content, kept.v, gate, marks, amplitude, **told_of)


class KeepingCache(AttendingCache):
    """The caches of a model with gates in every layer that keep all keys, in room that is made ahead.

    What a :class:`gape.hf.ForgettingCache` with `carried` is to be compared with: single tokens attend alike, and can
    be recorded (:class:`gape.hf.Captured`). Batches, left padding and chunked prefill work, beams do not.

    Args:
        model: a :class:`gape.hf.GapeForCausalLM`, or a model that :func:`gape.hf.inject` was called on.
        capacity: tokens to make room for at once; past that, room doubles.

    Raises:
        ValueError: a layer has no gates, caps its logits or has a window, and names the layer; or the implementation of
            attention is one under which keys do not carry the bias.
    """

    def __init__(self, model: nn.Module, capacity: int = 0) -> None:
        whole("capacity", capacity, 0)
        seats = [seat for seat, _ in places_of(model, limited=False, carried=True)]
        refused = _refused(seats, next(model.parameters()))
        if refused is not None:
            raise refused
        super().__init__(layers=[KeepingCacheLayer(seat, KVCache(capacity)) for seat in seats])

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered, room to grow left out."""
        return self.together.nbytes


def can_keep(model: nn.Module) -> bool:
    """Whether a model can have a :class:`KeepingCache`: all layers have gates, and its attention a use for such keys.

    Raises:
        ValueError: no layer has gates, or one that has caps its logits or has a window.
    """
    seats = [seat for seat, _ in places_of(model, limited=False, carried=True)]
    return _refused(seats, next(model.parameters())) is None


def carries(seat: Any, like: Tensor) -> bool:
    """Whether cached keys like `like` carry the bias in six coordinates, as their layer is told now."""
    return carried_form(seat.impl, seat.reserve, like) == "split"


def _refused(seats: list[Any], like: Tensor) -> ValueError | None:
    """Why layers cannot keep keys like `like` that carry the bias; None where they can."""
    bare = next((number for number, seat in enumerate(seats) if seat is None or seat.gates is None), None)
    if bare is not None:
        return ValueError(f"model: layer {bare} has no gates, expected some in every layer")
    beside = next((seat.impl for seat in seats if not carries(seat, like)), None)
    if beside is None:
        return None
    return invalid_argument("attn_implementation", beside, f"{CARRYING}, under which keys carry the bias")
