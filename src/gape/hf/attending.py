"""Caches of `transformers` whose layers attend themselves, so that keys and values are never handed out.

Shapes: B batch, Hq / Hk query / key heads, n new tokens, D and Dv widths of keys and values.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gape.cache.kv import ModelCache
from gape.hf.families import TRANSFORMERS_4
from gape.hf.masks import memoized, real_tokens
from gape.models.loss import working_dtype


class Where(NamedTuple):
    """Where tokens stand.

    Attributes:
        positions: integer (n,) or (B, n).
        told: the same; None where they go on counting from what is cached.
        documents: (B, n), 0 for pads; None without pads.
    """

    positions: Tensor
    told: Tensor | None
    documents: Tensor | None


class AttendingLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer with gates. Attention goes through :meth:`attend`.

    Args:
        seat: the layer as its cache sees it: :class:`gape.cache.forgetting_limits.Attends`.
        held: what is remembered.
    """

    is_croppable = True

    def __init__(self, seat: Any, held: Any) -> None:
        super().__init__()
        self.seat, self.held = seat, held

    def __deepcopy__(self, memo: dict[int, Any]) -> AttendingLayer:
        """A copy of what is held; it serves the same layer of the same model."""
        memo[id(self.seat)] = self.seat
        made = copy(self)
        made.held = deepcopy(self.held, memo)
        return made

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, positions: Tensor, real: Tensor | None
    ) -> Tensor:
        """Add tokens and attend to everything kept.

        Args:
            q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), rotated.
            gate, landmark: (B, Hq, n) and (B, Hk, n).
            positions: integer (n,) or (B, n).
            real: bool (B, n), False for pads; None where there are none.

        Returns:
            (B, Hq, n, Dv).
        """
        raise NotImplementedError

    def attend_projected(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        """The same with q and k as projected, where what comes between is done in one launch.

        Args:
            q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), not rotated.
            positions: integer (n,) or (B, n).
            embeddings: cosines and sines of the model's own rotation, if it handed any.

        Returns:
            (B, Hq, n, Dv); None, and nothing done, where gates and rotation have to come first.
        """
        return None

    def _where(self, positions: Tensor, real: Tensor | None, batch: int) -> Where:
        """Where tokens of a batch stand that come next."""
        if real is None:
            return Where(positions, None if self._counted(positions) else positions, None)
        # Pads stand before everything; a document of their own hides them.
        where = torch.where(real, positions, 0).expand(batch, -1)
        return Where(where, where, real.to(torch.uint8))

    def _counted(self, positions: Tensor) -> bool:
        """Whether positions go on from what came before: then nothing but their number has to be known."""
        if torch.compiler.is_compiling():
            # A compiled graph may not look.
            return False
        return bool(self.held.length == memoized(positions, "_gape_counted_from", lambda: _counted_from(positions)))

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: room is made as tokens come."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: layers that use this cache attend through it.

        Raises:
            ValueError: always.
        """
        raise _other_model(type(self).__name__.removesuffix("Layer"))

    def get_seq_length(self) -> int:
        """Tokens that have come, kept or not."""
        return int(self.held.length)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Keys that a mask speaks of, and the first of them: all that have come, dropped or not."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.held.length + new, 0

    def get_max_length(self) -> int:
        """−1: there is no limit."""
        return -1

    #: The name of it in transformers 4.
    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, told as a number below 0; one above 0 is how many of the first stay.

        0 removes nothing, but in transformers 4, where it is how many stay.

        Raises:
            ValueError: keys were dropped that a token there could see.
        """
        self.held.truncate(self.cropped(tokens_to_remove))

    def cropped(self, tokens_to_remove: int) -> int:
        """Tokens that are left by :meth:`crop`."""
        return _left(int(self.held.length), tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.held.truncate(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: beams would share keys that each of them judges, or that a recorded graph writes to.

        Raises:
            ValueError: always.
        """
        name = type(self).__name__.removesuffix("Layer")
        raise ValueError(f"num_beams: got beams, expected 1, since a {name} cannot be reordered")


class AttendingCache(Cache):  # type: ignore[misc]
    """The caches of a model whose layers with gates attend through them."""

    def layer(self, number: int, gates: Any) -> AttendingLayer:
        """The cache of a layer with these gates.

        Raises:
            ValueError: it was made for another model.
        """
        layer = self.layers[number] if number < len(self.layers) else None
        if not isinstance(layer, AttendingLayer) or layer.seat.gates is not gates:
            raise _other_model(type(self).__name__)
        return layer

    def real(self, mask: Tensor | None, n: int, batch: int) -> Tensor | None:
        """Which of the last n tokens are no pads, by the mask of `transformers`: :func:`gape.hf.masks.real_tokens`."""
        return real_tokens(mask, n, batch)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget some of the last tokens, as :meth:`AttendingLayer.crop` says.

        Raises:
            ValueError: keys were dropped that a token there could see.
        """
        for layer in self.layers:
            if isinstance(layer, AttendingLayer):
                layer.crop(tokens_to_remove)
                continue
            length = int(layer.get_seq_length())
            removed = _left(length, tokens_to_remove) - length
            if removed:
                # Layers of transformers understand a number below 0 in every version.
                layer.crop(removed)

    @property
    def together(self) -> ModelCache:
        """What the layers with gates hold, as a recorded graph writes to it."""
        return ModelCache.of([layer.held for layer in self.layers if isinstance(layer, AttendingLayer)])

    @property
    def spare(self) -> int:
        """Tokens that may come, one by one, before anything moves or keys are looked through."""
        return self.together.spare


def _other_model(name: str) -> ValueError:
    return ValueError(f"past_key_values: a {name} serves the model it was made for, and no other")


def _left(length: int, tokens_to_remove: int) -> int:
    """Of so many tokens those that :meth:`AttendingLayer.crop` leaves."""
    if tokens_to_remove < 0:
        return length + tokens_to_remove
    return length if tokens_to_remove == 0 and not TRANSFORMERS_4 else min(length, tokens_to_remove)


def in_working_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as attention will multiply them: what is rounded later would take the bias with it."""
    return tuple(x.to(working_dtype(x)) for x in tensors)


def _counted_from(positions: Tensor) -> int | None:
    """The first of positions (n,) or (B, n) that are the same for all samples and rise by one; None for others."""
    if not positions.numel():
        return None
    first = positions.flatten()[0]
    counted = first + torch.arange(positions.size(-1), device=positions.device)
    # Asked together, for the device has to be waited for.
    begin, so = torch.stack([first, (positions == counted).all()]).tolist()
    return int(begin) if so else None
