"""Landmarks for sinks: a first token that stands out stays in view behind any floor, and no other key does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import gape.hf
from gape.hf.sinks import set_landmarks, sink_landmarks
from tests.hf.tiny import tiny, tokens

FIRST = 1


def model_with_sink() -> Any:
    """A model in which the keys of one token are unlike all others."""
    model = tiny("llama").eval()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 0.0
        embedding[FIRST] = 0.0
        embedding[FIRST, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[:, 0] *= 20.0
    return model


def texts(first: int | None, count: int = 8, length: int = 96) -> Tensor:
    ids = tokens(count, length).clamp(min=FIRST + 1)
    if first is not None:
        ids[:, 0] = first
    return ids


@torch.no_grad()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits[:, -1]


@pytest.mark.parametrize("sinks", [False, True])
def test_the_first_token_stays_in_view_by_its_landmark_alone(sinks: bool) -> None:
    model = model_with_sink()
    landmarks = sink_landmarks(model, texts(FIRST))
    assert landmarks.heads >= 1
    gates = {"gate_floor": 200.0, "init_landmark_bias": -20.0}
    gape.hf.inject(model, context_length=16, start="paper", gates=gates)
    if sinks:
        set_landmarks(model, landmarks)
    with_sink, other_text = texts(FIRST, 1), texts(FIRST, 1)
    without_sink = with_sink.clone()
    without_sink[:, 0] = FIRST + 1
    other_text[:, 1:8] = other_text[:, 1:8].roll(1, 1)
    expected = last_logits(model, with_sink)
    # The floor hides everything that is far but the sink.
    torch.testing.assert_close(last_logits(model, other_text), expected, rtol=0, atol=1e-3)
    assert bool((last_logits(model, without_sink) - expected).abs().max() > 1e-2) == sinks


def test_a_first_token_like_all_others_opens_no_gate() -> None:
    landmarks = sink_landmarks(tiny("llama").eval(), texts(None, 16))
    assert landmarks.heads == 0
    assert (landmarks.bias < -8).all()


@pytest.mark.parametrize("shape", [(1, 96), (8, 16), (96,)])
def test_too_little_text_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^ids: "):
        sink_landmarks(tiny("llama").eval(), torch.ones(shape, dtype=torch.int64))


def test_gates_without_learned_landmarks_are_refused() -> None:
    model = model_with_sink()
    landmarks = sink_landmarks(model, texts(FIRST))
    with pytest.raises(ValueError, match=r"^model: "):
        set_landmarks(model, landmarks)
    gape.hf.inject(model, context_length=16, gates={"learn_landmark": False})
    with pytest.raises(ValueError, match=r"^model: "):
        set_landmarks(model, landmarks)
