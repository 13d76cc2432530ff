"""SWAN's windows, growth and cache."""

import math

import torch

import gape
from gape.positions import build

SIZES = {"n_heads": 2, "head_dim": 8, "context_length": 16}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return (0.3 * q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def test_rotates_inside_the_window_and_nowhere_else() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 8, dtype=torch.float64) for _ in range(3))
    positions = torch.arange(30)
    away = positions[:, None] - positions
    near, rope = build("swan", window=5, **SIZES), build("rope", **SIZES)
    got = near.attend(near.queries(q, positions)[0], near.keys(k, positions)[0], v, None, None, scale=0.3)
    want = dense(rope.queries(q, positions)[0], rope.keys(k, positions)[0], v, (away >= 0) & (away < 5))
    torch.testing.assert_close(got, want)
    far = build("swan", window=0, **SIZES)
    growth = torch.tensor([max(1.0, math.log(max(i, 1)) / math.log(16)) for i in range(30)], dtype=torch.float64)
    got = far.attend(far.queries(q, positions)[0], far.keys(k, positions)[0], v, None, None, scale=0.3)
    torch.testing.assert_close(got, dense(q * growth[:, None], k, v, away >= 0))


def test_a_model_of_both_kinds_of_layers_decodes_as_it_reads() -> None:
    torch.manual_seed(0)
    config = gape.GPTConfig(
        vocab_size=20, n_layer=2, n_head=2, n_embd=16, context_length=8, position="swan",
        options={"window": [[0], [4]]},
    )  # fmt: skip
    model = gape.GPT(config).double().eval()
    assert [block.attention.scheme.window for block in model.blocks()] == [0, 4]
    ids, cache = torch.randint(20, (2, 24)), model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in (ids[:, :9], ids[:, 9:10], ids[:, 10:])]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-9, atol=1e-9)
