"""Masks, spectra and effective contexts of a layer against the pairs written out."""

from __future__ import annotations

import pytest
import torch

from gape import theory
from gape.analysis import attended, lm, statistics
from gape.analysis.lm import pair_norms, rotary
from gape.analysis.maps import mask_map, mean_mask
from gape.analysis.passages import Passage
from gape.analysis.routing import effective_context, routing_variables
from tests.models.tiny import model, tokens

N = 23


@torch.no_grad()
def test_masks_by_cell_are_means_over_the_pairs() -> None:
    record = attended(model("p-rope+gape"), tokens(2, N))[1]
    i = torch.arange(N, dtype=torch.float64)
    landmark = record.landmark.repeat_interleave(2, dim=1)
    m = theory.mask(i[:, None], i, record.rate.unsqueeze(-1), landmark.unsqueeze(-2))
    earlier = i[:, None] >= i
    torch.testing.assert_close(mean_mask(record), (m * earlier).sum((-1, -2)) / earlier.sum())
    cells = mask_map(record, 4)
    starts = [row * N // 4 for row in range(5)]
    for r in range(4):
        for c in range(4):
            rows, columns = slice(starts[r], starts[r + 1]), slice(starts[c], starts[c + 1])
            inside = earlier[rows, columns]
            if not inside.any():
                assert bool(cells[..., r, c].isnan().all())
            else:
                expected = (m[..., rows, columns] * inside).sum((-1, -2)) / inside.sum()
                torch.testing.assert_close(cells[..., r, c], expected)


def test_masks_need_gates() -> None:
    with pytest.raises(ValueError, match="gates"):
        mean_mask(attended(model("rope"), tokens(1, N))[0])


@pytest.mark.parametrize("position", ["rope", "yarn+gape"])
@torch.no_grad()
def test_norms_of_pairs_are_those_before_rotation(position: str) -> None:
    gpt = model(position)
    caught: dict[str, torch.Tensor] = {}
    layer = gpt.layers[1].attention
    layer.qkv.register_forward_hook(lambda _, args, out: caught.__setitem__("qkv", out))
    record = attended(gpt, tokens(2, N))[1]
    width = layer.content_dim
    q = caught["qkv"][..., : 4 * width].view(2, N, 4, width).transpose(1, 2)
    expected = (q[..., : width // 2] ** 2 + q[..., width // 2 :] ** 2).sqrt().mean(2)
    scheme = rotary(record.scheme)
    assert scheme is not None
    torch.testing.assert_close(pair_norms(record.q, scheme), expected)
    assert pair_norms(record.k, scheme).shape == (2, 2, width // 2)


def test_a_scheme_that_does_not_rotate_has_no_spectrum() -> None:
    with pytest.raises(ValueError, match="rotates"):
        lm.spectrum(model("nope+gape"), [Passage("a", tokens(1, N)[0].numpy())])


@pytest.mark.parametrize(("position", "options"), [("nope+gape", {"gate_floor": 40.0}), ("alibi", {})])
@torch.no_grad()
def test_attention_uses_no_more_than_the_effective_context(position: str, options: dict[str, float]) -> None:
    if options:
        options |= {"learn_landmark": False, "init_landmark_bias": -40.0}
    record = attended(model(position, options=options), tokens(1, 300))[0]
    effective = effective_context(record, 0.01)
    used = statistics(record, (0.01,)).used[..., 0]
    assert bool((effective < 300).any())
    # The used distance is known to the spacing of its edges.
    assert bool((used <= 1.1 * effective + 1).all())
    if position == "alibi":
        torch.testing.assert_close(
            effective[0, :, 0], (2 * _bound(record) + torch.tensor(100.0).log()) / _slopes(record), rtol=1e-5, atol=1e-5
        )


def _bound(record) -> torch.Tensor:
    k = record.k.repeat_interleave(2, dim=1)[0, :, 0]
    return record.scale * record.q[0, :, 0].norm(dim=-1) * k.norm(dim=-1)


def _slopes(record) -> torch.Tensor:
    return torch.tensor([2.0 ** (-2 * head) for head in range(1, 5)])


@pytest.mark.parametrize("kv", [4, 2])
def test_routing_variables_are_the_means_of_the_definitions(kv: int) -> None:
    gpt, ids = model("p-rope+gape", n_kv_head=kv), tokens(2, 12)
    rows = routing_variables(gpt, ids)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in range(4)]
    i, j = torch.arange(12.0).unsqueeze(1), torch.arange(12.0)
    for row, (layer, head) in zip(rows, ((layer, head) for layer in (0, 1) for head in range(4)), strict=True):
        own = attended(gpt, ids)[layer]
        g, l = own.gate[:, head, :, None], own.landmark[:, head // (4 // kv), None]  # noqa: E741
        amplitude = own.scheme.gates.amplitude[head]
        mask = amplitude * g / gpt.config.context_length * (j * (1 - l) + i * l)
        record = (j <= i).expand_as(mask)
        expected = {"mean_mask": mask[record].mean(), "landmark": l.mean(), "gate": g.mean(), "amplitude": amplitude}
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value.detach()), rel=1e-5), name


def test_a_scheme_without_gates_has_no_routing_variables() -> None:
    assert routing_variables(model("rope"), tokens(1, 5)) == []
