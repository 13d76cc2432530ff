"""The tables of README.md: what gates change, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch

from gape.models import GPTConfig, cost
from gape.report.schemes import label, variant_of
from tables.markdown import Record, every, only, select, stored, table
from tables.speed import load

#: Rows of the table of schemes: the name, the scheme, its variant as a language model, and its rows of needles.
PAPER = ("paper", "")
SCHEMES: dict[str, tuple[str, str, tuple[str, str]]] = {
    "RoPE": ("rope", "", PAPER), "p-RoPE": ("p-rope", "", PAPER), "RoPE+GAPE": ("rope+gape", "", PAPER),
    "p-RoPE+GAPE": ("p-rope+gape", "", PAPER),
    "p-RoPE+GAPE, `gate_floor=4`": ("p-rope+gape", "floor4", ("landmarks", "floor")),
    "NoPE": ("nope", "", PAPER), "NoPE+GAPE": ("nope+gape", "", PAPER), "ALiBi": ("alibi", "", PAPER),
    "FoX": ("fox", "", PAPER), "HoPE": ("hope", "", ("far", "plain")), "HoPE+GAPE": ("hope+gape", "", ("far", "plain")),
}  # fmt: skip
SIZES: dict[str, Any] = {"n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 50257, "context_length": 1024}
MISSING = "–"


def schemes() -> str:
    """Which scheme does what: needles and perplexity at the training length and far beyond it, speed, cached bytes."""
    lines = []
    for title, (scheme, variant, needles) in SCHEMES.items():
        measured = [_perplexity(scheme, variant), *(_needles(scheme, target, *needles) for target in ("last", "first"))]
        share = None if variant else training_speed(scheme)
        if any(cell != MISSING for cell in measured):
            lines.append([title, *measured, f"{share:.3f}" if share else MISSING, _cache(scheme, variant)])
    head = [
        "extrapolates: perplexity at 1,024 → 32,768", "reads near text: last needle, 1× → 16×",
        "reads far text: first needle, 1× → 16×", "training speed", "cache, bytes per token",
    ]  # fmt: skip
    return table(["", *head], lines)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _by_seed(rows: Sequence[Record], key: str, **values: int) -> list[float]:
    return list({row["seed"]: row[key] for row in select(rows, **values)}.values())


def _needles(scheme: str, target: str, home: str, variant: str) -> str:
    """Accuracy at 1× and 16×, mean over seeds; their number where it is not three."""
    rows = select(every(f"results/niah/{home}/results.jsonl"), variant=variant, position=scheme, evaluated=scheme,
                  target=target)  # fmt: skip
    near, far = (_by_seed(rows, "accuracy", factor=factor) for factor in (1, 16))
    if not near or not far:
        return MISSING
    return f"{fmean(near):.2f} → {fmean(far):.2f}" + ("" if len(far) == 3 else f" ({_seeds(len(far))})")


def _perplexity(scheme: str, variant: str) -> str:
    """Perplexity of 60 books at the training length and at 32 times that, mean over seeds."""
    rows = [row for home in ("books*", "hope*") for row in every(f"results/lm/{home}/perplexity.jsonl")
            if (row["position"], variant_of(row), row["align"]) == (scheme, variant, 32768)]  # fmt: skip
    near, far = (_by_seed(rows, "perplexity", context=context) for context in (1024, 32768))
    return f"{fmean(near):.1f} → {fmean(far):.1f} ({_seeds(len(far))})" if near and far else MISSING


def training_speed(scheme: str) -> float | None:
    """Tokens per second in training, of p-RoPE's; None where it was not measured."""
    own, base = (every(f"results/lm/speed/{one}_graphs/runtime.jsonl") for one in (scheme, "p-rope"))
    return _rate(own) / _rate(base) if own else None


def _rate(rows: Sequence[Record]) -> float:
    return median(float(row["tokens_per_second"]) for row in select(rows, event="timing") if row["step"] > 15)


def _cache(scheme: str, variant: str) -> str:
    """Bytes of a cached token, and the share of them that a forgetting cache holds."""
    size = cost.cache_bytes(GPTConfig(**SIZES, position=scheme), length=1, batch=1, dtype=torch.bfloat16)
    values = {"run": f"{scheme}_{variant}_seed0", "kind": "decode", "length": 131072, "batch": 32}
    rows = select(every("results/forgetting/forgetting.jsonl"), **values)
    if not rows:
        return f"{size:,}"
    kept = only(rows, how="forgetting", eps=0.01)["bytes"] / only(rows, how="dense")["bytes"]
    return f"{size:,}; forgetting: {kept:.2f} of it"


def training_cost() -> str:
    """Speed, memory and size of the 44M model with gates and without."""
    columns = {}
    for scheme in ("p-rope", "p-rope+gape"):
        rows = stored(f"results/lm/speed/{scheme}_graphs/runtime.jsonl")
        timed = [row for row in select(rows, event="timing") if row["step"] > 15]
        config = GPTConfig(**SIZES, position=scheme)
        columns[label(scheme)] = [
            f"{select(rows, event='started')[0]['parameters']:,}",
            f"{_rate(rows) / 1e6:.2f} million",
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
        for row in load("generate")
        if (row["model"], row["prompt"], row["chunk"], row["failed"]) == ("smollm2-extended", "65536", "", "")
    }
    lines = []
    for title, key, unit in (
        ("prefill, s", "prefill_s", 1),
        ("time of a token, ms", "ms_per_token", 1),
        ("cache behind the prompt, GiB", "cache_bytes", 2**30),
    ):
        figures = [[float(rows[cache, batch][key]) / unit for batch in ("1", "8")] for cache in caches]
        lines.append([f"{title}: batch 1 and 8", *(f"{one:.3g}, {eight:.3g}" for one, eight in figures)])
    return table(["one H200, bfloat16", *heads], lines)
