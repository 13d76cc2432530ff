"""A model's own prompts and answers: drawn from its distribution, in its own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gape.experiments.open_model import transformers_reader
from gape.experiments.own_answers import answer, capture_steps, written_prompts
from gape.tasks.ruler.readers import TransformersReader
from tests.hf.tiny import tiny
from tests.tasks.ruler import small

CHAT = "<u>{{ messages[0].content }}</u><bot>"


@pytest.fixture
def reader(tmp_path: Path) -> TransformersReader:
    return transformers_reader(str(small.random_gpt2(tmp_path)))


def test_a_model_without_a_chat_writes_no_prompts(reader: TransformersReader) -> None:
    assert written_prompts(reader, 4, 8, seed=0, batch=4) == []


def test_prompts_are_what_ends_in_the_users_place(reader: TransformersReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.tokenizer.chat_template = CHAT
    end = next(iter(reader.ends))
    a, b = reader.encode("a"), reader.encode("b")
    written = [[*a, end, end], [*a, end], [end, end], [*b, *b], [*b, end]]

    def generate(rows: Sequence[Sequence[int]], tokens: int, **options: Any) -> list[list[int]]:
        assert [reader.decode(list(row)) for row in rows] == ["<u>"] * len(rows)
        return [written.pop(0) for _ in rows]

    monkeypatch.setattr(reader, "generate", generate)
    assert written_prompts(reader, 5, 3, seed=0, batch=2) == ["a", "b"]


def test_an_answer_ends_with_its_end(reader: TransformersReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.tokenizer.chat_template = CHAT
    end = next(iter(reader.ends))
    monkeypatch.setattr(reader, "generate", lambda rows, tokens, **options: [[5, end, 7], [5, 6, 7]])
    answers = answer(reader, ["x", "y"], 3)
    prompts = [reader.encode(f"<u>{text}</u><bot>", start=False) for text in "xy"]
    assert [(ids.tolist(), count) for ids, count in answers] == [
        ([*prompts[0], 5, end], 2), ([*prompts[1], 5, 6, 7], 3),
    ]  # fmt: skip


def test_answers_are_drawn_from_the_models_distribution(reader: TransformersReader) -> None:
    ids = torch.tensor([reader.encode("a")])
    with torch.no_grad():
        reader.model.lm_head.weight.mul_(3 / reader.model(ids).logits[0, -1].std())
        probabilities = reader.model(ids).logits[0, -1].softmax(-1)
    drawn = torch.stack([ids[-1] for ids, _ in answer(reader, ["a"] * 4000, 1, seed=0, batch=4000)])
    frequencies = torch.bincount(drawn, minlength=len(probabilities)) / len(drawn)
    sharper = (probabilities.log() / 0.7).softmax(-1)
    distances = [float((frequencies - each).abs().sum()) for each in (probabilities, sharper)]
    assert distances[0] < 0.5 * distances[1]


def test_a_cache_in_pages_changes_no_answers(reader: TransformersReader) -> None:
    plain = answer(reader, ["a", "bb", "b a"], 6, batch=2)
    capture_steps(reader, 64)
    assert reader.forgetting is not None
    again = answer(reader, ["a", "bb", "b a"], 6, batch=2)
    assert [ids.tolist() for ids, _ in again] == [ids.tolist() for ids, _ in plain]


def test_a_model_that_no_cache_in_pages_takes_is_left_alone(reader: TransformersReader) -> None:
    reader.model = tiny("mistral", sliding_window=8)
    kind = type(reader.model.model.layers[0].self_attn)
    capture_steps(reader, 64)
    assert reader.forgetting is None
    assert type(reader.model.model.layers[0].self_attn) is kind
