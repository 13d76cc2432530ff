"""Kernels that write the bias beside content against torch's numbers; in the interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gape import positions as schemes
from gape.ops import carried, columns
from gape.ops.columns import UNIT, significand_bits

pytest.importorskip("triton")
from gape.ops.triton import split_bias

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter cuts numbers off where they become bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
HEADS, KEY_HEADS, CONTENT, WIDTH, SCALE = 4, 2, 26, 34, 0.125
#: Two samples, the first with three pads in front.
PADDED = torch.stack([torch.tensor([0, 0, 0, 0, 1]), torch.arange(5)])
CASES: dict[str, tuple[str, dict[str, Any], torch.Tensor, int]] = {
    "first token": ("p-rope+gape", {}, torch.arange(1), 1),
    "far out": ("rope+gape", {}, torch.arange(100_000, 100_001), 1),
    "sixteen tokens": ("p-rope+gape", {}, torch.arange(5, 21), 16),
    "the last two asked": ("yarn+gape", {"factor": 4.0}, torch.arange(5, 8), 2),
    "no rotation": ("nope+gape", {}, torch.arange(100_000, 100_003), 3),
    "left padding": ("p-rope+gape", {}, PADDED, 5),
    "far apart, int32": ("rope+gape", {}, (PADDED * 1_000_003).int().flip(0), 5),
    "a floor for each head": ("rope+gape", {"gate_floor": [0.0, 0.5, 2.0, 80.0]}, torch.arange(5, 8), 3),
    "fixed gate": ("p-rope+gape", {"learn_gate": False, "gate_floor": 1.0}, torch.arange(5, 8), 3),
    "fixed landmark": ("nope+gape", {"learn_landmark": False}, torch.arange(5, 8), 3),
    "rates that saturate": ("rope+gape", {"gate_floor": 1e6}, torch.arange(100_000, 100_003), 3),
}


def built(name: str, **options: Any) -> schemes.Gated:
    torch.manual_seed(0)
    made = schemes.build(
        name, n_heads=HEADS, n_kv_heads=KEY_HEADS, head_dim=CONTENT, context_length=64, **options
    )  # fmt: skip
    assert isinstance(made, schemes.Gated)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made.to(DEVICE)


def projected(n_q: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as a projection leaves them: side by side, heads beside tokens."""
    x = torch.randn(2, n, (HEADS + KEY_HEADS) * CONTENT, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    q, k = (
        part.unflatten(-1, (-1, CONTENT)).transpose(1, 2)
        for part in x.split([HEADS * CONTENT, KEY_HEADS * CONTENT], -1)
    )
    return q[:, :, n - n_q :], k


def by_the_kernel(scheme: schemes.Gated, q: torch.Tensor, k: torch.Tensor, where: torch.Tensor) -> carried.Rows:
    """Its rows; buffers start as NaN."""
    empty, step = torch.empty, scheme.step(where)
    assert step is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **told: empty(*a, **told).fill_(float("nan")))
        return carried.carried_rows(q, k, step, width=WIDTH, scale=SCALE, gate=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options", "where", "n_q"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_rows_are_those_of_the_steps(
    name: str, options: dict[str, Any], where: torch.Tensor, n_q: int, dtype: torch.dtype
) -> None:
    """Content bit for bit; gates to their last bits, so that they may round to the next number of the dtype; and the
    pieces, of the numbers that came out of it, bit for bit.
    """
    scheme, where = built(name, **options), where.to(DEVICE)
    q, k = projected(n_q, where.size(-1), dtype)
    got = by_the_kernel(scheme, q, k, where)
    asked = where[..., where.size(-1) - n_q :]
    (turned_q, gate), (turned_k, landmark) = scheme.queries(q, asked), scheme.keys(k, where)
    assert torch.equal(got.queries[..., :CONTENT], turned_q)
    assert torch.equal(got.keys[..., :CONTENT], turned_k)
    torch.testing.assert_close(got.gate, gate, atol=0, rtol=2**-16)

    bits = significand_bits(q)
    rate = scheme.gates.amplitude[:, None] * gate / 64
    near = 2.0 ** (1 - bits)
    expected = columns.query_columns(rate, [asked], SCALE, dtype, bits)
    c = got.queries[..., CONTENT + 3].float()
    torch.testing.assert_close(c, expected[..., 3].float(), atol=0, rtol=near)
    again = columns.query_columns(c * (SCALE / UNIT), [asked], SCALE, dtype, bits)
    assert torch.equal(got.queries[..., CONTENT : CONTENT + 6], again)

    expected = columns.key_columns(1 - landmark, [where], dtype, bits)
    u = got.keys[..., CONTENT].float()
    # What a key is not spared is a difference to 1, whose last bit is large beside a small one.
    torch.testing.assert_close(u, expected[..., 0].float(), atol=UNIT * 2**-22, rtol=near)
    assert torch.equal(got.keys[..., CONTENT : CONTENT + 6], columns.key_columns(u / UNIT, [where], dtype, bits))
    assert not got.queries[..., CONTENT + 6 :].any()
    assert not got.keys[..., CONTENT + 6 :].any()


@torch.no_grad()
def test_half_precision_gates_are_read_as_they_are() -> None:
    where = torch.arange(5, 8, device=DEVICE)
    q, k = projected(3, 3, torch.float16)
    short = built("p-rope+gape").half()
    rows = [by_the_kernel(scheme, q, k, where) for scheme in (short, built("p-rope+gape"))]
    torch.testing.assert_close(rows[0].gate, short.gates.gate(q), atol=0, rtol=2**-16)
    assert not torch.equal(rows[0].gate, rows[1].gate)


def test_what_is_more_than_turning_and_reading_gets_no_step() -> None:
    where = torch.arange(3)
    learning, wide, heard = built("p-rope+gape"), built("p-rope+gape").double(), built("p-rope+gape")
    assert heard.gates.landmark_projection is not None
    heard.gates.landmark_projection.register_forward_hook(lambda *_: None)
    assert learning.step(where) is None
    with torch.no_grad():
        assert [scheme.step(where) is None for scheme in (learning, wide, heard)] == [False, True, True]


def test_only_a_gpu_takes_a_step() -> None:
    q, k = torch.zeros(1, 2, 1, 8).half(), torch.zeros(1, 1, 1, 8).half()
    assert not carried.steps(q, k)
    if DEVICE.type == "cuda":
        q, k = q.to(DEVICE), k.to(DEVICE)
        assert carried.steps(q, k)
        assert not carried.steps(q.float(), k.float())
        assert not carried.steps(q, k.expand(-1, -1, 17, -1))


POSITIONS = {
    "far": torch.arange(20) + 131_000,
    "each sample its own": torch.randint(0, 2**22, (2, 20), generator=torch.Generator().manual_seed(0)),
    "negative": -torch.arange(20),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("dtype", "strength"), [(torch.bfloat16, 50.0), (torch.float16, 50.0), (torch.float16, 1e6)])
def test_numbers_are_those_of_torch(dtype: torch.dtype, strength: float, positions: torch.Tensor) -> None:
    g = torch.Generator().manual_seed(0)
    # Heads beside tokens in memory, as a projection leaves them.
    x = torch.randn(2, 20, 3, 58, generator=g).to(DEVICE, dtype).transpose(1, 2)
    gate, landmark = (torch.rand(2, 3, 20, generator=g).to(DEVICE) for _ in range(2))
    landmark[0, 0, :3] = torch.tensor([0.0, 0.5, 1.0])
    amplitude, positions = torch.rand(3, generator=g).to(DEVICE) * strength, positions.to(DEVICE)
    bits, width = significand_bits(x), 72
    keys = columns.key_columns(1 - landmark, [positions], dtype, bits)
    assert torch.equal(split_bias.augmented_keys(x, landmark, positions, width), carried._joined(x, keys, width))
    queries = columns.query_columns(amplitude[:, None] * gate / 1024, [positions], 0.125, dtype, bits)
    got = split_bias.augmented_queries(x, gate, amplitude, positions, width, context_length=1024, scale=0.125)
    assert torch.equal(got, carried._joined(x, queries, width))


def test_what_is_not_a_number_stays_so() -> None:
    """Also where every bit of it is set, as a GPU writes it: rounding that up would give zero."""
    x = torch.zeros(1, 2, 3, 16, dtype=torch.float16, device=DEVICE)
    broken = torch.full((1, 2, 3), 2**31 - 1, dtype=torch.int32, device=DEVICE).view(torch.float32)
    one, where = torch.ones(2, device=DEVICE), torch.arange(3, device=DEVICE)
    queries = split_bias.augmented_queries(x, broken, one, where, 24, context_length=1024, scale=0.125)
    keys = split_bias.augmented_keys(x, broken, where, 24)
    assert queries[..., 19:22].isnan().all()
    assert keys[..., 16:19].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.bfloat16, 2**24), (torch.float16, 2**23), (torch.bfloat16, -(2**40))]
)
def test_positions_that_cannot_be_carried_are_not_a_number(dtype: torch.dtype, far: int) -> None:
    x, side = torch.zeros(1, 2, 2, 16, dtype=dtype, device=DEVICE), torch.full((1, 2, 2), 0.5, device=DEVICE)
    one, where = torch.ones(2, device=DEVICE), torch.tensor([7, far], device=DEVICE)
    queries = split_bias.augmented_queries(x, side, one, where, 24, context_length=1024, scale=0.125)
    for rows in (queries, split_bias.augmented_keys(x, side, where, 24)):
        assert rows.isnan().any(-1).tolist() == [[[False, True]] * 2]
