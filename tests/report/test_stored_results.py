"""What docs/results say of the stored runs, beyond the tables: same data, same settings, and verdicts."""

from __future__ import annotations

import pytest

from gape.experiments import recipe
from gape.report.ruler import columns, difference, methods
from tables.language import ABLATIONS, BOOKS, GATE
from tables.markdown import only, select, stored
from tables.smollm2 import FIRST, FREE, SECOND, TIMED, rows


def test_schemes_saw_the_same_tokens() -> None:
    runs = stored(f"{BOOKS}/runs.jsonl")
    assert len(runs) == 6
    assert all(run["manifest"]["data"] == runs[0]["manifest"]["data"] for run in runs)
    assert {run["training"]["tokens"] for run in runs} == {262_144_000}


def test_ablations_saw_the_tokens_of_the_full_model() -> None:
    full = only(stored(f"{ABLATIONS}/runs.jsonl"), run="p-rope+gape_seed0")
    assert full == only(stored(f"{BOOKS}/runs.jsonl"), run="p-rope+gape_seed0")
    for run in stored(f"{ABLATIONS}/runs.jsonl"):
        assert run["manifest"]["data"] == full["manifest"]["data"]
        assert run["training"]["tokens"] == full["training"]["tokens"]


def test_a_fixed_gate_is_worse_than_p_rope_on_ruler() -> None:
    full = [
        select(stored(f"results/ruler/{home}/ruler.jsonl"), run="p-rope+gape_seed0") for home in ("44m", "ablation")
    ]
    assert full[0] == full[1]
    by = {
        each.label: each
        for home in ("44m", "ablation")
        for each in methods(stored(f"results/ruler/{home}/ruler.jsonl"))
    }
    paired = [difference(by[GATE], by["p-RoPE"], column) for column in columns([by[GATE]])]
    assert [each and each.verdict for each in paired] == ["worse"] * 8


def test_a_fixed_gate_skips_no_tile() -> None:
    stored_rows = select(stored(f"{ABLATIONS}/forgetting.jsonl"), run="gate-fixed_seed0")
    assert {(row["length"], row["eps"]) for row in stored_rows} == {
        (n, e) for n in (65536, 131072) for e in (1e-3, 1e-2, 1e-1)
    }
    assert {row["mean"] for row in stored_rows} == {1.0}


def test_the_recipe_is_the_run_that_was_measured() -> None:
    measured = only(stored("results/forgetting/runs.jsonl"), run="p-rope+gape_floor4_seed0")["settings"]
    (trained,) = recipe.load("lm/floor4").runs
    own = trained.to_dict()
    assert all(measured[name] == own[name] for name in ("model", "task", "batch_size", "seed"))
    differing = {name for name, value in own["train"].items() if measured["train"].get(name, value) != value}
    assert differing == {"compile", "validate_every", "checkpoint_every", "progress"}


@pytest.mark.parametrize(("home", "runs", "free"), [(FIRST, FREE, [12, 18, 12, 15]), (SECOND, TIMED, [14, 12])])
def test_so_many_key_heads_are_free(home: str, runs: dict[str, str], free: list[int]) -> None:
    settings = [
        next(row["settings"] for row in rows("runs", home, run=run) if "settings" in row) for run in runs.values()
    ]
    floors = [each["model"]["gates"]["gate_floor"] for each in settings]
    # Three query heads share a key head.
    assert [sum(not floor for layer in each for floor in layer[::3]) for each in floors] == free
