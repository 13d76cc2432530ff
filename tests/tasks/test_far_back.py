"""Far-back loss: the right tokens are chosen, and their losses are the model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gape.data import load_tokenizer
from gape.tasks import far_back
from gape.tasks.far_back import FarBackConfig, Sums
from tests.models.tiny import model, tokens


def test_ngrams_lead_to_the_last_time_they_stood_there() -> None:
    #             0  1  2  3  4  5  6  7  8  9  10 11 12
    ids = np.array([1, 2, 3, 9, 8, 1, 2, 4, 7, 1, 2, 4, 1])
    # 1 2 at 0, 5 and 9: at 5 it went on otherwise than at 0, at 9 as it did at 5.
    actual = far_back.repeated_ngrams(ids, 2)
    assert actual[11] == 4
    # 2 4 at 6 and 10: 7 and then 1.
    assert actual.nonzero()[0].tolist() == [11]


def test_ngrams_agree_with_a_search_by_hand() -> None:
    ids = np.random.default_rng(0).integers(3, size=200)
    actual = far_back.repeated_ngrams(ids, 4)
    for t in range(4, 200):
        context = ids[t - 4 : t].tolist()
        before = [s for s in range(4, t) if ids[s - 4 : s].tolist() == context]
        expected = t - before[-1] if before and ids[before[-1]] == ids[t] else 0
        assert actual[t] == expected


def test_names_are_capitalised_words_never_written_small() -> None:
    text = "The cat saw Alice. Then the dog saw ALICE and Bob, and Alice ran; it was Alice's. Cat and Then."
    ids = np.array(load_tokenizer("bytes").encode(text))
    actual = far_back.repeated_names(ids, load_tokenizer("bytes").decode)
    first, second, third = (m for m in range(len(text)) if text.startswith("Alice", m))
    # "Cat" is also written small, and "Bob" comes once.
    names = {
        second: second - first,
        third: third - second,
        text.rindex("Then"): text.rindex("Then") - text.index("Then"),
    }
    assert {int(t): int(actual[t]) for t in actual.nonzero()[0]} == names


@pytest.mark.parametrize("n", [10, 17, 18, 60, 64, 65])
@torch.no_grad()
def test_short_losses_see_half_a_span_to_a_span(n: int) -> None:
    gpt, ids = model("rope"), tokens(1, n)
    actual = far_back.short_losses(gpt, ids[0], 16, chunk=24)
    assert len(actual) == n - 1
    for t in range(1, n):
        start = 0 if t <= 16 else (t - 1 - 8) // 8 * 8
        logits = gpt(ids[:, start:t], logits_to_keep=1).logits[0]
        assert float(actual[t - 1]) == pytest.approx(float(F.cross_entropy(logits, ids[0, t : t + 1])), abs=1e-6)


class Copier(torch.nn.Module):
    """Knows any token that follows what it followed before, whatever the distance, and nothing else."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(30.0))
        self.vocab = vocab

    def new_cache(self, capacity: int) -> list[torch.Tensor]:
        return []

    def hidden(self, ids: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        past = torch.cat([*cache, ids], dim=1) if cache is not None else ids
        if cache is not None:
            cache.append(ids)
        offset = past.size(1) - ids.size(1)
        logits = torch.zeros(*ids.shape, self.vocab)
        for row, read in enumerate(past.tolist()):
            after: dict[int, int] = {}
            for t, token in enumerate(read):
                if t >= offset and token in after:
                    logits[row, t - offset, after[token]] = self.scale
                if t + 1 < len(read):
                    after[token] = read[t + 1]
        return logits

    def token_losses(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.transpose(1, 2), targets, reduction="none")


def test_a_model_that_remembers_gains_from_far_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_back, "LEAD", 8)
    vocab = 5000
    random = np.random.default_rng(0)
    ids = random.permutation(vocab)[:400]
    # Eight tokens again, 300 later.
    ids[320:328] = ids[20:28]
    passage = random.permutation(vocab)[:10]
    config = FarBackConfig(context=400, distances=(40, 200), kinds=("ngram", "planted"), ngram=2, passage=10, chunk=64)
    actual = {(f.kind, f.distance): f for f in far_back.measure(Copier(vocab), ids, passage, config, short=64)}
    assert actual["ngram", 200].tokens == 6
    assert actual["ngram", 200].nll < 1e-3 < actual["ngram", 200].control
    for distance in (40, 200):
        planted = actual["planted", distance]
        assert planted.context == 8 + distance + 10
        # All but the first token of the copy follow a token that they followed before.
        assert planted.nll / 10 < 0.2 * planted.control / 10


def test_rows_are_weighted_by_tokens_and_resampled_by_document() -> None:
    actual = {
        "a": [Sums("ngram", 2048, 8192, 30, 30.0, 60.0)],
        "b": [Sums("ngram", 2048, 8192, 10, 30.0, 30.0), Sums("names", 2048, 8192, 1, 2.0, 2.0)],
    }
    names, ngram = far_back.summary(actual)
    assert (ngram["nll"], ngram["control"], ngram["gain"]) == (1.5, 2.25, 0.75)
    assert (ngram["low"], ngram["high"]) == (1.0, 3.0)
    assert ngram["document"] == ["a", "b"]
    assert (names["documents"], names["std"], names["low"]) == (1, None, 2.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"kinds": ("nouns",)}, "kinds"), ({"distances": (70000,)}, "distances"), ({"passage": 1000}, "passage")],
)
def test_settings_that_cannot_be_measured_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FarBackConfig(**changed)
