"""The rotation itself: whose pairs, how exact, and what it survives."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gape.positions import Rotary, available, build


def make(name: str, head_dim: int = 16, **options: object) -> Rotary:
    return build(name, n_heads=4, n_kv_heads=2, head_dim=head_dim, context_length=64, n_embd=8, **options)


ROTARY = [name for name in available() if isinstance(make(name), Rotary)]


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("batched", [False, True])
def test_rotation_of_transformers(name: str, batched: bool) -> None:
    scheme = make(name)
    q, k = torch.randn(3, 4, 5, 16, dtype=torch.float64), torch.randn(3, 2, 5, 16, dtype=torch.float64)
    positions = torch.randint(-50, 200, (3, 5) if batched else (5,))
    angles = positions.expand(3, 5).double()[..., None] * scheme.inv_freq
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos() * scheme.attention_scale, angles.sin() * scheme.attention_scale
    want_q, want_k = apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(scheme.queries(q, positions), (want_q, None))
    torch.testing.assert_close(scheme.keys(k, positions), (want_k, None))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(ROTARY),
    i=st.integers(-(2**20), 2**20),
    j=st.integers(-(2**20), 2**20),
    shift=st.integers(-(2**20), 2**20),
)
def test_logits_depend_on_distance_alone(name: str, i: int, j: int, shift: int) -> None:
    scheme = make(name)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)

    def logit(at_q: int, at_k: int) -> float:
        return float((scheme.rotate(q, torch.tensor([at_q])) * scheme.rotate(k, torch.tensor([at_k]))).sum())

    assert logit(i, j) == pytest.approx(logit(i + shift, j + shift), abs=1e-7)


@pytest.mark.parametrize("position", [131072, -131071, 2**24 + 1])
def test_angles_are_exact_far_out(position: int) -> None:
    scheme = make("rope", head_dim=64)
    cos, sin = scheme.angles(torch.tensor([position]))
    assert cos.dtype == torch.float32
    for pair in range(32):
        angle = position * 10000.0 ** (-2 * pair / 64)
        assert float(cos[0, pair]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(sin[0, pair]) == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    scheme = make("rope")
    x = torch.randn(1, 2, 6, 16).to(dtype)
    positions = torch.arange(100000, 100006)
    exact = scheme.rotate(x.double(), positions)
    got = scheme.rotate(x, positions)
    assert got.dtype == dtype
    # At most one rounding of the result, and a trace of float32 beneath it.
    assert bool(((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-6).all())


def test_unrotated_pairs_pass_bit_for_bit() -> None:
    scheme = make("p-rope")
    x = torch.randn(1, 2, 6, 16).bfloat16()
    got = scheme.rotate(x, torch.arange(6))
    for still in (6, 7, 14, 15):
        assert torch.equal(got[..., still], x[..., still])
    assert not torch.equal(got[..., 5], x[..., 5])


def test_frequencies_survive_what_is_done_to_modules() -> None:
    plain = make("yarn")
    want = plain.inv_freq.clone()
    with torch.device("meta"):
        on_meta = make("yarn")
    changed = {
        "bfloat16": make("yarn").to(torch.bfloat16),
        "half": make("yarn").half(),
        "deepcopy": copy.deepcopy(plain),
        "pickle": pickle.loads(pickle.dumps(plain)),
        "meta": on_meta.to_empty(device="cpu"),
    }
    q, positions = torch.randn(1, 4, 3, 16), torch.tensor([5, 70000, 3])
    for what, scheme in changed.items():
        assert torch.equal(scheme.inv_freq, want), what
        assert scheme.inv_freq.dtype == torch.float64
        assert torch.equal(scheme.rotate(q, positions), plain.rotate(q, positions)), what
    assert plain.state_dict() == {}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain.rotate(q, positions), changed["pickle"].rotate(q, positions))


def test_inference_first_then_training() -> None:
    scheme = make("rope")
    q = torch.randn(1, 4, 3, 16, requires_grad=True)
    with torch.inference_mode():
        scheme.rotate(q, torch.arange(3))
    assert not scheme.inv_freq.is_inference()
    scheme.rotate(q, torch.arange(3)).square().sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    "name", ["rope+gape", "fox", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rope", "alibi", "fire"))]
)
def test_compiles_into_one_graph(name: str) -> None:
    scheme = build(name, n_heads=2, head_dim=8, context_length=16, n_embd=8)

    def steps(q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, q_side = scheme.queries(q, positions, x)
        k, k_side = scheme.keys(k, positions, x)
        return scheme.attend(q, k, k, q_side, k_side, scale=0.3, q_positions=positions, k_positions=positions)

    q, k, x = (*torch.randn(2, 1, 2, 5, 8), torch.randn(1, 5, 8))
    compiled = torch.compile(steps, backend="aot_eager", fullgraph=True)
    for positions in (torch.arange(5), torch.arange(5) + 40):
        torch.testing.assert_close(compiled(q, k, x, positions), steps(q, k, x, positions))


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x: .*16"):
        make("rope").queries(torch.randn(1, 4, 3, 8), torch.arange(3))


@pytest.mark.parametrize("positions", [torch.arange(4), torch.zeros(2, 3).long(), torch.arange(3.0), [0, 1, 2]])
def test_wrong_positions_are_refused(positions: object) -> None:
    with pytest.raises(ValueError, match=r"^positions: "):
        make("rope").rotate(torch.randn(1, 4, 3, 16), positions)


def test_layers_share_angles_of_one_tensor() -> None:
    places = torch.arange(5, 8)
    first = make("rope").angles(places)
    assert make("rope").angles(places) is first
    assert torch.equal(torch.stack(first), torch.stack(make("rope").angles(places.clone())))
    assert torch.equal(make("rope", theta=100.0).angles(places)[0], make("rope", theta=100.0).angles(places.clone())[0])
    assert make("rope").angles(places) is first


def test_positions_counted_on_in_place_get_angles_of_their_own() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            places = torch.arange(3)
            make("rope").angles(places)
            places += 1
            assert torch.equal(make("rope").angles(places)[0], make("rope").angles(torch.arange(1, 4))[0])
