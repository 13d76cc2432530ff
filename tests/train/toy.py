"""A model, data and settings small enough that a step takes milliseconds, with everything that resuming must carry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.train import Batch, TrainConfig, Trainer

VOCAB = 11


def gpt(seed: int = 0, **options):
    torch.manual_seed(seed)
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context_length": 8, "dropout": 0.1}
    return GPT(GPTConfig(vocab_size=VOCAB, **(settings | options)))


@dataclasses.dataclass
class Numbers:
    """Random ids with ragged targets; `poison` is a step whose ids stay good and whose weights' loss is made NaN."""

    seed: int = 0
    batch_size: int = 4
    length: int = 8

    def batch(self, step, micro):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 1009 + micro)
        ids = torch.randint(VOCAB, (self.batch_size, self.length + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.5] = -100
        targets[0, 0] = 1
        return Batch(ids[:, :-1], targets)

    def fingerprint(self):
        return f"numbers {self.seed} {self.batch_size} {self.length}"


def settings(**changes):
    values = {
        "max_steps": 12,
        "learning_rate": 1e-2,
        "min_learning_rate": 1e-3,
        "warmup_steps": 2,
        "accumulation": 2,
        "validate_every": 4,
        "checkpoint_every": 3,
        "keep_last": 2,
        "log_every": 5,
        "progress": "off",
    }
    return TrainConfig(**(values | changes))


def validate(model, step):
    """A number that depends on the weights, and draws that training must not notice."""
    assert not model.training
    assert not torch.is_grad_enabled()
    torch.rand(3)
    return {"accuracy": 0.5, "weight": float(model.embedding.weight.sum())}


def trainer(run_dir, *, model=None, source=None, check=validate, stop=None, console=None, **changes):
    model = gpt() if model is None else model
    source = Numbers() if source is None else source
    return Trainer(model, settings(**changes), source, run_dir, check, stop=stop, console=console)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(run_dir: Path):
    """What must not depend on interruptions: the last checkpoint's tensors, as bytes, and the log."""
    last = max((run_dir / "checkpoints").glob("step-????????"))
    files = {name: (last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}
    return {"name": last.name, "log": (run_dir / "log.jsonl").read_bytes(), **files}
