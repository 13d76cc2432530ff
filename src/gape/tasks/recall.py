"""Recall by distance: whether a model repeats a fact of a held-out text, where the fact stands far, halfway or near.

Names in these texts are in no training text (:class:`gape.data.recall_texts.RecallWriter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.data import Corpus, Tokenizer
from gape.data.recall_texts import RecallText, RecallWriter, Request
from gape.utils.random import key
from gape.utils.validation import invalid_argument, whole

#: Between which parts of a text its fact stands.
DISTANCES = {"far": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "near": (2 / 3, 1.0)}

#: How often a text with all of its facts is tried.
_TRIES = 100


class Sample(NamedTuple):
    """A text that ends with an answer.

    distance: one of :data:`DISTANCES`. ids: int64 (N,). source: the tokens of the value in its fact. answer: how many
    of the last tokens are the answer.
    """

    distance: str
    ids: Tensor
    source: range
    answer: int


class Score(NamedTuple):
    """nll: nats per token of an answer. right: whether each of its tokens was the likeliest one."""

    nll: float
    right: bool


def samples(
    corpus: Corpus, tokenizer: Tokenizer, length: int, count: int, *, seed: int = 0, split: str = "heldout",
    distances: Sequence[str] = tuple(DISTANCES),
) -> Iterator[Sample]:  # fmt: skip
    """Texts of a corpus with one fact, `count` for each distance; each is a function of the seed and its number.

    Documents of `split` with at least `length` tokens serve; the question may end a text a few tokens before. Refused
    are lengths that no document has, and those in which a fact and its question leave no text.
    """
    passages = _Passages(corpus, tokenizer, length, split)
    for number in range(whole("count", count)):
        for distance in distances:
            rng = Random(key("recall task", seed, distance, number))
            text = passages.write(rng, Request(facts=1, depths=DISTANCES[distance], repeated=0.0))
            end = text.answers[0].stop
            yield Sample(distance, torch.from_numpy(text.ids[:end]), text.sources[0], len(text.answers[0]))


def several(
    corpus: Corpus, tokenizer: Tokenizer, length: int, count: int, facts: int, *, seed: int = 0
) -> Iterator[tuple[Tensor, list[range]]]:
    """Held-out texts with `facts` facts, all asked for at the end; ids, int64 (length,), and the tokens of each answer.

    Errors are those of :func:`samples`; more facts than a text of this length has room for are one, too.
    """
    passages = _Passages(corpus, tokenizer, length, "heldout")
    for number in range(whole("count", count)):
        rng = Random(key("recall task", seed, "several", number))
        text = passages.write(rng, Request(facts=facts, repeated=0.0, exact=True))
        yield torch.from_numpy(text.ids), text.answers


class _Passages:
    """Recall texts of passages that are drawn from the documents of a split."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, length: int, split: str) -> None:
        self.corpus, self.length = corpus, length
        self.documents = [document for document in corpus.documents(split) if document.length >= length]
        if not self.documents:
            raise invalid_argument("length", length, f"at most what a {split} document of {corpus.directory} has")
        self.writer = RecallWriter(tokenizer, heldout=split == "heldout")
        if length < (least := self.writer.shortest()):
            raise invalid_argument("length", length, f"at least {least} tokens, for a fact and its question")

    def write(self, rng: Random, request: Request) -> RecallText:
        """A text of one passage with all the facts of the request; refused where none of this length has so many."""
        document = rng.choice(self.documents)
        start = rng.randrange(document.length - self.length + 1)
        passage = np.asarray(self.corpus.tokens(document, start, start + self.length), dtype=np.int64)
        for _ in range(_TRIES):
            text = self.writer.write(passage, rng, request)
            if text is not None and len(text.answers) == request.facts:
                return text
        raise invalid_argument("facts", request.facts, f"fewer in texts of {self.length} tokens")


def score(model: Any, ids: Tensor, answer: int) -> Score:
    """How likely a model finds the last `answer` tokens of a text (N,); as :func:`score_answers`."""
    return score_answers(model, ids, [range(len(ids) - answer, len(ids))])[0]


@torch.no_grad()
def score_answers(model: Any, ids: Tensor, answers: Sequence[range]) -> list[Score]:
    """How likely a model finds each of some answers in a text (N,), after the right ones before it.

    `answers` are the tokens of each by number, in the order of the text.
    """
    ids = ids.to(next(model.parameters()).device)[None]
    first = answers[0].start
    x = model.hidden(ids[:, :-1])[:, first - 1 :]
    targets = ids[:, first:]
    losses, right = model.token_losses(x, targets)[0].double(), (model.logits(x).argmax(-1) == targets)[0]
    spans = [slice(answer.start - first, answer.stop - first) for answer in answers]
    return [Score(float(losses[span].mean()), bool(right[span].all())) for span in spans]
