"""Tokenising in several processes at once, or in this one."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any, cast

import numpy.typing as npt

from gape.data.tokenizer import Tokenizer
from gape.data.worker import encode, exactly, greeting, receive, send

Encoded = list[npt.NDArray[Any]]


class Pool:
    """Processes that tokenise; requests are answered in whatever order, each through its own future.

    Args:
        tokenizer: the one already loaded here; the processes must load the same.
        spec: how they load it.
        dtype: of the ids.
        workers: processes; 0 tokenises in this one.
    """

    def __init__(self, tokenizer: Tokenizer, spec: str, dtype: str, workers: int) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        command = [sys.executable, "-P", "-m", "gape.data.worker", spec, dtype]
        self._processes = [_started(command) for _ in range(workers)]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        # A thread for each process does nothing but wait for it.
        self._threads = ThreadPoolExecutor(max_workers=workers) if workers else None
        self._greeted: set[int] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Killed, not asked: what is under way is not wanted, and its thread wakes up at the end of the pipe.
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                # What was not sent yet has nowhere to go.
                with contextlib.suppress(BrokenPipeError):
                    cast(IO[bytes], stream).close()

    def submit(self, texts: list[bytes]) -> Future[Encoded]:
        """The ids of texts in UTF-8, to come."""
        if self._threads is not None:
            return self._threads.submit(self._ask, texts)
        done: Future[Encoded] = Future()
        done.set_result([encode(self._tokenizer, text, self._dtype) for text in texts])
        return done

    def _ask(self, texts: list[bytes]) -> Encoded:
        process = self._idle.get()
        try:
            requests, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            if process.pid not in self._greeted:
                if exactly(answers, 32) != greeting(self._tokenizer):
                    raise RuntimeError("a tokenising process loaded another tokenizer: did its files change?")
                self._greeted.add(process.pid)
            send(requests, texts)
            return receive(answers, len(texts), self._dtype)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"a tokenising process ended with code {process.wait()}; start again") from error
        finally:
            self._idle.put(process)


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    # The modules of this process, whatever lies in the current directory.
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a session of its own, for Ctrl-C goes to every process of the terminal's: this one decides what ends.
    return subprocess.Popen(command, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
