"""Retrieval heads: find the heads that attend to the text that an answer repeats, and leave them without a floor.

Shapes: N tokens, L layers, Hq / Hk query / key heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gape.hf.families import family_of
from gape.hf.injection import inject, remove
from gape.hf.save_load import InjectedModel
from gape.utils.validation import invalid_argument, positive_number, whole

#: Tokens of a prompt that go through the model at once; `eager` makes a weight for each of them and each key.
_PIECE = 1024

#: Number of a layer and of a key head in it.
Head = tuple[int, int]


def sizes(model: Any) -> tuple[int, int, int]:
    """L, Hq and Hk of a causal language model without gates.

    Raises:
        ValueError: it has gates, or is of an unknown family.
    """
    if isinstance(model, InjectedModel):
        raise ValueError("model: got one with gates, expected one without; gape.hf.remove takes them out")
    family = family_of(model)
    modules = family.modules(model)
    n_heads, n_kv_heads, _ = family.layout.sizes(modules[0])
    return len(modules), n_heads, n_kv_heads


@torch.no_grad()
def scores(model: Any, ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> Tensor:
    """How much attention each key head gives to the text that an answer repeats.

    Of a query head: the attention that the queries which predict the answer's tokens give to the tokens of `source`,
    summed over those tokens, mean over those queries. Of a key head: the largest of its query heads.

    Args:
        model: a causal language model without gates, in eval mode, loaded with attn_implementation="eager".
        ids: (1, N), a prompt and its answer, on the model's device.
        source: numbers of the tokens of the prompt that the answer repeats.
        answer: numbers of the answer's tokens, the last of `ids`.

    Returns:
        (L, Hk), float32, on the CPU; each from 0 to 1.

    Raises:
        ValueError: gates, another attention, or tokens that are not where they should be.
    """
    layers, n_heads, n_kv_heads = sizes(model)
    if model.config._attn_implementation != "eager":
        raise invalid_argument(
            "model", model.config._attn_implementation, "attn_implementation='eager', which tells weights"
        )
    first, places = _checked(ids, source, answer)
    cache = None
    for start in range(0, first - 1, _PIECE):
        part = ids[:, start : min(start + _PIECE, first - 1)]
        cache = model.base_model(part, past_key_values=cache, use_cache=True).past_key_values
    # The query of a token predicts the next one; nothing is predicted from the last.
    queries = ids[:, first - 1 : -1]
    with _own_forwards(family_of(model).modules(model)):
        output = model.base_model(queries, past_key_values=cache, use_cache=True, output_attentions=True)
    total = first - 1 + queries.size(1)
    masses = torch.stack([_mass(weights[0], places, total) for weights in output.attentions])
    return masses.view(layers, n_kv_heads, n_heads // n_kv_heads).amax(-1)


@contextmanager
def _own_forwards(modules: Sequence[Any]) -> Iterator[None]:
    """Remove what transformers 4 leaves in modules after output_attentions: a `forward` attribute."""
    bare = [module for module in modules if "forward" not in vars(module)]
    try:
        yield
    finally:
        for module in bare:
            vars(module).pop("forward", None)


def _checked(ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> tuple[int, Tensor]:
    """The number of the answer's first token, and the source as numbers, rising, each once."""
    first = _first(ids, answer)
    if not len(source) or min(source) < 0 or max(source) >= first:
        raise invalid_argument("source", list(source), f"numbers of tokens before the answer, from 0 to {first - 1}")
    return first, torch.tensor(sorted(set(source)))


def _first(ids: Tensor, answer: Sequence[int]) -> int:
    """The number of the answer's first token."""
    if ids.dim() != 2 or ids.size(0) != 1:
        raise invalid_argument("ids", ids, "(1, N)")
    count = ids.size(1)
    if not len(answer) or list(answer) != list(range(count - len(answer), count)) or answer[0] < 1:
        raise invalid_argument(
            "answer", list(answer), f"the numbers of the last tokens, up to {count - 1}, behind a prompt"
        )
    return answer[0]


def _mass(weights: Tensor, places: Tensor, total: int) -> Tensor:
    """Attention (Hq, queries, keys) → (Hq,), on some of `total` tokens; a sliding window has the last keys only."""
    columns = places - (total - weights.size(-1))
    columns = columns[columns >= 0].to(weights.device)
    return weights.float()[..., columns].sum(-1).mean(-1).cpu()


def floors(scores: Tensor, free: int, floor: float, groups: int) -> list[list[float]]:
    """Floors under the gates for :func:`gape.hf.inject` that leave the heads with the highest scores free.

    Args:
        scores: (L, Hk), those of a sample or the mean over several; of equal ones, the first come first.
        free: how many key heads have floor 0.
        floor: of all others.
        groups: query heads of a key head.

    Returns:
        A list for each layer with a number for each query head: gates={"gate_floor": …}.

    Raises:
        ValueError: a value out of range; names it.
    """
    if scores.dim() != 2 or not bool(scores.isfinite().all()):
        raise invalid_argument("scores", scores, "finite numbers, (layers, key heads)")
    high = positive_number("floor", floor)
    if whole("free", free, 0) > scores.numel():
        raise invalid_argument("free", free, f"a whole number from 0 to {scores.numel()}, the key heads of the model")
    whole("groups", groups)
    return _floors_except(best(scores, free), (scores.size(0), scores.size(1)), high, groups)


def best(scores: Tensor, count: int) -> list[Head]:
    """The key heads with the highest scores (L, Hk), best first; of equal ones, the first come first."""
    places = scores.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [divmod(place, scores.size(1)) for place in places]


def _floors_except(free: Iterable[Head], shape: tuple[int, int], floor: float, groups: int) -> list[list[float]]:
    """Floors of the query heads of a model of (L, Hk) that are 0 for some key heads."""
    layers, n_kv_heads = shape
    rows = [[floor] * (n_kv_heads * groups) for _ in range(layers)]
    for layer, head in free:
        rows[layer][head * groups : (head + 1) * groups] = [0.0] * groups
    return rows


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The result of :func:`pruned`.

    Attributes:
        heads: (layer, key head) of those left free, in the given order.
        removed: of those that got a floor, the first of them first.
        losses: in nats per token of the answers, with all of them free and after each removal.
        floors: a list for each layer with a number for each query head, as of :func:`floors`.
    """

    heads: list[Head]
    removed: list[Head]
    losses: list[float]
    floors: list[list[float]]


def pruned(
    model: Any,
    samples: Sequence[tuple[Tensor, Sequence[int]]],
    heads: Sequence[Head],
    free: int,
    *,
    floor: float,
    context_length: int,
    gates: Mapping[str, Any] | None = None,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
    report: Callable[[Head | None, float], None] = lambda head, loss: None,
) -> Pruned:
    """Put floors under heads, one after the other, always where it costs the answers least, until few are free.

    The cost is the loss per token of an answer behind its prompt, mean over samples, of the model with gates that begin
    with an amplitude of 1. Gates draw the same numbers in every trial, and are taken out again after each.

    Args:
        model: a causal language model without gates, in eval mode; `eager` attention is slow here.
        samples: ids (1, N) of a prompt and its answer, on the model's device, and the numbers of the answer's tokens,
            the last of them.
        heads: (layer, key head) of those that are free at first. All others have a floor from the beginning. Of those
            that cost the same, the last goes first.
        free: how many are left free.
        floor: of all others.
        context_length: T of the gates.
        gates: other options of :class:`gape.GAPEGates`.
        seed: of the gates' first values.
        check: called before each trial; may raise to stop.
        report: called with None and the loss with all of `heads` free, then with each head that got a floor and its
            loss.

    Raises:
        ValueError: a value out of range, gates in the model, or a loss that is not finite. The model is as it was.
    """
    layers, n_heads, n_kv_heads = sizes(model)
    shape, groups = (layers, n_kv_heads), n_heads // n_kv_heads
    left = _candidates(heads, free, shape)
    high, options = positive_number("floor", floor), dict(gates or {})
    if "gate_floor" in options:
        raise invalid_argument("gates", options, "options without gate_floor, which is chosen here")

    def cost(trial: Iterable[Head]) -> float:
        check()
        own = {**options, "gate_floor": _floors_except(trial, shape, high, groups)}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            inject(model, context_length=context_length, start="paper", gates=own)
        try:
            return _loss(model, samples)
        finally:
            remove(model)

    losses, removed = [cost(left)], list[Head]()
    report(None, losses[0])
    while len(left) > free:
        trials = {head: cost(other for other in left if other != head) for head in reversed(left)}
        cheapest = min(trials, key=trials.__getitem__)
        left.remove(cheapest)
        removed.append(cheapest)
        losses.append(trials[cheapest])
        report(cheapest, losses[-1])
    return Pruned(heads=left, removed=removed, losses=losses, floors=_floors_except(left, shape, high, groups))


def _candidates(heads: Sequence[Head], free: int, shape: tuple[int, int]) -> list[Head]:
    """Heads to begin with, checked."""
    layers, n_kv_heads = shape
    checked = [(whole("heads", layer, 0), whole("heads", head, 0)) for layer, head in heads]
    if len(set(checked)) < len(checked) or any(layer >= layers or head >= n_kv_heads for layer, head in checked):
        raise invalid_argument("heads", checked, f"(layer, key head), each once, of {layers} layers of {n_kv_heads}")
    if whole("free", free, 0) > len(checked):
        raise invalid_argument("free", free, f"a whole number from 0 to {len(checked)}, the heads to choose from")
    return checked


@torch.no_grad()
def _loss(model: Any, samples: Sequence[tuple[Tensor, Sequence[int]]]) -> float:
    """Nats per token of an answer, mean over samples."""
    losses = []
    for ids, answer in samples:
        first, rows = _first(ids, answer), len(answer) + 1
        # The query of a token predicts the next one.
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0, -rows:-1]
        losses.append(float(nn.functional.cross_entropy(logits.float(), ids[0, first:])))
    mean = sum(losses) / len(losses) if losses else math.nan
    if not math.isfinite(mean):
        raise invalid_argument("samples", mean, "at least one, and a finite loss of the answers")
    return mean
