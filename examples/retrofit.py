"""Put gates into a model you have, fine-tune it on text, save it, load it, go on writing.

    python examples/retrofit.py MODEL TEXT --out DIR [--steps 200] [--length 512] [--learn gates+qk]

MODEL is a directory or a name on the hub, TEXT a file. Gates begin at identity: before the first step the logits are
the model's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gape.hf


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learn", default="gates+qk", choices=("gates", "gates+qk", "all"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    torch.manual_seed(0)
    print(gape.hf.plan(model, context_length=arguments.length, learn=arguments.learn))
    gape.hf.inject(model, context_length=arguments.length, learn=arguments.learn)

    ids = torch.tensor(tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"])
    windows = ids[: len(ids) // arguments.length * arguments.length].view(-1, arguments.length)
    optimizer = torch.optim.AdamW(gape.hf.parameter_groups(model, lr=1e-4))
    model.train()
    for step in range(arguments.steps):
        batch = windows[torch.randint(len(windows), (arguments.batch,))].to(device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == arguments.steps - 1:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)

    loaded = AutoModelForCausalLM.from_pretrained(arguments.out).eval()
    prompt = windows[:1, : min(16, arguments.length)]
    written = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
