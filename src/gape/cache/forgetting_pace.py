"""When the layers of a cache look through their keys: all of them with the same tokens.

A look may move keys, and a recorded graph of all layers ends with the first key that moves. Layers that looked when it
suits each of them would end one graph after the other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from gape.cache.forgetting_shelf import slack


@dataclass
class Share:
    """What a layer has told of itself.

    Attributes:
        turn: the last look that it has taken part in.
        columns: that its key heads held together after it.
        heads: its key heads; 0 before its first look.
        room: tokens behind its last look that it can take without moving keys; no limit while it holds none.
    """

    turn: int = 0
    columns: int = 0
    heads: int = 0
    room: int = sys.maxsize


class Pace:
    """Calls the layers of a cache to look. The first that has to begins a turn, in which the others follow."""

    def __init__(self) -> None:
        self._turn = 0
        self._shares: list[Share] = []
        # Tokens from a look to the next, which is asked for with every token.
        self._until = self.interval

    def joined(self) -> Share:
        """The share of one more layer, which has not looked yet."""
        share = Share(turn=self._turn)
        self._shares.append(share)
        return share

    @property
    def interval(self) -> int:
        """Tokens from a look to the next: a sixteenth of what a key head held after the last one, mean over layers.

        So what is held grows by a sixteenth in between, however much one layer holds and however little another.
        """
        heads = sum(share.heads for share in self._shares)
        return slack(sum(share.columns for share in self._shares) // max(1, heads))

    def room(self, added: int) -> int:
        """Columns for the tokens from a look to the next, where these come `added` at a time; 0: one by one."""
        return -(-self.interval // added) * added if added else self.interval

    def due(self, share: Share, since: int) -> int:
        """Tokens that may come, one by one, before a layer looks again for which `since` have come.

        It goes by the least room of any layer: if the one without room were the first to look, those before it would
        look a token later, now and ever after.
        """
        return 0 if share.turn < self._turn else max(0, self._until - since)

    def settle(self, share: Share, room: int) -> None:
        """A layer has room for so many tokens behind its last look."""
        share.room = room
        self._until = min(self.interval, *(each.room for each in self._shares))

    def look(self, share: Share) -> None:
        """A layer looks: with the others, or before all others."""
        self._turn += share.turn == self._turn
        share.turn = self._turn

    def reset(self, share: Share) -> None:
        """A layer is empty again, and has never looked."""
        share.turn, share.columns, share.heads = self._turn, 0, 0
        self.settle(share, sys.maxsize)
