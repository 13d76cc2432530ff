"""Decoding with CUDA graphs: one launch per token instead of a hundred.

For one token of a small model, launching the kernels takes longer than running them. The kernels of one step are
captured as a CUDA graph and replayed for the next tokens, until a cache has to grow or to evict keys: that token is
launched kernel by kernel, and then a new graph is captured.
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

#: Tokens that a graph must be valid for, and tokens since the last capture before the next: a capture takes about as
#: long as three tokens without one.
LEAST = 8


def why_not(model: GPT, cache: ModelCache) -> str | None:
    """Why the next tokens cannot be replayed from a captured graph; None where they can.

    It checks what can change: the cache, modes, and the settings of layers.
    """
    reasons = (block.attention.unrecordable for block in model.blocks())
    return (
        wrong_place(model.embedding.weight) or _unfit(model) or next((reason for reason in reasons if reason), None)
        or unwritable(cache)
    )  # fmt: skip


def wrong_place(weight: Tensor) -> str | None:
    """Why a model with such a weight cannot be captured on its device, in its current dtype; None where it can."""
    if not weight.is_cuda:
        return f"the model is on {weight.device.type}, and only CUDA captures graphs"
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return None if low in limits.HALVES else f"the model works in {low}, and the decode kernel is for half precision"


def unwritable(cache: ModelCache) -> str | None:
    """Why a graph cannot add tokens to a cache; None where it can."""
    unfit = next((layer.unrecordable for layer in cache.layers if layer.unrecordable), None)
    if unfit is None and cache.length and not all(_decodes(layer.held()) for layer in cache.layers):
        return "the decode kernel is not installed, or not for these sizes"
    return unfit


class Recorder:
    """A model and its cache, decoding one token at a time; a subclass says how its kind of model takes a step.

    Args:
        model: whose steps are captured.
        cache: that its layers write to.
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
        #: Graphs captured so far.
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
            # After an error the device may be a token ahead: the graph is dropped then.
            self._graph = None
            self._ids.copy_(ids)
            graph.replay()
            self.cache.count()
            self._graph, self._length = graph, self._length + 1
            return self._logits.clone()
        # Otherwise memory that the cache is about to free would be kept alive, for all layers, until the next graph.
        self._drop()
        logits = self._launched(ids)
        if self._taken >= LEAST and self.cache.spare >= LEAST and self._why_not() is None:
            self.record(ids)
        return logits

    def record(self, ids: Tensor) -> None:
        """Capture the step of the next token, for batches like `ids` (B, 1).

        Raises:
            ValueError: no graph can be captured, or the cache is empty or has no room for a token.
        """
        reason = self._why_not()
        if reason is None and self.cache.spare < 1:
            reason = "it is empty, or about to move"
        if reason is not None:
            raise ValueError(f"cache: {reason}, expected one whose next token a graph can add")
        self._drop()
        # Tensors that a graph reads must outlive this call, also under inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._ids = ids.clone()
            self._held = [layer.held() for layer in self.cache.layers]
            # Stored for its counters and tables, which the graph reads.
            slots = self._slots = Slots(self._held, self.cache.length, ids.size(0), ids.device)
            graph, self._logits = _capture(partial(self._step, slots), slots.reset, ids.device)
        self._modules = list(self._watched.modules())
        self._weights = [(weight, weight.data_ptr()) for weight in self._watched.parameters()]
        self._graph, self._length, self._mode = graph, self.cache.length, _mode()
        self._taken = 0
        self.recordings += 1

    def _drop(self) -> None:
        """Drop the graph and everything that it reads."""
        self._graph, self._slots = None, None
        self._held, self._modules, self._weights = [], [], []
        self._mode, self._length = (), 0
        self._ids, self._logits = torch.empty(0), torch.empty(0)

    def _step(self, slots: Slots) -> Tensor:
        """The captured step: the logits of one token."""
        positions = slots.begin()
        made_in_capture(positions)
        logits = self._replayed(self._ids, positions, slots)
        slots.end()
        return logits

    def _ready(self, ids: Tensor) -> bool:
        """Whether the graph is valid for the next token: nothing has moved since, and there is room."""
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
        """Whether the model or the cache would no longer do what was captured. Checked for every token."""
        return (
            any(module.training for module in self._modules)
            or _hooked(self._modules)
            or self._told_otherwise()
            or any(layer.unrecordable for layer in self.cache.layers)
            or any(weight.data_ptr() != place for weight, place in self._weights)
        )

    def _why_not(self) -> str | None:
        """Why no graph can be captured now; None where one can."""
        raise NotImplementedError

    def _launched(self, ids: Tensor) -> Tensor:
        """The logits (B, 1, V) of a token by the model itself, which adds it to the cache."""
        raise NotImplementedError

    def _replayed(self, ids: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """The same at `positions` (1,) by kernels that do not change from token to token, adding it to slots."""
        raise NotImplementedError

    def _told_otherwise(self) -> bool:
        """Whether the settings of layers changed to what a replay would not do. Checked for every token."""
        raise NotImplementedError


class Captured(Recorder):
    """A GPT and its cache, decoding one token at a time. Its logits are the model's, up to the order of sums.

    Prompts go to the model itself, before or in between. Weights may be written to and moved, but modules and
    parameters must not be replaced.

    Args:
        model: in eval mode, on a GPU, in half precision or under autocast.
        cache: of the model; it may have tokens.

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

    def _replayed(self, ids: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        return self.model(ids, positions=positions, cache=slots, logits_to_keep=1).logits  # type: ignore[no-any-return]

    def _told_otherwise(self) -> bool:
        return any(block.attention.stepwise or block.attention.keep_landmark for block in self.model.blocks())


def _capture(
    step: Callable[[], Tensor], reset: Callable[[], None], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step and the tensor that a replay writes; the step is run once before, and that run undone."""
    with torch.cuda.device(device), _uncached_autocast():
        current, side = torch.cuda.current_stream(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # Compiles kernels, which a capture cannot; the column that it writes does not count yet.
            step()
            reset()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory or query events meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            logits = step()
    return graph, logits


def _unfit(model: GPT) -> str | None:
    return unfit(list(model.modules()), _known)


def unfit(modules: Sequence[nn.Module], known: Callable[[nn.Module], bool]) -> str | None:
    """Why the modules of a model cannot be captured; None where they can. `known` says which module types can."""
    if any(module.training for module in modules):
        return "the model is in training mode"
    if _hooked(modules):
        return "a module has hooks, which a replay would not call"
    if any(module._compiled_call_impl is not None for module in modules):
        return "a module is compiled"
    foreign = next((type(module) for module in modules if not known(module)), None)
    return None if foreign is None else f"nobody knows whether a {foreign.__qualname__} can be captured"


def _hooked(modules: Iterable[nn.Module]) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _known(module: nn.Module) -> bool:
    """Whether a module is one of ours or of torch: others, such as adapters, may synchronise with the host."""
    return type(module).__module__.startswith(("gape.", "torch.nn."))


def _decodes(held: Held) -> bool:
    """Whether the decode kernel can attend to what a layer holds."""
    return all(limits.decodes(block.k[:, :, :1], block.k, block.v, learns=False) for block in held.blocks)


def _mode() -> tuple[object, ...]:
    """The autocast dtype, on which a graph depends besides the weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return enabled, torch.get_autocast_dtype("cuda") if enabled else None


def _uncached_autocast() -> AbstractContextManager[object]:
    """Autocast as it is, without its cache of cast weights, which ends with it while the graph still reads it."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
