"""The explorer in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from gape.data import load_tokenizer
from gape.explore.exploration import explore
from gape.explore.export import page
from gape.explore.view import default_heads
from gape.models.gpt import GPT
from gape.utils.validation import invalid_argument


class Frame:
    """A page inside a page: what Jupyter shows of :func:`show`.

    Attributes:
        page: the HTML of the page, the same that `gape explore --export` writes.
    """

    def __init__(self, page: str, height: int) -> None:
        self.page, self._height = page, height

    def _repr_html_(self) -> str:
        # An origin of its own, so that nothing in the page reaches the notebook.
        return (
            f'<iframe srcdoc="{escape(self.page)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self._height}px;border:1px solid #ddd"></iframe>'
        )

    def save(self, path: str | Path) -> None:
        """Write the page to a file that opens offline."""
        Path(path).write_text(self.page, encoding="utf-8")


def show(
    model: Any, text: str | Sequence[int], *, tokenizer: Any = None, heads: Sequence[tuple[int, int]] = (),
    height: int = 900,
) -> Frame:  # fmt: skip
    """Show what the gates of a model do to a text, in Jupyter.

    Args:
        model: a :class:`gape.GPT`, or a causal model of transformers that :func:`gape.hf.inject` has put gates into,
            in eval mode.
        text: the text, or its token ids.
        tokenizer: of :func:`gape.data.load_tokenizer` or transformers; None takes bytes for a vocabulary of 257, and
            for a model of transformers the tokenizer beside its weights.
        heads: (layer, query head) whose maps the page has in full; for short texts that is every head.

    Raises:
        ValueError: no tokenizer is known, or a model without gates of ours.
    """
    tokenizer = _tokenizer(model) if tokenizer is None else tokenizer
    reader = model
    if not isinstance(model, GPT):
        from gape.hf import LanguageModel  # noqa: PLC0415

        reader = model if isinstance(model, LanguageModel) else LanguageModel(model)
    ids = tokenizer.encode(text) if isinstance(text, str) else [int(token) for token in text]
    device = next(reader.parameters()).device
    exploration = explore(
        reader, torch.tensor([ids], device=device), token_text(tokenizer),
        title="gape explore", about={"name": type(model).__name__},
    )  # fmt: skip
    return Frame(page(exploration.view, exploration, heads or default_heads(exploration.view.header)), height)


def token_text(tokenizer: Any) -> Callable[[int], str]:
    """What turns a token into its text, a space before a word included.

    Some tokenizers drop the space of a text's first token, so each is decoded behind another one.
    """
    before = list(tokenizer.encode("a"))[-1:]
    skipped = len(tokenizer.decode(before))
    return lambda token: str(tokenizer.decode([*before, int(token)]))[skipped:]


def _tokenizer(model: Any) -> Any:
    if isinstance(model, GPT):
        if model.config.vocab_size == 257:
            return load_tokenizer("bytes")
        raise invalid_argument("tokenizer", None, "that of the model, as gape.data.load_tokenizer gives it")
    name = str(getattr(model, "name_or_path", ""))
    if not Path(name).is_dir():
        raise invalid_argument("tokenizer", None, "that of the model, since there is none beside its weights")
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(name)
