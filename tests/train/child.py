"""A training run in a process of its own, to be killed: `python -m tests.train.child RUN_DIR KIND`."""

from __future__ import annotations

import sys

import torch

from gape.train import Interrupted
from tests.train.toy import Numbers, trainer

KINDS = {
    # Saves at every step, so that most moments are inside a save.
    "saving": {"max_steps": 600, "checkpoint_every": 1, "validate_every": 7, "log_every": 5},
    "training": {"max_steps": 100_000, "checkpoint_every": 0, "validate_every": 0},
    "validating": {"max_steps": 8, "checkpoint_every": 0, "validate_every": 4},
}


class Announced(Numbers):
    """Says when the first batch is asked for."""

    said = False

    def batch(self, step, micro):
        if not self.said:
            print("training", flush=True)
            self.said = True
        return super().batch(step, micro)


def main(run_dir: str, kind: str) -> int:
    torch.set_num_threads(1)
    try:
        trainer(run_dir, source=Announced(), **KINDS[kind]).run()
    except Interrupted as asked:
        print(asked, file=sys.stderr)
        return asked.code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
