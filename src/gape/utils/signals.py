"""Signals: training saves and stops at the next step, every other command ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818
    """The work stopped because of a signal, after everything was saved; `code` is that to exit with, 130 or 143."""

    def __init__(self, code: int, message: str | None = None) -> None:
        super().__init__(message or f"stopped by {signal.Signals(code - 128).name}")
        self.code = code


class StopFlag:
    """Set by SIGINT or SIGTERM while entered; polled by whatever should stop in good order.

    A second signal ends the process at once, with the same code. Handlers are installed in the main thread only, and
    the earlier ones come back on leaving; entering twice is harmless.

    >>> with StopFlag() as stop:
    ...     for batch in range(3):
    ...         stop.check()  # raises Interrupted once a signal has come
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._depth = 0
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self._signal is not None

    @property
    def code(self) -> int | None:
        """128 + the signal, None while none has come."""
        return None if self._signal is None else 128 + self._signal

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a stop without a signal, for instance from another thread."""
        self._signal = int(signum)

    def check(self) -> None:
        """Go on, or raise :class:`Interrupted`."""
        if self.code is not None:
            raise Interrupted(self.code)

    def __enter__(self) -> StopFlag:
        if _in_main_thread():
            self._depth += 1
            if self._depth == 1:
                self._owner = os.getpid()
                self._install()
        return self

    def __exit__(self, *error: object) -> None:
        if _in_main_thread():
            self._depth -= 1
            if self._depth == 0:
                _restore(self._before)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Give the signals back to whoever had them before, for work that may end anywhere, if none has come."""
        self.check()
        installed = self._depth and _in_main_thread()
        if installed:
            _restore(self._before)
        try:
            yield
        finally:
            if installed:
                self._install()

    def _install(self) -> None:
        self._before = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # A forked worker inherits the handler and polls nothing: it should simply die.
        if self.requested or os.getpid() != self._owner:
            os._exit(128 + signum)
        self._signal = signum


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _restore(handlers: Mapping[int, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


#: From the signal to the end of a process that does not come to its next line of Python.
GRACE = 8.0
#: Processes whose signals a thread watches: this one, while :func:`at_once` lasts.
_WATCHED: list[int] = []


def _forget_parent() -> None:
    """In a forked child: let its signals not reach the thread of the parent, whose socket it inherits."""
    if _WATCHED:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class Stopped(BaseException):
    """SIGINT or SIGTERM came; raised between two lines of the main thread, past everything but clean-up."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise :class:`Stopped`; a process that is in a long call of C ends after `GRACE` seconds.

    What takes the signals meanwhile, such as a StopFlag around training, has them until it gives them back. A second
    signal ends the process where it is. Outside the main thread this does nothing.
    """
    if not _in_main_thread():
        yield
        return
    owner, received, done = os.getpid(), list[int](), threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        # A forked worker inherits the handler: it should simply die.
        if received or os.getpid() != owner:
            os._exit(128 + signum)
        received.append(signum)
        raise Stopped(signum)

    before: dict[int, Any] = {signum: signal.signal(signum, handle) for signum in SIGNALS}
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    _WATCHED.append(owner)

    def watch() -> None:
        # Python's handlers wait for the main thread's next line; this thread hears of a signal at once.
        with ours:
            for signum in iter(lambda: ours.recv(1), b""):
                ours_now = signum[0] in SIGNALS and signal.getsignal(signum[0]) is handle
                if ours_now and not done.wait(GRACE) and signal.getsignal(signum[0]) is handle:
                    os.write(2, f"gape: {Stopped(signum[0])}\n".encode())
                    os._exit(128 + signum[0])

    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        done.set()
        _WATCHED.remove(owner)
        signal.set_wakeup_fd(wakeup)
        theirs.close()
        _restore(before)
