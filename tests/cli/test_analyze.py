"""`gape analyze` at toy size: from trained runs to figures, stopped and resumed, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from gape.experiments import analyses
from gape.report import catalogue
from gape.utils import jsonl
from tests.cli.test_commands import gape_exits
from tests.cli.test_measurements import locked
from tests.tasks import text

SMALL = [
    "train.max_steps=4", "train.validate_every=0", "train.warmup_steps=1", "train.progress=off", "task.length=16",
    "model.n_layer=1", "model.n_embd=16", "batch_size=2", "evaluation.contexts=[16]", "evaluation.last=16",
    "evaluation.align=0", "evaluation.validation_windows=4", "evaluation.max_windows=8", "analysis.routing_every=2",
]  # fmt: skip
RUNS = ("runs/lm/toy/p-rope", "runs/lm/toy/p-rope+gape")
FAR = ["--context", "300", "--distances", "32,128", "--passage", "16", "--ngram", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and two trained runs."""
    home = tmp_path_factory.mktemp("lm")
    corpus = text.corpus(home / "books", lengths=(310, 320, 330, 50)).directory
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert gape_exits("lm", "train", "lm/toy", f"data={corpus}", *SMALL) == 0
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, and the corpus as data."""
    shutil.copytree(trained, tmp_path / "lm")
    monkeypatch.chdir(tmp_path / "lm")
    return Path("books/corpus")


@pytest.fixture(autouse=True)
def small_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gape.tasks.far_back.LEAD", 8)


def analyze(kind: str, home: Path, *more: object) -> int:
    return gape_exits("analyze", kind, *RUNS, "--data", home, *more)


def sets(run: str, kind: str) -> list[dict[str, object]]:
    return json.loads((Path(run) / f"{kind}.json").read_text())["sets"]


def test_from_runs_to_figures(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {"lm-far-back": catalogue.figure("lm-far-back")})
    assert analyze("entropy", home, "--lengths", "16,64", "--samples", "2") == 0
    Path("ruler.jsonl").write_text('{"input": "Where is it? ", "answer_prefix": "Here"}\n')
    assert analyze("entropy", "ruler.jsonl", "--tokenizer", "bytes") == 0
    for kind in ("spectrum", "maps", "masks"):
        assert analyze(kind, home) == 0
    assert analyze("far-back", home, *FAR) == 0
    output = capsys.readouterr()
    for words in ("Mean attention entropy", "Repeated n-grams", "p-RoPE+GAPE − p-RoPE"):
        assert words in output.out
    assert "p-rope has no gates" in output.err
    assert [s["asked"]["length"] for s in sets(RUNS[0], "entropy")] == [16, 64, None]
    assert not (Path(RUNS[0]) / "masks.json").exists()
    assert gape_exits("report", "runs/lm/toy", "--out", "results/lm/books") == 0
    assert Path("results/lm/books/figures/lm-far-back.png").is_file()


def test_stored_analyses_are_not_repeated(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze("maps", home, "--size", "4") == 0
    before = sets(RUNS[1], "maps")
    assert analyze("maps", home, "--size", "4") == 0
    assert "is there already" in capsys.readouterr().err
    assert analyze("maps", home, "--size", "8") == 0
    assert sets(RUNS[1], "maps")[:1] == before
    assert len(sets(RUNS[1], "maps")) == 2


def test_far_back_goes_on_where_it_stopped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("runs", "whole")
    whole = [run.replace("runs", "whole") for run in RUNS]
    assert gape_exits("analyze", "far-back", *whole, "--data", home, *FAR) == 0
    append, written = jsonl.append, []

    def stopping(path: Path, row: dict[str, object]) -> None:
        append(path, row)
        written.append(row["document"])
        if len(written) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(jsonl, "append", stopping)
    assert analyze("far-back", home, *FAR) == 143
    with (Path(RUNS[1]) / analyses.DOCUMENTS).open("a") as file:
        file.write('{"key": "')
    assert analyze("far-back", home, *FAR) == 0
    # Three documents of either run, none twice.
    assert len(written) == len(set(written)) * 2 == 6
    for run, other in zip(RUNS, whole, strict=True):
        assert (Path(run) / "far_back.jsonl").read_bytes() == (Path(other) / "far_back.jsonl").read_bytes()
    rows = [json.loads(line) for line in (Path(RUNS[0]) / "far_back.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"ngram", "planted"}
    assert all(row["low"] <= row["nll"] <= row["high"] for row in rows)
    assert {row["documents"] for row in rows if row["kind"] == "planted"} == {3}


@pytest.mark.skipif(os.name == "nt", reason="no locks there")
def test_a_run_that_another_process_measures_is_left_to_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(Path(RUNS[0])):
        assert analyze("maps", home) == 1
        assert gape_exits("lm", "perplexity", RUNS[0], "--data", home, "--contexts", "32", "--last", "8") == 1
    assert capsys.readouterr().err.count(f"{RUNS[0]} is being measured by another process") == 2
    assert not (Path(RUNS[0]) / "maps.json").exists()


def test_perplexity_on_another_device_is_measured_again(home: Path) -> None:
    path = Path(RUNS[0]) / "perplexity.jsonl"
    (row,) = map(json.loads, path.read_text().splitlines())
    path.write_text(json.dumps(row | {"device": "cuda"}) + "\n")
    arguments = ["--contexts", "16", "--last", "16", "--max-windows", "8", "--device", "cpu"]
    for _ in range(2):
        assert gape_exits("lm", "perplexity", RUNS[0], "--data", home, *arguments) == 0
        assert [json.loads(line)["device"] for line in path.read_text().splitlines()] == ["cuda", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["entropy", RUNS[0], "--data", "nowhere"], "expected a corpus, a text file"),
        (["entropy", RUNS[0], "--data", "books/held.jsonl"], "tokenizer: got nothing"),
        (["entropy", RUNS[0], "--data", "books/corpus", "--lengths", "16,9999"], "expected at most 330 tokens"),
        (["entropy", RUNS[0], "--data", "books/corpus", "--lengths", "long"], "lengths: got 'long'"),
        (["entropy", "nowhere", "--data", "books/corpus"], "expected a directory that gape lm train made"),
        (["entropy", RUNS[0], "--data", "books/corpus", "--stratum", "8192"], "no strata"),
        (["maps", RUNS[0], "--data", "books/corpus", "--layer", "5"], "layer: got int 5"),
        (["far-back", RUNS[0], "--data", "books/held.jsonl"], "expected a corpus that gape data prepare wrote"),
        (["far-back", RUNS[0], "--data", "books/corpus"], "context: got int 65536"),
        (["far-back", RUNS[0], "--data", "books/corpus", "--kinds", "verbs"], "kinds: got str 'verbs'"),
    ],
)
def test_mistakes_end_with_two_and_one_line(
    home: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path("runs").rglob("*"))
    assert gape_exits("analyze", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(Path("runs").rglob("*")) == before
