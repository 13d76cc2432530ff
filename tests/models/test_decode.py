"""What a model says does not depend on how its tokens come: at once, in chunks, padded or packed."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import SCHEMES, T, interrupt, model, tokens

# Across the training length and four times it.
N = 4 * T + 7
EXACT = {"atol": 1e-9, "rtol": 1e-9}


@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_decode_equals_prefill(position: str) -> None:
    gpt, ids = model(position), tokens(2, N)
    cache = gpt.new_cache()
    # Tokens and chunks from the start, across T and behind it.
    parts = [gpt(part, cache=cache).logits for part in ids.split([1, 1, 7, 1, 3, 5, 1, 40, *[1] * 12], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), gpt(ids).logits, **EXACT)


@pytest.mark.parametrize("impl", ["auto", "rank2", "split", "reference"])
@pytest.mark.parametrize("reserve", [0, 2, 6, 8])
@torch.no_grad()
def test_decode_equals_prefill_however_the_bias_is_kept(reserve: int, impl: str) -> None:
    gpt, ids = model("rope+gape", reserve=reserve, impl=impl), tokens(2, N)
    cache = gpt.new_cache()
    parts = [gpt(part, cache=cache).logits for part in ids.split(9, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), gpt(ids).logits, **EXACT)


@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_left_padded_rows_equal_singles(position: str) -> None:
    """At once, and in two calls with a cache."""
    gpt, ids = model(position), tokens(3, N)
    pads = torch.tensor([0, 5, N - 1])
    positions = torch.arange(N) - pads[:, None]
    given = {"positions": positions.clamp(min=0), "documents": (positions >= 0).long()}
    at_once = gpt(ids, **given).logits
    cache = gpt.new_cache()
    first, second = ({name: x[:, part] for name, x in given.items()} for part in (slice(0, 50), slice(50, N)))
    cached = [gpt(ids[:, :50], **first, cache=cache).logits, gpt(ids[:, 50:], **second, cache=cache).logits]
    for row, pad in enumerate(pads.tolist()):
        alone = gpt(ids[row : row + 1, pad:]).logits[0]
        torch.testing.assert_close(at_once[row, pad:], alone, **EXACT)
        torch.testing.assert_close(torch.cat(cached, dim=1)[row, pad:], alone, **EXACT)


@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_packed_documents_equal_separate_ones(position: str) -> None:
    gpt, ids = model(position), tokens(1, N)
    documents = (torch.arange(N) >= 20).long()[None]
    positions = torch.cat([torch.arange(20), torch.arange(N - 20)])
    packed = gpt(ids, positions=positions, documents=documents).logits
    separate = [gpt(part).logits for part in (ids[:, :20], ids[:, 20:])]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), **EXACT)


@torch.no_grad()
def test_a_call_that_broke_off_can_be_made_again() -> None:
    gpt, ids = model(), tokens(2, 30)
    cache = gpt.new_cache()
    gpt(ids[:, :20], cache=cache)
    interrupted = gpt.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpt(ids[:, 20:], cache=cache)
    interrupted.remove()
    with pytest.raises(ValueError, match=r"^cache: .* truncate\(20\)"):
        gpt(ids[:, 20:], cache=cache)
    cache.truncate(20)
    again = gpt(ids[:, 20:], cache=cache).logits
    torch.testing.assert_close(again, gpt(ids).logits[:, 20:], **EXACT)


@torch.no_grad()
def test_truncated_to_nothing_a_cache_is_new() -> None:
    gpt, ids = model("fox"), tokens(2, 30)
    cache = gpt.new_cache()
    gpt(ids, positions=torch.arange(30), cache=cache)
    cache.truncate(0)
    torch.testing.assert_close(gpt(ids[:1], cache=cache).logits, gpt(ids[:1]).logits, **EXACT)
    for wrong in (31, 1.5, True):
        with pytest.raises(ValueError, match=r"^length: "):
            cache.truncate(wrong)


@torch.no_grad()
def test_a_cache_goes_from_one_mode_without_gradients_to_another() -> None:
    """What one has made, the other writes to."""
    gpt, ids = model(), tokens(2, 150)
    mixed, alike = gpt.new_cache(200), gpt.new_cache(200)
    for number, part in enumerate(ids.split([40, 1, *[13] * 8, 5], dim=1)):
        with torch.inference_mode(mode=number in (0, 1, 5)), torch.no_grad():
            found = gpt(part, cache=mixed).logits
        assert torch.equal(found, gpt(part, cache=alike).logits)


@torch.no_grad()
def test_a_cache_takes_no_other_dtype_or_depth() -> None:
    gpt, ids = model(), tokens(1, 4)
    cache = gpt.new_cache()
    gpt(ids, cache=cache)
    with pytest.raises(ValueError, match=r"^k: "):
        gpt.float()(ids, cache=cache)
    assert cache.length == 4
    with pytest.raises(ValueError, match=r"^cache: "):
        model(n_layer=3)(ids, cache=cache)
