"""Texts of a corpus that `gape hf extend` measures a model on before it is tuned."""

from __future__ import annotations

import torch
from torch import Tensor

from gape.data import Corpus, Tokenizer
from gape.utils.validation import invalid_argument

#: Tokens of the shortest context that is measured.
SHORT = 1024


def refuse_short(corpus: Corpus, longest: int, window: int) -> None:
    """Refuse a corpus whose documents do not fill the longest window to train on, or one to measure on."""
    for split, needed in (("train", longest + 1), ("heldout", min(window, SHORT) + 1)):
        lengths = [document.length for document in corpus.documents(split)] if split in corpus.splits else []
        if max(lengths, default=0) < needed:
            got = f"{len(lengths)} {split} documents of at most {max(lengths, default=0):,} tokens"
            less = ", or a smaller long_length" if needed > window + 1 else ""
            raise invalid_argument("data", got, f"more text: one of at least {needed:,} tokens{less}")


def passage(corpus: Corpus, length: int) -> Tensor:
    """The beginning of the longest training document, int64 (1, N), N at most `length`."""
    longest = max(corpus.documents("train"), key=lambda document: document.length)
    return torch.from_numpy(corpus.tokens(longest, 0, min(length, longest.length)).astype("int64"))[None]


def passages(corpus: Corpus, count: int, length: int) -> Tensor:
    """Passages of training documents that have so many tokens, int64 (count, length); documents take turns."""
    documents = [document for document in corpus.documents("train") if document.length >= length]
    rows = []
    for number in range(count):
        document = documents[number % len(documents)]
        begin = number * length % (document.length - length + 1)
        rows.append(torch.from_numpy(corpus.tokens(document, begin, begin + length).astype("int64")))
    return torch.stack(rows)


def prose(corpus: Corpus, tokenizer: Tokenizer, characters: int) -> str:
    """Held-out text, at most so many characters."""
    parts, count = list[str](), 0
    for document in corpus.documents("heldout"):
        ids = [token for token in corpus.tokens(document).tolist() if token != corpus.end_of_text]
        parts.append(tokenizer.decode(ids))
        count += len(parts[-1])
        if count > characters:
            break
    return "\n".join(parts)[:characters]
