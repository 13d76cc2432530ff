"""How fast, how large and how exact attention with the gated bias is, and what it stands beside.

Batch times length is kept, as a training step would. Operations are counted for the causal half: 4·B·H·N²/2·d forward,
3.5 times that forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gape.bench import rows, settings
from gape.bench.candidates import CANDIDATES, Work
from gape.bench.errors import against_float64
from gape.bench.inputs import GATES, Arguments, Shape, draw, problem
from gape.bench.settings import on_its_own
from gape.bench.timing import measured
from gape.utils.validation import invalid_argument, weight, whole

#: What runs unless asked otherwise: the definition is quadratic, and the paper's form wrong in half precision.
DEFAULT = tuple(name for name in CANDIDATES if name not in ("auto", "reference", "rank2"))

ERRORS = ("error", "dq", "dk", "dv", "dgate", "dlandmark", "damplitude")
FIELDS = (
    *rows.STAMP, "gates", "impl", "direction", "dtype", "batch", "heads", "kv_heads", "length", "dim", "eps",
    "ms", "tflops", "peak_mib", "tiles", *ERRORS,
)  # fmt: skip

#: Times the operations of the forward pass that forward and backward together take.
BOTH = 3.5


@dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """What is measured, beside the sizes.

    Attributes:
        tokens: batch · length; the batch is at least 1.
        backward: forward and backward as well as forward alone.
        gates: a kind of :mod:`gape.bench.inputs`.
        eps: weight that may be dropped.
        errors: whether errors against float64 are measured too.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    KNOWN: ClassVar[Sequence[str]] = tuple(CANDIDATES)

    impls: Sequence[str] = DEFAULT
    lengths: Sequence[int] = (4096, 16384, 65536)
    tokens: int = 65536
    backward: bool = False
    gates: str = "log-normal"
    eps: float = 0.0
    errors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("tokens", self.tokens)
        if self.gates not in GATES:
            raise invalid_argument("gates", self.gates, f"one of {list(GATES)}")
        weight("eps", self.eps)

    def shape(self, length: int) -> Shape:
        """Sizes at one length."""
        batch = max(1, self.tokens // length)
        return Shape(batch=batch, heads=self.heads, kv_heads=self.kv_heads, length=length, dim=self.dim)


def measure(settings: Settings, stamp: rows.Row, say: Callable[[str], None]) -> Iterator[rows.Row]:
    """Rows as they come; `say` hears why a candidate gave none."""
    for length in settings.lengths:
        shape = settings.shape(length)
        arguments = draw(shape, settings.gates, settings.torch_dtype, settings.device)
        for impl in settings.impls:
            with on_its_own(impl, length, say):
                work = CANDIDATES[impl](arguments, settings.eps)
                for direction in ("forward", "both")[: 1 + settings.backward]:
                    yield stamp | _one(settings, shape, impl, work, direction)
            _release(settings.device)


def _one(settings: Settings, shape: Shape, impl: str, work: Work, direction: str) -> rows.Row:
    """The figures of one candidate in one direction."""
    backward = direction == "both"
    timing = measured(work.step(backward=backward), settings.device, seconds=settings.seconds)
    operations = flops(shape) * (BOTH if backward else 1)
    found = against_float64(work, backward=backward) if settings.errors else {}
    visited = tiles_visited(impl, work.leaves, settings.eps)
    figures = {
        "gates": settings.gates,
        "impl": impl,
        "direction": direction,
        "dtype": settings.dtype,
        "eps": f"{settings.eps:g}",
        "ms": rows.number(timing.ms),
        "tflops": rows.number(operations / timing.ms / 1e9),
        "peak_mib": rows.number(timing.peak_mib, 5),
        "tiles": rows.number(visited, 3),
    }
    sizes = {name: str(getattr(shape, name)) for name in ("batch", "heads", "kv_heads", "length", "dim")}
    return figures | sizes | {name: rows.number(value, 3) for name, value in found.items()}


def flops(shape: Shape) -> float:
    """Operations of a causal forward pass."""
    return 4 * shape.batch * shape.heads * shape.length**2 / 2 * shape.dim


def tiles_visited(impl: str, arguments: Arguments, eps: float) -> float | None:
    """The fraction of the causal tiles that an implementation visits; None where it does not skip."""
    if not eps or impl not in VISITED:
        return None
    return VISITED[impl](arguments, eps)


def _flex_visited(arguments: Arguments, eps: float) -> float:
    from gape.ops import flex  # noqa: PLC0415

    return flex.visited(problem(arguments), eps)


def _triton_visited(arguments: Arguments, eps: float) -> float:
    from gape.ops.triton import attention  # noqa: PLC0415

    with torch.no_grad():
        return float(attention.answer(problem(arguments), eps).visited)


#: How to ask an implementation what it visits.
VISITED: dict[str, Callable[[Arguments, float], float]] = {"flex": _flex_visited, "triton": _triton_visited}


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
