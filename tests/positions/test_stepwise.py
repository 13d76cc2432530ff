"""What holds for every scheme: steps with a cache equal the full pass, positions rule, all parameters learn."""

import pytest
import torch

from gape.positions import Scheme, available, build

T, N, D, E = 16, 50, 8, 12
# Not the default of any operator.
SCALE = 0.4
#: Tokens and chunks, before and behind T.
STEPS = [1, 1, 7, 1, 5, 1, 1, 20, 1, 7, *[1] * 5]


def make(name: str) -> Scheme:
    torch.manual_seed(0)
    scheme = build(name, n_heads=4, n_kv_heads=2, head_dim=D, context_length=T, n_embd=E)
    # Away from their starting values, so that no parameter is idle.
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return scheme.double()


def inputs(batch: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, 4, N, D), (batch, 2, N, D), (batch, 2, N, D + 3), (batch, N, E))
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def full(scheme: Scheme, q, k, v, x, positions, **visibility) -> torch.Tensor:
    q, q_side = scheme.queries(q, positions, x)
    k, k_side = scheme.keys(k, positions, x)
    visibility |= {"q_positions": positions, "k_positions": positions}
    return scheme.attend(q, k, v, q_side, k_side, scale=SCALE, **visibility)


def stepwise(scheme: Scheme, q, k, v, x, positions, sizes) -> torch.Tensor:
    """The same in chunks, keys and their sides cached."""
    outs, past_k, past_side, start = [], k[:, :, :0], None, 0
    for size in sizes:
        now = slice(start, start + size)
        step_q, q_side = scheme.queries(q[:, :, now], positions[..., now], x[:, now])
        step_k, k_side = scheme.keys(k[:, :, now], positions[..., now], x[:, now], past=past_side)
        past_k = torch.cat((past_k, step_k), 2)
        if k_side is not None:
            past_side = k_side if past_side is None else torch.cat((past_side, k_side), -1)
        visibility = {"q_positions": positions[..., now], "k_positions": positions[..., : start + size]}
        out = scheme.attend(step_q, past_k, v[:, :, : start + size], q_side, past_side, scale=SCALE, **visibility)
        outs.append(out)
        start += size
    return torch.cat(outs, 2)


@pytest.mark.parametrize("name", available())
def test_cached_steps_equal_the_full_pass(name: str) -> None:
    scheme, tensors = make(name), inputs()
    # Row 1 begins late, as after left padding; both rows run far beyond T.
    positions = torch.arange(N) + torch.tensor([[0], [-9]])
    want = full(scheme, *tensors, positions)
    got = stepwise(scheme, *tensors, positions, STEPS)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# FoX sums over tokens in the order of the tensor, so a shuffle is not its business.
@pytest.mark.parametrize("name", [name for name in available() if name != "fox"])
def test_shuffled_tokens_keep_their_positions(name: str) -> None:
    scheme, tensors = make(name), inputs()
    positions = torch.arange(N)
    order = torch.randperm(N)
    q, k, v, x = tensors
    want = full(scheme, *tensors, positions)[:, :, order]
    got = full(scheme, q[:, :, order], k[:, :, order], v[:, :, order], x[:, order], positions[order])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# FIRE normalises by the absolute position of the query.
@pytest.mark.parametrize("name", [name for name in available() if name != "fire"])
def test_a_common_shift_changes_nothing(name: str) -> None:
    scheme, tensors = make(name), inputs()
    want = full(scheme, *tensors, torch.arange(N))
    got = full(scheme, *tensors, torch.arange(N) + 1000)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", available())
def test_bfloat16_module_runs_and_keeps_dtype(name: str) -> None:
    scheme, tensors = make(name).bfloat16(), [tensor.bfloat16() for tensor in inputs()]
    out = full(scheme, *tensors, torch.arange(N))
    assert out.dtype == torch.bfloat16
    assert bool(out.isfinite().all())
