"""The name that was perhaps meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: object, known: Iterable[str], *, before: str = "; ", prefix: str = "", most: int = 1) -> str:
    """The end of a refusal: "did you mean …?" with the known names nearest to one that is not, else nothing.

    Args:
        name: what came.
        known: what there is.
        before: stands before the question.
        prefix: stands before each name.
        most: names at most.
    """
    close = [f"{prefix}{other}" for other in difflib.get_close_matches(str(name), list(known), n=most)]
    return f"{before}did you mean {' or '.join(close)}?" if close else ""
