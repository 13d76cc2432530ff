"""What README and docs/reproduction.md say of the ablations is what the stored rows say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gape.report.results import Record, read_rows
from gape.report.ruler import columns, difference, methods
from gape.report.schemes import name
from gape.report.statistics import far_back_differences, perplexity_differences
from tests.report.test_language_results import DISTANCES, books, page, signed, told, with_interval

RESULTS = Path(__file__).parents[2] / "results"
FULL, GATE, LANDMARK = "p-RoPE+GAPE", "p-RoPE+GAPE (gate-fixed)", "p-RoPE+GAPE (landmark-fixed)"
MODELS = [FULL, GATE, LANDMARK]
CONTEXTS = (1024, 4096, 16384, 32768)
#: The paper's table of ablations: NLL without g and without l, by column.
PAPER = {
    GATE: ["−3.10%", "−2.07%", "+0.63%", "+1.88%", "+2.94%", "+2.03%", "+4.54%", "+4.70%"],
    LANDMARK: ["+0.62%", "−3.10%", "+3.34%", "+0.61%", "+4.73%", "+5.49%", "−0.02%", "+1.28%"],
}


def stored(kind: str) -> list[Record]:
    return read_rows(RESULTS / "lm" / "ablations" / f"{kind}.jsonl")


def aligned() -> list[Record]:
    return [row for row in stored("perplexity") if row["align"] == 32768]


def test_they_saw_the_tokens_of_the_full_model() -> None:
    runs = {run["run"]: run for run in stored("runs")}
    full = runs.pop("p-rope+gape_seed0")
    assert full == next(run for run in books("runs") if run["run"] == "p-rope+gape_seed0")
    assert set(runs) == {"gate-fixed_seed0", "landmark-fixed_seed0"}
    for run in runs.values():
        assert run["manifest"]["data"] == full["manifest"]["data"]
        assert run["training"]["tokens"] == full["training"]["tokens"]
        assert run["manifest"]["code"]["commit"] == "69cf51d"


def test_ruler() -> None:
    by = {method.label: method for method in methods(read_rows(RESULTS / "ruler" / "ablation" / "ruler.jsonl"))}
    found = {}
    for place, column in enumerate(columns([by[FULL]])):
        losses = by[FULL].values(column, "nll")
        assert losses is not None
        found[f"{column[0]}_{column[1] // 1024}k"] = row = [f"{losses.mean():.2f}"]
        for label in (GATE, LANDMARK):
            paired = difference(by[label], by[FULL], column)
            assert paired is not None
            mean, low, high = (paired.percent(value) for value in (paired.mean, paired.low, paired.high))
            row += [signed(f"{mean:+.2f}% ({low:+.2f} … {high:+.2f})"), PAPER[label][place]]
    assert told("| | NLL of the full model |") == found


def test_the_full_model_is_that_of_the_table_of_schemes() -> None:
    rows = [read_rows(RESULTS / "ruler" / which / "ruler.jsonl") for which in ("44m", "ablation")]
    kept, own = ([row for row in each if row["run"] == "p-rope+gape_seed0"] for each in rows)
    assert own == kept


def test_gate_fixed_is_worse_than_p_rope_on_ruler() -> None:
    rows = [row for which in ("44m", "ablation") for row in read_rows(RESULTS / "ruler" / which / "ruler.jsonl")]
    by = {method.label: method for method in methods(rows)}
    paired = [difference(by[GATE], by["p-RoPE"], column) for column in columns([by[GATE]])]
    assert [p and p.verdict for p in paired] == ["worse"] * 8


def test_perplexities() -> None:
    rows = {(name(row), row["context"]): row for row in [*books("perplexity"), *stored("perplexity")]
            if row["align"] == 32768}  # fmt: skip
    found = {
        label: [f"{rows[label, context]['perplexity']:.2f}" for context in CONTEXTS] for label in ["p-RoPE", *MODELS]
    }
    assert told("| ablation, context |") == found
    assert f"is {found[GATE][3]}; with the landmark held, {found[LANDMARK][3]}." in page("README.md")


def test_differences_of_perplexity() -> None:
    found: dict[str, list[str]] = {}
    for pair in sorted(perplexity_differences(aligned()), key=lambda pair: pair.at):
        found.setdefault(f"{pair.scheme} − {pair.other}", []).append(with_interval(pair))
    assert told("| difference | 1,024 |") == found


def test_far_back() -> None:
    rows = {(name(row), row["kind"], row["distance"]): row for row in stored("far_back")}

    def shown(label: str, kind: str, value: str, form: str) -> list[str]:
        return [signed(f"{rows[label, kind, distance][value]:{form}}") for distance in DISTANCES]

    assert told("| ablation, planted |") == {
        label: shown(label, "planted", "gain", ".3f") + shown(label, "planted", "nll", ".2f") for label in MODELS
    }
    assert told("| ablation, gain |") == {
        label: shown(label, "ngram", "gain", "+.3f") + shown(label, "names", "gain", "+.3f") for label in MODELS
    }
    found: dict[str, list[str]] = {}
    planted = [row for row in stored("far_back") if row["kind"] == "planted"]
    for pair in sorted(far_back_differences(planted, gain=True), key=lambda pair: pair.at):
        found.setdefault(f"{pair.scheme} − {pair.other}", []).append(with_interval(pair))
    assert told("| difference of gains from the full model |") == found


def test_entropy_and_reach_on_the_same_two_passages() -> None:
    found, read = {}, set()
    for record in stored("entropy"):
        by = {each["asked"]["length"]: each for each in record["sets"]}
        sets = [by[length] for length in (1024, 4096, 32768)]
        read.add(tuple(passage for each in sets for passage in each["passages"][:2]))
        tenths = [np.median(np.array(each["used"], dtype=float)[:2, ..., 1], axis=0) for each in sets]
        found[name(record)] = [
            *(f"{np.mean(each['entropy'][:2]):.2f}" for each in sets),
            *(f"{np.median(heads):,.0f}" for heads in tenths),
        ]
    assert len(read) == 1
    assert told("| two passages |") == found
    tables = page("results/lm/ablations/tables.md")
    assert "| gate-fixed_seed0 | corpus | 1,024 | 2 |" in tables
    assert "| p-rope+gape_seed0 | corpus | 1,024 | 4 |" in tables


def test_a_fixed_gate_leaves_no_tile_out() -> None:
    rows = [row for row in stored("forgetting") if row["run"] == "gate-fixed_seed0"]
    assert {(row["length"], row["eps"]) for row in rows} == {
        (length, eps) for length in (65536, 131072) for eps in (1e-3, 1e-2, 1e-1)
    }
    assert {row["mean"] for row in rows} == {1.0}
