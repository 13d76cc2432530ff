"""The needle task: what a haystack is made of, that it comes again, and what counts as an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gape.tasks import niah
from gape.tasks.niah import NIAHConfig, NIAHSource
from gape.utils.random import below32, words32


@st.composite
def configs(draw: st.DrawFn) -> NIAHConfig:
    n = draw(st.integers(1, 12))
    length = draw(st.integers(3 * n + 1, 300))
    return NIAHConfig(length=length, n_needles=n, target=draw(st.sampled_from(niah.TARGETS)))


@settings(max_examples=30, deadline=None)
@given(configs(), st.integers(1, 5), st.integers(0, 2**40))
def test_a_haystack_is_what_the_paper_says(config: NIAHConfig, batch: int, seed: int) -> None:
    ids, targets, needles = niah.sample(config, batch, seed=seed)
    n, length = config.needles, config.length
    assert ids.shape == targets.shape == (batch, length)
    assert needles.shape == (batch, n)
    expected = torch.randint(0, niah.N_FILLERS, ids.shape)
    bounds = [c * (length - 1) // n for c in range(n + 1)]
    for row in range(batch):
        for chunk, place in enumerate(needles[row].tolist()):
            assert bounds[chunk] <= place
            assert place + 3 <= bounds[chunk + 1]
            expected[row, place : place + 2] = torch.tensor([niah.KEY, niah.EQUALS])
            digit = int(ids[row, place + 2])
            assert niah.DIGIT_0 <= digit < niah.VOCAB_SIZE
            expected[row, place + 2] = digit
    expected[:, -1] = niah.QUERY
    fillers = expected < niah.N_FILLERS
    assert torch.equal(ids[~fillers], expected[~fillers])
    assert bool((ids[fillers] < niah.N_FILLERS).all())
    assert bool((targets[:, :-1] == niah.IGNORED).all())
    selection = {"first": 0, "last": n - 1, "middle": n // 2}[config.target]
    assert torch.equal(targets[:, -1], ids.gather(1, needles[:, selection : selection + 1] + 2)[:, 0])


def test_needles_stand_anywhere_in_their_chunk() -> None:
    """Uniformly: every place of a chunk of 12 tokens is as likely as another."""
    starts = niah.sample(NIAHConfig(length=25, n_needles=2), 20000).needles - torch.tensor([0, 12])
    for column in starts.unbind(1):
        counts = torch.bincount(column, minlength=10).double()
        assert len(counts) == 10
        assert float(((counts - 2000) ** 2 / 2000).sum()) < 30


def test_the_same_arguments_give_the_same_batch() -> None:
    """A golden batch: data must not change with the version of torch or of this library."""
    drawn = niah.sample(NIAHConfig(length=16, n_needles=2, target="first"), 2, seed=3, step=5)
    again = niah.sample(NIAHConfig(length=16, n_needles=2, target="first"), 2, seed=3, step=5)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert drawn.ids.tolist() == GOLDEN
    assert drawn.targets[:, -1].tolist() == [row[row.index(niah.KEY) + 2] for row in GOLDEN]


GOLDEN = [
    [6, 2, 2, 14, 15, 18, 8, 0, 5, 14, 15, 24, 9, 0, 10, 16],
    [12, 7, 14, 15, 21, 4, 9, 7, 10, 13, 14, 15, 18, 8, 0, 16],
]


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"micro": 1}, {"split": "validation"}, {"split": "test"}])
def test_other_arguments_give_other_batches(other: dict[str, object]) -> None:
    config = NIAHConfig(length=256)
    ids, changed = (niah.sample(config, 8, **options).ids for options in ({}, other))
    assert float((ids == changed).double().mean()) < 0.2


def test_a_series_does_not_depend_on_how_it_is_cut() -> None:
    config = NIAHConfig(length=40, n_needles=3)
    whole = niah.sample(config, 7, seed=1, split="test")
    parts = [niah.sample(config, 4, seed=1, split="test"), niah.sample(config, 3, seed=1, split="test", first=4)]
    assert torch.equal(whole.ids, torch.cat([part.ids for part in parts]))


@pytest.mark.gpu
def test_a_gpu_gives_the_batches_of_a_cpu() -> None:
    config = NIAHConfig(length=512)
    on_gpu = niah.sample(config, 16, seed=2, device="cuda")
    assert torch.equal(on_gpu.ids.cpu(), niah.sample(config, 16, seed=2).ids)


@pytest.mark.parametrize(("length", "needles"), [(2048, 32), (4096, 64), (8192, 128), (100, 1), (32, 1)])
def test_the_papers_rule_for_the_number_of_needles(length: int, needles: int) -> None:
    assert NIAHConfig(length=2048).at(length).needles == needles


def test_a_given_number_of_needles_keeps_its_density() -> None:
    assert [NIAHConfig(length=128, n_needles=8).at(128 * factor).needles for factor in (1, 2, 4)] == [8, 16, 32]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": 3}, "length"),
        ({"length": 12, "n_needles": 4}, "n_needles"),
        ({"length": 64, "n_needles": 0}, "n_needles"),
        ({"length": 64, "target": "nearest"}, "target"),
        ({"length": 64, "shortest": 1}, "length"),
    ],
)
def test_impossible_haystacks_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NIAHConfig(**options)


def test_a_source_is_a_function_of_step_and_micro() -> None:
    config = NIAHConfig(length=64, n_needles=4)
    source, same, other = (NIAHSource(config=config, batch_size=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(source.batch(4, 1).ids, same.batch(4, 1).ids)
    assert not torch.equal(source.batch(4, 1).ids, source.batch(4, 0).ids)
    assert source.fingerprint() == same.fingerprint() != other.fingerprint()


class Oracle:
    """Answers right by looking, with `answer` for every query where one is given."""

    def __init__(self, target: str, answer: int | None = None) -> None:
        self.target, self.answer, self.sizes = target, answer, list[int]()

    def __call__(self, ids: torch.Tensor, *, logits_to_keep: int = 0) -> SimpleNamespace:
        assert logits_to_keep == 1
        self.sizes.append(len(ids))
        logits = torch.zeros(len(ids), 1, niah.VOCAB_SIZE)
        # A filler with the largest logit of all: only the ten digits count.
        logits[..., 0] = 9.0
        for row, tokens in enumerate(ids.tolist()):
            digits = [t for t in tokens if t >= niah.DIGIT_0]
            at = {"first": 0, "last": -1, "middle": len(digits) // 2}[self.target]
            logits[row, 0, digits[at] if self.answer is None else self.answer] = 1.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("target", niah.TARGETS)
def test_an_oracle_is_always_right(target: str) -> None:
    assert niah.accuracy(Oracle(target), NIAHConfig(length=64, n_needles=5, target=target), samples=50) == 1.0


def test_a_constant_answer_is_right_one_time_in_ten() -> None:
    share = niah.accuracy(Oracle("last", answer=niah.DIGIT_0 + 3), NIAHConfig(length=64, n_needles=2), samples=2000)
    assert 0.07 < share < 0.13


def test_a_model_that_answers_nan_does_not_pass_for_one_that_guesses() -> None:
    def broken(ids: torch.Tensor, *, logits_to_keep: int = 0) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.full((len(ids), 1, niah.VOCAB_SIZE), float("nan")))

    assert niah.accuracy(broken, NIAHConfig(length=64, n_needles=2), samples=200) == 0.0


def test_longer_sequences_come_in_smaller_batches() -> None:
    oracle = Oracle("last")
    niah.hits(oracle, NIAHConfig(length=32768, n_needles=2), samples=9)
    assert oracle.sizes == [4, 4, 1]


def test_a_check_can_stop_an_evaluation() -> None:
    oracle, calls = Oracle("last"), iter([None, None])
    with pytest.raises(StopIteration):
        niah.hits(oracle, NIAHConfig(length=64), samples=50, batch=10, check=lambda: next(calls))
    assert oracle.sizes == [10, 10]


def test_words_are_spread_evenly() -> None:
    drawn = words32("spread", 2**16)
    assert len(drawn.unique()) == 2**16
    for bit in range(32):
        assert abs(float((drawn >> bit & 1).double().mean()) - 0.5) < 0.01
    pairs = torch.bincount(below32(drawn[:-1], 14) * 14 + below32(drawn[1:], 14), minlength=196).double()
    assert float(((pairs - pairs.mean()) ** 2 / pairs.mean()).sum()) < 290


def test_words_stop_where_they_would_repeat() -> None:
    with pytest.raises(ValueError, match="start"):
        words32("end", 2, start=2**32 - 1)


def test_mixed_lengths_and_positions_are_those_of_training_alone() -> None:
    mixed = niah.NIAHSource(config=NIAHConfig(length=128, shortest=32, random_to=512), batch_size=3)
    batches = [mixed.batch(step, 0) for step in range(1, 30)]
    assert {batch.ids.size(1) for batch in batches} == {32, 64, 128}
    for batch in batches:
        assert batch.positions.shape == batch.ids.shape
        assert bool((batch.positions.diff() > 0).all())
        assert 0 <= int(batch.positions.min()) <= int(batch.positions.max()) < 512
    assert torch.equal(mixed.batch(4, 0).positions, batches[3].positions)
    assert mixed.config.at(256) == NIAHConfig(length=256)
    skipping = niah.NIAHSource(config=NIAHConfig(length=64, skip_to=300), batch_size=50).batch(1, 0).positions
    steps = skipping.diff()
    assert bool((steps >= 1).all())
    assert int((steps > 1).sum(1).max()) == 1
    assert 200 < int(skipping.max()) < 300
    plain = niah.NIAHSource(config=NIAHConfig(length=64), batch_size=3)
    assert plain.batch(1, 0).positions is None
    assert plain.fingerprint() == "niah length=64 needles=1 target=last batch=3 seed=0"
    for wrong in ({"shortest": 65}, {"random_to": 63}, {"skip_to": 1}, {"random_to": 99, "skip_to": 99}):
        with pytest.raises(ValueError, match=f"^{list(wrong)[-1]}"):
            NIAHConfig(length=64, **wrong)


def test_digits_and_fillers_are_uniform() -> None:
    ids = niah.sample(NIAHConfig(length=256, n_needles=64), 500).ids
    counts = torch.bincount(ids.flatten(), minlength=niah.VOCAB_SIZE).double()
    for part in (counts[: niah.N_FILLERS], counts[niah.DIGIT_0 :]):
        assert float(((part - part.mean()) ** 2 / part.mean()).sum()) < 40


def test_accuracy_does_not_depend_on_the_batch() -> None:
    config = NIAHConfig(length=64, n_needles=2)
    one, other = (niah.hits(Oracle("last", answer=20), config, samples=50, batch=batch) for batch in (50, 7))
    assert torch.equal(one, other)
