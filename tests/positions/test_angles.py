"""Cosines and sines that layers share: made once for a tensor of positions, and anew when it was written to."""

from __future__ import annotations

import torch

from gape import positions as schemes


def rotary(theta: float = 10000.0) -> schemes.Rotary:
    made = schemes.build("rope", n_heads=2, head_dim=8, theta=theta)
    assert isinstance(made, schemes.Rotary)
    return made


def test_layers_share_angles_of_one_tensor() -> None:
    where = torch.arange(5, 8)
    first = rotary().angles(where)
    assert rotary().angles(where) is first
    assert torch.equal(torch.stack(first), torch.stack(rotary().cos_sin(where)))
    assert torch.equal(rotary(100.0).angles(where)[0], rotary(100.0).cos_sin(where)[0])
    assert rotary().angles(where) is first


def test_positions_counted_on_in_place_get_angles_of_their_own() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            where = torch.arange(3)
            rotary().angles(where)
            where += 1
            assert torch.equal(rotary().angles(where)[0], rotary().cos_sin(torch.arange(1, 4))[0])
