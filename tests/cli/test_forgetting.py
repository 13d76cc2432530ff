"""`gape lm forgetting` and `gape niah forgetting` at toy size: measured, stored, resumed and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from gape.experiments import forgetting, forgetting_bench
from gape.utils.signals import Interrupted
from tests.cli.test_commands import gape_exits
from tests.tasks import text

MODEL = [
    "train.max_steps=2", "train.validate_every=0", "train.checkpoint_every=0", "train.warmup_steps=1",
    "train.progress=off", "model.n_layer=1", "model.n_embd=16", "batch_size=2", "model.options.gate_floor=48.0",
    "model.options.init_landmark_bias=-9.0", "model.position=p-rope+gape",
]  # fmt: skip
LANGUAGE = [
    *MODEL, "task.length=16", "evaluation.contexts=[]", "evaluation.validation_windows=2", "analysis.routing_every=0",
]  # fmt: skip
NEEDLE = [
    *MODEL, "task.length=32", "task.n_needles=2", "evaluation.factors=[1]", "evaluation.samples=4",
    "evaluation.validation_samples=4", "analysis.samples=0", "seed=0",
]  # fmt: skip
FEW = ["--eps", "1e-3", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a run on it."""
    home = tmp_path_factory.mktemp("lm")
    text.corpus(home / "books")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert gape_exits("lm", "train", "lm/toy", "data=books/corpus", *LANGUAGE) == 0
    return home


@pytest.fixture
def language(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A copy of the corpus and of the run."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "books/corpus", tmp_path / "runs/lm/toy/p-rope+gape"


def measured(home: Path, corpus: Path, *more: str) -> int:
    few = ["--lengths", "96", "--last", "16", "--max-windows", "2", "--chunk", "24"]
    return gape_exits("lm", "forgetting", home, "--data", corpus, *few, *FEW, *more)


def rows(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "forgetting.jsonl").read_text().splitlines()]


def test_a_language_model_is_measured_reported_and_drawn(
    language: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, home = language
    assert measured(home, corpus) == 0
    output = capsys.readouterr().out
    assert all(title in output for title in ("Cache beside", "Perplexity beside"))
    stored = rows(home)
    (tiles,) = [r for r in stored if r["kind"] == "tiles"]
    assert len(tiles["tiles"]) == 1
    assert len(tiles["tiles"][0]) == 2
    assert tiles["mean"] < 1
    caches = {(r["how"], r["bounds"]): r for r in stored if r["kind"] == "cache"}
    assert set(caches) == {("dense", None), ("forgetting", "weights"), ("forgetting", "queries")}
    assert caches["dense", None]["num_keys"] == [[96, 96]]
    assert max(caches["forgetting", "queries"]["num_keys"][0]) < 96
    assert all(0 <= r["realised_eps"] <= 1e-3 for r in caches.values())
    dense, *others = [r for r in stored if r["kind"] == "perplexity"]
    assert [r["how"] for r in others] == ["skipping", "forgetting", "forgetting"]
    assert all(r["plan"] == dense["plan"] and abs(r["nll"] - dense["nll"]) < 1e-2 for r in others)
    assert all(r["machine"].startswith("CPU") and r["step"] == 2 for r in stored)

    assert measured(home, corpus) == 0
    assert rows(home) == stored
    assert gape_exits("report", home.parent, "--out", "results/forgetting") == 0
    assert "Cache beside the full one" in Path("results/forgetting/tables.md").read_text()
    assert "forgetting, weights" in Path("results/forgetting/tables.md").read_text()


def test_what_was_interrupted_goes_on(language: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, home = language
    once, calls = forgetting_bench.Bench.once, []

    def stopping(bench: forgetting_bench.Bench, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise Interrupted(130)
        once(bench, *given)

    with monkeypatch.context() as patch:
        patch.setattr(forgetting_bench.Bench, "once", stopping)
        assert measured(home, corpus, "--measure", "cache") == 130
    before = rows(home)
    assert len(before) == 2
    assert measured(home, corpus, "--measure", "cache") == 0
    assert rows(home)[:2] == before
    assert len(rows(home)) == 3


def test_needles_are_found_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gape_exits("niah", "train", "niah/demo", *NEEDLE) == 0
    home = tmp_path / "runs/niah/demo/p-rope+gape_seed0"
    assert gape_exits("niah", "forgetting", home, "--factors", "1,2", "--samples", "3", *FEW) == 0
    stored = rows(home)
    assert [(r["kind"], r["length"]) for r in stored[:2]] == [("tiles", 32), ("tiles", 64)]
    answers = {(r["factor"], r["how"], r.get("bounds")): r["hits"] for r in stored if r["kind"] == "needle"}
    assert set(answers) == {
        (factor, *way)
        for factor in (1, 2)
        for way in (("dense", None), ("skipping", None), ("forgetting", "weights"), ("forgetting", "queries"))
    }
    assert all(hits == answers[factor, "dense", None] for (factor, _, _), hits in answers.items())
    assert {r["how"] for r in stored if 0 < r.get("key_share", 0) <= 1} == {"forgetting"}
    assert gape_exits("report", home.parent, "--out", "report") == 0
    assert "Needle accuracy beside dense attention" in Path("report/tables.md").read_text()


def test_shares_of_keys_count_by_samples() -> None:
    """A last batch that is smaller has no more to say than its samples."""
    caches = iter([SimpleNamespace(num_keys=[[4, 8], [2, 2]]), SimpleNamespace(num_keys=[[8, 8], [8, 8]])])
    shares: list[float] = []
    for batch in (2, 1):
        forgetting.read_through(MagicMock(), lambda: next(caches), 3, shares, torch.zeros(batch, 8))
    assert shares == [0.5, 0.5, 1.0]


def test_all_runs_are_checked_before_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for position, options in (("p-rope+gape", NEEDLE), ("p-rope", [x for x in NEEDLE if "model.options" not in x])):
        assert gape_exits("niah", "train", "niah/demo", *options, f"model.position={position}") == 0
    homes = [tmp_path / f"runs/niah/demo/{name}_seed0" for name in ("p-rope+gape", "p-rope")]
    assert gape_exits("niah", "forgetting", *homes, "--factors", "1", "--samples", "4", *FEW) == 2
    assert "run: got str 'p-rope'" in capsys.readouterr().err
    assert not (homes[0] / "forgetting.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--eps", "0"], "eps: got float 0.0"),
        (["--eps", "x"], "eps: got 'x'"),
        (["--bounds", "gates"], "bounds"),
        (["--measure", "needle"], "measure: got str 'needle'"),
        (["--measure", "speed"], "measure: got str 'speed'"),
        (["--measure", "decode"], "measure: got str 'decode'"),
        (["--dtype", "half"], "precision: got str 'half'"),
        (["--lengths", "96,100000"], "at most 200"),
    ],
)
def test_invalid_options_are_refused(
    language: tuple[Path, Path], capsys: pytest.CaptureFixture[str], more: list[str], match: str
) -> None:
    corpus, home = language
    assert measured(home, corpus, *more) == 2
    assert match in capsys.readouterr().err
    assert not (home / "forgetting.jsonl").exists()
