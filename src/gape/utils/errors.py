"""What can end a run, each with a message that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint that is broken, not sealed, or not of this model.

    Attributes:
        problems: what is wrong, one line each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__("; ".join([message, *problems]) if problems else message)
        self.problems = list(problems)


class BusyError(RuntimeError):
    """Another process trains or measures in the run's directory."""


class DiskFullError(OSError):
    """Not enough room for a checkpoint or a log line. Earlier checkpoints are whole.

    Attributes:
        needed: bytes the write wanted.
        free: bytes there were.
    """

    def __init__(self, what: str, where: Path, needed: int, free: int) -> None:
        message = f"no room for {what} in {where}: {size(needed)} needed, {size(free)} free; make room and start again"
        super().__init__(errno.ENOSPC, message)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return str(self.strerror)


class LostDirectoryError(OSError):
    """The directory of the work was moved or deleted while it went on."""

    def __init__(self, what: str, where: Path) -> None:
        super().__init__(errno.ENOENT, f"no place for {what}: {where} was there and is gone; put it back or start anew")

    def __str__(self) -> str:
        return str(self.strerror)


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is not finite. The weights are those of the step before.

    Attributes:
        step: the step whose loss or gradient it was.
        dump: the directory with what is needed to look into it; None where it could not be written.
    """

    def __init__(self, step: int, what: str, dump: Path | None) -> None:
        where = f"; see {dump}" if dump else ""
        super().__init__(f"step {step}: {what}; the weights are those after step {step - 1}{where}")
        self.step, self.dump = step, dump


def size(n: int) -> str:
    """A number of bytes as people read it."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
