"""Listening to an injected model: what its layers with gates hand to the operator when they read a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gape.hf.attend import Sides, attend
from gape.hf.forgetting import has_window
from gape.hf.language import LanguageModel
from gape.hf.wrap import Injected
from gape.ops import inputs
from gape.ops.inputs import Problem, bias_dtype
from gape.utils.validation import invalid_argument


@torch.no_grad()
def attended(model: LanguageModel, ids: Tensor) -> list[Problem]:
    """Read ids (B, N) and return what each layer with gates attends with, first layer first; nothing has gradients.

    Raises:
        ValueError: as :func:`gated_layers`.
    """
    heard: list[Problem] = []
    with _heard(gated_layers(model), heard):
        model.hidden(ids)
    return heard


def gated_layers(model: nn.Module) -> list[Any]:
    """The injected layers with gates, if each attends as the operator does: to all before it, by logits as they are.

    Raises:
        ValueError: there is none, or one has a sliding window or caps its logits.
    """
    layers = [module for module in model.modules() if isinstance(module, Injected) and module.gates is not None]
    if not layers:
        raise invalid_argument("model", type(model).__name__, "one that gape.hf.inject has put gates into")
    for layer in layers:
        module: Any = layer
        if layer.gape_cap is not None or has_window(module):
            what = "has a sliding window" if layer.gape_cap is None else "caps its logits"
            raise ValueError(f"model: layer {module.layer_idx} {what}, expected gates over all that came before")
    return layers


@contextmanager
def _heard(layers: list[Any], into: list[Problem]) -> Iterator[None]:
    """While open, whatever goes through the doors of the layers is added to a list."""

    def listening(q: Tensor, k: Tensor, v: Tensor, sides: Sides, *, scale: float, **told: Any) -> Any:
        dtype = bias_dtype(q.dtype)
        gate, landmark, amplitude = (side.to(dtype) for side in sides[:3])
        problem = Problem(
            q=q, k=k, v=v, gate=gate, landmark=landmark, amplitude=amplitude, scale=scale,
            context_length=sides.context_length, seen=inputs.visibility(q, k),
        )  # fmt: skip
        into.append(problem)
        return attend(q, k, v, sides, scale=scale, **told)

    for layer in layers:
        # An attribute of the instance hides that of the class until it is deleted.
        vars(layer)["gape_attend"] = listening
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["gape_attend"]
