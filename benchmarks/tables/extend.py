"""Tables of extended models, from results/extend: a line for each method, and differences to YaRN on the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gape.tasks.perplexity import weighted_interval
from tables.markdown import ROOT, interval, signed, table

HOME = Path("results") / "extend" / "smollm2"
NONE = "No rows yet.\n"
#: Names of tasks in heads of columns.
TASKS = {"niah_single_1": "single 1", "niah_single_2": "single 2", "niah_multikey_1": "multikey 1"}
BASE = "yarn"


def _summary(root: Path) -> dict[str, Any]:
    path = root / HOME / "summary.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _lengths(summary: dict[str, Any], name: str) -> list[str]:
    return sorted({length for one in summary.values() for length in one.get(name, {})}, key=int)


def _value(one: dict[str, Any], name: str, *keys: str, digits: int = 2) -> str:
    """A figure, with ± its deviation over seeds where there are several."""
    values: list[Any] = [one.get(name), one.get(f"{name}_std")]
    for key in keys:
        values = [value.get(key) if isinstance(value, dict) else None for value in values]
    if values[0] is None:
        return "–"
    return f"{values[0]:.{digits}f}" + ("" if values[1] is None else f" ± {values[1]:.{digits}f}")


def needles(root: Path = ROOT) -> str:
    """Needles by length and task, a table for each task."""
    summary = _summary(root)
    lengths = _lengths(summary, "needles")
    parts = []
    for task, name in TASKS.items():
        lines = [
            [method, str(len(one["seeds"])), *(_value(one, "needles", length, task) for length in lengths)]
            for method, one in summary.items()
        ]
        parts.append(table([f"needles, {name}", "seeds", *(f"{int(length):,}" for length in lengths)], lines))
    return "\n".join(parts) if summary else NONE


def perplexity(root: Path = ROOT) -> str:
    """Perplexity by context, minutes of tuning, and what short answers lost."""
    summary = _summary(root)
    lengths = _lengths(summary, "perplexity")
    lines = [
        [method, *(_value(one, "perplexity", length) for length in lengths),
         _value(one, "minutes", digits=1), _value(one, "kl", digits=3)]
        for method, one in summary.items()
    ]  # fmt: skip
    head = ["perplexity", *(f"{int(length):,}" for length in lengths), "minutes", "KL of short answers"]
    return table(head, lines) if summary else NONE


def cost(root: Path = ROOT) -> str:
    """Prefill, tokens per second and share of the cache through plain `generate`."""
    summary = _summary(root)
    lengths = _lengths(summary, "cache_share")
    lines = [
        [method, f"{int(length):,}", _value(one, "prefill_s", length, digits=3),
         _value(one, "tokens_per_second", length, digits=1), _value(one, "cache_share", length)]
        for method, one in summary.items()
        for length in lengths
        if length in one.get("cache_share", {})
    ]  # fmt: skip
    return table(["generate", "prompt", "prefill, s", "tokens/s", "cache of full"], lines) if lines else NONE


def defaults(root: Path = ROOT) -> str:
    """What the defaults of `gape hf extend` give, by length."""
    one = _summary(root).get("ours")
    if one is None:
        return NONE
    lengths = _lengths({"ours": one}, "cache_share")
    lines = [["perplexity", *(_value(one, "perplexity", length, digits=1) for length in lengths)]]
    lines += [[task, *(_value(one, "needles", length, task) for length in lengths)] for task in TASKS]
    lines += [["cache of a full one", *(_value(one, "cache_share", length) for length in lengths)]]
    return table(["tokens", *(f"{int(length):,}" for length in lengths)], lines)


def centered(root: Path = ROOT) -> str:
    """What a forgetting cache holds with keys about their mean, and without."""
    text = (root / HOME.parent / "centered.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    lines = [
        ["centred" if row["centered"] else "as they are",
         *(f"{row[name]:.3f}" for name in ("prefill_s", "cache_share", "keys_per_token"))]
        for row in rows
    ]  # fmt: skip
    return table(["keys", "prefill, s", "cache of full", "keys cached, of all"], lines)


def differences(root: Path = ROOT) -> str:
    """Needles of each method less YaRN's, on the same texts and seeds, with 95% intervals over texts."""
    path = root / HOME / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    cells = {
        (row["method"], row["task"], row["length"], row["seed"]): np.array(row["matches"], dtype=np.float64)
        for row in rows
        if row["kind"] == "needle"
    }
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != BASE):
        for task, length in sorted({key[1:3] for key in cells if key[0] == method}):
            keys = [key for key in cells if key[:3] == (method, task, length) and (BASE, *key[1:]) in cells]
            if not keys:
                continue
            each = np.mean([cells[key] - cells[BASE, *key[1:]] for key in keys], axis=0)
            ends = weighted_interval(each, np.ones_like(each), np.arange(len(each)))
            shown = interval(float(each.mean()), ends.low, ends.high, "+.2f")
            lines.append([f"{method} − {BASE}", TASKS.get(task, task), f"{length:,}", str(len(keys)), signed(shown)])
    return table(["methods", "task", "length", "seeds", "difference (95% interval)"], lines) if lines else NONE
