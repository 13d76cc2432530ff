"""The tables of README.md: what gates change, and what they cost."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import torch

from gape.models import GPTConfig, cost
from gape.report.schemes import label, name
from tables.markdown import select, stored, table
from tables.speed import load

#: Rows of the table of results: a scheme of the needle task, and a language model by its name.
SCHEMES = {
    "RoPE": ("rope", "RoPE"), "RoPE+GAPE": ("rope+gape", None), "p-RoPE": ("p-rope", "p-RoPE"),
    "p-RoPE+GAPE": ("p-rope+gape", "p-RoPE+GAPE"), "p-RoPE+GAPE, `gate_floor=4`": (None, "p-RoPE+GAPE (floor4)"),
    "NoPE": ("nope", None), "NoPE+GAPE": ("nope+gape", None), "ALiBi": ("alibi", "ALiBi"), "FoX": ("fox", "FoX"),
}  # fmt: skip
SIZES: dict[str, Any] = {"n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 50257, "context_length": 1024}


def results() -> str:
    """Needles found and perplexity, at the training length and far beyond it."""
    needles = stored("results/niah/paper/results.jsonl")
    losses = select(stored("results/lm/books/perplexity.jsonl"), align=32768)
    perplexities = {(name(row), row["context"]): f"{row['perplexity']:.1f}" for row in losses}
    lines = []
    for title, (scheme, model) in SCHEMES.items():
        cells = []
        for target in ("last", "first"):
            for factor in (1, 16):
                values = {"position": scheme, "evaluated": scheme, "target": target, "factor": factor}
                matches = [row["accuracy"] for row in select(needles, **values)]
                cells.append(f"{fmean(matches):.2f}" if matches else "–")
        cells += [perplexities[model, context] if model else "–" for context in (1024, 32768)]
        lines.append([title, *cells])
    head = ["last needle, 1×", "16×", "first needle, 1×", "16×", "perplexity at 1,024", "at 32,768"]
    return table(["", *head], lines)


def training_cost() -> str:
    """Speed, memory and size of the 44M model with gates and without."""
    columns = {}
    for scheme in ("p-rope", "p-rope+gape"):
        rows = stored(f"results/lm/speed/{scheme}_graphs/runtime.jsonl")
        timed = [row for row in select(rows, event="timing") if row["step"] > 15]
        config = GPTConfig(**SIZES, position=scheme)
        columns[label(scheme)] = [
            f"{select(rows, event='started')[0]['parameters']:,}",
            f"{median(row['tokens_per_second'] for row in timed) / 1e6:.2f} million",
            f"{max(row['peak_bytes'] for row in timed) / 2**30:.1f} GiB",
            f"{cost.cache_bytes(config, length=1, batch=1, dtype=torch.bfloat16):,}",
        ]
    names = [
        "`gape lm train lm/books`: parameters", "tokens per second in training", "peak GPU memory in training",
        "`model.new_cache()`: bytes per token, bfloat16",
    ]  # fmt: skip
    return table(
        ["one H200, `train.compile=graphs`", *columns],
        ([name, *cells] for name, *cells in zip(names, *columns.values(), strict=True)),
    )


def generation_cost() -> str:
    """Time and bytes of `model.generate` behind a long prompt, with gates and without."""
    heads = ("without gates", "`gape.hf.FullCache`", "`gape.hf.ForgettingCache`")
    caches = ("ungated", "gated-full", "forgetting")
    rows = {
        (row["cache"], row["batch"]): row
        for row in load("generate") if row["prompt"] == "65536" and not row["chunk"] and not row["failed"]
    }  # fmt: skip
    lines = []
    for title, key, unit in (
        ("prefill, s", "prefill_s", 1),
        ("time of a token, ms", "ms_per_token", 1),
        ("cache behind the prompt, GiB", "cache_bytes", 2**30),
    ):
        figures = [[float(rows[cache, batch][key]) / unit for batch in ("1", "8")] for cache in caches]
        lines.append([f"{title}: batch 1 and 8", *(f"{one:.3g}, {eight:.3g}" for one, eight in figures)])
    return table(["one H200, bfloat16", *heads], lines)
