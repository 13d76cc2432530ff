"""Models that skip or forget while they read samples: the same answers within what eps allows, and fewer keys."""

from __future__ import annotations

from typing import Any

import pytest

from gape.data import load_tokenizer
from gape.tasks.ruler.evaluation import Settings, question
from gape.tasks.ruler.readers import GPTReader, TransformersReader
from gape.tasks.ways import Way
from tests.tasks import text
from tests.tasks.ruler.test_readers import rows

#: Keys fade within a few tokens.
GATES = {"gate_floor": 96.0, "init_landmark_bias": -9.0}
PROMPTS, ANSWERS, BUDGET = rows(90, 131, 73), rows(5, 2, 9, seed=1), 6


def ours(options: dict[str, Any] = GATES) -> GPTReader:
    tokenizer = load_tokenizer("bytes")
    tokenizer.end_of_text = None
    return GPTReader(text.gpt(options=options), tokenizer)


def of_transformers() -> TransformersReader:
    pytest.importorskip("transformers")
    import gape.hf
    from tests.hf.tiny import tiny

    sizes = {"vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = gape.hf.inject(tiny("llama", **sizes), context_length=16, start="paper", gates=GATES).eval()
    model.generation_config.eos_token_id = None
    return TransformersReader(model, lambda text, add_special_tokens: {"input_ids": [5]}, "tiny")


READERS = pytest.mark.parametrize("build", [ours, of_transformers])


def forgetful(reader: Any, caches: list[Any]) -> Any:
    """A reader that forgets; its caches are put into a list."""
    make = Way(forget_eps=1e-4).apply(reader.model)
    assert make is not None

    def kept() -> Any:
        caches.append(make())
        return caches[-1]

    reader.forgetting = kept
    return reader


@READERS
def test_losses_of_a_model_that_forgets(build: Any) -> None:
    dense, caches = build().losses(PROMPTS, ANSWERS), list[Any]()
    actual = forgetful(build(), caches).losses(PROMPTS, ANSWERS)
    for one, other in zip(dense, actual, strict=True):
        assert other == pytest.approx(one, abs=2e-3)
    assert max(max(layer) for layer in caches[0].num_keys) < 133


@READERS
def test_answers_of_a_model_that_forgets(build: Any) -> None:
    dense, caches = build().complete(PROMPTS, BUDGET), list[Any]()
    assert forgetful(build(), caches).complete(PROMPTS, BUDGET) == dense
    assert max(max(layer) for layer in caches[0].num_keys) < 131


@READERS
def test_a_reader_that_skips_does_so_in_every_layer(build: Any) -> None:
    reader = build()
    Way(skip_eps=1e-3).apply(reader.model)
    settings = [layer.skips for layer in reader.model.modules() if hasattr(layer, "skips")]
    assert settings == [1e-3] * 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"skip_eps": 1.0}, "skip_eps"), ({"forget_eps": -1.0}, "forget_eps"), ({"bounds": "all"}, "bounds")],
)  # fmt: skip
def test_ways_that_cannot_be(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Way(**settings)


def test_heads_without_a_floor_keep_everything() -> None:
    caches: list[Any] = []
    forgetful(ours(GATES | {"gate_floor": [[0.0], [96.0]]}), caches).losses(PROMPTS, ANSWERS)
    free, floored = caches[0].num_keys
    assert set(free) == {caches[0].length}
    assert max(floored) < 133


def test_a_model_without_floors_does_not_forget() -> None:
    with pytest.raises(ValueError, match="gate_floor"):
        Way(forget_eps=1e-3).apply(ours({}).model)


def test_a_way_is_part_of_the_question_and_reading_densely_is_what_it_was() -> None:
    dense = question({}, [], Settings())["settings"]
    assert "way" not in dense
    assert not any("eps" in name for name in dense)
    assert question({}, [], Settings(way=Way(skip_eps=1e-3)))["settings"] == dense | {
        "skip_eps": 1e-3,
        "impl": "triton",
    }
