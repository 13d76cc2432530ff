"""What answers are hidden in: repeated sentences, or any text."""

from __future__ import annotations

import gzip
import lzma
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from gape.utils.files import sha256

NOISE = "Rain fell on the roof. A door stood open. The clock struck nine. Somebody laughed far away. Then it was quiet."
_END = re.compile(r"[.!?][\"')\]]*$")


class Text:
    """Running text as words, begun anew where it ends, with the places between its sentences.

    Args:
        text: at least one word.
        name: where it is from.
        digest: SHA-256 of it.

    Raises:
        ValueError: there is no word in it.
    """

    def __init__(self, text: str, name: str = "noise", digest: str | None = None) -> None:
        self.words = text.split()
        if not self.words:
            raise ValueError(f"haystack: got {name}, which has no words, expected a text")
        self.name, self.digest = name, digest or sha256(text.encode())
        ends = [place for place, word in enumerate(self.words, 1) if _END.search(word)]
        # Without sentences that can be told, any word may end one: all lines would come first otherwise.
        self.ends = ends or list(range(1, len(self.words) + 1))

    def start(self, rng: Random) -> int:
        """A place at which some sentence begins."""
        return rng.choice(self.ends) % len(self.words)

    def passage(self, start: int, count: int) -> list[str]:
        """So many words from a place on."""
        whole, rest = divmod(start + count, len(self.words))
        if not whole:
            return self.words[start:rest]
        return self.words[start:] + self.words * (whole - 1) + self.words[:rest]

    def boundary(self, start: int, place: int) -> int:
        """The last end of a sentence that comes at most `place` words after `start`, as words from there; or 0."""
        turns, at = divmod(start + place, len(self.words))
        found = bisect_right(self.ends, at)
        end = self.ends[found - 1] if found else self.ends[-1] - len(self.words)
        return max(0, turns * len(self.words) + end - start)

    def hide(self, start: int, count: int, lines: Sequence[str], depths: Sequence[float]) -> str:
        """A passage with each line put between sentences, at its depth from 0 to 1 of the passage."""
        words = self.passage(start, count)
        places = [self.boundary(start, round(depth * count)) for depth in depths]
        parts, before = [], 0
        for place, line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0]):
            parts += [*words[before:place], line]
            before = place
        return " ".join(parts + words[before:])


def noise() -> Text:
    """The same few sentences over and over."""
    return Text(NOISE)


def read_text(path: Path) -> Text:
    """A haystack of any text file, also `.gz` and `.xz`.

    Raises:
        ValueError: it is no UTF-8 text.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        data: bytes = file.read()
    try:
        return Text(data.decode("utf-8"), path.name, sha256(data))
    except UnicodeDecodeError as error:
        raise ValueError(f"haystack: {path} is no UTF-8 text: {error}") from error
