"""Tables of SmolLM2-135M with gates, from results/hf."""

from __future__ import annotations

from math import expm1
from typing import Any

import numpy as np

from gape.report.statistics import window_difference
from tables.markdown import Record, interval, only, select, signed, stored, table, thousands

FIRST, SECOND, LEARNED = "smollm2", "smollm2-forgetting", "smollm2-landmarks"
#: Runs with floors by how many key heads are free and how those were chosen.
FREE = {
    "12 key heads free by scores": "yarn+gape_floors12", "18 key heads free by scores": "yarn+gape_floors18",
    "12 key heads free by pruning": "yarn+gape_floors12-pruned",
    "15 key heads free by pruning": "yarn+gape_floors15-pruned",
}  # fmt: skip
#: Those that were trained again, and timed.
TIMED = {"14 key heads free": "yarn+gape_floors14", "12 key heads free": "yarn+gape_floors12"}
CONTEXTS = (1024, 4096, 16384, 65536)
LENGTHS = (65536, 131072)
BY_QUERIES = {"forget_eps": 0.01, "bounds": "queries"}


def rows(file: str, home: str, /, **values: Any) -> list[Record]:
    """Stored rows of a folder of results/hf."""
    return select(stored(f"results/hf/{home}/{file}.jsonl"), **values)


def perplexity(run: str, context: int, home: str) -> str:
    """Perplexity of a run at a context."""
    (row,) = rows("perplexity", home, run=run, context=context)
    return f"{row['perplexity']:.2f}"


def needles(run: str, length: int, home: str, /, **way: Any) -> Record:
    """RULER's first task by a run, read in some way; densely without."""
    matches = [row for row in rows("ruler", home, length=length, **way) if row["run"].split(",")[0] == run]
    (row,) = (row for row in matches if way or not {"forget_eps", "skip_eps"} & row.keys())
    return row


def retrofit() -> str:
    """Perplexity after fine-tuning at 1,024 tokens, with gates and without."""
    contexts = (1024, 8192, 16384, 32768, 65536)
    runs = {
        "SmolLM2-135M, not fine-tuned": "smollm2", "RoPE": "rope", "RoPE+GAPE": "rope+gape",
        "RoPE+GAPE, gate floor 4": "rope+gape_floor4", "p-RoPE": "p-rope", "YaRN, factor 8": "yarn",
    }  # fmt: skip
    lines = ([label, *(perplexity(run, at, FIRST) for at in contexts)] for label, run in runs.items())
    return table(["perplexity at", *thousands(contexts)], lines)


def floors(home: str) -> str:
    """Perplexity with YaRN and floors, and the share of needles found."""
    if home == FIRST:
        runs = {"YaRN, factor 16": "yarn_factor16", "YaRN, factor 8": "yarn"}
        runs |= {"YaRN+GAPE, a floor in every head": "yarn+gape_floor200"}
        gated = FREE
    else:
        runs, gated = {"YaRN, factor 16": "yarn_factor16"}, TIMED
    lines = []
    for label, run in (runs | {f"YaRN+GAPE, {name}": run for name, run in gated.items()}).items():
        cells = [perplexity(run, at, home) for at in CONTEXTS]
        for length in (1024, 4096):
            cells.append(f"{needles(run, length, home)['match']:.3f}" if run in gated.values() else "–")
        lines.append([label, *cells])
    return table(["perplexity at", *thousands(CONTEXTS), "needles at 1,024", "needles at 4,096"], lines)


def far_needles() -> str:
    """Needles beyond the native context of 8,192 tokens, of 16 texts."""
    lengths = (16384, 32768)
    lines = []
    for label, run in FREE.items():
        matches = [needles(run, length, FIRST)["match"] for length in lengths]
        lines.append([label, *(f"{16 * match:.0f} of 16" for match in matches)])
    return table(["needles found at", *thousands(lengths)], lines)


def learned_landmarks() -> str:
    """Perplexity where landmarks learn."""
    runs = {"RoPE+GAPE, floor 32": "rope+gape_floor32", "YaRN+GAPE, 12 key heads free": "yarn+gape_floors12"}
    contexts = (1024, 65536)
    lines = ([label, *(perplexity(run, at, LEARNED) for at in contexts)] for label, run in runs.items())
    return table(["landmarks learn, perplexity at", *thousands(contexts)], lines)


def _ratio(form: str, field: str, home: str, above: Record, below: Record) -> str:
    """A field of one row over that of another; a dash where either was not measured."""
    top, bottom = rows("forgetting", home, **above), rows("forgetting", home, **below)
    return format(top[0][field] / bottom[0][field], form) if top and bottom else "–"


def _prefill(run: str, what: str, home: str) -> str:
    cells = []
    for length in LENGTHS:
        own = {"kind": "prefill", "run": run, "what": what, "length": length, "how": "skipping", "eps": 0.01}
        dense = own | {"how": "dense", "eps": 0.0, "impl": {"attention": "cudnn", "model": "auto"}[what]}
        cells.append(_ratio(".2f", "ms", home, dense, own))
    return " / ".join(cells)


def _decode(run: str, field: str, batch: int, home: str, *, share: bool = False) -> str:
    own = {"kind": "decode", "run": run, "length": 131072, "batch": batch, "how": "forgetting", "eps": 0.01}
    dense = own | {"how": "dense", "eps": 0.0}
    return _ratio(".3f", field, home, own, dense) if share else _ratio(".2f", field, home, dense, own)


def gains() -> str:
    """What skipping and forgetting gain in benchmarks: tiles, prefill, bytes, tokens."""
    runs, home = list(TIMED.values()), SECOND
    tiles = []
    for run in runs:
        matches = [only(rows("forgetting", home, run=run, kind="tiles", eps=0.01), length=n) for n in LENGTHS]
        tiles.append(" / ".join(f"{row['mean']:.3f}" for row in matches))
    lines = [
        ["tiles visited, 65,536 / 131,072 tokens", *tiles],
        ["prefill, attention alone: times the speed of dense cuDNN", *(_prefill(r, "attention", home) for r in runs)],
        ["prefill, whole model: times the dense model's speed", *(_prefill(run, "model", home) for run in runs)],
        ["cache at 131,072, share of the full one's bytes, batch 8",
         *(_decode(run, "bytes", 8, home, share=True) for run in runs)],
    ]  # fmt: skip
    for field, name in (("mean_ms", "all tokens"), ("ms", "median token")):
        for batch in (24, 8, 1):
            cells = [_decode(run, field, batch, home) for run in runs]
            lines.append([f"decoding at 131,072, times the full cache's speed, {name}, batch {batch}", *cells])
    return table(["eps 1e-2, bounds by queries", *TIMED], lines)


def decode_times() -> str:
    """Milliseconds of a token at 131,072 keys by the captured step."""
    lines = []
    for batch in (1, 8, 24):
        cells = []
        for how, eps in (("dense", 0.0), ("forgetting", 0.01)):
            row = only(rows("forgetting", SECOND, run=TIMED["14 key heads free"], kind="decode", batch=batch, how=how,
                            eps=eps))  # fmt: skip
            cells += [f"{row['ms']:.2f}", f"{row['mean_ms']:.2f}", f"{row['bytes'] / 2**30:.2f}"]
        lines.append([str(batch), *cells])
    head = ["batch", "full cache, median ms", "mean ms", "GiB", "forgetting, median ms", "mean ms", "GiB"]
    return table(head, lines)


def _change(row: Record, base: Record) -> str:
    """Change of perplexity in percent; bold where the 95% interval over books leaves out zero."""
    ends = window_difference(row, base)
    text = signed(f"{row['perplexity'] / base['perplexity'] - 1:+.3%}")
    if ends.low is None or ends.high is None:
        return text
    text += signed(f" ({expm1(ends.low):+.3%} … {expm1(ends.high):+.3%})")
    return f"**{text}**" if ends.low > 0 or ends.high < 0 else text


def changes(home: str) -> str:
    """Change of perplexity by every way of reading."""
    matches = rows("forgetting", home, kind="perplexity")
    lines = []
    for run in dict.fromkeys(row["run"] for row in matches):
        for length in LENGTHS:
            own = select(matches, run=run, length=length)
            dense = only(own, how="dense")
            for eps in sorted({row["eps"] for row in own} - {0.0}, reverse=True):
                cells = [select(own, how=how, eps=eps) for how in ("skipping", "forgetting")]
                texts = [_change(each[0], dense) if each else "–" for each in cells]
                lines.append([run, f"{length:,}", f"{dense['perplexity']:.3f}", f"{eps:g}", *texts])
    return table(["run", "tokens", "dense", "eps", "skipping", "forgetting by queries"], lines)


def needle_changes(home: str) -> str:
    """Needles at 4,096 tokens read densely, skipping and through a forgetting cache."""
    lines = []
    for name, run in (FREE if home == FIRST else TIMED).items():
        dense, skip, forget = (needles(run, 4096, home, **way) for way in ({}, {"skip_eps": 0.01}, BY_QUERIES))
        pairs = np.array([dense["sample_match"], forget["sample_match"]])
        lost, won = int((pairs[0] > pairs[1]).sum()), int((pairs[0] < pairs[1]).sum())
        matches = f"{dense['match']:.3f} / {forget['match']:.3f}"
        losses = " / ".join(f"{row['nll']:.4f}" for row in (dense, skip, forget))
        lines.append([name, matches, f"{lost}, {won}", losses])
    head = ["4,096 tokens, 128 texts", "found, dense / forgetting", "lost, won", "NLL, dense / skipping / forgetting"]
    return table(head, lines)


def free_heads() -> str:
    """Tiles visited and keys cached in free heads and in the others, 14 free heads, 131,072 tokens, eps 1e-2."""
    run = TIMED["14 key heads free"]
    settings = next(row["settings"] for row in rows("runs", SECOND, run=run) if "settings" in row)
    # Three query heads share a key head.
    free = ~np.array(settings["model"]["gates"]["gate_floor"], dtype=np.bool_)[:, ::3]
    tiles = np.array(only(rows("forgetting", SECOND, run=run, kind="tiles", eps=0.01), length=131072)["tiles"])
    decoded = {"run": run, "kind": "decode", "batch": 8, "length": 131072}
    cache = only(rows("forgetting", SECOND, **decoded), how="forgetting", eps=0.01)
    lines = []
    for name, which in (("free", free), ("with a floor", ~free)):
        kept = np.array(cache["kept"])[which]
        visited = tiles[np.repeat(which, 3, axis=1)].mean()
        lines.append([name, str(which.sum()), f"{visited:.3f}", f"{kept.min():,} … {kept.max():,}"])
    return table(
        ["key heads", "number", "tiles visited", f"keys cached of {cache['length'] + cache['tokens']:,}"], lines
    )


def nats(home: str) -> str:
    """Differences of loss from YaRN alone, nats per token; below zero floors are better."""
    pairs = [("yarn+gape_floors12", "yarn_factor16"), ("yarn+gape_floors12", "yarn")]
    if home == SECOND:
        pairs = [(run, "yarn_factor16") for run in TIMED.values()]
    lines = []
    for run, other in pairs:
        cells = []
        for context in CONTEXTS:
            own, base = (only(rows("perplexity", home, run=name, context=context)) for name in (run, other))
            ends = window_difference(own, base)
            cells.append(interval(own["nll"] - base["nll"], ends.low, ends.high, "+.2f"))
        lines.append([f"{run} − {other}", *cells])
    return table(["nats per token at", *thousands(CONTEXTS)], lines)
