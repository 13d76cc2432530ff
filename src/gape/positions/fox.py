"""FoX: the Forgetting Transformer's data-dependent decay (Lin et al., arXiv 2503.02130)."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.gates import HeadProjection
from gape.ops.inputs import bias_dtype
from gape.positions.base import Scheme, Side, Sizes, without_autocast
from gape.utils.validation import finite, invalid_argument


class ForgetGate(HeadProjection):
    """log f of each token and query head, f = sigmoid(w_h·x + b_h), computed in float32 (float64 beside float64)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, E) → log f (B, Hq, N), at most 0."""
        dtype = bias_dtype(x.dtype)
        with without_autocast(x.device):
            logits = F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        # Not a view: FSDP2 warns of those.
        return F.logsigmoid(logits.transpose(1, 2))


class FoX(Scheme):
    """Adds Σ_{t=j+1…i} log f_t to the logits: each token in between reduces the weight of those before it.

    With F_t the running sum of log f, the bias is F_i − F_j; softmax drops F_i, and −F_j is carried inside k. F is the
    key side, float64, and is continued from the cached one. The sum runs over tokens in the order of the tensor, masked
    ones too: pad on the left, do not reorder.

    `init_forget_bias` is b at start; 0, the authors' choice, halves the weight of a key with every token. n_embd is
    needed.
    """

    refuses_gates: ClassVar[str | None] = "FoX forgets by a gate of its own, over tokens instead of distance"

    def __init__(self, *, init_forget_bias: float = 0.0, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        if self.n_embd is None:
            raise invalid_argument("n_embd", None, "the width of the layer input, which fox reads")
        self.forget = ForgetGate(self.n_heads, self.n_embd, init_bias=finite("init_forget_bias", init_forget_bias))

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Return k as it came and F (B, Hq, N) in float64, continued from `past` (B, Hq, M); x is needed."""
        if x is None:
            raise invalid_argument("x", None, "the layer input (B, N, E), which fox reads")
        # Apple's GPUs have no float64.
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        total = self.forget(x).to(exact).cumsum(-1)
        if past is not None and past.size(-1) > 0:
            total = total + past[..., -1:].to(exact)
        return k, total

    def separate(self, side: Tensor) -> Tensor:
        """F (B, Hq, N) as the log f of each token."""
        return torch.diff(side, dim=-1, prepend=torch.zeros_like(side[..., :1]))

    def accumulate(self, values: Tensor) -> Tensor:
        """F of tokens in index order, (B, Hq, N), from their log f."""
        return values.cumsum(-1)

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """The decay; k_side (B, Hq, Nk) is F of all keys."""
        if k_side is None:
            raise invalid_argument("k_side", None, "the cumulative decay that keys() returned")
        return {"key_bias": -k_side}
