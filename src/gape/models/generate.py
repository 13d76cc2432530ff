"""Generation: prompts of one length or padded on the left, greedy or sampled, with a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gape.cache.gpt import FullCache
from gape.cache.paged import PagedCache
from gape.models.cuda_graphs import captured_logits, model_cannot
from gape.utils.validation import finite, invalid_argument, whole

if TYPE_CHECKING:
    from gape.cache.kv import ModelCache
    from gape.models.gpt import GPT, Output


@torch.no_grad()
def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    *,
    attention_mask: Tensor | None = None,
    pad_id: int | None = None,
    eos_id: int | None = None,
    cache: ModelCache | PagedCache | None = None,
) -> Tensor:
    """Continue prompts. The model is in eval mode meanwhile, and is put back into its mode at the end.

    Several threads may generate at once; do not train the model meanwhile, it would train in eval mode.

    Args:
        model: the model.
        ids: int64 (B, N) with N ≥ 1; shorter prompts are padded on the left.
        max_new_tokens: how many tokens to add at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the fewest likeliest tokens whose probabilities add up to p.
        seed: of this call's own generator, so that the same call gives the same tokens; None uses torch's global one.
        attention_mask: bool or integer (B, N), 0 for pads. Each row counts its positions from its first token.
        pad_id: without a mask, the run of this id that a row begins with is padding. Any number.
        eos_id: a row that has generated it is complete; its rest is filled with pad_id, or with eos_id without one.
        cache: an empty cache of the model to fill; None makes one that keeps everything.

    Returns:
        int64 (B, N + new), the prompts and what follows.

    Raises:
        ValueError: for an argument out of range, a row of pads alone or pads behind a token; names the argument.
    """
    vocab_size = model.config.vocab_size
    _check(ids, max_new_tokens, vocab_size, temperature, top_k, top_p, seed, pad_id, eos_id)
    if cache is not None and cache.length:
        raise ValueError(f"cache: got one that holds {cache.length} tokens, expected an empty one")
    real = _real(ids, attention_mask, pad_id)
    if not bool(((ids >= 0) & (ids < vocab_size) | ~real).all()):
        raise invalid_argument("ids", ids, f"values from 0 to {vocab_size - 1}")
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    # Pads need a document of their own, and no embedding.
    padded = not bool(real.all())
    inputs = ids.masked_fill(~real, 0)
    positions = (real.cumsum(1) - 1).clamp(min=0) if padded else None
    documents = real.to(torch.uint8) if padded else None
    done = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
    with evaluating(model):
        if cache is None:
            # In pages, where there are kernels for them and steps can be captured.
            pages = ids.is_cuda and capture_obstacle(model) is None
            cache = FullCache(model) if pages else model.new_cache(ids.size(1) + max_new_tokens)
        for _ in range(max_new_tokens):
            logits = _logits(model, cache, inputs, positions, documents)
            token = _sample(logits[:, -1], temperature, top_k, top_p, generator)
            if eos_id is not None:
                token = token.masked_fill(done, eos_id if pad_id is None else pad_id)
                done |= token == eos_id
            ids = torch.cat([ids, token[:, None]], dim=1)
            if eos_id is not None and bool(done.all()):
                break
            # A complete row gets any token until the others are complete: its output is not used.
            inputs = token.masked_fill(done, 0)[:, None]
            positions = None if positions is None else positions[:, -1:] + 1
            documents = None if documents is None else documents[:, -1:]
    return ids


def _logits(
    model: GPT, cache: ModelCache | PagedCache, ids: Tensor, positions: Tensor | None, documents: Tensor | None
) -> Tensor:
    """The logits (B, 1, V) behind ids (B, N), which are added to the cache: by a captured step where that can be."""

    def step(ids: Tensor, positions: Tensor | None, documents: Tensor | None = None) -> Tensor:
        output: Output = model(ids, positions=positions, documents=documents, cache=cache, logits_to_keep=1)
        return output.logits

    if ids.size(1) > 1 or not isinstance(cache, PagedCache):
        return step(ids, positions, documents)
    if cache.length:
        places = torch.full_like(ids, cache.length) if positions is None else positions
        logits = captured_logits(model, cache, step, ids, places, lambda: capture_obstacle(model))
        if logits is not None:
            return logits
    # A single token is no pad.
    return step(ids, positions)


def capture_obstacle(model: GPT) -> str | None:
    """Why single tokens of a GPT cannot be captured; None where they can."""
    for block in model.blocks():
        if block.attention.stepwise or block.attention.keep_landmark:
            return "a layer is being listened to"
        if block.attention.has_own_bias:
            return f"{block.attention.position} adds a bias of its own"

    def known(module: nn.Module) -> bool:
        # Those of others, such as adapters, may synchronise with the host.
        return type(module).__module__.startswith(("gape.", "torch.nn."))

    return model_cannot(list(model.modules()), model.embedding.weight, known)


#: Modules that :func:`evaluating` put into eval mode: the number of contexts, and the mode before the first.
_EVALUATED: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()
_LOCK = Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in eval mode; contexts of threads may overlap, and the last restores the modes."""
    with _LOCK:
        modules = list(model.modules())
        for module in modules:
            count, training = _EVALUATED.get(module, (0, module.training))
            _EVALUATED[module] = count + 1, training
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                count, training = _EVALUATED.pop(module)
                if count > 1:
                    _EVALUATED[module] = count - 1, training
                else:
                    module.training = training


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row of logits (B, V), int64 (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    # Shifted first: a temperature near 0 may send all but the largest to −∞, but not the largest to ∞. A temperature
    # below the smallest normal float32 would count as 0, and 0 / 0 is NaN.
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        # By rank, not by value: of equal logits no more than k remain.
        values, indices = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, indices, values)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(-1, descending=True)
        # A token stays while those before it do not add up to p: the likeliest always does.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _real(ids: Tensor, attention_mask: Tensor | None, pad_id: int | None) -> Tensor:
    """Which of ids (B, N) are tokens and not pads, bool (B, N)."""
    if attention_mask is None:
        if pad_id is None:
            return torch.ones_like(ids, dtype=torch.bool)
        # Only the run before the first token: a prompt may contain the id that pads.
        real = (ids != pad_id).long().cummax(1).values.bool()
    else:
        mask, expected = attention_mask, f"a bool or integer tensor {tuple(ids.shape)} on {ids.device}"
        if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.device != ids.device:
            raise invalid_argument("attention_mask", mask, expected)
        real = mask != 0
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError("attention_mask: got pads behind a token, expected padding on the left")
    if not bool(real[:, -1].all()):
        name = "ids" if attention_mask is None else "attention_mask"
        raise ValueError(f"{name}: got a row of pads alone, expected at least one token in each")
    return real


def _check(
    ids: Any, max_new_tokens: Any, vocab_size: int, temperature: Any, top_k: Any, top_p: Any, seed: Any, pad_id: Any,
    eos_id: Any,
) -> None:  # fmt: skip
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2 or ids.numel() == 0:
        raise invalid_argument("ids", ids, "an int64 tensor (batch, tokens) of at least one token")
    whole("max_new_tokens", max_new_tokens, at_least=0)
    expected = "a finite number of at least 0"
    if finite("temperature", temperature, expected) < 0:
        raise invalid_argument("temperature", temperature, expected)
    if top_k is not None and whole("top_k", top_k) > vocab_size:
        raise invalid_argument("top_k", top_k, f"a whole number from 1 to {vocab_size}, the vocabulary")
    expected = "a number above 0, at most 1"
    if top_p is not None and not 0 < finite("top_p", top_p, expected) <= 1:
        raise invalid_argument("top_p", top_p, expected)
    if seed is not None and whole("seed", seed, at_least=0) >= 2**63:
        raise invalid_argument("seed", seed, "a whole number below 2⁶³")
    for name, token in (("pad_id", pad_id), ("eos_id", eos_id)):
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            raise invalid_argument(name, token, "a whole number")
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise invalid_argument("eos_id", eos_id, f"a whole number from 0 to {vocab_size - 1}")
