"""From samples to ids: templates, the ids of prompt and answer, and what is done with prompts that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gape.tasks.ruler.readers import Ids, Reader
from gape.tasks.ruler.sources import Sample
from gape.utils.files import sha256
from gape.utils.validation import invalid_argument

#: Templates by name; any other text with {input} in it is one too.
TEMPLATES = {"base": "{input}{prefix}", "no-prefix": "{input}", "chat": "chat turn of {input}, then {prefix}"}
OVERLENGTH = ("error", "skip", "truncate")
#: Characters before an answer that decide how it is split into tokens.
_BEFORE = 256


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sample as a model reads it.

    Attributes:
        sample: the sample.
        digest: SHA-256 of the prompt's text.
        prompt, answer: their ids.
        cut: tokens taken out of the prompt's middle.
        skipped: whether it is too long and left out.
    """

    sample: Sample
    digest: str
    prompt: Ids
    answer: Ids
    cut: int = 0
    skipped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the prompt before anything was taken out."""
        return len(self.prompt) + self.cut


def check_template(template: str) -> str:
    """A template, by name or as a text.

    Raises:
        ValueError: it has no {input}.
    """
    text = TEMPLATES.get(template, template)
    if "{input}" not in text:
        raise invalid_argument(
            "template", template, f"one of {', '.join(TEMPLATES)}, or a text with {{input}} and {{prefix}}"
        )
    return template


def render(reader: Reader, sample: Sample, template: str) -> str:
    """The text of a prompt, without white space at its end, which belongs to what follows; that of a chat stays."""
    if template == "chat":
        return reader.chat(sample.input) + sample.prefix.strip()
    # Not str.format: prompts and templates may have braces of their own.
    text = TEMPLATES.get(template, template).replace("{prefix}", sample.prefix).replace("{input}", sample.input)
    return text.rstrip()


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
    overlength: str = "error",
    max_length: int | None = None,
    generate: bool = True,
) -> list[Prepared]:
    """Encode samples, and find those that are too long before any is read.

    Args:
        reader: whose tokenizer and limit count.
        samples: which.
        template: see :data:`TEMPLATES`.
        overlength: "error"; "skip" leaves such samples out; "truncate" takes tokens out of the middle of a prompt, so
            that the instruction before and the question behind it stay.
        max_length: tokens of prompt and answer together, in place of the reader's limit.
        generate: whether the whole budget must fit, or the answer alone.

    Raises:
        ValueError: an unknown policy or template, or samples that are too long.
    """
    if overlength not in OVERLENGTH:
        raise invalid_argument("overlength", overlength, f"one of {', '.join(OVERLENGTH)}")
    check_template(template)
    limit = reader.limit if max_length is None else max_length
    prepared, long = [], []
    for sample in samples:
        text = render(reader, sample, template)
        prompt = np.array(reader.encode(text, start=template != "chat"), dtype=np.int64)
        answer = np.array(answer_ids(reader, text, sample.answer), dtype=np.int64)
        if not len(prompt) or not len(answer):
            raise ValueError(f"tokenizer: makes no tokens of {sample.source}, sample {sample.number}")
        room = None if limit is None else limit - max(len(answer), sample.budget if generate else 0)
        item = Prepared(sample=sample, digest=sha256(text.encode()), prompt=prompt, answer=answer)
        if room is not None and len(prompt) > room:
            long.append(item)
            item = _shorten(item, room, overlength)
        prepared.append(item)
    if long and overlength == "error":
        one = long[0]
        needed = len(one.prompt) + max(len(one.answer), one.sample.budget if generate else 0)
        raise ValueError(
            f"{len(long)} of {len(samples)} samples are longer than the {limit:,} tokens that the model may read "
            f"(the first, {one.sample.source} {one.sample.number}, needs {needed:,} with its answer); "
            "--overlength skip or truncate goes on without them or cuts them, --max-length sets another limit"
        )
    return prepared


def _shorten(item: Prepared, room: int, overlength: str) -> Prepared:
    if overlength != "truncate":
        return replace(item, skipped=True)
    if room < 2:
        raise invalid_argument("max_length", room, f"room for a prompt beside the answer to {item.sample.source}")
    head, tail = item.prompt[: room // 2], item.prompt[room // 2 - room :]
    return replace(item, prompt=np.concatenate([head, tail]), cut=len(item.prompt) - room)
