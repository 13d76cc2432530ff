"""`gape lm` at toy size: from a corpus to perplexity, stopped and resumed, and what is refused before any work."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from gape.experiments import language
from gape.report import catalogue
from gape.utils import jsonl
from tests.cli.test_commands import gape_exits
from tests.tasks import text

SMALL = [
    "train.max_steps=6", "train.validate_every=3", "train.checkpoint_every=3", "train.warmup_steps=1",
    "train.progress=off", "task.length=16", "model.n_layer=1", "model.n_embd=16", "batch_size=2",
    "evaluation.contexts=[16, 32]", "evaluation.last=16", "evaluation.align=32", "evaluation.validation_windows=4",
    "analysis.routing_every=2", "evaluation.chunk=24",
]  # fmt: skip
RUNS = ("p-rope", "p-rope+gape")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return text.corpus(tmp_path / "books").directory


def train(corpus: Path, *more: str) -> int:
    return gape_exits("lm", "train", "lm/toy", f"data={corpus}", *SMALL, *more)


def rows(home: str | Path, name: str = "perplexity.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (Path(home) / name).read_text().splitlines()]


def test_from_a_corpus_to_perplexity(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus) == 0
    assert capsys.readouterr().out.split() == [f"runs/lm/toy/{run}" for run in RUNS]
    for run in RUNS:
        home = Path("runs/lm/toy") / run
        measured = rows(home)
        assert [(r["protocol"], r["context"], r["last"], r["stratum"]) for r in measured] == [
            ("last-k", 16, 16, None),
            ("last-k", 32, 16, None),
        ]
        named = {"run": run, "variant": "", "position": run, "seed": 0, "train_length": 16, "step": 6}
        for row in measured:
            assert {key: row[key] for key in named} == named
            assert (row["documents"], row["windows"]) == (4, len(row["window_nll"]))
            assert row["low"] < row["nll"] < row["high"]
        assert [r["metrics"].keys() for r in rows(home, "log.jsonl") if r["event"] == "validation"] == [
            {"loss", "epochs"}
        ] * 2
        recorded = json.loads((home / "config.json").read_text())["extra"]["corpus"]
        assert recorded["tokenizer"]["name"] == "bytes"
    routing = rows("runs/lm/toy/p-rope+gape", "routing.jsonl")
    assert [(r["step"], r["layer"], r["head"]) for r in routing] == [(s, 0, h) for s in (0, 2, 4, 6) for h in (0, 1)]
    assert all(r["mean_mask"] > 0 and 0 < r["landmark"] < 1 and r["gate"] > 0 and r["amplitude"] > 0 for r in routing)
    assert not Path("runs/lm/toy/p-rope/routing.jsonl").exists()
    assert train(corpus, "--list") == 0
    assert capsys.readouterr().out.split() == [w for run in RUNS for w in ("done", f"runs/lm/toy/{run}")]
    assert train(corpus) == 0
    assert len(rows("runs/lm/toy/p-rope")) == 2


def test_recall_texts_are_trained_on_and_belong_to_the_run(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = text.corpus(Path("long"), lengths=(700, 800), train_length=700).directory
    options = ("recall.share=0.5", "recall.skip_to=4096", "task.length=600", "model.position=p-rope+gape")
    assert train(longer, *options, "train.max_steps=2", "evaluation.contexts=[]") == 0
    assert train(longer, *options, "train.max_steps=2", "evaluation.contexts=[]", "recall.weight=2") == 2
    assert "recall was" in capsys.readouterr().err
    assert train(corpus, "recall.share=0.5", "--out", "other") == 2
    assert "recall.length" in capsys.readouterr().err


def test_measured_further_and_compared(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus, "evaluation.contexts=[]") == 0
    homes = [f"runs/lm/toy/{run}" for run in RUNS]
    arguments = ["--data", corpus, "--contexts", "16,64", "--last", "8", "--device", "cpu"]
    assert gape_exits("lm", "perplexity", *homes, *arguments) == 0
    output = capsys.readouterr()
    assert "Perplexity by context, last-k, all documents" in output.out
    assert "Nats per token beside p-rope on the same windows" in output.out
    assert "1 of 4 documents have fewer than 65 tokens and are left out: held-0" in output.err
    assert [(r["context"], r["last"]) for r in rows(homes[0])] == [(16, 8), (64, 8)]
    assert gape_exits("lm", "perplexity", *homes, *arguments) == 0
    assert len(rows(homes[0])) == 2
    assert not list(Path(homes[0]).glob(".scores*"))


def test_reading_through_a_forgetting_cache_is_another_variant_of_the_run(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {})
    floor = ("model.position=p-rope+gape", "model.options.gate_floor=48.0", "model.options.init_landmark_bias=-9.0")
    assert train(corpus, *floor, "evaluation.contexts=[]") == 0
    home = "runs/lm/toy/p-rope+gape"
    few = ["--data", corpus, "--contexts", "96", "--last", "16", "--chunk", "24", "--device", "cpu"]
    for more in ([], ["--forget-eps", "1e-3"], ["--forget-eps", "1e-3"], []):
        assert gape_exits("lm", "perplexity", home, *few, *more) == 0
    dense, forgetting = rows(home)
    assert (dense["variant"], forgetting["variant"]) == ("", "forgetting 0.001 by weights")
    assert dense["plan"] == forgetting["plan"]
    assert forgetting["nll"] == pytest.approx(dense["nll"], abs=1e-2)
    assert gape_exits("report", home, "--out", "report") == 0
    assert "forgetting 0.001 by weights" in Path("report/tables.md").read_text()
    for wrong in (["--bounds", "gates"], ["--forget-eps", "1"], ["--attention", "eager"]):
        assert gape_exits("lm", "perplexity", home, *few, *wrong) == 2


def test_stopped_in_training_it_resumes_bit_for_bit(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = ["--only", "p-rope+gape"]
    assert train(corpus, "--out", "whole", *gated) == 0
    write = language.RoutingLog.write

    def stopping(log: language.RoutingLog, step: int, records: list[dict[str, object]]) -> None:
        write(log, step, records)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(language.RoutingLog, "write", stopping)
    assert train(corpus, "--out", "parts", *gated) == 143
    monkeypatch.undo()
    monkeypatch.chdir(corpus.parents[1])
    assert train(corpus, "--out", "parts", *gated) == 0
    one, other = Path("whole/p-rope+gape"), Path("parts/p-rope+gape")
    last = "checkpoints/step-00000006/model.safetensors"
    for name in (last, "log.jsonl", "routing.jsonl", "perplexity.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_stopped_in_measuring_it_goes_on(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(corpus, "--out", "whole", "--only", "p-rope") == 0
    append = jsonl.append

    def stopping(path: Path, *added: dict[str, object]) -> None:
        append(path, *added)
        if path.name == "perplexity.jsonl":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(jsonl, "append", stopping)
    assert train(corpus, "--out", "parts", "--only", "p-rope") == 143
    assert len(rows("parts/p-rope")) == 1
    monkeypatch.setattr(jsonl, "append", append)
    assert train(corpus, "--out", "parts", "--only", "p-rope") == 0
    assert Path("whole/p-rope/perplexity.jsonl").read_bytes() == Path("parts/p-rope/perplexity.jsonl").read_bytes()


def test_every_run_of_a_sweep_runs_compiled(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: torch keeps a few compiled forms of a function and runs others uncompiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        assert train(corpus, "train.compile=on", "train.max_steps=2", "evaluation.contexts=[]") == 0


def test_held_out_loss_that_turns_ends_a_run(corpus: Path) -> None:
    """At a rate that throws the weights about; the best checkpoint is the one that is measured."""
    assert train(corpus, "--only", "p-rope", "train.max_steps=60", "train.learning_rate=3", "train.patience=2") == 0
    home = Path("runs/lm/toy/p-rope")
    summary = json.loads((home / "summary.json").read_text())
    assert summary["status"] == "stopped early"
    losses = {r["step"]: r["metrics"]["loss"] for r in rows(home, "log.jsonl") if r["event"] == "validation"}
    best = min(losses, key=losses.__getitem__)
    assert summary["best"] == {"step": best, "loss": losses[best]}
    assert summary["step"] == best + 6
    assert {r["step"] for r in rows(home)} == {best}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data=nowhere"], "corpus: got 'nowhere', expected a directory that gape data prepare wrote"),
        (["data="], "data: got nothing, expected data=DIR"),
        (["model.vocab_size=50257"], "model.vocab_size: got int 50257, expected 257, the vocabulary of"),
        (["task.length=400"], "length: got int 400, expected below the longest of the train documents"),
        (["evaluation.contexts=[16, 4096]"], "context: got int 4096, expected a length that a document fills"),
        (["evaluation.contexts=[8]"], "evaluation.last: got int 16, expected at most the context, 8"),
        (["task.stratum=8192"], "task.stratum: got int 8192, expected a string"),
        (["task.stratum='8192'"], "stratum: got '8192'"),
        (["--only", "rope*"], "only: got str 'rope*', expected the name of a run"),
    ],
)
def test_mistakes_end_with_two_before_any_work(
    corpus: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus, *more) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_recipe_of_another_command_is_refused(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("lm", "train", "niah/demo") == 2
    assert "is for gape niah train" in capsys.readouterr().err
    assert gape_exits("niah", "train", "lm/toy") == 2


def test_another_corpus_is_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In going on it must be the very same, in measuring its tokenizer must be."""
    assert train(corpus, "--only", "p-rope", "evaluation.contexts=[]") == 0
    other = text.corpus(tmp_path / "other", lengths=(60, 70)).directory
    assert train(other, "--only", "p-rope") == 2
    assert "is not the corpus with which" in capsys.readouterr().err
    home, small = "runs/lm/toy/p-rope", ["--contexts", "16", "--last", "8", "--device", "cpu"]
    assert gape_exits("lm", "perplexity", home, "--data", other, *small) == 0
    path = other / "card.json"
    card = json.loads(path.read_text())
    card["tokenizer"] |= {"name": "another", "sha256": "0"}
    path.write_text(json.dumps(card))
    assert gape_exits("lm", "perplexity", home, "--data", other, *small) == 2
    assert "tokenizer: got str 'another', expected bytes, the tokenizer that" in capsys.readouterr().err
    assert len(rows(home)) == 1


def test_contexts_are_those_that_documents_fill(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus, "--only", "p-rope", "evaluation.contexts=[]") == 0
    assert gape_exits("lm", "perplexity", "runs/lm/toy/p-rope", "--data", corpus) == 2
    assert "context: got int 512" in capsys.readouterr().err
    assert gape_exits("lm", "perplexity", "runs/lm/toy/p-rope", "--data", corpus, "--dtype", "int8") == 2
    assert "precision: got str 'int8', expected auto, float32 or bfloat16" in capsys.readouterr().err
    assert gape_exits("lm", "perplexity", "nowhere", "--data", corpus, "--contexts", "16") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("corpus")
def test_recall_and_generation_are_measured_once_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = text.corpus(Path("longer"), lengths=(1300, 1400), train_length=700).directory
    options = (
        f"data={longer}", "device=cpu", "batch_size=2", "seed=0", "model.vocab_size=257", "model.n_embd=64",
        "task.length=600", "recall.share=0.5", "train.max_steps=1", "train.accumulation=1", "train.warmup_steps=0",
        "train.progress=off", "evaluation.contexts=[600, 1200]", "evaluation.last=16", "evaluation.align=1200",
        "evaluation.max_windows=2", "evaluation.validation_windows=2", "evaluation.recall_samples=2",
        "evaluation.recall_facts=2", "evaluation.new_tokens=2", "analysis.routing_every=0", "--only", "alibi_seed0",
        "--only", "p-rope+gape_floor4_seed0",
    )  # fmt: skip
    answered = language._answer

    def interrupted(*_: object) -> dict[str, object]:
        monkeypatch.setattr(language, "_answer", answered)
        raise OSError("interrupted")

    monkeypatch.setattr(language, "_answer", interrupted)
    assert gape_exits("lm", "train", "lm/recall", *options) == 1
    assert gape_exits("lm", "train", "lm/recall", *options) == 0
    whats = ["far", "middle", "near", "several", "generate"]
    for run in ("alibi_seed0", "p-rope+gape_floor4_seed0"):
        measured = rows(Path("runs/lm/recall") / run, "recall.jsonl")
        assert [(row["length"], row["what"]) for row in measured] == [(n, what) for n in (600, 1200) for what in whats]
        assert [row["answers"] for row in measured if "answers" in row] == [2, 2, 2, 4] * 2
        assert measured[9]["cache_bytes"] > 0
        assert measured[9]["tokens_per_second"] > 0
    before = (Path("runs/lm/recall") / run / "recall.jsonl").read_bytes()
    assert gape_exits("lm", "train", "lm/recall", *options) == 0
    assert (Path("runs/lm/recall") / run / "recall.jsonl").read_bytes() == before
    assert gape_exits("report", "runs/lm/recall", "--out", "results/lm/recall") == 0
    assert "Recall, fact far: share of facts answered" in Path("results/lm/recall/tables.md").read_text()
    assert gape_exits("reproduce", "lm-recall") == 0
    panels = json.loads(Path("figures/lm-recall.json").read_text())["panels"]
    assert [panel["what"] for panel in panels] == ["near", "middle", "far", "several"]
