"""A training run in the processes of a job, with a fault in one of them: `torchrun ... -m tests.distributed.child`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from gape import cli
from gape.distributed import job as jobs
from gape.distributed import processes
from gape.train import TrainConfig, Trainer
from gape.utils import launch
from tests.distributed.worker import Rows, gpt

app = typer.Typer()


class Faulty(Rows):
    """Rows that fail in one process at step 4."""

    def __init__(self, fault: str, rank: int, model: torch.nn.Module) -> None:
        super().__init__("documents")
        self.model = model
        self.fault = fault if launch.rank() == rank else ""

    def batch(self, step, micro):
        if self.fault == "nan" and step == 4:
            self.model.norm.register_forward_hook(lambda module, given, output: output * float("nan"))
        if self.fault == "error" and step == 4:
            raise ValueError("batch: got a broken file, expected tokens")
        return super().batch(step, micro)

    def fingerprint(self):
        return super().fingerprint() + (" other" if self.fault == "data" else "")


@app.command()
def main(
    run_dir: Path,
    steps: int = 12,
    shard: bool = False,
    ways: int = 1,
    fault: str = "",
    rank: Annotated[int, typer.Option("--at")] = 1,
    every: int = 3,
) -> None:
    torch.set_num_threads(1)
    model = gpt("p-rope+gape floor", torch.float32, dropout=0.0)
    here = launch.rank() == rank
    if fault == "weights" and here:
        torch.nn.init.normal_(model.embedding.weight)
    if fault == "code" and here:
        jobs.code_hash = lambda: "other"
    config = TrainConfig(
        max_steps=steps, decay_steps=100, learning_rate=1e-2, accumulation=2, validate_every=0, checkpoint_every=every,
        log_every=1, progress="off", shard=shard, context_parallel=ways,
    )  # fmt: skip
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    (run_dir.parent / f"{launch.rank()}.pid").write_text(str(os.getpid()))
    with processes.reported():
        Trainer(model, config, Faulty(fault, rank, model), run_dir).run()
    processes.leave()


if __name__ == "__main__":
    cli.run(app)
