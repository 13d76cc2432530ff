"""Results in the directory of a run: find what was measured, measure what is missing, add it at once.

A row, or a set, is on the disk before the next measurement begins, so a measurement that is interrupted goes on where
it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gape.report.results import read_rows
from gape.utils import files, jsonl
from gape.utils.jsonl import Record


def matches(row: Record, values: Record) -> bool:
    """Whether a stored row has these values."""
    return all(row.get(key) == value for key, value in values.items())


class ResultStore:
    """Rows of measurements in a file of JSON lines, which need not be there yet.

    Of matching rows that agree in the values of `key` only the last counts; without keys all count. Every row must have
    the keys `needed`; a line that is no such row is refused.
    """

    def __init__(self, path: Path, *, key: Iterable[str] = (), needed: Iterable[str] = ()) -> None:
        self.path, self._key, self._needed = path, tuple(key), tuple(needed)

    def rows(self, values: Record | None = None) -> list[Record]:
        """The rows that have these values, all by default, in the order of the file."""
        rows = [row for row in self._stored() if matches(row, values or {})]
        return list({tuple(row.get(key) for key in self._key): row for row in rows}.values()) if self._key else rows

    def missing(self, measurements: Iterable[Record]) -> list[Record]:
        """Those of some measurements, each given by the values of its row, that have no row."""
        rows = self._stored()
        return [values for values in measurements if not any(matches(row, values) for row in rows)]

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Add rows, all or none."""
        jsonl.append(self.path, *rows)

    def replace(self, rows: Iterable[Record], keep: Callable[[Record], bool]) -> None:
        """Write the stored rows that `keep` accepts, and `rows` behind them, in one step."""
        stored = filter(keep, self._stored())
        files.replace(self.path, b"".join(files.to_json(row, indent=None) for row in (*stored, *rows)))

    def _stored(self) -> list[Record]:
        return read_rows(self.path, self._needed) if self.path.is_file() else []


class ResultSets:
    """Sets of results in one JSON file, such as `entropy.json`; a set has its settings under `asked`.

    `identity` names the run and its weights; sets of other weights are replaced.
    """

    def __init__(self, path: Path, identity: Record) -> None:
        self.path, self._identity = path, identity

    def __contains__(self, settings: object) -> bool:
        return any(known["asked"] == settings for known in self._sets())

    def add(self, settings: Record, results: Record) -> None:
        """Add a set, in the place of one with the same settings."""
        others = [known for known in self._sets() if known["asked"] != settings]
        record = self._identity | {"sets": [*others, {"asked": settings, **results}]}
        files.replace(self.path, files.to_json(record, indent=None))

    def _sets(self) -> list[Record]:
        stored = jsonl.read_object(self.path)
        return list(stored["sets"]) if stored and matches(stored, self._identity) else []
