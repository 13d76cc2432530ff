"""Checks of stored rows: which types the values have that tables and figures compute with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _whole(value) and 0 <= value < 2**63


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


#: Which keys, what their values have to be, and how to tell.
_TYPES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "run variant position evaluated target hits kind key task how what impl bounds protocol split corpus plan "
        "precision device stratum only_stratum base weights model template overlength commit",
        "a text", lambda value: isinstance(value, str),
    ),
    ("seed eval_seed text_seed", "a whole number", _whole),
    (
        "train_length factor length needles samples step context distance layer head last "
        "align stride max_windows batch windows of_windows documents too_short skipped truncated native bytes chunk "
        "every looked texts parameters",
        "a whole number from 0", _count,
    ),
    (
        "accuracy perplexity std low high ms first_ms mean_ms record_ms launched_ms forget_ms lasting_ms mean eps "
        "tokens_per_second control gain gain_low gain_high mean_mask landmark gate amplitude answer_tokens nll_std "
        "nll_low nll_high match match_std match_low match_high forget_eps skip_eps held key_share "
        "realised_eps",
        "a finite number", _number,
    ),
    ("nll tokens", "a finite number or a list of them", lambda value: _number(value) or _numbers(value)),
    (
        "window_nll window_document sample_nll sample_match document_nll document_tokens document_control layers",
        "a list of finite numbers", _numbers,
    ),
    ("settings manifest training asked options", "an object", lambda value: isinstance(value, dict)),
    ("sets spread", "a list of objects", lambda v: isinstance(v, list) and all(isinstance(each, dict) for each in v)),
)  # fmt: skip
_EXPECTED = {key: (expected, fits) for keys, expected, fits in _TYPES for key in keys.split()}


@contextlib.contextmanager
def usable(paths: Iterable[object]) -> Iterator[None]:
    """Name the results where tables or figures fail on them: :func:`fault` checks no nested values."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"results: {', '.join(map(str, paths))} hold a row that is not as our commands write it ({cause})"
        ) from error


def fault(row: Mapping[str, Any], needed: Iterable[str] = ()) -> str | None:
    """What is wrong with a row, such as that it lacks a key that is `needed`; None for nothing."""
    missing = [key for key in needed if row.get(key) is None]
    if missing:
        return f"lacks {', '.join(missing)}"
    for key, value in row.items():
        expected, fits = _EXPECTED.get(key, ("", lambda _: True))
        if value is not None and not fits(value):
            return f"has {key} {str(value)[:40]!r}, expected {expected}"
    return None
