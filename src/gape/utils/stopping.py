"""What a signal does to a command outside training: it ends at once, and what was written stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

#: From the signal to the end of a process that does not come to its next line of Python.
GRACE = 8.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, came, over = os.getpid(), list[int](), threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        # A forked worker inherits the handler: it should simply die.
        if came or os.getpid() != owner:
            os._exit(128 + signum)
        came.append(signum)
        raise Stopped(signum)

    before = {signum: signal.signal(signum, handle) for signum in _SIGNALS}
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        # Python's handlers wait for the main thread's next line; this thread hears of a signal at once.
        with ours:
            for signum in iter(lambda: ours.recv(1), b""):
                if signum[0] in _SIGNALS and signal.getsignal(signum[0]) is handle and not over.wait(GRACE):
                    os.write(2, f"gape: {Stopped(signum[0])}\n".encode())
                    os._exit(128 + signum[0])

    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(woken)
        theirs.close()
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
