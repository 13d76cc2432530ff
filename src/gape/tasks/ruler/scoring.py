"""How answers are judged: RULER's string match, word for word as it defines it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(output: str) -> str:
    """A generated answer as it is compared: stripped, with line breaks for control characters."""
    return _CONTROL.sub("\n", output.strip()).strip()


def match_all(output: str, references: Sequence[str]) -> float:
    """The share of the references that are in the answer, whatever their case."""
    text = output.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(output: str, references: Sequence[str]) -> float:
    """1 where one of the references is in the answer, whatever its case, else 0."""
    text = output.lower()
    return float(any(reference.lower() in text for reference in references))


MATCHES: dict[str, Callable[[str, Sequence[str]], float]] = {"all": match_all, "part": match_part}


def score(output: str, references: Sequence[str], match: str) -> float:
    """The score of a raw answer from 0 to 1.

    Args:
        output: as generated.
        references: at least one.
        match: "all" or "part", as a task says.
    """
    return MATCHES[match](cleaned(output), references)
