"""Captured decoding: one launch per token instead of a hundred.

For one token of a small model, launching kernels takes longer than running them. The kernels of one step are captured
as a CUDA graph and replayed for the next tokens. The graph reads block tables and lengths of the cache's pages on the
device, so it stays valid while the cache grows and evicts, and for the next cache of the same model and batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gape.ops import limits
from gape.positions.angles import share_angles

if TYPE_CHECKING:
    from gape.cache.paged import PagedCache

#: Attributes that switch something on or off in a module: our layers' listeners, and adapters of `peft`.
_SETTINGS = ("stepwise", "keep_landmark", "_disable_adapters", "_active_adapter", "merged_adapters", "scaling")

#: Modules whose hooks do nothing but for calls that ask for hidden states or weights, which are not captured.
_IDLE_HOOKS = ("transformers.utils.output_capturing",)

#: A step of a model: ids (B, 1) and their positions (B, 1) → logits (B, 1, V); it adds the tokens to its cache.
Step = Callable[[Tensor, Tensor], Tensor]


def captured_logits(
    model: nn.Module, cache: PagedCache, step: Step, ids: Tensor, positions: Tensor, why_not: Callable[[], str | None]
) -> Tensor | None:
    """The logits (B, 1, V) of one token a row by a captured step; None, and nothing done, where it cannot be captured.

    `cache.uncaptured` then says why. The first token of a text is not captured: it compiles the kernels.

    Args:
        model: in eval mode, on a GPU; `cache` is its cache, with a prompt.
        step: what is captured, called with ids and positions, integer (B, 1).
        why_not: says why a model cannot be captured; asked when a graph is about to be captured.
    """
    cache.uncaptured = _not_now(cache, ids)
    if cache.uncaptured is not None:
        return None
    storage = cache.storage
    graph: CapturedStep | None = storage.graph
    if graph is None or not graph.fits(model, cache, ids):
        storage.graph = None
        cache.uncaptured = why_not()
        if cache.uncaptured is None and not storage.stepped:
            cache.uncaptured = "the first token of a text runs uncaptured"
        if cache.uncaptured is not None:
            # Whatever runs next compiles what a capture needs.
            storage.stepped = True
            return None
        cache.ready_for_step(positions)
        storage.graph = graph = CapturedStep(model, cache, step, ids, positions)
    else:
        cache.ready_for_step(positions)
        if graph.tables is not storage.addresses:
            return captured_logits(model, cache, step, ids, positions, why_not)
    return graph.replay(cache, ids, positions)


def _not_now(cache: PagedCache, ids: Tensor) -> str | None:
    """Why this token cannot come from a captured step, whatever the model; None where it can."""
    if not ids.is_cuda:
        return f"the model is on {ids.device.type}, and only CUDA captures graphs"
    if not cache.length:
        return "no prompt is cached yet"
    if not cache.storage.in_kernels:
        return f"no kernel reads pages of {cache.storage.layout.dtype}"
    if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
        return "a graph is being captured or compiled around it"
    return "gradients are on" if torch.is_grad_enabled() else None


class ModelState:
    """All that a captured step depends on: modules and how they are set, and where tensors lie. It holds no model."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(_walk(model))
        self._modules = [weakref.ref(module) for module in modules]
        self._settings = {number: own for number, module in enumerate(modules) if (own := settings(module))}
        self._tensors = [(weakref.ref(x), x.data_ptr()) for x in _tensors(modules)]

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether a replay would still do what the model does. Asked for every token."""
        modules = list(_walk(model))
        if len(modules) != len(self._modules):
            return False
        if any(ref() is not module for ref, module in zip(self._modules, modules, strict=True)):
            return False
        if has_hooks(modules) or any(m.training or "forward" in vars(m) for m in modules):
            return False
        if any(settings(modules[number]) != earlier for number, earlier in self._settings.items()):
            return False
        tensors = list(_tensors(modules))
        if len(tensors) != len(self._tensors):
            return False
        return all(ref() is x and x.data_ptr() == at for (ref, at), x in zip(self._tensors, tensors, strict=True))


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it, in less time than `modules()` takes."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of modules."""
    for module in modules:
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                yield x


class CapturedStep:
    """One step of a model as a CUDA graph, with all that it depends on."""

    def __init__(self, model: nn.Module, cache: PagedCache, step: Step, ids: Tensor, positions: Tensor) -> None:
        # Tensors that a graph reads must outlive this call, also under inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._ids, self._positions = ids.clone(), positions.to(torch.int64).clone()
            self._graph, self._logits = _capture(step, cache, self._ids, self._positions)
        self.tables = cache.storage.addresses
        self._state, self._measures, self._mode = ModelState(model), cache.measures, _mode()

    def fits(self, model: nn.Module, cache: PagedCache, ids: Tensor) -> bool:
        """Whether a replay would do what the model does with these tokens."""
        old = self._ids
        if (old.shape, old.dtype, old.device) != (ids.shape, ids.dtype, ids.device) or self._mode != _mode():
            return False
        if self.tables is not cache.storage.addresses or (cache.measures and not self._measures):
            return False
        return self._state.is_that_of(model)

    def replay(self, cache: PagedCache, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, 1, V) of a token, which is added to the cache; no later replay writes to them."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        with cache.stepping():
            self._graph.replay()
        return self._logits.clone()


def _capture(step: Step, cache: PagedCache, ids: Tensor, positions: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step and the tensor that a replay writes. The step runs once before, and that run is undone."""
    storage = cache.storage
    before = (storage.lengths.clone(), storage.next_position.clone())

    def run() -> Tensor:
        # A tensor of this run, whose angles all layers share: those of an earlier run would never change.
        places = positions.clone()
        share_angles(places)
        logits = step(ids, places)
        storage.lengths.add_(1)
        torch.add(places[:, 0], 1, out=storage.next_position)
        return logits

    device, casts = ids.device, torch.is_autocast_enabled("cuda")
    # Autocast's cache of cast weights ends with it, while the graph still reads it.
    uncached = torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled=casts, cache_enabled=False)
    try:
        cache.capturing = True
        with torch.cuda.device(device), uncached:
            current, side = torch.cuda.current_stream(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                # Compiles kernels, which a capture cannot; the keys that it writes do not count.
                run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate memory or query events meanwhile.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                logits = run()
    finally:
        cache.capturing = False
        storage.lengths.copy_(before[0])
        storage.next_position.copy_(before[1])
    return graph, logits


def model_cannot(modules: Sequence[nn.Module], weight: Tensor, known: Callable[[nn.Module], bool]) -> str | None:
    """Why a model with these modules cannot be captured; None where it can. `known` says which module types can."""
    if any(module.training for module in modules):
        return "the model is in training mode"
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    if low not in limits.HALVES:
        return f"the model works in {low}, and steps are captured in half precision"
    if has_hooks(modules):
        return "a module has hooks, which a replay would not call"
    if any(_replaced(module) for module in modules):
        return "the forward of a module was replaced"
    if any(module._compiled_call_impl is not None for module in modules):
        return "a module is compiled"
    foreign = next((type(module) for module in modules if not known(module)), None)
    return None if foreign is None else f"it is not known whether a {foreign.__qualname__} can be captured"


def _replaced(module: nn.Module) -> bool:
    """Whether a module has a forward of its own. Transformers 4 leaves that of the class where it recorded states."""
    forward = vars(module).get("forward")
    return forward is not None and forward != type(module).forward.__get__(module)


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a module, or all of them, have forward hooks that may do something."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return True
    hooked = (each for module in modules for each in (module._forward_hooks, module._forward_pre_hooks) if each)
    return any(getattr(hook, "__module__", None) not in _IDLE_HOOKS for hooks in hooked for hook in hooks.values())


def settings(module: nn.Module) -> dict[str, object]:
    """What a module does besides its weights and mode, where that may change: listeners of ours, adapters of `peft`."""
    state = vars(module)
    return {name: copy(state[name]) for name in _SETTINGS if name in state}


def _mode() -> tuple[object, ...]:
    """The autocast dtype, on which a graph depends besides the weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return enabled, torch.get_autocast_dtype("cuda") if enabled else None
