"""What masks of transformers say: looked at once, in slabs, and refused where they say more than a proof allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from gape.hf import ForgettingCache, masks
from tests.hf.test_forgetting import injected
from tests.hf.tiny import tokens

ROWS, KEYS = 7, 11


def causal(pads: int = 0) -> Tensor:
    """(1, 1, ROWS, KEYS): the last keys are the queries, the first so many keys are pads."""
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
    mask[:, :pads] = False
    return mask[None, None]


def additive(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("slab", [2, 1024])
@pytest.mark.parametrize("form", [lambda mask: mask, additive])
def test_pads_are_found_and_everything_else_is_refused(
    slab: int, form: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "ROWS", slab)
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


@pytest.mark.parametrize("slab", [2, 1024])
def test_a_chunk_goes_on_where_nothing_but_later_tokens_is_hidden(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "ROWS", slab)
    keys = torch.arange(KEYS)
    assert masks.is_next_chunk(keys[-ROWS:], keys, causal())
    assert not masks.is_next_chunk(keys[-ROWS:], keys, causal(1))
    assert not masks.is_next_chunk(keys[-ROWS:] + 1, keys, causal())
    assert not masks.is_next_chunk(keys[-ROWS:], torch.where(keys > 2, keys + 1, keys), causal())


@torch.no_grad()
def test_a_mask_is_compared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, compared = injected("llama"), tokens(1, 30), []
    own = masks._hides_more
    monkeypatch.setattr(masks, "_hides_more", lambda *given: compared.append(given[0].shape) or own(*given))
    assert model.config.num_hidden_layers == 2
    cache = ForgettingCache(model, eps=1e-3)
    for part in ids.split(10, dim=1):
        model(part, past_key_values=cache)
    assert [tuple(shape[-2:]) for shape in compared] == [(10, 20), (10, 30)]


def test_what_is_written_to_is_looked_at_again() -> None:
    positions = torch.arange(5)
    assert masks.consecutive(positions)
    positions[2] = 9
    assert not masks.consecutive(positions)
