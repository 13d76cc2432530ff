"""`gape hf forgetting` on models of transformers at toy size: measured, resumed, reported; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton")

import gape.hf
from tests.cli.test_commands import gape_exits
from tests.hf.tiny import tiny
from tests.tasks import text

SIZES = {"vocab_size": 257, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
GATES = {"gate_floor": 96.0, "init_landmark_bias": -9.0}
TRAIN = ["--length", "16", "--steps", "2", "--batch-size", "2", "--validate-every", "0", "--device", "cpu"]
FEW = [
    "--lengths", "96", "--last", "16", "--max-windows", "2", "--eps", "1e-3", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a model with gates, and a run that fine-tuned it."""
    home = tmp_path_factory.mktemp("made")
    text.corpus(home / "books")
    model = gape.hf.inject(tiny("llama", **SIZES), context_length=16, start="paper", gates=GATES)
    model.save_pretrained(home / "gated")
    corpus = str(home / "books/corpus")
    assert gape_exits("hf", "finetune", home / "gated", corpus, "--out", home / "run", *TRAIN) == 0
    return home


@pytest.fixture
def work(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("gated", "run"):
        shutil.copytree(built / name, tmp_path / name)
    (tmp_path / "books").symlink_to(built / "books/corpus")
    return tmp_path


def measured(*more: str) -> int:
    return gape_exits("hf", "forgetting", *more, "--data", "books", *FEW)


def rows(home: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(home, "forgetting.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_fine_tuned_run_is_measured_resumed_and_reported(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured("run", "--chunk", "24") == 0
    output = capsys.readouterr().out
    assert all(title in output for title in ("Cache beside", "Perplexity beside"))
    stored = rows("run")
    (tiles,) = [r for r in stored if r["kind"] == "tiles"]
    assert len(tiles["tiles"][0]) == 2
    assert tiles["mean"] < 1
    caches = {(r["how"], r["bounds"]): r for r in stored if r["kind"] == "cache"}
    assert set(caches) == {("dense", None), ("forgetting", "weights"), ("forgetting", "queries")}
    assert caches["forgetting", "queries"]["num_keys"] < caches["dense", None]["num_keys"] == [[96]]
    first, *others = [r for r in stored if r["kind"] == "perplexity"]
    assert [r["how"] for r in others] == ["skipping", "forgetting", "forgetting"]
    assert all(r["plan"] == first["plan"] and abs(r["nll"] - first["nll"]) < 1e-2 for r in others)
    assert all((r["run"], r["base"], r["position"], r["step"]) == ("run", "gated", "rope+gape", 2) for r in stored)
    assert all(r["device"] == "cpu" and r["machine"].startswith("CPU") for r in stored)

    assert measured("run", "--chunk", "24") == 0
    assert rows("run") == stored
    assert gape_exits("report", "run", "--out", "results/forgetting") == 0
    assert "gated, RoPE+GAPE" in Path("results/forgetting/tables.md").read_text()
    assert "forgetting, weights" in Path("results/forgetting/tables.md").read_text()


def test_other_weights_in_a_directory_are_measured_anew(work: Path) -> None:
    asked = ("gated", "--measure", "cache", "--bounds", "queries")
    assert measured(*asked) == 0
    assert (rows("gated")[0]["variant"], rows("gated")[0]["step"]) == ("not fine-tuned", 0)
    shutil.copyfile("run/model/model.safetensors", "gated/model.safetensors")
    shutil.copyfile("run/model/config.json", "gated/config.json")
    assert measured(*asked) == 0
    assert len({row["weights"] for row in rows("gated")}) == 2


def test_directories_of_one_name_are_different_runs(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for floor in (4.0, 8.0):
        model = gape.hf.inject(tiny("llama", **SIZES), context_length=16, start="paper", gates={"gate_floor": floor})
        model.save_pretrained(f"{floor:g}/gated")
    assert measured("4/gated", "8/gated", "--measure", "cache", "--bounds", "queries") == 0
    assert capsys.readouterr().out.count("forgetting, queries") == 2


def test_another_chunk_is_another_measurement(work: Path) -> None:
    asked = ("gated", "--measure", "cache", "--bounds", "queries")
    for chunk in ("24", "24", "48"):
        assert measured(*asked, "--chunk", chunk) == 0
    assert [row["chunk"] for row in rows("gated") if row["how"] == "forgetting"] == [24, 48]


def test_weights_may_be_in_half_precision(work: Path) -> None:
    for precision in ("float32", "bfloat16-weights"):
        assert measured("gated", "--measure", "cache,perplexity", "--bounds", "queries", "--precision", precision) == 0
    full, half = (
        [row for row in rows("gated") if row["precision"] == name] for name in ("float32", "bfloat16-weights")
    )
    one, other = ({row["kind"]: row for row in stored if row["how"] == "dense"} for stored in (full, half))
    assert one["cache"]["bytes"] > 1.5 * other["cache"]["bytes"]
    assert one["perplexity"]["nll"] != other["perplexity"]["nll"] == pytest.approx(one["perplexity"]["nll"], rel=1e-2)


def test_a_gpt_of_ours_saved_for_transformers_is_measured(work: Path) -> None:
    gape.hf.GapeForCausalLM.from_gpt(text.gpt(options=GATES).float()).save_pretrained("ours")
    assert measured("ours", "--measure", "cache", "--bounds", "queries") == 0
    assert {(r["position"], r["kind"]) for r in rows("ours")} == {("p-rope+gape", "cache")}


@pytest.mark.parametrize(
    ("changes", "inject", "match"),
    [
        ({}, None, "gates"),
        ({}, {"position": "rope"}, "gates"),
        ({"sliding_window": 8, "family": "mistral"}, {}, "sliding window"),
        ({"vocab_size": 100}, {}, "tokenizer"),
    ],
)
def test_models_that_cannot_be_measured_are_refused_before_any_is(
    work: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], inject: dict[str, Any] | None, match: str
) -> None:
    model = tiny(changes.pop("family", "llama"), **(SIZES | changes))
    if inject is not None:
        gape.hf.inject(model, context_length=16, **inject)
    model.save_pretrained("other")
    assert measured("gated", "other") == 2
    assert match in capsys.readouterr().err
    assert not Path("gated/forgetting.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["gated", "--measure", "needle"], "measure: got str 'needle'"),
        (["gated", "--lengths", "96,100000"], "at most 200"),
        (["nowhere"], "run: got 'nowhere'"),
        (["books"], "run: got 'books'"),
    ],
)
def test_invalid_options_are_refused(
    work: Path, capsys: pytest.CaptureFixture[str], more: list[str], match: str
) -> None:
    assert gape_exits("hf", "forgetting", *more, "--data", "books", "--device", "cpu") == 2
    assert match in capsys.readouterr().err
    assert not Path("gated/forgetting.jsonl").exists()


def test_a_language_model_needs_a_corpus(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("hf", "forgetting", "gated", "--device", "cpu") == 2
    assert "data: got nothing" in capsys.readouterr().err
