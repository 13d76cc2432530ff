"""The operator with a few queries and many keys: time, and the share of the memory's speed that is reached.

Keys and values are read once, so their bytes over the time is the bandwidth; a plain copy of a large buffer, timed in
the same process, is what it stands beside. Queries are the last tokens. `generate.py` times generation.

    decode           the decode kernel: plain keys and a landmark per key
    split, triton    the operator as for many queries
    sdpa, sdpa-cudnn, sdpa-flash   the same keys without any bias
    …-graph          the same, captured once and replayed

`of_sdpa` is a time over that of `sdpa` (of `sdpa-graph` for what is captured), where it was measured before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend

import cases
import common
from common import UnavailableError, number
from gape.cli.options import Device, Dim, DType, Heads, KVHeads
from gape.experiments import operator_calls as calls
from gape.experiments.operator_calls import Arguments, Shape, Work
from gape.utils.timing import measure_time
from gape.utils.validation import whole

FIELDS = (
    *common.STAMP, "impl", "dtype", "batch", "heads", "kv_heads", "queries", "length", "dim",
    "ms", "gbps", "copy_gbps", "of_copy", "peak_mib", "error", "of_sdpa",
)  # fmt: skip
SHOWN = ("impl", "length", "batch", "ms", "gbps", "of_copy", "of_sdpa", "peak_mib", "error")

Builder = Callable[[Arguments], Work]


def _operator(impl: str) -> Builder:
    return partial(calls.operator, impl=impl)


def _sdpa(*backends: SDPBackend) -> Builder:
    def build(arguments: Arguments) -> Work:
        if arguments["q"].size(2) > 1:
            raise UnavailableError("several queries would need a mask")
        return cases.plain(arguments, backends, is_causal=False)

    return build


def _captured(build: Builder) -> Builder:
    """The same candidate as a CUDA graph, which has no launches to wait for."""

    def capture(arguments: Arguments) -> Work:
        if not arguments["q"].is_cuda:
            raise UnavailableError("needs a CUDA device")
        work = build(arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            # Kernels are compiled before, not while capturing.
            work.forward(work.leaves)
            with torch.cuda.graph(graph):
                out = work.forward(work.leaves)

        def replay(leaves: Arguments) -> Tensor:
            graph.replay()
            return out

        return replace(work, forward=replay)

    return capture


ANY = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

#: What is timed, by name.
CANDIDATES: dict[str, Builder] = {
    # What others are compared with comes first.
    "sdpa": _sdpa(*ANY),
    "sdpa-graph": _captured(_sdpa(*ANY)),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "decode": _operator("decode"),
    "decode-graph": _captured(_operator("decode")),
    "split": _operator("split"),
    "triton": _operator("triton"),
}

#: Candidates that read a landmark per key beside the keys.
READS_LANDMARKS = ("decode", "decode-graph", "split", "triton")


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured, beside the sizes; `lengths` are those of the cache, the new tokens among them.

    Attributes:
        batch: samples.
        queries: new tokens of each.
    """

    KNOWN: ClassVar[Sequence[str]] = tuple(CANDIDATES)
    DEFAULT: ClassVar[Sequence[str]] = KNOWN

    batch: int
    queries: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("batch", self.batch)
        whole("queries", self.queries)
        whole("lengths", min(self.lengths), at_least=self.queries)


def measure(settings: Settings, stamp: common.Row, log: Callable[[str], None]) -> Iterator[common.Row]:
    """Rows as they come; `log` is called with the reason where a candidate gives none."""
    copied = common.copy_gbps(settings.device)
    for length in settings.lengths:
        shape = Shape(
            batch=settings.batch, heads=settings.heads, kv_heads=settings.kv_heads, length=length, dim=settings.dim,
            queries=settings.queries,
        )  # fmt: skip
        arguments = calls.draw(shape, settings.torch_dtype, settings.device)
        times: dict[str, float] = {}
        for impl in settings.impls:
            with common.isolate(impl, length, log):
                nbytes = cache_bytes(arguments, landmarks=impl in READS_LANDMARKS)
                yield stamp | _one(settings, shape, impl, CANDIDATES[impl](arguments), nbytes, copied, times)


def _one(
    settings: Settings, shape: Shape, impl: str, work: Work, nbytes: int, copied: float, times: dict[str, float]
) -> common.Row:
    """The figures of one candidate; `times` keeps those that others are compared with."""
    timing = measure_time(work.step(backward=False), settings.device, seconds=settings.seconds)
    times[impl] = timing.ms
    plain = times.get("sdpa-graph" if impl.endswith("-graph") else "sdpa")
    gbps = nbytes / timing.ms / 1e6
    figures = {
        "impl": impl,
        "dtype": settings.dtype,
        "queries": str(settings.queries),
        "ms": number(timing.ms),
        "gbps": number(gbps),
        "copy_gbps": number(copied),
        "of_copy": number(gbps / copied, 3),
        "peak_mib": number(timing.peak_mib, 5),
        "error": number(calls.against_float64(work, backward=False)["error"], 3),
        "of_sdpa": number(None if plain is None else timing.ms / plain),
    }
    return figures | shape.row()


def cache_bytes(arguments: Arguments, *, landmarks: bool) -> int:
    """Bytes of the cache: keys, values, and the landmarks where they lie beside the keys."""
    read = [arguments[name] for name in (("k", "v", "landmark") if landmarks else ("k", "v"))]
    return sum(x.numel() * x.element_size() for x in read)


def main(
    lengths: common.Lengths = "65536,131072",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    batch: Annotated[int, typer.Option(help="Samples at once.")] = 1,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    queries: Annotated[int, typer.Option(help="New tokens per sample.")] = 1,
    impl: common.Impl = None,
    seconds: common.Seconds = 0.5,
    device: Device = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Time a few queries against a long cache, beside the speed of memory."""
    settings = Settings.from_options(
        lengths=lengths, dim=dim, dtype=dtype, batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, impl=impl,
        seconds=seconds, device=device,
    )  # fmt: skip
    common.benchmark("decode", FIELDS, measure, settings, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
