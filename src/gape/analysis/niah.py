"""What a model trained on the needle task attends to, as numbers that can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gape import theory
from gape.analysis.entropy import statistics
from gape.analysis.lm import round_digits
from gape.analysis.routing import score_bounds
from gape.analysis.tap import Attended, attended
from gape.tasks import niah
from gape.utils.validation import invalid_argument

#: Kinds of token; landmarks are averaged for each.
KINDS = ("filler", "key", "equals", "digit", "query")


@torch.no_grad()
def inspect_model(
    model: nn.Module,
    config: niah.NIAHConfig,
    *,
    factors: Sequence[int] = (1, 2, 4),
    samples: int = 10,
    seed: int = 0,
    trace: bool = True,
) -> dict[str, Any]:
    """Entropy at several lengths, gates at the training length, one sequence in full; read one sequence at a time.

    Factors without 1, the length at which gates are read, are refused.

    Returns:
        Plain lists and numbers of six significant digits. `spread` has an entry per factor with `entropy`, `distance`,
        `sink` (means over all queries) and `query_entropy` (of the final query), each by sample, layer and head.
        `gates` has, at the final query and the training length, the amplitude, query gate, rate, effective context
        length, required and actual landmark of the digit that answers, each by sample, layer and head, and mean
        landmarks by kind of token; None for a scheme without gates. `trace` has landmarks along the first sequence.
    """
    if 1 not in factors:
        raise invalid_argument("factors", factors, "multiples of the length, 1 among them")
    device = next(model.parameters()).device
    results: dict[str, Any] = {"spread": [], "gates": None, "trace": None}
    gates: list[dict[str, Any]] = []
    for factor in factors:
        at = config.at(config.length * factor)
        spread: list[dict[str, Any]] = []
        for index in range(samples):
            haystack = niah.sample(at, 1, seed=seed, first=index, split="test", device=device)
            layers = attended(model, haystack.ids, logits_to_keep=1)
            spread.append(_spread(layers))
            if factor == 1 and layers[0].gates is not None:
                gates.append(_gates(layers, haystack, at))
            if trace and factor == 1 and index == 0:
                results["trace"] = _trace(layers, haystack, at)
        results["spread"].append({"factor": factor, "length": at.length, "needles": at.needles} | _columns(spread))
    if gates:
        results["gates"] = _columns(gates)
    return results


def _spread(layers: list[Attended]) -> dict[str, Any]:
    """By layer and head: means over the queries of one sequence, and the last query's entropy."""
    each = [statistics(layer) for layer in layers]
    means = {
        name: [round_digits(getattr(s, name)[0].mean(-1)) for s in each] for name in ("entropy", "distance", "sink")
    }
    return means | {"query_entropy": [round_digits(s.entropy[0, :, -1]) for s in each]}


def _gates(layers: list[Attended], haystack: niah.Haystack, config: niah.NIAHConfig) -> dict[str, Any]:
    """By layer and head: the gates of the final query and of the digit that answers it."""
    digit = haystack.needles[:, config.target_index] + niah.NEEDLE - 1
    kinds = _kinds(haystack.ids[0])
    landmarks: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    rows: dict[str, Any] = {}
    last = haystack.ids.size(1) - 1
    for layer in layers:
        if layer.gates is None or layer.gate is None or layer.landmark is None or layer.rate is None:
            continue
        rate, bounds = layer.rate[0, :, -1], score_bounds(layer)[0, :, -1]
        values = {
            "amplitude": layer.gates.amplitude, "query_gate": layer.gate[0, :, -1], "rate": rate,
            "effective": torch.as_tensor(theory.effective_context_length(rate, bounds, last, 0.01)),
            "required": torch.as_tensor(theory.required_landmark(last, digit.to(rate.dtype) / last, rate, bounds)),
            "target_landmark": layer.landmark[0, :, digit[0]],
        }  # fmt: skip
        for name, value in values.items():
            rows.setdefault(name, []).append(round_digits(value))
        for number, kind in enumerate(KINDS):
            landmarks[kind].append(round_digits(layer.landmark[0, :, kinds == number].mean(-1)))
    return rows | {"landmark": landmarks}


def _trace(layers: list[Attended], haystack: niah.Haystack, config: niah.NIAHConfig) -> dict[str, Any] | None:
    """Landmarks along a sequence; None without gates."""
    landmarks = [round_digits(layer.landmark[0], 4) for layer in layers if layer.landmark is not None]
    if not landmarks:
        return None
    needles = haystack.needles[0].tolist()
    digit = needles[config.target_index] + niah.NEEDLE - 1
    return {"length": config.length, "needles": needles, "target_at": digit, "landmark": landmarks}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists by sample instead of one record per sample; nested records likewise."""
    if not rows:
        return {}
    return {
        name: _columns([row[name] for row in rows]) if isinstance(value, dict) else [row[name] for row in rows]
        for name, value in rows[0].items()
    }


def _kinds(ids: Tensor) -> Tensor:
    """The index in KINDS of each token."""
    edges = torch.tensor([niah.KEY, niah.EQUALS, niah.QUERY, niah.DIGIT_0], device=ids.device)
    return torch.tensor([0, 1, 2, 4, 3], device=ids.device)[torch.bucketize(ids, edges, right=True)]
