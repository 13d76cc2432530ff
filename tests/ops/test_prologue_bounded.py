"""What the fused pass hands to attention that skips, against the scheme's own steps and the bounds made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gape
from gape.models.skipping import skip
from gape.ops import prologue
from gape.positions.gated import Gated
from tests.ops.test_prologue import DEVICE, SCALE, WIDTH, angles, layer, projected

pytest.importorskip("triton")
from gape.ops.triton.attention import attend_projected
from gape.ops.triton.configs import tiles_for
from gape.ops.triton.prologue import bounded_launch, bounded_tables
from gape.ops.triton.tiles import LOG2E, SLACK, with_places

FLOORS = [0.0, 1.0, 2.0, 0.5]


def prepared(scheme: Gated, q: Tensor, k: Tensor, width: int) -> dict[str, Tensor]:
    """What attention is given, rows brought into the order of the steps. What is never written is not a number."""
    q, k = (prologue.spread(x, width) for x in (q, k))
    turns, reading = angles(scheme, q.size(2)), scheme.reading(q.device)
    turned = None if turns is None else (turns[0].size(-1), len(turns) == 3, 0)
    stretches, tile = (LOG2E / scheme.context_length, SCALE * LOG2E * SLACK, SLACK), tiles_for(q, k, "fwd", skip=True)
    shapes, launch = bounded_launch(q, k, turned, scheme.head_dim, stretches, tile["BLOCK_N"], places=True)
    rows = [torch.full(x.shape, torch.nan, dtype=x.dtype, device=DEVICE) for x in (q, k)]
    numbers = [torch.full(shape, torch.nan, device=DEVICE) for shape in shapes]
    launch(q, k, *bounded_tables(q, prologue.tables_of(turns), reading), *rows, *numbers)
    low, edge = scheme.head_dim // 2, width // 2
    order = [*range(low), *range(edge, edge + low)]
    for x in rows:
        assert not x[..., [m for m in range(width) if m not in order]].any()
    given = [*(x[..., order] for x in rows), *numbers]
    return dict(zip(("q", "k", "rate", "exposure", "places", "reach", "k_reach", "u_least"), given, strict=True))


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
    rate = want["amplitude"][:, None] * want["gate"] / scheme.context_length * LOG2E
    torch.testing.assert_close(got["rate"], rate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["exposure"], 1 - want["landmark"], rtol=1e-5, atol=1e-6)
    assert torch.equal(got["places"], with_places(got["exposure"]))


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float16), (64, torch.bfloat16), (127, torch.float16)])
@torch.no_grad()
def test_bounds_are_those_of_the_rows_that_attention_reads(n: int, dtype: torch.dtype) -> None:
    """To the last bits of float32, which is far less than rounding rows moves their norms; and never below."""
    scheme = layer("rope")
    got = prepared(scheme, *projected(scheme, n, dtype), 32)
    q, k = (torch.linalg.vector_norm(got[name].double(), dim=-1) for name in ("q", "k"))
    tiles = [slice(start, start + 64) for start in range(0, n, 64)]
    longest = torch.stack([k[..., tile].amax(-1) for tile in tiles], -1)
    for name, norms in {"reach": q * SCALE * LOG2E, "k_reach": longest}.items():
        assert (got[name].double() >= norms).all(), name
        torch.testing.assert_close(got[name].double(), norms * SLACK, rtol=2e-6, atol=0)
    assert torch.equal(got["u_least"], torch.stack([got["exposure"][..., tile].amin(-1) for tile in tiles], -1))


@pytest.mark.parametrize(("n", "value_dim", "eps"), [(300, 20, 1e-2), (40, 20, 0.0), (40, 200, 0.0)])
@torch.no_grad()
def test_attends_and_skips_as_the_steps_do(n: int, value_dim: int, eps: float) -> None:
    scheme = layer("p-rope", 2, 1, gate_floor=[40.0, 90.0])
    scheme.gates.landmark_projection.weight.mul_(0.1)
    scheme.gates.landmark_projection.bias.fill_(-3.0)
    q, k = (x[:1] for x in projected(scheme, n, torch.float16))
    v = torch.randn(1, 1, n, value_dim, device=DEVICE).half()
    told = {"context_length": scheme.context_length, "scale": SCALE, "impl": "triton", "eps": eps}
    want = gape.detailed_attention(**by_steps(scheme, q, k), v=v, **told)
    wide = [prologue.spread(x, 32) for x in (q, k)]
    given = (*wide, v, angles(scheme, n), scheme.reading(q.device))
    got = prologue.projected_attention(*given, scale=SCALE, eps=eps)
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=2e-3)
    torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=2e-3)
    if eps:
        assert want.visited < 0.8
        visits, size = attend_projected(*given, scale=SCALE, eps=eps)[-1], tiles_for(q, v, "fwd", skip=True)
        rows, columns = size["BLOCK_M"], size["BLOCK_N"]
        visible = sum(-(-min(start + rows, n) // columns) for start in range(0, n, rows))
        assert abs(float(visits.sum(-1).mean()) / visible - float(want.visited)) < 0.05


@torch.no_grad()
def test_gates_on_another_device_are_refused() -> None:
    scheme = layer("rope")
    q, k = projected(scheme, 8, torch.float16)
    reading = scheme.reading(q.device)._replace(amplitude=torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"^gates: .*meta"):
        prologue.projected_attention(q, k, k, angles(scheme, 8), reading, scale=SCALE, eps=0.0)


@torch.no_grad()
def test_a_batch_of_nothing_has_all_sizes() -> None:
    scheme = layer("rope")
    q, k = (x[:0] for x in projected(scheme, 40, torch.float16))
    got = prologue.projected_attention(q, k, k, angles(scheme, 40), scheme.reading(q.device), scale=SCALE, eps=0.0)
    assert got.out.shape == q.shape
    assert got.base_2_lse.shape == got.base_2_rate.shape == q.shape[:3]
    assert got.exposure.shape == k.shape[:3]


@torch.no_grad()
def test_gates_may_be_in_half_precision() -> None:
    """As those of a model are that was cast."""
    scheme = layer("rope")
    q, k = projected(scheme, 40, torch.float16)
    reading, turns, options = scheme.reading(q.device), angles(scheme, 40), {"scale": SCALE, "eps": 0.0}
    names = ("gate_weight", "gate_bias", "landmark_weight", "landmark_bias")
    half = reading._replace(**{name: getattr(reading, name).half() for name in names})
    full = reading._replace(**{name: getattr(half, name).float() for name in names})
    got, want = (prologue.projected_attention(q, k, k, turns, x, **options).out for x in (half, full))
    assert torch.equal(got, want)


@torch.no_grad()
def test_angles_may_be_in_half_precision_and_wider() -> None:
    """As models of transformers have them: as many as a head has coordinates, in the dtype of the model."""
    scheme = layer("rope")
    q, k = projected(scheme, 40, torch.float16)
    half = [x.half() for x in angles(scheme, 40)]
    options = {"reading": scheme.reading(q.device), "scale": SCALE, "eps": 0.0}
    want = prologue.projected_attention(q, k, k, tuple(x.float() for x in half), **options)
    got = prologue.projected_attention(q, k, k, tuple(torch.cat([x, x], -1) for x in half), **options)
    assert torch.equal(got.out, want.out)
    with pytest.raises(ValueError, match="cosines"):
        prologue.projected_attention(q, k, k, tuple(x[:30] for x in half), **options)
    with pytest.raises(ValueError, match="sines"):
        prologue.projected_attention(q, k, k, (half[0], half[1].float()), **options)


@pytest.mark.parametrize("base", ["rope", "mixed"])
@torch.no_grad()
def test_samples_may_have_angles_of_their_own(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two texts that begin at different positions have them; also where a launch takes one sample at a time."""
    scheme = layer(base)
    q, k = projected(scheme, 40, torch.float16)
    reading, options = scheme.reading(q.device), {"scale": SCALE, "eps": 0.1}
    where, each = torch.stack([torch.arange(40), torch.arange(7, 47)]).to(DEVICE), []
    for row, place in enumerate(where):
        alone = (x[row : row + 1] for x in (q, k, k))
        each.append(prologue.projected_attention(*alone, scheme.base.angles(place), reading, **options))
    for most in (65_535, scheme.n_heads):
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        got = prologue.projected_attention(q, k, k, scheme.base.angles(where), reading, **options)
        for name in ("out", "q", "k", "base_2_lse"):
            want = torch.cat([getattr(one, name) for one in each])
            torch.testing.assert_close(getattr(got, name), want, rtol=0, atol=0, msg=name)


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
    q, k = (prologue.spread(x, WIDTH) for x in projected(scheme, 20, torch.float16))
    given = (q, k, k, angles(scheme, 20), scheme.reading(q.device))
    for most in (65_535, scheme.n_heads):
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        found.append(prologue.projected_attention(*given, scale=SCALE, eps=0.1))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


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
    "compiled": None,
}


@pytest.mark.parametrize("prepare", OTHERS.values(), ids=OTHERS)
def test_others_go_step_by_step(
    prepare: Callable[[gape.GAPEAttention], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attention_layer()
    if prepare is None:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        prepare(one)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert one.explain(tokens(20)).prologue == "steps"


def test_a_fixed_gate_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert attention_layer(learn_gate=False).explain(tokens(20)).prologue == "steps"
