"""Tables of the 44M language models, their ablations and RULER, from results/lm and results/ruler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from gape.report.ruler import columns, difference, methods
from gape.report.schemes import name
from gape.report.statistics import Difference, far_back_differences, perplexity_differences
from tables.markdown import Record, interval, select, signed, stored, table, thousands

BOOKS, SEED1, ABLATIONS = "results/lm/books", "results/lm/books-seed1", "results/lm/ablations"
SCHEMES = ["RoPE", "p-RoPE", "p-RoPE+GAPE", "p-RoPE+GAPE (floor4)", "ALiBi", "FoX"]
FULL, GATE, LANDMARK = "p-RoPE+GAPE", "p-RoPE+GAPE (gate-fixed)", "p-RoPE+GAPE (landmark-fixed)"
ABLATED = (FULL, GATE, LANDMARK)
DISTANCES = (512, 2048, 8192, 32768)
#: Contexts by the length to which windows are aligned.
CONTEXTS = {32768: (512, 1024, 2048, 4096, 8192, 16384, 32768), 131072: (1024, 8192, 32768, 65536, 131072)}
TITLES = {32768: "60 books, context", 131072: "nine long books, context"}
#: The paper's NLL by column of its table of RULER, and its changes in percent without gate and without landmark.
PAPER = {
    "the paper's RoPE": "10.21 11.52 12.19 12.59 8.45 8.95 10.43 11.11",
    "the paper's p-RoPE": "9.97 10.80 11.98 12.06 8.63 8.99 9.87 10.68",
    "the paper's GAPE": "9.32 9.48 10.59 11.36 8.14 8.80 9.18 10.40",
}
PAPER_ABLATION = {
    GATE: "−3.10% −2.07% +0.63% +1.88% +2.94% +2.03% +4.54% +4.70%",
    LANDMARK: "+0.62% −3.10% +3.34% +0.61% +4.73% +5.49% −0.02% +1.28%",
}


def _perplexities(home: str, align: int) -> dict[tuple[str, int], str]:
    rows = select(stored(f"{home}/perplexity.jsonl"), align=align)
    return {(name(row), row["context"]): f"{row['perplexity']:.2f}" for row in rows}


def perplexity(align: int) -> str:
    """Perplexity of the same tokens by context."""
    cells, contexts = _perplexities(BOOKS, align), CONTEXTS[align]
    rows = [[scheme, *(cells[scheme, context] for context in contexts)] for scheme in SCHEMES]
    return table([TITLES[align], *thousands(contexts)], rows)


def seeds() -> str:
    """Perplexity with both seeds."""
    head = ["seed 0 / seed 1", "60 books, 1,024", "4,096", "32,768", "nine books, 1,024", "131,072"]
    columns_ = [(32768, 1024), (32768, 4096), (32768, 32768), (131072, 1024), (131072, 131072)]
    cells = [{align: _perplexities(home, align) for align in CONTEXTS} for home in (BOOKS, SEED1)]
    rows = []
    for scheme in SCHEMES[1:]:
        pairs = [[own[align][scheme, context] for own in cells] for align, context in columns_]
        rows.append([scheme, *(" / ".join(pair) for pair in pairs)])
    return table(head, rows)


def _by_pair(pairs: Iterable[Difference]) -> dict[str, list[str]]:
    cells: dict[str, list[str]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.at):
        text = interval(pair.difference, pair.low, pair.high)
        cells.setdefault(f"{pair.scheme} − {pair.other}", []).append(text)
    return cells


def perplexity_gaps() -> str:
    """Differences of loss on the same tokens at the training length and at the longest context."""
    cells: dict[str, list[str]] = {}
    for align in CONTEXTS:
        rows = select(stored(f"{BOOKS}/perplexity.jsonl"), align=align)
        pairs = perplexity_differences(row for row in rows if row["context"] in (1024, align))
        for pair, texts in _by_pair(pairs).items():
            cells[pair] = cells.get(pair, []) + texts
    head = ["nats per token", "60 books, 1,024", "60 books, 32,768", "nine books, 1,024", "nine books, 131,072"]
    return table(head, ([pair, *texts] for pair, texts in cells.items()))


def _far_back(home: str, labels: Sequence[str], kind: str, field: str, form: str) -> dict[str, list[str]]:
    rows = {(name(row), row["distance"]): row for row in select(stored(f"{home}/far_back.jsonl"), kind=kind)}
    return {label: [signed(f"{rows[label, at][field]:{form}}") for at in DISTANCES] for label in labels}


def planted(home: str = BOOKS, labels: Sequence[str] = tuple(SCHEMES)) -> str:
    """What a planted passage is worth, and the loss on it."""
    gain, loss = (_far_back(home, labels, "planted", *how) for how in (("gain", ".3f"), ("nll", ".2f")))
    head = ["planted passage", *(f"gain, {at:,}" for at in DISTANCES), *(f"loss, {at:,}" for at in DISTANCES)]
    return table(head, ([label, *gain[label], *loss[label]] for label in labels))


def planted_gaps(home: str = BOOKS, pairs: Sequence[str] = ()) -> str:
    """Differences of these gains; all pairs, or the given ones."""
    rows = select(stored(f"{home}/far_back.jsonl"), kind="planted")
    cells = _by_pair(far_back_differences(rows, gain=True))
    return table(["difference of gains", *thousands(DISTANCES)], ([pair, *cells[pair]] for pair in pairs or cells))


def repeated(home: str = BOOKS, labels: Sequence[str] = tuple(SCHEMES)) -> str:
    """What 65,536 tokens are worth at repeated n-grams and names, beside a short context."""
    grams, names = (_far_back(home, labels, kind, "gain", "+.3f") for kind in ("ngram", "names"))
    head = ["gain", *(f"n-grams, {at:,}" for at in DISTANCES), *(f"names, {at:,}" for at in DISTANCES)]
    return table(head, ([label, *grams[label], *names[label]] for label in labels))


def _reach(record: Record, lengths: Sequence[int | None], passages: int | None = None) -> list[str]:
    """Mean entropy, and the median over heads of the distance beyond which a tenth of the attention lies."""
    by = {each["asked"]["length"]: each for each in record["sets"]}
    entropies = [f"{np.mean(by[at]['entropy'][:passages]):.2f}" for at in lengths]
    heads = [np.median(np.array(by[at]["used"], dtype=float)[:passages, ..., 1], axis=0) for at in lengths if at]
    return [*entropies, *(f"{np.median(each):,.0f}" for each in heads)]


def reach() -> str:
    """Entropy and reach of attention of the six models."""
    rows = {name(record): _reach(record, (1024, 4096, 32768, None)) for record in stored(f"{BOOKS}/entropy.jsonl")}
    head = ["", "entropy, 1,024", "4,096", "32,768", "prompts", "a tenth beyond, 1,024", "4,096", "32,768"]
    return table(head, ([scheme, *rows[scheme]] for scheme in SCHEMES))


def throughput() -> str:
    """Training speed of the 44M model with gates and without."""
    head = ["million tokens per second", "`compile=graphs`", "lowest … highest", "`compile=auto`", "lowest … highest"]
    lines = []
    for scheme in ("p-RoPE", "p-RoPE+GAPE"):
        line = [scheme]
        for way in ("graphs", "auto"):
            rows = select(stored(f"results/lm/speed/{scheme.lower()}_{way}/runtime.jsonl"), event="timing")
            rates = [row["tokens_per_second"] / 1e6 for row in rows if row["step"] > 15]
            line += [f"{median(rates):.3f}", f"{min(rates):.3f} … {max(rates):.3f}"]
        lines.append(line)
    return table(head, lines)


def _column(column: tuple[str, int]) -> str:
    return f"{column[0]}_{column[1] // 1024}k"


def ruler() -> str:
    """NLL per token of right answers, the lowest of each column in bold, and the paper's own."""
    by = {method.label: method for method in methods(stored("results/ruler/44m/ruler.jsonl"))}
    tasks = columns(list(by.values()))
    lines = {}
    for scheme in SCHEMES:
        losses = [by[scheme].values(task, "nll") for task in tasks]
        lines[scheme] = [f"{each.mean():.2f}" for each in losses if each is not None]
    best = [min(float(lines[scheme][at]) for scheme in SCHEMES) for at in range(len(tasks))]
    for scheme, cells in lines.items():
        lines[scheme] = [f"**{x}**" if float(x) == best[at] else x for at, x in enumerate(cells)]
    rows = [[scheme, *cells] for scheme, cells in lines.items()]
    return table(["NLL", *map(_column, tasks)], [*rows, *([label, *cells.split()] for label, cells in PAPER.items())])


def ruler_gaps() -> str:
    """Differences of NLL sample by sample, in brackets where the 95% interval holds zero."""
    by = {method.label: method for method in methods(stored("results/ruler/44m/ruler.jsonl"))}
    tasks, lines = columns(list(by.values())), []
    for one in (FULL, SCHEMES[3]):
        for other in SCHEMES:
            if other != one and (one, other) != (FULL, SCHEMES[3]):
                cells = []
                for task in tasks:
                    paired = difference(by[one], by[other], task)
                    text = signed(f"{paired.mean:+.3f}") if paired else ""
                    cells.append(f"({text})" if paired and paired.verdict == "not separable" else text)
                lines.append([f"{one} − {other}", *cells])
    return table(["difference of NLL", *map(_column, tasks)], lines)


def ruler_ablation() -> str:
    """Change of NLL with the gate or the landmark fixed, beside the paper's."""
    by = {method.label: method for method in methods(stored("results/ruler/ablation/ruler.jsonl"))}
    lines = []
    for at, task in enumerate(columns([by[FULL]])):
        losses = by[FULL].values(task, "nll")
        line = [_column(task), "" if losses is None else f"{losses.mean():.2f}"]
        for label in (GATE, LANDMARK):
            paired = difference(by[label], by[FULL], task)
            assert paired is not None
            mean, low, high = (paired.percent(value) for value in (paired.mean, paired.low, paired.high))
            line += [signed(f"{mean:+.2f}% ({low:+.2f} … {high:+.2f})"), PAPER_ABLATION[label].split()[at]]
        lines.append(line)
    return table(["", "NLL of the full model", "gate fixed", "the paper's", "landmark fixed", "the paper's"], lines)


def ablation() -> str:
    """Perplexity with the gate or the landmark fixed."""
    contexts = (1024, 4096, 16384, 32768)
    cells = _perplexities(BOOKS, 32768) | _perplexities(ABLATIONS, 32768)
    rows = ([label, *(cells[label, at] for at in contexts)] for label in ("p-RoPE", FULL, GATE, LANDMARK))
    return table(["60 books, context", *thousands(contexts)], rows)


def ablation_gaps() -> str:
    """Differences of loss from the full model."""
    pairs = perplexity_differences(select(stored(f"{ABLATIONS}/perplexity.jsonl"), align=32768))
    cells = _by_pair(pairs)
    return table(
        ["nats per token", *thousands((1024, 4096, 16384, 32768))], ([p, *texts] for p, texts in cells.items())
    )


def ablation_reach() -> str:
    """Entropy and reach of the ablations, on the same two passages."""
    rows = {name(record): _reach(record, (1024, 4096, 32768), 2) for record in stored(f"{ABLATIONS}/entropy.jsonl")}
    head = ["two passages", "entropy, 1,024", "4,096", "32,768", "a tenth beyond, 1,024", "4,096", "32,768"]
    return table(head, ([label, *rows[label]] for label in (FULL, GATE, LANDMARK)))
