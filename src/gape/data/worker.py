"""A process that only tokenises: `python -m gape.data.worker TOKENIZER DTYPE`. Texts come in, ids go out.

A request is a number of texts and each text's length and bytes; an answer is each text's number of ids, then all ids.
Numbers are eight bytes, little-endian. The process ends with its input, so it never outlives who started it, however
that one died. It imports no torch and opens no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gape.data.tokenizer import Tokenizer, load_tokenizer

NUMBER = struct.Struct("<Q")


def encode(tokenizer: Tokenizer, text: bytes, dtype: str) -> npt.NDArray[Any]:
    """The ids of a text in UTF-8, little-endian."""
    return np.array(tokenizer.encode(text.decode()), dtype=np.dtype(dtype).newbyteorder("<"))


def greeting(tokenizer: Tokenizer) -> bytes:
    """32 bytes that say which tokenizer it is."""
    return hashlib.sha256(json.dumps(tokenizer.identity(), sort_keys=True).encode()).digest()


def send(stream: IO[bytes], texts: list[bytes]) -> None:
    """Write a request."""
    stream.write(NUMBER.pack(len(texts)))
    for text in texts:
        stream.write(NUMBER.pack(len(text)))
        stream.write(text)
    stream.flush()


def receive(stream: IO[bytes], texts: int, dtype: str) -> list[npt.NDArray[Any]]:
    """Read an answer.

    Raises:
        EOFError: the process is gone.
    """
    counts = [NUMBER.unpack(exactly(stream, NUMBER.size))[0] for _ in range(texts)]
    kind = np.dtype(dtype).newbyteorder("<")
    return [np.frombuffer(exactly(stream, count * kind.itemsize), dtype=kind) for count in counts]


def exactly(stream: IO[bytes], size: int) -> bytes:
    """So many bytes, or EOFError."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main(spec: str, dtype: str) -> None:
    """Answer until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = load_tokenizer(spec)
    answers.write(greeting(tokenizer))
    answers.flush()
    while head := requests.read(NUMBER.size):
        texts = []
        for _ in range(NUMBER.unpack(head)[0]):
            texts.append(exactly(requests, NUMBER.unpack(exactly(requests, NUMBER.size))[0]))
        ids = [encode(tokenizer, text, dtype) for text in texts]
        answers.writelines(NUMBER.pack(len(part)) for part in ids)
        answers.writelines(part.tobytes() for part in ids)
        answers.flush()


if __name__ == "__main__":
    # Who asked may be gone by the time of the answer; then there is nobody to tell.
    try:
        main(*sys.argv[1:])
    except (BrokenPipeError, EOFError):
        os._exit(1)
