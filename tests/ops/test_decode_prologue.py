"""A token of decoding written to its pages in one launch, against the scheme's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gape import positions as schemes
from gape.ops.paged import PAGE
from gape.ops.prologue import decode_prologue, prologue_runs
from gape.positions.gated import step_under
from tests.ops.test_paged import DEVICE, cached

kernels = pytest.importorskip("gape.ops.triton.paged")

HEADS, KEY_HEADS, D, D_V, SCALE = 4, 2, 26, 20, 0.125
LENGTHS = [[0, 63], [64, 100]]
EACH = torch.tensor([[7], [100_000]])
CASES: dict[str, tuple[str, dict[str, Any], torch.Tensor]] = {
    "first token": ("p-rope+gape", {}, torch.arange(1)),
    "each row its own": ("rope+gape", {}, EACH),
    "int32": ("yarn+gape", {"factor": 4.0}, EACH.int()),
    "no rotation": ("nope+gape", {}, torch.arange(5, 6)),
    "a floor for each head": ("rope+gape", {"gate_floor": [0.0, 0.5, 2.0, 80.0]}, EACH),
    "two rotations": ("rope+gape", {"head_positions": ["rope", "hope"]}, EACH),
    "two rotations, one position": ("rope+gape", {"head_positions": ["nope", "rope"]}, torch.arange(5, 6)),
    "scores grow": ("rope+gape", {"head_positions": ["rope", "hope"], "log_scale": [False, True]}, EACH),
    "fixed gates": ("p-rope+gape", {"learn_gate": False, "learn_landmark": False}, EACH),
}
IN_ALL_DTYPES = ("first token", "two rotations")
# The interpreter cuts numbers off where they become bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def built(name: str, **options: Any) -> schemes.Gated:
    torch.manual_seed(0)
    scheme = schemes.build(name, n_heads=HEADS, n_kv_heads=KEY_HEADS, head_dim=D, context_length=64, **options)
    assert isinstance(scheme, schemes.Gated)
    for parameter in scheme.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    return scheme.to(DEVICE)


def projected(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v as a projection leaves them: side by side."""
    sizes = [HEADS * D, KEY_HEADS * D, KEY_HEADS * D_V]
    x = torch.randn(2, 1, sum(sizes), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).split(sizes, -1)
    return [part.unflatten(-1, (-1, d)).transpose(1, 2) for part, d in zip(x, (D, D, D_V), strict=True)]


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, dtype) for case in CASES for dtype in (DTYPES if case in IN_ALL_DTYPES else DTYPES[1:2])]
)
@torch.no_grad()
def test_does_what_the_scheme_does(case: str, dtype: torch.dtype) -> None:
    """Content bit for bit, gates to their last bits, each token behind the keys of its sequence."""
    name, options, positions = CASES[case]
    given, scheme, positions = (
        cached(LENGTHS, D, D_V, dtype, way="kernel"),
        built(name, **options),
        positions.to(DEVICE),
    )
    pages, (q, k, v), step = given.pages, projected(dtype), scheme.step(positions)
    assert step is not None
    measured = (torch.zeros(HEADS, device=DEVICE), torch.full((HEADS,), -torch.inf, device=DEVICE))
    got_q, rate = decode_prologue(q, k, v, step, pages, scale=SCALE, measured=measured)
    (turned_q, gate), (turned_k, landmark) = scheme.queries(q, positions), scheme.keys(k, positions)
    assert torch.equal(got_q, turned_q)
    torch.testing.assert_close(rate, scheme.gates.amplitude[:, None] * gate / 64, atol=0, rtol=2**-16)
    written_k, written_v, u, j = kernels.read_keys(pages, pages.lengths.unsqueeze(-1))
    assert torch.equal(written_k[..., :D], turned_k)
    assert torch.equal(written_v[..., :D_V], v)
    assert not written_k[..., D:].any()
    assert not written_v[..., D_V:].any()
    torch.testing.assert_close(u, 1 - landmark, atol=2**-22, rtol=2**-16)
    assert torch.equal(j[:, :, 0], positions.int().expand(2, 1).expand(2, KEY_HEADS))
    torch.testing.assert_close(pages.key_norm, turned_k.float().norm(dim=-1)[..., 0])
    torch.testing.assert_close(measured[0], SCALE * turned_q.float().norm(dim=-1).amax((0, 2)))
    own = -SCALE * (turned_q.float() * turned_k.float().repeat_interleave(HEADS // KEY_HEADS, 1)).sum(-1)
    torch.testing.assert_close(measured[1], own.amax((0, 2)), atol=1e-5, rtol=1e-4)
    token = (given.pages.layout.nbytes - given.pages.layout.exposures_at) // PAGE + (32 + 24) * dtype.itemsize
    assert sum(int((slab != 255).sum()) for slab in given.slabs) <= 4 * token


@torch.no_grad()
def test_strength_and_angles_as_an_injected_model_has_them() -> None:
    """Cosines as wide as the head, whose halves are alike, and Γ times the size of a strength."""
    scheme, positions = built("rope+gape"), EACH.to(DEVICE)
    q, k, v = projected(torch.float16)
    cos, sin = scheme.base.angles(positions)
    strength = torch.tensor([-2.0, 0.0, 1.0, 0.5], device=DEVICE)
    angles = (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    step = step_under(scheme.gates, positions, angles, context_length=64.0, strength=strength)
    assert step is not None
    pages = cached(LENGTHS, D, D_V, torch.float16, way="kernel").pages
    got, rate = decode_prologue(q, k, v, step, pages, scale=SCALE)
    assert torch.equal(got, scheme.queries(q, positions)[0])
    amplitude = (scheme.gates.amplitude * strength.abs())[:, None]
    torch.testing.assert_close(rate, amplitude * scheme.gates.gate(q) / 64, atol=0, rtol=2**-16)


@torch.no_grad()
def test_half_precision_gates_are_read_as_they_are() -> None:
    scheme, (q, k, v) = built("p-rope+gape").half(), projected(torch.float16)
    step = scheme.step(EACH.to(DEVICE))
    assert step is not None
    _, rate = decode_prologue(q, k, v, step, cached(LENGTHS, D, D_V, torch.float16, way="kernel").pages, scale=SCALE)
    expected = scheme.gates.amplitude[:, None] * scheme.gates.gate(q) / 64
    torch.testing.assert_close(rate, expected, atol=0, rtol=2**-16)


def test_a_scheme_that_does_more_than_rotate_and_read_gates_has_no_step() -> None:
    learning, wide, hooked = built("p-rope+gape"), built("p-rope+gape").double(), built("p-rope+gape")
    assert hooked.gates.landmark_projection is not None
    hooked.gates.landmark_projection.register_forward_hook(lambda *_: None)
    positions = EACH.to(DEVICE)
    assert learning.step(positions) is None
    with torch.no_grad():
        assert [scheme.step(positions) is None for scheme in (learning, wide, hooked)] == [False, True, True]


@torch.no_grad()
def test_without_a_page_nothing_is_written() -> None:
    given, scheme = cached(LENGTHS, D, D_V, torch.float16, way="kernel"), built("rope+gape")
    q, k, v = projected(torch.float16)
    given.pages.lengths.fill_(given.pages.addresses.size(-1) * PAGE)
    given.pages.lengths[0, 0], given.pages.addresses[0, 0, 0] = 5, 0
    step = scheme.step(EACH.to(DEVICE))
    assert step is not None
    decode_prologue(q, k, v, step, given.pages, scale=SCALE)
    assert all((slab == 255).all() for slab in given.slabs)
    assert not given.pages.key_norm.any()


def test_runs_on_a_gpu_for_one_token() -> None:
    q, k, v = projected(torch.float16)
    pages = cached(LENGTHS, D, D_V, torch.float16).pages
    assert prologue_runs(q, k, v, pages.layout) == (DEVICE == "cuda")
    assert not prologue_runs(q.repeat(1, 1, 2, 1), k, v, pages.layout)
    assert not prologue_runs(q.double(), k, v, pages.layout)


@pytest.mark.gpu
@torch.no_grad()
def test_captured_steps_on_a_gpu() -> None:
    """Token after token from one graph, with lengths that it advances."""
    given = cached(LENGTHS, 64, 64, torch.bfloat16, way="kernel")
    given.write("kernel")
    scheme = schemes.build("rope+gape", n_heads=6, n_kv_heads=2, head_dim=64, context_length=64).to(DEVICE)
    assert isinstance(scheme, schemes.Gated)
    positions, pages = torch.tensor([200], device=DEVICE), given.pages
    frequencies = torch.rand(32, device=DEVICE)
    q, k, v = (torch.randn(2, n, 1, 64, device=DEVICE).bfloat16() for n in (6, 2, 2))

    def token() -> torch.Tensor:
        angles = positions[:, None] * frequencies
        step = step_under(scheme.gates, positions, (angles.cos(), angles.sin()), context_length=64.0)
        assert step is not None
        turned, rate = decode_prologue(q, k, v, step, pages, scale=SCALE)
        return kernels.paged_attention(turned, rate, positions, pages, scale=SCALE, new=1)[0]

    token()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = token()
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        captured = out.clone()
        torch.testing.assert_close(captured, token(), atol=1e-2, rtol=1e-2)
        pages.lengths.add_(1)
        positions.add_(1)
