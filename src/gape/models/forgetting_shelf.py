"""Rows of keys that lie side by side: the key heads of a layer that hold equally many."""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns that a shelf has room for beyond what it holds: so many, or this part of it where that is more.
STRIDE, PART = 32, 16


def slack(width: int) -> int:
    """Columns that may come before anything is moved again."""
    return max(STRIDE, width // PART)


class Shelf:
    """Tensors (B, H, width, …) of some key heads, newest column last, with room for more.

    Args:
        heads: which key heads of the layer, one for each row of a sample.
        like: tensors (B, H, n, …) of what is to be stored, for their sizes, dtypes and devices.
        room: columns to make room for.
    """

    def __init__(self, heads: list[int], like: dict[str, Tensor], room: int) -> None:
        self.heads = heads
        self.width = 0
        device = like["k"].device
        in_a_row = heads == list(range(heads[0], heads[-1] + 1))
        #: What takes these heads out of all, without a copy where they are neighbours.
        self.pick = slice(heads[0], heads[-1] + 1) if in_a_row else torch.tensor(heads, device=device)
        self._buffers = {name: x.new_empty(x.size(0), len(heads), room, *x.shape[3:]) for name, x in like.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room included."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def room(self) -> int:
        """Columns there are, used or not."""
        return self._buffers["k"].size(2)

    def names(self) -> set[str]:
        """What is stored."""
        return set(self._buffers)

    def view(self, name: str, extra: int = 0) -> Tensor:
        """One of the tensors, (B, H, width + extra, …)."""
        return self._buffers[name][:, :, : self.width + extra]

    def fits(self, name: str, part: Tensor) -> bool:
        """Whether more of a tensor, (B, all heads, n, …), goes with what is stored."""
        ours = self._buffers[name]
        return (ours.size(0), *ours.shape[3:], ours.dtype) == (part.size(0), *part.shape[3:], part.dtype)

    def write(self, parts: dict[str, Tensor]) -> None:
        """Put columns (B, all heads, n, …) behind those that count; they count once the width says so."""
        for name, part in parts.items():
            self._buffers[name][:, :, self.width : self.width + part.size(2)] = part[:, self.pick].detach()

    def grown(self, room: int) -> Shelf:
        """The same with room for `room` more columns."""
        shelf = Shelf(self.heads, self._buffers, self.width + room)
        shelf.width = self.width
        for name in self._buffers:
            shelf.view(name).copy_(self.view(name))
        return shelf

    @staticmethod
    def gathered(rows: list[tuple[Shelf, int, Tensor]], room: int) -> Shelf:
        """A shelf of rows of others: (shelf, key head, columns int64 (B, kept), ascending), `kept` the same for all.

        There is room for `room` more columns.
        """
        source, _, columns = rows[0]
        shelf = Shelf([head for _, head, _ in rows], source._buffers, columns.size(1) + room)
        shelf.width = columns.size(1)
        for row, (source, head, columns) in enumerate(rows):
            for name in source._buffers:
                part = source.view(name)[:, source.heads.index(head)]
                index = columns.reshape(*columns.shape, *[1] * (part.dim() - 2)).expand(-1, -1, *part.shape[2:])
                shelf.view(name)[:, row] = part.gather(1, index)
        return shelf


def grouped(held: list[int], least: list[int]) -> list[list[int]]:
    """Key heads that are to lie together, when head h holds held[h] columns and cannot do with fewer than least[h].

    A group is as wide as the head that needs most, so none may hold less. It is parted where that saves an eighth of
    it: more groups hold less and take more calls.
    """

    def parted(heads: list[int]) -> list[list[int]]:
        width, room = least[heads[-1]], min(held[head] for head in heads)
        saved = [cut * (width - least[heads[cut - 1]]) for cut in range(1, len(heads))]
        if width > room:
            cut = sum(least[head] <= room for head in heads)
        elif not saved or max(saved) * 8 < len(heads) * width:
            return [sorted(heads)]
        else:
            cut = saved.index(max(saved)) + 1
        return parted(heads[:cut]) + parted(heads[cut:])

    return parted(sorted(range(len(held)), key=lambda head: least[head]))
