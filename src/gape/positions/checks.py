"""Refusals that schemes share; each names the argument, what came and what was expected."""

from __future__ import annotations

from typing import Any

from gape.ops.checks import finite, positive_number, refuse, whole

__all__ = ["above", "even", "finite", "whole"]


def even(name: str, value: Any, at_least: int = 2) -> int:
    """Return `value` if it is an even integer of at least `at_least`.

    Raises:
        ValueError: it is not an integer, odd, or too small.
    """
    if whole(name, value) % 2 or value < at_least:
        raise refuse(name, value, f"an even number of at least {at_least}")
    return int(value)


def above(name: str, value: Any, bound: float) -> float:
    """Return `value` as a float if it is a finite number greater than `bound` ≥ 0.

    Raises:
        ValueError: it is not a number, not finite, or not greater than `bound`.
    """
    if positive_number(name, value) <= bound:
        raise refuse(name, value, f"a number greater than {bound:g}")
    return float(value)
