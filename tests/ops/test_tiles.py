"""Tiles of attention's kernels: they fit into the shared memory of a GPU, whatever that is."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gape
from tests.ops.cases import random_case

pytest.importorskip("triton")
from gape.ops.triton import configs
from gape.ops.triton.tiles import SPAN

#: Bytes that a program may have on a T4, on GPUs for desktops, on an A100, and on an H200.
T4, DESKTOP, A100, H200 = 65_536, 101_376, 166_912, 232_448
KERNELS = ("fwd", "bwd_dq", "bwd_dkv")
WIDTHS = ((16, 16), (64, 64), (80, 80), (96, 96), (64, 128), (112, 112), (128, 128), (96, 128), (128, 256), (256, 256))
DTYPES = (torch.bfloat16, torch.float32)


def tile(widths: tuple[int, int], dtype: torch.dtype, kernel: str, **options: Any) -> dict[str, int]:
    q, v = (torch.empty(1, 1, 1, width, dtype=dtype) for width in widths)
    return configs.tiles_for(q, v, kernel, **options)


#: Bytes that triton 3.6 takes, compiled for GPUs for desktops (sm_89) and an H200 (sm_90), heads as wide as values.
COMPILED = [
    (configs.Tile(128, 64, 4, 3), "fwd", 64, 2, 50_688),
    (configs.Tile(64, 64, 4, 3), "bwd_dq", 64, 2, 66_560),
    (configs.Tile(128, 64, 8, 3), "fwd", 96, 2, 100_352),
    (configs.Tile(128, 64, 8, 3), "bwd_dq", 128, 2, 165_888),
    (configs.Tile(64, 128, 8, 3), "bwd_dkv", 128, 2, 133_120),
    (configs.Tile(128, 64, 8, 2), "fwd", 256, 2, 197_632),
    (configs.Tile(128, 32, 8, 3), "bwd_dq", 256, 2, 229_632),
    (configs.Tile(64, 64, 8, 2), "bwd_dkv", 256, 2, 197_632),
    (configs.Tile(64, 32, 8, 2), "bwd_dq", 256, 2, 131_200),
    (configs.Tile(32, 32, 4, 2), "bwd_dkv", 256, 4, 139_776),
]


@pytest.mark.parametrize(("compiled", "kernel", "width", "size", "bytes_taken"), COMPILED, ids=str)
def test_kernels_take_no_more_than_is_counted(
    compiled: configs.Tile, kernel: str, width: int, size: int, bytes_taken: int
) -> None:
    assert configs.shared_bytes(compiled, kernel, (width, width), size) >= bytes_taken


@pytest.mark.parametrize("limit", [DESKTOP, A100, H200])
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skipping"])
def test_every_tile_fits(limit: int, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "shared_memory", lambda: limit)
    for widths, dtype, kernel, capped in product(WIDTHS, DTYPES, KERNELS, (True, False)):
        got = tile(widths, dtype, kernel, skip=skip, capped=capped)
        chosen = configs.Tile(got["BLOCK_M"], got["BLOCK_N"], got["num_warps"], got["num_stages"])
        assert SPAN.value % chosen.columns == 0
        assert min(chosen.rows, chosen.columns) >= configs.LEAST
        read = widths[0] if got["REST_D"] else got["BLOCK_D"], widths[1] if got["REST_V"] else got["BLOCK_V"]
        assert configs.shared_bytes(chosen, kernel, read, dtype.itemsize) <= limit, (widths, dtype, kernel)


@pytest.mark.parametrize("limit", [T4, DESKTOP, A100, H200])
def test_kernels_that_skip_have_equal_tiles(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "shared_memory", lambda: limit)
    for widths, dtype in product(WIDTHS, DTYPES):
        sizes = {tuple(tile(widths, dtype, kernel, skip=True)[x] for x in ("BLOCK_M", "BLOCK_N")) for kernel in KERNELS}
        assert len(sizes) == 1


def test_an_h200_has_the_tables_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for widths, dtype, kernel, skip in product(WIDTHS, DTYPES, KERNELS, (False, True)):
        monkeypatch.setattr(configs, "shared_memory", lambda: None)
        table = tile(widths, dtype, kernel, skip=skip)
        monkeypatch.setattr(configs, "shared_memory", lambda: H200)
        assert tile(widths, dtype, kernel, skip=skip) == table


def test_stages_go_first_and_two_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "shared_memory", lambda: DESKTOP)
    half = torch.bfloat16
    sizes = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    assert [tile((128, 128), half, "fwd")[x] for x in sizes] == [128, 64, 8, 2]
    assert [tile((128, 128), half, "bwd_dq")[x] for x in sizes] == [64, 64, 8, 2]
    assert [tile((256, 256), half, "bwd_dq")[x] for x in sizes] == [32, 32, 4, 2]
    assert [tile((64, 64), half, "fwd")[x] for x in sizes] == [128, 64, 8, 3]


def test_operands_in_registers_have_eight_warps_and_no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "shared_memory", lambda: DESKTOP)
    for width, kernel, skip in product((64, 96, 128), KERNELS, (False, True)):
        got = tile((width, width), torch.bfloat16, kernel, skip=skip)
        assert got["num_warps"] == 8
        assert "maxnreg" not in got


@pytest.mark.parametrize(
    ("capability", "most", "limit"),
    [((9, 0), H200, H200), ((8, 0), A100, DESKTOP), ((7, 5), T4, T4), ((12, 0), DESKTOP, DESKTOP)],
)
def test_what_a_gpu_has(capability: tuple[int, int], most: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of all GPUs counts."""
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": (H200, most)[index]})
    monkeypatch.setattr(configs, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), capability)[index])
    configs._shared_memory.cache_clear()
    try:
        assert configs.shared_memory() == limit
    finally:
        configs._shared_memory.cache_clear()


def test_what_is_too_large_in_every_tile_is_left_at_the_smallest() -> None:
    got = configs.fitting_tile(configs.Tile(64, 64, 8, 3), "bwd_dkv", (256, 256), 4, 1000)
    assert got == configs.Tile(16, 16, 4, 1)


@pytest.mark.parametrize("eps", [0.0, 1e-3], ids=["all", "skipping"])
def test_heads_of_256_in_smaller_tiles(eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, forward and backward, on a GPU with less shared memory."""
    if torch.cuda.is_available():
        pytest.skip("tiles of this GPU are tested by the others")
    case = random_case(batch=1, heads=2, kv_heads=1, n_q=150, n_k=150, dim=256, value_dim=256, strength=40.0)
    results = []
    for limit in (None, DESKTOP):
        monkeypatch.setattr(configs, "shared_memory", lambda limit=limit: limit)
        leaves: dict[str, Any] = case.leaves(torch.float16)
        out = gape.gated_attention(**leaves, **case.options, impl="triton", eps=eps)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    for name, got, want in zip(("out", *case.tensors), *results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().max()), msg=name)
