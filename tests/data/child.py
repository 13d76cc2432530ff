"""A preparation in a process of its own, to be killed: `python -m tests.data.child INPUT DIRECTORY WORKERS`."""

from __future__ import annotations

import sys
import time

from gape.data import PrepareConfig, prepare
from gape.data.pipeline import Progress
from gape.train import Interrupted

#: Small shards and a wait after each request, so that most moments are inside the work.
SETTINGS = {"tokenizer": "bytes", "shard_tokens": 2000, "heldout_fraction": 0.1, "max_bad": 0.5}


def main(path: str, directory: str, workers: str) -> int:
    def show(progress: Progress) -> None:
        print(progress.documents, flush=True)
        time.sleep(0.02)

    try:
        prepare(PrepareConfig(inputs=(path,), **SETTINGS), directory, workers=int(workers), progress=show)
    except Interrupted as asked:
        return asked.code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
