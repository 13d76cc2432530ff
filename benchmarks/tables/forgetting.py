"""Tables of skipping and forgetting with the 44M model and the needle models, from results/forgetting."""

from __future__ import annotations

from collections.abc import Callable

from gape.report.schemes import label
from tables.markdown import Record, only, select, signed, stored, table

ROWS, RUN = "results/forgetting/forgetting.jsonl", "p-rope+gape_floor4_seed0"
EPS, LENGTHS = (1e-3, 1e-2), (65536, 131072)
FLOORS, SCHEMES, TARGETS = (0, 4, 8), ("nope+gape", "p-rope+gape"), ("last", "first", "middle")


def _row(kind: str, how: str, length: int, eps: float = 0.0, **others: object) -> Record:
    return only(stored(ROWS), run=RUN, kind=kind, how=how, length=length, eps=eps, **others)


def _cells(figure: Callable[[int, float], float], form: str) -> list[str]:
    """A figure for both lengths, with both eps."""
    return [signed(" / ".join(format(figure(length, eps), form) for eps in EPS)) for length in LENGTHS]


def _prefill(what: str, impl: str) -> list[str]:
    def speed(length: int, eps: float) -> float:
        dense = _row("prefill", "dense", length, what=what, impl=impl)
        return float(dense["ms"] / _row("prefill", "skipping", length, eps, what=what)["ms"])

    return _cells(speed, ".2f")


def _decode(batch: int, field: str, form: str) -> list[str]:
    def share(length: int, eps: float) -> float:
        own = _row("decode", "forgetting", length, eps, batch=batch)[field]
        return float(own / _row("decode", "dense", length, batch=batch)[field])

    return _cells(share, form)


def _perplexity(how: str) -> list[str]:
    def change(length: int, eps: float) -> float:
        dense = _row("perplexity", "dense", length)["perplexity"]
        return float(_row("perplexity", how, length, eps)["perplexity"] / dense - 1)

    return _cells(change, "+.3%")


def gains() -> str:
    """What skipping and forgetting gain and cost with the 44M model, floor 4."""
    speed = "decoding, times the full cache's tokens per second, batch"
    lines = [
        ["tiles visited", *_cells(lambda n, eps: float(_row("tiles", "skipping", n, eps)["mean"]), ".3f")],
        ["prefill, attention alone: times the speed of dense cuDNN", *_prefill("attention", "cudnn")],
        ["prefill, whole model: times the dense model's speed", *_prefill("model", "auto")],
        ["cache, share of the full one's bytes, batch 32", *_decode(32, "bytes", ".3f")],
        *([f"{speed} {batch}", *_decode(batch, "tokens_per_second", ".2f")] for batch in (32, 8, 1)),
        ["change of perplexity, skipping", *_perplexity("skipping")],
        ["change of perplexity, forgetting", *_perplexity("forgetting")],
    ]
    return table(["floor 4, eps 1e-3 / 1e-2", *(f"{length:,} tokens" for length in LENGTHS)], lines)


def decode_times() -> str:
    """Milliseconds of a token by the captured step, and launched kernel by kernel."""
    lines = []
    for length in LENGTHS:
        for batch in (1, 8, 32):
            for how, eps in (("dense", 0.0), *(("forgetting", eps) for eps in EPS)):
                row = _row("decode", how, length, eps, batch=batch)
                name = "full" if how == "dense" else f"forgetting, eps {eps:g}"
                cells = [f"{row['ms']:.2f}", f"{row['launched_ms']:.2f}", f"{row['bytes'] / 2**30:.3f}"]
                lines.append([f"{length:,}", str(batch), name, *cells])
    return table(["tokens", "batch", "cache", "captured step, ms", "launched, ms", "GiB"], lines)


def floors() -> str:
    """Accuracy of needles by floor at 1, 2 and 4 times the training length, one seed."""
    rows = stored("results/forgetting/results.jsonl")
    lines = []
    for floor in FLOORS:
        for scheme in SCHEMES:
            cells = []
            for target in TARGETS:
                matches = [
                    only(rows, variant=f"floor{floor}", position=scheme, target=target, factor=factor)["accuracy"]
                    for factor in (1, 2, 4)
                ]
                cells.append(" / ".join(f"{accuracy:.3f}" for accuracy in matches))
            lines.append([f"{floor}, {label(scheme)}", *cells])
    return table(["floor, at 2,048 / 4,096 / 8,192 tokens", *TARGETS], lines)


def needles(length: int) -> str:
    """The same models read densely, skipping and through a forgetting cache, eps 1e-2, and tiles visited."""
    lines = []
    for floor in FLOORS:
        for scheme in SCHEMES:
            for target in TARGETS:
                own = select(stored(ROWS), variant=f"floor{floor}", position=scheme, target=target, length=length)
                ways = [("dense", 0.0), ("skipping", 0.01), ("forgetting", 0.01)]
                matches = [select(own, kind="needle", how=how, eps=eps) for how, eps in ways]
                cells = [f"{each[0]['accuracy']:.3f}" if each else "–" for each in matches]
                tiles = [only(own, kind="tiles", how="skipping", eps=eps)["mean"] for eps in EPS]
                name = f"floor {floor}, {label(scheme)}, {target}"
                lines.append([name, *cells, " / ".join(f"{mean:.3f}" for mean in tiles)])
    return table([f"{length:,} tokens", "dense", "skipping", "forgetting", "tiles visited, eps 1e-3 / 1e-2"], lines)


def without_floor() -> str:
    """Tiles visited with floor 4 and without a floor, eps 1e-2."""
    lines = []
    for name, run in (("no floor (the paper)", "p-rope+gape_seed0"), ("floor 4", RUN)):
        matches = [only(stored(ROWS), run=run, kind="tiles", length=length, eps=0.01) for length in LENGTHS]
        lines.append([name, *(f"{row['mean']:.3f}" for row in matches)])
    return table(["tiles visited", *(f"{length:,} tokens" for length in LENGTHS)], lines)


def details() -> str:
    """What stands behind the gains of the 44M model: cached keys, layers, and the cost of eviction passes."""
    lines, batches = [], (32, 8, 1)
    for eps in EPS:
        for length in LENGTHS:
            caches = [_row("decode", "forgetting", length, eps, batch=batch) for batch in batches]
            kept = [keys for row in caches for layer in row["kept"] for keys in layer]
            full = [_row("decode", "dense", length, batch=batch)["ms"] for batch in batches]
            lost = [ms / row["ms"] - ms / row["lasting_ms"] for ms, row in zip(full, caches, strict=True)]
            tiles = _row("tiles", "skipping", length, eps)["tiles"][0]
            own = _row("prefill", "skipping", length, eps, what="attention")["layers"]
            dense = _row("prefill", "dense", length, what="attention", impl="cudnn")["layers"]
            cells = [
                f"{min(kept):,} … {max(kept):,}", f"{min(lost):.2f} … {max(lost):.2f}",
                f"{sum(tiles) / len(tiles):.2f}", f"{dense[0] / own[0]:.2f}", f"{sum(dense[1:]) / sum(own[1:]):.2f}",
            ]  # fmt: skip
            lines.append([f"{length:,}, eps {eps:g}", *cells])
    head = ["keys cached per head", "speed lost to eviction passes", "tiles of the first layer"]
    return table(["tokens", *head, "× cuDNN, first layer", "× cuDNN, other layers"], lines)
