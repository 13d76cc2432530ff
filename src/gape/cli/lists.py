"""Lists of numbers as they are typed: 4096,8192."""

from __future__ import annotations

from typing import TypeVar

Number = TypeVar("Number", int, float)


def numbers(name: str, text: str, kind: type[Number], such_as: str) -> tuple[Number, ...]:
    """The numbers of a text, in its order; spaces around them and underscores inside them do not matter.

    Args:
        name: of the option, for the message.
        text: numbers with commas.
        kind: int or float.
        such_as: a list that would do, for the message.

    Raises:
        ValueError: something in it is no number of that kind.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name}: got {text!r}, expected {wanted} with commas, such as {such_as}") from error
