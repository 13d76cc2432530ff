"""A line now and then while a command is silent, so that a log tells work from a hang."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from gape.utils import launch

#: Silence after which a line comes.
SECONDS = 20.0

_state, _last = "", 0.0


def reset() -> None:
    """Count the silence from now: something was shown."""
    global _last  # noqa: PLW0603
    _last = time.monotonic()


def set_state(state: str) -> None:
    """Say how far the work is, for the next line."""
    global _state  # noqa: PLW0603
    _state = state


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Write a line to standard error, where that is no terminal, whenever nothing was shown for `SECONDS`."""
    stop, began = threading.Event(), time.monotonic()
    reset()
    set_state("")

    def beat() -> None:
        while not stop.wait(max(0.01, _last + SECONDS - time.monotonic())):
            if time.monotonic() - _last >= SECONDS:
                reset()
                _write(f"{_state or 'at work'}, {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _write(line: str) -> None:
    # A terminal has a bar, but for one that cannot move its cursor. A pipe that nobody reads costs the line alone.
    with contextlib.suppress(OSError, ValueError):
        if not launch.is_first():
            return
        if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
            print(line, file=sys.stderr, flush=True)
