"""Decoding of models of `transformers` by a recorded graph: :mod:`gape.models.cuda_graphs` has how that is done.

A forward pass of `transformers` is recorded as it is. What would make it wait for the host, or do something else for
the next token, is told ahead: the position, which lies on the device and is counted up there, a mask that hides
nothing, and a cache whose sizes never change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gape.cache.slots import Slots
from gape.hf.attending import AttendingCache, AttendingLayer, in_working_precision
from gape.hf.attention import first_row
from gape.hf.forgetting import ForgettingCache
from gape.hf.gates import RetrofitGates
from gape.hf.keeping import CARRYING, KeepingCache, carries
from gape.hf.language import LanguageModel
from gape.hf.modeling_gape import GapeForCausalLM
from gape.models.attention import GAPEAttention
from gape.models.cuda_graphs import Recorder, unfit, unwritable, wrong_place
from gape.models.loss import working_dtype
from gape.ops.carried import Rows, carried_queries, carried_rows, carry, steps
from gape.ops.decode_prologue import Step
from gape.positions import Gated
from gape.positions.gated import step_under
from gape.positions.rotary import NoPE, made_in_capture
from gape.utils.validation import invalid_argument

#: Families whose forward pass is known to launch the same for every token. Mixtures of experts do not.
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")

#: What the names of rotations have in them that look at positions to choose their frequencies.
LOOKING = ("dynamic", "longrope")


class SlotLayer(AttendingLayer):
    """A layer of which the held :class:`gape.cache.slots.Slot` takes single tokens, each the newest."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, positions: Tensor, real: Tensor | None
    ) -> Tensor:
        """Add a token and attend to everything held, as :meth:`gape.hf.attending.AttendingLayer.attend` says."""
        seat = self.seat
        q, k, v = in_working_precision(q, k, v)
        told: dict[str, Any] = {"form": "split", "context_length": seat.context_length, "width": seat.head_dim}
        keys = carry(k, landmark, positions, **told)
        queries = carried_queries(q, gate, seat.gates.amplitude, positions, scale=seat.scale, **told)
        out: Tensor = self.held.attend(queries, keys, v, scale=seat.scale)
        return out

    def attend_projected(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        """Add a token as projected, as :meth:`gape.hf.attending.AttendingLayer.attend_projected` says."""
        rows = rows_of(self.seat, q, k, positions, embeddings)
        if rows is None:
            return None
        (v,) = in_working_precision(v)
        out: Tensor = self.held.attend(rows.queries, rows.keys, v, scale=self.seat.scale)
        return out


class SlotCache(AttendingCache):
    """A cache as a recorded forward pass finds it.

    Args:
        seats: the layers as their caches see them.
        slots: what they hold.
    """

    def __init__(self, seats: list[Any], slots: Slots) -> None:
        super().__init__(layers=[SlotLayer(*each) for each in zip(seats, slots.layers, strict=True)])

    def layer(self, number: int, gates: Any) -> AttendingLayer:
        """The slot of a layer: the cache that it was made of is that of the model."""
        layer: AttendingLayer = self.layers[number]
        return layer

    def real(self, mask: Tensor | None, n: int, batch: int) -> None:
        """None: caches with pads are not recorded, and a mask may not be looked at."""
        return


def why_not(model: Any, cache: Any) -> str | None:
    """Why the next tokens cannot come from a recorded graph; None where they can.

    Args:
        model: as :class:`Captured` takes it.
        cache: of any kind.
    """
    model = _bare(model)
    return (
        _other_cache(cache) or wrong_place(model.get_input_embeddings().weight) or _other_family(model)
        or unfit(list(model.modules()), lambda module: _known(model, module)) or _replaced(model)
        or _uncarried(cache, model.get_input_embeddings().weight) or unwritable(cache.together)
    )  # fmt: skip


class Captured(Recorder):
    """A model of `transformers` with gates and its cache, for tokens one at a time.

    The answers are the model's, up to the order of sums. Prompts go to the model, before or in between; so does
    everything that changes the cache in another way. Weights may be written to and moved, but modules and parameters
    not be replaced by others. Where no graph can be recorded (:func:`why_not` says why) the model answers.

    Args:
        model: one that :func:`gape.hf.inject` has put gates into, a :class:`gape.hf.GapeForCausalLM`, or either in a
            :class:`gape.hf.LanguageModel`. In eval mode, on a GPU, in half precision or under autocast.
        cache: a :class:`gape.hf.KeepingCache` or a :class:`gape.hf.ForgettingCache` of the model; it may hold tokens.

    Raises:
        ValueError: the cache is of another kind or another model, or a layer has no gates.
    """

    def __init__(self, model: Any, cache: KeepingCache | ForgettingCache) -> None:
        reason = _other_cache(cache)
        if reason is not None:
            raise ValueError(f"cache: {reason}")
        self.model, self.past_key_values = _bare(model), cache
        seats = [layer.seat for layer in cache.layers]
        if not {seat.gates for seat in seats} <= set(self.model.modules()):
            raise invalid_argument("cache", cache, "one that was made for the model")
        self._seats, self._reader = seats, LanguageModel(self.model)
        super().__init__(self.model, cache.together)

    def _why_not(self) -> str | None:
        return why_not(self.model, self.past_key_values)

    def _launched(self, ids: Tensor) -> Tensor:
        return self._reader(ids, cache=self.past_key_values, logits_to_keep=1).logits  # type: ignore[no-any-return]

    def _replayed(self, ids: Tensor, where: Tensor, slots: Slots) -> Tensor:
        told: dict[str, Any] = {"position_ids": where, "past_key_values": SlotCache(self._seats, slots)}
        if isinstance(self.model, GapeForCausalLM):
            x = self.model.states(ids, use_cache=True, **told).last_hidden_state
        else:
            told["position_ids"] = where[None]
            # What layers make of it, and share angles by.
            made_in_capture(first_row(told["position_ids"]))
            # With four dimensions it is taken as it is, and none is made.
            seen = torch.ones(ids.size(0), 1, 1, 1, dtype=torch.bool, device=ids.device)
            x = self.model.base_model(input_ids=ids, attention_mask=seen, use_cache=True, **told).last_hidden_state
        return self._reader.logits(x)

    def _told_otherwise(self) -> bool:
        return _uncarried(self.past_key_values, self.model.get_input_embeddings().weight) is not None


def _bare(model: Any) -> Any:
    return model.model if isinstance(model, LanguageModel) else model


def _other_cache(cache: Any) -> str | None:
    if not isinstance(cache, KeepingCache | ForgettingCache):
        return f"got a {type(cache).__name__}, expected a KeepingCache or a ForgettingCache"
    bare = next((number for number, layer in enumerate(cache.layers) if not isinstance(layer, AttendingLayer)), None)
    return None if bare is None else f"layer {bare} has no gates, and keeps its keys as transformers does"


def _other_family(model: Any) -> str | None:
    if isinstance(model, GapeForCausalLM):
        return None
    kind = str(model.config.model_type).removeprefix("gape_")
    if kind not in FAMILIES:
        return f"models of type {kind} are not recorded, only {', '.join(FAMILIES)}"
    kinds = [str(getattr(module, "rope_type", None)) for module in model.modules()]
    looking = next((rotation for rotation in kinds if any(word in rotation for word in LOOKING)), None)
    return None if looking is None else f"rotations of type {looking} look at positions"


def _known(model: Any, module: nn.Module) -> bool:
    """Whether a module is of torch, of ours or of the model's family: others, such as adapters, may wait."""
    kind = str(model.config.model_type).removeprefix("gape_")
    homes = ("gape.", "torch.nn.", "transformers.activations", f"transformers.models.{kind}.")
    return type(module).__module__.startswith(homes)


def _replaced(model: Any) -> str | None:
    """What was put into the modules of a model that nobody can look into; None where nothing was."""
    if any("forward" in vars(module) for module in model.modules()):
        return "the forward of a module was replaced"
    kinds = {type(weight) for weight in model.parameters()} - {nn.Parameter}
    if kinds:
        return f"nobody knows whether a {kinds.pop().__qualname__} can be recorded"
    # What lies elsewhere, such as frequencies, would be copied within the graph.
    places = {str(x.device) for x in (*model.parameters(), *model.buffers())}
    return None if len(places) == 1 else f"the model is on {' and '.join(sorted(places))}"


def _uncarried(cache: Any, like: Tensor) -> str | None:
    if all(carries(layer.seat, like) for layer in cache.layers):
        return None
    return f"keys do not carry the bias: they do with carried=True, under {CARRYING}"


#: Families whose own rotation turns pairs (x_m, x_{m+D/2}) by cosines and sines whose halves are alike.
HALVES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")


def rows_of(
    seat: Any, q: Tensor, k: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None
) -> Rows | None:
    """Queries and keys with their share of the bias; None, and nothing done, where one launch cannot make them.

    Args:
        seat: the layer as its cache sees it.
        q, k: (B, Hq, N, D) and (B, Hk, N, D) as projected, and normed where the model norms them.
        positions: integer (N,) or (B, N).
        embeddings: cosines and sines that the model handed to the layer, (1 or B, N, D).
    """
    dtype = working_dtype(q)
    if not steps(q, k, dtype):
        return None
    ours = isinstance(seat, GAPEAttention)
    step = _of_ours(seat, positions) if ours else _of_injected(seat.layer, q, positions, embeddings)
    if step is None:
        return None
    return carried_rows(q, k, step, width=seat.head_dim, scale=seat.scale, dtype=dtype)


def _of_ours(attention: GAPEAttention, positions: Tensor) -> Step | None:
    listened = attention.stepwise or attention.keep_landmark
    return attention.scheme.step(positions) if isinstance(attention.scheme, Gated) and not listened else None


def _of_injected(layer: Any, q: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None) -> Step | None:
    gates, wiring = layer.gape, layer.gape_wiring
    if type(gates) is not RetrofitGates:
        return None
    angles, scheme = None, wiring.scheme
    if not layer.without_rotation and not isinstance(scheme, NoPE):
        angles = _own_angles(wiring, q, embeddings) if scheme is None else scheme.angles(positions)
        if angles is None:
            return None
    return step_under(gates, positions, angles, context_length=wiring.context_length, strength=gates.strength)


def _own_angles(wiring: Any, q: Tensor, embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """The model's own cosines and sines as the kernel reads them; None where it cannot, or would turn otherwise."""
    if wiring.rotation is None or embeddings is None or wiring.family.model_type not in HALVES:
        return None
    cos, sin = embeddings
    batch, _, n, width = q.shape
    # A part of each head is turned where they are narrower.
    if cos.shape not in ((1, n, width), (batch, n, width)) or cos.stride(-1) != 1:
        return None
    if (cos.shape, cos.stride(), cos.dtype) != (sin.shape, sin.stride(), sin.dtype):
        return None
    # Wider ones than q would have made q as wide.
    if working_dtype(cos) != working_dtype(q):
        return None
    return (cos[0], sin[0]) if cos.size(0) == 1 else (cos, sin)
