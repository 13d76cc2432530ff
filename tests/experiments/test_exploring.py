"""`gape explore`: which text is read, and what is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gape.cli import app
from gape.data import load_tokenizer
from gape.experiments.exploring import SYMBOLS, _needle_text, explored, haystack, shipped
from gape.explore.notebook import token_text
from gape.tasks.niah import NIAHConfig


def test_a_haystack_marks_its_needles_and_the_digit_that_answers() -> None:
    passage = haystack(NIAHConfig(length=128, n_needles=8, target="last"), 256, seed=3)
    assert passage.ids.shape == (1, 256)
    (answer,) = (mark for mark in passage.marks if mark.label == "answer")
    assert len(passage.marks) == 16
    texts = [SYMBOLS[token] for token in passage.ids[0, answer.start : answer.start + answer.length]]
    assert texts[:2] == ["KEY", "="]
    assert texts[2].isdecimal()
    assert passage.sources is not None
    assert int(passage.sources[-1]) == answer.start + 2


def test_a_text_with_a_needle_has_the_length_asked_for_and_ends_in_the_question() -> None:
    tokenizer = load_tokenizer("bytes")
    passage = _needle_text(tokenizer, token_text(tokenizer), 1000)
    text = tokenizer.decode(passage.ids[0].tolist())
    assert passage.ids.shape == (1, 1000)
    assert passage.sources is not None
    assert text[int(passage.sources[-1]) :].startswith("7419352")
    assert text.endswith("number of the lighthouse is")


def test_the_model_of_the_package_finds_its_needle_with_gates() -> None:
    view = explored(needle=192, seed=1, device="cpu").view
    vocabulary, arrays = view.header["vocabulary"], view.arrays
    (answer,) = (mark for mark in view.header["marks"] if mark["label"] == "answer")
    digit = vocabulary[arrays["token"][answer["start"] + 2]]
    assert vocabulary[arrays["next"][-1, 0]] == digit
    assert arrays["retrieval_gated"].max() > 0.9


def test_the_model_of_the_package_is_of_the_needle_task() -> None:
    assert shipped(torch.device("cpu")).model.config.vocab_size == len(SYMBOLS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a.txt", "--needle", "100"], "expected one of them"),
        (["--prompt", "some words"], "reads --needle alone"),
        (["nowhere", "--needle", "100"], "nowhere"),
        (["--export", "no/such/directory/page.html"], "export"),
        (["--heads", "0.1"], "heads"),
        (["--needle", "3"], "needle"),
        (["--export", "page.html", "--heads", "7.7"], "heads"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["explore", "--no-browser", *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []
