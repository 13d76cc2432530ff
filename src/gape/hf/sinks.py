"""Landmarks for attention sinks: a model keeps seeing its first token, whatever its floors are.

Many heads put the attention that they have no use for on the first token of a text, the sink (arXiv 2309.17453). A
floor would hide it from queries far behind. Its keys are unlike all others, so a landmark gate can tell them: the gate
is fitted on texts, by the direction that separates first tokens from others best (linear discriminant analysis).

Shapes: L layers, Hk key heads, D head dim, B texts, N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.hf.families import family_of
from gape.hf.gates import MODULE, RetrofitGates
from gape.hf.heads import read_layers
from gape.utils.validation import invalid_argument

#: Logit of the landmark gate for sinks, and minus that for nearly all other keys: 1 − l and l are then below 0.0004.
LOGIT = 8.0
#: Logit where sinks cannot be told from other keys: no key is a landmark.
CLOSED = -9.0
#: The share of other keys that may come nearer to the sinks.
_OUTLIERS = 5e-4
#: Tokens next to the sink that count neither as sinks nor as others.
_BESIDE = 8
#: What is added to the covariance of keys, as a part of its mean diagonal.
_RIDGE = 1e-3


class SinkLandmarks(NamedTuple):
    """Weights (L, Hk, D) and biases (L, Hk) of landmark gates that open for sinks alone, float32 on the CPU."""

    weight: Tensor
    bias: Tensor

    @property
    def heads(self) -> int:
        """How many key heads have a gate that opens."""
        return int((self.weight != 0).any(-1).sum())


@torch.no_grad()
def sink_landmarks(model: Any, ids: Tensor) -> SinkLandmarks:
    """Landmark gates that open for the first token of a text and for hardly any other key.

    Args:
        model: a causal language model without gates, in eval mode.
        ids: (B, N) beginnings of texts, on the model's device; eight texts or more, of 512 tokens or more, serve well.

    Raises:
        ValueError: texts too few or too short for their keys to be told apart.
    """
    if ids.dim() != 2 or ids.size(0) < 2 or ids.size(1) <= 2 * _BESIDE:
        raise invalid_argument("ids", ids, f"tokens (B, N) of 2 texts or more, each of more than {2 * _BESIDE} tokens")
    family = family_of(model)
    keys: dict[Any, list[Tensor]] = {}

    def collect(module: Any, x: Tensor, _: Any) -> None:
        keys.setdefault(module, []).append(family.layout.project(module, x)[1].double())

    for text in ids:
        read_layers(model, text[None], collect)
    fitted = [[_fitted(head) for head in torch.cat(keys[module]).unbind(1)] for module in family.modules(model)]
    weight, bias = (torch.stack([torch.stack([head[i] for head in layer]) for layer in fitted]) for i in (0, 1))
    return SinkLandmarks(weight, bias)


def _fitted(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (D,) and bias of the gate of one key head, whose keys are (B, N, D)."""
    sinks, others = keys[:, 0], keys[:, _BESIDE:].flatten(0, 1)
    spread = torch.cov(others.T)
    spread.diagonal().add_(_RIDGE * spread.diagonal().mean() + torch.finfo(spread.dtype).tiny)
    direction = torch.linalg.solve(spread, sinks.mean(0) - others.mean(0))
    low, high = torch.quantile(others @ direction, 1 - _OUTLIERS), (sinks @ direction).min()
    if not high > low:
        return torch.zeros_like(direction).float().cpu(), torch.tensor(CLOSED)
    slope = 2 * LOGIT / (high - low)
    return (slope * direction).float().cpu(), (-slope * (low + high) / 2).float().cpu()


@torch.no_grad()
def set_landmarks(model: Any, landmarks: SinkLandmarks) -> None:
    """Give the landmark gates of an injected model, which must be learned ones, these weights and biases.

    They are of keys as they are, also where the gates of the model read keys about their mean.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, MODULE, None), RetrofitGates)]
    gates = [getattr(module, MODULE) for module in layers]
    if not layers or any(each.landmark_projection is None for each in gates):
        raise invalid_argument("model", type(model).__name__, "one whose gates learn landmarks (learn_landmark=True)")
    for module, each in zip(layers, gates, strict=True):
        weight, bias = each.landmark_projection.weight, each.landmark_projection.bias
        weight.copy_(landmarks.weight[module.layer_idx])
        bias.copy_(landmarks.bias[module.layer_idx])
        if each.key_center is not None:
            bias.add_((weight * each.key_center).sum(-1))
