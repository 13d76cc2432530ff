"""What comes before attention: turning q and k, reading the gates, writing the bias's coordinates.

q, k and v are views of one projection, as a layer has them. With gates the head dim is kept: six coordinates fewer for
content, and gaps for them in q and k, as the fused pass takes them. Alone, a pass stands beside a plain copy; together
with attention, beside RoPE.

copy                           q and k copied in one piece, which nothing that reads and writes them beats by much
fused-gape, fused-rope         one pass over memory by Triton; the second is the same with gates off
compiled-gape, compiled-rope   the steps in torch, compiled
steps-gape, steps-rope         the steps in torch, one by one
…+attention                    followed by attention, on cuDNN where there is a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import common
from cases import CONTEXT_LENGTH, QUERIES, Arguments, Shape, attended, relative, sample
from common import UnavailableError, number
from gape.cli.options import Device, Dim, DType, Heads, KVHeads
from gape.ops import columns, prologue, sdpa
from gape.ops.columns import significand_bits
from gape.ops.inputs import Visibility
from gape.utils.timing import measure_time
from gape.utils.validation import invalid_argument, whole

FIELDS = (
    *common.STAMP, "impl", "direction", "dtype", "batch", "heads", "kv_heads", "length", "dim",
    "ms", "gbps", "copy_gbps", "of_copy", "of_fused_rope", "of_compiled_rope", "peak_mib", "error",
)  # fmt: skip
SHOWN = ("impl", "direction", "length", "ms", "of_copy", "of_fused_rope", "of_compiled_rope", "peak_mib", "error")

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's inputs.

    Attributes:
        shape: sizes, `dim` that of the whole head.
        leaves: "q", "k" and "v", (B, H, N, dim) as views of one projection, and with gates their weights and biases.
        angles: cosines and sines, (N, content / 2) each, padded to a multiple of eight columns as a layer's are.
        gated: whether there are gates, and six coordinates fewer for content.
    """

    shape: Shape
    leaves: Arguments
    angles: Pair
    gated: bool

    @property
    def content(self) -> int:
        """Coordinates of q and k."""
        return self.shape.dim - columns.COLUMNS * self.gated

    @property
    def scale(self) -> float:
        """The softmax scale, that of the whole head."""
        return float(self.shape.dim**-0.5)

    def reading(self, leaves: Arguments) -> prologue.GateReading | None:
        """The gates as the fused pass takes them."""
        if not self.gated:
            return None
        weights = {name: x for name, x in leaves.items() if name not in "qkv"}
        floor = torch.zeros(self.shape.heads, device=leaves["q"].device)
        return prologue.GateReading(**weights, floor=floor, context_length=CONTEXT_LENGTH)


def layer(shape: Shape, dtype: torch.dtype, device: torch.device, *, gated: bool) -> Layer:
    """Random inputs; gates as they are early in training, none zero."""
    g = torch.Generator(device).manual_seed(0)
    content = shape.dim - columns.COLUMNS * gated
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    sizes = [h * shape.dim for h in heads]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    parts = normal(shape.batch, shape.length, sum(sizes)).to(dtype).split(sizes, dim=-1)  # type: ignore[no-untyped-call]
    views = (x.unflatten(-1, (h, shape.dim)).transpose(1, 2) for x, h in zip(parts, heads, strict=True))
    leaves = dict(zip("qkv", views, strict=True))
    if gated:
        leaves |= {
            "gate_weight": normal(shape.heads, content) * content**-0.5,
            "gate_bias": normal(shape.heads) - 1,
            "landmark_weight": normal(shape.kv_heads, content) * content**-0.5,
            "landmark_bias": normal(shape.kv_heads),
            "amplitude": 1 + normal(shape.heads).abs(),
        }
    frequency = 10_000 ** (-torch.arange(0, content, 2, device=device) / content)
    padded = F.pad(frequency, (0, -len(frequency) % 8))
    angle = torch.arange(shape.length, device=device)[:, None] * padded
    return Layer(shape=shape, leaves=leaves, angles=(angle.cos(), angle.sin()), gated=gated)


def turned(x: Tensor, angles: Pair) -> Tensor:
    """x (B, H, N, D) with pair (m, m + D/2) turned by its angle, in float32 inside."""
    pairs = x.size(-1) // 2
    cos, sin = (a[:, :pairs].to(torch.promote_types(x.dtype, torch.float32)) for a in angles)
    one, other = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1).to(x.dtype)


def gates(q: Tensor, k: Tensor, reading: prologue.GateReading) -> Pair:
    """Gate (B, Hq, N) and landmark (B, Hk, N) by their definition."""
    wide = torch.promote_types(q.dtype, torch.float32)
    read = torch.einsum("bhnd,hd->bhn", q.to(wide), reading.gate_weight.to(wide)) + reading.gate_bias[:, None]
    marked = torch.einsum("bhnd,hd->bhn", k.to(wide), reading.landmark_weight.to(wide)) + reading.landmark_bias[:, None]
    return F.softplus(read) + reading.floor[:, None], torch.sigmoid(marked)


def compact(x: Tensor, reading: prologue.GateReading | None) -> Tensor:
    """The content of x (B, H, N, dim), without the gaps that it has with gates."""
    if reading is None:
        return x
    low, edge = reading.gate_weight.size(1) // 2, x.size(-1) // 2
    return torch.cat([x[..., :low], x[..., edge : edge + low]], dim=-1)


def filled(content: Tensor, bias: Tensor) -> Tensor:
    """Content and the bias's six coordinates in the order of the fused pass."""
    one, other = content.chunk(2, dim=-1)
    return torch.cat([one, bias[..., :3], other, bias[..., 3:]], dim=-1)


def by_steps(q: Tensor, k: Tensor, angles: Pair, reading: prologue.GateReading | None, scale: float) -> Pair:
    """What the fused pass gives, by torch."""
    q, k = compact(q, reading), compact(k, reading)
    turned_q, turned_k = turned(q, angles), turned(k, angles)
    if reading is None:
        return turned_q, turned_k
    gate, landmark = gates(q, k, reading)
    where, bits = torch.arange(q.size(2), device=q.device) - q.size(2) // 2, significand_bits(q)
    rate = reading.amplitude[:, None] * gate / reading.context_length
    q_columns = columns.query_columns(rate, [where], scale, q.dtype, bits)
    k_columns = columns.key_columns(1 - landmark, [where], k.dtype, bits)
    return filled(turned_q, q_columns), filled(turned_k, k_columns)


def fused(q: Tensor, k: Tensor, angles: Pair, reading: prologue.GateReading | None, scale: float) -> Pair:
    """The fused pass."""
    return prologue.prologue(q, k, angles, reading, scale=scale)


Prepare = Callable[[Tensor, Tensor, Pair, prologue.GateReading | None, float], Pair]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to get ready.

    Attributes:
        prepare: from q and k to what attention takes.
        gated: with gates.
        attends: whether attention follows.
        learns: whether there is a way back through it.
        needs: a reason why it cannot run for tensors like the one given, or None.
    """

    prepare: Prepare
    gated: bool
    attends: bool
    learns: bool = True
    needs: Callable[[Tensor], str | None] = lambda x: None

    def forward(self, layer: Layer) -> Callable[[Arguments], tuple[Tensor, ...]]:
        """The candidate as a function of the leaves."""

        def run(leaves: Arguments) -> tuple[Tensor, ...]:
            q, k, v = (leaves[name] for name in "qkv")
            ready = self.prepare(q, k, layer.angles, layer.reading(leaves), layer.scale)
            if not self.attends:
                return ready
            visibility = Visibility(n_q=q.size(2), n_k=k.size(2), device=q.device)
            with _on_cudnn(q):
                return (sdpa.prepare(*ready, v, visibility, layer.scale).run(),)

        return run


class Copy(Candidate):
    """As many bytes as q and k have, from one buffer to another: what a pass of this size can reach."""

    def forward(self, layer: Layer) -> Callable[[Arguments], tuple[Tensor, ...]]:
        """The copy; the leaves only say how much."""
        source = torch.cat([layer.leaves[name].flatten() for name in "qk"])
        target = torch.empty_like(source)
        return lambda leaves: (target.copy_(source),)


def _on_cudnn(x: Tensor) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if x.is_cuda else nullcontext()


def _fused_needs(x: Tensor) -> str | None:
    return (
        None if prologue.ready(x.device, x.dtype) else "the fused pass needs half precision, Triton and a CUDA device"
    )


@cache
def _by_compiled_steps() -> Prepare:
    compiled: Prepare = torch.compile(by_steps, dynamic=False)
    return compiled


def compiled_steps(q: Tensor, k: Tensor, angles: Pair, reading: prologue.GateReading | None, scale: float) -> Pair:
    """The steps, compiled at their first use: the compiler takes seconds to import."""
    return _by_compiled_steps()(q, k, angles, reading, scale)


def _ways() -> dict[str, Candidate]:
    ways: dict[str, tuple[Prepare, Callable[[Tensor], str | None]]] = {
        "fused": (fused, _fused_needs),
        "compiled": (compiled_steps, lambda x: None),
        "steps": (by_steps, lambda x: None),
    }
    # RoPE first, and what follows it beside it.
    return {"copy": Copy(prepare=by_steps, gated=False, attends=False, learns=False)} | {
        f"{way}-{kind}{tail}": Candidate(prepare=prepare, gated=kind == "gape", attends=bool(tail), needs=needs)
        for tail in ("", "+attention")
        for kind in ("rope", "gape")
        for way, (prepare, needs) in ways.items()
    }


CANDIDATES = _ways()

#: What candidates with attention are compared with, by column.
BASELINES = {"of_fused_rope": "fused-rope+attention", "of_compiled_rope": "compiled-rope+attention"}


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured, beside the sizes.

    Attributes:
        tokens: batch · length; the batch is at least 1.
        backward: forward and backward as well as forward alone.
    """

    DTYPES: ClassVar = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    KNOWN: ClassVar[Sequence[str]] = tuple(CANDIDATES)
    DEFAULT: ClassVar[Sequence[str]] = tuple(name for name in CANDIDATES if not name.startswith("steps"))

    tokens: int
    backward: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("tokens", self.tokens)
        if self.dim % 2 or self.dim <= columns.COLUMNS:
            raise invalid_argument("dim", self.dim, f"an even number above {columns.COLUMNS}")


def measure(settings: Settings, stamp: common.Row, log: Callable[[str], None]) -> Iterator[common.Row]:
    """Rows as they come; `log` is called with the reason where a candidate gives none."""
    copied = common.copy_gbps(settings.device)
    for length in settings.lengths:
        shape = Shape(
            batch=max(1, settings.tokens // length), heads=settings.heads, kv_heads=settings.kv_heads, length=length,
            dim=settings.dim,
        )  # fmt: skip
        times: dict[tuple[str, str], float] = {}
        for impl in settings.impls:
            way = CANDIDATES[impl]
            given = layer(shape, settings.torch_dtype, settings.device, gated=way.gated)
            with common.isolate(impl, length, log):
                for direction in ("forward", "both")[: 1 + (settings.backward and way.learns)]:
                    figures = _one(settings, way, given, impl, direction, copied, times)
                    yield stamp | figures | {"impl": impl, "direction": direction, "dtype": settings.dtype}


def _one(
    settings: Settings, way: Candidate, given: Layer, impl: str, direction: str, copied: float,
    times: dict[tuple[str, str], float],
) -> common.Row:  # fmt: skip
    """The figures of one candidate in one direction; `times` keeps those that others are compared with."""
    why = way.needs(given.leaves["q"])
    if why is not None:
        raise UnavailableError(why)
    forward = way.forward(given)
    # Values do nothing before attention.
    learning = [name for name in given.leaves if way.attends or name != "v"] if direction == "both" else []
    timing = measure_time(_step(forward, given.leaves, learning), settings.device, seconds=settings.seconds)
    times[impl, direction] = timing.ms
    figures = {"ms": number(timing.ms), "peak_mib": number(timing.peak_mib, 5)}
    figures |= given.shape.row()
    if way.attends:
        for column, baseline in BASELINES.items():
            if (baseline, direction) in times:
                figures[column] = number(timing.ms / times[baseline, direction])
        return figures | {"error": number(error(given, forward), 3)}
    gbps = moved_bytes(given, direction) / timing.ms / 1e6
    return figures | {"gbps": number(gbps), "copy_gbps": number(copied), "of_copy": number(gbps / copied, 3)}


def _step(
    forward: Callable[[Arguments], tuple[Tensor, ...]], given: Arguments, learning: Sequence[str]
) -> Callable[[], object]:
    """What is timed: forward, and backward to the leaves named, if any."""
    leaves = {name: x.detach().requires_grad_(name in learning) for name, x in given.items()}
    if not learning:
        return torch.no_grad()(lambda: forward(leaves))
    cotangents = [torch.randn_like(x) for x in forward(leaves)]
    return lambda: torch.autograd.grad(forward(leaves), [leaves[name] for name in learning], cotangents)


def moved_bytes(given: Layer, direction: str) -> int:
    """Bytes that must move: q and k in and out; backward cotangents in, gradients out, and q and k again for gates."""
    s = given.shape
    once = s.batch * s.length * (s.heads + s.kv_heads) * s.dim * given.leaves["q"].element_size()
    return once * (2 if direction == "forward" else 4 + given.gated)


def error(given: Layer, forward: Callable[[Arguments], tuple[Tensor, ...]]) -> float:
    """Relative error of the attention's output against float64, at a sample of the queries of the first key head."""
    with torch.no_grad():
        (out,) = forward(given.leaves)
        groups = given.shape.heads // given.shape.kv_heads
        at = sample(given.shape.length, QUERIES).to(out.device)
        q, k, v = (given.leaves[name][:1].double() for name in "qkv")
        reading = None
        if given.gated:
            names = {"gate_weight": groups, "gate_bias": groups, "landmark_weight": 1, "landmark_bias": 1}
            part = {name: given.leaves[name][:count].double() for name, count in names.items()}
            amplitude = given.leaves["amplitude"][:groups].double()
            reading = prologue.GateReading(
                **part, amplitude=amplitude, floor=amplitude * 0, context_length=CONTEXT_LENGTH
            )
        q, k, v = compact(q[:, :groups], reading), compact(k[:, :1], reading), v[:, :1]
        angles = (given.angles[0].double(), given.angles[1].double())
        gate, landmark = q.new_zeros(q.shape[:3]), k.new_zeros(k.shape[:3])
        amplitude = q.new_ones(groups) if reading is None else reading.amplitude
        if reading is not None:
            gate, landmark = gates(q, k, reading)
        ready = {"q": turned(q, angles)[:, :, at], "k": turned(k, angles), "v": v, "gate": gate[:, :, at]}
        ready |= {"landmark": landmark, "amplitude": amplitude}
        exact = attended(ready, scale=given.scale, q_positions=at, impl="reference")
        return relative(out[:1, :groups, at], exact)


def main(
    lengths: common.Lengths = "4096,16384",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    tokens: common.Tokens = 16384,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    impl: common.Impl = None,
    backward: common.Backward = False,
    seconds: common.Seconds = 0.5,
    device: Device = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Time what makes q and k ready for attention, alone and together with it."""
    settings = Settings.from_options(
        lengths=lengths, dim=dim, dtype=dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, impl=impl,
        backward=backward, seconds=seconds, device=device,
    )  # fmt: skip
    common.benchmark("prologue", FIELDS, measure, settings, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
