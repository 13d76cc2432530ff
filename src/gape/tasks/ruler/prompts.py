"""From samples to ids: the text of a prompt, the ids of prompt and answer, and whether a model can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gape.tasks.ruler.readers import Ids, Reader
from gape.tasks.ruler.sources import Sample
from gape.utils.files import sha256
from gape.utils.validation import invalid_argument

#: The input with the answer's prefix behind it, and the same as a turn of the model's own chat.
TEMPLATES = ("base", "chat")
#: Characters before an answer that decide how it is split into tokens.
_BEFORE = 256


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sample as a model reads it: the SHA-256 of the prompt's text, and the ids of prompt and answer."""

    sample: Sample
    digest: str
    prompt: Ids
    answer: Ids


def render(reader: Reader, sample: Sample, template: str) -> str:
    """The text of a prompt, without white space at its end, which belongs to what follows; that of a chat stays."""
    if template == "chat":
        return reader.chat(sample.input) + sample.prefix.strip()
    return (sample.input + sample.prefix).rstrip()


def answer_ids(reader: Reader, prompt: str, answer: str) -> list[int]:
    """The ids of an answer where it stands, behind a prompt and a space; none where the prompt ends with white space.

    Text before it and the answer are encoded together and apart: tokenizers that mark beginnings of words would
    otherwise take the answer for the beginning of a text. Where the two do not meet, the answer's own ids are taken.
    """
    before, placed = prompt[-_BEFORE:], answer if prompt[-1:].isspace() else f" {answer}"
    head, both = reader.encode(before), reader.encode(before + placed)
    if len(both) > len(head) and both[: len(head)] == head:
        return both[len(head) :]
    return reader.encode(placed, start=False)


def prepare(
    reader: Reader,
    samples: Sequence[Sample],
    *,
    template: str = "base",
    max_length: int | None = None,
    generate: bool = True,
) -> list[Prepared]:
    """Encode samples for a reader, and find those that are too long before any is read.

    `max_length` is a limit of prompt and answer together in place of the reader's; with `generate` the whole budget
    must fit, else the answer alone.

    Raises:
        ValueError: an unknown template, or samples that are too long.
    """
    if template not in TEMPLATES:
        raise invalid_argument("template", template, f"one of {', '.join(TEMPLATES)}")
    limit = reader.limit if max_length is None else max_length
    prepared, long = [], []
    for sample in samples:
        text = render(reader, sample, template)
        prompt = np.array(reader.encode(text, start=template != "chat"), dtype=np.int64)
        answer = np.array(answer_ids(reader, text, sample.answer), dtype=np.int64)
        if not len(prompt) or not len(answer):
            raise ValueError(f"tokenizer: makes no tokens of {sample.source}, sample {sample.number}")
        prepared.append(Prepared(sample=sample, digest=sha256(text.encode()), prompt=prompt, answer=answer))
        needed = len(prompt) + max(len(answer), sample.budget if generate else 0)
        if limit is not None and needed > limit:
            long.append((sample, needed))
    if long:
        one, needed = long[0]
        raise ValueError(
            f"{len(long)} of {len(samples)} samples are longer than the {limit:,} tokens that the model may read "
            f"(the first, {one.source} {one.number}, needs {needed:,} with its answer); --max-length sets another limit"
        )
    return prepared
