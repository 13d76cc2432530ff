"""`gape ruler` at toy size: from samples to tables, stopped and killed, and what is refused before any work."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gape.tasks.ruler import evaluation
from tests.cli.test_commands import gape_exits
from tests.tasks import text
from tests.tasks.ruler import small

pytest.importorskip("wonderwords")
TASKS = "niah_single_1,vt,fwe"
EVAL = ["--device", "cpu", "--batch-tokens", "1200"]
TRAIN = [
    "train.max_steps=1", "train.validate_every=0", "train.checkpoint_every=1", "train.warmup_steps=0",
    "train.progress=off", "task.length=16", "model.n_layer=1", "model.n_embd=16", "batch_size=2",
    "evaluation.contexts=[]", "evaluation.last=16", "analysis.routing_every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on bytes, and samples for them."""
    folder = tmp_path_factory.mktemp("ruler")
    corpus = text.corpus(folder / "books").directory
    assert gape_exits("lm", "train", "lm/toy", f"data={corpus}", *TRAIN, "--out", folder / "runs") == 0
    options = ["--tokenizer", "bytes", "--lengths", "384,512", "--count", "3", "--out", folder / "samples"]
    assert gape_exits("ruler", "generate", *options, "--tasks", TASKS) == 0
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs and samples, in the working directory."""
    import shutil

    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def lines(path: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def scored(run: str = "p-rope") -> list[dict[str, object]]:
    (path,) = Path("runs", run, "ruler").glob("*/samples.jsonl")
    return sorted(lines(path), key=lambda row: row["sample"])


def test_from_samples_to_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.name for path in Path("samples").iterdir()) == sorted(
        [f"{task}_{length}.jsonl" for task in TASKS.split(",") for length in (384, 512)] + ["manifest.json"]
    )
    runs = ["runs/p-rope", "runs/p-rope+gape"]
    assert gape_exits("ruler", "eval", *runs, "--data", "samples", *EVAL) == 0
    output = capsys.readouterr()
    assert "p-RoPE+GAPE − p-RoPE" in output.out
    assert "p-rope: vt at 512: NLL" in output.err
    assert len(scored()) == 18
    assert {"output", "parsed", "score", "nll", "prompt_sha256"} <= scored()[0].keys()
    stored = lines("runs/p-rope/ruler.jsonl")
    assert [(r["task"], r["length"], r["samples"]) for r in stored][:2] == [("fwe", 384, 3), ("fwe", 512, 3)]
    assert stored[0]["run"] == "p-rope"
    assert gape_exits("ruler", "eval", *runs, "--data", "samples", *EVAL) == 0
    assert capsys.readouterr().out == output.out
    assert len(lines("runs/p-rope/ruler.jsonl")) == 6
    assert gape_exits("ruler", "table", "runs", "--out", "results/ruler/44m", "--format", "markdown") == 0
    table = capsys.readouterr().out
    assert Path("results/ruler/44m/tables.md").read_text(encoding="utf-8") == table
    assert gape_exits("ruler", "table", "results/ruler/44m", "--format", "markdown") == 0
    assert capsys.readouterr().out == table
    assert gape_exits("ruler", "table", "runs", "--ablation", "--full", "p-rope", "--format", "latex") == 0
    assert "change of answer NLL against p-RoPE" in capsys.readouterr().out


def test_a_run_without_floors_is_not_read_by_a_forgetting_cache(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["ruler", "eval", "runs/p-rope+gape", "--data", "samples", "--tasks", "vt", *EVAL]
    assert gape_exits(*ask, "--forget-eps", "1e-3") == 2
    assert "gate_floor" in capsys.readouterr().err
    assert not Path("runs/p-rope+gape/ruler.jsonl").exists()


def test_a_run_that_forgets_is_a_variant_of_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floor = ["model.position=p-rope+gape", "model.options.gate_floor=48.0"]
    assert gape_exits("lm", "train", "lm/toy", "data=books/corpus", *TRAIN, *floor, "--out", "floored") == 0
    ask = ["ruler", "eval", "floored/p-rope+gape", "--data", "samples", "--tasks", "vt", *EVAL]
    assert gape_exits(*ask) == 0
    assert gape_exits(*ask, "--forget-eps", "1e-3", "--bounds", "queries") == 0
    stored = lines("floored/p-rope+gape/ruler.jsonl")
    assert [row["variant"] for row in stored] == ["", "", *["forgetting 0.001 by queries"] * 2]
    assert [row.get("forget_eps") for row in stored] == [None, None, 1e-3, 1e-3]
    capsys.readouterr()
    assert gape_exits("ruler", "table", "floored/p-rope+gape") == 0
    assert "p-RoPE+GAPE (forgetting 0.001 by queries) − p-RoPE+GAPE" in capsys.readouterr().out


def test_a_gpt2_of_the_users(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    small.random_gpt2(here / "gpt2", positions=512)
    gpt2 = ["ruler", "eval", "gpt2", "--data", "samples", "--limit", "1", *EVAL]
    assert gape_exits(*gpt2, "--max-length", "200") == 2
    assert "samples are longer than the 200 tokens that the model may read" in capsys.readouterr().err
    assert not Path("runs/ruler").exists()
    assert gape_exits(*gpt2, "--no-generate") == 0
    (row, *_) = lines("runs/ruler/gpt2/ruler.jsonl")
    assert (row["run"], row["position"], row["model"]) == ("gpt2", "gpt2", "gpt2-2x32")
    assert gape_exits("ruler", "table", "runs/ruler", "--out", "results/ruler/124m") == 0


def test_two_models_of_one_name_are_not_mixed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "samples", "--limit", "1", "--no-generate", *EVAL]
    assert gape_exits("ruler", "eval", "runs/p-rope", "runs/p-rope", *arguments) == 2
    assert "models: 'runs/p-rope' goes by the name of another" in capsys.readouterr().err


def test_a_gpt2_with_other_positions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is called by its scheme, and reads further than GPT-2 did."""
    pytest.importorskip("transformers")
    small.random_gpt2(here / "gpt2", positions=64)
    options = ["--position", "p-rope+gape", "--start", "paper", "--context-length", "64", "--out", "other/model"]
    assert gape_exits("hf", "inject", "gpt2", *options) == 0
    short = ["--limit", "1", "--tasks", "vt", "--no-generate"]
    assert gape_exits("ruler", "eval", "other/model", "--data", "samples", *short, *EVAL) == 0
    (row, _) = lines("runs/ruler/other/ruler.jsonl")
    assert (row["run"], row["position"], row["model"]) == ("other", "p-rope+gape", "gape_gpt2-2x32")


def test_stopped_it_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["ruler", "eval", "runs/p-rope", "--data", "samples", "--tasks", "vt,fwe", *EVAL]
    assert gape_exits(*run, "--out", "whole") == 0
    whole = capsys.readouterr().out
    work, batches, later = evaluation._score_batch, list[object](), list[object]()

    def stopping(*arguments: object) -> object:
        batches.append(arguments)
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            later.append(arguments)
        return work(*arguments)

    monkeypatch.setattr(evaluation, "_score_batch", stopping)
    assert gape_exits(*run, "--out", "parts") == 143
    assert not later
    monkeypatch.setattr(evaluation, "_score_batch", work)
    (parts,) = Path("parts/ruler").glob("*/samples.jsonl")
    assert 0 < len(lines(parts)) < 12
    assert gape_exits(*run, "--out", "parts") == 0
    assert capsys.readouterr().out == whole
    assert Path("parts/ruler.jsonl").read_bytes() == Path("whole/ruler.jsonl").read_bytes()


def written() -> int:
    """Bytes of the samples that are scored."""
    return sum(path.stat().st_size for path in Path("parts").rglob("samples.jsonl"))


@pytest.mark.slow
def test_killed_at_ten_moments_the_table_is_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["ruler", "eval", "runs/p-rope", "--data", "samples", *EVAL]
    assert gape_exits(*run, "--out", "whole") == 0
    whole = capsys.readouterr().out
    command = [sys.executable, "-m", "gape", *run, "--out", "parts"]
    draw = random.Random(0)
    for _ in range(10):
        before = written()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while written() == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.wait()
        (path,) = Path("parts/ruler").glob("*/samples.jsonl")
        # Also what a death in the middle of a line leaves, and work for the next time.
        path.write_bytes(path.read_bytes()[: int(written() * draw.random())])
        Path("parts/ruler.jsonl").unlink(missing_ok=True)
    assert gape_exits(*run, "--out", "parts") == 0
    assert capsys.readouterr().out == whole


def test_samples_are_made_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["ruler", "generate", "--tokenizer", "bytes", "--lengths", "384,512", "--count", "3", "--out", "samples"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path("samples").glob("*.jsonl")}
    assert gape_exits(*options, "--tasks", TASKS) == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    Path("samples/vt_512.jsonl").unlink()
    Path("samples/fwe_512.jsonl").write_text("cut short")
    assert gape_exits(*options, "--tasks", TASKS) == 0
    assert Path("samples/fwe_512.jsonl").read_bytes() == before[Path("samples/fwe_512.jsonl")][1]
    assert Path("samples/vt_512.jsonl").read_bytes() == before[Path("samples/vt_512.jsonl")][1]
    assert gape_exits(*options, "--tasks", TASKS, "--seed", "1") == 2
    assert "out: got str 'samples', expected an empty folder" in capsys.readouterr().err


def test_tasks_that_do_not_fit_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["ruler", "generate", "--tokenizer", "bytes", "--lengths", "256", "--count", "1", "--out", "short"]
    assert gape_exits(*options, "--tasks", "niah_single_1,cwe") == 2
    assert "cwe does not fit" in capsys.readouterr().err
    assert not Path("short").exists()
    assert gape_exits(*options) == 0
    output = capsys.readouterr()
    assert output.out.split() == ["short/niah_single_1_256.jsonl", "short/niah_single_2_256.jsonl",
                                "short/niah_multikey_2_256.jsonl"]  # fmt: skip
    assert "cwe at 256 is left out: length: got int 256, expected a longer one" in output.err
    assert "qa_1 at 256 is left out: squad: got no file" in output.err
    assert "niah_single_2: no --haystack was given, repeated sentences stand in for prose" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "runs/p-rope", "--data", "nowhere"], "data: got 'nowhere', expected a file of JSON lines"),
        (["eval", "runs", "--data", "samples"], "model: got 'runs', expected a directory that gape lm train"),
        (["eval", "runs/p-rope", "--data", "samples", "--tasks", "cwe"], "the data have no samples of cwe"),
        (["eval", "runs/p-rope", "--data", "samples", "--tasks", "niah"], "task: got 'niah', expected one of"),
        (["eval", "runs/p-rope", "--data", "samples", "--template", "x"], "template: got str 'x', expected one of"),
        (["eval", "runs/p-rope", "--data", "samples", "--tokenizer", "none/such/files"], "tokenizer: got 'none/such"),
        (["eval", "runs/p-rope", "--data", "samples", "--limit", "0"], "limit: got int 0"),
        (["table", "books"], "expected a run, a sweep or a report"),
        (["table", "runs", "--format", "pdf"], "format: got str 'pdf', expected one of text, markdown, latex"),
        (["generate", "--tokenizer", "bytes", "--lengths", "4k"], "lengths: got '4k', expected whole numbers"),
        (["generate", "--tokenizer", "bytes", "--wording", "mine"], "wording: got str 'mine', expected own or lm-eval"),
    ],
)
def test_mistakes_end_with_two_before_any_work(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ["--device", "cpu"] if arguments[0] == "eval" else []
    assert gape_exits("ruler", *arguments, *device) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/p-rope/ruler").exists()


def test_another_tokenizer_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    small.small_bpe(here / "bpe")
    assert gape_exits("ruler", "eval", "runs/p-rope", "--data", "samples", "--tokenizer", "bpe", *EVAL) == 2
    assert "tokenizer: got str 'bpe', expected bytes, the tokenizer that runs/p-rope" in capsys.readouterr().err
