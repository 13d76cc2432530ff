"""What a GGUF file says of itself, read with no more memory than the file takes.

A count or a length in the file is believed only as far as bytes follow it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
#: Types of single values by their numbers, as struct writes them; 8 are strings, 9 arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: The least that an element of each type takes: lengths of strings are eight bytes.
_LEAST = {_STRING: 8, **{kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()}}


@dataclass(frozen=True)
class Header:
    """Settings by name (of arrays their length) and elements of the tensors by name."""

    settings: dict[str, Any]
    tensors: dict[str, int]

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(self.tensors.values())

    def refuse_rotation(self) -> None:
        """Refuse rotations that transformers does not read from such files: the model would be another one.

        Raises:
            ValueError: names what is not read.
        """
        kind = self.settings.get(f"{self.settings.get('general.architecture')}.rope.scaling.type", "none")
        if kind != "none":
            raise ValueError(f"its rotation is scaled ({kind}), which transformers does not read from GGUF files")
        for name in self.tensors:
            if name.startswith("rope_"):
                raise ValueError(f"{name} holds rotary frequencies, which transformers does not read from GGUF files")


def read_header(path: Path) -> Header:
    """The header of a GGUF file of version 2 or 3.

    Raises:
        ValueError: the file ends before what it announces, or has values of an unknown kind.
    """
    with path.open("rb") as file:
        source = _Source(file, path.stat().st_size)
        source.take(len(MAGIC))
        version = source.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3")
        tensors, fields = source.number("Q"), source.number("Q")
        settings = {}
        for _ in range(fields):
            name = source.text()
            settings[name] = source.value(source.number("I"))
        found = dict(source.tensor() for _ in range(tensors))
    return Header(settings, found)


class _Source:
    """A file of a known size, read from the front."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def left(self) -> int:
        return self._size - self._file.tell()

    def take(self, count: int) -> bytes:
        if count > self.left():
            raise ValueError(f"it ends after {self._size:,} bytes, where {count:,} more than it has were announced")
        return self._file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A setting: a number, a text, or the length of an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_known(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner != _STRING:
            self.take(count * struct.calcsize(f"<{_known(inner)}"))
            return count
        if count * _LEAST[inner] > self.left():
            raise ValueError(f"it ends before the {count:,} texts that it announces")
        for _ in range(count):
            self.text()
        return count

    def tensor(self) -> tuple[str, int]:
        """The name of a tensor and its elements, for which the file has to be long enough."""
        name, shape = self.text(), [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = self.number("I"), self.number("Q")
        elements = math.prod(shape)
        # Every type takes more than a bit for an element.
        if offset + elements // 8 > self._size:
            raise ValueError(f"{name}: {elements:,} elements of type {kind} from byte {offset:,} on do not fit into it")
        return name, elements


def _known(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a setting of kind {kind}, which is none of GGUF's")
    return _SCALARS[kind]
