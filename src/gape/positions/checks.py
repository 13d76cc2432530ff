"""Refusals that schemes share; each names the argument, what came and what was expected."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from gape.ops.checks import positive_number, refuse


def whole(name: str, value: Any, at_least: int = 1) -> int:
    """Return `value` if it is an integer of at least `at_least`.

    Raises:
        ValueError: it is not an integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise refuse(name, value, f"a whole number of at least {at_least}")
    return value


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


def finite(name: str, value: Any) -> float:
    """Return `value` as a float if it is a finite number.

    Raises:
        ValueError: it is not a number, or infinite, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise refuse(name, value, "a finite number")
    return float(value)
