"""Random problems that the operator's tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Layouts whose parts others have as well: among the slow tests where kernels run in the interpreter.
REPEATED = (
    "plain", "odd length", "no groups", "wide values", "one query", "shuffled keys only", "repeated", "right padding",
    "packed", "not causal", "own scale", "far from zero", "all heads share a key", "head dim 1, one head",
)  # fmt: skip


#: Few programs for the interpreter, and layouts that keep several key heads.
SMALL = {"heads": 2, "kv_heads": 1}
GROUPED = ("last queries", "packed, restarting")


@dataclass
class Case:
    """Arguments of one call: tensors by name and everything else as keywords."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Fresh leaves that need gradients; `dtype` casts q, k and v and leaves the gates alone."""
        cast = {n: x.to(dtype) if dtype and n in "qkv" else x for n, x in self.tensors.items()}
        return {n: x.detach().clone().requires_grad_() for n, x in cast.items()}


def random_case(
    *,
    seed: int = 0,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    n_q: int = 63,
    n_k: int = 63,
    dim: int = 16,
    value_dim: int = 24,
    strength: float = 4.0,
    context_length: float = 32,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    """Gaussian q, k, v; gates between 0 and `strength`; landmarks over [0, 1] with both ends present."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    landmark = torch.rand(batch, kv_heads, n_k, generator=g, dtype=torch.float64) * 1.2 - 0.1
    tensors = {
        "q": normal(batch, heads, n_q, dim).to(dtype),
        "k": normal(batch, kv_heads, n_k, dim).to(dtype),
        "v": normal(batch, kv_heads, n_k, value_dim).to(dtype),
        "gate": strength * torch.rand(batch, heads, n_q, generator=g, dtype=torch.float64),
        "landmark": landmark.clamp(0, 1),
        "amplitude": 0.5 + torch.rand(heads, generator=g, dtype=torch.float64),
    }
    return Case(tensors, {"context_length": context_length, **options})


def layouts(**sizes: int) -> dict[str, Case]:
    """Every way of saying who sees whom, on shapes that divide nothing.

    Args:
        sizes: of `random_case`, where a layout has none of its own.
    """

    def case(**own: Any) -> Case:
        return random_case(**sizes | own)

    g = torch.Generator().manual_seed(7)
    shuffled = torch.stack([torch.randperm(63, generator=g) for _ in range(2)])
    left = torch.arange(63) - torch.tensor([[0], [20]])
    right = torch.arange(63).expand(2, -1)
    documents = torch.tensor([[0] * 20 + [1] * 30 + [2] * 13, [5] * 63])
    restarting = torch.cat([torch.arange(20), torch.arange(30), torch.arange(13)])
    empty_rows = torch.rand(2, 1, 63, 63, generator=g) > 0.5
    empty_rows[0, :, 5] = False
    empty_rows[1, :, 60:] = False
    return {
        "plain": case(),
        "one token": case(n_q=1, n_k=1),
        "odd length": case(n_q=127, n_k=127, batch=1),
        "head dim 1, one head": case(dim=1, value_dim=1, heads=1, kv_heads=1),
        "no groups": case(heads=3, kv_heads=3, value_dim=16),
        "all heads share a key": case(heads=4, kv_heads=1),
        "wide values": case(dim=8, value_dim=40),
        "last queries": case(n_q=20),
        "one query": case(n_q=1),
        "more queries than keys": case(n_q=40, n_k=7, q_positions=torch.arange(40)),
        "shuffled": case(q_positions=shuffled, k_positions=shuffled.flip(0)),
        "shuffled keys only": case(n_q=20, k_positions=shuffled),
        "repeated": case(q_positions=torch.arange(63) // 3, k_positions=torch.arange(63) // 2),
        "left padding": case(q_positions=left, k_positions=left, attn_mask=(left >= 0)[:, None, None, :], seed=1),
        "right padding": case(
            q_positions=right, k_positions=right, attn_mask=(right < torch.tensor([[63], [40]]))[:, None, None, :]
        ),
        "packed": case(q_documents=documents, k_documents=documents),
        "packed, restarting": case(
            q_documents=documents, k_documents=documents, q_positions=restarting, k_positions=restarting
        ),
        "mask with empty rows": case(attn_mask=empty_rows),
        "mask per head": case(attn_mask=torch.rand(sizes.get("heads", 4), 63, 63, generator=g) > 0.3, is_causal=False),
        "not causal": case(is_causal=False, n_q=9),
        "own scale": case(scale=0.7),
        "far from zero": case(q_positions=torch.arange(63) + 10**6, k_positions=torch.arange(63) + 10**6, strength=0.3),
    }
