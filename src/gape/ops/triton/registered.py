"""Kernels inside operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction


def traceable(kernel: Any) -> Any:
    """The kernel in a form that a compiler sees through; the interpreter's stand-in has none and needs none."""
    return torch.library.wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel
