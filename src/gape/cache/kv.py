"""What a decoding layer remembers: keys, values, what the scheme keeps per key, positions and documents."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gape.cache.forgetting import ForgettingLayer
from gape.cache.forgetting_limits import least_rates
from gape.cache.forgetting_pace import Pace
from gape.cache.forgetting_shelf import Order
from gape.cache.slots import Block, Held, Slot
from gape.utils.validation import described, finite, flag, invalid_argument, whole

if TYPE_CHECKING:
    from gape.models.gpt import GPT

#: What :class:`ForgettingCache` may go by.
BOUNDS = ("weights", "queries", "gates")


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Everything cached so far, newest last.

    Attributes:
        k, v: (B, Hk, N, D) and (B, Hk, N, Dv), k as it enters the dot product, with the coordinates that carry a
            bias where the layer reserves them.
        side: (B, H, N), the scheme's number per key (landmark, cumulative decay), or None.
        positions: int64 (B, N); None while every token came in order without explicit positions.
        documents: integer (B, N), or None.
    """

    k: Tensor
    v: Tensor
    side: Tensor | None
    positions: Tensor | None
    documents: Tensor | None


class KVCache:
    """The cache of one attention layer, for inference: what is stored carries no gradient.

    Room grows by doubling, so appending a token costs no copy of the rest on average.

    Args:
        capacity: tokens to make room for at once; past that, room grows as ever.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._stores: dict[str, _Store] = {}
        self._capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered, room to grow left out."""
        return sum(store.view(self.length).nbytes for store in self._stores.values())

    @property
    def side(self) -> Tensor | None:
        """The scheme's number per cached key, (B, H, N), or None."""
        return self._view("side")

    @property
    def spare(self) -> int:
        """Tokens that may come before anything moves."""
        return self._stores["k"].room - self.length if self._stores else 0

    @property
    def unrecordable(self) -> str | None:
        """Why a token cannot be added by a recorded graph; None where it can."""
        more = sorted(self._stores.keys() - {"k", "v"})
        return f"the cache holds {more[0]} beside keys and values" if more else None

    def held(self) -> Held:
        """Keys and values as a recorded graph writes and reads them."""
        k, v = self._stores["k"].buffer, self._stores["v"].buffer
        return Held([Block(0, k, v, self.length)], Order())

    def count(self) -> None:
        """Count a token that was written to what is held."""
        self.length += 1

    def append(
        self,
        k: Tensor,
        v: Tensor,
        side: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Remembered:
        """Add n tokens and return all of them.

        Args:
            k, v, side: (B, Hk, n, D), (B, Hk, n, Dv) and (B, H, n) or None.
            positions: (n,) or (B, n), or None to go on counting from the number of tokens cached.
            documents: (B, n) or None.

        Raises:
            ValueError: the tokens do not go with the cached ones (another batch, width or dtype, documents or a
                side on one part only, positions left out after explicit ones).
        """
        batch, added = k.size(0), k.size(2)
        if positions is None and "positions" in self._stores:
            raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
        stores = dict(self._stores)
        if positions is not None:
            positions = positions.to(torch.int64).expand(batch, added)
            if self.length and "positions" not in stores:
                counted = torch.arange(self.length, device=k.device).expand(batch, -1)
                stores["positions"] = _Store(counted, self._capacity)
                stores["positions"].write(0, counted)
        parts = {"k": k, "v": v, "side": side, "positions": positions, "documents": documents}
        for name, part in parts.items():
            self._check(name, part, stores.get(name))
        for name, part in parts.items():
            if part is not None:
                if name not in stores:
                    stores[name] = _Store(part, self._capacity)
                stores[name].write(self.length, part)
        # Nothing counts before this: a call that breaks off above leaves the cache as it was.
        self._stores, self.length = stores, self.length + added
        return Remembered(
            k=stores["k"].view(self.length),
            v=stores["v"].view(self.length),
            side=self._view("side"),
            positions=self._view("positions"),
            documents=self._view("documents"),
        )

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what is cached.
        """
        if whole("length", length, 0) > self.length:
            raise invalid_argument("length", length, f"a whole number from 0 to {self.length}, the tokens cached")
        if length == 0:
            # An empty cache goes with anything: other sizes, explicit positions or none.
            self._stores = {}
        self.length = length

    def _view(self, name: str) -> Tensor | None:
        store = self._stores.get(name)
        return None if store is None else store.view(self.length)

    def _check(self, name: str, part: Tensor | None, store: _Store | None) -> None:
        if self.length and (store is None) != (part is None):
            came = "given" if part is not None else "left out"
            raise ValueError(f"{name}: {came}, expected as for the {self.length} tokens already cached")
        if store is not None and part is not None and not store.fits(part):
            raise invalid_argument(name, part, f"to go on from {described(store.view(self.length))}")


#: The cache of one layer, of any kind.
LayerCache = KVCache | ForgettingLayer | Slot


class ModelCache:
    """The caches of a model's layers, first layer first. Tokens in them are those of one model.

    Args:
        n_layer: number of layers.
        capacity: tokens to make room for at once, as in :class:`KVCache`.
    """

    #: The model whose tokens are cached. Not held: a copy of the cache belongs to it as well.
    _model: weakref.ref[GPT] | None = None

    def __init__(self, n_layer: int, capacity: int = 0) -> None:
        self.layers: Sequence[KVCache | ForgettingLayer] = [KVCache(capacity) for _ in range(n_layer)]

    def __getstate__(self) -> dict[str, Any]:
        # A reference to a model cannot be pickled; who unpickles a cache says which model it is for.
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelCache:
        made = copy(self)
        made.__dict__ = deepcopy(self.__getstate__(), memo)
        made._model = self._model
        return made

    @classmethod
    def of(cls, layers: Sequence[KVCache | ForgettingLayer]) -> ModelCache:
        """The caches of layers that somebody else has, taken together."""
        made = cls(0)
        made.layers = layers
        return made

    def enter(self, model: GPT) -> None:
        """Refuse a model other than the one whose tokens are cached; an empty cache takes any.

        Raises:
            ValueError: the model is another one, or the layers hold different numbers of tokens.
        """
        if self.length and self._model is not None and self._model() is not model:
            raise ValueError(f"cache: got {self.length} tokens of another model, expected an empty one or its own")
        self._model = weakref.ref(model)

    @property
    def length(self) -> int:
        """Tokens cached.

        Raises:
            ValueError: the layers hold different numbers, since an earlier call did not come to its end.
        """
        lengths = sorted({layer.length for layer in self.layers})
        if len(lengths) != 1:
            raise ValueError(
                f"cache: layers hold from {lengths[0]} to {lengths[-1]} tokens, expected as many in each; "
                f"a call broke off, truncate({lengths[0]}) makes the cache whole again (crop in caches of transformers)"
            )
        return lengths[0]

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered, room to grow left out."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def spare(self) -> int:
        """Tokens that may come, one by one, before anything moves."""
        return min(layer.spare for layer in self.layers)

    def count(self) -> None:
        """Count a token that a recorded graph has written."""
        for layer in self.layers:
            layer.count()

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what is cached.
        """
        for layer in self.layers:
            layer.truncate(length)


class Forgets:
    """What a cache has to say of its layers that forget, all together; :attr:`forgetting` says which they are."""

    @property
    def forgetting(self) -> Sequence[ForgettingLayer]:
        """The layers that forget."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop now what can go. Else a prompt is held in full until the next tokens come."""
        for layer in self.forgetting:
            layer.forget()
        # The first of them did not know yet how long it is to the next look.
        for layer in self.forgetting:
            layer.make_room()

    @property
    def due(self) -> int:
        """Tokens that may come before layers look through their keys again."""
        return min(layer.due for layer in self.forgetting)

    @property
    def looks(self) -> int:
        """How many times a layer has looked through its keys."""
        return sum(layer.looks for layer in self.forgetting)

    @property
    def beyond(self) -> int:
        """Queries, counted for each layer and head, that may have missed more than eps; only "queries" counts any."""
        return sum(layer.beyond for layer in self.forgetting)

    @property
    def kept(self) -> list[list[int]]:
        """Keys that each layer that forgets and key head holds, of every sample."""
        return [layer.kept for layer in self.forgetting]


class ForgettingCache(Forgets, ModelCache):
    """The caches of a GPT that drop keys for good once no future query can give them weight: `docs/results/proofs.md`.

    Every query of every layer and head attends within eps, in total variation, of what it would with all keys. Made
    for one model and its weights as they are; for any batch size, chunked prefill and left padding. Positions may
    not go back, and there are no masks.

    Args:
        model: the model, whose scheme has gates with a floor.
        eps: the attention that a query may miss, above 0 and below 1.
        bounds: what is known of future queries. "weights" bounds them by the weights and is proven for all inputs.
            "queries" takes the longest query so far and an eighth more, with the floor as it is; a query that may
            have missed more than eps is counted in `beyond`, and for all others the promise holds. "gates" also
            takes the mean rate so far in place of the floor: **unproven**, nothing is promised.
        partial: allow heads without a floor, whose keys are all kept.

    Raises:
        ValueError: an argument is out of range, the scheme has no gates, or a head has no floor (or none has, under
            `partial`); names layer and head.
    """

    def __init__(self, model: GPT, *, eps: float, bounds: str = "weights", partial: bool = False) -> None:
        checked_eps(eps)
        if bounds not in BOUNDS:
            raise invalid_argument("bounds", bounds, f"one of {BOUNDS}")
        if bounds != "gates":
            _refuse_without_floors(model, partial=flag("partial", partial))
        pace = Pace()
        self.layers: Sequence[ForgettingLayer] = [
            ForgettingLayer(block.attention, block.attention_norm, eps=eps, bounds=bounds, pace=pace)
            for block in model.blocks()
        ]

    def fresh(self, eps: float) -> ForgettingCache:
        """An empty cache of the same model and bounds. Limits are not worked out again: weights have to be the same.

        Raises:
            ValueError: eps is out of range.
        """
        made, pace = copy(self), Pace()
        made.layers = [layer.fresh(checked_eps(eps), pace) for layer in self.layers]
        return made

    @property
    def forgetting(self) -> Sequence[ForgettingLayer]:
        """The layers that forget: all."""
        return self.layers

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what is cached, or keys were dropped that a token there could see.
        """
        for layer in self.layers:
            layer.check_length(length)
        super().truncate(length)


def piece(length: int, chunk: int) -> int:
    """Tokens of a text that go through a forgetting cache at once, where `chunk` may go through the model.

    Nothing is dropped before all of a piece has been read, so a text of one chunk comes in eighths.
    """
    return chunk if length > chunk else max(1, length // 8)


def checked_eps(eps: float) -> float:
    """The attention that a query may miss, if it can be that.

    Raises:
        ValueError: it cannot.
    """
    expected = "a number above 0 and below 1"
    if not 0 < finite("eps", eps, expected) < 1:
        raise invalid_argument("eps", eps, expected)
    return eps


def _refuse_without_floors(model: GPT, *, partial: bool) -> None:
    rates = [least_rates(block.attention) for block in model.blocks()]
    bare = [(layer, head) for layer, each in enumerate(rates) for head in torch.nonzero(each <= 0).flatten().tolist()]
    if bare and not (partial and any(bool((each > 0).any()) for each in rates)):
        hint = "expected gate_floor above 0 in some head" if partial else "expected gate_floor above 0, or partial=True"
        raise ValueError(f"model: no floor in layer {bare[0][0]}, head {bare[0][1]}, where nothing ever fades; {hint}")


class _Store:
    """A tensor that grows along the dimension of its tokens: the third, or the second of (B, N).

    Args:
        like: what is to be stored, for its sizes, dtype and device.
        capacity: tokens to make room for.
    """

    def __init__(self, like: Tensor, capacity: int) -> None:
        self._dim = 1 if like.dim() == 2 else 2
        self.buffer = self._empty(like, max(capacity, like.size(self._dim)))

    @property
    def room(self) -> int:
        return self.buffer.size(self._dim)

    def view(self, length: int) -> Tensor:
        return self.buffer.narrow(self._dim, 0, length)

    def fits(self, part: Tensor) -> bool:
        ours, theirs = list(self.buffer.shape), list(part.shape)
        ours[self._dim] = theirs[self._dim] = 0
        return ours == theirs and self.buffer.dtype == part.dtype

    def write(self, start: int, part: Tensor) -> None:
        stop, room = start + part.size(self._dim), self.room
        if stop > room:
            grown = self._empty(self.buffer, max(stop, 2 * room))
            grown.narrow(self._dim, 0, start).copy_(self.view(start))
            self.buffer = grown
        self.buffer.narrow(self._dim, start, stop - start).copy_(part.detach())

    def _empty(self, like: Tensor, size: int) -> Tensor:
        shape = list(like.shape)
        shape[self._dim] = size
        # Room made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            return like.new_empty(shape)
