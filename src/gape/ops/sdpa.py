"""The one door to `torch.nn.functional.scaled_dot_product_attention`.

Every call passes its scale, chooses widths and masks that a fused backend accepts, returns zeros for rows
that see nothing, and can say beforehand which backend will run.

Queries too far apart for coordinates go to the definition instead: :func:`exact_call`.

cuDNN plans anew for each new number of keys. Decoding has another number at each token, so calls with few
queries and no gradient go without cuDNN.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gape.ops import reference
from gape.ops.columns import UNIT
from gape.ops.inputs import Problem, Visibility, beside_heads, learning, readable
from gape.ops.limits import DECODE_QUERIES

log = logging.getLogger("gape.ops")

#: Queries handled at once where a mask tensor is needed, so that masks stay linear in the number of keys.
MASK_ROWS = 1024

#: Keys below which torch's kernel for a CPU may answer zeros where every logit of a row is not a number: those that a
#: vector of its processor holds.
VECTOR_KEYS = 16

#: Backends that keep a matrix of logits: torch's, and calls by the definition.
QUADRATIC = frozenset({"math", "reference"})


@dataclass(frozen=True, kw_only=True)
class Call:
    """One prepared call: tensors as the backend gets them, and how to read the answer.

    Attributes:
        q, k, v: (B, Hq, Nq, W), (B, Hk, Nk, W), (B, Hk, Nk, Wv).
        mask: bool or additive tensor broadcastable to (B, Hq, Nq, Nk), or None.
        kind: "full", "causal", "lower-right" or "dense", as in :class:`Visibility`.
        scale: the softmax scale.
        empty: bool, broadcastable to (B, Hq, Nq, 1), rows whose answer is zero; or None.
        value_width: coordinates of the answer that count.
        unplanned: whether cuDNN is left out.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    kind: str
    scale: float
    empty: Tensor | None
    value_width: int
    unplanned: bool = False

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        # A comparison of traced sizes is no bool until it is asked for one.
        return True if self.q.size(1) != self.k.size(1) else False  # noqa: SIM210

    @property
    def bare_triangle(self) -> bool:
        """Whether the lower-right triangle is described to the kernel instead of being drawn as a mask."""
        return self.kind == "lower-right" and self.mask is None

    def backend(self) -> str:
        """The backend torch would pick: "flash", "efficient", "cudnn", "math", or "unknown"."""
        if self.bare_triangle:
            return _lower_right_backend(self)
        choose = getattr(torch, "_fused_sdp_choice", None)
        if choose is None:
            return "unknown"
        with self._backends():
            choice = choose(
                self.q, self.k, self.v, self.mask, 0.0, self.kind == "causal", scale=self.scale, enable_gqa=self.grouped
            )
        return _NAMES.get(int(choice), "unknown")

    def run(self) -> Tensor:
        """The attention output, (B, Hq, Nq, value_width)."""
        if self.k.size(2) == 0:
            # Backends divide nothing by nothing; without keys every row sees nothing.
            return (self.q[..., :1] * 0).expand(-1, -1, -1, self.value_width)
        with self._backends():
            mask = _lower_right(self.q.size(2), self.k.size(2)) if self.bare_triangle else self.mask
            out = F.scaled_dot_product_attention(
                self.q, self.k, self.v, mask, is_causal=self.kind == "causal", scale=self.scale, enable_gqa=self.grouped
            )
        if out.requires_grad and out.is_cuda:
            out = SameLayout.apply(out)  # type: ignore[no-untyped-call]
        out = out[..., : self.value_width]
        if self.mask is None and not out.is_cuda and self.k.size(2) < VECTOR_KEYS:
            out = out + self._broken()
        return out if self.empty is None else out.masked_fill(self.empty, 0.0)

    def _broken(self) -> Tensor:
        """Zeros (B, Hq, Nq, 1), but not a number where a query or the first key, which all queries see, is not."""
        first = (self.k[:, :, :1] * 0).sum(-1, keepdim=True)
        return (self.q * 0).sum(-1, keepdim=True) + first.repeat_interleave(self.q.size(1) // self.k.size(1), dim=1)

    def _backends(self) -> AbstractContextManager[None]:
        return _without_cudnn() if self.unplanned else nullcontext()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """torch may pick any backend but cuDNN inside; where the caller allowed no other, that one stays."""
    if torch.compiler.is_compiling():
        # The one form that a compiler can trace; it is slow, and allows what the caller may have forbidden.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
        return
    flags: Any = torch.backends.cuda
    others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
    if not others or not flags.cudnn_sdp_enabled():
        yield
        return
    flags.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        flags.enable_cudnn_sdp(True)


class SameLayout(torch.autograd.Function):
    """A tensor as it is, whose gradient is laid out as the tensor.

    cuDNN's backward is planned for the layout of the gradient that came first, and torch runs that plan for any later
    call with the same q, k and v: a gradient laid out otherwise is read from the wrong places, and nothing is said.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The tensor."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Remember how it is laid out."""
        ctx.strides = inputs[0].stride()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient, copied where it is laid out otherwise."""
        sides = zip(grad.shape, grad.stride(), ctx.strides, strict=True)
        if all(size == 1 or given == wanted for size, given, wanted in sides):
            return grad
        return torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)


_NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


def prepare(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float, bias: Tensor | None = None) -> Call:
    """Make ready a call for q (B, Hq, Nq, W), k (B, Hk, Nk, W), v (B, Hk, Nk, Dv).

    Args:
        q, k, v: the tensors, coordinates of a bias already in q and k.
        visibility: which pairs may be used.
        scale: the softmax scale.
        bias: additive logits broadcastable to (B, Hq, Nq, Nk), or None.
    """
    value_width = v.size(-1)
    kind = "dense" if bias is not None else visibility.kind
    mask, empty = None, None
    if draws_mask(visibility, q) or kind == "dense":
        mask = visibility.mask()
    if mask is not None and kind == "dense":
        reachable = mask.any(-1, keepdim=True)
        mask, empty = mask | ~reachable, ~reachable
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if mask is not None:
        mask = mask.expand(-1, -1, q.size(2), k.size(2))
    unplanned = q.is_cuda and q.size(2) <= DECODE_QUERIES and not learning(q, k, v, mask)
    # No fused CUDA backend takes grouped heads together with a mask, nor in float32.
    repeats = q.is_cuda and q.size(1) != k.size(1) and (mask is not None or q.dtype == torch.float32)
    # Without cuDNN there is only the flash kernel for heads that stay grouped.
    flash = kind == "lower-right" or (unplanned and q.size(1) != k.size(1) and not repeats)
    q, k, v = _legal_widths(q, k, v, equal=not q.is_cuda or flash)
    if repeats:
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return Call(
        q=q, k=k, v=v, mask=mask, kind=kind, scale=scale, empty=empty, value_width=value_width, unplanned=unplanned
    )


def run_all(calls: Iterable[Call], *, strict: bool = False) -> Tensor:
    """Run calls over consecutive chunks of queries and join their answers.

    Raises:
        ValueError: with `strict`, when a call would keep a matrix of logits.
    """
    outs = []
    for call in calls:
        if strict or not torch.compiler.is_compiling():
            _refuse_or_warn(call, strict)
        outs.append(call.run())
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def draws_mask(visibility: Visibility, q: Tensor) -> bool:
    """Whether the pairs take a mask tensor, because neither they nor the device allow a description."""
    if visibility.kind == "lower-right":
        return not q.is_cuda or torch.compiler.is_compiling()
    return visibility.kind == "dense"


def chunks(n_q: int, size: int | None) -> list[tuple[int, int]]:
    """Consecutive (start, stop) of at most `size` queries; None is no limit."""
    if size is None or n_q <= size:
        return [(0, n_q)]
    return [(start, min(start + size, n_q)) for start in range(0, n_q, size)]


def _legal_widths(q: Tensor, k: Tensor, v: Tensor, *, equal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zero coordinates until every width is one a fused backend takes.

    CUDA kernels want multiples of eight. The flash kernels, which alone know the lower-right triangle and are all
    there is on a CPU, want q, k and v equally wide; cuDNN takes unequal widths up to 128.
    """
    width, value_width = q.size(-1), v.size(-1)
    if q.is_cuda:
        width, value_width = -(-width // 8) * 8, -(-value_width // 8) * 8
    if equal or max(width, value_width) > 128:
        width = value_width = max(width, value_width)
    return _pad(q, width), _pad(k, width), _pad(v, value_width)


def _pad(x: Tensor, width: int) -> Tensor:
    """Zero coordinates up to `width`, neighbouring ones side by side and rows aligned, as fused backends want."""
    if x.size(-1) != width:
        return F.pad(x, (0, width - x.size(-1)))
    # Not contiguous(), which leaves a tensor where it is that only begins elsewhere.
    return x if x.stride(-1) == 1 and _aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _aligned(x: Tensor) -> bool:
    """Whether every row of a CUDA tensor begins at 16 bytes: cuDNN reads others as if they did, and says nothing."""
    step = 16 // x.element_size()
    rows = (stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size != 1)
    if not x.is_cuda:
        return True
    # A compiler does not tell where a tensor begins. Slices of one projection that are cut between heads of a legal
    # width begin astray only if its rows do too; of a lone token no row tells.
    several = x.size(0) != 1 or x.size(2) != 1
    begins = several if torch.compiler.is_compiling() else x.storage_offset() % step == 0
    return begins and all(stride % step == 0 for stride in rows)


def _lower_right(n_q: int, n_k: int) -> Tensor:
    """The lower-right triangle by description; its module takes two seconds to import, hence here."""
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

    return causal_lower_right(n_q, n_k)


def _lower_right_backend(call: Call) -> str:
    params = torch.backends.cuda.SDPAParams(call.q, call.k, call.v, None, 0.0, False, call.grouped)
    if torch.backends.cuda.can_use_flash_attention(params):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(params) else "math"


_warned: set[tuple[object, ...]] = set()


def _refuse_or_warn(call: Call, strict: bool) -> None:
    backend = call.backend()
    if backend not in QUADRATIC or call.q.numel() == 0 or call.k.numel() == 0:
        return
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", call.q), ("k", call.k), ("v", call.v)))
    what = f"{shapes}, {call.q.dtype}, {call.q.device.type}, {call.kind} pairs"
    if strict:
        raise ValueError(f"strict: the quadratic {backend} backend would run for {what}")
    key = (call.q.dtype, call.q.device.type, call.q.size(-1), call.v.size(-1), call.kind, call.grouped)
    if backend == "math" and key not in _warned:
        _warned.add(key)
        log.warning("scaled_dot_product_attention runs the quadratic math backend for %s", what)


#: c·|i − anchor| in logits up to which coordinates are used: beyond it, what is lost shows beside a dtype's rounding.
MOST_LOST = {torch.float64: 2.0**23, torch.float32: 2.0**10, torch.bfloat16: 2.0**17, torch.float16: 2.0**14}


@dataclass(frozen=True, kw_only=True)
class ExactCall(Call):
    """A call by the definition, for a chunk of queries too far apart for one anchor.

    Coordinates hold c·i and u·j counted from an anchor among the queries, and a product of matrices adds both up in
    float32 (float64 beside float64). Where a query stands far from the anchor the two are large and cancel, so a logit
    is off by about 2⁻²⁴ · c·|i − anchor|, in every dtype but float64. The definition takes the difference of integers
    first.
    """

    problem: Problem

    def backend(self) -> str:
        """No backend of torch."""
        return "reference"

    def run(self) -> Tensor:
        """The attention output, (B, Hq, Nq, Dv)."""
        return reference.run(self.problem)


def exact_call(problem: Problem) -> ExactCall | None:
    """The call by the definition for a chunk of queries that are too far apart; None where coordinates will do."""
    if not _scattered(problem):
        return None
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    kind, width = problem.visibility.kind, v.size(-1)
    return ExactCall(problem=problem, q=q, k=k, v=v, mask=None, kind=kind, scale=scale, empty=None, value_width=width)


@torch.no_grad()
def _scattered(problem: Problem) -> bool:
    """Whether queries are too far apart. Positions are read on a CPU alone: elsewhere that would wait for the device,
    or break a compiled graph.
    """
    visibility, dtype = problem.visibility, problem.q.dtype
    i, j = visibility.q_positions, visibility.k_positions
    if i is None or j is None or not readable(i) or problem.q.numel() == 0:
        return False
    anchor = visibility.anchor(0, visibility.n_q)
    lost = problem.rate * beside_heads((i - anchor).abs(), problem.rate.dtype)
    # A gate that is not a number shows either way.
    if bool((lost > MOST_LOST[dtype]).any()):
        return True
    # Beyond this, float16 does not hold a key's share.
    reach = torch.finfo(dtype).max / 2 * UNIT
    return dtype == torch.float16 and any(bool(((x - anchor).abs() > reach).any()) for x in (i, j))
