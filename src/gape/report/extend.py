"""What `gape hf extend` writes about a result: a summary, a card and a page with its curves, from rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean, stdev

from gape.report.charts import Curves
from gape.report.page import document, figure, listing
from gape.report.schemes import group_by
from gape.report.tables import Table, number
from gape.utils import files
from gape.utils.jsonl import Record, read_lines
from gape.utils.settings import set_nested

SUMMARY, PAGE, CARD = "summary.json", "report.html", "README.md"
#: What a row of each kind adds to a summary.
_VALUES = {
    "needle": ("match",), "answers": ("kl", "same"), "perplexity": ("perplexity",),
    "generate": ("cache_share", "cache_bytes", "prefill_s", "tokens_per_second"),
}  # fmt: skip


def summarise(rows: Sequence[Record], seeds: Sequence[int] = (0,), minutes: Sequence[float | None] = ()) -> Record:
    """Figures of one method over the rows of its runs, of one stage: means, and deviations where there are several.

    Returns:
        needles[length][task], perplexity[length], cache_share[length], …; the same with `_std` behind the name where
        there are several runs; kl, same, seeds, and minutes of the tuning.
    """
    values: dict[str, dict[tuple[str, ...], list[float]]] = {}
    kinds = [row["kind"] for row in rows]
    for row in sorted(rows, key=lambda row: (kinds.index(row["kind"]), row.get("length") or 0, str(row.get("task")))):
        inside = {"needle": ("length", "task"), "answers": ()}.get(row["kind"], ("length",))
        for name in _VALUES.get(row["kind"], ()):
            cells = values.setdefault("needles" if name == "match" else name, {})
            cells.setdefault(tuple(str(row[key]) for key in inside), []).append(row[name])
    known = [each for each in minutes if each is not None]
    summary: Record = {"seeds": list(seeds), "minutes": round(mean(known), 2) if known else None}
    for name, cells in values.items():
        for suffix, least, of in (("", 1, mean), ("_std", 2, stdev)):
            for inside, each in cells.items():
                if len(each) >= least:
                    set_nested(summary, ".".join((name + suffix, *inside)), round(of(each), 6))
    return summary


def write(out: Path, settings: Record, rows: Sequence[Record], minutes: float | None) -> None:
    """Write summary.json, README.md and report.html of a result: settings with `native`, and rows of both stages."""
    summary = {
        stage: summarise(own, [settings["seed"]], [minutes])
        for stage, own in group_by(rows, lambda row: str(row["stage"])).items()
    }
    files.replace(out / SUMMARY, files.to_json(summary))
    tables = list(_tables(summary))
    title = f"{settings['model']}: {settings['native']:,} → {settings['to']:,} tokens"
    files.replace(out / CARD, _card(title, settings, tables, minutes).encode())
    content = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_sentence(settings, minutes))}</p>"]
    content += _figures(summary)
    content += [table.html() for table in tables]
    content += ["<h2>Settings</h2>", listing(settings)]
    files.replace(out / PAGE, document(title, content).encode())


def tuning_minutes(runs: Sequence[Path]) -> float | None:
    """Minutes of the updates of a tuning, from the logs of its runs; None where one has none."""
    seconds = 0.0
    for path in (run / "runtime.jsonl" for run in runs):
        rows = read_lines(path) if path.is_file() else []
        timing = {row["step"]: row["seconds_per_step"] for row in rows if row.get("event") == "timing"}
        if not timing:
            return None
        steps = sorted(timing)
        seconds += sum((step - before) * timing[step] for before, step in zip([0, *steps], steps, strict=False))
    return seconds / 60


def _tables(summary: Mapping[str, Record]) -> Iterable[Table]:
    """Perplexity, needles, `generate` and answers, before and after."""
    tasks = sorted({task for one in summary.values() for cells in one.get("needles", {}).values() for task in cells})
    losses = {stage: one.get("perplexity", {}) for stage, one in summary.items()}
    needles = {
        f"{task}, {stage}": {length: cells.get(task) for length, cells in one.get("needles", {}).items()}
        for task in tasks
        for stage, one in summary.items()
    }
    for corner, title, values in (
        ("Perplexity", "Perplexity of the same held-out tokens by context", losses),
        ("Needles", "Needles: share of whole answers", needles),
    ):
        lengths = sorted({length for cells in values.values() for length in cells}, key=int)
        rows = [(label, *(number(cells.get(n), ",.2f") for n in lengths)) for label, cells in values.items()]
        if lengths:
            yield Table(title=title, header=(corner, *(f"{int(n):,}" for n in lengths)), rows=tuple(rows))
    rows = [
        (f"{stage}, {int(n):,}", f"{one['prefill_s'][n]:,.3f}", f"{one['tokens_per_second'][n]:,.1f}",
         f"{one['cache_bytes'][n] / 2**20:,.1f}", f"{one['cache_share'][n]:,.3f}")
        for stage, one in summary.items()
        for n in one.get("prefill_s", {})
    ]  # fmt: skip
    header: tuple[str, ...] = ("generate, prompt", "prefill, s", "tokens/s", "cache, MiB", "of full")
    if rows:
        yield Table(title="model.generate, one prompt", header=header, rows=tuple(rows))
    answers = [(stage, f"{one['kl']:,.4f}", f"{one['same']:,.3f}") for stage, one in summary.items() if "kl" in one]
    if answers:
        header = ("Short answers", "KL to the original's, nats per token", "same likeliest token")
        yield Table(title="Answers to short prompts, beside the original's", header=header, rows=tuple(answers))


def _figures(summary: Mapping[str, Record]) -> Iterable[str]:
    """Curves of perplexity and of the mean over needle tasks, by length."""
    needles = {
        stage: {length: mean(cells.values()) for length, cells in one.get("needles", {}).items()}
        for stage, one in summary.items()
    }
    losses = {stage: one.get("perplexity", {}) for stage, one in summary.items()}
    for title, chart, values in (
        ("Perplexity by context", Curves(y="Perplexity", log="xy"), losses),
        ("Needles, mean over tasks", Curves(y="Whole answers", share=True), needles),
    ):
        lines = [
            {"label": stage, "at": [int(length) for length in cells], "mean": list(cells.values())}
            for stage, cells in values.items()
            if cells
        ]
        if lines:
            yield figure(escape(title), chart.of({"lines": lines}))


def _sentence(settings: Record, minutes: float | None) -> str:
    tuned = "" if minutes is None else f", tuned in {minutes:.1f} minutes"
    updates = f"{settings['steps']:,} updates and {settings['long_steps']:,} in long windows"
    return f"Method {settings['method']}, seed {settings['seed']}, {updates}{tuned}."


def _card(title: str, settings: Record, tables: Iterable[Table], minutes: float | None) -> str:
    """The card of a result in Markdown."""
    lines = [f"# {title}", "", _sentence(settings, minutes), ""]
    for table in tables:
        lines += [table.markdown(), ""]
    lines += [
        "## Use", "", "```python", "import gape.hf", "from transformers import AutoModelForCausalLM", "",
        'model = AutoModelForCausalLM.from_pretrained("model", dtype="bfloat16")',
        "cache = gape.hf.ForgettingCache(model, eps=1e-2, partial=True)",
        "model.generate(ids, past_key_values=cache)", "```", "",
    ]  # fmt: skip
    return "\n".join(lines)
