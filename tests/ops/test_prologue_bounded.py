"""What the fused pass hands to attention that skips, against the scheme's own steps and the bounds made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gape
from gape.models.skipping import skip
from gape.ops import prologue
from gape.positions.gated import Gated
from tests.ops.test_prologue import DEVICE, SCALE, angles, layer, projected

pytest.importorskip("triton")
from gape.ops.triton import attention

FLOORS = [0.0, 1.0, 2.0, 0.5]
NAMES = ("q", "k", "v", "rate", "exposure", "reach", "k_reach", "u_least")


def prepared(scheme: Gated, q: Tensor, k: Tensor, width: int) -> dict[str, Tensor]:
    """What the kernel is given, rows brought into the order of the steps."""
    given: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "fwd_bounded", lambda *told: (given.extend(told[:8]), told[:4])[1])
        wide = (prologue.spread(x, width) for x in (q, k))
        attention.projected(*wide, k, angles(scheme, q.size(2)), scheme.reading(q.device), scale=SCALE, eps=0.1)
    low, edge = scheme.head_dim // 2, width // 2
    order = [*range(low), *range(edge, edge + low)]
    for x in given[:2]:
        assert not x[..., [m for m in range(width) if m not in order]].any()
    given[:2] = (x[..., order] for x in given[:2])
    return dict(zip(NAMES, given, strict=True))


def by_steps(scheme: Gated, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    where = torch.arange(q.size(2), device=DEVICE)
    (q, gate), (k, landmark) = scheme.queries(q, where), scheme.keys(k, where)
    return {"q": q, "k": k, "gate": gate, "landmark": landmark, "amplitude": scheme.gates.amplitude}


@pytest.mark.parametrize(
    ("base", "n", "heads", "width", "dtype"),
    [
        ("rope", 63, (4, 2), 32, torch.bfloat16),
        ("p-rope", 127, (4, 4), 32, torch.float16),
        ("yarn", 150, (4, 1), 26, torch.float16),
        ("nope", 1, (4, 2), 48, torch.bfloat16),
        ("mixed", 127, (4, 4), 32, torch.float16),
    ],
)
@torch.no_grad()
def test_makes_what_the_steps_make(base: str, n: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> None:
    scheme = layer(base, *heads, gate_floor=FLOORS)
    q, k = projected(scheme, n, dtype)
    got, want = prepared(scheme, q, k, width), by_steps(scheme, q, k)
    for name in ("q", "k"):
        torch.testing.assert_close(got[name], want[name])
    rate = want["amplitude"][:, None] * want["gate"] / scheme.context_length * attention.LOG2E
    torch.testing.assert_close(got["rate"], rate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["exposure"], 1 - want["landmark"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float16), (64, torch.bfloat16), (127, torch.float16)])
@torch.no_grad()
def test_bounds_are_those_of_the_rows_that_attention_reads(n: int, dtype: torch.dtype) -> None:
    """To the last bits of float32, which is far less than rounding rows moves their norms; and never below."""
    scheme = layer("rope")
    got = prepared(scheme, *projected(scheme, n, dtype), 32)
    q, k = (torch.linalg.vector_norm(got[name].double(), dim=-1) for name in ("q", "k"))
    tiles = [slice(start, start + 64) for start in range(0, n, 64)]
    longest = torch.stack([k[..., tile].amax(-1) for tile in tiles], -1)
    for name, norms in {"reach": q * SCALE * attention.LOG2E, "k_reach": longest}.items():
        assert (got[name].double() >= norms).all(), name
        torch.testing.assert_close(got[name].double(), norms * attention.SLACK, rtol=2e-6, atol=0)
    assert torch.equal(got["u_least"], torch.stack([got["exposure"][..., tile].amin(-1) for tile in tiles], -1))


@pytest.mark.parametrize(("n", "eps"), [(300, 1e-2), (40, 0.0)])
@torch.no_grad()
def test_attends_and_skips_as_the_steps_do(n: int, eps: float) -> None:
    scheme = layer("p-rope", 2, 1, gate_floor=[40.0, 90.0])
    scheme.gates.landmark_projection.weight.mul_(0.1)
    scheme.gates.landmark_projection.bias.fill_(-3.0)
    q, k = (x[:1] for x in projected(scheme, n, torch.float16))
    v = torch.randn(1, 1, n, 20, device=DEVICE).half()
    told = {"context_length": scheme.context_length, "scale": SCALE, "impl": "triton", "eps": eps}
    want = gape.detailed_attention(**by_steps(scheme, q, k), v=v, **told)
    wide = [prologue.spread(x, 32) for x in (q, k)]
    given = (*wide, v, angles(scheme, n), scheme.reading(q.device))
    out, lse, _, visits, _ = attention.projected(*given, scale=SCALE, eps=eps)
    torch.testing.assert_close(out, want.out, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse / attention.LOG2E, want.lse, rtol=0, atol=2e-3)
    if eps:
        assert want.visited < 0.8
        assert abs(float(visits.sum()) / attention._visible_tiles(*wide, v) - float(want.visited)) < 0.05
    assert torch.equal(prologue.bounded_attention(*given, scale=SCALE, eps=eps), out)


@torch.no_grad()
def test_what_is_not_a_number_keeps_its_tile() -> None:
    scheme = layer("rope")
    q, k = (x.clone() for x in projected(scheme, 130, torch.float16))
    q[0, 0, 5, 3] = k[0, 1, 70, 4] = torch.nan
    got = prepared(scheme, q, k, 32)
    assert got["reach"].isnan().nonzero().tolist() == got["rate"].isnan().nonzero().tolist() == [[0, 0, 5]]
    assert (~got["k_reach"].isfinite()).nonzero().tolist() == (~(got["u_least"] >= 0)).nonzero().tolist() == [[0, 1, 1]]


@torch.no_grad()
def test_samples_that_one_launch_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, found = layer("rope"), []
    for most in (65_535, 1):
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        found.append(prepared(scheme, *projected(scheme, 20, torch.float16), 32))
    assert all(torch.equal(found[0][name], found[1][name]) for name in NAMES)


@pytest.mark.parametrize(
    "sizes",
    [[(1, 20), (1, 33), (1, 47)], pytest.param([(2, 20), (3, 20), (5, 20)], marks=pytest.mark.slow)],
    ids=["length", "batch"],
)
@torch.no_grad()
def test_compiles_in_one_graph_for_all_sizes(sizes: list[tuple[int, int]]) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    scheme, counter = layer("rope"), CompileCounter()
    width = prologue.whole_rows(scheme.head_dim, 4, scheme.head_dim)

    def attended(q: Tensor, k: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        return prologue.bounded_attention(q, k, k, turns, scheme.reading(q.device), scale=SCALE, eps=0.1)

    compiled = torch.compile(attended, backend=counter, fullgraph=True)
    for batch, n in sizes:
        q, k = (x[:1].repeat(batch, 1, 1, 1) for x in projected(scheme, n, torch.float16))
        given = (prologue.spread(q, width), prologue.spread(k, width), angles(scheme, n))
        torch.testing.assert_close(compiled(*given), attended(*given))
    assert counter.frame_count <= 2


def test_refuses_what_does_not_fit() -> None:
    scheme = layer("rope")
    q, k = projected(scheme, 8, torch.float16)
    reading, told = scheme.reading(q.device), {"scale": SCALE, "eps": 0.1}
    with pytest.raises(ValueError, match=r"^q: "):
        prologue.bounded_attention(q.double(), k, k, None, reading, **told)
    for v, eps, name in ((k[:, :, 1:], 0.1, "v"), (k.float(), 0.1, "v"), (k, 1.0, "eps")):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            prologue.bounded_attention(q, k, v, None, reading, scale=SCALE, eps=eps)
    with pytest.raises(ValueError, match=r"^reading: .*up to 24"):
        prologue.bounded_attention(q[..., :24], k[..., :24], k, None, reading, **told)
    with pytest.raises(ValueError, match=r"^reading.floor: "):
        prologue.bounded_attention(q, k, k, None, replace(reading, floor=reading.floor[:2]), **told)


def attention_layer(**changed: object) -> gape.GAPEAttention:
    torch.manual_seed(0)
    options = {"context_length": 64, "bias": True, "gate_floor": [40.0, 90.0]} | changed
    made = gape.GAPEAttention(64, 2, 1, **options).to(DEVICE, torch.float16).requires_grad_(requires_grad=False)
    torch.nn.init.normal_(made.qkv.bias)
    skip(made, 1e-2)
    return made


def tokens(n: int) -> Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE).half()


@pytest.mark.parametrize("changed", [{}, {"reserve": 0, "position": "nope+gape"}, {"reserve": 12}], ids=str)
def test_a_layer_skips_in_one_pass(changed: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    one, x = attention_layer(**changed), tokens(100)
    one.stepwise = True
    want = one(x)
    one.stepwise = False
    # The interpreter stands in for the GPU that the layer asks for.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert one.explain(x).prologue == "fused"
    got = one(x)
    assert (got - want).norm() < 3e-3 * want.norm()


@pytest.mark.parametrize(("batch", "n"), [(0, 20), (1, 0)])
def test_nothing_gives_nothing(batch: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert attention_layer()(tokens(20)[:batch].repeat(1, n // 20, 1)).shape == (batch, n, 64)


OTHERS = {
    "projections learn": lambda one: one.qkv.requires_grad_(),
    "gates learn": lambda one: one.scheme.requires_grad_(),
    "hooks": lambda one: one.qkv.register_forward_hook(lambda module, given, out: out * 2),
    "hooks on a gate": lambda one: one.gates.gate_projection.register_forward_hook(lambda module, given, out: out * 2),
    "landmarks are kept": lambda one: setattr(one, "keep_landmark", True),
    "others listen": lambda one: setattr(one, "stepwise", True),
}


@pytest.mark.parametrize("prepare", OTHERS.values(), ids=OTHERS)
def test_others_go_step_by_step(
    prepare: Callable[[gape.GAPEAttention], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attention_layer()
    prepare(one)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert one.explain(tokens(20)).prologue == "steps"


def test_a_fixed_gate_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert attention_layer(learn_gate=False).explain(tokens(20)).prologue == "steps"
