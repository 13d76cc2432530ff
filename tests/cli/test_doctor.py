"""`gape doctor` says what would run and why not the others."""

from __future__ import annotations

import pytest
import torch

from gape.ops import available_implementations
from tests.cli.test_commands import gape_exits


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--dtype", "float32"], "rank2 (two coordinates are enough in float32)"),
        (["--dtype", "bfloat16", "--kv-heads", "1"], "split (exact bias in bfloat16)"),
        (["--dtype", "float16", "--training", "--length", "2060"], "split (exact bias and gate gradients"),
    ],
)
def test_says_what_runs(options: list[str], runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--heads", "2", "--dim", "8", "--length", "64"]
    assert gape_exits("doctor", *sizes, *options) == 0
    output = capsys.readouterr().out
    assert f"torch        {torch.__version__}" in output
    assert f"operator: {runs}" in output
    assert "q and k made ready step by step" in output
    chosen = runs.partition(" ")[0]
    for name in available_implementations():
        assert (f"not {name}: " in output) == (name != chosen), name
    assert ("one new token" in output) == ("--training" not in options)


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--kv-heads", "3"], ["--length", "0"], ["--batch", "0"]])
def test_mistakes_end_with_two(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("doctor", "--device", "cpu", *options) == 2
    assert options[0].strip("-").replace("-", "_") in capsys.readouterr().err


def test_tuning_wants_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("doctor", "--device", "cpu", "--tune") == 2
    assert "--tune: " in capsys.readouterr().err
