"""Presses of kvpress on models with gates: a press scores keys, and what stays keeps its landmark and position.

kvpress gathers `head_dim` coordinates of a cached key, and keys of models with gates have more of them
(:mod:`gape.hf.cache`). :class:`GatedPress` shows a press the `head_dim` coordinates that it knows, and gathers all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

try:
    from kvpress.presses.base_press import BasePress
    from kvpress.presses.scorer_press import ScorerPress
    from kvpress.utils import compute_n_kept
except ImportError as error:
    raise ImportError("gape.hf.presses needs kvpress: pip install kvpress") from error

from gape.hf.cache import KEYS_BY_HEAD
from gape.hf.masks import as_bool
from gape.utils.validation import invalid_argument


class GatedPress(BasePress):  # type: ignore[misc]
    """A press of kvpress for models with gates: `with GatedPress(SnapKVPress(0.5))(model): ...`.

    The press gives each key a score, and the lowest are dropped. Scores read rotated keys, not gates, unless the press
    reads the attention of `attn_implementation="eager"`. Layers without gates are pressed as kvpress does it.

    Raises:
        ValueError: a press of another kind. Those with a mask for every head, such as AdaKVPress, and those that
            rewrite keys, such as KeyRerotationPress and ThinKPress, do not know what else a key carries.
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
        scores = self.press.score(module, hidden_states, keys[..., :width], values, attentions, kwargs)
        count = compute_n_kept(keys.size(2), self.compression_ratio)
        chosen = scores.topk(count, dim=-1).indices.sort(dim=-1).values.unsqueeze(-1)
        setattr(kwargs["past_key_values"].layers[module.layer_idx], KEYS_BY_HEAD, True)
        return tuple(x.gather(2, chosen.expand(-1, -1, -1, x.size(-1))) for x in (keys, values))  # type: ignore[return-value]
