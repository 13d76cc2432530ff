"""How fast, how large and how exact attention with the gated bias is, beside other kernels.

Batch times length is kept, as a training step would. Operations are counted for the causal half: 4·B·H·N²/2·d forward,
3.5 times that forward and backward.

    auto, reference, rank2, split, triton   the operator, by `impl`
    split-kept       split within the head dim: six coordinates fewer for content, as a layer with reserve=6 has it
    flex-score-mod   FlexAttention, the gated bias as a score_mod with captured gates
    flex-causal, sdpa-cudnn, sdpa-flash     plain causal attention
    fla              forgetting attention of flash-linear-attention (pip install fla-core)
    fox              the official kernel of the Forgetting Transformer (its package is forgetting_transformer)

The last two have a bias of their own kind, one number per key and head, and no float64 to compare with here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import cases
import common
import gape
from cases import GATES
from common import UnavailableError, number
from gape.cli.options import Device, Dim, DType, Heads, KVHeads
from gape.experiments import operator_calls as calls
from gape.experiments.operator_calls import CONTEXT_LENGTH, Arguments, Shape, Work
from gape.ops import available_implementations, columns
from gape.utils.timing import measure_time
from gape.utils.validation import invalid_argument, weight, whole

Builder = Callable[[Arguments, float], Work]

#: Queries and keys of a tile of FlexAttention.
TILE = 128


def _operator(impl: str) -> Builder:
    return lambda arguments, eps: calls.operator(arguments, impl, eps)


def _plain(backend: SDPBackend) -> Builder:
    return lambda arguments, eps: cases.plain(arguments, [backend], is_causal=True)


def _split_kept(arguments: Arguments, eps: float) -> Work:
    dim = arguments["q"].size(-1)
    if dim <= columns.COLUMNS:
        raise UnavailableError(f"head dim {dim} leaves nothing beside {columns.COLUMNS} coordinates")
    content = {name: arguments[name][..., : dim - columns.COLUMNS].contiguous() for name in "qk"}
    scale = dim**-0.5
    forward = partial(calls.attended, scale=scale, impl="split")
    return Work(leaves=arguments | content, forward=forward, scale=scale)


def _flex(arguments: Arguments, eps: float, *, biased: bool) -> Work:
    pairs = _causal_tiles(arguments["q"].size(2), arguments["q"].device)
    # Each case is compiled for its own sizes. A CPU takes the dense form: a kernel would compile for a minute.
    torch.compiler.reset()
    attend = torch.compile(flex_attention, backend="inductor" if arguments["q"].is_cuda else "eager")
    scale = arguments["q"].size(-1) ** -0.5
    groups = arguments["q"].size(1) // arguments["k"].size(1)

    def forward(leaves: Arguments) -> Tensor:
        score_mod = None
        if biased:
            rate = leaves["amplitude"][:, None] * leaves["gate"] / CONTEXT_LENGTH
            exposure = 1 - leaves["landmark"]

            def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return score - rate[b, h, i] * exposure[b, h // groups, j] * (i - j)

        out: Tensor = attend(
            leaves["q"], leaves["k"], leaves["v"], score_mod=score_mod, block_mask=pairs, scale=scale,
            enable_gqa=groups > 1,
        )  # fmt: skip
        return out

    return Work(leaves=arguments if biased else _content(arguments), forward=forward)


def _causal_tiles(length: int, device: torch.device) -> BlockMask:
    """The lower triangle in tiles: the diagonal ones in part, those below it whole. No N × N mask is made."""
    index = torch.arange(-(-length // TILE), device=device, dtype=torch.int32)
    one, row = torch.ones_like(index), index.expand(len(index), -1)
    return BlockMask.from_kv_blocks(
        one[None, None], row.mT[None, None], index[None, None], row[None, None], BLOCK_SIZE=TILE,
        mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(length, length),
    )  # fmt: skip


def _fla(arguments: Arguments, eps: float) -> Work:
    _needs("fla", "pip install fla-core", arguments)
    from fla.ops.forgetting_attn import parallel_forgetting_attn  # noqa: PLC0415

    leaves = _token_first(arguments)
    return Work(leaves=leaves, forward=lambda x: parallel_forgetting_attn(*x.values()), exact=False)


def _fox(arguments: Arguments, eps: float) -> Work:
    _needs("forgetting_transformer", "pip install git+https://github.com/zhixuan-lin/forgetting-transformer", arguments)
    from forgetting_transformer import forgetting_attention  # noqa: PLC0415

    leaves = _token_first(arguments)
    groups = leaves["q"].size(2) // leaves["k"].size(2)
    leaves |= {name: leaves[name].repeat_interleave(groups, dim=2) for name in "kv"}
    return Work(leaves=leaves, forward=lambda x: forgetting_attention(*x.values()), exact=False)


def _content(arguments: Arguments) -> Arguments:
    return {name: arguments[name] for name in "qkv"}


def _token_first(arguments: Arguments) -> Arguments:
    """q, k, v as (B, N, H, D), and the logarithm of a forget gate per token and query head, float32 (B, N, Hq)."""
    leaves = {name: x.transpose(1, 2).contiguous() for name, x in _content(arguments).items()}
    g = torch.Generator(arguments["q"].device).manual_seed(1)
    logits = torch.randn(leaves["q"].shape[:3], generator=g, device=arguments["q"].device)
    return leaves | {"decay": F.logsigmoid(logits + 4)}


def _needs(package: str, install: str, arguments: Arguments) -> None:
    if find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed: {install}")
    if not arguments["q"].is_cuda:
        raise UnavailableError("needs a CUDA device")


#: Every candidate by name; those with the gated bias come first.
CANDIDATES: dict[str, Builder] = {
    name: _operator(name) for name in ("auto", *available_implementations()) if name != "decode"
} | {
    "split-kept": _split_kept,
    "flex-score-mod": partial(_flex, biased=True),
    "flex-causal": partial(_flex, biased=False),
    "sdpa-cudnn": _plain(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": _plain(SDPBackend.FLASH_ATTENTION),
    "fla": _fla,
    "fox": _fox,
}

ERRORS = ("error", "dq", "dk", "dv", "dgate", "dlandmark", "damplitude")
FIELDS = (
    *common.STAMP, "gates", "impl", "direction", "dtype", "batch", "heads", "kv_heads", "length", "dim", "eps",
    "ms", "tflops", "peak_mib", "tiles", *ERRORS,
)  # fmt: skip
SHOWN = (
    "impl", "direction", "heads", "kv_heads", "length", "dim", "ms", "tflops", "peak_mib", "tiles", "error", "dgate",
)  # fmt: skip

#: Times the operations of the forward pass that forward and backward together take.
BOTH = 3.5


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured, beside the sizes.

    Attributes:
        shapes: sizes of the cases; where there are none, they are made of lengths, tokens, heads and dim.
        tokens: batch · length; the batch is at least 1.
        backward: forward and backward as well as forward alone.
        gates: a kind of :mod:`cases`.
        eps: weight that may be dropped.
        errors: whether errors against float64 are measured too.
    """

    KNOWN: ClassVar[Sequence[str]] = tuple(CANDIDATES)
    # The definition is quadratic, and the paper's form wrong in half precision.
    DEFAULT: ClassVar[Sequence[str]] = tuple(x for x in CANDIDATES if x not in ("auto", "reference", "rank2"))

    shapes: Sequence[Shape]
    tokens: int
    backward: bool
    gates: str
    eps: float
    errors: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("tokens", self.tokens)
        if self.gates not in GATES:
            raise invalid_argument("gates", self.gates, f"one of {list(GATES)}")
        weight("eps", self.eps)

    def cases(self) -> Sequence[Shape]:
        """The sizes of every case."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim}
        return self.shapes or [Shape(batch=max(1, self.tokens // n), length=n, **sizes) for n in self.lengths]


def parse_shapes(text: str | None) -> list[Shape]:
    """Sizes as they are typed: BxHqxHkxNxD, several with commas.

    Raises:
        ValueError: other than five whole numbers of at least 1, or key heads that do not divide query heads.
    """
    shapes = []
    for part in text.split(",") if text else ():
        sizes = [int(size) if size.isdecimal() else 0 for size in part.strip().split("x")]
        if len(sizes) != 5 or min(sizes) < 1 or sizes[1] % sizes[2]:
            raise invalid_argument("shapes", part, "BxHqxHkxNxD, whole numbers, Hk a divisor of Hq: 4x16x16x16384x64")
        batch, heads, kv_heads, length, dim = sizes
        shapes.append(Shape(batch=batch, heads=heads, kv_heads=kv_heads, length=length, dim=dim))
    return shapes


def measure(settings: Settings, stamp: common.Row, log: Callable[[str], None]) -> Iterator[common.Row]:
    """Rows as they come; `log` is called with the reason where a candidate gives none."""
    for shape in settings.cases():
        arguments = calls.draw(shape, settings.torch_dtype, settings.device, GATES[settings.gates])
        for impl in settings.impls:
            with common.isolate(impl, shape.length, log):
                work = CANDIDATES[impl](arguments, settings.eps)
                for direction in ("forward", "both")[: 1 + settings.backward]:
                    yield stamp | _one(settings, shape, impl, work, direction)
            if settings.device.type == "cuda":
                torch.cuda.empty_cache()


def _one(settings: Settings, shape: Shape, impl: str, work: Work, direction: str) -> common.Row:
    """The figures of one candidate in one direction."""
    backward = direction == "both"
    timing = measure_time(work.step(backward=backward), settings.device, seconds=settings.seconds)
    operations = flops(shape) * (BOTH if backward else 1)
    errors = calls.against_float64(work, backward=backward) if settings.errors else {}
    figures = {
        "gates": settings.gates,
        "impl": impl,
        "direction": direction,
        "dtype": settings.dtype,
        "eps": f"{settings.eps:g}",
        "ms": number(timing.ms),
        "tflops": number(operations / timing.ms / 1e9),
        "peak_mib": number(timing.peak_mib, 5),
        "tiles": number(_visited_share(work.leaves, settings.eps) if impl == "triton" and settings.eps else None, 3),
    }
    return figures | shape.row() | {name: number(value, 3) for name, value in errors.items()}


def flops(shape: Shape) -> float:
    """Operations of a causal forward pass."""
    return 4 * shape.batch * shape.heads * shape.length**2 / 2 * shape.dim


@torch.no_grad()
def _visited_share(arguments: Arguments, eps: float) -> float:
    """The fraction of the causal tiles that the skipping kernel visits."""
    options: dict[str, Any] = {**arguments, "context_length": CONTEXT_LENGTH, "impl": "triton", "eps": eps}
    return float(gape.detailed_attention(**options).visited)


def main(
    lengths: common.Lengths = "4096,16384,65536",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    tokens: common.Tokens = 65536,
    shapes: Annotated[
        str | None, typer.Option(metavar="BxHqxHkxNxD,…", help="Sizes, in place of lengths, tokens, heads and dim.")
    ] = None,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    impl: common.Impl = None,
    backward: common.Backward = False,
    gates: Annotated[str, typer.Option(help=f"How gates are drawn: {', '.join(GATES)}.")] = "log-normal",
    eps: Annotated[float, typer.Option(help="Share of its attention a query may lose; 0 skips nothing.")] = 0.0,
    errors: Annotated[bool, typer.Option("--errors/--no-errors", help="Also measure errors against float64.")] = True,
    seconds: common.Seconds = 1.0,
    device: Device = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Time attention with the gated bias, and the kernels it stands beside."""
    settings = Settings.from_options(
        lengths=lengths, dim=dim, dtype=dtype, tokens=tokens, shapes=parse_shapes(shapes), heads=heads,
        kv_heads=kv_heads, impl=impl, backward=backward, gates=gates, eps=eps, errors=errors, seconds=seconds,
        device=device,
    )  # fmt: skip
    common.benchmark("attention", FIELDS, measure, settings, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
