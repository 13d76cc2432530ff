"""Decoding by a recorded graph: one launch a token where there would be a hundred.

A token gives a small model so little to do that launching takes longer than the work. The launches of one step are
recorded as a CUDA graph and replayed for the tokens that follow, until a cache has to grow or looks through its keys:
that token is taken step by step, and the next graph recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gape.cache.slots import Held, Slots
from gape.ops import limits
from gape.positions.rotary import made_in_capture
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.cache.kv import ModelCache
    from gape.models.gpt import GPT

#: Tokens that a graph has to be good for, and that have to have come one by one since the last was recorded: recording
#: one takes about as long as three tokens without.
LEAST = 8


def why_not(model: GPT, cache: ModelCache) -> str | None:
    """Why the next tokens cannot come from a recorded graph; None where they can.

    Only what can change is looked at: the cache, modes, and what the layers have been told.
    """
    told = (block.attention.unrecordable for block in model.blocks())
    return (
        wrong_place(model.embedding.weight) or _unfit(model) or next((reason for reason in told if reason), None)
        or unwritable(cache)
    )  # fmt: skip


def wrong_place(weight: Tensor) -> str | None:
    """Why a model with such a weight cannot be recorded where it is, in what it works in now; None where it can."""
    if not weight.is_cuda:
        return f"the model is on {weight.device.type}, and only CUDA records graphs"
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return None if low in limits.HALVES else f"the model works in {low}, and the decode kernel is for half precision"


def unwritable(cache: ModelCache) -> str | None:
    """Why a graph could not add tokens to a cache; None where it could."""
    unfit = next((layer.unrecordable for layer in cache.layers if layer.unrecordable), None)
    if unfit is None and cache.length and not all(_decodes(layer.held()) for layer in cache.layers):
        return "the decode kernel is not installed, or not for these sizes"
    return unfit


class Recorder:
    """A model of any kind and its cache, for tokens one at a time; what is of a kind the subclass says.

    Args:
        model: what is recorded.
        cache: what its layers write to.
    """

    _graph: torch.cuda.CUDAGraph | None
    _held: list[Held]
    _slots: Slots | None
    _modules: list[nn.Module]
    _weights: list[tuple[Tensor, int]]
    _mode: tuple[object, ...]
    _length: int

    def __init__(self, model: nn.Module, cache: ModelCache) -> None:
        self._watched, self.cache = model, cache
        #: Graphs recorded so far.
        self.recordings = 0
        self._taken = 0
        self._drop()

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (B, 1, V) of what follows ids (B, 1), which are added to the cache.

        Raises:
            ValueError: ids are not single tokens.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.size(1) != 1:
            raise invalid_argument("ids", ids, "an int64 or int32 tensor (batch, 1)")
        self._taken += 1
        graph = self._graph if self._ready(ids) else None
        if graph is not None:
            # Should anything break off, the device may be a token ahead: the graph is gone then.
            self._graph = None
            self._ids.copy_(ids)
            graph.replay()
            self.cache.count()
            self._graph, self._length = graph, self._length + 1
            return self._logits.clone()
        # What the cache is about to leave would be held, for all layers at once, until the next graph.
        self._drop()
        logits = self._launched(ids)
        if self._taken >= LEAST and self.cache.spare >= LEAST and self._why_not() is None:
            self.record(ids)
        return logits

    def record(self, ids: Tensor) -> None:
        """Record the step of the next token, for batches like `ids` (B, 1).

        Raises:
            ValueError: no graph can be recorded, or the cache has no room for a token; it has to hold some already.
        """
        reason = self._why_not()
        if reason is None and self.cache.spare < 1:
            reason = "it is empty, or about to move"
        if reason is not None:
            raise ValueError(f"cache: {reason}, expected one whose next token a graph can add")
        self._drop()
        # What a graph reads must outlive this call, whatever mode it is made in.
        with torch.inference_mode(False), torch.no_grad():
            self._ids = ids.clone()
            self._held = [layer.held() for layer in self.cache.layers]
            # Kept for its counters, tables and tickets, which the graph goes on reading.
            slots = self._slots = Slots(self._held, self.cache.length, ids.size(0), ids.device)
            graph, self._logits = _recorded(partial(self._step, slots), slots.reset, ids.device)
        self._modules = list(self._watched.modules())
        self._weights = [(weight, weight.data_ptr()) for weight in self._watched.parameters()]
        self._graph, self._length, self._mode = graph, self.cache.length, _mode()
        self._taken = 0
        self.recordings += 1

    def _drop(self) -> None:
        """Let go of the graph and of all that it reads."""
        self._graph, self._slots = None, None
        self._held, self._modules, self._weights = [], [], []
        self._mode, self._length = (), 0
        self._ids, self._logits = torch.empty(0), torch.empty(0)

    def _step(self, slots: Slots) -> Tensor:
        """What is recorded: the logits of one token."""
        where = slots.begin()
        made_in_capture(where)
        logits = self._replayed(self._ids, where, slots)
        slots.end()
        return logits

    def _ready(self, ids: Tensor) -> bool:
        """Whether there is a graph for the next token: nothing has moved since, and there is room."""
        old, cache = self._ids, self.cache
        if self._graph is None or (old.shape, old.dtype, old.device) != (ids.shape, ids.dtype, ids.device):
            return False
        if cache.length != self._length or cache.spare < 1 or self._mode != _mode() or self._changed():
            return False
        return all(
            len(old.blocks) == len(new.blocks) and all(a.k is b.k for a, b in zip(old.blocks, new.blocks, strict=True))
            for old, new in zip(self._held, [layer.held() for layer in cache.layers], strict=True)
        )

    def _changed(self) -> bool:
        """Whether the model or the cache would no longer do what was recorded. Asked for every token."""
        return (
            any(module.training for module in self._modules)
            or _hooked(self._modules)
            or self._told_otherwise()
            or any(layer.unrecordable for layer in self.cache.layers)
            or any(weight.data_ptr() != place for weight, place in self._weights)
        )

    def _why_not(self) -> str | None:
        """Why no graph can be recorded now; None where one can."""
        raise NotImplementedError

    def _launched(self, ids: Tensor) -> Tensor:
        """The logits (B, 1, V) of a token by the model itself, which adds it to the cache."""
        raise NotImplementedError

    def _replayed(self, ids: Tensor, where: Tensor, slots: Slots) -> Tensor:
        """The same at a position (1,) by launches that never change, adding it to slots."""
        raise NotImplementedError

    def _told_otherwise(self) -> bool:
        """Whether layers have been told since to do something that a replay would not. Asked for every token."""
        raise NotImplementedError


class Captured(Recorder):
    """A model and its cache, for tokens one at a time. The answers are the model's, up to the order of sums.

    Prompts go to the model, before or in between; so does everything that changes the cache in another way. Weights may
    be written to and moved, but modules and parameters not be replaced by others.

    Args:
        model: in eval mode, on a GPU, in half precision or under autocast.
        cache: of the model; it may hold tokens.

    Raises:
        ValueError: the cache is not one of the model.
    """

    def __init__(self, model: GPT, cache: ModelCache) -> None:
        if len(cache.layers) != model.config.n_layer:
            raise invalid_argument("cache", cache, f"a cache of {model.config.n_layer} layers")
        cache.enter(model)
        self.model = model
        super().__init__(model, cache)

    def _why_not(self) -> str | None:
        return why_not(self.model, self.cache)

    def _launched(self, ids: Tensor) -> Tensor:
        return self.model(ids, cache=self.cache, logits_to_keep=1).logits  # type: ignore[no-any-return]

    def _replayed(self, ids: Tensor, where: Tensor, slots: Slots) -> Tensor:
        return self.model(ids, positions=where, cache=slots, logits_to_keep=1).logits  # type: ignore[no-any-return]

    def _told_otherwise(self) -> bool:
        return any(block.attention.stepwise or block.attention.keep_landmark for block in self.model.blocks())


def _recorded(
    step: Callable[[], Tensor], reset: Callable[[], None], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step and what a replay writes its answer to; the step is taken once before, and that undone."""
    with torch.cuda.device(device), _uncached_autocast():
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            # Compiles what a capture could not; the column that it writes does not count yet.
            step()
            reset()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Others may allocate, or ask for events, in threads of their own meanwhile.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            answer = step()
    return graph, answer


def _unfit(model: GPT) -> str | None:
    return unfit(list(model.modules()), _known)


def unfit(modules: Sequence[nn.Module], known: Callable[[nn.Module], bool]) -> str | None:
    """What about the modules of a model, of which some are known, keeps it from being recorded; None: nothing does."""
    if any(module.training for module in modules):
        return "the model is in training mode"
    if _hooked(modules):
        return "a module has hooks, which a replay would not call"
    if any(module._compiled_call_impl is not None for module in modules):
        return "a module is compiled"
    foreign = next((type(module) for module in modules if not known(module)), None)
    return None if foreign is None else f"nobody knows whether a {foreign.__qualname__} can be recorded"


def _hooked(modules: Iterable[nn.Module]) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _known(module: nn.Module) -> bool:
    """Whether a module is one of ours or of torch: others, such as adapters, may wait for the host."""
    return type(module).__module__.startswith(("gape.", "torch.nn."))


def _decodes(held: Held) -> bool:
    """Whether the decode kernel can attend to what a layer holds."""
    return all(limits.decodes(block.k[:, :, :1], block.k, block.v, learns=False) for block in held.blocks)


def _mode() -> tuple[object, ...]:
    """What a model computes in besides its weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return enabled, torch.get_autocast_dtype("cuda") if enabled else None


def _uncached_autocast() -> AbstractContextManager[object]:
    """Autocast as it is, but for the copies of weights that it keeps: they end with it, and a graph goes on reading."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
