"""Presses of kvpress on models with gates: a press scores keys, and what stays keeps its landmark and position.

kvpress gathers `head_dim` coordinates of a cached key, and keys of models with gates have more of them
(:mod:`gape.hf.cache`). :class:`GatedPress` shows a press the `head_dim` coordinates that it knows, and gathers all. It
also shows what a press would get wrong: the rotation of the layer, keys that are not centred, attention with gates.

Shapes: B rows, Hq / Hk query / key heads, N tokens, E model width, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

try:
    from kvpress.presses.base_press import BasePress
    from kvpress.presses.scorer_press import ScorerPress
    from kvpress.presses.snapkv_press import SnapKVPress
    from kvpress.presses.tova_press import TOVAPress
    from kvpress.utils import compute_n_kept
except ImportError as error:
    raise ImportError("gape.hf.presses needs kvpress: pip install kvpress") from error

from gape.hf.attention import InjectedAttention, token_positions
from gape.hf.cache import KEYS_BY_HEAD, unpack
from gape.hf.implementations import gate_values, masked_attention
from gape.hf.masks import as_bool
from gape.positions.base import Scheme
from gape.positions.rotary import NoPE
from gape.utils.validation import invalid_argument


class GatedPress(BasePress):  # type: ignore[misc]
    """A press of kvpress for models with gates: `with GatedPress(SnapKVPress(0.5))(model): ...`.

    The press gives each key a score, and the lowest are dropped. SnapKVPress and TOVAPress score by the attention of
    the last queries, gates included; scores of others read rotated keys, not gates, unless the press reads the
    attention of `attn_implementation="eager"`. Layers without gates are pressed as kvpress does it, under the rotation
    that they have.

    Raises:
        ValueError: a press of another kind. Those with a mask for every head, such as AdaKVPress, and those that
            rewrite keys, such as KeyRerotationPress and ThinKPress, do not know what else a key carries. Or, when a
            prompt is read, a layer whose heads rotate in several ways.
    """

    def __init__(self, press: ScorerPress) -> None:
        if not isinstance(press, ScorerPress) or type(press).compress is not ScorerPress.compress:
            raise invalid_argument("press", type(press).__name__, "a ScorerPress whose scores alone choose")
        self.press = press

    @property
    def compression_ratio(self) -> float:
        """The part of the keys that is dropped."""
        return float(self.press.compression_ratio)

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        self.press.compression_ratio = ratio

    def post_init_from_model(self, model: Any) -> None:
        """As the press has it."""
        self.press.post_init_from_model(model)

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys (B, Hk, N, width) and values that stay, in order; kvpress calls it after a prefill without pads."""
        if not self.compression_ratio:
            return keys, values
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(as_bool(mask)[..., -1, :].all()):
            raise invalid_argument("attention_mask", mask, "no pads under a press")
        width: int = module.head_dim  # type: ignore[assignment]
        plain = keys[..., :width]
        if isinstance(module, InjectedAttention):
            center = getattr(module.gape, "key_center", None)
            plain = plain if center is None else plain + center[:, None].to(plain.dtype)
            if attentions is None and module.gape is not None:
                attentions = _last_attention(self.press, module, hidden_states, keys, values, kwargs)
        with _own_rotation(module, hidden_states, kwargs) as options:
            scores = self.press.score(module, hidden_states, plain, values, attentions, options)
        count = compute_n_kept(keys.size(2), self.compression_ratio)
        chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values.unsqueeze(-1)
        setattr(kwargs["past_key_values"].layers[module.layer_idx], KEYS_BY_HEAD, True)
        return tuple(x.gather(2, chosen.expand(-1, -1, -1, x.size(-1))) for x in (keys, values))  # type: ignore[return-value]


def _last_attention(
    press: ScorerPress, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, kwargs: dict[str, Any]
) -> Tensor | None:
    """Weights (B, Hq, n, N) of the last n queries, for presses that score by them; None for others."""
    if type(press) not in (SnapKVPress, TOVAPress):
        return None
    n, length = min(getattr(press, "window_size", 1), keys.size(2)), keys.size(2)
    x, positions = hidden_states[:, -n:], token_positions(kwargs, keys.size(0))[..., -n:]
    q, k, _ = module.project(x)
    cos, sin = kwargs["position_embeddings"]
    q, _, gate, _ = module.rotate(q, k, positions, x, (cos[:, -n:], sin[:, -n:]))
    k, landmark, k_positions = unpack(keys, q.size(-1))
    causal = torch.ones(1, 1, n, length, dtype=torch.bool, device=q.device).tril(length - n)
    return masked_attention(
        q, k, values, gate_values(module, gate, landmark), name="eager", q_positions=positions,
        k_positions=k_positions, mask=causal, scale=module.gape_wiring.family.layout.scale(module),
        softcap=module.softcap,
    )[1]  # fmt: skip


class _Rotation(nn.Module):
    """A scheme called as the rotation of a model of `transformers`: cosines and sines (B, N, D) in the dtype of x.

    Without a scheme nothing turns.
    """

    def __init__(self, scheme: Scheme | None, head_dim: int) -> None:
        super().__init__()
        self.scheme, self.head_dim = scheme, head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x says dtype and device, `position_ids` (N,) or (B, N) which tokens."""
        positions = position_ids if position_ids.dim() == 2 else position_ids[None]
        if self.scheme is None or isinstance(self.scheme, NoPE):
            ones = torch.ones(*positions.shape, self.head_dim, dtype=x.dtype, device=x.device)
            return ones, torch.zeros_like(ones)
        angles = self.scheme.angles(positions)
        if angles is None or len(angles) > 2:
            raise invalid_argument("press", "heads that rotate in several ways", "a layer of one rotation")
        cos, sin = (torch.cat([part, part], dim=-1).to(x.dtype) for part in angles[:2])
        return cos, sin


@contextmanager
def _own_rotation(module: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments for a press under the rotation that a layer has, which `module.rotary_emb` is meanwhile."""
    ours = isinstance(module, InjectedAttention)
    scheme = module.gape_wiring.scheme if ours and not module.without_rotation else None
    if scheme is None and not (ours and module.without_rotation):
        yield kwargs
        return
    before, rotation = module.rotary_emb, _Rotation(scheme, module.head_dim)
    embeddings = rotation(hidden_states, token_positions(kwargs, hidden_states.size(0)))
    module.rotary_emb = rotation
    try:
        yield kwargs | {"position_embeddings": embeddings}
    finally:
        module.rotary_emb = before
