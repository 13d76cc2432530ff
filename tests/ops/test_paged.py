"""Attention over pages against the definition: plain PyTorch, and kernels in the interpreter or compiled on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gape.ops import paged
from gape.ops.paged import PAGE, Pages, page_layout

kernels = pytest.importorskip("gape.ops.triton.paged")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, FIRST_QUERY = 0.2, 2_000
WAYS = {
    "plain float64": ("plain", torch.float64, 1e-12),
    "plain float32": ("plain", torch.float32, 2e-6),
    "kernel float32": ("kernel", torch.float32, 2e-6),
    "kernel float16": ("kernel", torch.float16, 1e-3),
}


class Cached(NamedTuple):
    """Pages in random order and the keys that they hold, (B, Hk, N, …), of which each sequence has the first few."""

    pages: Pages
    slabs: list[Tensor]
    k: Tensor
    v: Tensor
    exposure: Tensor
    positions: Tensor

    def write(self, way: str, **given: Any) -> None:
        write = kernels.write_keys if way == "kernel" else paged.plain_write
        slots = torch.arange(self.k.size(2), dtype=torch.int32, device=DEVICE)
        slots = torch.where(slots < self.pages.lengths.unsqueeze(-1), slots, -1)
        write(self.pages, self.k, self.v, self.exposure, self.positions, given.get("slots", slots))


def cached(
    lengths: list[list[int]], key_dim: int, value_dim: int, dtype: torch.dtype, *, way: str = "plain", seed: int = 0
) -> Cached:
    """Kernels find their pages in two slabs. What is never written is not a number."""
    torch.manual_seed(seed)
    rows, heads, most = len(lengths), len(lengths[0]), max(map(max, lengths))
    layout, room = page_layout(key_dim, value_dim, dtype), -(-most // PAGE) + 1
    count = rows * heads * room
    slabs = [
        torch.full((count, layout.nbytes), 255, dtype=torch.uint8, device=DEVICE) for _ in range(1 + (way == "kernel"))
    ]
    table = torch.randperm(count * len(slabs))[:count].int().view(rows, heads, room).to(DEVICE)
    begin = torch.tensor([slab.data_ptr() for slab in slabs], device=DEVICE)
    addresses = begin[table // count] + table % count * layout.nbytes
    slab = slabs[0] if len(slabs) == 1 else slabs[0][:0]
    pages = Pages(
        layout, slab, addresses, torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.zeros(rows, heads, device=DEVICE),
    )  # fmt: skip
    k, v = (torch.randn(rows, heads, most, dim, dtype=torch.float64).to(DEVICE, dtype) for dim in (key_dim, value_dim))
    exposure = torch.rand(rows, heads, most, dtype=torch.float64).to(DEVICE, layout.side_dtype)
    positions = torch.rand(rows, heads, most).argsort(-1).to(DEVICE) + torch.arange(most, device=DEVICE)
    return Cached(pages, slabs, k, v, exposure, positions)


def queries(given: Cached, groups: int, n: int, strength: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, _, key_dim = given.k.shape
    # As a projection leaves them, heads side by side.
    q = torch.randn(rows, n, heads * groups, key_dim, dtype=torch.float64).to(DEVICE, given.k.dtype).transpose(1, 2)
    rate = torch.rand(rows, heads * groups, n, dtype=torch.float64).to(DEVICE, given.exposure.dtype) * strength
    return q, rate, FIRST_QUERY + torch.arange(n, device=DEVICE)


def definition(
    given: Cached, q: Tensor, rate: Tensor, positions: Tensor, lengths: Tensor, prior: Any = None
) -> tuple[Tensor, Tensor]:
    """Weights over all pairs in float64."""
    groups = q.size(1) // given.k.size(1)
    k, v, u, j = (x.double().repeat_interleave(groups, 1) for x in (given.k, given.v, given.exposure, given.positions))
    distance = positions[:, None] - j.unsqueeze(-2)
    a = SCALE * q.double() @ k.mT - rate.double().unsqueeze(-1) * u.unsqueeze(-2) * distance
    there = torch.arange(k.size(2), device=DEVICE) < lengths.repeat_interleave(groups, 1).unsqueeze(-1)
    a = a.masked_fill(~there.unsqueeze(-2), -torch.inf)
    if prior is not None:
        # Another key, whose logit is the log-sum-exp.
        out, lse = prior
        a = torch.cat([a, lse.double().unsqueeze(-1)], -1)
        w = a.softmax(-1).nan_to_num(0.0)
        return w[..., :-1] @ v + w[..., -1:] * out.double(), a.logsumexp(-1)
    return a.softmax(-1).nan_to_num(0.0) @ v, a.logsumexp(-1)


def run(way: str, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Buffers of kernels start as not a number."""
    if way == "plain":
        options.pop("splits", None)
        return paged.plain_attention(*given, **options)
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "empty", lambda *s, **o: empty(*s, **o).fill_(float("nan") if o["dtype"].is_floating_point else -1)
        )
        return kernels.paged_attention(*given, **options)


def prior_of(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    out = torch.randn(*q.shape[:3], value_dim, dtype=torch.float64).to(DEVICE, q.dtype)
    lse = torch.randn(q.shape[:3], dtype=torch.float64, device=DEVICE)
    lse[0, 0] = -torch.inf
    return out, lse if q.dtype == torch.float64 else lse.float()


def close(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], bound: float) -> None:
    width = exact[0].size(-1)
    assert not got[0][..., width:].any()
    assert (got[0][..., :width].double() - exact[0]).norm() <= bound * exact[0].norm().clamp(min=1.0)
    tolerance = {"rtol": 2.0**-22, "atol": 1e-5} if bound > 1e-12 else {"rtol": 0.0, "atol": bound}
    torch.testing.assert_close(got[1].double(), exact[1], **tolerance)


RAGGED = [[0, 70], [64, 150]]
SIZES: dict[str, dict[str, Any]] = {
    "one query": {"groups": 1, "n": 1, "dims": (64, 64)},
    "grouped, its own key": {"groups": 3, "n": 1, "dims": (72, 64), "new": 1},
    "a few queries, padded": {"groups": 3, "n": 3, "dims": (58, 80), "prior": True},
    "many queries": {"groups": 2, "n": 20, "dims": (80, 58), "prior": True, "splits": 1},
    "one program": {"groups": 2, "n": 1, "dims": (16, 16), "splits": 1, "new": 1},
}
#: Of these in half precision and without kernels; the kernels' paths are those of float32.
FEW = ("grouped, its own key", "many queries")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * (name != "kernel float32" and size not in FEW))
        for name in WAYS
        for size in SIZES
    ],
)
def test_equals_the_definition(name: str, size: str) -> None:
    """Ragged sequences, one of them empty, in pages that lie in any order between what is not a number."""
    way, dtype, bound = WAYS[name]
    told = SIZES[size]
    new, given = told.get("new", 0), cached(RAGGED, *told["dims"], dtype, way=way)
    given.write(way)
    short = (given.pages.lengths - new).clamp(min=0)
    q, rate, positions = queries(given, told["groups"], told["n"])
    prior = prior_of(q, told["dims"][1]) if "prior" in told else None
    exact = definition(given, q, rate, positions, given.pages.lengths, prior)
    if new:
        # Nothing stands behind the empty sequence.
        given.pages.lengths.copy_(torch.where(given.pages.lengths > 0, short, -new))
    got = run(way, q, rate, positions, given.pages, scale=SCALE, new=new, prior=prior, splits=told.get("splits", 3))
    close(got, exact, bound)


@pytest.mark.parametrize("alone", [True, False], ids=["by the last program", "by a second kernel"])
def test_parts_are_merged_alike(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = cached([[260, 3]], 16, 16, torch.float32, way="kernel")
    given.write("kernel")
    q, rate, positions = queries(given, 2, 1)
    monkeypatch.setattr(kernels, "MERGE_STEPS", 8 if alone else 0)
    tickets = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    got = run("kernel", q, rate, positions.expand(1, -1), given.pages, scale=SCALE, splits=4, tickets=tickets)
    close(got, definition(given, q, rate, positions, given.pages.lengths), 2e-6)
    assert not tickets.any()


@pytest.mark.parametrize("name", WAYS)
def test_reads_what_was_written(name: str) -> None:
    """Zeros behind narrow keys and values, zeros for slots that are not there, and nothing written elsewhere."""
    way, dtype, _ = WAYS[name]
    given = cached([[5, 0], [100, 64]], 58, 44, dtype, way=way)
    pages, n = given.pages, 40
    k, v, exposure = given.k[:, :, :n], given.v[:, :, :n], given.exposure[:, :, :n]
    slots = torch.stack([torch.randperm(pages.addresses.size(-1) * PAGE)[:n] for _ in range(4)]).view(2, 2, n)
    slots = slots.int().to(DEVICE)
    slots[0, 1, ::3], slots[1, 0, 7] = -1, PAGE * pages.addresses.size(-1)
    pages.addresses[0, 0, 1] = 0
    write, read = (kernels.write_keys, kernels.read_keys) if way == "kernel" else (paged.plain_write, paged.plain_read)
    write(pages, k, v, exposure, torch.arange(n, device=DEVICE), slots)
    there = (slots >= 0) & (slots < PAGE * pages.addresses.size(-1))
    there[0, 0] &= slots[0, 0] // PAGE != 1
    got_k, got_v, got_u, got_j = read(pages, slots)
    assert torch.equal(got_k[..., :58], k * there.unsqueeze(-1))
    assert torch.equal(got_v[..., :44], v * there.unsqueeze(-1))
    assert not got_k[..., 58:].any()
    assert not got_v[..., 44:].any()
    assert torch.equal(got_u, exposure * there)
    assert torch.equal(got_j, torch.arange(n, device=DEVICE).expand(2, 2, n).int() * there)
    norms = (k.double().norm(dim=-1) * there).amax(-1)
    torch.testing.assert_close(pages.key_norm.double(), norms, rtol=1e-6, atol=0)
    written = sum(int((slab != 255).sum()) for slab in given.slabs)
    record = (pages.layout.nbytes - pages.layout.exposures_at) // PAGE + (64 + 48) * dtype.itemsize
    assert written <= int(there.sum()) * record


@pytest.mark.parametrize("name", ["plain float64", "kernel float32"])
def test_keys_follow_those_that_are_there(name: str) -> None:
    """Each row of a batch at its own positions; lengths are the caller's to advance."""
    way, dtype, _ = WAYS[name]
    given = cached([[5, 0], [63, 64]], 16, 16, dtype, way=way)
    before, positions = given.pages.lengths.clone(), torch.tensor([[7, 8, 9], [70, 80, 90]], device=DEVICE)
    tail = [x[:, :, :3] for x in (given.k, given.v, given.exposure)]
    (kernels.write_keys if way == "kernel" else paged.plain_write)(given.pages, *tail, positions)
    slots = before.unsqueeze(-1) + torch.arange(3, dtype=torch.int32, device=DEVICE)
    read = kernels.read_keys if way == "kernel" else paged.plain_read
    k, v, u, j = read(given.pages, slots)
    assert all(torch.equal(*pair) for pair in zip((k, v, u), tail, strict=True))
    assert torch.equal(j, positions[:, None].expand(2, 2, 3).int())
    assert torch.equal(given.pages.lengths, before)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_skipped_pages_hold_no_more_than_eps(splits: int) -> None:
    """Values of pages that need not be read are not a number: read, they would show."""
    eps, given = 1e-3, cached([[320, 64 * 20 + 5]], 16, 16, torch.float32, way="kernel")
    positions = torch.arange(given.k.size(2), device=DEVICE)
    given = given._replace(positions=positions.expand(given.k.shape[:3]), exposure=given.exposure.clamp(min=0.5))
    given.write("kernel")
    q, rate, _ = queries(given, 2, 9)
    rate, positions = rate.clamp(min=0.5) * 10, given.k.size(2) + torch.arange(9, device=DEVICE)
    prior = (torch.randn(1, 4, 9, 16, device=DEVICE), torch.zeros(1, 4, 9, device=DEVICE))
    exact = definition(given, q, rate, positions, given.pages.lengths, prior)
    broken = given._replace(v=given.v.masked_fill(given.positions.unsqueeze(-1) < 64 * 10, float("nan")))
    broken.write("kernel")
    got = run("kernel", q, rate, positions, given.pages, scale=SCALE, prior=prior, eps=eps, splits=splits)
    assert (got[0].double() - exact[0]).abs().max() <= 2 * eps * given.v.abs().max() + 1e-5
    assert (exact[1] - got[1]).max() <= eps + 1e-5


@pytest.mark.parametrize("what", ["key_norm", "exposure", "rate"])
def test_what_is_not_a_number_is_never_skipped(what: str) -> None:
    given = cached([[320]], 16, 16, torch.float32, way="kernel")
    given.exposure[:] = 1.0
    if what == "exposure":
        given.exposure[0, 0, 5] = float("nan")
    given.write("kernel")
    q, rate, positions = queries(given, 1, 1)
    rate[:] = float("nan") if what == "rate" else 1e3
    if what == "key_norm":
        given.pages.key_norm[:] = float("nan")
        given.v[0, 0, 5] = float("nan")
        given.write("kernel")
    prior = (torch.zeros(1, 1, 1, 16, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE))
    out, _ = run("kernel", q, rate, positions, given.pages, scale=SCALE, prior=prior, eps=0.5)
    assert out.isnan().any()


def test_one_function_for_every_device() -> None:
    given = cached(RAGGED, 16, 16, torch.float64)
    given.write("plain")
    q, rate, positions = queries(given, 2, 3)
    got = paged.paged_attention(q, rate, positions, given.pages, scale=SCALE)
    close(got, definition(given, q, rate, positions, given.pages.lengths), 1e-12)
    slots = torch.full((2, 2, 1), 5, dtype=torch.int32, device=DEVICE)
    some = [x[:, :, :1] for x in (given.k, given.v, given.exposure, given.positions.int())]
    paged.write_keys(given.pages, *some, slots)
    assert all(torch.equal(*pair) for pair in zip(paged.read_keys(given.pages, slots), some, strict=True))


BAD: dict[str, Any] = {
    "q: ": lambda x, q, c, i: paged.paged_attention(q[:, :3], c, i, x.pages, scale=1.0),
    "q: .*as the pages": lambda x, q, c, i: paged.paged_attention(q.float(), c, i, x.pages, scale=1.0),
    "rate: ": lambda x, q, c, i: paged.paged_attention(q, c[:, :1], i, x.pages, scale=1.0),
    "positions: ": lambda x, q, c, i: paged.paged_attention(q, c, i.double(), x.pages, scale=1.0),
    "prior: ": lambda x, q, c, i: paged.paged_attention(q, c, i, x.pages, scale=1.0, prior=(q[:1], c)),
    "eps: .*without prior": lambda x, q, c, i: paged.paged_attention(q, c, i, x.pages, scale=1.0, eps=0.1),
    "pages.slab: ": lambda x, q, c, i: paged.paged_attention(
        q, c, i, x.pages._replace(slab=x.pages.slab[:0]), scale=1.0
    ),
    "k: ": lambda x, q, c, i: paged.write_keys(x.pages, x.k[:1], x.v, x.exposure, x.positions),
    "v: ": lambda x, q, c, i: paged.write_keys(x.pages, x.k, x.v[:, :, :1], x.exposure, x.positions),
    "exposure: ": lambda x, q, c, i: paged.write_keys(x.pages, x.k, x.v, x.exposure[0], x.positions),
    "slots: ": lambda x, q, c, i: paged.read_keys(x.pages, x.positions),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    given = cached(RAGGED, 16, 16, torch.float64)
    with pytest.raises(ValueError, match=rf"^{message}"):
        BAD[message](given, *queries(given, 2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "n"), [(1, 1), (4, 1), (2, 3), (3, 200)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 80), (256, 256)], ids=str)
def test_bfloat16_on_a_gpu(dims: tuple[int, int], groups: int, n: int) -> None:
    """Eagerly, and in a captured graph in which lengths change."""
    given = cached([[0, 30_000], [64, 1]], *dims, torch.bfloat16, way="kernel")
    given.write("kernel")
    q, rate, _ = queries(given, groups, n)
    positions = given.positions.amax() + torch.arange(n, device=DEVICE)

    def attend() -> tuple[Tensor, Tensor]:
        return paged.paged_attention(q, rate, positions, given.pages, scale=SCALE)

    close(attend(), definition(given, q, rate, positions, given.pages.lengths), 8e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    given.pages.lengths[0, 1] = 777
    graph.replay()
    close(captured, definition(given, q, rate, positions, given.pages.lengths), 8e-3)


@pytest.mark.gpu
def test_skipping_on_a_gpu() -> None:
    given = cached([[64 * 300 + 5, 64]], 64, 64, torch.bfloat16, way="kernel")
    positions = torch.arange(given.k.size(2), device=DEVICE)
    given = given._replace(positions=positions.expand(given.k.shape[:3]), exposure=given.exposure.clamp(min=0.5))
    given.write("kernel")
    q, rate, _ = queries(given, 3, 500)
    rate, positions = rate.clamp(min=0.5) * 2, given.k.size(2) + torch.arange(500, device=DEVICE)
    prior = (torch.randn(1, 6, 500, 64, device=DEVICE).bfloat16(), torch.zeros(1, 6, 500, device=DEVICE))
    exact = definition(given, q, rate, positions, given.pages.lengths, prior)
    close(run("kernel", q, rate, positions, given.pages, scale=SCALE, prior=prior, eps=1e-6), exact, 8e-3)


@pytest.mark.gpu
def test_sizes_beyond_31_bits_on_a_gpu() -> None:
    """Slabs of more than 2³¹ bytes, and more sequences than CUDA takes along the second axis of a launch."""
    layout, rows, heads = page_layout(64, 64, torch.bfloat16), 16_400, 4
    count = rows * heads * 2
    slab = torch.full((count, layout.nbytes), 255, dtype=torch.uint8, device=DEVICE)
    assert slab.numel() > 2**31
    table = torch.randperm(count, device=DEVICE).int().view(rows, heads, 2)
    pages = Pages(
        layout, slab, slab.data_ptr() + table.long() * layout.nbytes,
        torch.full((rows, heads), 65, dtype=torch.int32, device=DEVICE), torch.zeros(rows, heads, device=DEVICE),
    )  # fmt: skip
    k = torch.randn(rows, heads, 65, 64, device=DEVICE).bfloat16()
    exposure, positions = torch.rand(rows, heads, 65, device=DEVICE), torch.arange(65, device=DEVICE)
    paged.write_keys(pages, k, k, exposure, positions, positions.int().expand(rows, heads, 65).contiguous())
    q, rate = k[:, :, :1], torch.full((rows, heads, 1), 0.01, device=DEVICE)
    out, lse = paged.paged_attention(q, rate, positions[-1:], pages, scale=SCALE)
    last = slice(-3, None)
    some = Cached(pages, [], k[last], k[last], exposure[last], positions.expand(3, heads, 65))
    exact = definition(some, q[last], rate[last], positions[-1:], pages.lengths[last])
    close((out[last], lse[last]), exact, 8e-3)
    assert out.isfinite().all()
    slots = torch.full((rows, heads, 1), 64, dtype=torch.int32, device=DEVICE)
    assert torch.equal(paged.read_keys(pages, slots)[0], k[:, :, 64:])
