"""Fine-tune a model with gates in transformers' Trainer, sharded by FSDP2 in bfloat16, with gates in float32.

    torchrun --nproc-per-node 8 examples/trainer_fsdp2.py MODEL TEXT --out DIR [--steps 200] [--length 2048]

MODEL is a directory or a name on the hub, TEXT a file. A single process trains without sharding.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import gape.hf
from gape.distributed import shard_gates


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=2048)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    torch.manual_seed(0)
    gape.hf.inject(model, context_length=arguments.length)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(ids) - arguments.length, arguments.length)
    windows = [ids[start : start + arguments.length] for start in starts]

    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # With efficient loading accelerate would move gates to the meta device, and lose their shards.
    fsdp = {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    }
    settings = TrainingArguments(
        output_dir=str(arguments.out), max_steps=arguments.steps, per_device_train_batch_size=1, report_to=[],
        save_strategy="no", bf16=torch.cuda.is_available(), fsdp=sharded, fsdp_config=fsdp if sharded else None,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=settings, train_dataset=[{"input_ids": window, "labels": window} for window in windows]
    )
    if sharded:
        # Before the Trainer shards the rest: a group of FSDP2 has one dtype, and gates need float32.
        shard_gates(model.to(settings.device))
    trainer.train()
    trainer.save_model(str(arguments.out / "model"))


if __name__ == "__main__":
    main()
