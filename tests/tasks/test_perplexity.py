"""Perplexity: every token once, what a plain computation gives, in chunks and after interruptions the same."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gape
from gape.data import Corpus
from gape.report.statistics import window_difference
from gape.tasks import perplexity
from gape.tasks.perplexity import Protocol, weighted_interval
from tests.tasks import text


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return text.corpus(tmp_path_factory.mktemp("books"))


def protocol(context: int = 32, **options: int) -> Protocol:
    return Protocol(context=context, **{"last": 8} | options)


@pytest.mark.parametrize("length", [33, 34, 64, 65, 97, 200])
def test_every_token_is_scored_once(length: int) -> None:
    """Apart from what no full window can end on: the first tokens, and fewer than K at the end."""
    scored = np.zeros(length, dtype=int)
    for start, size, last in protocol().cut(length).tolist():
        assert start >= 0
        assert start + size < length
        assert (size, last) == (32, 8)
        scored[start + size - last + 1 : start + size + 1] += 1
    covered = slice(25, 1 + (length - 1) // 8 * 8)
    assert (scored[covered] == 1).all()
    assert scored.sum() == len(scored[covered])


def test_a_document_that_fills_no_window_has_none() -> None:
    assert len(protocol().cut(33)) == 1
    assert len(protocol().cut(32)) == 0
    assert len(protocol(align=64).cut(64)) == 0


def test_aligned_contexts_score_the_same_tokens(books: Corpus) -> None:
    ends = []
    for context in (8, 32, 64):
        plan = perplexity.plan(books, protocol(context, align=64), max_windows=9, seed=3)
        assert len(plan.windows) == 9
        assert plan.of > 9
        document, start, length, _ = plan.windows.T
        ends.append(list(zip([plan.documents[d].id for d in document], start + length, strict=True)))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("position", ["p-rope+gape", "alibi"])
def test_it_is_the_plain_computation(books: Corpus, position: str) -> None:
    model, plan = text.gpt(position), perplexity.plan(books, protocol())
    scored = perplexity.score_all(model, books, plan, store=Path(books.directory) / "scores", of="")
    (Path(books.directory) / "scores").unlink()
    for number, (document, start, length, last) in enumerate(plan.windows.tolist()):
        ids = torch.tensor(books.tokens(plan.documents[document])[start : start + length + 1].astype(np.int64))[None]
        each = F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none").detach()
        assert scored[number] == pytest.approx(float(each[-last:].sum()), abs=1e-9)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(books: Corpus, tmp_path: Path) -> None:
    model, plan = text.gpt(), perplexity.plan(books, protocol())
    torch.nn.init.zeros_(model.embedding.weight)
    (row,) = perplexity.rows(plan, perplexity.score_all(model, books, plan, store=tmp_path / "s", of=""))
    assert row["perplexity"] == pytest.approx(text.VOCAB)
    assert (row["std"], row["low"]) == pytest.approx((0.0, row["high"]), abs=1e-6)
    assert row["tokens"] == sum((n - 1) // 8 * 8 - 24 for n in text.LENGTHS)


def test_a_loss_that_is_not_finite_is_no_result(books: Corpus) -> None:
    plan = perplexity.plan(books, protocol())
    sums = np.ones(len(plan.windows))
    sums[3] = np.nan
    with pytest.raises(ValueError, match=r"loss: got one that is not finite in 1 of"):
        perplexity.rows(plan, sums)


@pytest.mark.parametrize(
    ("position", "scored"), [("rope", 33), ("alibi", 33), ("swan", 33), ("p-rope+gape", 5), ("fox", 90)]
)
def test_chunks_are_the_whole(position: str, scored: int) -> None:
    """Chunks that divide nothing, beyond the training length."""
    model, ids = text.gpt(position, torch.float32), torch.randint(text.VOCAB, (2, 91))
    whole = perplexity.window_losses(model, ids, scored)
    parts = perplexity.window_losses(model, ids, scored, chunk=32)
    assert whole.shape == (2, scored)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("position", ["p-rope", "p-rope+gape", "alibi", "fox"])
def test_131k_tokens_fit_on_a_gpu_and_chunks_are_the_whole(position: str) -> None:
    """The paper's model in bfloat16: 1.5 GiB of keys and values, and a chunk beside them."""
    sizes = {"vocab_size": 50257, "n_layer": 6, "n_head": 8, "n_embd": 512, "context_length": 1024}
    model = gape.GPT(gape.GPTConfig(position=position, **sizes)).cuda().eval()
    ids = torch.randint(50257, (1, 2**17 + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        losses = perplexity.window_losses(model, ids, 512)
        whole, parts = (perplexity.window_losses(model, ids[:, :8193], 4096, chunk=n) for n in (8192, 1500))
    assert losses.isfinite().all()
    assert torch.cuda.max_memory_allocated() < 8 * 2**30
    torch.testing.assert_close(parts, whole, atol=0.05, rtol=0)


def test_logits_never_exist_whole(books: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text.gpt()
    monkeypatch.setattr(model, "logits", None)
    perplexity.window_losses(model, torch.zeros(1, 65, dtype=torch.long), 64)


def test_stopped_and_resumed_is_the_same(books: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "BATCH_TOKENS", 100)
    model, plan = text.gpt(), perplexity.plan(books, protocol())
    whole = perplexity.score_all(model, books, plan, store=tmp_path / "whole", of="run")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity.score_all(model, books, plan, store=tmp_path / "parts", of="run", progress=interrupt)
    with (tmp_path / "parts").open("ab") as file:
        file.write(b'{"sums": [1.')
    done = []
    again = perplexity.score_all(
        model, books, plan, store=tmp_path / "parts", of="run", progress=lambda n, of: done.append((n, of))
    )
    assert (again == whole).all()
    assert done[-1] == (len(plan.windows), len(plan.windows))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    # Of other weights: begun anew.
    perplexity.score_all(model, books, plan, store=tmp_path / "parts", of="another")
    assert b"another" in (tmp_path / "parts").read_bytes()[:200]


def test_short_documents_are_named_and_none_at_all_is_refused(books: Corpus) -> None:
    plan = perplexity.plan(books, protocol(128))
    assert [document.id for document in plan.left_out] == ["held-0", "held-1"]
    with pytest.raises(ValueError, match=r"context: got int 200, .* 201 tokens, and all 4 .* held-3, has 200"):
        perplexity.plan(books, protocol(200))


def test_strata_get_rows_of_their_own(tmp_path: Path) -> None:
    books = text.corpus(tmp_path, lengths=(51, 61, 120, 130), strata=(50, 100))
    plan = perplexity.plan(books, protocol())
    rows = perplexity.rows(plan, perplexity.score_all(text.gpt(), books, plan, store=tmp_path / "s", of=""))
    assert [(row["stratum"], row["documents"], row["tokens"]) for row in rows] == [
        ("50", 2, 56), ("100", 2, 192), (None, 4, 248),
    ]  # fmt: skip
    assert rows[2]["nll"] * 248 == pytest.approx(rows[0]["nll"] * 56 + rows[1]["nll"] * 192)


def test_windows_of_one_document_count_as_one() -> None:
    """Ten documents that differ, a hundred windows each that do not: the interval is that of ten numbers."""
    documents = np.repeat(np.arange(10), 100)
    nll = np.linspace(2, 4, 10)[documents]
    counts = np.full(1000, 512.0)
    low, high, over = weighted_interval(nll * counts, counts, documents)
    error = np.linspace(2, 4, 10).std() / math.sqrt(10)
    assert over == "documents"
    assert (low, high) == pytest.approx((3 - 1.96 * error, 3 + 1.96 * error), abs=0.05)
    low, high, over = weighted_interval(nll * counts, counts, np.zeros(1000, dtype=int))
    assert over == "windows"
    assert high - low < 0.12


def test_runs_are_compared_window_by_window(books: Corpus, tmp_path: Path) -> None:
    plan = perplexity.plan(books, protocol())
    scored = perplexity.score_all(text.gpt(), books, plan, store=tmp_path / "s", of="")
    worse = scored + 0.1 * plan.windows[:, 3]
    (one,), (other,) = (perplexity.rows(plan, s) for s in (worse, scored))
    names = {"run": "a", "position": "rope", "protocol": "last-k", "context": 32}
    actual = window_difference(one | names, other | names)
    # Between documents they differ far more than that.
    assert (actual.difference, actual.low, actual.high) == pytest.approx((0.1, 0.1, 0.1), abs=1e-4)
    assert actual.direction == "worse"
    assert window_difference(one | names, one | names).direction == "not separable"
    with pytest.raises(ValueError, match="same windows"):
        window_difference(one | names, other | names | {"plan": "other"})
    single = {"window_document": [0] * len(one["window_document"])}
    actual = window_difference(one | single | names, other | names)
    assert (actual.low, actual.high, actual.direction) == (None, None, "one document")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context: "),
        ({"last": 33}, "last: got int 33, expected at most the context, 32"),
        ({"align": -1}, "align: "),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Protocol(**{"context": 32, "last": 8} | options)


def test_more_windows_than_are_stored_are_refused(books: Corpus) -> None:
    with pytest.raises(ValueError, match=r"max_windows: got int 8001"):
        perplexity.plan(books, protocol(), max_windows=8001)
