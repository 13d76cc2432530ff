"""Skipping: what is dropped is at most eps, and forward and backward drop the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gape
from gape.ops.triton.configs import tiles_for
from tests.ops.skipped import kept_tiles

JITFunction = pytest.importorskip("triton").runtime.jit.JITFunction
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, D = 64, 16


def heads(
    seed: int, floor: float, landmarks: float = 0.0, *, n_q: int, n_k: int, n_heads: int = 1, groups: int = 1
) -> dict[str, Tensor]:
    """Random heads whose rates are `floor` / T and more, with a share of keys that are landmarks."""
    g = torch.Generator().manual_seed(seed)
    spared = (torch.rand(1, n_heads, n_k, generator=g) < landmarks).float() * 0.98
    made = {
        "q": torch.randn(1, n_heads * groups, n_q, D, generator=g),
        "k": torch.randn(1, n_heads, n_k, D, generator=g),
        "v": torch.randn(1, n_heads, n_k, D, generator=g),
        "gate": floor + torch.randn(1, n_heads * groups, n_q, generator=g).exp(),
        "landmark": spared,
        "amplitude": torch.ones(n_heads * groups),
    }
    return {name: x.to(DEVICE) for name, x in made.items()}


def varied_heads(seed: int, n_heads: int, most_keys: int = 1500) -> tuple[dict[str, Tensor], float]:
    """Heads of every kind, and an eps: weak and strong rates, none to many landmarks, short and long q and k.

    Content lies along one direction of its head, more or less, so that logits come near what norms allow and the bound
    has little to spare.
    """
    g = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g)

    n_k = int(between(most_keys / 5, most_keys))
    n_q = int(n_k * between(0.2, 1.0))
    per_head, along = (n_heads, 1, 1), between(0.0, 1.0, n_heads, 1, 1)
    direction = torch.randn(n_heads, 1, D, generator=g)

    def content(n: int) -> Tensor:
        spread = torch.randn(n_heads, n, D, generator=g)
        return (along * direction + (1 - along) * spread) * 10 ** between(-0.7, 0.4, *per_head)

    spared = torch.rand(n_heads, n_k, generator=g) < 10 ** between(-4.0, -1.0, n_heads, 1)
    rate = (
        60 * between(0.0, 1.0, n_heads, 1) ** 3
        + (torch.randn(n_heads, n_q, generator=g) * between(0.0, 1.5, n_heads, 1)).exp()
    )
    made = {
        "q": content(n_q),
        "k": content(n_k),
        "v": torch.randn(n_heads, n_k, D, generator=g),
        "gate": rate,
        "landmark": torch.where(spared, between(0.5, 1.0, n_heads, n_k), between(0.0, 0.3, n_heads, 1)),
        "amplitude": between(0.3, 2.0, n_heads),
    }
    placed = {name: x.to(DEVICE) if name == "amplitude" else x[None].to(DEVICE) for name, x in made.items()}
    return placed, float(10 ** between(-4.0, -1.0))


def graded_heads(n_q: int, n_k: int, eps: float) -> dict[str, Tensor]:
    """Heads without gates whose keys weigh what norms allow, tile by tile about an even share of eps, below and above.

    Each threshold is some query's, and a tile that one kernel alone left away would show.
    """
    x = heads(n_k, 0.0, n_q=n_q, n_k=n_k, n_heads=3)
    g = torch.Generator().manual_seed(n_k)
    # In natural logarithms, beside an even share.
    least, most = torch.tensor([[-2.0, 0.2, -5.0], [7.0, 1.2, 0.3]])[..., None]
    level = least + (most - least) * torch.rand(3, -(-n_k // 32), generator=g)
    keys = 11 + math.log(eps / n_k) + level.repeat_interleave(32, 1)[:, :n_k]
    # What the queries' own tiles and the nearest hold.
    keys[:, -n_q - 5 :] = 8.0
    x["q"], x["k"] = 0.02 * x["q"], 0.02 * x["k"]
    x["q"][..., 0] = D**0.5 * (0.9 + 0.2 * torch.rand(n_q, generator=g)).to(DEVICE)
    x["k"][..., 0] = keys.to(DEVICE)
    return x | {"gate": torch.zeros_like(x["gate"])}


def dropped_mass(x: dict[str, Tensor], eps: float) -> tuple[Tensor, float]:
    """What each query lost of its softmax, (1, Hq, Nq), beside float64, and the fraction of tiles visited."""
    told = gape.detailed_attention(**x, context_length=T, impl="triton", eps=eps)
    exact = gape.detailed_attention(**{n: t.double() for n, t in x.items()}, context_length=T, impl="reference")
    return 1 - (told.lse.double() - exact.lse).exp(), float(told.visited)


def kept_pairs(x: dict[str, Tensor], eps: float) -> Tensor:
    """Which pairs (Hq, Nq, Nk) are in tiles that the kernels keep."""
    size = tiles_for(x["q"], x["v"], "fwd", skip=True)
    tile = size["BLOCK_M"], size["BLOCK_N"]
    q, rate = x["q"][0].double(), x["gate"][0].double() / T
    groups = q.size(0) // x["k"].size(1)
    k, u = (t[0].double().repeat_interleave(groups, 0) for t in (x["k"], 1 - x["landmark"]))
    tiles = kept_tiles(q, k, rate, u, D**-0.5, eps, tile)
    pairs = tiles.repeat_interleave(tile[0], 1).repeat_interleave(tile[1], 2)[:, : q.size(1), : k.size(1)]
    return pairs.tril(k.size(1) - q.size(1))


#: 32 tiles are judged at once and 32 bounds added up, so some cases have more; without a landmark among
#: 32, none is. A case has options, eps, what part of the pairs it should keep, and a dtype.
CASES = {
    "all tiles kept": ({"floor": 0.0, "n_q": 550, "n_k": 550}, 1e-3, (0.99, 1.0), torch.float32),
    "most dropped": ({"floor": 20.0, "landmarks": 0.001, "n_q": 1120, "n_k": 1120}, 1e-3, (0.1, 0.6), torch.float32),
    "last queries, grouped": (
        {"floor": 20.0, "landmarks": 0.004, "n_q": 45, "n_k": 2500, "groups": 2}, 1e-3, (0.1, 0.9), torch.float32,
    ),
    "few landmarks, tiny eps": (
        {"floor": 20.0, "landmarks": 0.0005, "n_q": 45, "n_k": 2500}, 1e-36, (0.05, 0.4), torch.float32,
    ),
    "half precision": ({"floor": 20.0, "landmarks": 0.004, "n_q": 70, "n_k": 500}, 1e-3, (0.1, 0.9), torch.float16),
}  # fmt: skip


#: They take longest in the interpreter, and others judge more than 32 tiles, too.
LONG = ("all tiles kept", "last queries, grouped", "most dropped", "few landmarks, tiny eps")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES])
def test_forward_and_backward_drop_what_the_rule_drops(name: str) -> None:
    options, eps, (least, most), dtype = CASES[name]
    x = {n: t.to(dtype) if n in "qkv" else t for n, t in heads(0, **options).items()}
    assert least < compared(x, eps) <= most


@pytest.mark.parametrize(
    "n_q", [33, pytest.param(34, marks=pytest.mark.slow)], ids=["first query ends a tile", "one before its end"]
)
def test_every_threshold_and_the_nearest_tiles(n_q: int) -> None:
    assert 0.3 < compared(graded_heads(n_q, n_k=320, eps=0.3), 0.3) < 0.9


def compared(x: dict[str, Tensor], eps: float) -> float:
    """Outputs and gradients beside those of the definition without what the rule drops; the share of pairs it keeps."""
    dtype, keep, got, want = x["q"].dtype, kept_pairs(x, eps), [], []
    for into, wide, how in (
        (got, x, {"impl": "triton", "eps": eps}),
        (want, {n: t.double() for n, t in x.items()}, {"impl": "reference", "attn_mask": keep[None]}),
    ):
        leaves = {n: t.clone().requires_grad_() for n, t in wide.items()}
        out = gape.gated_attention(**leaves, context_length=T, **how)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype)).sum().backward()
        into += [out.detach(), *(leaves[n].grad for n in leaves)]
    bound = 1e-5 if dtype == torch.float32 else 3e-3
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() < bound * max(float(b.norm()), 1.0)
    return float(keep.sum() / keep.new_ones(keep.shape).tril(keep.size(2) - keep.size(1)).sum())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("floor", "landmarks"), [(0.0, 0.0), (4.0, 0.01), (30.0, 0.01)])
def test_dropped_mass_is_at_most_eps(seed: int, floor: float, landmarks: float) -> None:
    """A few heads, which the interpreter has time for."""
    eps = 1e-2
    dropped, _ = dropped_mass(heads(seed, floor, landmarks, n_q=20, n_k=400, n_heads=2), eps)
    assert dropped.max() <= eps
    assert dropped.min() > -1e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_dropped_mass_is_at_most_eps_in_a_thousand_heads() -> None:
    """Against float64, 1,024 heads that differ in gates, landmarks, norms and lengths, in three dtypes."""
    visited = []
    for seed in range(16):
        x, eps = varied_heads(seed, n_heads=64)
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        dropped, share = dropped_mass({n: t.to(dtype) if n in "qkv" else t for n, t in x.items()}, eps)
        visited.append(share)
        assert dropped.max() <= eps, (seed, dtype)
        assert dropped.min() > -1e-4, (seed, dtype)
    # Nothing is shown where nothing is dropped.
    assert 0.1 < sum(visited) / len(visited) < 0.8


def test_a_landmark_keeps_its_tile_alive() -> None:
    n = 330
    x = heads(0, floor=60.0, n_q=n, n_k=n)
    forgetful = gape.detailed_attention(**x, context_length=T, impl="triton", eps=1e-3).visited
    x["landmark"][:, :, 5] = 1.0
    spared = gape.detailed_attention(**x, context_length=T, impl="triton", eps=1e-3).visited
    columns = tiles_for(x["q"], x["v"], "fwd", skip=True)["BLOCK_N"]
    tiles = -(-n // columns)
    all_tiles = tiles * (tiles + 1) / 2
    # The diagonal and the tile before it; with the landmark one more in every row of tiles beyond.
    assert round(float(forgetful) * all_tiles) == sum(min(row, 2) for row in range(1, tiles + 1))
    assert round(float(spared - forgetful) * all_tiles) == tiles - 2


def test_where_the_first_tile_lies_that_may_matter() -> None:
    """Backward looks no further back: without landmarks at nothing that is judged, with one as far as that lies."""
    n, eps = 330, 1e-3
    x, layout = heads(0, floor=60.0, n_q=n, n_k=n), (None, None, None, None, None, True)
    tiles = -(-n // tiles_for(x["q"], x["v"], "fwd", skip=True)["BLOCK_N"])
    for landmark, expected in ((None, [max(row - 1, 0) for row in range(tiles)]), (5, [0] * tiles)):
        if landmark is not None:
            x["landmark"][:, :, landmark] = 1.0
        told = (x["q"], x["k"], x["v"], x["gate"] / T, 1 - x["landmark"])
        earliest = torch.ops.gape.attention_fwd(*told, *layout, D**-0.5, eps)[4]
        assert earliest.flatten().tolist() == expected


@pytest.mark.parametrize("name", ["k", "landmark"])
def test_what_is_not_a_number_is_not_skipped(name: str) -> None:
    """A broken key must show, however far it is and however many are left away between."""
    x = heads(0, floor=60.0, n_q=20, n_k=2200)
    x[name][0, 0, 3] = float("nan")
    assert gape.gated_attention(**x, context_length=T, impl="triton", eps=1e-3).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_compiled_kernels_skip_alike() -> None:
    """Heads of 64 in half precision, whose kernels have a cap of registers unless a compiler launches them."""
    x = heads(0, floor=20.0, landmarks=0.002, n_q=550, n_k=550)
    x |= {n: x[n].repeat(1, 1, 1, 4).half() for n in "qkv"}

    def operator(**tensors: Tensor) -> Tensor:
        return gape.gated_attention(**tensors, context_length=T, impl="triton", eps=1e-3)

    found = []
    for form in (operator, torch.compile(operator, fullgraph=True)):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        out = form(**leaves)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    for eager, compiled in zip(*found, strict=True):
        assert (compiled.float() - eager.float()).norm() < 1e-3 * eager.float().norm()


def test_nothing_is_dropped_unless_asked_for() -> None:
    x = heads(0, floor=30.0, n_q=100, n_k=100)
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
        gape.gated_attention(**heads(0, 0.0, n_q=3, n_k=3), context_length=T, eps=eps)
