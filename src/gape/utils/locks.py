"""A lock on a directory, so that two processes never write to one run or corpus at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gape.utils import files


class BusyError(RuntimeError):
    """Another process trains or measures in the run's directory."""


@contextlib.contextmanager
def locked(directory: Path, action: str = "trained") -> Iterator[None]:
    """Lock a directory that exists; a BusyError where another process has it. The lock ends with the process.

    Temporary files (`.tmp-*`) that a killed process left in a run are removed. Locks do not nest: leaving the inner one
    releases both. `action` says what is being done, for the error of another process.
    """
    if os.name == "nt":
        yield
        return
    import fcntl  # noqa: PLC0415

    with files.open_append(directory / ".lock") as handle:
        try:
            # Not flock: a forked worker that outlives its parent would still hold that one.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            # What the other process is doing; it may not have written it yet.
            note = (directory / ".lock").read_text(encoding="utf-8", errors="replace")
            other, _, process = note.partition(" ")
            holder = f"{other or 'trained'} by another process" + (f" ({process})" if process else "")
            raise BusyError(f"{directory} is being {holder}; wait for it or use another") from error
        except OSError:
            # A file system without locks: better to work unguarded than not at all.
            yield
            return
        # For the error of another process; a full disk prevents this note, not the work.
        with contextlib.suppress(OSError):
            handle.truncate(0)
            handle.write(f"{action} {os.getpid()}".encode())
        # Leftovers of a run, never through links; a directory of another kind is left alone.
        checkpoints = directory / "checkpoints"
        for place in (directory, checkpoints) if checkpoints.is_dir() else ():
            if not place.is_symlink():
                files.sweep(place)
        yield
