"""Schemes that add to the logits by distance: ALiBi, KERPLE, FIRE, T5's buckets, additive GRAPE and FoX."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.gates import HeadProjection
from gape.ops import gated_attention
from gape.ops.inputs import bias_dtype
from gape.positions.base import Scheme, Side, Sizes, distance, without_autocast
from gape.utils.constant import Constant
from gape.utils.validation import above, even, finite, invalid_argument, positive_number, whole


class Biased(Scheme):
    """Leaves q and k unchanged and adds `bias(q_positions, k_positions)` to the logits.

    The bias is dense, for a slice of the queries at a time, in float32 (float64 where the parameters are float64).
    """

    refuses_gates: ClassVar[str | None] = (
        "it adds a learned bias on distance of its own, and the gated operator takes no dense bias"
    )

    @abstractmethod
    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Additive logits (1 or B, Hq, Nq, Nk)."""

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """The bias."""
        return {"bias": self.bias}


def inverse_softplus(value: Tensor) -> Tensor:
    """The x with softplus(x) = value > 0."""
    return value + (-(-value).expm1()).log()


class ALiBi(Scheme):
    """ALiBi (Press et al., arXiv 2108.12409): adds −m_h · (i − j) to the logits, m_h fixed per query head.

    It is the gated operator with every gate 1 and every landmark 0, and runs as such: no Nq × Nk bias exists.
    """

    refuses_gates: ClassVar[str | None] = "ALiBi already is the gated operator, with constant gates"

    def __init__(self, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self._slopes = Constant(slopes(self.n_heads))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_side: Side, k_side: Side, *, scale: float, impl: str = "auto",
        **visibility: Any,
    ) -> Tensor:  # fmt: skip
        """Attend under the penalty; the sides are not used. Returns (B, Hq, Nq, Dv)."""
        dtype = bias_dtype(q.dtype)
        gate, landmark = q.new_ones(q.shape[:3], dtype=dtype), k.new_zeros(k.shape[:3], dtype=dtype)
        slopes = self._slopes.on(q.device, dtype)
        return gated_attention(
            q, k, v, gate, landmark, slopes, context_length=1.0, scale=scale, impl=impl, **visibility
        )

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """−m_h · (i − j), (1 or B, Hq, Nq, Nk) in float32: what `attend` adds, written out."""
        slope = self._slopes.on(q_positions.device, torch.float32)
        return -slope[:, None, None] * distance(q_positions, k_positions)


def slopes(n_heads: int) -> list[float]:
    """The paper's slopes 2^(−8h/H), h = 1 … H, of the power of two H below, and every other one of the next power."""
    power = 1 << (n_heads.bit_length() - 1)
    finer = [2.0 ** (-4 * step / power) for step in range(1, 2 * (n_heads - power), 2)]
    return [2.0 ** (-8 * head / power) for head in range(1, power + 1)] + finer


# Upper ends of the authors' uniform draws for r1 and r2.
_DRAWS = {"log": (2.0, 1.0), "power": (1.0, 2.0)}
_MARGIN = 0.01


class Kerple(Biased):
    """KERPLE (Chi et al., arXiv 2205.09921): adds a learned kernel of the distance.

    −r1 · log(1 + r2·|i − j|) (the `variant` "log") or −r1 · |i − j|^r2 ("power"), r1 and r2 learned per query head:
    softplus of `raw_r1` and `raw_r2`, each (Hq,). The exponent of "power" is twice the sigmoid, at most 2.
    """

    def __init__(self, *, variant: str = "log", **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        if variant not in _DRAWS:
            raise invalid_argument("variant", variant, f"one of {sorted(_DRAWS)}")
        self.variant = variant
        self.raw_r1 = nn.Parameter(torch.empty(self.n_heads))
        self.raw_r2 = nn.Parameter(torch.empty(self.n_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw r1 and r2 as the authors do: U(0, 2) and U(0, 1), for "power" the other way round, 0.01 off the ends."""
        most_r1, most_r2 = _DRAWS[self.variant]
        self.raw_r1.copy_(inverse_softplus(torch.empty_like(self.raw_r1).uniform_(_MARGIN, most_r1 - _MARGIN)))
        r2 = torch.empty_like(self.raw_r2).uniform_(_MARGIN, most_r2 - _MARGIN)
        self.raw_r2.copy_((r2 / 2).logit() if self.variant == "power" else inverse_softplus(r2))

    @property
    def r1(self) -> Tensor:
        """(Hq,), above 0."""
        return F.softplus(self.raw_r1.to(bias_dtype(self.raw_r1.dtype)))

    @property
    def r2(self) -> Tensor:
        """(Hq,), above 0; for "power" below 2 as well."""
        raw = self.raw_r2.to(bias_dtype(self.raw_r2.dtype))
        return 2 * raw.sigmoid() if self.variant == "power" else F.softplus(raw)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The kernel of the distance, (1 or B, Hq, Nq, Nk)."""
        r1, r2 = self.r1[:, None, None], self.r2[:, None, None]
        away = distance(q_positions, k_positions).abs().to(r1.dtype)
        return -r1 * (away**r2 if self.variant == "power" else (r2 * away).log1p())


class FIRE(Biased):
    """FIRE (Li et al., arXiv 2310.04418): adds MLP(ψ(|i − j|) / ψ(max(L, i))), with ψ(x) = log(c·x + 1).

    The MLP has one hidden layer, of width `hidden`, and one output per query head. c and the threshold L are learned,
    shared by the heads and kept positive by a softplus. Positions must count from 0.
    """

    def __init__(
        self, *, hidden: int = 32, init_c: float = 0.1, init_threshold: float = 512.0, **sizes: Unpack[Sizes]
    ) -> None:
        super().__init__(**sizes)
        self.init_c = positive_number("init_c", init_c)
        self.init_threshold = positive_number("init_threshold", init_threshold)
        self.inner_weight = nn.Parameter(torch.empty(whole("hidden", hidden)))
        self.inner_bias = nn.Parameter(torch.empty(hidden))
        self.outer_weight = nn.Parameter(torch.empty(self.n_heads, hidden))
        self.outer_bias = nn.Parameter(torch.empty(self.n_heads))
        self.raw_c = nn.Parameter(torch.empty(1))
        self.raw_stretch = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the MLP as `nn.Linear` does, set c and L back."""
        for inner in (self.inner_weight, self.inner_bias):
            inner.uniform_(-1.0, 1.0)
        for outer in (self.outer_weight, self.outer_bias):
            outer.uniform_(-(self.outer_weight.size(1) ** -0.5), self.outer_weight.size(1) ** -0.5)
        self.raw_c.copy_(inverse_softplus(torch.full_like(self.raw_c, self.init_c)))
        self.raw_stretch.copy_(inverse_softplus(torch.ones_like(self.raw_stretch)))

    @property
    def c(self) -> Tensor:
        """(1,), above 0: how much of the range nearby distances get."""
        return F.softplus(self.raw_c.to(bias_dtype(self.raw_c.dtype)))

    @property
    def threshold(self) -> Tensor:
        """(1,), above 0: L, the position up to which queries share one normaliser."""
        return self.init_threshold * F.softplus(self.raw_stretch.to(bias_dtype(self.raw_stretch.dtype)))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The MLP of the interpolated distance, (1 or B, Hq, Nq, Nk)."""
        c = self.c
        away = distance(q_positions, k_positions).abs().to(c.dtype)
        reach = torch.maximum(self.threshold, q_positions.to(c.dtype)).unsqueeze(-1)
        reach = reach.unsqueeze(1) if reach.dim() == 3 else reach
        x = (c * away).log1p() / (c * reach).log1p()
        inner_weight, inner_bias = self.inner_weight.to(c.dtype), self.inner_bias.to(c.dtype)
        with without_autocast(x.device):
            inner = F.relu(x.unsqueeze(-1) * inner_weight + inner_bias)
            out = F.linear(inner, self.outer_weight.to(c.dtype), self.outer_bias.to(c.dtype))
        return out.squeeze(1).movedim(-1, 1)


class T5(Biased):
    """T5's relative bias (Raffel et al., arXiv 1910.10683): adds table[bucket(i − j), h], in T5's causal buckets.

    Half of the `n_buckets`, an even number, hold one distance each, the rest grow geometrically up to `max_distance`,
    past which all distances share the last. Keys after their query count as distance 0.
    """

    def __init__(self, *, n_buckets: int = 32, max_distance: int = 128, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self.n_buckets = even("n_buckets", n_buckets)
        self.max_distance = above("max_distance", max_distance, n_buckets // 2)
        self.table = nn.Parameter(torch.empty(n_buckets, self.n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from a normal of deviation E^(−1/2), as T5 does; E is Hq·D where n_embd is None."""
        nn.init.normal_(self.table, std=(self.n_embd or self.n_heads * self.head_dim) ** -0.5)

    def buckets(self, away: Tensor) -> Tensor:
        """The bucket of each distance i − j, int64 from 0 to n_buckets − 1."""
        away = away.clamp(min=0)
        exact = self.n_buckets // 2
        # float32 as in T5: where a bound falls on a whole number, trained tables expect its rounding.
        octaves = (away.clamp(min=exact).float() / exact).log() / math.log(self.max_distance / exact)
        coarse = exact + (octaves * (self.n_buckets - exact)).long()
        return torch.where(away < exact, away, coarse.clamp(max=self.n_buckets - 1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The table's entry for each pair, (1 or B, Hq, Nq, Nk)."""
        buckets = self.buckets(distance(q_positions, k_positions)).squeeze(1)
        return F.embedding(buckets, self.table.to(bias_dtype(self.table.dtype))).movedim(-1, 1)


class GRAPE(Scheme):
    """Additive GRAPE (model-architectures/GRAPE): a penalty on distance whose rate query and key set together.

    −(i − j) · ω_h · m_h · (softplus(v_h·q_i / √D) + softplus(u_h·k_j / √D)), m_h ALiBi's slope.
    v and u are the directions `query_direction` and `key_direction`, each (Hq, D) and used at length 1; ω is softplus
    of `raw_omega`, (Hq,). The bias is dense, for a slice of the queries at a time.
    """

    refuses_gates: ClassVar[str | None] = "GRAPE has a gate of the query and one of the key already"

    def __init__(self, *, init_omega: float = 1.0, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self.init_omega = positive_number("init_omega", init_omega)
        self._slopes = Constant(slopes(self.n_heads))
        self.raw_omega = nn.Parameter(torch.empty(self.n_heads))
        self.query_direction = nn.Parameter(torch.empty(self.n_heads, self.head_dim))
        self.key_direction = nn.Parameter(torch.empty(self.n_heads, self.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions from a normal of deviation D^(−1/2) and set ω back, as the authors do."""
        for direction in (self.query_direction, self.key_direction):
            nn.init.normal_(direction, std=self.head_dim**-0.5)
        self.raw_omega.copy_(inverse_softplus(torch.full_like(self.raw_omega, self.init_omega)))

    def rates(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts of the rate: of the queries, (B, Hq, Nq), and of the keys for each query head, (B, Hq, Nk)."""
        k = k.repeat_interleave(self.n_heads // k.size(1), dim=1)
        return self._rate(q, self.query_direction), self._rate(k, self.key_direction)

    def _rate(self, x: Tensor, direction: Tensor) -> Tensor:
        dtype = bias_dtype(x.dtype)
        with without_autocast(x.device):
            unit = F.normalize(direction.to(dtype), dim=-1, eps=1e-6)
            gate = F.softplus(torch.einsum("bhnd,hd->bhn", x.to(dtype), unit) * self.head_dim**-0.5)
            omega = F.softplus(self.raw_omega.to(dtype)) * self._slopes.on(x.device, dtype)
            return omega[:, None] * gate

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """The rates of the penalty."""
        return {"rates": self.rates(q, k)}


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
    """FoX (Lin et al., arXiv 2503.02130): adds Σ_{t=j+1…i} log f_t to the logits, f_t a forget gate of token t.

    With F_t the running sum of log f, the bias is F_i − F_j; softmax drops F_i, and −F_j is carried inside k. F is the
    key side, float64, and is continued from the cached one. The sum runs over tokens in the order of the tensor, masked
    ones too: pad on the left, do not reorder. `init_forget_bias` is b at start; 0, the authors' choice, halves the
    weight of a key with every token. n_embd is needed.
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
