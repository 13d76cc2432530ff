"""Kernels inside operators of torch, so that compilers carry them along and autograd knows their gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction

from gape.ops.limits import MOST_PROGRAMS

#: Whether kernels run in Triton's interpreter, which a compiler cannot see through.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that launches kernels; it tells shapes by itself, with tensors that hold nothing.

    A compiler sees through it down to the kernels. In the interpreter it is a closed box.
    """

    def register(function: Callable[..., Any]) -> Any:
        if not INTERPRETED:
            return torch.library.triton_op(name, mutates_args={})(function)
        box = torch.library.custom_op(name, mutates_args=())(function)
        box.register_fake(function)
        return box

    return register


def in_parts(
    launch: Callable[..., tuple[Tensor, ...]],
    batched: Sequence[Tensor | None],
    batch: int,
    programs: int,
    *constants: Any,
) -> Any:
    """What `launch(*batched, *constants)` returns, with no more samples at a time than a launch takes.

    Args:
        launch: returns tensors whose first axis goes through the samples.
        batched: tensors with a first axis of samples; None stays None.
        batch: how many samples there are.
        programs: along the second axis for each of them.
        constants: the same for all samples.
    """
    if batch * programs <= MOST_PROGRAMS:
        return launch(*batched, *constants)
    at_once = MOST_PROGRAMS // programs
    parts = [
        launch(*(None if x is None else x[start : start + at_once] for x in batched), *constants)
        for start in range(0, batch, at_once)
    ]
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


#: Whether launches are not to be traced: :func:`untraced`.
_UNTRACED: ContextVar[bool] = ContextVar("untraced", default=False)


@contextmanager
def untraced() -> Iterator[None]:
    """A context in which :func:`traceable` kernels are launched as they are: outside of an operator, torch would trace
    each launch, which takes longer than the launch.
    """
    token = _UNTRACED.set(True)
    try:
        yield
    finally:
        _UNTRACED.reset(token)


def traceable(kernel: Any) -> Any:
    """The kernel in a form that operators launch."""
    if not isinstance(kernel, JITFunction):
        return _Interpreted(kernel)
    if _UNTRACED.get():
        return _OnItsDevice(kernel) if torch.version.cuda else _Uncapped(kernel)
    form = torch.library.wrap_triton(kernel)
    # Where nothing is traced, torch gives the kernel itself back.
    return _OnItsDevice(form if form is kernel and torch.version.cuda else _Uncapped(form))


def direct(kernel: Any) -> Any:
    """The kernel in a form for launches outside operators, where torch would keep a record of each traceable one."""
    return _OnItsDevice(kernel)


class _OnItsDevice:
    """A kernel that runs where its first argument lies: left alone, Triton takes the current device and its stream.

    Triton looks at every argument of every launch, which takes longer than the launch. What it has compiled for the
    same arguments is looked up here.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **flags: Any) -> None:
            if torch.cuda.device_count() > 1:
                with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
                    _launch(self.kernel, grid, arguments, flags)
            else:
                _launch(self.kernel, grid, arguments, flags)

        return launch


#: Compiled kernels by kernel, device, launch options and arguments, and how many are remembered: sizes differ.
_COMPILED: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 10_000


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], flags: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **flags)
        return
    # Finer than what Triton compiles for: a number is itself, a tensor its dtype and alignment. All at once, for there
    # are some fifty arguments.
    argument_kinds = [
        x
        if type(x) is int
        else (x.dtype, x.data_ptr() % 16)
        if isinstance(x, Tensor)
        else float
        if type(x) is float
        else (type(x), x)
        for x in arguments
    ]
    # By identity, for the hash of a kernel takes a lock; what is compiled keeps its kernel alive.
    key = (id(kernel), arguments[0].device, *argument_kinds, *flags.items())
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.clear()
        constants = tuple(flags[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[key] = kernel[grid](*arguments, **flags), constants
        return
    run, constants = compiled
    run[(*grid, 1, 1)[:3]](*arguments, *constants)


class _Uncapped:
    """A kernel without a cap of registers, which other GPUs than NVIDIA's do not have, and with products and sums fused
    as the compiler likes: neither choice is passed on where launches are traced.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **flags: Any) -> None:
            for name in ("maxnreg", "enable_fp_fusion"):
                flags.pop(name, None)
            self.kernel[grid](*arguments, **flags)

        return launch


class _Interpreted:
    """A kernel of the interpreter, which leaves tensors alone that hold nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **flags: Any) -> None:
            if not any(isinstance(x, FakeTensor) for x in arguments if isinstance(x, Tensor)):
                self.kernel[grid](*arguments, **flags)

        return launch
