"""Kernels inside operators of torch, so that compilers carry them along and autograd knows their gradients."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gape.ops.limits import MOST_PROGRAMS

#: Whether kernels run in Triton's interpreter, which a compiler cannot see through.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def operator(name: str, batched: int = 0, *, by_head: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that launches kernels; it tells shapes by itself, with tensors that hold nothing.

    A compiler sees through it down to the kernels. In the interpreter it is a closed box.

    Args:
        name: of the operator.
        batched: its first so many arguments, tensors (B, H, …) or None, are cut where a launch does not take B samples.
        by_head: whether a launch has a program for each head of a sample, and not one for each sample.
    """

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def cut(*arguments: Any) -> Any:
            sizes = arguments[0].shape[: 1 + by_head]
            return in_parts(function, arguments[:batched], *sizes, constants=arguments[batched:])

        whole = cut if batched else function
        if not INTERPRETED:
            return torch.library.triton_op(name, mutates_args={})(whole)
        box = torch.library.custom_op(name, mutates_args=())(whole)
        box.register_fake(whole)
        return box

    return register


def in_parts(
    launch: Callable[..., tuple[Tensor, ...]], batched: Sequence[Tensor | None], batch: int, programs: int = 1, *,
    constants: Sequence[Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `launch(*batched, *constants)` returns, with no more samples at a time than a launch takes.

    Args:
        launch: returns tensors whose first axis goes through the samples.
        batched: tensors with a first axis of samples; None stays None.
        batch: how many samples there are.
        programs: along the second axis of a launch for each of them.
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


class _Form:
    """A kernel in another form to launch: form[grid](*arguments, **flags)."""

    def __init__(self, launch: Callable[..., None], kernel: Any) -> None:
        self._launch, self._kernel = launch, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, self._kernel, grid)


def traceable(kernel: Any) -> Any:
    """The kernel in a form that operators launch."""
    if not isinstance(kernel, JITFunction):
        return _Form(_interpret, kernel)
    return _Form(_launch if capped(kernel) else _launch_uncapped, torch.library.wrap_triton(kernel))


def capped(kernel: Any) -> bool:
    """Whether a launch of the :func:`traceable` kernel may have a cap of registers."""
    # Where nothing is traced, torch gives the kernel itself back.
    untraced = not isinstance(kernel, JITFunction) or torch.library.wrap_triton(kernel) is kernel
    return untraced and (INTERPRETED or bool(torch.version.cuda))


def direct(kernel: Any) -> Any:
    """The kernel in a form for launches outside operators, where torch would keep a record of each traceable one."""
    return _Form(_launch, kernel)


def _interpret(kernel: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Tensors that hold nothing are left alone."""
    if not any(isinstance(x, FakeTensor) for x in arguments if isinstance(x, Tensor)):
        kernel[grid](*arguments, **flags)


def _launch_uncapped(kernel: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Without a cap of registers, which other GPUs than NVIDIA's do not have, and with products and sums fused as the
    compiler likes: neither choice is passed on where launches are traced.
    """
    for name in ("maxnreg", "enable_fp_fusion"):
        flags.pop(name, None)
    kernel[grid](*arguments, **flags)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Where the first argument lies: left alone, Triton takes the current device and its stream."""
    if torch.cuda.device_count() > 1:
        with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
            _launch_here(kernel, grid, arguments, flags)
    else:
        _launch_here(kernel, grid, arguments, flags)


#: Compiled kernels by kernel, device, launch options and arguments, and how many are remembered: sizes differ.
_COMPILED: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 10_000


def _launch_here(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], flags: dict[str, Any]) -> None:
    """Triton looks at every argument of every launch, which takes longer than the launch: what it has compiled for the
    same arguments is looked up.
    """
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
    run[(*grid, 1, 1)[:3]](*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments), *constants)


class Launch:
    """A launch outside operators of which only the tensors differ from time to time: the cheapest form.

    Neither Triton nor this class looks at anything but where tensors are aligned. Use one for tensors that have the
    same dtypes, shapes, strides and device each time.

    Args:
        kernel: takes tensors, then numbers.
        grid: of programs.
        numbers: the kernel's arguments behind the tensors.
        flags: its constants and launch options, by name.
        then: another launch that follows with the same tensors.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], flags: dict[str, Any],
        then: Launch | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers, self.flags, self.then = kernel, (*grid, 1, 1)[:3], numbers, flags, then
        if not torch.version.cuda:
            # Other GPUs than NVIDIA's have no cap of registers.
            self.flags = {name: value for name, value in flags.items() if name != "maxnreg"}
        self._one_device = torch.cuda.device_count() <= 1
        #: The compiled kernel and all its arguments behind the tensors, by how tensors are aligned.
        self._compiled: dict[object, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch with these tensors, on the device of the first."""
        addresses = [x.data_ptr() for x in tensors]
        alignment = functools.reduce(or_, addresses) % 16 and tuple(x % 16 for x in addresses)
        if self._one_device:
            self._run(tensors, addresses, alignment)
        else:
            with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
                self._run(tensors, addresses, alignment)

    def _run(self, tensors: tuple[Tensor, ...], addresses: list[int], alignment: object) -> None:
        compiled = self._compiled.get(alignment)
        if compiled is None:
            self._compile(tensors, alignment)
        else:
            kernel, rest = compiled
            stream = driver.active.get_current_stream(tensors[0].get_device())
            # Of a tensor Triton would ask the driver where it lies, which takes longer than all the rest. The three are
            # hooks of Triton's own profiler.
            handles = (kernel.function, kernel.packed_metadata)
            kernel.run(*self.grid, stream, *handles, None, None, None, *addresses, *rest)
        if self.then is not None:
            self.then._run(tensors, addresses, alignment)

    def _compile(self, tensors: tuple[Tensor, ...], alignment: object) -> None:
        """Launch by way of Triton, and keep what it has compiled."""
        kernel = self.kernel[self.grid](*tensors, *self.numbers, **self.flags)
        if isinstance(self.kernel, JITFunction):
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._compiled[alignment] = kernel, (*self.numbers, *(self.flags[name] for name in names))
