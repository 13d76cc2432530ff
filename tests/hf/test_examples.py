"""The examples run, at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.hf.tiny import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama whose tokenizer knows bytes, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    tiny("llama", vocab_size=256).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 60)
    return tmp_path


def ran(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def test_a_module_of_your_own() -> None:
    last = ran("own_module.py").splitlines()[-1]
    assert "128 tokens" in last
    assert float(last.rpartition(" ")[2]) > 0.5


def test_retrofit(model: Path) -> None:
    short = ("--steps", "12", "--length", "32", "--batch", "2")
    said = ran("retrofit.py", model / "model", model / "text.txt", "--out", model / "out", *short)
    assert "step 12: loss" in said
    assert (model / "out" / "README.md").is_file()


def test_extend(model: Path) -> None:
    short = ("--steps", "6", "--length", "32", "--batch", "2", "--contexts", "32,64", "--last", "16")
    ran("extend_model.py", model / "text.txt", "--model", model / "model", "--out", model / "out", *short)
    rows = json.loads((model / "out" / "perplexity.json").read_text())
    assert {name: list(values) for name, values in rows.items()} == {"none": ["32", "64"], "gates": ["32", "64"]}
