"""Tables as text, Markdown, HTML and LaTeX, and those of the needle task and of language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.report import series
from gape.report.inside import ROUTING
from gape.report.results import Results, far_back_question, unpack_hits
from gape.report.schemes import TARGETS, base_of, by_scheme, group_by, join_names, label, name, scheme_order
from gape.report.statistics import (
    Curve,
    Difference,
    accuracy_differences,
    curves,
    far_back_differences,
    perplexity_differences,
    window_difference,
)
from gape.utils.jsonl import Record

Cells = frozenset[tuple[int, int]]
#: What LaTeX reads as something else, or not at all.
_TEX = str.maketrans(
    {"&": r"\&", "_": r"\_", "%": r"\%", "#": r"\#", "±": r"$\pm$", "–": "--", "−": "$-$", "…": r"\dots{}"}
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of strings under a title; `strong` and `second` are the (row, column) of cells that stand out."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: Cells = field(default_factory=frozenset)
    second: Cells = field(default_factory=frozenset)

    def text(self) -> str:
        """Aligned columns; a star for cells that stand out, a plus for the second best."""
        cells = [self.header, *self._mark_cells("{} *", "{} +")]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        return "\n".join([self.title, lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """A Markdown table under a bold title; cells that stand out are bold, the second best underlined."""
        rule = tuple("---" if c == 0 else "---:" for c in range(len(self.header)))
        lines = [self.header, rule, *self._mark_cells("**{}**", "<u>{}</u>")]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines)

    def html(self) -> str:
        """An HTML table with the title as caption; marked as in Markdown."""
        marked = self._mark_cells("<strong>{}</strong>", "<u>{}</u>", escape)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in marked)
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        caption = f"<caption>{escape(self.title)}</caption>"
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"

    def latex(self) -> str:
        """A LaTeX table as the paper has it; cells that stand out are bold, the second best underlined."""
        marked = self._mark_cells(r"\textbf{{{}}}", r"\underline{{{}}}")
        lines = [" & ".join(cell.translate(_TEX) for cell in cells) for cells in (self.header, *marked)]
        columns = "ll" + "c" * (len(self.header) - 2)
        body = " \\\\\n".join([lines[0], "\\midrule\n" + lines[1], *lines[2:]]) if len(lines) > 1 else lines[0]
        start, end = f"\\begin{{tabular}}{{{columns}}}\n\\toprule", "\\bottomrule\n\\end{tabular}"
        return f"% {self.title}\n{start}\n{body} \\\\\n{end}"

    def _mark_cells(self, strong: str, second: str, written: Callable[[str], str] = str) -> list[tuple[str, ...]]:
        def mark(r: int, c: int, cell: str) -> str:
            form = strong if (r, c) in self.strong else second if (r, c) in self.second else "{}"
            return form.format(written(cell))

        return [tuple(mark(r, c, cell) for c, cell in enumerate(row)) for r, row in enumerate(self.rows)]


#: Formats that tables can be written in.
FORMATS: dict[str, Callable[[Table], str]] = {"text": Table.text, "markdown": Table.markdown, "latex": Table.latex}


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a cell, a dash where there is none."""
    return "–" if value is None else f"{value:{form}}{unit}"


def interval(low: float | None, high: float | None, form: str = "+.4f") -> str:
    """An interval in a cell, a dash where there is none."""
    return "–" if low is None or high is None else f"{low:{form}} … {high:{form}}"


def needle_tables(results: Results) -> list[Table]:
    """All tables of the needle task; none where there are no rows."""
    tables = (*accuracy_tables(results), comparison_table(results), digit_table(results))
    return [table for table in tables if table is not None]


def accuracy_tables(results: Results) -> list[Table]:
    """One table per target: a row per scheme, a column per length, mean ± deviation; the best stand out."""
    tables = []
    for target in TARGETS:
        schemes = curves(results.select(target=target))
        if not schemes:
            continue
        factors = sorted({factor for curve in schemes for factor in curve.rows})
        rows, best = [], []
        for curve in schemes:
            at = curve.means
            fewest, most = (pick(mean.n for mean in at.values()) for pick in (min, max))
            seeds = str(most) if fewest == most else f"{fewest}–{most}"
            cells = (str(at.get(factor, "–")) for factor in factors)
            rows.append((join_names(curve.variant, label(curve.position, curve.evaluated)), seeds, *cells))
            best.append([round(at[factor].mean, 2) if factor in at else None for factor in factors])
        header = ("Scheme", "seeds", *(_column(factor, schemes) for factor in factors))
        title = f"Accuracy, {TARGETS[target].lower()}"
        tables.append(Table(title=title, header=header, rows=tuple(rows), strong=_best(best, max)))
    return tables


def comparison_table(results: Results) -> Table | None:
    """What gates add to each base, with a 95% interval; None where no base has both."""
    rows = tuple(
        (
            join_names(d.variant, f"{d.other} → {d.scheme}", d.what), f"{d.at}×", str(d.seeds), f"{d.difference:+.3f}",
            interval(d.low, d.high, "+.3f"), "one seed" if d.seeds == 1 else d.verdict,
        )
        for d in accuracy_differences(results)
    )  # fmt: skip
    header = ("Gates added to", "length", "seeds", "accuracy", "95% interval", "verdict")
    return Table(title="What gates add, on the same seeds and samples", header=header, rows=rows) if rows else None


#: From this accuracy on a run has nothing to explain.
SOLVED = 0.95
#: A digit is named "always" or "never" within this much.
SURE = 0.05


def digit_table(results: Results) -> Table | None:
    """Runs that do not solve the task at the length they were trained at, and the digits they name; None if all do."""
    unsolved = [
        row
        for row in results.of("needle")
        if row["factor"] == 1 and row["evaluated"] == row["position"] and row["accuracy"] < SOLVED
    ]
    rows = []
    for row in sorted(unsolved, key=lambda row: (row["target"], scheme_order(row["position"]), row["seed"])):
        digits = _digits(row["length"], row["needles"], row["target"], row["eval_seed"], row["samples"])
        right = np.array(unpack_hits(row["hits"], row["samples"]), dtype=np.float64)
        # How often the answer is right where it is some digit. Of few samples none may ask for one.
        named = np.array([right[digits == digit].mean() for digit in np.unique(digits)])
        always, never = (named >= 1 - SURE).sum(), (named <= SURE).sum()
        sometimes = len(named) - always - never
        scheme = join_names(row["variant"], label(row["position"]), TARGETS[row["target"]].lower())
        cells = (f"{row['accuracy']:.2f}", str(always), str(never), str(sometimes))
        rows.append((scheme, str(row["seed"]), *cells))
    header = ("Scheme", "seed", "accuracy", "digits always named", "never", "sometimes")
    title = "Below 0.95 at the training length, by digit"
    return Table(title=title, header=header, rows=tuple(rows)) if rows else None


def language_tables(results: Results) -> list[Table]:
    """All tables of perplexity, entropy, routing and far-back loss; none where there are no rows."""
    tables = perplexity_tables(results)
    title = "Perplexity: nats per token beside another scheme, on the same windows"
    tables += _differences(title, "context", perplexity_differences(results.of("perplexity")))
    if results.of("entropy"):
        tables.append(entropy_table(results.of("entropy")))
    if results.of("routing"):
        tables.append(routing_table(results.of("routing")))
    return tables + far_back_table(results.of("far_back"))


def perplexity_tables(results: Results) -> list[Table]:
    """A table per panel of the figure: a row per scheme, a column per context; the lowest of each column stands out."""
    if not results.of("perplexity"):
        return []
    data = series.perplexity(results)
    tables = []
    for panel in data["panels"]:
        contexts = sorted({at for line in panel["lines"] for at in line["at"]})
        at = [dict(zip(line["at"], line["mean"], strict=True)) for line in panel["lines"]]
        values = [[each.get(context) for context in contexts] for each in at]
        rows = [
            (line["label"], str(max(line["n"])), *(number(value, ".2f") for value in own))
            for line, own in zip(panel["lines"], values, strict=True)
        ]
        header = ("Scheme", "seeds", *(f"{context:,}" for context in contexts))
        if len(panel["stretches"]) > 1:
            rows.append(("documents", "", *(f"{panel['documents'][str(context)]:,}" for context in contexts)))
        title = f"Perplexity by context, {data['protocol']['protocol']}, {panel['title'].lower()}"
        tables.append(Table(title=title, header=header, rows=tuple(rows), strong=_best(values, min)))
    return tables


def hf_differences(results: Results) -> list[Table]:
    """Models of transformers with gates beside others but their own base, on the same windows; none without rows."""
    groups = by_scheme(series.hf_rows(results))
    rows = []
    for (position, variant), own in groups.items():
        base = base_of(position)
        for (other, also), others in groups.items():
            in_other_table = other == base and also in ("", variant)
            if base != position and not other.endswith("+gape") and not in_other_table:
                for d in _first_seeds(own, others):
                    cells = (f"{d.at:,}", f"{d.difference:+.4f}", interval(d.low, d.high), d.direction)
                    rows.append((f"{d.scheme} − {d.other}", *cells))
    header = ("Models", "context", "difference", "95% interval", "verdict")
    title = (
        "Models with gates: nats per token beside others, on the same windows, a seed of each; intervals over documents"
    )
    return [Table(title=title, header=header, rows=tuple(rows))] if rows else []


def entropy_table(records: Sequence[Record]) -> Table:
    """Mean attention entropy by layer, a row per run and set."""
    layers = max(len(own["entropy"][0]) for record in records for own in record["sets"])
    rows = []
    for record in records:
        for own in record["sets"]:
            settings, each = own["asked"], np.array(own["entropy"])
            tokens = "prompts" if settings["length"] is None else f"{settings['length']:,}"
            means = [f"{value:.3f}" for value in each.mean((0, 2)).tolist()]
            # Runs may have been measured on more or fewer passages of the same text, and have fewer layers.
            means += ["–"] * (layers - len(means))
            rows.append((record["run"], settings["data"], tokens, str(len(each)), *means))
    header = ("Run", "data", "tokens", "passages", *(f"layer {layer}" for layer in range(layers)))
    return Table(title="Mean attention entropy (nats)", header=header, rows=tuple(rows))


def routing_table(rows: Sequence[Record]) -> Table:
    """The routing variables at the last step that was tracked: mean over a layer's heads, and their range."""
    cells = []
    for run, own in group_by(rows, lambda row: row["run"]).items():
        step = max(row["step"] for row in own)
        layers = group_by((row for row in own if row["step"] == step), lambda row: row["layer"])
        for layer, heads in sorted(layers.items()):
            values = ([row[variable] for row in heads] for variable in ROUTING)
            ranges = (f"{np.mean(each):.3g} ({min(each):.2g} … {max(each):.2g})" for each in values)
            cells.append((run, f"{step:,}", str(layer), *ranges))
    header = ("Run", "step", "layer", "mean mask M", "landmark", "query gate", "amplitude")
    return Table(title="Routing variables: mean over heads (least … most)", header=header, rows=tuple(cells))


def far_back_table(rows: Iterable[Record]) -> list[Table]:
    """Loss and gain by kind, scheme and distance, and how gated schemes stand beside others on the same tokens."""
    rows = list(rows)
    tables = []
    for kind, title in series.FAR_BACK.items():
        chosen = series.same_settings([row for row in rows if row["kind"] == kind], far_back_question)
        distances = sorted({row["distance"] for row in chosen})
        cells = []
        for runs in by_scheme(chosen).values():
            at = group_by(runs, lambda row: row["distance"])
            cells.append((name(runs[0]), *(_loss_and_gain(at.get(distance, ())) for distance in distances)))
        if cells:
            header = ("Scheme", *(f"{distance:,}" for distance in distances))
            full = f"{title}: loss (gain from the far text), nats"
            tables.append(Table(title=full, header=header, rows=tuple(cells)))
    for what, gain in (("loss", False), ("gain from the far text", True)):
        title = f"Far back: {what} beside another scheme, on the same tokens"
        tables += _differences(title, "distance", far_back_differences(rows, gain=gain))
    return tables


def recall_tables(results: Results) -> list[Table]:
    """A table per distance, and what generation costs; none where there are no rows."""
    kinds = [
        *((f"Recall, {title.lower()}: share of facts answered", what, "match", (1.0, ".3f"))
          for what, title in series.RECALL.items()),
        ("Tokens per second, one text", series.GENERATE, "tokens_per_second", (1.0, ".1f")),
        ("Cache behind a text, MiB", series.GENERATE, "cache_bytes", (2.0**20, ".2f")),
    ]  # fmt: skip
    rows = results.of("recall")
    every = (_recall_table(title, series.recall_lines(rows, what, key), *cell) for title, what, key, cell in kinds)
    return [table for table in every if table.rows]


def _recall_table(title: str, lines: Sequence[series.Data], unit: float, form: str) -> Table:
    """A row per scheme, a column per context: the mean, and half of its 95% interval over seeds."""
    lengths = sorted({length for line in lines for length in line["at"]})
    cells = []
    for line in lines:
        at = dict(zip(line["at"], zip(line["mean"], line["high"], strict=True), strict=True))
        row = [line["label"], str(max(line["n"]))]
        for length in lengths:
            mean, high = at.get(length, (None, None))
            spread = "" if high is None or mean is None else f" ± {(high - mean) / unit:{form}}"
            row.append("–" if mean is None else f"{mean / unit:{form}}{spread}")
        cells.append(tuple(row))
    header = ("Scheme", "seeds", *(f"{length:,}" for length in lengths))
    return Table(title=title, header=header, rows=tuple(cells))


def _differences(title: str, along: str, differences: Sequence[Difference]) -> list[Table]:
    rows = tuple(
        (
            f"{d.scheme} − {d.other}", series.FAR_BACK.get(d.what, d.what).lower(), f"{d.at:,}", str(d.seeds),
            f"{d.difference:+.4f}", interval(d.low, d.high), d.verdict,
        )
        for d in sorted(differences, key=lambda d: (d.what, d.scheme, d.other, d.at))
    )  # fmt: skip
    header = ("Schemes", "what", along, "seeds", "difference", "95% interval", "verdict")
    return [Table(title=title, header=header, rows=rows)] if rows else []


def _first_seeds(rows: Sequence[Record], others: Sequence[Record]) -> list[Difference]:
    """Differences at each context that both were measured at on the same windows, of the first seed of each."""

    def windows(row: Record) -> tuple[Any, ...]:
        return row["plan"], row["stratum"], row["context"]

    known = {windows(row): row for row in reversed(others)}
    pairs: dict[tuple[Any, ...], tuple[Record, Record]] = {}
    for row in sorted(rows, key=lambda row: (row["context"], row["seed"])):
        if windows(row) in known:
            pairs.setdefault((row["plan"], row["stratum"]), (row, known[windows(row)]))
    return [window_difference(*pair) for pair in pairs.values()]


def _loss_and_gain(rows: Sequence[Record]) -> str:
    if not rows:
        return "–"
    loss, gain = (float(np.mean([row[key] for row in rows])) for key in ("nll", "gain"))
    return f"{loss:.3f} ({gain:+.3f})"


def _column(factor: int, schemes: list[Curve]) -> str:
    """A length as a multiple of the training length, and in tokens where that is one number."""
    lengths = {curve.rows[factor][0]["length"] for curve in schemes if factor in curve.rows}
    return f"{factor}× ({lengths.pop():,})" if len(lengths) == 1 else f"{factor}×"


def _best(values: Sequence[Sequence[float | None]], pick: Callable[[Iterable[float]], float]) -> Cells:
    """The cells with the best value of their column, where several rows have one; two columns lead."""
    best = set()
    for c, column in enumerate(zip(*values, strict=True), 2):
        numbers = [value for value in column if value is not None]
        if numbers and len(column) > 1:
            best |= {(r, c) for r, value in enumerate(column) if value == pick(numbers)}
    return frozenset(best)


@lru_cache(maxsize=16)
def _digits(length: int, needles: int, target: str, seed: int, samples: int) -> npt.NDArray[np.int64]:
    """The digit that each test sample asks for, (samples,)."""
    from gape.tasks import niah  # noqa: PLC0415

    config = niah.NIAHConfig(length=length, n_needles=needles, target=target)
    haystacks = niah.sample(config, samples, seed=seed, split="test")
    digits: npt.NDArray[np.int64] = (haystacks.targets[:, -1] - niah.DIGIT_0).numpy()
    return digits
