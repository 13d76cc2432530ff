"""Models of transformers with caches in pages on a GPU: single tokens are captured, and say what the model says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache

import gape.hf
from gape.hf import ForgettingCache, FullCache
from tests.hf.tiny import made, tiny, tokens
from tests.models.test_cuda_graphs import check_alike, uncaptured

pytestmark = pytest.mark.gpu
#: Key heads that forget within a page, and later.
FLOORS = {"gate_floor": [96.0, 96.0, 8.0, 8.0], "init_landmark_bias": -9.0}
CACHES: dict[str, Callable[[Any], Any]] = {
    "full": FullCache,
    "forgetting": lambda model: ForgettingCache(model, eps=1e-2),
    "queries": lambda model: ForgettingCache(model, eps=1e-2, bounds="queries"),
}
PROMPT, NEW = 80, 150


def loaded(name: str) -> Any:
    """A model with heads of 64 in bfloat16, whose attention rounding does not turn over."""
    sizes = {"max_position_embeddings": 512}
    if name == "gape":
        model = made("gape", options=FLOORS, n_embd=256)
    elif name == "yarn":
        rotation = {"position": "yarn+gape", "factor": 4.0}
        model = tiny("llama", head_dim=64, **sizes)
        model = gape.hf.inject(model, context_length=16, start="paper", gates=FLOORS, **rotation)
    else:
        model = made(name, floor=FLOORS, head_dim=64, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.5)
    return model.cuda().bfloat16()


def prompts(batch: int, padded: bool) -> tuple[Tensor, Tensor]:
    """Ids (B, PROMPT + NEW), and the mask of the prompts."""
    ids = tokens(batch, PROMPT + NEW).cuda()
    pads = torch.tensor([0, 20, 64][-batch:]) if padded else torch.zeros(batch)
    mask = (torch.arange(PROMPT) >= pads[:, None]).long().cuda()
    ids[:, :PROMPT] *= mask
    return ids, mask


@torch.no_grad()
def read(model: Any, cache: Any, ids: Tensor, mask: Tensor, *, last: int = NEW) -> Tensor:
    """Logits of tokens behind a prompt, which come one by one."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    model(ids[:, : mask.size(1)], **given)
    logits = []
    for at in range(mask.size(1), mask.size(1) + last):
        given["attention_mask"] = torch.nn.functional.pad(given["attention_mask"], (0, 1), value=1)
        given["position_ids"] = given["position_ids"][:, -1:] + 1
        logits.append(model(ids[:, at : at + 1], **given).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "yarn", "gape"])
@torch.no_grad()
def test_prompts_of_a_batch_are_read_as_without_a_cache(name: str) -> None:
    """Rows that begin at different positions, too, in one pass of their own angles."""
    model, ids = loaded(name), tokens(3, PROMPT).cuda()
    positions = torch.arange(PROMPT).cuda() + torch.tensor([[0], [7], [150]]).cuda()
    expected = model(ids, position_ids=positions).logits.double()
    actual = model(ids, position_ids=positions, past_key_values=FullCache(model)).logits.double()
    assert float((actual - expected).abs().max()) <= 2**-4 * float(expected.abs().max())


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("batch", "padded"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3", "phi3", "yarn", "gape"])
def test_captured_tokens_are_those_of_the_model(name: str, batch: int, padded: bool, kind: str) -> None:
    model = loaded(name)
    ids, mask = prompts(batch, padded)
    plain, cache = CACHES[kind](model), CACHES[kind](model)
    with uncaptured(model):
        expected = read(model, plain, ids, mask)
    assert "hooks" in plain.explain()
    check_alike(read(model, cache, ids, mask), expected)
    assert "single tokens: captured" in cache.explain()
    assert cache.num_keys == plain.num_keys
    assert cache.realised_eps == pytest.approx(plain.realised_eps, rel=0.2, abs=1e-6)
    if kind == "full":
        check_alike(expected, read(model, DynamicCache(), ids, mask))
    else:
        assert min(min(keys) for keys in cache.num_keys) < PROMPT


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "gape"])
def test_generate_captures_by_itself(name: str, kind: str) -> None:
    """And says the same in a second text, and for another batch."""
    model = loaded(name)
    for batch in (3, 3, 2):
        ids, mask = prompts(batch, True)
        cache = CACHES[kind](model)
        settings = {"max_new_tokens": 60, "do_sample": False, "attention_mask": mask}
        text = model.generate(ids[:, :PROMPT], past_key_values=cache, **settings)
        assert "single tokens: captured" in cache.explain()
        with uncaptured(model):
            logits = read(model, CACHES[kind](model), text, mask, last=59).float()
        chosen = logits.gather(-1, text[:, PROMPT + 1 :, None]).squeeze(-1)
        assert float((logits.amax(-1) - chosen).max()) < 2**-5 * float(logits.abs().max())
        del cache
        gc.collect()


def test_adapters_that_are_switched_off_are_off_in_captured_steps() -> None:
    peft = pytest.importorskip("peft")
    base = loaded("llama")
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=4)).eval().cuda().bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    ids, mask = prompts(2, True)
    logits = []
    for switch in (None, model.disable_adapter, None):
        cache = FullCache(model)
        with switch() if switch is not None else torch.no_grad():
            logits.append(read(model, cache, ids, mask, last=40))
            with uncaptured(model):
                check_alike(logits[-1], read(model, FullCache(model), ids, mask, last=40))
        assert "single tokens: captured" in cache.explain()
        del cache
        gc.collect()
    check_alike(logits[2], logits[0])
    assert float((logits[1] - logits[0]).abs().max()) > 0.1


def test_calls_that_are_not_captured_say_the_same() -> None:
    """Of tokens with hidden states, and of several tokens in between."""
    model = loaded("llama")
    ids, mask = prompts(2, False)
    caches = [FullCache(model), FullCache(model)]
    with uncaptured(model):
        read(model, caches[0], ids, mask, last=20)
    read(model, caches[1], ids, mask, last=20)
    more, outputs = ids[:, PROMPT + 20 :], []
    with torch.no_grad():
        for cache, hooked in zip(caches, (True, False), strict=True):
            hook = model.register_forward_hook(lambda *_: None) if hooked else None
            parts = [model(more[:, :1], past_key_values=cache, output_hidden_states=True).logits]
            parts.append(model(more[:, 1:9], past_key_values=cache).logits)
            parts += [model(more[:, at : at + 1], past_key_values=cache).logits for at in range(9, 70)]
            outputs.append(torch.cat(parts, dim=1))
            if hook is not None:
                hook.remove()
    check_alike(outputs[1], outputs[0])
    assert "single tokens: captured" in caches[1].explain()
