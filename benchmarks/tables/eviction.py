"""Table of caches that hold as many bytes, from benchmarks/data/evict.csv; the newest row of a case counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tables.markdown import ROOT, table
from tables.speed import Row, load

NONE = "No rows yet.\n"
FULL, OURS = "full", "forgetting"
#: What rows have to agree in to be in one table, and what tells their cells apart.
SUBJECT = ("device", "dtype", "model", "read_first", "bounds", "texts")
CELL = ("base", "prompt", "task", "cache", "setting")


class Mean(NamedTuple):
    """Of a cell, over tasks: the share of texts with every token right, nats per token, bytes of a full cache."""

    exact: float
    nll: float
    share: float

    def __str__(self) -> str:
        return f"{self.exact:.2f} ({self.nll:.2f})"


def eviction(root: Path = ROOT) -> str:
    """Needles by prompt and setting through every cache, and where one of the others is above ours."""
    rows = list({tuple(row[key] for key in SUBJECT + CELL): row for row in load("evict", root)}.values())
    bounds = {row["bounds"] for row in rows if row["bounds"]}
    # The full cache has no bounds and stands beside all.
    spread = [row | {"bounds": each} for row in rows for each in ([row["bounds"]] if row["bounds"] else sorted(bounds))]
    ordered = sorted(spread, key=lambda row: [row[key] for key in SUBJECT])
    parts = []
    for subject, members in groupby(
        ordered, key=lambda row: dict(zip(SUBJECT, (row[k] for k in SUBJECT), strict=True))
    ):
        parts.append(_subject(subject, list(members)))
    return "\n".join(parts) or NONE


def _subject(about: Row, rows: list[Row]) -> str:
    cells = _cells(rows)
    order = "the context first, then the question" if about["read_first"] == "context" else "context and question"
    commits = " and ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"**{about['model']}**, {about['dtype']}, {about['device']} (commit {commits}), bounds by {about['bounds']}, "
        f"{about['texts']} texts of each task, read: {order}\n"
    ]
    for base in sorted({row["base"] for row in rows}):
        if base:
            lines.append(f"Presses and `full` on **{base}**, a model without gates:\n")
        lines.append(_table(cells, base, rows))
    return "\n".join([*lines, _verdict(cells), *_failures(rows)])


def _cells(rows: Sequence[Row]) -> dict[tuple[str, int, str, str], Mean]:
    """Means over tasks by base, prompt, cache and setting; only where every task of the forgetting cache is there."""
    tasks: dict[int, set[str]] = {}
    values: dict[tuple[str, int, str, str], dict[str, Mean]] = {}
    for row in rows:
        tasks.setdefault(int(row["prompt"]), set()).add(row["task"])
        if not row["failed"]:
            key = row["base"], int(row["prompt"]), row["cache"], row["setting"]
            values.setdefault(key, {})[row["task"]] = Mean(*(float(row[name]) for name in ("exact", "nll", "share")))
    return {
        key: Mean(*(sum(each) / len(found) for each in zip(*found.values(), strict=True)))
        for key, found in values.items()
        if set(found) == tasks[key[1]]
    }


def _table(cells: dict[tuple[str, int, str, str], Mean], base: str, rows: Sequence[Row]) -> str:
    presses = [name for name in dict.fromkeys(row["cache"] for row in rows) if name not in (FULL, OURS)]
    lines = []
    for prompt, setting in sorted({(n, setting) for _, n, cache, setting in cells if cache == OURS}, key=_place):
        ours, full = cells["", prompt, OURS, setting], cells.get((base, prompt, FULL, ""))
        others = [cells.get((base, prompt, name, setting)) for name in presses]
        if base and not any(others):
            continue
        figures = ["–" if each is None else str(each) for each in (full, ours, *others)]
        lines.append([f"{prompt:,}", setting, f"{ours.share:.2f}", *figures])
    return table(["prompt", "setting of ours", "bytes of full", FULL, OURS, *presses], lines)


def _place(cell: tuple[int, str]) -> tuple[int, str, float]:
    """Where a prompt and a setting stand: by size, falling."""
    prompt, (kind, _, value) = cell[0], cell[1].partition(" ")
    return prompt, kind, float(value) if kind == "eps" else -float(value)


def _verdict(cells: dict[tuple[str, int, str, str], Mean]) -> str:
    """In how many cells no press is above ours, and those in which one is."""
    above, count = [], 0
    for (base, prompt, cache, setting), ours in sorted(cells.items(), key=lambda item: item[0][1]):
        rivals = {
            (name, where): mean
            for (where, n, name, step), mean in cells.items()
            if (n, step) == (prompt, setting) and name not in (FULL, OURS)
        }
        if base or cache != OURS or not rivals:
            continue
        count += 1
        (name, where), best = max(rivals.items(), key=lambda item: item[1].exact)
        if best.exact > ours.exact:
            place = f" on {where}" if where else ""
            above.append(f"{prompt:,} {setting}: {name}{place} {best.exact:.2f} against {ours.exact:.2f}")
    if not count:
        return ""
    rest = f"; a press finds more at {'; '.join(above)}" if above else ""
    return f"No press finds more needles than `forgetting` in {count - len(above)} of {count} cells{rest}.\n"


def _failures(rows: Sequence[Row]) -> list[str]:
    return [
        f"- {row['cache']}{' on ' + row['base'] if row['base'] else ''} {row['setting']}, {row['task']} at "
        f"{int(row['prompt']):,}: {row['failed']}\n"
        for row in rows
        if row["failed"]
    ]
