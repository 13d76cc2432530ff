"""Rows of keys that lie side by side: the key heads of a layer that hold equally many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

#: Columns that may come before keys are looked at: so many, or this part of what is held where that is more.
STRIDE, PART = 32, 16

#: The part of what a layer holds that another shelf has to save.
SAVED = 8


def slack(width: int) -> int:
    """Columns that may come before the keys of heads that hold `width` are looked at again."""
    return max(STRIDE, width // PART)


class Shelf:
    """Tensors (B, H, width, …) of some key heads, newest column last, with room for more.

    Beside what it is told to store a shelf has the int32 position of every column.

    Args:
        heads: which key heads of the layer, ascending, one for each row of a sample.
        like: tensors (B, any, any, …) of what is to be stored, for their sizes, dtypes and devices.
        width: columns that count.
        room: columns to make room for beyond them.
        counted: the position of the next column, where tokens are counted: positions of columns to come are then
            written once and for all. None where positions come with the tokens.
    """

    def __init__(
        self, heads: list[int], like: dict[str, Tensor], *, width: int = 0, room: int, counted: int | None
    ) -> None:
        self.heads, self.width = heads, width
        #: The first of its heads among all of the layer, in the order in which they lie.
        self.start = 0
        sizes = (like["k"].size(0), len(heads), width + room)
        device = like["k"].device
        # Room made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._buffers = {name: x.new_empty(*sizes, *x.shape[3:]) for name, x in like.items()}
            self._buffers["positions"] = torch.empty(sizes, dtype=torch.int32, device=device)
        if counted is not None:
            self._buffers["positions"][:, :, width:] = torch.arange(counted, counted + room, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room included."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def room(self) -> int:
        """Columns there are, used or not."""
        return self._buffers["k"].size(2)

    def buffer(self, name: str) -> Tensor:
        """One of the tensors with its room, (B, H, room, …)."""
        return self._buffers[name]

    def names(self) -> set[str]:
        """What is stored."""
        return set(self._buffers)

    def view(self, name: str) -> Tensor:
        """One of the tensors, (B, H, width, …)."""
        return self._buffers[name].narrow(2, 0, self.width)

    def fits(self, name: str, part: Tensor) -> bool:
        """Whether more of a tensor, (B, all heads, n, …), goes with what is stored."""
        ours = self._buffers[name]
        return ours.dtype == part.dtype and ours.size(0) == part.size(0) and ours.shape[3:] == part.shape[3:]

    def write(self, parts: dict[str, Tensor]) -> None:
        """Put columns (B, all heads as they lie, n, …) behind those that count; they count once the width says so."""
        count = len(self.heads)
        for name, part in parts.items():
            own = part if part.size(1) == count else part.narrow(1, self.start, count)
            own = own.detach() if own.requires_grad else own
            self._buffers[name].narrow(2, self.width, own.size(2)).copy_(own)

    def grown(self, room: int, counted: int | None) -> Shelf:
        """The same with room for `room` more columns."""
        shelf = Shelf(self.heads, self._stored, width=self.width, room=room, counted=counted)
        shelf.start = self.start
        for name in self._buffers:
            shelf.view(name).copy_(self.view(name))
        return shelf

    @staticmethod
    def gathered(
        heads: list[int], sources: Sequence[tuple[Shelf, list[int], Tensor]], room: int, counted: int | None
    ) -> Shelf:
        """A shelf of rows of others.

        Args:
            heads: key heads, ascending.
            sources: (shelf, some of `heads` that lie there, columns to keep int64 (B, as many, kept), ascending);
                `kept` is the same for all.
            room, counted: as in :class:`Shelf`.
        """
        like, _, columns = sources[0]
        shelf = Shelf(heads, like._stored, width=columns.size(-1), room=room, counted=counted)
        for source, some, columns in sources:
            index = source._index(some, columns).flatten()
            rows = torch.tensor([heads.index(head) for head in some], device=columns.device)
            for name, buffer in source._buffers.items():
                part = buffer.flatten(0, 2).index_select(0, index).view(*columns.shape, *buffer.shape[3:])
                shelf.view(name).index_copy_(1, rows, part)
        return shelf

    @property
    def _stored(self) -> dict[str, Tensor]:
        """The tensors that it was told to store."""
        return {name: buffer for name, buffer in self._buffers.items() if name != "positions"}

    def _index(self, heads: list[int], columns: Tensor) -> Tensor:
        """Where columns (B, R, n) of some of the heads lie in buffers (B · H · room, …)."""
        batch, n_heads, room = self._buffers["k"].shape[:3]
        rows = torch.tensor([self.heads.index(head) for head in heads], device=columns.device)
        first = torch.arange(batch, device=columns.device)[:, None] * n_heads + rows
        return first[..., None] * room + columns


@dataclass(frozen=True)
class Order:
    """The heads of a layer as they lie, shelf after shelf; each None where that is their own order.

    Attributes:
        keys: int64 (Hk,), the key heads as they lie.
        queries: int64 (Hq,), the query heads that go with them.
        back: int64 (Hq,), from there to their own order.
    """

    keys: Tensor | None = None
    queries: Tensor | None = None
    back: Tensor | None = None

    @staticmethod
    def of(shelves: Sequence[Shelf], groups: int, device: torch.device) -> Order:
        """The order of some shelves, each of which is told where it starts; `groups` query heads share a key head."""
        heads: list[int] = []
        for shelf in shelves:
            shelf.start = len(heads)
            heads += shelf.heads
        if heads == sorted(heads):
            return Order()
        keys = torch.tensor(heads, device=device)
        queries = (keys[:, None] * groups + torch.arange(groups, device=device)).flatten()
        return Order(keys, queries, queries.argsort())


def taken(x: Tensor, heads: Tensor | None) -> Tensor:
    """Some heads of x (B, H, …); None takes all as they are."""
    return x if heads is None else x.index_select(1, heads)


class Plan(NamedTuple):
    """Key heads that are to lie together.

    Attributes:
        heads: ascending.
        width: columns that each is to hold.
        stays: the shelf on which they lie already, where that is not worth moving; it goes on as wide as it is.
    """

    heads: list[int]
    width: int
    stays: Shelf | None

    @property
    def columns(self) -> int:
        """Columns of all heads together."""
        return len(self.heads) * self.width


def plans(shelves: Sequence[Shelf], held: list[int], least: list[int]) -> list[Plan]:
    """How key heads are to lie of which head h holds held[h] columns and cannot do with fewer than least[h]."""
    found = []
    for heads in grouped(held, least):
        width = max(least[head] for head in heads)
        same = next((shelf for shelf in shelves if shelf.heads == heads), None)
        stays = same if same is not None and same.width - width < max(1, same.width // PART) else None
        found.append(Plan(heads, width if stays is None else stays.width, stays))
    return found


def grouped(held: list[int], least: list[int]) -> list[list[int]]:
    """Key heads that are to lie together, when head h holds held[h] columns and cannot do with fewer than least[h].

    A group is as wide as the head that needs most, so none may hold less. Beyond that each further group has to save an
    eighth of what the layer would hold: a group takes launches of its own for every token, and these cost the same
    however little it holds. One call over rows of different lengths would take one buffer as wide as the widest.
    """

    def possible(heads: list[int]) -> list[list[int]]:
        room = min(held[head] for head in heads)
        cut = sum(least[head] <= room for head in heads)
        return [heads] if cut == len(heads) else possible(heads[:cut]) + possible(heads[cut:])

    groups = possible(sorted(range(len(held)), key=lambda head: least[head]))
    while True:
        total = sum(len(heads) * least[heads[-1]] for heads in groups)
        saved, heads, cut = max(_cuts(groups, least), default=(0, [], 0))
        if saved == 0 or saved * SAVED < total:
            return sorted(sorted(heads) for heads in groups)
        groups.remove(heads)
        groups += [heads[:cut], heads[cut:]]


def _cuts(groups: Iterable[list[int]], least: list[int]) -> Iterable[tuple[int, list[int], int]]:
    """(columns saved, group, where) for every way to part a group, whose heads are sorted by what they need."""
    return chain.from_iterable(
        ((cut * (least[heads[-1]] - least[heads[cut - 1]]), heads, cut) for cut in range(1, len(heads)))
        for heads in groups
    )
