"""Floors by layer and head, from a file such as the `plan.json` of `gape hf extend`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gape.utils import files
from gape.utils.validation import invalid_argument

#: The key of the floors in a file, as gates know them.
FLOORS = "gate_floor"


def with_floors(gates: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Options of gates with the floors of a file.

    Raises:
        ValueError: floors are among the options already, or there is no such file.
    """
    if FLOORS in gates:
        raise invalid_argument("floors", str(path), f"none beside --gate {FLOORS}=…")
    try:
        rows = files.from_json(path.read_bytes()).get(FLOORS)
    except (OSError, ValueError) as error:
        raise ValueError(f"floors: {path} cannot be read, expected a JSON file with {FLOORS}: {error}") from error
    if not isinstance(rows, list):
        raise invalid_argument("floors", rows, f"lists of numbers by layer under {FLOORS} in {path}")
    return {**gates, FLOORS: rows}
