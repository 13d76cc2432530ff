"""The comparison of extended models: rows of runs become a summary and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import extend
from tables import extend as tables


def write_run(home: Path, method: str, seed: int, matches: list[int], perplexity: float) -> Path:
    folder = home / f"{method}-{seed}"
    folder.mkdir(parents=True)
    stage = "before" if method == "plain" else "after"
    rows: list[dict[str, Any]] = [
        {"stage": stage, "kind": "perplexity", "length": 65536, "perplexity": perplexity},
        {"stage": stage, "kind": "needle", "length": 65536, "task": "niah_single_1", "matches": matches,
         "match": sum(matches) / len(matches)},
        {"stage": stage, "kind": "generate", "length": 65536, "cache_share": 0.25, "cache_bytes": 100,
         "prefill_s": 0.5, "tokens_per_second": 14.0},
        {"stage": "other", "kind": "perplexity", "length": 65536, "perplexity": 1e9},
    ]  # fmt: skip
    (folder / "extend.json").write_text(json.dumps({"method": method, "steps": 300}))
    (folder / "summary.json").write_text(json.dumps({stage: {"minutes": 5.0 + seed}}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if method == "ours":
        (folder / "tuning").mkdir()
        lines = [{"event": "started", "machine": {"name": "GPU"}}, {"event": "timing", "step": 10}]
        (folder / "tuning/runtime.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_become_a_summary_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / tables.HOME
    monkeypatch.setattr(extend, "RESULTS", results)
    assert tables.needles(tmp_path) == tables.perplexity(tmp_path) == tables.NONE
    folders = [
        write_run(tmp_path, "yarn", 0, [1, 0, 0, 0], 31.0), write_run(tmp_path, "ours", 0, [1, 1, 1, 1], 26.0),
        write_run(tmp_path, "ours", 1, [1, 1, 0, 1], 27.0), write_run(tmp_path, "plain", 0, [0, 0, 0, 0], 1000.0),
    ]  # fmt: skip
    extend.gather(folders[:2])
    extend.gather(folders[2:])
    # Once more changes nothing.
    before = (results / "rows.jsonl").read_text()
    extend.gather(folders[2:])
    assert (results / "rows.jsonl").read_text() == before
    runs = [json.loads(line) for line in (results / "runs.jsonl").read_text().splitlines()]
    assert [(run["method"], run["seed"]) for run in runs] == [("yarn", 0), ("ours", 0), ("ours", 1), ("plain", 0)]
    assert [run["started"].get("tuning", [{}])[0].get("machine") for run in runs[:2]] == [None, {"name": "GPU"}]
    summary = json.loads((results / "summary.json").read_text())
    assert list(summary) == ["plain", "yarn", "ours"]
    ours = summary["ours"]
    assert (ours["seeds"], ours["minutes"], ours["perplexity"]["65536"]) == ([0, 1], 5.5, 26.5)
    assert ours["needles"]["65536"]["niah_single_1"] == pytest.approx(0.875)
    assert ours["cache_share"]["65536"] == 0.25
    assert "0.88 ± 0.18" in tables.needles(tmp_path)
    assert "26.50 ± 0.71" in tables.perplexity(tmp_path)
    assert "0.25" in tables.cost(tmp_path)
    # Seed 1 has no YaRN beside it.
    assert "| ours − yarn | single 1 | 65,536 | 1 | +0.75" in tables.differences(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^folders: "):
        extend.rows_of(tmp_path)
