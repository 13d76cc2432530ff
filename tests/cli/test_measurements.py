"""What makes a measurement the one asked for, what is refused before any work, and who may measure at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gape.models.gpt import GPT
from gape.report.results import gather
from gape.tasks import niah
from tests.cli.test_commands import TOY, gape_exits, rows

HOME = Path("runs/toy/rope")
ONE = ["niah", "train", "toy.toml", "model.position=rope"]
EVAL = ["niah", "eval", HOME, "--samples", "6", "--factors"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and its trained run."""
    home = tmp_path_factory.mktemp("needle")
    (home / "toy.toml").write_text(TOY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert gape_exits(*ONE) == 0
    return home


@pytest.fixture(autouse=True)
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Another process measures in a run's directory."""
    code = "import sys; from pathlib import Path; from gape.utils import files\n"
    code += "with files.locked(Path(sys.argv[1]), 'measured'): print('held', flush=True); input()"
    command = [sys.executable, "-c", code, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield
    finally:
        process.communicate("\n")


def test_a_scheme_of_other_options_is_measured_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under YaRN with factor 4 everything is right, with factor 16 nothing."""

    def hits(model: GPT, config: niah.NIAHConfig, *, samples: int, **options: Any) -> torch.Tensor:
        return torch.full((samples,), model.config.options.get("factor") == 4)

    monkeypatch.setattr(niah, "hits", hits)
    for factor, accuracy, count in ((4, "1.00", 2), (16, "0.00", 4), (4, "1.00", 4)):
        overrides = ["evaluation.switch.rope=yarn", f"evaluation.switch_options.factor={factor}"]
        assert gape_exits(*ONE, *overrides) == 0
        (shown,) = [line for line in capsys.readouterr().out.splitlines() if "YaRN at evaluation" in line]
        assert shown.replace("*", "").split()[-2:] == [accuracy] * 2
        assert sum(row["evaluated"] == "yarn" for row in rows(HOME)) == count


def test_rows_say_which_weights_they_are_of_also_of_an_unfinished_run() -> None:
    (HOME / "summary.json").unlink()
    assert gape_exits(*EVAL, "4") == 0
    assert [row["step"] for row in rows(HOME)] == [3, 3, 3]


@pytest.mark.parametrize(
    "changed",
    ["analysis.seeds=[1]", "evaluation.seed=5"],
)
def test_an_analysis_with_other_settings_is_run(changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((HOME / "analysis.json").read_text())
    assert gape_exits(*ONE, changed) == 0
    after = json.loads((HOME / "analysis.json").read_text())
    assert after != before
    capsys.readouterr()
    assert gape_exits(*ONE, changed) == 0
    assert "1 of 1 runs are done already" in capsys.readouterr().err


def test_another_precision_and_another_device_are_other_measurements() -> None:
    def stored(**values: str) -> None:
        lines = [json.dumps(row | values) + "\n" for row in rows(HOME)[:2]]
        (HOME / "eval.jsonl").write_text("".join(lines))

    for values in ({"precision": "bfloat16"}, {"device": "cuda", "precision": "float32"}):
        stored(**values)
        assert gape_exits(*EVAL, "1,2", "--device", "cpu") == 0
        assert [row["device"] for row in rows(HOME)[2:]] == ["cpu", "cpu"]
        assert gape_exits(*EVAL, "1,2", "--device", "cpu") == 0
        assert len(rows(HOME)) == 4


def test_a_report_does_not_mix_precisions() -> None:
    """Of two ways of measuring the one with more lengths counts, of equal ones the later."""
    long = [row | {"precision": "bfloat16", "accuracy": 0.0} for row in rows(HOME)]
    short = [row | {"precision": "float32", "accuracy": 1.0} for row in rows(HOME)]
    for measured, expected in (([*long, short[0]], [0.0, 0.0]), ([*long, *short], [1.0, 1.0])):
        (HOME / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
        assert [row["accuracy"] for row in gather([HOME]).of("needle")] == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["nowhere"], "expected a directory with run.json"),
        (["bare"], "run: got 'bare', expected one with a checkpoint"),
        (["--position", "fox"], "switch: fox cannot take the weights of rope"),
        (["--position", "yran"], "did you mean yarn"),
    ],
)
def test_runs_are_checked_before_the_first_is_measured(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bare").mkdir()
    shutil.copy(HOME / "run.json", "bare")
    assert gape_exits("niah", "eval", HOME, *more, "--factors", "3") == 2
    assert message in capsys.readouterr().err
    assert len(rows(HOME)) == 2


def test_a_switch_that_cannot_be_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits(*ONE, "evaluation.switch.rope=fox", "--out", "new") == 2
    assert "fox cannot take the weights of rope" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("resume", "out", "message"),
    [
        ("bogus", "new", "resume: got str 'bogus', expected auto or never"),
        ("never", "runs/toy", "resume: got str 'never', expected auto or another --out, since"),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_any_run(
    resume: str, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gape_exits("niah", "train", "toy.toml", "--resume", resume, "--out", out) == 2
    assert message in capsys.readouterr().err
    assert not Path(out, "rope+gape").exists()


def test_one_directory_in_conflict_leaves_the_others_untouched() -> None:
    before = (HOME / "run.json").read_bytes()
    other = HOME.with_name("rope+gape")
    other.mkdir()
    settings = json.loads(before)
    other.joinpath("run.json").write_text(json.dumps(settings | {"batch_size": 7}))
    assert gape_exits("niah", "train", "toy.toml", "evaluation.samples=9") == 2
    assert (HOME / "run.json").read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="no locks there")
def test_two_processes_do_not_measure_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    with locked(HOME):
        assert gape_exits(*EVAL, "4") == 1
        assert gape_exits(*ONE, "evaluation.samples=9") == 1
    assert capsys.readouterr().err.count("is being measured by another process") == 2
    assert len(rows(HOME)) == 2
    assert gape_exits(*EVAL, "4") == 0
