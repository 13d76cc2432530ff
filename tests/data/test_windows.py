"""Windows: inside one document, each once an epoch, the same whoever asks."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gape.data import Corpus, WindowSource, open_corpus
from gape.train import Source
from gape.utils.random import permuted
from tests.data.books import make, write_lines

LENGTH = 7


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Document i is made of one letter, so that a window over two of them would show."""
    home = tmp_path_factory.mktemp("corpus")
    rows = [{"id": f"d{i}", "text": chr(33 + i) * (3 * i + 1)} for i in range(60)]
    return make(home / "c", write_lines(home / "a.jsonl", rows), shard_tokens=500, heldout_fraction=0.2)


def epoch(source: WindowSource, number: int) -> list[tuple[int, int]]:
    """Shards and places of the windows of an epoch."""
    shards, offsets = source.places(np.arange(number * source.windows, (number + 1) * source.windows))
    return list(zip(shards.tolist(), offsets.tolist(), strict=True))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000, 5003])
def test_the_order_is_a_permutation(n: int) -> None:
    orders = [permuted(np.arange(n), n, seed).tolist() for seed in (1, 2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(n))
    if n > 10:
        assert orders[0] != orders[1] != list(range(n))


def test_batches_are_windows_of_one_document_shifted_by_one(corpus: Corpus) -> None:
    source = WindowSource(corpus, length=LENGTH, batch_size=32, accumulation=2)
    assert isinstance(source, Source)
    for step in range(1, 20):
        batch = source.batch(step, step % 2)
        assert batch.ids.shape == batch.targets.shape == (32, LENGTH)
        assert batch.ids.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
        together = torch.cat([batch.ids, batch.targets[:, -1:]], dim=1)
        # One letter, and an end of text at the very end at most.
        assert bool((together[:, :-1] == together[:, :1]).all())
        assert bool(((together[:, -1] == together[:, 0]) | (together[:, -1] == corpus.end_of_text)).all())


def test_every_window_of_an_epoch_comes_once(corpus: Corpus) -> None:
    source = WindowSource(corpus, length=LENGTH, batch_size=4)
    lengths = [d.length for d in corpus.documents("train")]
    assert source.windows == sum((n - 1) // LENGTH for n in lengths)
    for number in range(3):
        places = sorted(epoch(source, number))
        assert len(set(places)) == source.windows
        # No token is a target twice: windows lie at least their length apart.
        for (shard, here), (other, there) in itertools.pairwise(places):
            assert shard != other or there - here >= LENGTH
    assert epoch(source, 0) != epoch(source, 1)
    assert sorted(epoch(source, 0)) != sorted(epoch(source, 1)), "offsets are drawn anew"


def test_batches_go_through_the_epochs_without_a_gap(corpus: Corpus) -> None:
    source = WindowSource(corpus, length=LENGTH, batch_size=5, accumulation=3, seed=4)
    steps = -(-source.windows // 15) + 1
    windows = torch.cat([source.batch(step, micro).ids for step in range(1, steps + 1) for micro in range(3)])
    shards, offsets = source.places(np.arange(steps * 15))
    expected = [corpus.shard(s)[o : o + LENGTH].tolist() for s, o in zip(shards, offsets, strict=True)]
    assert windows.tolist() == expected
    assert source.epochs(steps) == pytest.approx(steps * 15 / source.windows)


def test_batches_neither_read_nor_move_the_global_random_state(corpus: Corpus) -> None:
    before = torch.get_rng_state()
    WindowSource(corpus, length=LENGTH).batch(1, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_batch_stays_what_it_was(tmp_path: Path) -> None:
    """A run of an earlier version must find its data in the same order."""
    rows = [{"id": "a", "text": "".join(chr(33 + i % 90) for i in range(300))}]
    source = WindowSource(make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows)), length=9, batch_size=6, seed=1)
    assert source.places(np.arange(8))[1].tolist() == [92, 110, 263, 218, 164, 155, 146, 74]


def test_the_fingerprint_holds_what_shapes_the_batches(corpus: Corpus) -> None:
    one = WindowSource(corpus, length=LENGTH).fingerprint()
    assert one == WindowSource(open_corpus(corpus.directory), length=LENGTH).fingerprint()
    assert one["corpus"] == corpus.fingerprint()
    for other in ({"length": 8}, {"seed": 1}, {"batch_size": 3}, {"split": "heldout"}, {"accumulation": 2}):
        assert WindowSource(corpus, **{"length": LENGTH, **other}).fingerprint() != one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1000}, "length: got int 1000, expected below the longest of the train documents, which has"),
        ({"length": 0}, "length: got int 0"),
        ({"split": "test"}, "split: got 'test', expected one that .* has: train, heldout"),
        ({"stratum": "8"}, "stratum: got '8', expected None, for the corpus has no strata"),
        ({"batch_size": 0}, "batch_size: got int 0"),
    ],
)
def test_what_cannot_be_served_is_refused(corpus: Corpus, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowSource(corpus, **settings)


def test_windows_of_shards_that_changed_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    copy = shutil.copytree(corpus.directory, tmp_path / "c")
    shard = copy / "tokens-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ValueError, match=r"tokens-00000\.bin"):
        WindowSource(open_corpus(copy), length=LENGTH)


def test_steps_begin_at_one(corpus: Corpus) -> None:
    source = WindowSource(corpus, length=LENGTH)
    with pytest.raises(ValueError, match="step: got int 0"):
        source.batch(0, 0)
    with pytest.raises(ValueError, match="micro: got int 1, expected a number from 0 to 0"):
        source.batch(1, 1)


def test_batches_come_quickly(tmp_path: Path) -> None:
    """At least 2 million tokens a second on one core, of the size the 44M model is trained at."""
    rows = [{"id": str(i), "text": "some words " * 20_000} for i in range(4)]
    source = WindowSource(make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows)), length=1024, batch_size=64)
    source.batch(1, 0)
    began = time.process_time()
    for step in range(2, 12):
        source.batch(step, 0)
    assert 10 * 64 * 1024 / (time.process_time() - began) > 2e6
