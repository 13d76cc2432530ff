"""The fused prologue against the scheme's own steps: same coordinates, same gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gape
from gape.ops import columns, prologue
from gape.positions import build
from gape.positions.gated import Gated
from gape.positions.rotary import Rotary

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16]
SCALE = 0.25
#: Coordinates of a head: 26 of content and six of the bias.
WIDTH = 32


def layer(base: str, n_heads: int = 4, n_kv_heads: int = 2, head_dim: int = 26, **options: object) -> Gated:
    """A scheme with gates; "mixed" rotates its key heads in turn by rope and by hope, the latter with log_scale."""
    torch.manual_seed(0)
    if base == "mixed":
        base, turns = "rope", [bool(head % 2) for head in range(n_kv_heads)]
        options |= {"head_positions": ["hope" if other else "rope" for other in turns], "log_scale": turns}
    scheme = build(
        f"{base}+gape", n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, context_length=64, **options
    )
    assert isinstance(scheme, Gated)
    for parameter in scheme.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return scheme.to(DEVICE)


def projected(scheme: Gated, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q and k as views of one projection, the way a layer has them."""
    torch.manual_seed(1)
    heads = (scheme.n_heads, scheme.n_kv_heads)
    joint = torch.randn(2, n, sum(heads) * scheme.head_dim, device=DEVICE).to(dtype).requires_grad_()
    parts = joint.split([h * scheme.head_dim for h in heads], dim=-1)
    return tuple(x.view(2, n, h, scheme.head_dim).transpose(1, 2) for x, h in zip(parts, heads, strict=True))


def angles(scheme: Gated, n: int) -> tuple[Tensor, Tensor] | None:
    base = scheme.base
    return base.one_pass(n, torch.device(DEVICE)).angles if isinstance(base, Rotary) else None


def fused(scheme: Gated, q: Tensor, k: Tensor, width: int = WIDTH) -> tuple[Tensor, ...]:
    """The fused pass, its coordinates brought into the order of the steps: content, then the bias."""
    q, k = (prologue.spread(x, width) for x in (q, k))
    outs = prologue.prologue(q, k, angles(scheme, q.size(2)), scheme.reading(q.device), scale=SCALE)
    low, edge = scheme.head_dim // 2, width // 2
    order = [*range(low), *range(edge, edge + low), *range(low, low + 3), *range(edge + low, edge + low + 3)]
    for x in outs:
        assert not x.detach()[..., [m for m in range(width) if m not in order]].any()
    return tuple(x[..., order] for x in outs)


def by_steps(scheme: Gated, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What split hands to attention, made by the scheme."""
    n = q.size(2)
    where = torch.arange(n, device=DEVICE)
    turned, gate = scheme.queries(q, where)
    turned_k, landmark = scheme.keys(k, where)
    rate = scheme.gates.amplitude[:, None] * gate / scheme.context_length
    middle = n // 2
    groups = [(0, middle), (middle, n)] if torch.is_grad_enabled() and middle else [(0, n)]
    anchors = [(a + b) // 2 for a, b in groups]
    count, bits = (2 if len(groups) == 2 else 3), 11 if q.dtype == torch.float16 else 8
    i = [where[a:b] - anchor for (a, b), anchor in zip(groups, anchors, strict=True)]
    q_columns = columns.query_columns(rate, i, SCALE, q.dtype, bits, count)
    k_columns = columns.key_columns(1 - landmark, [where - anchor for anchor in anchors], k.dtype, bits, count)
    return torch.cat([turned, q_columns], -1), torch.cat([turned_k, k_columns], -1)


#: The interpreter is slow: every base, dtype, size and way once.
CASES = [
    ("rope", torch.float16, 33, 40, True),
    ("rope", torch.bfloat16, 33, 40, False),
    ("p-rope", torch.bfloat16, 1, 32, True),
    ("nope", torch.float16, 33, 32, False),
    ("mixed", torch.float16, 33, 40, True),
    ("mixed", torch.float16, 1, 32, False),
]


@pytest.mark.parametrize(("base", "dtype", "n", "width", "grad"), CASES, ids=str)
def test_writes_what_the_steps_write(base: str, n: int, width: int, dtype: torch.dtype, grad: bool) -> None:
    scheme = layer(base, gate_floor=[0.0, 1.0, 2.0, 0.0])
    with torch.set_grad_enabled(grad):
        q, k = projected(scheme, n, dtype)
        want = by_steps(scheme, q, k)
        got = fused(scheme, q, k, width)
    for x, y in zip(got, want, strict=True):
        # A rate at the edge between two neighbours may fall to either side: both pieces move together.
        close = (x.double() - y.double()).abs() <= 2 * torch.finfo(dtype).eps * y.double().abs() + 1e-6
        assert close.double().mean() > 0.99
        torch.testing.assert_close(x[..., :26], y[..., :26])


@pytest.mark.parametrize(
    ("base", "n", "heads", "dtype"),
    [
        ("rope", 33, (4, 2), torch.bfloat16),
        pytest.param("nope", 20, (3, 1), torch.float16, marks=pytest.mark.slow),
        ("mixed", 18, (6, 3), torch.float16),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_steps(base: str, n: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    scheme = layer(base, *heads, gate_floor=1.0)
    parameters = list(scheme.parameters())
    found = []
    for way in ("steps", "fused"):
        q, k = projected(scheme, n, dtype)
        outs = by_steps(scheme, q, k) if way == "steps" else fused(scheme, q, k)
        torch.manual_seed(2)
        loss = sum((x.float() * torch.randn(x.shape, device=DEVICE)).sum() for x in outs)
        found.append(torch.autograd.grad(loss, [q, k, *parameters]))
    for want, got in zip(*found, strict=True):
        assert (got.double() - want.double()).norm() < 0.01 * want.double().norm()


@pytest.mark.slow
def test_samples_that_one_launch_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 65,535 samples; the bits are those of one that takes all."""
    from gape.ops.triton import prologue as operators

    scheme = layer("rope")
    found, sizes = [], list[int]()
    grid = operators._grid
    monkeypatch.setattr(operators, "_grid", lambda *a: sizes.append(grid(*a)[1]) or grid(*a))
    for most in (65_535, 1):
        sizes.clear()
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        q, k = projected(scheme, 20, torch.float16)
        outs = fused(scheme, q, k)
        loss = sum(x.float().square().sum() for x in outs)
        found.append([*outs, *torch.autograd.grad(loss, [q, k, *scheme.parameters()])])
    assert set(sizes) == {1}
    assert all(torch.equal(parts, whole) for whole, parts in zip(*found, strict=True))


def test_without_gates_it_only_turns() -> None:
    scheme = layer("rope")
    q, k = projected(scheme, 20, torch.float16)
    got = prologue.prologue(q, k, angles(scheme, 20), None, scale=SCALE)
    for x, y in zip(got, (q, k), strict=True):
        torch.testing.assert_close(x, scheme.base.queries(y, torch.arange(20, device=DEVICE))[0])


def test_refuses_angles_that_do_not_fit() -> None:
    scheme = layer("rope")
    q, k = projected(scheme, 8, torch.float16)
    cos, sin = angles(scheme, 8)
    for wrong in (angles(scheme, 9), (cos[:, :12], sin[:, :12]), (cos, sin[:, :13]), (cos.double(), sin)):
        for attend in (prologue.prologue, partial(prologue.projected_attention, v=k, eps=0.1)):
            with pytest.raises(ValueError, match=r"^angles: "):
                attend(q, k, angles=wrong, reading=None, scale=SCALE)
    wide = [torch.stack([x, x]) for x in (cos, sin)]
    with pytest.raises(ValueError, match=r"^angles: rows"):
        prologue.prologue(q, k, (*wide, torch.zeros(5, dtype=torch.int32)), None, scale=SCALE)


def test_angles_are_kept_for_the_next_layer_and_only_where_they_last() -> None:
    one, other = layer("rope").base, layer("rope", n_heads=2).base
    device = torch.device(DEVICE)
    with torch.inference_mode():
        cos, sin = one.one_pass(19, device).angles
    assert not cos.is_inference()
    assert cos.shape == sin.shape == (19, 16)
    assert other.one_pass(19, device).angles[0] is cos
    torch.testing.assert_close(cos[:, :13], one.angles(torch.arange(19, device=device))[0])
    # A capture, which cannot copy to its device, finds the frequencies of every layer there.
    assert all((device, torch.float64) in scheme._padded._frequencies[0]._tensors for scheme in (one, other))
    with FakeTensorMode():
        assert isinstance(one.one_pass(19, device).angles[0], FakeTensor)
        assert isinstance(one.one_pass(18, device).angles[0], FakeTensor)
    assert type(one.one_pass(18, device).angles[0]) is Tensor
    compiled = torch.compile(lambda: one.one_pass(19, device).angles, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), (cos, sin))


@pytest.mark.gpu
def test_compiled_it_writes_the_same() -> None:
    scheme = layer("rope")

    def prepared(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (prologue.spread(x, WIDTH) for x in (q, k))
        return prologue.prologue(q, k, angles(scheme, 64), scheme.reading(q.device), scale=SCALE)

    found = []
    for way in (prepared, torch.compile(prepared, fullgraph=True)):
        q, k = projected(scheme, 64, torch.float16)
        outs = way(q, k)
        loss = sum(x.float().square().sum() for x in outs)
        found.append([*outs, *torch.autograd.grad(loss, [q, k, *scheme.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@torch.no_grad()
def test_a_layer_that_ran_before_can_be_captured() -> None:
    attention = gape.GAPEAttention(64, 2, context_length=64, position="rope+gape").to(DEVICE, torch.bfloat16)
    x = torch.randn(2, 48, 64, device=DEVICE, dtype=torch.bfloat16)
    plain = attention(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(x)
    graph.replay()
    assert torch.equal(captured, plain)


def test_a_layer_attends_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = gape.GAPEAttention(64, 2, 1, context_length=64, bias=True).to(DEVICE, torch.float16)
    torch.nn.init.normal_(attention.qkv.bias)
    x = torch.randn(2, 20, 64, device=DEVICE).half()
    attention.stepwise = True
    want = attention(x)
    attention.stepwise = False
    # The interpreter stands in for the GPU that the layer asks for.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert attention.explain(x).prologue == "fused"
    got = attention(x)
    assert (got - want).norm() < 3e-3 * want.norm()
    attention.qkv.register_forward_hook(lambda module, given, out: out * 2)
    monkeypatch.setattr("gape.ops.implementations.device_of", lambda problem: None)
    assert attention.explain(x).prologue == "steps"
