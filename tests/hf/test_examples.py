"""The examples run, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from transformers import AutoModelForCausalLM

import gape.hf
from gape.report.results import gather
from tests.hf.test_formats import llama2c, tokenizer_bin
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


def test_real_weights_in_the_format_of_llama2c(tmp_path: Path) -> None:
    llama2c(tmp_path / "model.bin")
    tokenizer_bin(tmp_path / "tokenizer.bin")
    both = tmp_path / "llama2.data"
    both.write_bytes((tmp_path / "model.bin").read_bytes() + (tmp_path / "tokenizer.bin").read_bytes())
    said = ran("real_weights.py", both, "--prompt", "the cat", "--tokens", "5", "--out", tmp_path / "out")
    before, after = said.split("with gates (identity): ")
    assert before.partition(": ")[2].strip() == after.strip()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gape_llama"


def test_the_script_that_extends_a_model(model: Path) -> None:
    sizes = {"LENGTH": "16", "STEPS": "2", "BATCH": "2", "NATIVE": "128", "FAR": "256", "CONTEXTS": "16,256"}
    sizes |= {"LAST": "8", "WINDOWS": "4", "WARMUP": "0", "VALIDATE": "0", "OMP_NUM_THREADS": "1"}
    command = f"{sys.executable} -m gape"
    text, held = model / "text.txt", model / "held.txt"
    held.write_text("a dog sat on a mat and a cat on a log. " * 60)
    prepare = ("data", "prepare", text, "--heldout", held, "--tokenizer", model / "model", "--out", model / "corpus")
    subprocess.run([*command.split(), *map(str, prepare)], check=True, capture_output=True, timeout=120)
    (model / "floors").mkdir()
    (model / "floors" / "floors1.json").write_text('{"gate_floor": [[0, 0, 4, 4], [4, 4, 4, 4]]}')
    schemes = ("rope", "yarn", "rope+gape_floor4", "rope+gape_floors1")
    arguments = [model / "model", model / "corpus", model / "runs", *schemes]
    options = {**os.environ, **sizes, "GAPE": command, "FLOORS": str(model / "floors")}
    subprocess.run(
        ["bash", EXAMPLES / "extend.sh", *arguments], check=True, capture_output=True, timeout=240, env=options
    )
    actual = gather([model / "runs", model / "model"]).measured["perplexity"]
    named = {(row["run"], row["position"], row["variant"], row["base"]) for row in actual}
    assert named == {
        ("rope", "rope", "", "model"), ("yarn", "yarn", "", "model"),
        ("rope+gape_floor4", "rope+gape", "floor4", "model"),
        ("rope+gape_floors1", "rope+gape", "floors1", "model"), ("model", "rope", "not fine-tuned", "model"),
    }  # fmt: skip
    assert {row["context"] for row in actual} == {16, 256}
    begun = (model / "runs" / "begin" / f"rope+gape_{name}" / "config.json" for name in ("floor4", "floors1"))
    floors = [json.loads(path.read_text())["gape"]["gates"]["gate_floor"] for path in begun]
    assert floors == [4, [[0, 0, 4, 4], [4, 4, 4, 4]]]
    failed = ["bash", EXAMPLES / "extend.sh", *arguments[:3], "rope+gape_floors2"]
    ended = subprocess.run(failed, check=False, capture_output=True, text=True, timeout=60, env=options)
    assert ended.returncode
    assert "floors2.json cannot be read" in ended.stderr
    assert not (model / "runs" / "rope+gape_floors2").exists()


def test_extend(model: Path) -> None:
    short = ("--steps", "6", "--length", "32", "--batch", "2", "--contexts", "32,64", "--last", "16")
    ran("extend_model.py", model / "text.txt", "--model", model / "model", "--out", model / "out", *short)
    rows = json.loads((model / "out" / "perplexity.json").read_text())
    assert {name: list(values) for name, values in rows.items()} == {"none": ["32", "64"], "gates": ["32", "64"]}


def test_a_plain_trainer_reaches_the_loss_of_the_command(model: Path) -> None:
    gape.hf.inject(AutoModelForCausalLM.from_pretrained(model / "model"), context_length=32).save_pretrained(
        model / "gated"
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / "gated" / file).write_bytes((model / "model" / file).read_bytes())
    texts = [model / f"{n}.txt" for n in range(8)]
    for number, text in enumerate(texts):
        text.write_text("the cat sat on the mat and the dog sat on the log. "[number:] * 60)
    sizes = ["--length", "32", "--batch-size", "4", "--steps", "60", "--learning-rate", "3e-3"]
    options = [*sizes, "--heldout-fraction", "0.3", "--validate-every", "60", "--precision", "float32"]
    command = ["hf", "finetune", model / "gated", *texts, "--out", model / "run", *options]
    subprocess.run([sys.executable, "-m", "gape", *map(str, command)], check=True)
    expected = json.loads((model / "run" / "summary.json").read_text())["validation"]["loss"]
    said = ran("trainer.py", model / "gated", model / "run" / "corpus", "--out", model / "trained", "--cpu", *sizes)
    loss = float(said.rsplit("held-out loss", 1)[1])
    assert loss == pytest.approx(expected, rel=0.01)
    # It learned: untrained bytes cost more than five nats.
    assert loss < 3
    assert "held-out loss" in (model / "run" / "model" / "README.md").read_text()
