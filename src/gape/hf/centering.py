"""Keys about their mean: a shorter key has a tighter bound, so caches hold fewer keys and prefill skips more.

Softmax does not change when the same vector is taken from all keys of a head, as long as it does not turn with the
position. So the mean key goes, in the coordinates that a scheme such as `hope`, `p-rope` or `nope` does not turn.
Capped logits would change: such layers stay as they are.

Shapes: Hk key heads, D head dim, B texts, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gape.hf.attention import InjectedAttention
from gape.hf.gates import RetrofitGates
from gape.hf.heads import read_layers
from gape.utils.validation import invalid_argument

#: The first tokens of a text, whose keys are unlike all others.
_FIRST = 8


@torch.no_grad()
def center_keys(model: Any, ids: Tensor) -> int:
    """Take the mean key from all keys, in coordinates that do not turn; the model's logits stay what they are.

    The means are saved with the gates. Another call measures them anew, as training moves them.

    Args:
        model: with gates of :func:`gape.hf.inject`; adapters that have gates of their own come later.
        ids: (B, N) tokens of texts, N of 16 or more, on the model's device.

    Returns:
        How many coordinates of keys have a mean now, in all layers; 0 where a scheme turns them all.

    Raises:
        ValueError: a model without gates, or ids of another shape.
    """
    if ids.dim() != 2 or not ids.size(0) or ids.size(1) < 2 * _FIRST:
        raise invalid_argument("ids", ids, f"tokens (B, N), N of {2 * _FIRST} or more")
    layers = [m for m in model.modules() if isinstance(m, InjectedAttention) and isinstance(m.gates, RetrofitGates)]
    if not layers:
        expected = "one that gape.hf.inject has put gates into, without adapters that have their own"
        raise invalid_argument("model", type(model).__name__, expected)
    means: dict[Any, Tensor] = {}

    def measure(module: Any, x: Tensor, _: Any) -> None:
        if module in layers and module.softcap is None:
            k = module.project(x)[1][:, :, _FIRST:]
            means[module] = k.double().mean((0, 2)) * _unturned(module, k)

    read_layers(model, ids, measure)
    if not any(bool(mean.any()) for mean in means.values()):
        return 0
    for module in layers:
        # All layers have a mean if one has, as a config says it for all of them.
        module.gates.move_keys(means.get(module))
    model.config.gape["centered"] = True
    return sum(int((module.gates.key_center != 0).sum()) for module in layers)


def _unturned(module: Any, k: Tensor) -> Tensor:
    """The coordinates of keys that are the same at every position, bool (Hk, D)."""
    heads, width = k.size(1), k.size(-1)
    scheme = module.gape_wiring.scheme
    if scheme is None or module.without_rotation:
        turns = scheme is None and module.gape_wiring.family.layout.rotary and not module.without_rotation
        return torch.full((heads, width), not turns, device=k.device)
    basis = torch.eye(width, dtype=torch.float64, device=k.device).expand(1, heads, width, width)
    turned: Tensor = scheme.keys(basis, torch.ones(width, dtype=torch.int64, device=k.device))[0]
    return (turned == basis).all(-1)[0]
