"""Loss on tokens whose answer is far back in the context: how well a model uses text that it read long ago.

Three kinds of token, each sorted by how far back its answer lies, a distance d standing for [d, 2d):

    ngram    the token after n tokens that occurred in the window before, the last time followed by the same token
    names    the first token of a name (a word that is always capitalised) that occurred before
    planted  a passage of another document, put into the window once and again d tokens later

Each has a control on the very same tokens: the loss under a short context, one training length at most (ngram, names),
or without the first copy (planted). The control's loss less the loss is what the far text was worth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gape.models.gpt import GPT
from gape.tasks.perplexity import weighted_interval, window_losses
from gape.utils.validation import invalid_argument, whole

Ids = npt.NDArray[np.int64]

KINDS = ("ngram", "names", "planted")
#: Tokens of the document before the first copy of a planted passage.
LEAD = 256

_WORD = re.compile(r"[^\W\d_]+")
_SHORTEST_NAME = 3


@dataclass(frozen=True, kw_only=True)
class FarBackConfig:
    """What is measured.

    Attributes:
        context: tokens of a window; each document that is long enough gives one.
        distances: each stands for answers at [d, 2d) tokens, and for planted passages d tokens apart.
        kinds: some of :data:`KINDS`.
        ngram: tokens that have to be repeated.
        passage: tokens of a planted passage.
        documents: at most so many.
        seed: which documents, windows and passages.
        chunk: tokens that go through the model at once. Changes nothing beyond rounding.

    Raises:
        ValueError: a number below 1, an unknown kind, or no distance below the context.
    """

    context: int = 65536
    distances: tuple[int, ...] = (512, 2048, 8192, 32768)
    kinds: tuple[str, ...] = KINDS
    ngram: int = 4
    passage: int = 64
    documents: int = 100
    seed: int = 0
    chunk: int = 16384

    def __post_init__(self) -> None:
        for name in ("context", "ngram", "passage", "documents", "chunk"):
            whole(name, getattr(self, name))
        whole("seed", self.seed, at_least=0)
        for kind in self.kinds:
            if kind not in KINDS:
                raise invalid_argument("kinds", kind, f"some of {', '.join(KINDS)}")
        for distance in self.distances:
            whole("distances", distance)
        if not self.kinds or not self.bins:
            expected = f"at least one below the context of {self.context}, and a kind"
            raise invalid_argument("distances", self.distances, expected)
        if "planted" in self.kinds and min(self.distances) < self.passage:
            expected = f"at most {min(self.distances)}, so that the two copies do not overlap"
            raise invalid_argument("passage", self.passage, expected)

    @property
    def bins(self) -> tuple[int, ...]:
        """The distances that a window of this context can hold."""
        return tuple(sorted(distance for distance in set(self.distances) if distance < self.context))


class Sums(NamedTuple):
    """Sums over the tokens of one kind and distance in one document; nll and control are summed losses in nats."""

    kind: str
    distance: int
    context: int
    tokens: int
    nll: float
    control: float


def repeated_ngrams(ids: Ids, n: int) -> Ids:
    """The distance of every token to its answer, (N,), 0 where it has none.

    Token t has one if the n tokens before it occurred in the window earlier, and were followed by the same token the
    last time. A nearer occurrence with another continuation leaves the token out.
    """
    distances = np.zeros(len(ids), dtype=np.int64)
    if len(ids) <= n:
        return distances
    codes = ids
    for step in range(1, n):
        # Exact, not a hash: pairs of numbers are numbered anew at every step.
        codes = np.unique(codes[:-1] * (ids.max() + 1) + ids[step:], return_inverse=True)[1]
    # codes[s] names the n tokens from s on; the token after them is s + n.
    earlier = _last_occurrence(codes[: len(ids) - n])
    starts = np.flatnonzero(earlier >= 0)
    same = ids[starts + n] == ids[earlier[starts] + n]
    distances[starts[same] + n] = (starts - earlier[starts])[same]
    return distances


def repeated_names(ids: Ids, decode: Callable[[list[int]], str]) -> Ids:
    """The distance of every token that begins a name to the last occurrence of that name, (N,), 0 for other tokens.

    A name has at least three letters, a capital first, and occurs nowhere in the window without its capital.
    """
    pieces = {token: decode([token]) for token in np.unique(ids).tolist()}
    parts = [pieces[token] for token in ids.tolist()]
    ends = np.cumsum([len(part) for part in parts])
    words = [(match.start(), match.group()) for match in _WORD.finditer("".join(parts))]
    small = {word for _, word in words if word[0].islower()}
    distances = np.zeros(len(ids), dtype=np.int64)
    last: dict[str, int] = {}
    for place, word in words:
        if len(word) < _SHORTEST_NAME or not word[0].isupper() or word.isupper() or word.lower() in small:
            continue
        token = int(np.searchsorted(ends, place, side="right"))
        if word in last:
            distances[token] = token - last[word]
        last[word] = token
    return distances


@torch.no_grad()
def short_losses(model: GPT, ids: Tensor, span: int, *, chunk: int) -> Tensor:
    """The loss of every token from the second on given the last span/2 to span before it: ids (N,) → (N − 1,)."""
    half = max(1, span // 2)
    span = 2 * half
    losses = [window_losses(model, ids[None, : span + 1], min(span, len(ids) - 1), chunk=chunk)[0]]
    starts = range(half, len(ids) - 1 - half, half)
    full = [start for start in starts if start + span < len(ids)]
    # As many windows at once as make a chunk.
    size = max(1, chunk // span)
    for at in range(0, len(full), size):
        windows = torch.stack([ids[start : start + span + 1] for start in full[at : at + size]])
        losses.append(window_losses(model, windows, half, chunk=chunk).flatten())
    # The document may end before the last window does.
    losses += [
        window_losses(model, ids[None, start:], len(ids) - 1 - start - half, chunk=chunk)[0]
        for start in starts[len(full) :]
    ]
    return torch.cat(losses)


def measure(
    model: GPT,
    ids: Ids,
    passage: Ids | None,
    config: FarBackConfig,
    *,
    short: int,
    decode: Callable[[list[int]], str] | None = None,
) -> list[Sums]:
    """The sums of one window of a document (context,) for every kind and distance.

    `passage` are tokens to plant, `short` those of the short context; `decode` makes text of ids, for names.
    """
    away: dict[str, Ids] = {}
    if "ngram" in config.kinds:
        away["ngram"] = repeated_ngrams(ids, config.ngram)
    if "names" in config.kinds and decode is not None:
        away["names"] = repeated_names(ids, decode)
    sums = []
    if away:
        tokens = torch.from_numpy(ids).to(next(model.parameters()).device)
        losses = window_losses(model, tokens[None], len(ids) - 1, chunk=config.chunk)[0]
        control = short_losses(model, tokens, short, chunk=config.chunk)
        both = [each.double().cpu().numpy() for each in (losses, control)]
        for kind, distances in away.items():
            for distance in config.bins:
                chosen = (distances[1:] >= distance) & (distances[1:] < 2 * distance)
                if chosen.any():
                    totals = (float(each[chosen].sum()) for each in both)
                    sums.append(Sums(kind, distance, config.context, int(chosen.sum()), *totals))
    if "planted" in config.kinds and passage is not None:
        fitting = [distance for distance in config.bins if LEAD + distance <= config.context]
        sums += [_planted(model, ids, passage, distance, config) for distance in fitting]
    return sums


def _planted(model: GPT, host: Ids, passage: Ids, distance: int, config: FarBackConfig) -> Sums:
    """The second copy's loss with the first one there, and with the document's own text in its place."""
    without = np.concatenate((host[: LEAD + distance], passage))
    planted = without.copy()
    planted[LEAD : LEAD + len(passage)] = passage
    both = torch.from_numpy(np.stack((planted, without))).to(next(model.parameters()).device)
    losses = window_losses(model, both, len(passage), chunk=config.chunk).double().sum(1).tolist()
    return Sums("planted", distance, len(planted), len(passage), *losses)


def summary(sums: Mapping[str, list[Sums]]) -> list[dict[str, Any]]:
    """Token-weighted means over documents of the sums of :func:`measure`, with 95% bootstrap intervals over documents.

    A row per kind and distance; `gain` is control − nll, and the sums of every document let runs be compared.
    """
    groups: dict[tuple[str, int, int], dict[str, Sums]] = {}
    for document, entries in sums.items():
        for entry in entries:
            groups.setdefault((entry.kind, entry.distance, entry.context), {})[document] = entry
    rows = []
    for (kind, distance, context), by_document in sorted(groups.items()):
        documents = sorted(by_document)
        tokens, nll, control = (
            np.array([getattr(by_document[name], field) for name in documents], dtype=np.float64)
            for field in ("tokens", "nll", "control")
        )
        units = np.arange(len(documents))
        low, high, _ = weighted_interval(nll, tokens, units)
        gain_low, gain_high, _ = weighted_interval(control - nll, tokens, units)
        means = nll / tokens
        rows.append(
            {
                "kind": kind, "distance": distance, "context": context, "tokens": int(tokens.sum()),
                "documents": len(documents), "nll": float(nll.sum() / tokens.sum()),
                "std": float(means.std(ddof=1)) if len(means) > 1 else None, "low": low, "high": high,
                "control": float(control.sum() / tokens.sum()), "gain": float((control - nll).sum() / tokens.sum()),
                "gain_low": gain_low, "gain_high": gain_high, "document": documents,
                "document_tokens": [int(count) for count in tokens],
                "document_nll": [round(value, 4) for value in nll.tolist()],
                "document_control": [round(value, 4) for value in control.tolist()],
            }
        )  # fmt: skip
    return rows


def _last_occurrence(codes: Ids) -> Ids:
    """For each index the last earlier one with the same code, −1 where there is none."""
    order = np.argsort(codes, kind="stable")
    earlier = np.full(len(codes), -1, dtype=np.int64)
    again = codes[order[1:]] == codes[order[:-1]]
    earlier[order[1:][again]] = order[:-1][again]
    return earlier
