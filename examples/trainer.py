"""Fine-tune a model with gates through the plain Trainer of transformers, on the windows that `gape hf finetune` takes.

    gape hf inject MODEL --context-length 1024 --out gated
    gape hf finetune gated TEXT --out run --length 1024 --batch-size 8 --steps 200 --precision float32
    python examples/trainer.py gated run/corpus --out trained --length 1024 --batch-size 8 --steps 200

Only the optimiser is not the Trainer's own: its groups let gates learn ten times as fast. Rates, their schedule and
the windows are those of the command, so the losses can be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import gape.hf
from gape.data import WindowSource, open_corpus


class Windows(IterableDataset[dict[str, Tensor]]):
    """Windows of a corpus, in the order of `gape hf finetune`."""

    def __init__(self, source: WindowSource) -> None:
        self.source = source

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = 0
        while True:
            step += 1
            batch = self.source.batch(step, 0)
            for ids, targets in zip(batch.ids, batch.targets, strict=True):
                # The model shifts labels itself.
                window = torch.cat([ids, targets[-1:]])
                yield {"input_ids": window, "labels": window}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, source: WindowSource, windows: int = 64) -> float:
    """The mean loss on held-out windows, those that `gape hf finetune` validates on."""
    losses = []
    for step in range(1, max(1, min(windows, source.windows) // source.batch_size) + 1):
        batch = source.batch(step, 0)
        ids = torch.cat([batch.ids, batch.targets[:, -1:]], dim=1).to(next(model.parameters()).device)
        losses.append(model.eval()(input_ids=ids, labels=ids).loss.double())
    return float(torch.stack(losses).mean())


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--bf16", action="store_true", help="autocast, as --precision bfloat16 of the command")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    sizes = {"length": arguments.length, "batch_size": arguments.batch_size}
    corpus = open_corpus(arguments.corpus)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimizer = torch.optim.AdamW(gape.hf.parameter_groups(model, arguments.learning_rate), betas=(0.9, 0.95))
    settings = TrainingArguments(
        output_dir=arguments.out, max_steps=arguments.steps, per_device_train_batch_size=arguments.batch_size,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}, save_strategy="no",
        logging_steps=max(1, arguments.steps // 10), report_to=[], use_cpu=arguments.cpu, bf16=arguments.bf16,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=settings, train_dataset=Windows(WindowSource(corpus, **sizes)), optimizers=(optimizer, None)
    )
    trainer.add_callback(gape.hf.GateCallback(trainer))
    trainer.train()
    trainer.save_model(arguments.out)
    print(f"held-out loss {held_out_loss(model, WindowSource(corpus, split='heldout', **sizes)):.5f}")


if __name__ == "__main__":
    main()
