"""What README and docs/reproduction.md say of language models is what the stored rows say."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import numpy as np

from gape.report.results import Record, read_rows
from gape.report.ruler import columns, difference, methods
from gape.report.schemes import name
from gape.report.statistics import Difference, far_back_differences, perplexity_differences

ROOT = Path(__file__).parents[2]
LM = ROOT / "results" / "lm"
#: Every scheme that was trained, in the order of the tables.
SCHEMES = ["RoPE", "p-RoPE", "p-RoPE+GAPE", "p-RoPE+GAPE (floor4)", "ALiBi", "FoX"]
DISTANCES = (512, 2048, 8192, 32768)


def cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.strip().strip("|").replace("<u>", "").replace("</u>", "").split("|")]


def table(text: str, start: str) -> dict[str, list[str]]:
    """The rows under the header that starts so, by their first cell."""
    body = text.split(start, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {row[0]: row[1:] for row in map(cells, body)}


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def told(start: str) -> dict[str, list[str]]:
    return table(page("docs/reproduction.md"), start)


def books(kind: str) -> list[Record]:
    return read_rows(LM / "books" / f"{kind}.jsonl")


def signed(text: str) -> str:
    return re.sub(r"-(?=\d)", "−", text)


def with_interval(found: Difference) -> str:
    return signed(f"{found.difference:+.4f} ({found.low:+.4f} … {found.high:+.4f})")


def test_perplexities() -> None:
    first, second = (
        {scheme: row[1:] for scheme, row in table(part, "| Scheme |").items()}
        for part in page("results/lm/books/tables.md").split("**Perplexity by context")[1:3]
    )
    assert list(first) == list(second) == SCHEMES
    assert told("| context | 512 |") == first
    assert told("| context, nine books |") == second
    shown = table(page("README.md").split("## Language models")[1], "| context |")
    assert shown == {
        scheme: [row[1], row[3], row[6], second[scheme][0], second[scheme][4]] for scheme, row in first.items()
    }


def test_differences_of_perplexity() -> None:
    found: dict[str, list[str]] = {}
    for align, longest in ((32768, 32768), (131072, 131072)):
        rows = [row for row in books("perplexity") if row["align"] == align and row["context"] in (1024, longest)]
        for pair in sorted(perplexity_differences(rows), key=lambda pair: pair.at):
            found.setdefault(f"{pair.scheme} − {pair.other}", []).append(with_interval(pair))
    assert told("| difference | 60 books, 1,024 |") == found


def test_schemes_saw_the_same_tokens() -> None:
    runs = books("runs")
    assert len(runs) == len(SCHEMES)
    assert all(run["manifest"]["data"] == runs[0]["manifest"]["data"] for run in runs)
    assert {run["training"]["tokens"] for run in runs} == {262_144_000}
    assert {run["manifest"]["code"]["commit"] for run in runs} == {"fff4009", "6eda9b1"}


def test_ruler() -> None:
    stored = page("results/ruler/44m/tables.md").split("**RULER: string")[0]
    rows = [row for row in map(cells, stored.splitlines()[4:]) if len(row) > 1]
    found = {row[1]: [cell.split(" ±")[0] for cell in row[2:]] for row in rows}
    assert list(found) == SCHEMES
    shown = told("| | cwe_4k |")
    assert {method: row for method, row in shown.items() if not method.startswith("the paper's")} == found


def test_the_best_of_ruler_stand_out() -> None:
    found, shown = (
        {tuple(re.findall(r"\*\*([\d.]+)", line)) for line in text.splitlines() if line.startswith("|")}
        for text in (
            page("results/ruler/44m/tables.md").split("**RULER: string")[0],
            page("docs/reproduction.md").split("| | cwe_4k |")[1].split("\n\n")[0],
        )
    )
    assert shown == found


def test_differences_of_ruler() -> None:
    by = {method.label: method for method in methods(read_rows(ROOT / "results" / "ruler" / "44m" / "ruler.jsonl"))}
    shown = told("| difference | cwe_4k |")
    assert len(shown) == 9
    for pair, row in shown.items():
        one, other = (by[label] for label in pair.split(" − "))
        found = [difference(one, other, column) for column in columns([one])]
        texts = [(p.verdict, signed(f"{p.mean:+.3f}")) for p in found if p]
        assert row == [f"({text})" if verdict == "not separable" else text for verdict, text in texts], pair


def gains(kind: str, form: str) -> dict[str, list[str]]:
    rows = {(name(row), row["distance"]): row for row in books("far_back") if row["kind"] == kind}
    return {
        scheme: [signed(f"{rows[scheme, distance]['gain']:{form}}") for distance in DISTANCES] for scheme in SCHEMES
    }


def test_what_a_planted_passage_was_worth() -> None:
    assert told("| distance | 512 |") == gains("planted", ".3f")
    found: dict[str, list[str]] = {}
    rows = [row for row in books("far_back") if row["kind"] == "planted"]
    for pair in sorted(far_back_differences(rows, gain=True), key=lambda pair: pair.at):
        found.setdefault(f"{pair.scheme} − {pair.other}", []).append(with_interval(pair))
    shown = told("| difference of gains |")
    assert len(shown) == 6
    assert shown == {pair: found[pair] for pair in shown}


def test_what_far_text_was_worth_at_repeated_tokens() -> None:
    ngrams, names = gains("ngram", "+.3f"), gains("names", "+.3f")
    assert told("| gain | n-grams, 512 |") == {scheme: ngrams[scheme] + names[scheme] for scheme in SCHEMES}


def test_entropy_and_reach() -> None:
    found = {}
    for record in books("entropy"):
        by = {read["asked"]["length"]: read for read in record["sets"]}
        means = [f"{np.mean(by[at]['entropy']):.2f}" for at in (1024, 4096, 32768, None)]
        heads = [np.median(np.array(by[length]["used"], dtype=float)[..., 1], axis=0) for length in (1024, 4096, 32768)]
        found[name(record)] = [*means, *(f"{np.median(tenths):,.0f}" for tenths in heads)]
    assert told("| | entropy, 1,024 |") == found


def test_throughput() -> None:
    for scheme, row in told("| million tokens per second |").items():
        for at, way in enumerate(("graphs", "auto")):
            rows = read_rows(LM / "speed" / f"{scheme.lower()}_{way}" / "runtime.jsonl")
            rates = [r["tokens_per_second"] / 1e6 for r in rows if r["event"] == "timing" and r["step"] > 15]
            wanted = [f"{median(rates):.3f}", f"{min(rates):.3f} … {max(rates):.3f}"]
            assert row[2 * at : 2 * at + 2] == wanted, (scheme, way)
