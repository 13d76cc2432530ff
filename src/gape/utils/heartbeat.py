"""A line now and then while a command is silent, so that a log tells work from a hang."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

#: Silence after which a line comes.
SECONDS = 20.0

_state, _last = "", 0.0


def shown() -> None:
    """Something was shown just now."""
    global _last  # noqa: PLW0603
    _last = time.monotonic()


def note(state: str) -> None:
    """Where the work is, for the next line."""
    global _state  # noqa: PLW0603
    _state = state


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Write a line to standard error, where that is no terminal, whenever nothing was shown for `SECONDS`."""
    over, began = threading.Event(), time.monotonic()
    shown()
    note("")

    def beat() -> None:
        while not over.wait(max(0.01, _last + SECONDS - time.monotonic())):
            if time.monotonic() - _last >= SECONDS:
                shown()
                _write(f"{_state or 'at work'}, {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _write(line: str) -> None:
    # A terminal has a bar, but for one that cannot move its cursor. A pipe that nobody reads costs the line alone.
    with contextlib.suppress(OSError, ValueError):
        if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
            print(line, file=sys.stderr, flush=True)
