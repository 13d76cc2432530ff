"""A model's own answers, to prompts that ship and to prompts that it writes itself.

`gape hf extend` measures by them how far a model has moved, and tunes on them so that it moves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import resources
from typing import Any

import torch
from torch import Tensor

import gape.hf
from gape.tasks.ruler.readers import TransformersReader

#: Of the shipped prompts so many are measured on; the others may be tuned on.
MEASURED_PROMPTS = 100
#: Prompts that a model writes and answers to be tuned on, and tokens of a prompt and of an answer.
KEPT_PROMPTS, PROMPT_TOKENS, KEPT_TOKENS = 4096, 64, 128
#: Answers to each prompt that ships, of a model that writes none.
KEPT_ANSWERS = 8
#: Stands for a user's text when a chat template is taken apart; no template has it.
_MARK = "\0"


def short_prompts() -> list[str]:
    """The prompts that ship: the first :data:`MEASURED_PROMPTS` to measure on, the others to tune on."""
    text = (resources.files("gape.tasks") / "short_prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def prompts_with_answers(reader: TransformersReader, *, seed: int, tokens: int) -> list[list[int]]:
    """Prompts with a model's own answers, as ids, to tune on so that it stays what it was.

    Args:
        reader: the model; without a chat template it answers the prompts that ship.
        seed: draws prompts and answers.
        tokens: that are read at once, about.
    """
    batch = max(1, tokens // (PROMPT_TOKENS + KEPT_TOKENS))
    texts = written_prompts(reader, KEPT_PROMPTS, PROMPT_TOKENS, seed=seed, batch=batch)
    texts = texts or short_prompts()[MEASURED_PROMPTS:] * KEPT_ANSWERS
    return [ids.tolist() for ids, _ in answer(reader, texts, KEPT_TOKENS, seed=seed, batch=batch)]


def capture_steps(reader: TransformersReader, context_length: int) -> None:
    """Let a GPU replay the steps of generation, if a cache in pages takes the model.

    It takes models with gates; at an identity start they change no logits.
    """
    gape.hf.inject(reader.model, context_length=context_length)
    cache = partial(gape.hf.FullCache, reader.model)
    try:
        cache()
    except ValueError:
        gape.hf.remove(reader.model)
    else:
        reader.forgetting = cache


def written_prompts(reader: TransformersReader, count: int, tokens: int, *, seed: int, batch: int) -> list[str]:
    """Prompts that a model writes in the user's place of its chat template (Magpie, arXiv 2406.08464).

    Args:
        reader: the model; without a chat template it writes none.
        count: prompts that are drawn; empty ones, those that do not end and those that came before are left out.
        tokens: of a prompt at most.
        seed, batch: as :func:`answer`.
    """
    if not _has_chat(reader):
        return []
    prefix = reader.encode(reader.chat(_MARK).split(_MARK)[0], start=False)
    rows = _drawn(reader, [prefix] * count, tokens, seed=seed, batch=batch)
    ended = [row[:stop] for row in rows if (stop := _length(row, reader.ends)) < len(row)]
    return list(dict.fromkeys(text for row in ended if (text := reader.decode(row).strip())))


def answer(
    reader: TransformersReader, texts: Sequence[str], tokens: int, *, seed: int | None = None, batch: int = 128
) -> list[tuple[Tensor, int]]:
    """A model's answers to prompts, in its chat template where it has one.

    Args:
        reader: the model.
        texts: the prompts.
        tokens: of an answer at most.
        seed: draws answers from the model's distribution; None takes the likeliest token each time.
        batch: prompts that are read at once.

    Returns:
        For each prompt ids (N,) on the CPU, prompt and answer, and how many of the last ones are the answer.
    """
    chat = _has_chat(reader)
    rows = [reader.encode(reader.chat(text) if chat else text, start=not chat) for text in texts]
    answers = []
    for row, new in zip(rows, _drawn(reader, rows, tokens, seed=seed, batch=batch), strict=True):
        # The token that ends an answer is part of it.
        stop = min(_length(new, reader.ends) + 1, len(new))
        answers.append((torch.tensor(row + new[:stop]), stop))
    return answers


def _drawn(
    reader: TransformersReader, rows: Sequence[list[int]], tokens: int, *, seed: int | None, batch: int
) -> list[list[int]]:
    """What a model writes behind each row."""
    new: list[list[int]] = []
    for first in range(0, len(rows), batch):
        options: dict[str, Any] = {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed + first)
            options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        if reader.forgetting is not None:
            options["past_key_values"] = reader.forgetting()
        new += reader.generate(rows[first : first + batch], tokens, **options)
    return new


def _has_chat(reader: TransformersReader) -> bool:
    return bool(getattr(reader.tokenizer, "chat_template", None))


def _length(row: Sequence[int], ends: set[int]) -> int:
    """Tokens before the end of a text."""
    return next((place for place, token in enumerate(row) if token in ends), len(row))
