"""Corpora: documents to token shards, and training windows out of them. `docs/guide/data.md` has the formats.

The names are imported when they are first used: the processes that only tokenise never wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gape.data.config import PrepareConfig
    from gape.data.corpus import Corpus, Document, open_corpus
    from gape.data.pipeline import prepare
    from gape.data.recall import RecallConfig, RecallSource
    from gape.data.tokenizer import Tokenizer, load_tokenizer
    from gape.data.windows import WindowSource

_HOMES = {
    "Corpus": "corpus",
    "Document": "corpus",
    "PrepareConfig": "config",
    "RecallConfig": "recall",
    "RecallSource": "recall",
    "Tokenizer": "tokenizer",
    "WindowSource": "windows",
    "load_tokenizer": "tokenizer",
    "open_corpus": "corpus",
    "prepare": "pipeline",
}

__all__ = [
    "Corpus",
    "Document",
    "PrepareConfig",
    "RecallConfig",
    "RecallSource",
    "Tokenizer",
    "WindowSource",
    "load_tokenizer",
    "open_corpus",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"gape.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gape.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
