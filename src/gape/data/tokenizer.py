"""Tokenizers: bytes, GPT-2's files, or whatever the library `tokenizers` can load."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from gape.utils.validation import optional

#: A folder with one of these pairs holds a byte-level BPE as GPT-2's: the vocabulary, then the merges.
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
#: What ends a text, in the order tried, where a tokenizer does not say it itself.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
    """What turns text into whole numbers below `vocab_size` and back.

    Attributes:
        vocab_size: one more than the largest id.
        end_of_text: the id put after each document; None where the tokenizer has none.
        before: tokens that it would put before a text for a model, such as a beginning; :meth:`encode` adds none.
    """

    vocab_size: int
    end_of_text: int | None
    before: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added; the name of a special token in the text is text like any other."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, as :meth:`encode` gives them."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""

    def identity(self) -> dict[str, Any]:
        """kind, name, vocab_size, end_of_text and sha256: equal hashes mean equal ids for every text."""


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """A tokenizer by name.

    Args:
        spec: "bytes" (256 byte values and an end of text); a folder with GPT-2's `encoder.json` and `vocab.bpe` (or
            `vocab.json` and `merges.txt`) or with a `tokenizer.json`; such a JSON file; or a name on the Hugging
            Face hub, with "@REVISION" after it for a fixed revision.

    Raises:
        ValueError: there is no such tokenizer.
        ImportError: `tokenizers` is missing; says how to install it.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    name = str(spec)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise _not_found(name, "no such file or folder")
    return _from_hub(name)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, and 256 for the end of a text."""

    vocab_size = 257
    end_of_text: int | None = 256
    before = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes U+FFFD, an end of text nothing."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def identity(self) -> dict[str, Any]:
        """See :class:`Tokenizer`."""
        digest = hashlib.sha256(b"gape bytes 257").hexdigest()
        return {"kind": "bytes", "name": "bytes", "vocab_size": 257, "end_of_text": 256, "sha256": digest}


class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`, `kind` "gpt2-files", "tokenizer.json" or "hub".

    `digest` is the SHA-256 of what defines it, `end` the token that ends a text, where that is known.
    """

    def __init__(self, inner: Any, kind: str, name: str, digest: str, end: str | None = None) -> None:
        # Otherwise "<|endoftext|>" inside a document would end it.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner, self._kind, self._name, self._digest = inner, kind, name, digest
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        ends = (inner.token_to_id(token) for token in (end, *END_OF_TEXT) if token)
        self.end_of_text: int | None = next((i for i in ends if i is not None), None)
        special: list[int] = inner.encode("a", add_special_tokens=True).special_tokens_mask
        self.before = special.index(0) if 0 in special else 0

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text; all cores take part."""
        # The fast form does not compute offsets of tokens in the text, and takes two thirds of the time.
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens among it."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def identity(self) -> dict[str, Any]:
        """See :class:`Tokenizer`."""
        sizes = {"vocab_size": self.vocab_size, "end_of_text": self.end_of_text}
        return {"kind": self._kind, "name": self._name, **sizes, "sha256": self._digest}


def _from_folder(folder: Path) -> Tokenizer:
    name = folder.resolve().name
    for vocabulary, merges in GPT2_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return _gpt2(folder / vocabulary, folder / merges, name)
    if (folder / "tokenizer.json").is_file():
        return _from_file(folder / "tokenizer.json", name)
    raise _not_found(str(folder), "the folder has none of these files")


def _gpt2(vocabulary: Path, merges: Path, name: str) -> Tokenizer:
    """The byte-level BPE of GPT-2 from its two files, whatever they are called."""
    library = _library()
    try:
        inner = library.Tokenizer(library.models.BPE.from_file(str(vocabulary), str(merges)))
    # The library raises bare exceptions.
    except Exception as error:
        raise ValueError(f"tokenizer: {vocabulary} and {merges.name} are no GPT-2 vocabulary: {error}") from error
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    return LibraryTokenizer(inner, "gpt2-files", name, _digest(vocabulary.read_bytes(), merges.read_bytes()))


def _from_file(path: Path, name: str | None = None) -> Tokenizer:
    """A `tokenizer.json`; the file of settings beside it, where there is one, names the end of a text."""
    try:
        inner = _library().Tokenizer.from_file(str(path))
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"tokenizer: {path} is no tokenizer.json: {error}") from error
    return LibraryTokenizer(inner, "tokenizer.json", name or path.stem, _digest(path.read_bytes()), _end_token(path))


def _from_hub(spec: str) -> Tokenizer:
    name, _, revision = spec.partition("@")
    library = _library()
    try:
        inner = library.Tokenizer.from_pretrained(name, revision=revision or "main")
    # Errors of the network or the hub, of many kinds.
    except Exception as error:
        raise _not_found(spec, f"the hub says: {error}") from error
    return LibraryTokenizer(inner, "hub", spec, _digest(inner.to_str().encode()))


def _end_token(path: Path) -> str | None:
    """The end of a text as `tokenizer_config.json` beside a tokenizer has it."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return None
    with contextlib.suppress(ValueError, AttributeError):
        end = json.loads(beside.read_bytes()).get("eos_token")
        token = end.get("content") if isinstance(end, dict) else end
        return token if isinstance(token, str) else None
    return None


def _digest(*parts: bytes) -> str:
    """SHA-256 of the hashes of the parts, so that no two lists of parts run into one."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _library() -> Any:
    parts = ("tokenizers", "tokenizers.decoders", "tokenizers.models", "tokenizers.pre_tokenizers")
    return optional("this tokenizer needs the library tokenizers", "data", *parts)


def _not_found(spec: str, why: str) -> ValueError:
    return ValueError(
        f'tokenizer: got {spec!r}, expected "bytes", a folder with encoder.json and vocab.bpe (or vocab.json and '
        f"merges.txt, or tokenizer.json), or a name on the Hugging Face hub: {why}"
    )
