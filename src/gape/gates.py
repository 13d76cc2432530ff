"""The query gate, the landmark gate of keys, and the amplitude of heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.ops.inputs import bias_dtype
from gape.utils.constant import Constant
from gape.utils.validation import finite, flag, invalid_argument, whole


class HeadProjection(nn.Module):
    """One weight vector and one bias per head: (B, H, N, D) → (B, H, N), in float32 or float64."""

    def __init__(self, n_heads: int, head_dim: int, *, init_bias: float) -> None:
        super().__init__()
        self.init_bias = init_bias
        self.weight = nn.Parameter(torch.empty(n_heads, head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as those of a GPT's linear layers and set the bias back."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.constant_(self.bias, self.init_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, H, N, D) of any floating dtype → (B, H, N) in float32 (float64 beside float64)."""
        dtype = bias_dtype(x.dtype)
        # A product and a sum, not a matmul: neither autocast nor TF32 may shorten it.
        weight, bias = self.weight.to(dtype).unsqueeze(-2), self.bias.to(dtype).unsqueeze(-1)
        return (x.to(dtype) * weight).sum(-1) + bias

    def extra_repr(self) -> str:
        """Sizes, for repr()."""
        return f"n_heads={self.weight.size(0)}, head_dim={self.weight.size(1)}, init_bias={self.init_bias}"


class GAPEGates(nn.Module):
    """The gates of one attention layer.

    g_i = floor + softplus(w_g·q_i + b_g), l_j = sigmoid(w_l·k_j + b_l), Γ_h = softplus(γ_h). They read q and k
    before rotation, and are float32 whatever the model's dtype (float64 beside float64).

    Args:
        n_heads, head_dim: query heads Hq, each with a gate and an amplitude, and coordinates D of q and k.
        n_kv_heads: key heads Hk, each with a landmark; n_heads when None.
        learn_gate: False fixes g at floor + softplus(init_gate_bias), the paper's ablation; no parameters then.
        learn_landmark: False fixes l at sigmoid(init_landmark_bias); no parameters then.
        init_gate_bias, init_landmark_bias: b_g and b_l at start.
        init_amplitude: γ at start, before the softplus; 0.5413 makes Γ = 1.
        gate_floor: a number or one per head, ≥ 0; 0 is the paper. A positive one makes forgetting provable.

    Raises:
        ValueError: for sizes below 1, heads that do not divide, a negative floor or one of wrong length.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        learn_gate: bool = True,
        learn_landmark: bool = True,
        init_gate_bias: float = -3.0,
        init_landmark_bias: float = 0.0,
        init_amplitude: float = 0.5413,
        gate_floor: float | Sequence[float] | Tensor = 0.0,
    ) -> None:
        super().__init__()
        n_heads, head_dim = whole("n_heads", n_heads), whole("head_dim", head_dim)
        n_kv_heads = n_heads if n_kv_heads is None else whole("n_kv_heads", n_kv_heads)
        if n_heads % n_kv_heads:
            raise invalid_argument("n_kv_heads", n_kv_heads, f"a divisor of n_heads = {n_heads}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.init_gate_bias = finite("init_gate_bias", init_gate_bias)
        self.init_landmark_bias = finite("init_landmark_bias", init_landmark_bias)
        self.init_amplitude = finite("init_amplitude", init_amplitude)
        self.gate_floor = _floors(gate_floor, n_heads)
        self._floors = Constant(self.gate_floor)
        self.gate_projection: HeadProjection | None = None
        self.landmark_projection: HeadProjection | None = None
        if flag("learn_gate", learn_gate):
            self.gate_projection = HeadProjection(n_heads, head_dim, init_bias=init_gate_bias)
        if flag("learn_landmark", learn_landmark):
            self.landmark_projection = HeadProjection(n_kv_heads, head_dim, init_bias=init_landmark_bias)
        # Not called after the paper's letter: some versions of transformers rename such keys on load.
        self.raw_amplitude = nn.Parameter(torch.full((n_heads,), self.init_amplitude))

    def reset_parameters(self) -> None:
        """Draw the projections anew and set biases and amplitudes back."""
        for projection in (self.gate_projection, self.landmark_projection):
            if projection is not None:
                projection.reset_parameters()
        nn.init.constant_(self.raw_amplitude, self.init_amplitude)

    @property
    def amplitude(self) -> Tensor:
        """Γ, (Hq,) in float32 or float64, above 0."""
        return F.softplus(self.raw_amplitude.to(bias_dtype(self.raw_amplitude.dtype)))

    def gate(self, q: Tensor) -> Tensor:
        """g of unrotated q (B, Hq, Nq, D) → (B, Hq, Nq), at least the floor; a ValueError for q of other sizes."""
        raw = self._raw("q", q, self.n_heads, self.gate_projection, self.init_gate_bias)
        alike = len(set(self.gate_floor)) == 1
        floor = self.gate_floor[0] if alike else self._floors.on(raw.device, raw.dtype).unsqueeze(-1)
        return F.softplus(raw) + floor

    def landmark(self, k: Tensor) -> Tensor:
        """l of unrotated k (B, Hk, Nk, D) → (B, Hk, Nk), between 0 and 1; a ValueError for k of other sizes."""
        return torch.sigmoid(self._raw("k", k, self.n_kv_heads, self.landmark_projection, self.init_landmark_bias))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(gate, landmark) of unrotated q (B, Hq, Nq, D) and k (B, Hk, Nk, D)."""
        return self.gate(q), self.landmark(k)

    def _raw(self, name: str, x: Tensor, n_heads: int, projection: nn.Module | None, fixed: float) -> Tensor:
        """A gate of x (B, n_heads, N, D) before its function, (B, n_heads, N): projected, or a fixed number."""
        if not isinstance(x, Tensor) or x.dim() != 4 or (x.size(1), x.size(3)) != (n_heads, self.head_dim):
            raise invalid_argument(name, x, f"a tensor (batch, {n_heads} heads, tokens, {self.head_dim})")
        if projection is None:
            return torch.full(x.shape[:-1], fixed, dtype=bias_dtype(x.dtype), device=x.device)
        raw: Tensor = projection(x)
        return raw

    def floors(self, device: torch.device) -> Tensor:
        """The least gate of each query head, (Hq,) in float32."""
        return self._floors.on(device, torch.float32)

    def extra_repr(self) -> str:
        """Sizes and the floor, for repr()."""
        return f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, gate_floor={self.gate_floor}"


def _floors(floor: float | Sequence[float] | Tensor, n_heads: int) -> tuple[float, ...]:
    expected = f"a number ≥ 0, or {n_heads} of them"
    value = floor.tolist() if isinstance(floor, Tensor) else floor
    each = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * n_heads
    floors = tuple(finite("gate_floor", number, expected) for number in each)
    if len(floors) != n_heads or min(floors) < 0:
        raise invalid_argument("gate_floor", floor, expected)
    return floors
