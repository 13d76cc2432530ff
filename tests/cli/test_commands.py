"""The commands at toy size: from a recipe to a page, exit codes, and sweeps that go on where they stopped."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gape.cli
from gape.experiments import experiment, needle
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.report import catalogue
from gape.utils import jsonl
from gape.utils.progress import Progress

TOY = """
description = "toy"
device = "cpu"
batch_size = 2
[task]
length = 16
n_needles = 2
[model]
n_layer = 1
n_head = 2
n_embd = 16
[train]
max_steps = 3
validate_every = 2
log_every = 1
progress = "off"
[evaluation]
factors = [1, 2]
samples = 6
validation_samples = 4
[analysis]
samples = 2
factors = [1, 2]
[sweep]
"model.position" = ["rope", "rope+gape"]
"""
RUNS = ("rope", "rope+gape")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "toy.toml"
    path.write_text(TOY, encoding="utf-8")
    return path


def gape_exits(*arguments: object) -> int:
    """Run the command in this process; its exit code."""
    return exit_code(gape.cli.main, "gape", *arguments)


def exit_code(main: Callable[[], None], *arguments: object) -> int:
    """Run `main` with a command line; its exit code."""
    before, sys.argv = sys.argv, [str(argument) for argument in arguments]
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before
    return 0


def rows(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "eval.jsonl").read_text().splitlines()]


def test_from_a_recipe_to_a_page(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {name: catalogue.figure(name) for name in ("overview", "fox")})
    assert gape_exits("niah", "train", toy) == 0
    for run in RUNS:
        home = Path("runs/toy") / run
        assert [(r["factor"], r["length"], r["needles"], r["samples"]) for r in rows(home)] == [
            (1, 16, 2, 6),
            (2, 32, 4, 6),
        ]
        assert json.loads((home / "analysis.json").read_text())["position"] == run
        assert json.loads((home / "run.json").read_text())["train"]["max_steps"] == 3
    assert "RoPE+GAPE" in capsys.readouterr().out
    assert gape_exits("report", "runs/toy", "--out", "page") == 0
    assert "RoPE+GAPE" in Path("page/index.html").read_text(encoding="utf-8")
    assert gape_exits("reproduce", "overview", "--results", "nowhere") == 2
    Path("results/niah").mkdir(parents=True)
    Path("page").rename("results/niah/paper")
    assert gape_exits("reproduce", "overview") == 0
    assert capsys.readouterr().out.split()[-3:] == [f"figures/overview.{end}" for end in ("json", "png", "pdf")]
    capsys.readouterr()
    assert gape_exits("reproduce", "fox") == 2
    assert re.search(r"fox: .* no rows .* gape niah train niah/paper", capsys.readouterr().err)


def test_what_is_done_is_not_done_again(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("niah", "train", toy) == 0
    times = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.safetensors")}
    before = rows(Path("runs/toy/rope"))
    assert gape_exits("niah", "train", toy, "evaluation.factors=[1, 2, 3]") == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.safetensors")} == times
    after = rows(Path("runs/toy/rope"))
    assert after[:2] == before
    assert [r["factor"] for r in after] == [1, 2, 3]
    capsys.readouterr()
    assert gape_exits("niah", "train", toy, "evaluation.factors=[1, 2, 3]") == 0
    assert "2 of 2 runs are done already" in capsys.readouterr().err
    assert gape_exits("niah", "train", toy, "--list") == 0
    assert capsys.readouterr().out.split() == ["done", "runs/toy/rope", "done", "runs/toy/rope+gape"]


def test_a_sweep_goes_on_where_it_stopped(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the first length of the second run; the rows in the end are those of a sweep never stopped."""
    assert gape_exits("niah", "train", toy, "--out", "whole") == 0
    append, written = jsonl.append, []

    def stopping(path: Path, *rows: dict[str, object]) -> None:
        append(path, *rows)
        written.extend(rows)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(jsonl, "append", stopping)
    assert gape_exits("niah", "train", toy, "--out", "parts") == 143
    assert len(rows(Path("parts/rope+gape"))) == 1
    # What a crash in the middle of a line leaves.
    with Path("parts/rope+gape/eval.jsonl").open("a") as file:
        file.write('{"run": "ro')
    assert gape_exits("niah", "train", toy, "--out", "parts") == 0
    for run in RUNS:
        assert rows(Path("parts") / run) == rows(Path("whole") / run)
        one, other = (json.loads((Path(d) / run / "analysis.json").read_text()) for d in ("parts", "whole"))
        assert one == other


def test_a_directory_of_another_run_is_left_alone(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("niah", "train", toy, "model.position=rope") == 0
    assert gape_exits("niah", "train", toy, "model.position=rope", "train.learning_rate=0.01") == 2
    assert "learning_rate was 0.0003 and is now 0.01" in capsys.readouterr().err


def test_a_failed_run_does_not_stop_the_others(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    perform = experiment.perform

    def failing(run, directory, **options):
        if run.name == "rope":
            raise RuntimeError("no luck")
        perform(run, directory, **options)

    monkeypatch.setattr("gape.experiments.experiment.perform", failing)
    assert gape_exits("niah", "train", toy) == 1
    assert "no luck" in capsys.readouterr().err
    assert len(rows(Path("runs/toy/rope+gape"))) == 2


def test_a_trained_run_is_evaluated_further(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("niah", "train", toy, "model.position=rope") == 0
    assert gape_exits("niah", "eval", "runs/toy/rope", "--factors", "1,4", "--samples", "6", "--position", "yarn") == 0
    measured = [(r["evaluated"], r["factor"]) for r in rows(Path("runs/toy/rope"))]
    assert measured == [("rope", 1), ("rope", 2), ("rope", 4), ("yarn", 1), ("yarn", 4)]
    assert "RoPE, YaRN at evaluation" in capsys.readouterr().out


def test_the_scheme_for_evaluation_reads_the_same_weights(toy: Path) -> None:
    """Frequencies are all that differs: with factor 1 yarn is rope."""
    sizes = {"vocab_size": 27, "n_layer": 1, "n_head": 2, "n_embd": 16, "context_length": 16}
    model = GPT(GPTConfig(position="rope", **sizes)).eval()
    ids = torch.randint(27, (2, 40))
    for factor, same in ((1.0, True), (4.0, False)):
        other = needle.with_scheme(model, GPTConfig(position="yarn", options={"factor": factor}, **sizes))
        assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-6) == same
    with pytest.raises(ValueError, match="fox cannot take"):
        needle.with_scheme(model, GPTConfig(position="fox", **sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["niah", "train", "toy.toml", "train.max_step=1"], "did you mean train.max_steps?"),
        (["niah", "train", "missing.toml"], "expected a TOML file or one of niah/demo"),
        (["niah", "train", "toy.toml", "device=warp"], "device: got str 'warp'"),
        (["niah", "eval", "nowhere"], "expected a directory with run.json"),
        (["report", "nowhere"], "expected a run, a sweep or a report"),
        (["reproduce", "acuracy"], "did you mean accuracy?"),
        (["reproduce", "accuracy"], "gape niah train niah/paper"),
        (["reproduce", "lm-spectrum"], "gape lm train lm/books data=DIR, gape analyze spectrum"),
        (["niah", "train"], "Missing argument"),
        (["nonsense"], "No such command"),
    ],
)
def test_mistakes_end_with_two_and_one_line(
    toy: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gape_exits(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in " ".join(errors.split()).replace("│ ", "")
    assert "Traceback" not in errors


def test_a_file_where_a_directory_should_be_is_reported_in_one_line(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gape_exits("niah", "train", toy, "model.position=rope") == 0
    assert gape_exits("report", "runs/toy", "--out", "toy.toml") == 2
    assert "File exists: 'toy.toml'" in capsys.readouterr().err


def test_a_directory_of_somebody_elses_files_is_left_alone(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/toy/rope+gape").mkdir(parents=True)
    Path("runs/toy/rope+gape/thesis.tex").touch()
    assert gape_exits("niah", "train", toy) == 2
    assert "out: got" in capsys.readouterr().err
    assert [str(path) for path in Path("runs").rglob("*") if path.is_file()] == ["runs/toy/rope+gape/thesis.tex"]


def test_a_directory_that_is_lost_on_the_way_is_work_that_failed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object, **options: object) -> torch.Tensor:
        shutil.rmtree("runs")
        return torch.ones(4)

    monkeypatch.setattr(needle.niah, "hits", lost)
    assert gape_exits("niah", "train", toy, "model.position=rope") == 1


def test_letters_that_an_encoding_lacks_do_not_end_a_command(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert gape_exits("niah", "train", toy) == 0
    out.flush()
    assert b"RoPE ? RoPE+GAPE" in out.buffer.getvalue()


def test_progress_that_nobody_reads_costs_neither_the_work_nor_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    out = os.fstat(sys.stdout.fileno()).st_ino
    Progress().log("half way")
    assert os.fstat(sys.stdout.fileno()).st_ino == out


def test_figures_of_the_theory_need_no_results(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("reproduce", "mask") == 0
    assert capsys.readouterr().out.split() == ["figures/mask.json", "figures/mask.png", "figures/mask.pdf"]
    assert gape_exits("reproduce", "--list") == 0
    listed = capsys.readouterr().out
    for name in ("accuracy", "gates-entropy", "entropy-change", "query-gate", "fox", "yarn", "logit-gap", "retrieval"):
        assert name in listed


def test_the_demo_is_the_recipe_at_toy_size(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {"overview": catalogue.figure("overview")})
    small = [
        "train.max_steps=2", "task.length=16", "task.n_needles=2", "model.n_embd=16", "model.n_layer=1", "batch_size=2",
        "evaluation.samples=4", "evaluation.factors=[1]", "analysis.factors=[1]", "analysis.samples=1", "seed=[0]",
        "train.validate_every=0", "train.warmup_steps=0",
    ]  # fmt: skip
    assert gape_exits("demo", *small) == 0
    out = capsys.readouterr().out
    assert "p-RoPE+GAPE" in out
    page = Path(out.rpartition("Report: ")[2].strip())
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def training(recipe: Path) -> subprocess.Popen[str]:
    """A long sweep in a process of its own, whose first run has begun."""
    command = [sys.executable, "-m", "gape", "niah", "train", str(recipe), "train.max_steps=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log, deadline = Path("runs/toy/rope/log.jsonl"), time.monotonic() + 120
    while not (log.is_file() and log.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_sweep_in_good_order(toy: Path, signum: signal.Signals, code: int) -> None:
    process = training(toy)
    process.send_signal(signum)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert "Traceback" not in errors
    assert list(Path("runs/toy/rope/checkpoints").glob("step-*"))
