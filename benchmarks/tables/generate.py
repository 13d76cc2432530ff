"""Tables of `model.generate`, with gates and without, from benchmarks/data; the newest row of a case counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tables.markdown import ROOT, table
from tables.speed import Row, load

#: What one figure is of; the rest of a row says where and when it was measured.
CASE = ("device", "model", "text", "dtype", "prompt", "batch", "chunk", "cache", "eps", "bounds")
SUBJECT = ("device", "model", "text", "dtype")
SIZE = ("prompt", "batch", "chunk")
#: What the others are divided by.
BASE = "ungated"
GIB = 2.0**30


def generation(root: Path = ROOT) -> str:
    """Figures of every cache, and how many times those of the model without gates they are."""
    rows = list({tuple(row[key] for key in CASE): row for row in load("generate", root)}.values())
    parts = []
    for subject, members in groupby(sorted(rows, key=_order), key=lambda row: [row[key] for key in SUBJECT]):
        own = list(members)
        parts.append(f"**{subject[1]}**, {subject[3]}, text: {subject[2]}, {subject[0]} ({_origin(own)})\n")
        for chunk, same in groupby(own, key=lambda row: row["chunk"]):
            if chunk:
                parts.append(f"The prompt in chunks of {int(chunk):,} tokens:\n")
            parts.append(_table(list(same), tokens=not chunk))
        parts.append(_failures(own))
    return "\n".join(filter(None, parts)) or "No rows yet.\n"


def _order(row: Row) -> tuple[object, ...]:
    """Subject, then at once before in chunks, then size; the order of caches is that of the rows."""
    return *(row[key] for key in SUBJECT), int(row["chunk"] or 0), int(row["prompt"]), int(row["batch"])


def _table(rows: list[Row], *, tokens: bool) -> str:
    bases = {tuple(row[key] for key in SIZE): row for row in rows if row["cache"] == BASE}
    head = ["prompt", "batch", "cache", "prefill, s", *(["tokens/s"] if tokens else []), "cache, GiB", "peak, GiB"]
    lines = []
    for row in rows:
        if row["failed"]:
            continue
        base = bases.get(tuple(row[key] for key in SIZE))
        figures = [_cell(row, base, "prefill_s")]
        if tokens:
            figures.append(_cell(row, base, "ms_per_token", rate=1000.0 * int(row["batch"])))
        figures += [_cell(row, base, name, unit=GIB) for name in ("cache_bytes", "peak_bytes")]
        lines.append([f"{int(row['prompt']):,}", row["batch"], _label(row), *figures])
    return table(head, lines) if lines else ""


def _cell(row: Row, base: Row | None, name: str, *, unit: float = 1.0, rate: float = 0.0) -> str:
    """A figure over `unit`, or `rate` over the figure, and its ratio to that of the model without gates."""
    # Where one token takes no time beside the prefill, the difference of two calls may be below zero.
    if not row[name] or float(row[name]) <= 0:
        return "–"
    value = rate / float(row[name]) if rate else float(row[name]) / unit
    if base is None or base is row or not base[name] or float(base[name]) <= 0:
        return f"{value:.3g}"
    ratio = float(row[name]) / float(base[name])
    return f"{value:.3g} ({1 / ratio if rate else ratio:.2f}×)"


def _label(row: Row) -> str:
    """The cache, with what tells two of a kind apart."""
    if not row["eps"]:
        return row["cache"]
    return f"{row['cache']}, eps {row['eps']}" + (f", bounds by {row['bounds']}" if row["bounds"] else "")


def _failures(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["failed"]:
            chunks = f" in chunks of {int(row['chunk']):,}" if row["chunk"] else ""
            size = f"{row['batch']} × {int(row['prompt']):,} tokens{chunks}"
            lines.append(f"- {_label(row)}, {size}: {row['failed']}")
    return "Failed:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _origin(rows: Sequence[Row]) -> str:
    """Versions and commits of rows, and of how many calls their times are medians."""
    names = ("torch", "transformers", "triton", "commit", "new_tokens", "repeats", "decode_repeats")
    own = {name: sorted({row[name] for row in rows if not row["failed"]}) for name in names}
    return ", ".join(f"{name} {' and '.join(values)}" for name, values in own.items())
