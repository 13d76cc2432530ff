"""Skipping: what is dropped is at most eps, and forward and backward drop the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gape
from gape.ops.triton.launch import tiles_for

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, N, D = 64, 700, 16


def heads(seed: int, floor: float, landmarks: float = 0.0, n: int = N, n_heads: int = 2) -> dict[str, Tensor]:
    """Random heads whose rates are `floor` / T and more, with a share of keys that are landmarks."""
    g = torch.Generator().manual_seed(seed)
    spared = (torch.rand(1, n_heads, n, generator=g) < landmarks).float() * 0.98
    made = {
        "q": torch.randn(1, n_heads, n, D, generator=g),
        "k": torch.randn(1, n_heads, n, D, generator=g),
        "v": torch.randn(1, n_heads, n, D, generator=g),
        "gate": floor + torch.randn(1, n_heads, n, generator=g).exp(),
        "landmark": spared,
        "amplitude": torch.ones(n_heads),
    }
    return {name: x.to(DEVICE) for name, x in made.items()}


def kept_pairs(x: dict[str, Tensor], eps: float) -> Tensor:
    """The rule written out: which pairs (H, N, N) are in tiles that the kernels keep."""
    tile = tiles_for(x["q"], x["v"], "attend", skip=True)
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    q, k, rate, u = (t[0].double() for t in (x["q"], x["k"], x["gate"] / T, 1 - x["landmark"]))
    n = q.size(1)
    place = torch.arange(n, device=DEVICE)
    logits = (q @ k.mT) * D**-0.5 - rate[..., None] * u[:, None] * (place[:, None] - place)
    keep = torch.zeros_like(logits, dtype=torch.bool)
    for start in range(0, n, rows):
        row = slice(start, min(start + rows, n))
        whole = (start + 1) // columns * columns
        near = logits[:, row, whole : row.stop].masked_fill(place[whole : row.stop] > place[row, None], -torch.inf)
        low = near.logsumexp(-1) + math.log(eps / n)
        keep[:, row, whole:] = True
        for first in range(0, whole, columns):
            column = slice(first, first + columns)
            reach = q[:, row].norm(dim=-1) * k[:, column].norm(dim=-1).amax(-1, keepdim=True) * D**-0.5
            least = u[:, column].amin(-1, keepdim=True)
            best = reach - rate[:, row] * least * (place[row] - (column.stop - 1))
            keep[:, row, column] = (best > low).any(-1)[:, None, None]
    return keep


@pytest.mark.parametrize(("floor", "landmarks", "share"), [(20.0, 0.0, 0.7), (20.0, 0.01, 0.9), (0.0, 0.0, 1.1)])
def test_forward_and_backward_drop_what_the_rule_drops(floor: float, landmarks: float, share: float) -> None:
    eps = 1e-3
    x = heads(0, floor=floor, landmarks=landmarks)
    keep = kept_pairs(x, eps)
    assert keep.tril().sum() < share * keep.new_ones(keep.shape).tril().sum()
    got, want = [], []
    for into, options in (
        (got, {"impl": "triton", "eps": eps}),
        (want, {"impl": "reference", "attn_mask": keep[None]}),
    ):
        leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
        out = gape.gated_attention(**leaves, context_length=T, **options)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)).sum().backward()
        into += [out.detach(), *(leaves[name].grad for name in leaves)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 1e-5 * max(float(b.norm()), 1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("floor", "landmarks"), [(0.0, 0.0), (4.0, 0.01), (30.0, 0.01)])
def test_dropped_mass_is_at_most_eps(seed: int, floor: float, landmarks: float) -> None:
    eps = 1e-2
    x = heads(seed, floor, landmarks, n=400)
    told = gape.detailed_attention(**x, context_length=T, impl="triton", eps=eps)
    exact = gape.detailed_attention(**{n: t.double() for n, t in x.items()}, context_length=T, impl="reference")
    dropped = 1 - (told.lse.double() - exact.lse).exp()
    assert dropped.max() <= eps
    assert dropped.min() > -1e-5


def test_a_landmark_keeps_its_tile_alive() -> None:
    x = heads(0, floor=30.0)
    forgetful = gape.detailed_attention(**x, context_length=T, impl="triton", eps=1e-3).visited
    x["landmark"][:, :, 5] = 1.0
    spared = gape.detailed_attention(**x, context_length=T, impl="triton", eps=1e-3).visited
    columns = tiles_for(x["q"], x["v"], "attend", skip=True)["BLOCK_N"]
    tiles = -(-N // columns)
    # One tile more for every row of tiles that had not kept it.
    assert forgetful < 0.35
    assert 0.5 * tiles < float(spared - forgetful) * tiles * (tiles + 1) / 2 <= tiles


def test_nothing_is_dropped_unless_asked_for() -> None:
    x = heads(0, floor=30.0, n=100)
    assert gape.detailed_attention(**x, context_length=T, impl="triton").visited == 1
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    seen = {"q_positions": shuffled, "k_positions": shuffled}
    told = gape.detailed_attention(**x, context_length=T, impl="triton", eps=0.5, **seen)
    exact = gape.detailed_attention(**x, context_length=T, impl="reference", **seen)
    assert told.visited == 1
    torch.testing.assert_close(told.lse, exact.lse)


@pytest.mark.parametrize("eps", [-0.1, 1.0, True, "much", float("nan")])
def test_refuses_what_is_no_weight(eps: object) -> None:
    with pytest.raises(ValueError, match=r"^eps: "):
        gape.gated_attention(**heads(0, 0.0, n=3), context_length=T, eps=eps)
