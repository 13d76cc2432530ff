"""What benchmarks have in common: sizes and names that are checked, and candidates that may fail alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from gape.utils.validation import invalid_argument, positive_number, whole


class UnavailableError(RuntimeError):
    """A candidate cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        device: where.
        impls: names of candidates.
        lengths: numbers of tokens.
        dim: head dim.
        heads, kv_heads: query heads and key heads.
        dtype: of q, k and v, by name.
        seconds: about how long each candidate is timed.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    DTYPES: ClassVar = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    #: Names that `impls` may have.
    KNOWN: ClassVar[Sequence[str]] = ()

    device: torch.device
    impls: Sequence[str]
    lengths: Sequence[int]
    dim: int = 64
    heads: int = 16
    kv_heads: int = 16
    dtype: str = "bfloat16"
    seconds: float = 1.0

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("dim", "heads", "kv_heads")}
        for name, size in (*(("lengths", length) for length in self.lengths), *sizes.items()):
            if whole(name, size) >= 2**31:
                raise invalid_argument(name, size, "whole numbers below 2**31")
        if self.heads % self.kv_heads:
            raise invalid_argument("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.dtype not in self.DTYPES:
            raise invalid_argument("dtype", self.dtype, f"one of {list(self.DTYPES)}")
        for impl in self.impls:
            if impl not in self.KNOWN:
                raise invalid_argument("impl", impl, f"names out of {list(self.KNOWN)}")
        positive_number("seconds", self.seconds)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = self.DTYPES[self.dtype]
        return dtype


@contextmanager
def on_its_own(impl: str, length: int, say: Callable[[str], None]) -> Iterator[None]:
    """Let a candidate fail without ending the benchmark; `say` hears why."""
    try:
        yield
    except UnavailableError as why:
        say(f"{impl} at {length:,}: skipped, {why}")
    except Exception as error:
        # Compilers and kernels of other projects fail in ways of their own, and none should end the benchmark.
        told = (str(error).strip() or "no message").splitlines()[0]
        say(f"{impl} at {length:,}: failed, {type(error).__name__}: {told}")
