"""Arguments of the operators: checks of tensors, who may see whom, and the checked call that is then run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gape.utils.validation import flag, invalid_argument


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The pairs (query, key) that attention may use, as described by the caller.

    Without positions the order is that of the tensors: keys 0 … n_k − 1, queries the last n_q of those.
    That case is known without looking at any data, so causality there needs no mask tensor.

    Attributes:
        n_q, n_k: numbers of queries and keys.
        device: where masks are built.
        q_positions, k_positions: int64, (N,) or (B, N); both None in index order, both set otherwise.
        q_documents, k_documents: integer (B, N), or both None.
        attn_mask: bool, 4-dimensional, broadcastable to (B, Hq, Nq, Nk); True may attend.
        is_causal: a key is visible only from its own position or a later one.
    """

    n_q: int
    n_k: int
    device: torch.device
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = True

    @property
    def index_order(self) -> bool:
        """Whether positions are those of the tensors, queries last."""
        return self.q_positions is None

    @property
    def kind(self) -> str:
        """How the pairs are described to a kernel: "full", "causal", "lower-right" or "dense".

        "causal" is the square triangle; "lower-right" the triangle of n_q < n_k queries that come last;
        "dense" needs a mask tensor.
        """
        if self.q_documents is not None or self.attn_mask is not None:
            return "dense"
        if not self.is_causal:
            return "full"
        if not self.index_order:
            return "dense"
        if self.n_q == 1:
            return "full"
        return "causal" if self.n_q == self.n_k else "lower-right"

    def positions(self) -> tuple[Tensor, Tensor]:
        """Query and key positions as int64 tensors of shape (N,) or (B, N)."""
        if self.q_positions is not None and self.k_positions is not None:
            return self.q_positions, self.k_positions
        keys = torch.arange(self.n_k, device=self.device)
        return keys[self.n_k - self.n_q :], keys

    def anchor(self, start: int, stop: int) -> int | Tensor:
        """A position among queries start … stop − 1 to count from: an int in index order, else (1,) or (B, 1).

        It is the middle one, or the median: pads may have any position without moving it much.
        """
        if self.q_positions is None:
            return self.n_k - self.n_q + (start + stop) // 2
        if start == stop:
            return 0
        return self.q_positions[..., start:stop].median(dim=-1, keepdim=True).values

    def rows(self, start: int, stop: int) -> Visibility:
        """The same for queries start … stop − 1, without the keys that causality hides from all of them."""
        n_k = self.n_k
        if self.index_order and self.is_causal:
            n_k += stop - self.n_q
        return replace(
            self,
            n_q=stop - start,
            n_k=n_k,
            q_positions=None if self.q_positions is None else self.q_positions[..., start:stop],
            q_documents=None if self.q_documents is None else self.q_documents[:, start:stop],
            k_documents=None if self.k_documents is None else self.k_documents[:, :n_k],
            attn_mask=_cut(_cut(self.attn_mask, -2, start, stop), -1, 0, n_k),
        )

    def mask(self) -> Tensor | None:
        """The pairs as a bool tensor broadcastable to (B, Hq, Nq, Nk); None where every pair is visible."""
        parts = []
        if self.is_causal and not (self.index_order and self.n_q == 1):
            q_positions, k_positions = self.positions()
            earlier = k_positions.unsqueeze(-2) <= q_positions.unsqueeze(-1)
            parts.append(earlier[None, None] if earlier.dim() == 2 else earlier[:, None])
        if self.q_documents is not None and self.k_documents is not None:
            parts.append((self.q_documents.unsqueeze(-1) == self.k_documents.unsqueeze(-2))[:, None])
        if self.attn_mask is not None:
            parts.append(self.attn_mask)
        return functools.reduce(torch.logical_and, parts) if parts else None


def _cut(mask: Tensor | None, dim: int, start: int, stop: int) -> Tensor | None:
    """Slice a mask along one axis, which may be broadcast."""
    if mask is None or mask.size(dim) == 1:
        return mask
    return mask.narrow(dim, start, stop - start)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product of x here: autocast's where that would cast x."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates, rate and bias beside content of `dtype`: float32, or float64 beside float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def learning(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked of any of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def beside_heads(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions (N,) or (B, N) in `dtype`, in a shape that broadcasts against (B, H, N)."""
    positions = positions.to(dtype)
    return positions if positions.dim() == 1 else positions.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Checked arguments. Shapes: B batch, Hq / Hk query / key heads, Nq / Nk tokens, D and Dv head dims.

    Attributes:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv) of one floating dtype.
        gate, landmark, amplitude: (B, Hq, Nq), (B, Hk, Nk), (Hq,) in `bias_dtype(q.dtype)`.
        context_length: T.
        scale: the softmax scale.
        visibility: which pairs may be used.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    context_length: float
    scale: float
    visibility: Visibility

    def rows(self, start: int, stop: int) -> Problem:
        """The same for queries start … stop − 1 and the keys that any of them may see."""
        visibility = self.visibility
        if visibility.index_order and not visibility.is_causal:
            # Of all keys, these queries are no longer the last.
            q_positions, k_positions = visibility.positions()
            visibility = replace(visibility, q_positions=q_positions, k_positions=k_positions)
        visibility = visibility.rows(start, stop)
        q, gate = (x[:, :, start:stop] for x in (self.q, self.gate))
        k, v, landmark = (x[:, :, : visibility.n_k] for x in (self.k, self.v, self.landmark))
        return replace(self, q=q, k=k, v=v, gate=gate, landmark=landmark, visibility=visibility)

    @property
    def rate(self) -> Tensor:
        """c_i = Γ_h · g_i / T, the logits a query loses per token of distance, (B, Hq, Nq)."""
        return self.amplitude[:, None] * self.gate / self.context_length

    @property
    def gates_learn(self) -> bool:
        """Whether a gradient will be asked of the gates."""
        return learning(self.gate, self.landmark, self.amplitude)

    @property
    def learns(self) -> bool:
        """Whether a gradient will be asked of any tensor."""
        return learning(self.q, self.k, self.v) or self.gates_learn

    @property
    def exposure(self) -> Tensor:
        """u_j = 1 − l_j, how unprotected a key is, (B, Hk, Nk)."""
        return 1 - self.landmark


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: Positions lie between −FURTHEST and FURTHEST. Every difference of two is then exact, in int64, in float64 and in the
#: two float32 numbers that kernels take it apart into.
FURTHEST = 2**46


def floats(name: str, x: Any, shape: tuple[int, ...], device: torch.device, what: str) -> None:
    """A floating tensor of `shape` on `device`."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout != torch.strided:
        raise invalid_argument(name, x, f"a dense floating tensor {what}")
    if x.shape != shape:
        raise invalid_argument(name, x, f"shape {what} = {shape}")
    if x.device != device:
        raise invalid_argument(name, x, f"a tensor on {device}, where q is")


def heads(q: Any, k: Any, v: Any) -> None:
    """q (B, Hq, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv): one dtype, one device, Hq a multiple of Hk."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        dense = isinstance(x, Tensor) and x.layout == torch.strided and x.dtype in FLOATS and x.dim() == 4
        if not dense or min(x.size(1), x.size(3)) < 1:
            raise invalid_argument(name, x, "a dense floating tensor (batch, heads ≥ 1, tokens, head dim ≥ 1)")
        if x.device != q.device:
            raise invalid_argument(name, x, f"a tensor on {q.device}, where q is")
        if x.dtype != q.dtype:
            raise invalid_argument(name, x, f"dtype {q.dtype}, that of q")
    batch, n_heads, _, dim = q.shape
    if k.size(0) != batch or k.size(3) != dim:
        raise invalid_argument("k", k, f"shape (B, Hk, Nk, D) with B = {batch} and D = {dim} as in q")
    if n_heads % k.size(1) != 0:
        raise invalid_argument("k", k, f"a number of heads Hk that divides q's {n_heads}")
    if v.shape[:3] != k.shape[:3]:
        raise invalid_argument("v", v, f"shape (B, Hk, Nk, Dv) with (B, Hk, Nk) = {tuple(k.shape[:3])} as in k")


def gate_values(gate: Tensor, landmark: Tensor, amplitude: Tensor) -> None:
    """The ranges of the gates; reads the data, which waits for the device."""
    for name, x in (("gate", gate), ("amplitude", amplitude)):
        if not bool(((x >= 0) & x.isfinite()).all()):
            raise invalid_argument(name, x, "values that are finite and not negative")
    if not bool(((landmark >= 0) & (landmark <= 1)).all()):
        raise invalid_argument("landmark", landmark, "values between 0 and 1")


def visibility(
    q: Tensor, k: Tensor, *, q_positions: Any = None, k_positions: Any = None, q_documents: Any = None,
    k_documents: Any = None, attn_mask: Any = None, is_causal: Any = True,
) -> Visibility:  # fmt: skip
    """Check everything that says who sees whom, fill in defaults."""
    batch, n_q, n_k, device = q.size(0), q.size(2), k.size(2), q.device
    k_positions = positions("k_positions", k_positions, batch, n_k, device)
    q_positions = positions("q_positions", q_positions, batch, n_q, device)
    if q_positions is None and n_q > n_k:
        raise ValueError(f"q_positions: got None, expected positions for {n_q} queries and only {n_k} keys")
    if q_positions is None and k_positions is not None:
        q_positions = k_positions[..., n_k - n_q :]
    if k_positions is None and q_positions is not None:
        k_positions = torch.arange(n_k, device=device)
    if (q_documents is None) != (k_documents is None):
        missing = "k_documents" if k_documents is None else "q_documents"
        raise ValueError(f"{missing}: got None, expected ids, since the other side's documents are given")
    return Visibility(
        n_q=n_q, n_k=n_k, device=device, q_positions=q_positions, k_positions=k_positions,
        q_documents=documents("q_documents", q_documents, batch, n_q, device),
        k_documents=documents("k_documents", k_documents, batch, n_k, device),
        attn_mask=mask(attn_mask, (batch, q.size(1), n_q, n_k), device), is_causal=flag("is_causal", is_causal),
    )  # fmt: skip


def positions(name: str, x: Any, batch: int, n: int, device: torch.device) -> Tensor | None:
    """Integer positions (n,) or (batch, n) as int64; None stays."""
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        raise invalid_argument(name, x, "an integer tensor")
    if x.shape not in ((n,), (batch, n)):
        raise invalid_argument(name, x, f"shape ({n},) or ({batch}, {n})")
    if x.device != device:
        raise invalid_argument(name, x, f"a tensor on {device}, where q is")
    if readable(x):
        position_values(name, x)
    return x.to(torch.int64)


def readable(x: Tensor) -> bool:
    """Whether values of x can be read now: that waits for no device and breaks no compiled graph."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def position_values(name: str, x: Tensor | None, furthest: int = FURTHEST) -> None:
    """Positions between −furthest and furthest; reads the data, which waits for the device."""
    if x is None or x.numel() == 0:
        return
    worst = max((int(end) for end in x.aminmax()), key=abs)
    if abs(worst) > furthest:
        raise invalid_argument(name, worst, f"positions between {-furthest:,} and {furthest:,}")


def near_positions(x: Tensor, furthest: int) -> Tensor:
    """Positions between −furthest and furthest: others are refused where they can be read, and NaN elsewhere.

    Raises:
        ValueError: names positions, and the one furthest from 0.
    """
    if readable(x):
        position_values("positions", x, furthest)
        return x
    values = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
    return values.masked_fill(values.abs() > furthest, torch.nan)


def documents(name: str, x: Any, batch: int, n: int, device: torch.device) -> Tensor | None:
    """Integer document ids (batch, n); None stays."""
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.shape != (batch, n) or x.device != device:
        raise invalid_argument(name, x, f"an integer tensor ({batch}, {n}) on {device}")
    return x


def mask(x: Any, full: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    """A bool mask in four dimensions that broadcasts to `full`; None stays."""
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.dtype != torch.bool or x.layout != torch.strided or x.device != device:
        raise invalid_argument("attn_mask", x, f"a bool tensor on {device}")
    sizes = (1,) * (4 - x.dim()) + tuple(x.shape)
    if len(sizes) != 4 or any(s not in (1, f) for s, f in zip(sizes, full, strict=True)):
        raise invalid_argument("attn_mask", x, f"a shape that broadcasts to {full}")
    return x.reshape(sizes)
