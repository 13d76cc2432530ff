"""A preparation in a process of its own, to be killed: `python -m tests.data.child INPUT DIRECTORY`."""

from __future__ import annotations

import sys
import time

from gape.data import PrepareConfig, prepare
from gape.data.pipeline import Progress
from gape.utils import signals

#: Small shards and a wait after each batch, so that most moments are inside the work.
SETTINGS = {"tokenizer": "bytes", "shard_tokens": 20_000, "heldout_fraction": 0.1, "max_bad": 0.5}


def main(path: str, directory: str) -> int:
    def show(progress: Progress) -> None:
        print(progress.documents, flush=True)
        time.sleep(0.02)

    try:
        with signals.at_once():
            prepare(PrepareConfig(inputs=(path,), **SETTINGS), directory, progress=show)
    except signals.Stopped as signal:
        return signal.code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
