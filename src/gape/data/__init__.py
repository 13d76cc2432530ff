"""Corpora: documents to token shards, and training windows out of them. `docs/guide/data.md` has the formats."""

from gape.data.config import PrepareConfig
from gape.data.corpus import Corpus, Document, open_corpus
from gape.data.pipeline import prepare
from gape.data.recall import RecallConfig, RecallSource
from gape.data.tokenizer import Tokenizer, load_tokenizer
from gape.data.windows import WindowSource

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
