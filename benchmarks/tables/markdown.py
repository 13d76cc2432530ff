"""What all tables share: stored rows, Markdown, signs and intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]

#: The root of the clone.
ROOT = Path(__file__).parents[2]


@cache
def stored(path: str) -> tuple[Record, ...]:
    """The rows of a file of JSON lines, by its path under the root."""
    with (ROOT / path).open(encoding="utf-8") as file:
        return tuple(json.loads(line) for line in file if line.strip())


def every(pattern: str) -> list[Record]:
    """The rows of all files of JSON lines that a pattern under the root names, in the order of their names."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    return [row for path in paths for row in stored(path)]


def select(rows: Iterable[Record], **values: Any) -> list[Record]:
    """The rows whose fields have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def only(rows: Iterable[Record], **values: Any) -> Record:
    """The one row whose fields have these values."""
    (row,) = select(rows, **values)
    return row


def table(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---:") -> str:
    """A Markdown table: first column left, the others right, or as the rule says."""
    lines = [list(head), *([*row] for row in rows)]
    if any(len(line) != len(head) for line in lines):
        raise ValueError(f"rows: got lengths {sorted({len(line) for line in lines})}, expected {len(head)} cells each")
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "|---|" + f"{rule}|" * (len(head) - 1))
    return "\n".join(text) + "\n"


def signed(text: str) -> str:
    """Numbers with a minus sign in place of a hyphen."""
    return re.sub(r"-(?=\d)", "−", text)


def interval(value: float, low: float | None, high: float | None, form: str = "+.4f") -> str:
    """A difference with its 95% interval."""
    ends = "no interval" if low is None or high is None else f"{low:{form}} … {high:{form}}"
    return signed(f"{value:{form}} ({ends})")


def thousands(values: Iterable[int]) -> list[str]:
    """Numbers as column heads."""
    return [f"{value:,}" for value in values]
