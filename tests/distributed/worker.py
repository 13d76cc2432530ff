"""What processes of a test do: `torchrun --nproc-per-node N -m tests.distributed.worker TASK OUT [ARGUMENT]`.

The first process writes what the task gives, as JSON, to OUT.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

from gape.distributed import Job, Ranks, leave, processes
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.train import Batch, TrainConfig
from gape.train.optimizer import build, named
from gape.train.step import Updater
from gape.utils import launch

VOCAB, LENGTH, ROWS = 13, 32, 5
SCHEMES = {
    "rope": {},
    "p-rope+gape": {},
    "p-rope+gape floor": {"options": {"gate_floor": 4.0}},
    "alibi": {},
    "fox": {},
}
KINDS = ("plain", "documents", "padded")


def gpt(scheme: str, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    settings = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "context_length": 16}
    settings |= {"position": scheme.split(maxsplit=1)[0]} | SCHEMES[scheme] | changes
    model = GPT(GPTConfig(vocab_size=VOCAB, **settings)).to(dtype)
    for parameter in model.parameters():
        # Far from the start, where gates would have next to no gradient.
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


@dataclasses.dataclass
class Rows:
    """Random ids with ragged targets; documents of several lengths, or rows that are padded on the left."""

    kind: str = "plain"
    rows: int = ROWS
    length: int = LENGTH

    def batch(self, step, micro):
        draw = torch.Generator().manual_seed(1009 * step + micro)
        ids = torch.randint(VOCAB, (self.rows, self.length + 1), generator=draw)
        targets = ids[:, 1:].clone()
        # The first row has few targets, so that a mean of means would be wrong.
        targets[0, 3:] = -100
        targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
        documents = positions = None
        if self.kind == "documents":
            documents = (torch.rand(targets.shape, generator=draw) < 0.15).cumsum(1)
        if self.kind == "padded":
            pads = torch.randint(self.length // 2, (self.rows, 1), generator=draw)
            positions = torch.arange(self.length) - pads
            documents = (positions >= 0).long()
        return Batch(ids[:, :-1], targets, documents, positions)

    def fingerprint(self):
        return f"{self.kind} {self.rows} {self.length}"


def updater(job, scheme, dtype=torch.float64, **changes):
    settings = {"max_steps": 40, "learning_rate": 1e-2, "progress": "off"}
    config, model = TrainConfig(**(settings | changes)), gpt(scheme, dtype)
    device = torch.device("cpu")
    call = job.parallelize(model, low=False, compiles=False)
    return Updater(model, build(model, config), config, device, job, call)


def steps(job, scheme, kind, count, dtype, accumulation=1):
    """The losses of some steps, and the gradient of the first."""
    up = updater(job, scheme, dtype, accumulation=accumulation)
    source, losses = Rows(kind), []
    gradient = {}
    for step in range(1, count + 1):
        batches = [job.take(source, step, micro).batch for micro in range(accumulation)]
        if step == 1:
            loss = up._backward(batches)
            gradient = job.full({name: p.grad for name, p in named(up.optimizer).items() if p.grad is not None})
            gradient = {name: value.clone() for name, value in gradient.items()}
            up.optimizer.zero_grad()
        loss = up.step(batches, 1e-2)[0]
        losses.append(float(loss))
    return losses, gradient


def difference(mine, other):
    (losses, gradient), (expected, expected_gradient) = mine, other
    assert not gradient or gradient.keys() == expected_gradient.keys()
    largest = max((float((g - expected_gradient[n]).abs().max()) for n, g in gradient.items()), default=0.0)
    return [max(abs(a - b) for a, b in zip(losses, expected, strict=True)), largest]


def equal(jobs: str):
    """By job, scheme and kind of data: how far loss and gradient are from those of one process."""
    cpu, found = torch.device("cpu"), {}
    for name in jobs.split(","):
        shard, ways = name.startswith("fsdp"), int(name.partition("cp")[2] or 1)
        job = Ranks(cpu, shard=shard, context_parallel=ways)
        for scheme in SCHEMES:
            for kind in KINDS:
                exact = difference(
                    steps(job, scheme, kind, 1, torch.float64), steps(Job(), scheme, kind, 1, torch.float64)
                )
                found[f"{name} {scheme} {kind}"] = exact
    return found


def long_run(jobs: str):
    """By job and scheme: how far the losses of 20 steps in float32 are from those of one process."""
    cpu, found = torch.device("cpu"), {}
    for name in jobs.split(","):
        shard, ways = name.startswith("fsdp"), int(name.partition("cp")[2] or 1)
        job = Ranks(cpu, shard=shard, context_parallel=ways)
        for scheme in SCHEMES:
            mine = steps(job, scheme, "documents", 20, torch.float32, accumulation=2)[0]
            alone = steps(Job(), scheme, "documents", 20, torch.float32, accumulation=2)[0]
            found[f"{name} {scheme}"] = max(abs(a - b) for a, b in zip(mine, alone, strict=True))
    return found


TASKS = {"equal": equal, "long_run": long_run}


def main(task: str, out: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    processes.connect()
    found = TASKS[task](*arguments)
    if launch.is_first():
        Path(out).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
