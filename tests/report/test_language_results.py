"""What README and docs/reproduction.md say of language models is what the stored rows say."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from gape.report.lm_summary import name
from gape.report.results import read_lines

ROOT = Path(__file__).parents[2]
LM = ROOT / "results" / "lm"


def cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.strip().strip("|").replace("<u>", "").replace("</u>", "").split("|")]


def table(text: str, start: str) -> dict[str, list[str]]:
    """The rows under the header that starts so, by their first cell."""
    body = text.split(start, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {row[0]: row[1:] for row in map(cells, body)}


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_perplexities() -> None:
    first, second = (
        {scheme: row[1:] for scheme, row in table(part, "| Scheme |").items()}
        for part in page("results/lm/books/tables.md").split("**Perplexity by context")[1:3]
    )
    told = page("docs/reproduction.md")
    assert table(told, "| context | 512 |") == first
    assert table(told, "| context, nine books |") == second
    shown = table(page("README.md").split("## Language models")[1], "| context |")
    assert shown == {
        scheme: [row[1], row[3], row[6], second[scheme][0], second[scheme][4]] for scheme, row in first.items()
    }


def test_ruler() -> None:
    stored = page("results/ruler/44m/tables.md").split("**RULER: string")[0]
    rows = [row for row in map(cells, stored.splitlines()[4:]) if len(row) > 1]
    found = {row[1]: [cell.split(" ±")[0] for cell in row[2:]] for row in rows}
    shown = table(page("docs/reproduction.md"), "| | cwe_4k |")
    assert {method: row for method, row in shown.items() if not method.startswith("the paper's")} == found


def test_what_a_planted_passage_was_worth() -> None:
    found: dict[str, list[str]] = {}
    for row in sorted(read_lines(LM / "books" / "far_back.jsonl"), key=lambda row: row["distance"]):
        if row["kind"] == "planted":
            found.setdefault(name(row), []).append(f"{row['gain']:.3f}".replace("-", "−"))
    assert table(page("docs/reproduction.md"), "| distance | 512 |") == found


def test_entropy_and_reach() -> None:
    found = {}
    for record in read_lines(LM / "books" / "entropy.jsonl"):
        by = {read["asked"]["length"]: read for read in record["sets"]}
        means = [f"{np.mean(by[length]['entropy']):.2f}" for length in (1024, 4096, 32768, None)]
        heads = [np.median(np.array(by[length]["used"], dtype=float)[..., 1], axis=0) for length in (1024, 4096, 32768)]
        found[name(record)] = [*means, *(f"{np.median(tenths):,.0f}" for tenths in heads)]
    assert table(page("docs/reproduction.md"), "| | entropy, 1,024 |") == found


def test_throughput() -> None:
    for scheme, row in table(page("docs/reproduction.md"), "| million tokens per second |").items():
        for at, way in enumerate(("graphs", "auto")):
            rows = read_lines(LM / "speed" / f"{scheme.lower()}_{way}" / "runtime.jsonl")
            rates = [r["tokens_per_second"] / 1e6 for r in rows if r["event"] == "timing" and r["step"] > 15]
            wanted = [f"{median(rates):.3f}", f"{min(rates):.3f} … {max(rates):.3f}"]
            assert row[2 * at : 2 * at + 2] == wanted, (scheme, way)
