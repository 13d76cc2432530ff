"""`gape hf extend` at toy size: a model becomes a longer one, also if killed; what is refused before any work."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import gape.hf
from gape.experiments import extend, own_answers
from tests.cli.test_commands import gape_exits
from tests.cli.test_hf import with_words
from tests.distributed.launch import torchrun
from tests.hf.tiny import tiny

NATIVE, TO = 640, 1280
SMALL = [
    "--to", str(TO), "--steps", "2", "--long-steps", "1", "--batch-size", "1", "--update-tokens", str(2 * NATIVE),
    "--windows", "1",
    "--samples", "0", "--prompts", "2", "--keep", "0", "--checkpoint-every", "1", "--heldout-fraction", "0.3",
    "--lengths", f"{NATIVE},{TO}", "--new-tokens", "2", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a tokenizer of letters, and books of a few words."""
    monkeypatch.chdir(tmp_path)
    with_words("small")
    config = json.loads(Path("small/config.json").read_text())
    Path("small/config.json").write_text(json.dumps(config | {"max_position_embeddings": NATIVE}))
    rng, words = random.Random(0), ["abc", "def", "words", "and", "more", "rain", "sun"]
    sentences = [" ".join(rng.choices(words, k=6)).capitalize() + "." for _ in range(1200)]
    books = [{"id": f"b{n}", "text": " ".join(sentences[120 * n : 120 * n + 120])} for n in range(10)]
    Path("books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    # Little to read and to answer.
    monkeypatch.setattr(own_answers, "short_prompts", lambda: ["abc"] * 102)
    monkeypatch.setattr(own_answers, "KEPT_TOKENS", 4)
    monkeypatch.setattr(extend, "SCORED_TEXTS", 3)
    monkeypatch.setattr(extend, "LOGIT_TOKENS", 64)
    monkeypatch.setattr(extend, "SINK_TOKENS", 64)
    return tmp_path


def weights(place: str) -> dict[str, torch.Tensor]:
    return load_file(f"{place}/model/model.safetensors")


def test_from_a_model_to_a_longer_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("hf", "extend", "small", "books.jsonl", *SMALL, "--out", "out", "--keep", "0.2")
    assert gape_exits(*command) == 0
    assert capsys.readouterr().out.split() == ["out/model"]
    rows = [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]
    kinds = [(row["stage"], row["kind"], row.get("length")) for row in rows]
    assert kinds == [
        *(("before", kind, length) for kind in ("perplexity", "generate") for length in (NATIVE, TO)),
        *(("after", kind, length) for kind in ("perplexity", "generate") for length in (NATIVE, TO)),
        ("after", "answers", None),
    ]
    assert rows[-1]["kl"] > 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["after"]["perplexity"][str(TO)] == pytest.approx(rows[5]["perplexity"], abs=1e-5)
    assert '"kind": "curves"' in Path("out/report.html").read_text()
    config = json.loads(Path("out/model/config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("gape_llama", TO)
    plan = json.loads(Path("out/plan.json").read_text())
    assert sum(not any(row) for row in plan["gate_floor"]) <= 1
    before = {path: path.stat().st_mtime_ns for path in Path("out/model").iterdir()}
    # Nothing is left to do.
    assert gape_exits(*command) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out/model").iterdir()} == before
    assert len(Path("out/rows.jsonl").read_text().splitlines()) == len(rows)
    # Another command in the same place.
    assert gape_exits(*command, "--steps", "3") == 2
    assert "steps was 2" in capsys.readouterr().err


class Killed(BaseException):
    """What no handler takes for an error."""


@pytest.mark.slow
def test_killed_anywhere_it_resumes_to_the_same_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "to": TO, "steps": 3, "long_steps": 2, "batch_size": 1, "update_tokens": 2 * NATIVE, "windows": 1,
        "samples": 0, "prompts": 1,
        "keep": 0.1, "checkpoint_every": 1, "heldout_fraction": 0.3, "lengths": (NATIVE,), "new_tokens": 1,
        "before": False, "device": "cpu",
    }  # fmt: skip
    gape.hf.extend("small", "books.jsonl", out="whole", **options)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    places = (
        (extend.recall, "samples"), (extend.Job, "planned"), (extend, "sink_landmarks"), (extend.finetune, "save"),
        (extend.own_answers, "answer"),
        (extend.Path, "rename"), (extend.shutil, "rmtree"), (extend.report, "write"),
    )  # fmt: skip
    for owner, name in places:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, dies)
            with pytest.raises(Killed):
                gape.hf.extend("small", "books.jsonl", out="killed", **options)
    gape.hf.extend("small", "books.jsonl", out="killed", **options)
    first, second = weights("whole"), weights("killed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not Path("killed/start").exists()
    assert not any(Path(f"killed/{run}/checkpoints").exists() for run in ("tuning", "tuning-long"))


def test_a_figure_that_is_not_finite_is_no_row(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {name: torch.full_like(value, torch.nan) for name, value in load_file("small/model.safetensors").items()}
    save_file(broken, "small/model.safetensors", {"format": "pt"})
    assert gape_exits("hf", "extend", "small", "books.jsonl", *SMALL, "--out", "out", "--method", "plain") == 2
    assert "nll: " in capsys.readouterr().err
    assert not Path("out/rows.jsonl").exists()


@pytest.mark.slow
def test_two_processes_extend_to_the_model_of_one(home: Path) -> None:
    # Of two windows at once each process has one; a long window is one of which each has half the tokens.
    command = ("hf", "extend", "small", "books.jsonl", *SMALL, "--batch-size", "2")
    for count, out in ((1, "alone"), (2, "together")):
        done = torchrun(count, "-m", "gape", *command, "--out", out)
        assert (done.returncode, done.stdout.split()) == (0, [f"{out}/model"]), done.stderr
    alone, together = weights("alone"), weights("together")
    assert all(torch.allclose(alone[name], together[name], rtol=0, atol=1e-5) for name in alone)
    assert Path("together/rows.jsonl").read_text().count("\n") == Path("alone/rows.jsonl").read_text().count("\n")


def test_processes_that_cannot_share_a_window_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert gape_exits("hf", "extend", "small", "books.jsonl", *SMALL, "--out", "out") == 2
    assert "nproc-per-node: " in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.slow
def test_lora_changes_projections_alone_and_is_merged(home: Path) -> None:
    assert (
        gape_exits("hf", "extend", "small", "books.jsonl", *SMALL, "--out", "out", "--lora", "2", "--prompts", "0") == 0
    )
    before, after = load_file("small/model.safetensors"), weights("out")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any("lora" in name for name in after)


def test_a_dry_run_says_time_and_memory_and_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("hf", "extend", "small", "books.jsonl", *SMALL, "--out", "out", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "min on cpu" in shown
    assert "GiB" in shown
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all", "books.jsonl"), "model: "),
        (("small", "nothing.jsonl"), "data: "),
        (("small", "short.txt"), "data: "),
        (("gpt2", "books.jsonl"), "rotary"),
        (("gated", "books.jsonl"), "gates"),
        (("small", "books.jsonl", "--to", str(NATIVE)), "to: "),
        (("small", "books.jsonl", "--method", "other"), "method: "),
        (("small", "books.jsonl", "--free", "99"), "free: "),
        (("small", "books.jsonl", "--length", "64"), "length: "),
        (("small", "books.jsonl", "--lengths", "0,640"), "lengths: "),
        (("small", "books.jsonl", "--keep", "0.8"), "keep: "),
        (("small", "books.jsonl", "--plan", "mass=7"), "mass: "),
        (("small", "books.jsonl", "--plan", "other=1"), "plan: "),
        (("small", "books.jsonl", "--plan", "position=other"), "other"),
        (("small", "books.jsonl", "--method", "yarn", "--free", "2"), "free: "),
        (("small", "books.jsonl", "--method", "yarn", "--no-sinks"), "sinks: "),
        (("small", "books.jsonl", "--long-length", "9999"), "long_length"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_left(
    arguments: tuple[str, ...], words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short.txt").write_text("abc def. " * 20)
    if arguments[0] == "gpt2":
        tiny("gpt2", vocab_size=300).save_pretrained("gpt2")
    if arguments[0] == "gated":
        gape.hf.inject(tiny("llama", vocab_size=300), context_length=16).save_pretrained("gated")
    model, data, *more = arguments
    assert gape_exits("hf", "extend", model, data, *SMALL, "--out", "out", *more) == 2
    assert words in capsys.readouterr().err
    assert not Path("out").exists()
