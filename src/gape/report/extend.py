"""What `gape hf extend` writes about a result: a summary, a card and a page with its curves, from rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gape.report.charts import Curves
from gape.report.page import document, figure
from gape.report.tables import Table
from gape.utils import files
from gape.utils.jsonl import Record, read_lines

SUMMARY, PAGE, CARD = "summary.json", "report.html", "README.md"
#: What a row of each kind adds to a summary, by length.
_BY_LENGTH = {
    "perplexity": ("perplexity",),
    "generate": ("cache_share", "cache_bytes", "prefill_s", "tokens_per_second"),
}


def summarise(rows: Sequence[Record], seeds: Sequence[int] = (0,), minutes: Sequence[float | None] = ()) -> Record:
    """Figures of one method: means over its runs, and standard deviations where there are several.

    Args:
        rows: of all runs, of one stage.
        seeds: of the runs.
        minutes: of the tuning of each run.

    Returns:
        needles[length][task], perplexity[length], cache_share[length], …; the same with `_std` behind the name where
        there are several runs; kl, same, seeds, minutes.
    """
    values: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        length = str(row.get("length"))
        if row["kind"] == "needle":
            values.setdefault("needles", {}).setdefault((length, row["task"]), []).append(row["match"])
        elif row["kind"] == "answers":
            for name in ("kl", "same"):
                values.setdefault(name, {}).setdefault("", []).append(row[name])
        for name in _BY_LENGTH.get(row["kind"], ()):
            values.setdefault(name, {}).setdefault(length, []).append(row[name])
    summary: Record = {"seeds": list(seeds)}
    known = [each for each in minutes if each is not None]
    summary["minutes"] = round(mean(known), 2) if known else None
    for name, cells in values.items():
        for suffix, of in (("", mean), ("_std", stdev)):
            if suffix and max(map(len, cells.values())) < 2:
                continue
            summary[name + suffix] = _nested({key: of(each) for key, each in cells.items() if len(each) > bool(suffix)})
    return summary


def _nested(cells: Mapping[Any, float]) -> Any:
    """Values by length and task as tables in a table; one value without a key as itself."""
    if set(cells) == {""}:
        return round(cells[""], 6)
    nested: dict[str, Any] = {}
    for key in sorted(cells, key=lambda key: (int(key[0]), key[1]) if isinstance(key, tuple) else (int(key), "")):
        if isinstance(key, tuple):
            nested.setdefault(key[0], {})[key[1]] = round(cells[key], 6)
        else:
            nested[key] = round(cells[key], 6)
    return nested


def write(out: Path, settings: Record, rows: Sequence[Record], minutes: float | None) -> None:
    """Write summary.json, README.md and report.html of a result.

    Args:
        out: its directory.
        settings: of the command, with `native`.
        rows: of both stages.
        minutes: of the tuning.
    """
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    summary = {
        stage: summarise([row for row in rows if row["stage"] == stage], [settings["seed"]], [minutes])
        for stage in stages
    }
    files.replace(out / SUMMARY, files.to_json(summary))
    tables = list(_tables(summary))
    title = f"{settings['model']}: {settings['native']:,} → {settings['to']:,} tokens"
    files.replace(out / CARD, _card(title, settings, tables, minutes).encode())
    content = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_sentence(settings, minutes))}</p>"]
    content += _figures(summary)
    content += [table.html() for table in tables]
    content += ["<h2>Settings</h2>", f"<pre>{escape(_lines(settings))}</pre>"]
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
    lengths = sorted({length for one in summary.values() for length in one.get("perplexity", {})}, key=int)
    if lengths:
        header = ("Perplexity", *(f"{int(length):,}" for length in lengths))
        rows = [
            (stage, *(_cell(one.get("perplexity", {}).get(n), 2) for n in lengths)) for stage, one in summary.items()
        ]
        yield Table(title="Perplexity of the same held-out tokens by context", header=header, rows=tuple(rows))
    lengths = sorted({length for one in summary.values() for length in one.get("needles", {})}, key=int)
    tasks = sorted({task for one in summary.values() for cells in one.get("needles", {}).values() for task in cells})
    if lengths:
        rows = [
            (f"{task}, {stage}", *(_cell(one.get("needles", {}).get(n, {}).get(task), 2) for n in lengths))
            for task in tasks
            for stage, one in summary.items()
        ]
        header = ("Needles", *(f"{int(length):,}" for length in lengths))
        yield Table(title="Needles: share of whole answers", header=header, rows=tuple(rows))
    rows = [
        (f"{stage}, {int(n):,}", _cell(one["prefill_s"][n], 3), _cell(one["tokens_per_second"][n], 1),
         f"{one['cache_bytes'][n] / 2**20:,.1f}", _cell(one["cache_share"][n], 3))
        for stage, one in summary.items()
        for n in one.get("prefill_s", {})
    ]  # fmt: skip
    if rows:
        header = ("generate, prompt", "prefill, s", "tokens/s", "cache, MiB", "of full")
        yield Table(title="model.generate, one prompt", header=header, rows=tuple(rows))
    rows = [(stage, _cell(one["kl"], 4), _cell(one["same"], 3)) for stage, one in summary.items() if "kl" in one]
    if rows:
        header = ("Short answers", "KL to the original's, nats per token", "same likeliest token")
        yield Table(title="Answers to short prompts, beside the original's", header=header, rows=tuple(rows))


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


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _sentence(settings: Record, minutes: float | None) -> str:
    tuned = "" if minutes is None else f", tuned in {minutes:.1f} minutes"
    return f"Method {settings['method']}, seed {settings['seed']}, {settings['steps']:,} updates{tuned}."


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


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {value}" for key, value in values.items())
