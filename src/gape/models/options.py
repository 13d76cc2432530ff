"""Options that differ from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gape.utils.validation import invalid_argument

#: Options that may be given as one list for each layer.
BY_LAYER = ("gate_floor",)


def of_layer(options: Mapping[str, Any], layer: int, n_layer: int) -> dict[str, Any]:
    """The options of one layer.

    A number holds for all heads of all layers, a list for the heads of every layer. A list of lists has one for each
    layer: as many numbers as heads, or one number for all of them.

    Args:
        options: of a model.
        layer: which, from 0.
        n_layer: how many there are.

    Raises:
        ValueError: lists for another number of layers, or numbers among them.
    """
    chosen = dict(options)
    for name in BY_LAYER:
        given = options.get(name)
        if not isinstance(given, list | tuple) or not any(isinstance(each, list | tuple) for each in given):
            continue
        if len(given) != n_layer or not all(isinstance(each, list | tuple) and each for each in given):
            raise invalid_argument(name, given, f"a list of numbers for each of the {n_layer} layers")
        own = given[layer]
        chosen[name] = own[0] if len(own) == 1 else list(own)
    return chosen
