"""Decoding by a recorded graph: one launch a token where there would be a hundred.

A token gives a small model so little to do that launching takes longer than the work. The launches of one step are
recorded as a CUDA graph and replayed for the tokens that follow, until a cache has to grow or looks through its keys:
that token is taken step by step, and the next graph recorded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gape.models.slots import Held, Slots
from gape.ops.checks import refuse
from gape.positions.rotary import made_in_capture

if TYPE_CHECKING:
    from gape.models.cache import ModelCache
    from gape.models.gpt import GPT

#: Tokens that a graph has to be good for, and that have to have come one by one: recording one takes about as long as
#: three tokens without.
LEAST = 8

_HALVES = (torch.bfloat16, torch.float16)


def why_not(model: GPT, cache: ModelCache) -> str | None:
    """Why the next tokens cannot come from a recorded graph; None where they can.

    Only what can change is looked at: the cache, modes, and what the layers have been told.
    """
    weight = model.embedding.weight
    if not weight.is_cuda:
        return f"the model is on {weight.device.type}, and only CUDA records graphs"
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    if low not in _HALVES:
        return f"the model works in {low}, and the decode kernel is for half precision"
    if model.training:
        return "the model is in training mode"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "a module has hooks, which a replay would not call"
    unfit = next((block.attention.unrecordable for block in model.blocks() if block.attention.unrecordable), None)
    return unfit or next((layer.unrecordable for layer in cache.layers if layer.unrecordable), None)


class Captured:
    """A model and its cache, for tokens one at a time. The answers are the model's, up to the order of sums.

    Prompts go to the model, before or in between; so does everything that changes the cache in another way. Weights may
    be written to, but their tensors not be replaced.

    Args:
        model: in eval mode, on a GPU, in half precision or under autocast.
        cache: of the model; it may hold tokens.

    Raises:
        ValueError: the cache is not one of the model.
    """

    def __init__(self, model: GPT, cache: ModelCache) -> None:
        if len(cache.layers) != model.config.n_layer:
            raise refuse("cache", cache, f"a cache of {model.config.n_layer} layers")
        self.model, self.cache = model, cache
        #: Graphs recorded so far.
        self.recordings = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: list[Held] = []
        self._slots: Slots | None = None
        self._mode: tuple[object, ...] = ()
        self._length = self._taken = 0
        self._ids, self._logits = torch.empty(0), torch.empty(0)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (B, 1, V) of what follows ids (B, 1), which are added to the cache.

        Raises:
            ValueError: ids are not single tokens.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.size(1) != 1:
            raise refuse("ids", ids, "an int64 or int32 tensor (batch, 1)")
        if self._ready(ids) and self._graph is not None:
            self._ids.copy_(ids)
            self._graph.replay()
            self.cache.count()
            self._length += 1
            return self._logits.clone()
        logits: Tensor = self.model(ids, cache=self.cache, logits_to_keep=1).logits
        self._taken += 1
        if self._taken >= LEAST and self.cache.spare >= LEAST and why_not(self.model, self.cache) is None:
            self.record(ids)
        return logits

    def record(self, ids: Tensor) -> None:
        """Record the step of the next token, for batches like `ids` (B, 1); the cache has to hold tokens already."""
        # What a graph reads must outlive this call, whatever mode it is made in.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(ids.device), _uncached_autocast():
            self._graph = None
            self._ids = ids.clone()
            self._held = [layer.held() for layer in self.cache.layers]
            # Kept for its counters, which the graph goes on reading.
            slots = self._slots = Slots(self._held, self.cache.length, ids.size(0), ids.device)
            here, aside = torch.cuda.current_stream(), torch.cuda.Stream(ids.device)  # type: ignore[no-untyped-call]
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                # Compiles what a capture could not; the column that it writes does not count yet.
                self._step(slots)
                slots.reset()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=aside):
                self._logits = self._step(slots)
        self._graph, self._length, self._mode = graph, self.cache.length, _mode()
        self.recordings += 1

    def _step(self, slots: Slots) -> Tensor:
        """What is recorded: the logits of one token."""
        where = slots.begin()
        made_in_capture(where)
        logits: Tensor = self.model(self._ids, positions=where, cache=slots, logits_to_keep=1).logits
        slots.end()
        return logits

    def _ready(self, ids: Tensor) -> bool:
        """Whether the graph is one for the next token: nothing has moved since, and there is room."""
        if self._graph is None or self._ids.shape != ids.shape or self._ids.dtype != ids.dtype:
            return False
        if self.cache.length != self._length or self.cache.spare < 1 or self._mode != _mode() or self.model.training:
            return False
        held = [layer.held() for layer in self.cache.layers]
        return all(
            len(old.blocks) == len(new.blocks) and all(a.k is b.k for a, b in zip(old.blocks, new.blocks, strict=True))
            for old, new in zip(self._held, held, strict=True)
        )


def _mode() -> tuple[object, ...]:
    """What a model computes in besides its weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return enabled, torch.get_autocast_dtype("cuda") if enabled else None


def _uncached_autocast() -> AbstractContextManager[object]:
    """Autocast as it is, but for the copies of weights that it keeps: they end with it, and a graph goes on reading."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
