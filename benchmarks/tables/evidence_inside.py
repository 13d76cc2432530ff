"""What the stored rows say of claims about the inside of language models, about RULER and about cost."""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import Any

import numpy as np
import torch

from gape.models import GPTConfig, cost
from gape.report import ruler
from gape.report.schemes import name
from tables.evidence import GATED, Evidence, over
from tables.language import BOOKS, PAPER_ABLATION
from tables.markdown import interval, only, select, signed, stored
from tables.readme import SIZES, training_speed
from tables.speed import load

Floats = Any


def _entropy(scheme: str, length: int | None) -> dict[str, Any]:
    """The measurement of a scheme on books of a length, or on RULER's prompts."""
    record = next(row for row in stored(f"{BOOKS}/entropy.jsonl") if name(row) == scheme)
    return next(each for each in record["sets"] if each["asked"]["length"] == length)


def lower_entropy() -> Evidence:
    """Entropy of every layer less that of RoPE and p-RoPE, on the same prompts."""
    own, texts, parts = np.array(_entropy(GATED, None)["entropy"]), [], []
    for other in ("RoPE", "p-RoPE"):
        changes = (own - np.array(_entropy(other, None)["entropy"])).mean(-1)
        layers = [over(changes[:, layer]) for layer in range(changes.shape[1])]
        texts.append(f"− {other}: {interval(*over(changes.mean(-1)), '+.2f')}, "
                     f"lower in {sum(high < 0 for _, _, high in layers)} of {len(layers)} layers")  # fmt: skip
        parts += [high < 0 for _, _, high in layers]
    return Evidence("; ".join(texts), tuple(parts))


def gate_and_entropy() -> Evidence:
    """How mean gates and mean entropies of all heads go together, in ranks."""
    own = _entropy(GATED, None)
    gate, spread = (np.argsort(np.argsort(np.mean(own[key], axis=0).ravel())) for key in ("gate", "entropy"))
    ranks = float(np.corrcoef(gate, spread)[0, 1])
    # Fisher's transformation.
    low, high = np.tanh(np.arctanh(ranks) + np.array([-1.96, 1.96]) / np.sqrt(gate.size - 3))
    within = signed(f"{np.median(np.mean(own['correlation'], axis=0)):+.2f}")
    text = f"rank correlation over {gate.size} heads {interval(ranks, low, high, '+.2f')}"
    return Evidence(f"{text}; within a head {within} (median)", (bool(high < 0),))


def specialisation() -> Evidence:
    """Deviation of the entropies of a layer's heads, mean over layers, and what gates add to it, passage by passage."""
    texts, parts = [], []
    for length in (1024, 32768):
        heads = {one: np.array(_entropy(one, length)["entropy"]) for one in ("RoPE", "p-RoPE", GATED)}
        each = {one: own.std(-1, ddof=1).mean(-1) for one, own in heads.items()}
        change = over(each[GATED] - each["p-RoPE"])
        texts.append(f"{length:,} tokens: {' / '.join(f'{own.mean():.2f}' for own in each.values())}, "
                     f"over p-RoPE {interval(*change, '+.2f')}")  # fmt: skip
        parts.append(change[1] > 0)
    return Evidence(f"RoPE / p-RoPE / GAPE at {'; '.join(texts)}", tuple(parts))


@cache
def _routing(key: str) -> Floats:
    """A quantity of routing at the first and the last step, by layer and head."""
    rows = select(stored(f"{BOOKS}/routing.jsonl"), run="p-rope+gape_seed0")
    steps = [select(rows, step=step(row["step"] for row in rows)) for step in (min, max)]
    heads = {(row["layer"], row["head"]) for row in rows}
    shape = (2, 1 + max(layer for layer, _ in heads), 1 + max(head for _, head in heads))
    return np.array([[only(own, layer=at, head=head)[key] for at, head in sorted(heads)] for own in steps]
                    ).reshape(shape)  # fmt: skip


def masks_differ() -> Evidence:
    """The strongest and the weakest mask of all heads."""
    last = _routing("mean_mask")[1]
    return Evidence(f"mean M of heads {last.min():.2f} to {last.max():.2f}", (bool(last.max() > 10 * last.min()),))


def masks_rise() -> Evidence:
    """Growth of the mask by layer, and which layer leads."""
    first, last = _routing("mean_mask").mean(-1)
    text = ", ".join(f"{one:.2f} → {other:.2f}" for one, other in zip(first, last, strict=True))
    return Evidence(f"mean M of layers 0 to {len(last) - 1}: {text}", (bool((last > first).all()), last.argmax() == 1))


def landmarks_by_layer() -> Evidence:
    """Landmarks of heads at the end, and in the layers that the paper names."""
    last = _routing("landmark")[1]
    ranges = {f"layer {at}": last[at] for at in (1, 2, 5)}
    text = ", ".join(f"{title} {own.min():.2f} to {own.max():.2f}" for title, own in ranges.items())
    parts = (last[1].max() < 0.1, last[2].max() > 0.5, last[5].max() > 0.5)
    return Evidence(f"{text}; all heads {last.min():.2f} to {last.max():.2f}", tuple(map(bool, parts)))


def amplitudes() -> Evidence:
    """The range of the amplitudes."""
    last = _routing("amplitude")[1]
    return Evidence(f"{last.min():.2f} to {last.max():.2f}", (bool(last.max() < 2),))


def norms() -> Evidence:
    """The largest norm of a rotary pair over the mean of all."""
    records = {name(row): row["sets"][-1] for row in stored(f"{BOOKS}/spectrum.jsonl")}
    texts, parts = [], []
    for side in ("queries", "keys"):
        means = {one: np.mean(records[one][side]["mean"], axis=(0, 1)) for one in ("RoPE", "p-RoPE", GATED)}
        peaks = {one: float(mean.max() / mean.mean()) for one, mean in means.items()}
        texts.append(f"{side} {' / '.join(f'{peak:.2f}' for peak in peaks.values())}")
        parts += [peaks["RoPE"] >= 2, peaks["p-RoPE"] >= 2]
    return Evidence(f"RoPE / p-RoPE / GAPE: {', '.join(texts)}", tuple(parts))


@cache
def _ruler(home: str) -> dict[str, ruler.Method]:
    return {method.label: method for method in ruler.methods(stored(f"results/ruler/{home}/ruler.jsonl"))}


def _differences(home: str, one: str, other: str) -> dict[ruler.Column, ruler.Paired]:
    by = _ruler(home)
    each = {column: ruler.difference(by[one], by[other], column) for column in ruler.columns([by[one]])}
    return {column: paired for column, paired in each.items() if paired}


def ruler_losses() -> Evidence:
    """In how many columns the NLL is lower or higher."""
    texts, parts = [], []
    for other in ("RoPE", "p-RoPE"):
        each = _differences("44m", GATED, other).values()
        better, worse = (sum(paired.verdict == word for paired in each) for word in ("better", "worse"))
        least, most = (end(paired.mean for paired in each) for end in (min, max))
        texts.append(signed(f"− {other}: {least:+.2f} to {most:+.2f} nats; lower in {better}, higher in {worse} "
                            f"of {len(each)} columns"))  # fmt: skip
        parts += [paired.verdict == "better" for paired in each]
    return Evidence("; ".join(texts), tuple(parts))


def ruler_widening() -> Evidence:
    """How the difference to RoPE changes from 4k to 8k tokens, with intervals over samples of both lengths."""
    each, texts, parts = _differences("44m", GATED, "RoPE"), [], []
    for task in dict.fromkeys(task for task, _ in each):
        near, far = each[task, 4096], each[task, 8192]
        # The samples of two lengths are independent.
        half = float(np.hypot(near.high - near.low, far.high - far.low)) / 2
        change = far.mean - near.mean
        texts.append(f"{task} {interval(change, change - half, change + half, '+.2f')}")
        parts.append(change + half < 0)
    return Evidence(", ".join(texts), tuple(parts))


def ruler_answers() -> Evidence:
    """How many right answers greedy decoding gives on the task that retrieves."""
    by, columns = _ruler("44m"), [("niah_multikey_1", length) for length in (4096, 8192)]
    right = {one: np.array([by[one].values(column, "match") for column in columns], dtype=np.float64)
             for one in ("RoPE", "p-RoPE", GATED)}  # fmt: skip
    parts = (over((right[GATED] - right[other]).ravel())[1] > 0 for other in ("RoPE", "p-RoPE"))
    text = " / ".join(f"{own.sum():.0f}" for own in right.values())
    return Evidence(f"right answers of {right[GATED].size}, RoPE / p-RoPE / GAPE: {text}", tuple(parts))


def ruler_ablation(variant: str) -> Evidence:
    """In how many columns removing a gate changes the NLL, and where in the direction of the paper's table."""
    each = _differences("ablation", variant, GATED)
    higher, lower = (sum(paired.verdict == word for paired in each.values()) for word in ("worse", "better"))
    least, most = (end(paired.percent(paired.mean) for paired in each.values()) for end in (min, max))
    text = signed(f"{least:+.2f}% to {most:+.2f}%; raised in {higher}, lowered in {lower} of {len(each)} columns")
    expected = ("worse" if cell.startswith("+") else "better" for cell in PAPER_ABLATION[variant].split())
    return Evidence(text, tuple(paired.verdict == word for paired, word in zip(each.values(), expected, strict=True)))


def exactness() -> Evidence:
    """Errors of the paper's two coordinates beside plain attention's."""
    values = {"quantity": "output", "dtype": "bfloat16", "strength": "10", "device": "NVIDIA H200"}
    rows = {int(row["keys"]): row for row in load("precision") if values.items() <= row.items()}
    text = ", ".join(f"{keys:,} keys {float(rows[keys]['rank2']):.2g}" for keys in (1024, 8192, 131072))
    plain = max(float(row["plain"]) for row in rows.values())
    parts = (float(rows[keys]["rank2"]) <= 2 * float(rows[keys]["plain"]) for keys in (1024, 8192, 131072))
    return Evidence(f"relative error in bfloat16: {text}; attention without a bias {plain:.2g}", tuple(parts))


def speed() -> Evidence:
    """Time of training with gates beside p-RoPE, and of a layer beside RoPE."""
    share = training_speed("p-rope+gape")
    assert share is not None
    times = [float(row["of_compiled_rope"]) for row in load("prologue")
             if (row["impl"], row["device"]) == ("fused-gape+attention", "NVIDIA H200")]  # fmt: skip
    plain, gated = (
        median(row["seconds_per_step"] for row in select(stored(path), event="timing") if row["step"] > 100)
        for path in (f"results/niah/speed/{one}/runtime.jsonl" for one in ("p-rope", "p-rope+gape"))
    )
    text = f"44M model {share:.3f}, needle model {plain / gated:.2f} of p-RoPE's tokens per second"
    return Evidence(f"{text}; a layer {min(times):.2f} to {max(times):.2f} of RoPE's time",
                    (share >= 0.95, plain / gated >= 0.95, max(times) <= 1.05))  # fmt: skip


def cache_bytes() -> Evidence:
    """Bytes of a cached token of the 44M model."""
    plain, gated = (cost.cache_bytes(GPTConfig(**SIZES, position=one), length=1, batch=1, dtype=torch.bfloat16)
                    for one in ("p-rope", "p-rope+gape"))  # fmt: skip
    return Evidence(f"bytes per token: p-RoPE {plain:,}, with gates {gated:,}", (gated <= plain,))
