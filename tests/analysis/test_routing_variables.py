"""What is tracked while a model learns: means of the definitions, per layer and head."""

from __future__ import annotations

import pytest
import torch

from gape.analysis import attended
from gape.analysis.routing import routing_variables
from tests.models.tiny import model, tokens


@pytest.mark.parametrize("kv", [4, 2])
def test_they_are_the_means_of_the_definitions(kv: int) -> None:
    gpt, ids = model("p-rope+gape", n_kv_head=kv), tokens(2, 12)
    found = routing_variables(gpt, ids)
    assert [(row["layer"], row["head"]) for row in found] == [(layer, head) for layer in (0, 1) for head in range(4)]
    i, j = torch.arange(12.0).unsqueeze(1), torch.arange(12.0)
    for row, (layer, head) in zip(found, ((layer, head) for layer in (0, 1) for head in range(4)), strict=True):
        own = attended(gpt, ids)[layer]
        g, l = own.gate[:, head, :, None], own.landmark[:, head // (4 // kv), None]  # noqa: E741
        amplitude = own.scheme.gates.amplitude[head]
        mask = amplitude * g / gpt.config.context_length * (j * (1 - l) + i * l)
        seen = (j <= i).expand_as(mask)
        expected = {"mean_mask": mask[seen].mean(), "landmark": l.mean(), "gate": g.mean(), "amplitude": amplitude}
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value.detach()), rel=1e-5), name


def test_a_scheme_without_gates_has_none() -> None:
    assert routing_variables(model("rope"), tokens(1, 5)) == []
