"""What `gape doctor --tune` does: measure what `impl="auto"` chooses among on this machine, and store the rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

import gape
from gape.experiments.dispatch_rules import GATE_GRADIENTS, Row, rules
from gape.experiments.operator_calls import Shape, Work, against_float64, draw, operator
from gape.ops import dispatch, limits
from gape.utils import files, run_info
from gape.utils.progress import Progress, ProgressTable
from gape.utils.timing import measure_time

#: The portable choice in half precision, and the kernel that may be faster.
IMPLS = ("split", "triton")
#: Half precision is what table and portable choice differ in.
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 96, 128, 256)
LENGTHS = (1024, 4096, 16384)
#: Tokens of a call in all: few enough for a small GPU, and enough to keep a large one busy.
TOKENS, HEADS = 16384, 16
#: About how long each direction of a call is timed.
SECONDS = 0.3


def tune(
    device: torch.device,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[int] = LENGTHS,
    dtypes: Sequence[str] = DTYPES,
    tokens: int = TOKENS,
    heads: int = HEADS,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Path | None:
    """Measure on a device and write its table, at the end and at once; the next process reads it.

    Args:
        device: where; on a CPU there is nothing to choose by it, but the way is the same.
        head_dims, lengths, dtypes: of the calls; a rule holds up to its head dim and from its length on.
        tokens: of a call in all, batch times length; one sequence is taken whole.
        heads: query heads, and as many key heads.
        seconds: about how long each direction of a call is timed.
        progress: where each measurement is a line.

    Returns:
        The table's file; None where nothing could be measured, and nothing is written.

    Raises:
        ImportError: Triton is not installed.
        BusyError: another process measures.
        OSError: the cache directory cannot be written.
    """
    if not limits.HAS_TRITON:
        raise ImportError("tune: there is nothing to compare split with: pip install triton")
    progress, stamp = progress or Progress(), run_info.stamp(device)
    path = dispatch.local_table(stamp["device"])
    # Found out before, not after minutes of work.
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = [
        Shape(batch=max(1, tokens // length), heads=heads, kv_heads=heads, length=length, dim=dim)
        for dim, length in product(head_dims, lengths)
    ]
    with files.locked(path.parent, "measured"):
        table = rules(_measure(shapes, dtypes, device, seconds, progress), here=True)
        if not table:
            return None
        writer = f"`gape doctor --tune` (gape {gape.__version__}, torch {stamp['torch']}, triton {stamp['triton']})"
        files.replace(path, dispatch.to_toml(table, writer).encode())
    return path


def _measure(
    shapes: Sequence[Shape], dtypes: Sequence[str], device: torch.device, seconds: float, progress: Progress
) -> Iterator[Row]:
    """A row for each call, implementation and direction; what fails has no time, and the others go on."""
    calls = list(product(dtypes, shapes, IMPLS))
    with ProgressTable(progress, unit="call") as shown:
        for number, (dtype, shape, impl) in enumerate(calls):
            call = f"{dtype}, head dim {shape.dim}, {shape.length:,} tokens, {impl}"
            shown.show("tune", number, len(calls), call)
            same = {"device": run_info.device_name(device), "dtype": dtype, "gates": "log-normal", "eps": "0"}
            figures = {"forward": {"ms": "inf", "error": ""}, "both": {"ms": "inf", "error": ""}}
            try:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                work = operator(draw(shape, getattr(torch, dtype), device), impl)
                for direction in figures:
                    figures[direction] = _figures(work, device, seconds, backward=direction == "both")
                progress.log(f"{call}: {_line(*figures.values())}")
            except Exception as error:
                # No memory, no backend, a kernel that does not compile: the other implementation has to do.
                reason = (str(error).strip() or "no message").splitlines()[0]
                progress.log(f"{call}: failed, {type(error).__name__}: {reason}")
            for direction, values in figures.items():
                yield same | shape.row() | {"impl": impl, "direction": direction} | values


def _line(forward: Row, both: Row) -> str:
    """What was measured of a call, in words."""
    gates = max(float(both[name]) for name in GATE_GRADIENTS)
    times = f"{forward['ms']} ms forward, {both['ms']} ms forward and backward"
    return f"{times}; error {forward['error']}, of gate gradients {gates:.3g}"


def _figures(work: Work, device: torch.device, seconds: float, *, backward: bool) -> Row:
    """Time, memory and errors of one direction."""
    timing = measure_time(work.step(backward=backward), device, seconds=seconds)
    errors = against_float64(work, backward=backward)
    memory = {} if timing.peak_mib is None else {"peak_mib": f"{timing.peak_mib:.5g}"}
    return {"ms": f"{timing.ms:.4g}"} | memory | {name: f"{error:.3g}" for name, error in errors.items()}
