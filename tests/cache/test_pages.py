"""Storage in pages against a plain dictionary of lists, whatever the order of calls."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import product
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gape.cache.pages import PagedStorage
from gape.ops.paged import PAGE, page_layout

LAYERS, ROWS, HEADS = 2, 2, 3
#: Layer, row and head of each sequence.
PLACES = list(product(range(LAYERS), range(ROWS), range(HEADS)))
#: Every key has a number, which its coordinates, its value and its exposure show.
Sequences = dict[tuple[int, int, int], list[int]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Both:
    """A storage, and the numbers of the keys that each of its sequences should have."""

    def __init__(self) -> None:
        layout = page_layout(3, 5, torch.float32)
        self.storage = PagedStorage(LAYERS, ROWS, HEADS, HEADS, layout, DEVICE)
        self.expected: Sequences = {place: [] for place in PLACES}
        self.positions: dict[int, int] = {}

    def new(self, n: int) -> tuple[torch.Tensor, ...]:
        """Numbers (B, Hk, n) of new keys, and the keys."""
        number = len(self.positions) + torch.arange(ROWS * HEADS * n, device=DEVICE).view(ROWS, HEADS, n)
        positions = 2 * number[:, 0].contiguous()
        self.positions |= zip(
            number.flatten().tolist(), positions[:, None].expand_as(number).flatten().tolist(), strict=True
        )
        k, v = (number[..., None].float() + torch.arange(width, device=DEVICE) / 8 for width in (3, 5))
        return number, k, v, number / 4, positions

    def write(self, n: int) -> None:
        """As many keys to every sequence."""
        self.storage.reserve(n)
        for layer in range(LAYERS):
            number, *keys = self.new(n)
            self.storage.write(layer, *keys)
            for row, head in product(range(ROWS), range(HEADS)):
                self.expected[layer, row, head] += number[row, head].tolist()
        self.storage.advance(n)

    def append(self, layer: int, n: int, draw: random.Random) -> None:
        """Some keys to the sequences of a layer."""
        number, *keys = self.new(n)
        keep = [draw.random() < 0.5 for _ in range(number.numel())]
        mask = torch.tensor(keep, device=DEVICE).view(ROWS, HEADS, n)
        self.storage.append(layer, *keys, mask)
        for row, head in product(range(ROWS), range(HEADS)):
            self.expected[layer, row, head] += number[row, head][mask[row, head]].tolist()

    def evict(self, sequences: list[int], keep: random.Random, room: int, layer: int | None) -> None:
        chosen = torch.tensor(sequences, device=DEVICE)
        *keys, valid = self.storage.read(chosen)
        stays = torch.zeros_like(valid)
        for at, number in enumerate(sequences):
            place = PLACES[number]
            cached = self.expected[place]
            slots = [slot for slot in range(len(cached)) if keep.random() < 0.6]
            stays[at, slots] = True
            self.expected[place] = [cached[slot] for slot in slots]
        self.storage.rewrite(chosen, tuple(keys), stays)
        self.storage.settle(room, layer)

    def drop_last(self, layer: int, tokens: int) -> None:
        self.storage.drop_last(layer, tokens)
        for place, cached in self.expected.items():
            if place[0] == layer:
                del cached[max(0, len(cached) - tokens) :]

    def clear(self) -> None:
        self.storage.clear()
        for cached in self.expected.values():
            cached.clear()

    def check(self) -> None:
        storage = self.storage
        storage.room()
        k, v, exposure, positions, valid = (x.cpu() for x in storage.read(torch.arange(len(PLACES), device=DEVICE)))
        for at, place in enumerate(PLACES):
            cached, there = self.expected[place], valid[at]
            number = torch.tensor(cached, dtype=torch.float32)
            assert int(storage.counts[place]) == int(storage.lengths[place]) == int(there.sum()) == len(cached)
            assert torch.equal(k[at][there][:, :3], number[:, None] + torch.arange(3) / 8)
            assert torch.equal(v[at][there][:, :5], number[:, None] + torch.arange(5) / 8)
            assert torch.equal(exposure[at][there], number / 4)
            assert positions[at][there].tolist() == [self.positions[each] for each in cached]
            longest = float(k[at][there].norm(dim=-1).amax()) if cached else 0.0
            assert float(storage.key_norm[place]) >= longest * (1 - 1e-6)
        owned = storage.addresses[storage.addresses != 0].tolist()
        assert len(owned) == len(set(owned))
        assert storage.nbytes == len(owned) * storage.layout.nbytes <= storage.reserved_bytes
        assert storage.room() >= 0


layers = st.integers(0, LAYERS - 1)
calls = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 200)),
    st.tuples(st.just("append"), layers, st.integers(1, 200), st.integers(0, 2**32)),
    st.tuples(
        st.just("evict"), st.sets(st.integers(0, len(PLACES) - 1), min_size=1), st.integers(0, 2**32),
        st.integers(0, 130), st.booleans(),
    ),
    st.tuples(st.just("drop_last"), layers, st.integers(0, 150)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("copy")),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(calls, min_size=1, max_size=12))
def test_sequences_hold_what_was_written(sequence: list[tuple]) -> None:
    both = Both()
    for name, *arguments in sequence:
        if name == "append":
            layer, n, seed = arguments
            both.append(layer, n, random.Random(seed))
        elif name == "evict":
            chosen, seed, room, alone = arguments
            # One layer is settled alone where all sequences are of it.
            of_layers = {PLACES[each][0] for each in chosen}
            layer = of_layers.pop() if alone and len(of_layers) == 1 else None
            both.evict(sorted(chosen), random.Random(seed), room, layer)
        elif name == "copy":
            # What is written later to the original does not show in the copy that the test goes on with.
            original, both.storage = both.storage, deepcopy(both.storage)
            rubbish = torch.full((ROWS, HEADS, 40, 3), 7.0, device=DEVICE)
            original.reserve(40)
            for layer in range(LAYERS):
                original.write(layer, rubbish, rubbish, rubbish[..., 0], torch.arange(40, device=DEVICE))
            original.advance(40)
        else:
            getattr(both, name)(*arguments)
        both.check()


def test_a_table_that_grows_wider_keeps_its_keys() -> None:
    both = Both()
    for _ in range(5):
        both.write(700)
    both.check()
    assert both.storage.width * PAGE >= 3500


def test_pages_that_fall_empty_are_used_again() -> None:
    both = Both()
    both.write(500)
    reserved = both.storage.reserved_bytes
    for n in (*range(20, 500, 40), 500):
        both.drop_last(0, 500)
        both.drop_last(1, 500)
        both.storage.settle(0)
        assert both.storage.nbytes == 0
        both.write(n)
    assert both.storage.reserved_bytes == reserved
    assert both.storage.nbytes == len(PLACES) * ceil(500 / PAGE) * both.storage.layout.nbytes
    both.clear()
    assert both.storage.reserved_bytes == 0


@pytest.mark.parametrize("room", [1, PAGE, 3 * PAGE + 1])
def test_settling_makes_room_for_as_many_keys(room: int) -> None:
    both = Both()
    both.write(100)
    both.storage.settle(room)
    assert room <= both.storage.room() < room + PAGE
