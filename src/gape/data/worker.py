"""Tokenising in several processes: the pool that hands out texts, and the process that answers.

`python -m gape.data.worker TOKENIZER DTYPE` first writes 32 bytes that identify its tokenizer. A request is a number of
texts, then each text's length and bytes. An answer is each text's number of ids, then all ids. Numbers are eight bytes,
little-endian. The process ends when its input does, so it never outlives the one that started it, however that one
died. It imports no torch and reads no pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import struct
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from gape.data.tokenizer import Tokenizer, load_tokenizer

Encoded = list[npt.NDArray[Any]]
NUMBER = struct.Struct("<Q")


class Pool:
    """Processes that tokenise; requests are answered in any order, each through its own future.

    Args:
        tokenizer: the one already loaded here; the processes must load the same.
        spec: how they load it.
        dtype: of the ids.
        workers: processes; 0 tokenises in this one.
    """

    def __init__(self, tokenizer: Tokenizer, spec: str, dtype: str, workers: int) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        command = [sys.executable, "-P", "-m", "gape.data.worker", spec, dtype]
        self._processes = [_start(command) for _ in range(workers)]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        # A thread for each process does nothing but wait for it.
        self._threads = ThreadPoolExecutor(max_workers=workers) if workers else None
        self._identify: set[int] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, because pending requests are no longer wanted; their threads wake up at the end of the pipe.
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
            return self._threads.submit(self._request, texts)
        done: Future[Encoded] = Future()
        done.set_result([_encode(self._tokenizer, text, self._dtype) for text in texts])
        return done

    def _request(self, texts: list[bytes]) -> Encoded:
        process = self._idle.get()
        try:
            requests, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            if process.pid not in self._identify:
                if _read(answers, 32) != _identity(self._tokenizer):
                    raise RuntimeError("a tokenising process loaded another tokenizer: did its files change?")
                self._identify.add(process.pid)
            requests.write(NUMBER.pack(len(texts)))
            for text in texts:
                requests.write(NUMBER.pack(len(text)))
                requests.write(text)
            requests.flush()
            counts = [_read_number(answers) for _ in texts]
            dtype = np.dtype(self._dtype).newbyteorder("<")
            return [np.frombuffer(_read(answers, count * dtype.itemsize), dtype=dtype) for count in counts]
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"a tokenising process ended with code {process.wait()}; start again") from error
        finally:
            self._idle.put(process)


def main(spec: str, dtype: str) -> None:
    """Answer requests until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = load_tokenizer(spec)
    answers.write(_identity(tokenizer))
    answers.flush()
    while head := requests.read(NUMBER.size):
        texts = [_read(requests, _read_number(requests)) for _ in range(NUMBER.unpack(head)[0])]
        ids = [_encode(tokenizer, text, dtype) for text in texts]
        answers.writelines(NUMBER.pack(len(part)) for part in ids)
        answers.writelines(part.tobytes() for part in ids)
        answers.flush()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # The modules of this process, whatever lies in the current directory.
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a session of its own: Ctrl-C reaches every process of the terminal's session, and this one decides what ends.
    return subprocess.Popen(command, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _encode(tokenizer: Tokenizer, text: bytes, dtype: str) -> npt.NDArray[Any]:
    """The ids of a text in UTF-8, little-endian."""
    return np.array(tokenizer.encode(text.decode()), dtype=np.dtype(dtype).newbyteorder("<"))


def _identity(tokenizer: Tokenizer) -> bytes:
    """32 bytes that say which tokenizer it is."""
    return hashlib.sha256(json.dumps(tokenizer.identity(), sort_keys=True).encode()).digest()


def _read(stream: IO[bytes], size: int) -> bytes:
    """Exactly `size` bytes, or EOFError where the other process is gone."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _read_number(stream: IO[bytes]) -> int:
    return int(NUMBER.unpack(_read(stream, NUMBER.size))[0])


if __name__ == "__main__":
    # The parent process may be gone by the time of the answer.
    try:
        main(*sys.argv[1:])
    except (BrokenPipeError, EOFError):
        os._exit(1)
