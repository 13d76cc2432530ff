"""Outputs of the package before and after a change of its inside: store them, then compare.

    python tests/golden/golden.py store FILE      run everything, write FILE
    python tests/golden/golden.py compare FILE    run everything again, say what is equal to the bit and what is not

Only public names and commands are used, so that the script outlives what it checks. It runs on one CPU thread: numbers
depend on the machine, so store and compare on the same one. The exit code is 1 where a number moved by more than 1e-6
of the largest in its tensor, or where an entry is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gape

TOLERANCE = 1e-6
#: Values of a tensor that are stored beside its hash.
SAMPLES = 8
VOCAB, LENGTH, T = 27, 24, 16
ROOT = Path(__file__).resolve().parents[2]

Entry = dict[str, Any]


def tensor_entry(x: Tensor) -> Entry:
    """Hash, shape, largest magnitude and evenly spaced values of a tensor."""
    x = x.detach().contiguous()
    flat = x.flatten().double()
    picks = torch.linspace(0, max(len(flat) - 1, 0), min(SAMPLES, len(flat))).long()
    return {
        "shape": list(x.shape),
        "sha256": hashlib.sha256(x.flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        "largest": float(flat.abs().max()) if len(flat) else 0.0,
        "norm": float(flat.norm()),
        "values": flat[picks].tolist(),
    }


def text_entry(text: str) -> Entry:
    """Hash and number of lines of a text."""
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "lines": text.count("\n")}


def strong(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights so large that its attention, gates and biases matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def tokens(*shape: int) -> Tensor:
    """Random ids from 2 up."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def gradients(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, Entry]]:
    """Entries of all gradients of a module."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"{prefix}/grad/{name}", tensor_entry(parameter.grad)


def layers() -> Iterator[tuple[str, Entry]]:
    """Outputs and gradients of the attention layer, every scheme, plain and with packed documents."""
    x = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(0))
    documents = torch.arange(LENGTH).ge(10).long().expand(2, -1)
    for name in gape.positions.available():
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            layer = strong(gape.GAPEAttention(48, 4, 2, context_length=T, position=name)).to(dtype)
            prefix = f"layer/{name}/{str(dtype).removeprefix('torch.')}"
            given = x.to(dtype).clone().requires_grad_()
            out = layer(given)
            out.square().mean().backward()
            assert given.grad is not None
            yield f"{prefix}/out", tensor_entry(out)
            yield f"{prefix}/grad/x", tensor_entry(given.grad)
            yield from gradients(layer, prefix)
            yield f"{prefix}/documents", tensor_entry(layer(given, documents=documents))


def small_gpt(position: str, **options: Any) -> gape.GPT:
    """A GPT of two layers with grouped heads."""
    torch.manual_seed(0)
    config = gape.GPTConfig(
        vocab_size=VOCAB, n_layer=2, n_head=4, n_kv_head=2, n_embd=48, context_length=T, position=position,
        options=options,
    )  # fmt: skip
    model = gape.GPT(config)
    strong(model)
    return model.eval()


def gpts() -> Iterator[tuple[str, Entry]]:
    """Logits, loss and gradients of the GPT, and tokens it generates, every scheme."""
    ids = tokens(2, LENGTH)
    for name in gape.positions.available():
        model = small_gpt(name)
        logits, loss = model(ids, targets=ids.roll(-1, 1))
        assert loss is not None
        loss.backward()
        yield f"gpt/{name}/logits", tensor_entry(logits)
        yield from gradients(model, f"gpt/{name}")
        yield f"gpt/{name}/generated", tensor_entry(model.generate(ids[:, :9], 30, temperature=0))


def forgetting() -> Iterator[tuple[str, Entry]]:
    """Generation with the forgetting cache of the GPT."""
    ids = tokens(2, 60)
    for name in ("nope+gape", "p-rope+gape", "yarn+gape"):
        model = small_gpt(name, gate_floor=4.0)
        cache = gape.models.ForgettingCache(model, eps=1e-3)
        yield f"forgetting/{name}/generated", tensor_entry(model.generate(ids, 40, temperature=0, cache=cache))


def injected() -> Iterator[tuple[str, Entry]]:
    """An injected Llama: identity start, strong gates, gradients, generation with both caches."""
    import transformers

    import gape.hf

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    for position in (None, "p-rope+gape"):
        torch.manual_seed(0)
        model = strong(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))).eval()
        ids, prefix = tokens(2, LENGTH), f"injected/{position or 'own'}"
        gape.hf.inject(model, context_length=T, position=position, gates={"gate_floor": 2.0})
        yield f"{prefix}/identity", tensor_entry(model(ids).logits)
        strong(model)
        out = model(ids, labels=ids)
        out.loss.backward()
        yield f"{prefix}/logits", tensor_entry(out.logits)
        yield from gradients(model, prefix)
        settings = {"max_new_tokens": 30, "do_sample": False}
        yield f"{prefix}/generated", tensor_entry(model.generate(ids, **settings))
        cache = gape.hf.ForgettingCache(model, eps=1e-3, partial=True)
        yield f"{prefix}/forgetting", tensor_entry(model.generate(ids, past_key_values=cache, **settings))


def command(*arguments: str) -> None:
    """Run a command of the package.

    Raises:
        RuntimeError: it failed; says what it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "gape", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"gape {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def training(folder: Path) -> Iterator[tuple[str, Entry]]:
    """Losses of 20 training steps of a small language model."""
    text, corpus, runs = folder / "text.txt", folder / "corpus", folder / "runs"
    text.write_text("".join(f"{n} squared is {n * n}; " for n in range(4000)), encoding="utf-8")
    heldout = folder / "heldout.txt"
    heldout.write_text("".join(f"{n} cubed is {n**3}; " for n in range(3000)), encoding="utf-8")
    command("data", "prepare", str(text), "--heldout", str(heldout), "--tokenizer", "bytes", "--out", str(corpus))
    command("lm", "train", "lm/toy", f"data={corpus}", "--out", str(runs), "device=cpu", "train.max_steps=20",
            "train.log_every=1", "train.validate_every=10", "evaluation.contexts=[64, 256]")  # fmt: skip
    for log in sorted(runs.glob("*/log.jsonl")):
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        losses = torch.tensor([row["loss"] for row in rows if "loss" in row], dtype=torch.float64)
        yield f"training/{log.parent.name}/losses", tensor_entry(losses)
        read = [json.loads(line) for line in (log.parent / "perplexity.jsonl").read_text(encoding="utf-8").splitlines()]
        yield f"training/{log.parent.name}/perplexity", tensor_entry(torch.tensor([row["nll"] for row in read]))


def reports(folder: Path) -> Iterator[tuple[str, Entry]]:
    """Tables of reports drawn from stored rows."""
    for name in ("niah/paper", "lm/books", "lm/ablations"):
        out = folder / name.replace("/", "-")
        command("report", f"results/{name}", "--out", str(out))
        yield f"report/{name}", text_entry((out / "tables.md").read_text(encoding="utf-8"))


def everything() -> dict[str, Entry]:
    """All entries by name."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    entries: dict[str, Entry] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (layers(), gpts(), forgetting(), injected(), training(folder), reports(folder)):
            for key, entry in source:
                entries[key] = entry
                print(key, file=sys.stderr)
    return entries


def difference(before: Entry, after: Entry) -> float:
    """How far two entries are apart, over the largest value; infinite where they cannot be compared."""
    if before["sha256"] == after["sha256"]:
        return 0.0
    if "values" not in before or before["shape"] != after.get("shape"):
        return float("inf")
    pairs = zip([*before["values"], before["norm"]], [*after["values"], after["norm"]], strict=True)
    return max(abs(a - b) for a, b in pairs) / max(before["largest"], 1e-30)


def main() -> int:
    """Store or compare, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("store", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    after = everything()
    if arguments.action == "store":
        arguments.file.write_text(json.dumps(after, indent=0) + "\n", encoding="utf-8")
        return 0
    before = json.loads(arguments.file.read_text(encoding="utf-8"))
    moved = {name: difference(before[name], after[name]) for name in before if name in after}
    missing = sorted(set(before) - set(after))
    for name, distance in sorted(moved.items(), key=lambda item: -item[1]):
        if distance:
            print(f"{distance:.1e}  {name}")
    for name in missing:
        print(f"missing  {name}")
    equal = sum(not distance for distance in moved.values())
    print(f"{equal} of {len(before)} equal to the bit, {len(moved) - equal} not, {len(missing)} missing")
    return int(bool(missing) or any(distance > TOLERANCE for distance in moved.values()))


if __name__ == "__main__":
    sys.exit(main())
