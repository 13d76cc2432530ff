"""Files of JSON lines that survive a killed process: written whole lines at a time, read without an incomplete one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gape.utils import files

#: A line of a file, by key.
Record = dict[str, Any]


class JSONLines:
    """A file of JSON objects, one a line, that is only appended to; a full disk is a DiskFullError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: a line that could not be written must not be written when the file is closed.
        with files.room("the log", path.parent, 0):
            self._file = files.open_append(path)

    def write(self, **record: Any) -> None:
        """Add a line; the system has it when this returns."""
        self.write_all(record)

    def write_all(self, *records: Mapping[str, Any]) -> None:
        """Add lines with one call to the system: a process that is killed leaves all of them or none."""
        lines = b"".join(files.to_json(record, indent=None) for record in records)
        with files.room("a log line", self.path.parent, len(lines)):
            left = memoryview(lines)
            while left:
                left = left[self._file.write(left) :]

    def settle(self) -> int:
        """Wait until the lines are on the disk; returns the length in bytes."""
        with files.room("the log", self.path.parent, 0):
            os.fsync(self._file.fileno())
            return self.path.stat().st_size

    def cut(self, length: int) -> bool:
        """Drop everything after `length` bytes; False where the file is shorter."""
        enough = self.path.stat().st_size >= length
        if enough:
            self._file.truncate(length)
        return enough

    def mend(self) -> None:
        """Drop an incomplete last line."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    self.cut(file.read().rfind(b"\n") + 1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append(path: Path, *records: Mapping[str, Any]) -> None:
    """Add lines, all or none, and wait until they are on the disk; an incomplete last line is dropped first."""
    with contextlib.closing(JSONLines(path)) as lines:
        lines.mend()
        lines.write_all(*records)
        lines.settle()


def read_lines(path: Path, fault: Callable[[dict[str, Any]], str | None] = lambda row: None) -> list[dict[str, Any]]:
    """The objects of a JSONL file, but for an incomplete last line.

    A ValueError names file and line of what is no object, or of which `fault` says what is wrong with it.
    """
    # Bytes: a line may have been cut in the middle of a letter.
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = files.from_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is no JSON object: {error}") from error
        if wrong := fault(record):
            raise ValueError(f"{path}: line {number} {wrong}")
        records.append(record)
    return records


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is none; a ValueError names a file that holds anything else."""
    if not path.is_file():
        return {}
    try:
        return files.from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
