"""Checks of arguments: each returns the value, or raises a ValueError that names the argument.

Imports no torch, so that the command line can use it before anything large is loaded.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from importlib import import_module
from numbers import Integral, Real
from typing import Any


def described(x: Any) -> str:
    """A value in few words: type and value, or dtype, shape and device of a tensor."""
    if all(hasattr(x, name) for name in ("dtype", "shape", "device")):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"[:120]


def invalid_argument(name: str, got: Any, expected: str) -> ValueError:
    """The error for a bad argument: its name, what was given and what is expected."""
    return ValueError(f"{name}: got {described(got)}, expected {expected}")


def suggestion(name: object, known: Iterable[str], *, before: str = "; ", prefix: str = "", most: int = 1) -> str:
    """The end of an error message about an unknown name: "did you mean …?" with at most so many names, or nothing."""
    close = [f"{prefix}{other}" for other in difflib.get_close_matches(str(name), list(known), n=most)]
    return f"{before}did you mean {' or '.join(close)}?" if close else ""


def optional(need: str, extra: str, *modules: str) -> Any:
    """The first of some modules, all imported; an ImportError says what needs them and which extra installs them."""
    try:
        return next(iter([import_module(module) for module in modules]))
    except ImportError as error:
        raise ImportError(f"{need}: pip install 'gape[{extra}]'") from error


def finite(name: str, x: Any, expected: str = "a finite number") -> float:
    """A finite number, as a float."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise invalid_argument(name, x, expected)
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    # A comparison, which a compiler can trace; math.isfinite it cannot.
    if not -math.inf < value < math.inf:
        raise invalid_argument(name, x, expected)
    return value


def positive_number(name: str, x: Any) -> float:
    """A finite number above zero, as a float."""
    if finite(name, x, "a positive finite number") <= 0:
        raise invalid_argument(name, x, "a positive finite number")
    return float(x)


def above(name: str, x: Any, bound: float) -> float:
    """A finite number greater than `bound` ≥ 0, as a float."""
    if positive_number(name, x) <= bound:
        raise invalid_argument(name, x, f"a number greater than {bound:g}")
    return float(x)


def weight(name: str, x: Any) -> float:
    """A share of attention that may be dropped, from 0 to below 1, as a float."""
    expected = "a number from 0 to below 1"
    value = finite(name, x, expected)
    if not 0 <= value < 1:
        raise invalid_argument(name, x, expected)
    return value


def whole(name: str, x: Any, at_least: int = 1) -> int:
    """A whole number of at least `at_least`, as an int."""
    if isinstance(x, bool) or not isinstance(x, Integral) or x < at_least:
        raise invalid_argument(name, x, f"a whole number of at least {at_least}")
    return int(x)


def even(name: str, x: Any, at_least: int = 2) -> int:
    """An even number of at least `at_least`, as an int."""
    if whole(name, x) % 2 or x < at_least:
        raise invalid_argument(name, x, f"an even number of at least {at_least}")
    return int(x)


def flag(name: str, x: Any) -> bool:
    """A bool."""
    if not isinstance(x, bool):
        raise invalid_argument(name, x, "True or False")
    return x
