"""Measured rows: what they are stamped with, and the CSV files they are appended to."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Row = dict[str, str]

#: Where rows are kept in a clone.
DATA = Path("benchmarks/data")

#: What every row begins with.
STAMP = ("device", "torch", "triton", "commit", "tests")


def stamp(device: torch.device, tests: str) -> Row:
    """Device, versions and commit of a row; `tests` says whether the operator's tests were seen to pass."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "commit": commit(),
        "tests": tests,
    }


def device_name(device: torch.device) -> str:
    """The device in words, as rows name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def installed(package: str) -> str:
    """The version of a package, "none" where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit the numbers belong to, with a plus sign where the tree differs from it; or unknown.

    GAPE_COMMIT says it where the files were copied without their history.
    """
    if "GAPE_COMMIT" in os.environ:
        return os.environ["GAPE_COMMIT"]
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


def load(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: it is no CSV file; names it.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from error


def check_columns(path: Path, fields: Sequence[str]) -> None:
    """Refuse a file whose columns are not `fields`; a missing file is fine.

    Raises:
        ValueError: its first line says other columns.
    """
    if path.exists() and path.stat().st_size:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            found = next(csv.reader(file), [])
        if found != list(fields):
            told = str(found)[:200]
            raise ValueError(f"{path}: got the columns {told}, expected {list(fields)}; choose another file")


def append(path: Path, fields: Sequence[str], row: Row) -> None:
    """Add a row to a file, which is made with its header where it is missing; lines end as those it has."""
    check_columns(path, fields)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or not path.stat().st_size
    ending = "\n" if fresh or b"\r\n" not in path.read_bytes() else "\r\n"
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator=ending)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a row, empty where there is none."""
    return "" if value is None else f"{value:.{digits}g}"
