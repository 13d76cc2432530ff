"""Masks of transformers: read once, some rows at a time, and refused where they hide more than pads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import gape.hf
from gape.hf import masks
from tests.hf.tiny import opened, tiny, tokens

ROWS, KEYS = 7, 11


def causal(pads: int = 0) -> Tensor:
    """(1, 1, ROWS, KEYS): the last keys are the queries, the first so many keys are pads."""
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
    mask[:, :pads] = False
    return mask[None, None]


def additive(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("rows", [2, 1024])
@pytest.mark.parametrize("form", [lambda mask: mask, additive])
def test_pads_are_found_and_everything_else_is_refused(
    rows: int, form: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "ROWS", rows)
    assert masks.real_tokens(None, ROWS, 2) is None
    assert masks.real_tokens(form(causal()), ROWS, 2) is None
    assert masks.real_tokens(form(causal(2)), ROWS, 2).tolist() == [[True] * 7] * 2
    assert masks.real_tokens(form(causal(6)), ROWS, 2).tolist() == [[False] * 2 + [True] * 5] * 2
    for row, key in ((0, 1), (3, 9), (ROWS - 1, 4)):
        other = causal()
        other[..., row, key] ^= True
        with pytest.raises(ValueError, match="hides more"):
            masks.real_tokens(form(other), ROWS, 1)
    for wrong in (causal()[0], causal().expand(1, 2, -1, -1), causal()[:, :, 1:]):
        with pytest.raises(ValueError, match="attention_mask"):
            masks.real_tokens(form(wrong), ROWS, 1)


@pytest.mark.parametrize("rows", [2, 1024])
def test_a_chunk_is_the_next_one_where_only_later_tokens_are_hidden(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "ROWS", rows)
    keys = torch.arange(KEYS)
    assert masks.is_next_chunk(keys[-ROWS:], keys, causal())
    assert not masks.is_next_chunk(keys[-ROWS:], keys, causal(1))
    assert not masks.is_next_chunk(keys[-ROWS:] + 1, keys, causal())
    assert not masks.is_next_chunk(keys[-ROWS:], torch.where(keys > 2, keys + 1, keys), causal())


def test_a_tensor_is_read_once_until_it_is_written_to() -> None:
    """So layers that share a mask or positions read them once."""
    positions, values = torch.arange(5), []
    for _ in range(3):
        masks.memoized(positions, "_gape_test", lambda: values.append(int(positions[2])))
    positions[2] = 9
    masks.memoized(positions, "_gape_test", lambda: values.append(int(positions[2])))
    assert values == [2, 9]


@pytest.mark.parametrize("gated", [False, True])
def test_positions_that_skip_are_those_of_one_document(gated: bool) -> None:
    """Every token sees all earlier ones, at distances by position; a definition with a dense mask gives the same."""
    model = opened(tiny("llama")) if gated else tiny("llama")
    ids, positions = tokens(2, 20), torch.arange(20).repeat(2, 1)
    positions[0, 7:] += 30
    with torch.no_grad():
        ours = gape.hf.LanguageModel(model).hidden(ids, positions)
        model.set_attn_implementation("gape_reference" if gated else "eager")
        real = torch.ones(2, 20, dtype=torch.int64)
        theirs = model.model(input_ids=ids, position_ids=positions, attention_mask=real).last_hidden_state
        plain = gape.hf.LanguageModel(model).hidden(ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours[1], plain[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours[0, 8:], plain[0, 8:], atol=1e-2)
