"""Tables of the kernels' speed and errors, from benchmarks/data; the newest row of a case counts."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tables.markdown import ROOT, table

Row = dict[str, str]

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


def load(name: str, root: Path = ROOT) -> list[Row]:
    """The stored rows of a benchmark; none where it has not run."""
    path = root / "benchmarks/data" / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def skipping(root: Path = ROOT) -> str:
    """How many times as fast as dense cuDNN the skipping kernel is, where both were measured in both directions."""
    rows = [row for row in load("attention", root) if float(row["eps"]) > 0]
    newest = {(row["gates"], int(row["length"]), row["impl"], row["direction"]): row for row in rows}
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


def benchmarks(root: Path = ROOT) -> str:
    """The tables of every benchmark that has rows."""
    lines = []
    for name in TABLES:
        rows = load(name, root)
        if rows:
            lines += [f"### {name}", "", *(_beside(rows) if name == "attention" else []), *_tables(name, rows)]
    return "\n".join(lines).rstrip() + "\n" if lines else "Nothing has been measured yet.\n"


def _beside(rows: list[Row]) -> list[str]:
    """How many times as fast as others `triton` is, case by case, and the commits that they were measured at."""
    case = ("device", "dtype", "heads", "kv_heads", "dim", "length", "batch", "direction")
    dense = [row for row in rows if row["gates"] == "log-normal" and float(row["eps"]) == 0]
    newest = {(*(row[key] for key in case), row["impl"]): row for row in dense}
    lines: dict[str, list[str]] = {}
    for row in sorted(newest.values(), key=lambda row: _order(row, case)):
        others = [newest.get((*(row[key] for key in case), name)) for name in PEERS]
        if row["impl"] == PAIR[0] and any(others):
            gains = [f"{float(other['ms']) / float(row['ms']):.2f}×" if other else "" for other in others]
            commits = dict.fromkeys(other["commit"] for other in (row, *others) if other)
            size = (row["dtype"], row["dim"], f"{int(row['length']):,}", row["direction"])
            cells = (*size, *gains, ", ".join(commits))
            lines.setdefault(row["device"], []).append("| " + " | ".join(cells) + " |")
    head = "| dtype | d | tokens | direction | " + " | ".join(PEERS) + " | commits |"
    rule = "|---|---:|---:|---|" + "---:|" * len(PEERS) + "---|"
    title = "`triton` beside others: their time over its own, the same sizes, nothing skipped"
    return [line for device, body in lines.items() for line in (f"**{device}**, {title}", "", head, rule, *body, "")]


def _order(row: Row, keys: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Columns as a key to sort by, numbers by their value."""
    return tuple((int(row[key]) if row[key].isdigit() else 0, row[key]) for key in keys)


def _earlier_errors(rows: list[Row], timed: list[Row], about: Sequence[str]) -> list[str]:
    """Errors of cases whose newest row has none, from the newest row that has, with its commit."""
    keys = ("device", *about, "impl", "length", "batch")
    bare = {tuple(row[key] for key in keys) for row in timed if not row["error"]}
    earlier = {case: row for row in rows if row["error"] and (case := tuple(row[key] for key in keys)) in bare}
    if not earlier:
        return []
    columns = {"impl": "", "length": "tokens", "batch": "batch", "commit": "commit"} | {name: name for name in ERRORS}
    of_kind = sorted(earlier.values(), key=lambda row: _order(row, ("length", "batch", "impl")))
    return ["Errors of these cases, from the newest rows that have them:", "", *_markdown(of_kind, columns), ""]


def _tables(name: str, rows: list[Row]) -> list[str]:
    about, columns = TABLES[name]

    def subject(row: Row) -> tuple[str, ...]:
        return row["device"], *(row[key] for key in about)

    lines = []
    newest = {(subject(row), row["impl"], row["length"], row["batch"]): row for row in rows}
    for what, members in groupby(sorted(newest.values(), key=subject), key=subject):
        of_kind = sorted(members, key=lambda row: (int(row["length"]), int(row["batch"]), row["impl"]))
        case = ", ".join(f"{key} {value}" for key, value in zip(about, what[1:], strict=True))
        shown = columns | ({"commit": "commit"} if len({row["commit"] for row in of_kind}) > 1 else {})
        lines += [f"**{what[0]}**, {case} ({_origin(of_kind)})", "", *_markdown(of_kind, shown), ""]
        lines += _earlier_errors(rows, of_kind, about)
    return lines


def _origin(rows: list[Row]) -> str:
    stamps = sorted({(row["torch"], row["triton"], row["commit"], row["tests"]) for row in rows})
    return "; ".join(
        f"torch {torch}, triton {triton}, commit {commit}, tests {t}" for torch, triton, commit, t in stamps
    )


def _markdown(rows: list[Row], columns: dict[str, str]) -> list[str]:
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    lines = ["| " + " | ".join(columns[name] for name in shown) + " |", "|---|" + "---:|" * (len(shown) - 1)]
    for row in rows:
        cells = (f"{int(row[name]):,}" if name == "length" else row[name] for name in shown)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


#: Columns of errors; `anchored` is what `split` is today, which took any number of queries in one call before.
IMPLS = ("plain", "rank2", "split", "anchored", "triton")
QUANTITIES = ("output", "dgate", "dlandmark", "damplitude", "dq", "dk", "dv")


def precision(rows: Sequence[Row] | None = None) -> str:
    """Errors against float64 by device and quantity."""
    rows = load("precision") if rows is None else rows
    lines = []
    for device in sorted({row["device"] for row in rows}):
        own = [row for row in rows if row["device"] == device]
        lines += [f"### {device} (torch {own[0]['torch']}, commit {own[0]['commit']})", ""]
        for quantity in QUANTITIES:
            lines += _errors(quantity, [row for row in own if row["quantity"] == quantity])
    return "\n".join(lines).rstrip() + "\n"


def _errors(quantity: str, rows: list[Row]) -> list[str]:
    shown = [name for name in IMPLS if any(row[name] for row in rows)]
    head = ["dtype", "keys", "Γg", *("plain, no bias" if name == "plain" else name for name in shown)]
    cells = ([row["dtype"], f"{int(row['keys']):,}", row["strength"], *(row[name] for name in shown)] for row in rows)
    return [f"**{quantity}**", "", *table(head, cells).splitlines(), ""]


def rank2_beside_split() -> str:
    """Errors of the output in bfloat16 on an H200, Γg = 10."""
    values = {"quantity": "output", "dtype": "bfloat16", "strength": "10", "device": "NVIDIA H200"}
    rows = [row for row in load("precision") if values.items() <= row.items()]
    head = ["keys", "no bias", "`rank2`, the paper's form", "`split`", "`triton`"]
    names = ("plain", "rank2", "split", "triton")
    return table(head, ([f"{int(r['keys']):,}", *(f"{float(r[name]):.2g}" for name in names)] for r in rows))


def layer_cost() -> str:
    """Prologue and attention with gates as a multiple of RoPE's time, on an H200."""
    rows = [r for r in load("prologue") if r["impl"] == "fused-gape+attention" and r["device"] == "NVIDIA H200"]
    by = {(row["direction"], int(row["length"])): row for row in rows}
    lengths, lines = (4096, 16384, 65536), []
    for column, base in (("of_fused_rope", "RoPE by the same kernel"), ("of_compiled_rope", "compiled plain RoPE")):
        for way, name in (("forward", "forward"), ("both", "forward and backward")):
            lines.append([f"{name}, times {base}", *(f"{float(by[way, at][column]):.3f}" for at in lengths)])
    return table(["tokens", *(f"{length:,}" for length in lengths)], lines)


def gate_errors() -> str:
    """The largest errors of gate gradients on an H200, over both half precisions and all lengths."""
    rows = [row for row in load("precision") if row["device"] == "NVIDIA H200"]
    lines = []
    for impl, column in (("`split`", "anchored"), ("`triton`", "triton")):
        for strengths, name in ((("1", "10"), "Γg ≤ 10"), (("100",), "Γg = 100")):
            cells = []
            for quantity in QUANTITIES[1:4]:
                own = [row for row in rows if row["quantity"] == quantity and row["strength"] in strengths]
                cells.append(f"{max(float(row[column]) for row in own):.2%}")
            lines.append([f"{impl}, {name}", *cells])
    return table(["largest error, 1,024 to 131,072 tokens", *QUANTITIES[1:4]], lines)


def kernels(root: Path = ROOT) -> str:
    """Milliseconds of attention with gates, and how many times those of others without a bias they are.

    Of each size the newest rows that were measured at one commit, in bfloat16 and both directions. The last column is
    the largest error of the output and of the gradients of q, k and v, over cuDNN's own.
    """
    runs: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in load("attention", root):
        if (row["dtype"], row["gates"], float(row["eps"])) == ("bfloat16", "log-normal", 0.0):
            run = tuple(row[name] for name in ("batch", "heads", "kv_heads", "length", "dim", "device", "commit"))
            runs.setdefault(run, {})[row["impl"], row["direction"]] = row
    needed = {(impl, way) for impl in ("triton", "split", "sdpa-cudnn", "sdpa-flash") for way in ("forward", "both")}
    newest = {run[:6]: (run[6], rows) for run, rows in runs.items() if needed <= rows.keys()}
    lines = []
    for size, (commit, rows) in newest.items():
        cells = [", ".join(f"{int(x):,}" for x in size[:5])]
        for way in ("forward", "both"):
            own, other, cudnn, flash = (
                float(rows[impl, way]["ms"]) for impl in ("triton", "split", "sdpa-cudnn", "sdpa-flash")
            )
            cells += [f"{own:.3g}", f"{own / cudnn:.2f}×", f"{own / flash:.2f}×", f"{other / cudnn:.2f}×"]
        lines.append([*cells, _largest_error(rows["triton", "both"], rows["sdpa-cudnn", "both"]), commit])
    ways = ["triton, ms", "over cuDNN", "over flash", "split over cuDNN"]
    columns = [f"{way}, {name}" for way in ("forward", "both") for name in ways]
    head = ["B, Hq, Hk, N, D", *columns, "triton's error over cuDNN's", "commit"]
    return table(head, lines) if lines else "No rows yet.\n"


def _largest_error(own: Row, plain: Row) -> str:
    """The largest error over plain attention's; empty where one was not measured."""
    pairs = [(own[name], plain[name]) for name in ERRORS[:4]]
    return f"{max(float(a) / float(b) for a, b in pairs):.2f}×" if all(a and b for a, b in pairs) else ""
