"""How long something takes and how much memory it needs: medians, caches emptied in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

#: Bytes written between two runs, so that none finds its inputs in the cache of the device.
FLUSH_BYTES = 256 * 2**20

#: Cycles of the device in a second, at most. Before a run the device sleeps for as long as the host needs to launch it,
#: so that the time of the host is not measured.
CYCLES_PER_SECOND = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measurement.

    Attributes:
        ms: median time of a run in milliseconds.
        peak_mib: memory beyond what was allocated before, MiB; None on a CPU.
    """

    ms: float
    peak_mib: float | None


def measure_time(
    work: Callable[[], Any], device: torch.device, *, seconds: float = 1.0, least: int = 5, most: int = 100
) -> Timing:
    """The median time of `work` on a device and its peak memory, after runs that warm everything up.

    It goes on for about so many seconds, within `least` and `most` runs.
    """
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    peak = peak_mib(work, device)
    begin = time.perf_counter()
    work()
    head_start = 1.5 * (time.perf_counter() - begin) + 1e-4
    one = _once(work, device, head_start)
    runs = max(least, min(most, int(seconds * 1000 / max(one, 1e-3))))
    return Timing(ms=median(_once(work, device, head_start) for _ in range(runs)), peak_mib=peak)


def peak_mib(work: Callable[[], Any], device: torch.device) -> float | None:
    """Memory that a run needs beyond what is allocated already, in MiB; None on a CPU, where it is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


_flush: dict[torch.device, torch.Tensor] = {}


def _once(work: Callable[[], Any], device: torch.device, head_start: float) -> float:
    """Milliseconds of one run with cold caches; the host is `head_start` seconds ahead of the device."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1000
    if device not in _flush:
        _flush[device] = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    torch.cuda._sleep(int(head_start * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    _flush[device].zero_()
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize(device)
    return float(begin_event.elapsed_time(end_event))
