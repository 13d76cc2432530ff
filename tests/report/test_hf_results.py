"""What docs/hf.md and docs/forgetting.md say of SmolLM2 is what the stored rows say."""

from __future__ import annotations

from typing import Any

from gape.report.results import Record, read_lines
from tests.report.test_language_results import ROOT, page, signed, table

HF = ROOT / "results" / "hf"
FLOORED = {"12 key heads free": "yarn+gape_floors12", "18 key heads free": "yarn+gape_floors18"}
LEARNED = "smollm2-landmarks"
FORGETTING = {"forget_eps": 0.01, "bounds": "queries"}


def rows(kind: str, name: str = "smollm2", **about: Any) -> list[Record]:
    stored = read_lines(HF / name / f"{kind}.jsonl")
    return [row for row in stored if all(row.get(key) == value for key, value in about.items())]


def perplexity(run: str, context: int, name: str = "smollm2") -> str:
    (row,) = rows("perplexity", name, run=run, context=context)
    return f"{row['perplexity']:.2f}"


def needles(run: str, length: int, **way: Any) -> Record:
    """RULER's first task by a run, read in some way; densely without."""
    found = [row for row in rows("ruler", length=length, **way) if row["run"].split(",")[0] == run]
    (row,) = (row for row in found if way or not {"forget_eps", "skip_eps"} & row.keys())
    return row


def test_models_beyond_their_context() -> None:
    contexts = (1024, 8192, 16384, 32768, 65536)
    runs = {"RoPE": "rope", "RoPE+GAPE": "rope+gape", "RoPE+GAPE, gate floor 4": "rope+gape_floor4", "p-RoPE": "p-rope"}
    runs |= {"SmolLM2-135M as it comes": "smollm2", "YaRN, factor 8": "yarn"}
    told = table(page("docs/hf.md"), "| context | 1,024 | 8,192 |")
    assert told == {label: [perplexity(runs[label], context) for context in contexts] for label in told}
    assert told.keys() == runs.keys()


def test_floors_on_top_of_yarn() -> None:
    runs = {"YaRN, factor 8": "yarn", "YaRN+GAPE, a floor in every head": "yarn+gape_floor200"}
    runs |= {f"YaRN+GAPE, {heads}": run for heads, run in FLOORED.items()}
    expected = {}
    for label, run in runs.items():
        found = [f"{needles(run, length)['match']:.3f}" if run in FLOORED.values() else "–" for length in (1024, 4096)]
        expected[label] = [perplexity(run, context) for context in (1024, 4096, 16384, 65536)] + found
    text = page("docs/hf.md")
    assert table(text, "| perplexity at | 1,024 |") == expected
    assert [round(16 * needles(run, 16384)["match"]) for run in FLOORED.values()] == [3, 3]
    assert [round(16 * needles(run, 32768)["match"]) for run in FLOORED.values()] == [1, 1]
    assert "3 of 16 at 16,384, 1 of 16 at 32,768" in text
    near, far = (rows("perplexity", run="yarn+gape_floors18", context=context)[0] for context in (1024, 65536))
    assert f"with 18 it rises by {100 * (far['perplexity'] / near['perplexity'] - 1):.0f}%" in text
    nats = []
    for context in (65536, 16384, 1024, 4096):
        floored, plain = (rows("perplexity", run=run, context=context)[0] for run in ("yarn+gape_floors12", "yarn"))
        nats.append(f"{floored['nll'] - plain['nll']:+.2f}")
    assert nats == ["-0.49", "-0.13", "+0.06", "+0.06"]
    assert "0.49 nats per token below YaRN at 65,536, 0.13 at 16,384, and 0.06 above it at 1,024 and 4,096" in text


def test_what_the_readme_picks() -> None:
    text = page("README.md").split("In a model that is there already:")[1].split("\n\n")[0]
    contexts = (1024, 16384, 65536)
    for run in ("yarn+gape_floors12", "yarn"):
        first, second, third = (perplexity(run, context) for context in contexts)
        assert f"{first}, {second} and {third}" in text
    assert f"finds {needles('yarn+gape_floors12', 4096)['match']:.3f} of" in text


def test_landmarks_that_learn() -> None:
    text = page("docs/hf.md").split("**Landmarks that learn open**")[1].split("\n\n")[0]
    for run in ("rope+gape_floor32", "yarn+gape_floors12"):
        for context in (1024, 65536):
            assert perplexity(run, context, LEARNED) in text
    for run in FLOORED.values():
        closed, learned = (rows("perplexity", name, run=run, context=1024)[0] for name in ("smollm2", LEARNED))
        assert f"the learned ones are {closed['nll'] - learned['nll']:.2f} nats lower" in text


def changed(run: str, length: int, how: str) -> str:
    dense, other = (rows("forgetting", run=run, length=length, how=each)[0]["perplexity"] for each in ("dense", how))
    return signed(f"{100 * (other / dense - 1):+.3f}%")


def test_what_forgetting_changes() -> None:
    columns = []
    for run in FLOORED.values():
        dense, forgetting, skipping = (needles(run, 4096, **way) for way in ({}, FORGETTING, {"skip_eps": 0.01}))
        column = []
        for length in (65536, 131072):
            (row,) = rows("forgetting", run=run, length=length, how="dense")
            column += [f"{row['perplexity']:.3f}"]
            column += [" / ".join(changed(run, length, how) for how in ("skipping", "forgetting"))]
        column += [f"{dense['match']:.3f} / {forgetting['match']:.3f}"]
        columns.append([*column, " / ".join(f"{row['nll']:.4f}" for row in (dense, skipping, forgetting))])
    body = page("docs/forgetting.md").split("| eps 1e-2 | 12 key heads free | 18 key heads free |")[1].split("\n\n")[0]
    told = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in body.splitlines()[2:]]
    assert told == [list(row) for row in zip(*columns, strict=True)]


def test_needles_that_a_cache_loses() -> None:
    lost_and_won = {}
    for run in FLOORED.values():
        pairs = list(zip(*(needles(run, 4096, **way)["sample_match"] for way in ({}, FORGETTING)), strict=True))
        lost_and_won[run] = [sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)]
    assert lost_and_won == {"yarn+gape_floors12": [5, 0], "yarn+gape_floors18": [0, 0]}
