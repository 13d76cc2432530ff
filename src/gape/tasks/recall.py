"""Recall by distance: whether a model repeats a fact of a held-out text, where the fact stands far, halfway or near.

Names in these texts are in no training text (:class:`gape.data.recall_texts.RecallWriter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.data import Corpus, Tokenizer
from gape.data.recall_texts import RecallWriter, Request
from gape.utils.jsonl import Record
from gape.utils.random import key
from gape.utils.validation import invalid_argument, whole

#: Between which parts of a text its fact stands.
DISTANCES = {"far": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "near": (2 / 3, 1.0)}


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
    corpus: Corpus, tokenizer: Tokenizer, length: int, count: int, *, seed: int = 0, split: str = "heldout"
) -> Iterator[Sample]:
    """Texts of a corpus with one fact, `count` for each distance; each is a function of the seed and its number.

    Args:
        corpus: documents of `split` that have at least `length` tokens serve.
        tokenizer: the corpus's.
        length: of a text at most; its question may end it a few tokens before.
        count: for each distance.
        seed: which texts.
        split: "train" or "heldout".

    Raises:
        ValueError: no document is long enough, or a fact and its question leave no text.
    """
    whole("count", count)
    documents = [document for document in corpus.documents(split) if document.length >= length]
    if not documents:
        raise invalid_argument("length", length, f"at most what a {split} document of {corpus.directory} has")
    writer = RecallWriter(tokenizer, heldout=split == "heldout")
    if length < (least := writer.shortest()):
        raise invalid_argument("length", length, f"at least {least} tokens, for a fact and its question")
    for number in range(count):
        for distance, depths in DISTANCES.items():
            rng = Random(key("recall task", seed, distance, number))
            document = rng.choice(documents)
            start = rng.randrange(document.length - length + 1)
            passage = np.asarray(corpus.tokens(document, start, start + length), dtype=np.int64)
            text = None
            while text is None:
                text = writer.write(passage, rng, Request(facts=1, depths=depths, repeated=0.0))
            end = text.answers[0].stop
            yield Sample(distance, torch.from_numpy(text.ids[:end]), text.sources[0], len(text.answers[0]))


@torch.no_grad()
def score(model: Any, ids: Tensor, answer: int) -> Score:
    """How likely a model finds the last tokens of a text.

    Args:
        model: a :class:`gape.GPT` or :class:`gape.hf.LanguageModel`, in eval mode.
        ids: int64 (N,), on any device.
        answer: how many of them are scored.
    """
    ids = ids.to(next(model.parameters()).device)[None]
    x = model.hidden(ids[:, :-1])[:, -answer:]
    targets = ids[:, -answer:]
    losses = model.token_losses(x, targets)
    return Score(float(losses.double().mean()), bool((model.logits(x).argmax(-1) == targets).all()))


def by_distance(scored: list[tuple[Sample, Score]]) -> list[Record]:
    """A row for each distance: samples, mean loss, and the share of answers that were right."""
    rows = []
    for distance in DISTANCES:
        own = [score for sample, score in scored if sample.distance == distance]
        if own:
            means = {"nll": float(np.mean([s.nll for s in own])), "match": float(np.mean([s.right for s in own]))}
            rows.append({"distance": distance, "samples": len(own), **means})
    return rows
