"""Settings of a preparation, from the command line or from a named recipe, checked before anything is read."""

from __future__ import annotations

import math
import typing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gape.utils import recipe_files
from gape.utils.settings import parse_value, refuse_unknown
from gape.utils.validation import invalid_argument

DTYPES = ("uint16", "uint32")
#: A record of the index has one byte for the stratum.
MOST_STRATA = 255


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The settings of a preparation.

    Args:
        inputs: files, folders, or `hf:DATASET[@REVISION]#FILES`.
        heldout: the same, for documents that are all held out.
        tokenizer: as :func:`gape.data.load_tokenizer` takes it.
        text_field, id_field, title_field: names in JSON lines or Parquet columns. An id_field of None takes
            "id" where there is one, and the file and line number elsewhere.
        heldout_fraction: of the documents of `inputs`, by a hash of their ids; 0 to below 1.
        seed: of that hash.
        strata: lengths in tokens, such as (8192, 16384, 32768); a stratum L takes documents from L up to 2 L tokens,
            others are left out. Empty for none.
        end_of_text: whether the tokenizer's end of text follows each document.
        dtype: "uint16", "uint32", or None for the smaller that holds the vocabulary.
        shard_tokens: tokens at which a shard is closed; one holds whole documents.
        max_tokens: end each input after the document that reaches this many; a folder is one input. None reads
            everything.
        max_bad: bad lines and empty documents that are accepted: a number from 1 on (or 0), or below 1 a fraction of
            what was read.

    Raises:
        ValueError: a setting out of range; names it.
    """

    inputs: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    tokenizer: str = ""
    text_field: str = "text"
    id_field: str | None = None
    title_field: str = "title"
    heldout_fraction: float = 0.0
    seed: int = 0
    strata: tuple[int, ...] = ()
    end_of_text: bool = True
    dtype: str | None = None
    shard_tokens: int = 2**24
    max_tokens: int | None = None
    max_bad: float = 0.01

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.strata))
        checks = {
            "inputs": (self.inputs or self.heldout, "at least one file, folder or dataset"),
            "tokenizer": (self.tokenizer, 'a name, such as "bytes" or a folder with GPT-2\'s files'),
            "heldout_fraction": (0 <= self.heldout_fraction < 1, "a number from 0 to below 1"),
            "strata": (rising and min(self.strata, default=2) > 1, "rising lengths above 1"),
            "dtype": (self.dtype in (None, *DTYPES), f"one of {', '.join(DTYPES)}"),
            "shard_tokens": (self.shard_tokens >= 1, "at least 1"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            "max_bad": (0 <= self.max_bad < math.inf, "a number of lines, or a fraction below 1"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise invalid_argument(name, getattr(self, name), expected)
        if len(self.strata) > MOST_STRATA:
            raise invalid_argument("strata", self.strata, f"at most {MOST_STRATA} lengths")

    def stratum(self, tokens: int) -> int:
        """The highest stratum L with L ≤ tokens < 2 L, counted from 1; 0 where there is none."""
        return max((n for n, length in enumerate(self.strata, 1) if length <= tokens < 2 * length), default=0)

    def stores(self, tokens: int) -> bool:
        """Whether a document of `tokens` tokens, the end of text not counted, is stored."""
        return not self.strata or self.stratum(tokens) > 0

    def shapes(self) -> dict[str, Any]:
        """The settings that shape the shards; what may change between a start and a resume is left out."""
        settings = asdict(self)
        for name in ("inputs", "heldout", "tokenizer", "dtype", "max_bad"):
            del settings[name]
        return settings


def choose_dtype(dtype: str | None, vocab_size: int) -> str:
    """The dtype of the shards; refuses one that does not hold the vocabulary."""
    fitting = [name for name in DTYPES if vocab_size - 1 <= np.iinfo(name).max]
    if dtype is None and fitting:
        return fitting[0]
    if dtype not in fitting:
        most = np.iinfo(dtype or DTYPES[-1]).max + 1
        raise ValueError(f"dtype: got {dtype}, expected one that holds {vocab_size:,} ids; it holds {most:,}")
    return dtype


#: Where recipes of a preparation lie.
FOLDER = ("data",)


def is_recipe(name: str) -> bool:
    """Whether an input names a recipe: one of those there are, or a TOML file."""
    return name.endswith(recipe_files.ENDING) or (name in recipe_files.available(FOLDER) and not Path(name).exists())


def load(name: str) -> dict[str, Any]:
    """The settings in a recipe, as arguments of :class:`PrepareConfig`; refuses unknown keys and wrong types."""
    settings = recipe_files.read(recipe_files.find(name, folders=FOLDER))
    settings.pop("description", None)
    hints = typing.get_type_hints(PrepareConfig)
    refuse_unknown("", settings, list(hints))
    return {key: parse_value(key, hints[key], value) for key, value in settings.items()}
