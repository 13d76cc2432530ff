"""Tables of `docs/benchmarks.md` and `docs/skipping.md` from the stored rows; the newest row of a case counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import typer

import common
from common import Row

PAGE = Path("docs/benchmarks.md")
SKIPPING = Path("docs/skipping.md")

#: Gates that skipping is shown for.
KINDS = ("contracting", "landmarks", "trained", "trained-floor")

#: What skips, and what it is compared with.
PAIR = ("triton", "sdpa-cudnn")

#: Whom `triton` is set beside where nothing is skipped.
PEERS = ("sdpa-flash", "sdpa-cudnn", "fox", "fla", "split", "anchored")

#: Errors of a case that was timed again without them.
ERRORS = ("error", "dq", "dk", "dv", "dgate", "dlandmark", "damplitude")

#: By benchmark: what a table is about, and its columns with their headings.
TABLES: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "attention": (
        ("direction", "dtype", "dim", "heads", "kv_heads", "gates", "eps"),
        {
            "impl": "", "length": "tokens", "batch": "batch", "ms": "ms", "tflops": "TFLOP/s", "peak_mib": "MiB",
            "tiles": "tiles", "error": "error", "dgate": "dgate", "dlandmark": "dlandmark",
        },
    ),
    "prologue": (
        ("direction", "dtype", "dim", "heads", "kv_heads"),
        {
            "impl": "", "length": "tokens", "batch": "batch", "ms": "ms", "gbps": "GB/s", "of_copy": "of a copy",
            "of_fused_rope": "× fused RoPE", "of_compiled_rope": "× compiled RoPE", "peak_mib": "MiB", "error": "error",
        },
    ),
    "decode": (
        ("dtype", "dim", "heads", "kv_heads", "batch", "queries"),
        {
            "impl": "", "length": "keys", "ms": "ms", "gbps": "GB/s", "of_copy": "of a copy", "of_sdpa": "× SDPA",
            "peak_mib": "MiB", "error": "error",
        },
    ),
}  # fmt: skip


def redraw(page: Path, mark: str, text: str) -> None:
    """Put `text` between a page's two marks."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def skipping(root: Path = Path()) -> str:
    """How many times as fast as dense cuDNN the skipping kernel is, where both were measured in both directions."""
    found = [row for row in common.load(root / common.DATA / "attention.csv") if float(row["eps"]) > 0]
    newest = {(row["gates"], int(row["length"]), row["impl"], row["direction"]): row for row in found}
    lines = ["| `--gates` | tokens | tiles visited | forward | forward and backward |", "|---|---:|---:|---:|---:|"]
    for kind in KINDS:
        for length in sorted({length for gates, length, _, _ in newest if gates == kind}):
            pairs = [[newest.get((kind, length, impl, way)) for impl in PAIR] for way in ("forward", "both")]
            if any(row is None for pair in pairs for row in pair):
                continue
            gains = " | ".join(f"{float(dense['ms']) / float(ours['ms']):.2f}×" for ours, dense in pairs)  # type: ignore[index]
            tiles = pairs[0][0]["tiles"]  # type: ignore[index]
            lines.append(f"| `{kind}` | {length:,} | {tiles} | {gains} |")
    return "\n".join(lines) + "\n"


def rendered(root: Path = Path()) -> str:
    """The tables of every benchmark that has rows."""
    lines = []
    for name in TABLES:
        path = root / common.DATA / f"{name}.csv"
        if path.is_file():
            found = common.load(path)
            lines += [f"### {name}", "", *(_beside(found) if name == "attention" else []), *_tables(name, found)]
    return "\n".join(lines).rstrip() + "\n" if lines else "Nothing has been measured yet.\n"


def _beside(found: list[Row]) -> list[str]:
    """How many times as fast as others `triton` is, case by case, and the commits that they were measured at."""
    case = ("device", "dtype", "heads", "kv_heads", "dim", "length", "batch", "direction")
    dense = [row for row in found if row["gates"] == "log-normal" and float(row["eps"]) == 0]
    newest = {(*(row[key] for key in case), row["impl"]): row for row in dense}
    lines: dict[str, list[str]] = {}
    for row in sorted(newest.values(), key=lambda row: _order(row, case)):
        others = [newest.get((*(row[key] for key in case), name)) for name in PEERS]
        if row["impl"] == PAIR[0] and any(others):
            gains = [f"{float(other['ms']) / float(row['ms']):.2f}×" if other else "" for other in others]
            commits = dict.fromkeys(other["commit"] for other in (row, *others) if other)
            told = (row["dtype"], row["dim"], f"{int(row['length']):,}", row["direction"], *gains, ", ".join(commits))
            lines.setdefault(row["device"], []).append("| " + " | ".join(told) + " |")
    head = "| dtype | d | tokens | direction | " + " | ".join(PEERS) + " | commits |"
    rule = "|---|---:|---:|---|" + "---:|" * len(PEERS) + "---|"
    said = "`triton` beside others: their time over its own, the same sizes, nothing skipped"
    return [line for device, told in lines.items() for line in (f"**{device}**, {said}", "", head, rule, *told, "")]


def _order(row: Row, keys: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Columns as a key to sort by, numbers by their value."""
    return tuple((int(row[key]) if row[key].isdigit() else 0, row[key]) for key in keys)


def _earlier_errors(found: list[Row], timed: list[Row], about: Sequence[str]) -> list[str]:
    """Errors of cases whose newest row has none, from the newest row that has, with its commit."""
    keys = ("device", *about, "impl", "length", "batch")
    bare = {tuple(row[key] for key in keys) for row in timed if not row["error"]}
    earlier = {case: row for row in found if row["error"] and (case := tuple(row[key] for key in keys)) in bare}
    if not earlier:
        return []
    columns = {"impl": "", "length": "tokens", "batch": "batch", "commit": "commit"} | {name: name for name in ERRORS}
    of_kind = sorted(earlier.values(), key=lambda row: _order(row, ("length", "batch", "impl")))
    return ["Errors of these cases, from the newest rows that have them:", "", *_markdown(of_kind, columns), ""]


def _tables(name: str, found: list[Row]) -> list[str]:
    about, columns = TABLES[name]

    def subject(row: Row) -> tuple[str, ...]:
        return row["device"], *(row[key] for key in about)

    lines = []
    newest = {(subject(row), row["impl"], row["length"], row["batch"]): row for row in found}
    for what, members in groupby(sorted(newest.values(), key=subject), key=subject):
        of_kind = sorted(members, key=lambda row: (int(row["length"]), int(row["batch"]), row["impl"]))
        told = ", ".join(f"{key} {value}" for key, value in zip(about, what[1:], strict=True))
        shown = columns | ({"commit": "commit"} if len({row["commit"] for row in of_kind}) > 1 else {})
        lines += [f"**{what[0]}**, {told} ({_origin(of_kind)})", "", *_markdown(of_kind, shown), ""]
        lines += _earlier_errors(found, of_kind, about)
    return lines


def _origin(found: list[Row]) -> str:
    stamps = sorted({(row["torch"], row["triton"], row["commit"], row["tests"]) for row in found})
    return "; ".join(
        f"torch {torch}, triton {triton}, commit {commit}, tests {t}" for torch, triton, commit, t in stamps
    )


def _markdown(found: list[Row], columns: dict[str, str]) -> list[str]:
    shown = [name for name in columns if any(row.get(name) for row in found)]
    lines = ["| " + " | ".join(columns[name] for name in shown) + " |", "|---|" + "---:|" * (len(shown) - 1)]
    for row in found:
        cells = (f"{int(row[name]):,}" if name == "length" else row[name] for name in shown)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Redraw docs/benchmarks.md and docs/skipping.md from the stored rows."""
    if not PAGE.is_file():
        raise ValueError(f"there is no {PAGE} here, expected the root of a clone")
    redraw(PAGE, "benchmarks", rendered())
    redraw(SKIPPING, "skipping", skipping())
    typer.echo(PAGE)


if __name__ == "__main__":
    common.script(main)
