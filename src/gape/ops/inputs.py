"""Arguments of the operators: what is accepted, and a ValueError that names the argument where it is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gape.ops.visibility import Visibility
from gape.utils.validation import flag, invalid_argument

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: Positions lie between −FURTHEST and FURTHEST. Every difference of two is then exact, in int64, in float64 and in the
#: two float32 numbers that kernels take it apart into.
FURTHEST = 2**46


def floats(name: str, x: Any, shape: tuple[int, ...] | None, device: torch.device, what: str) -> Tensor:
    """A floating tensor on `device`, of `shape` when one is given."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout != torch.strided:
        raise invalid_argument(name, x, f"a dense floating tensor {what}")
    if shape is not None and x.shape != shape:
        raise invalid_argument(name, x, f"shape {what} = {shape}")
    if x.device != device:
        raise invalid_argument(name, x, f"a tensor on {device}, where q is")
    return x


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
    if not bool(((gate >= 0) & gate.isfinite()).all()):
        raise invalid_argument("gate", gate, "values that are finite and not negative")
    if not bool(((landmark >= 0) & (landmark <= 1)).all()):
        raise invalid_argument("landmark", landmark, "values between 0 and 1")
    if not bool(((amplitude >= 0) & amplitude.isfinite()).all()):
        raise invalid_argument("amplitude", amplitude, "values that are finite and not negative")


def visibility(
    q: Tensor,
    k: Tensor,
    *,
    q_positions: Any = None,
    k_positions: Any = None,
    q_documents: Any = None,
    k_documents: Any = None,
    attn_mask: Any = None,
    is_causal: Any = True,
) -> Visibility:
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
        n_q=n_q,
        n_k=n_k,
        device=device,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=documents("q_documents", q_documents, batch, n_q, device),
        k_documents=documents("k_documents", k_documents, batch, n_k, device),
        attn_mask=mask(attn_mask, (batch, q.size(1), n_q, n_k), device),
        is_causal=flag("is_causal", is_causal),
    )


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
