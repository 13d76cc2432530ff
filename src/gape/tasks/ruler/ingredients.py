"""What samples are made of: word lists, haystacks and questions, and what identifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from gape.tasks.ruler.haystacks import Text, noise, read_text
from gape.tasks.ruler.questions import Questions, read_questions
from gape.tasks.ruler.tasks import Task
from gape.utils.files import sha256


class Names(NamedTuple):
    """Word lists and what identifies them."""

    nouns: Sequence[str]
    adjectives: Sequence[str]
    verbs: Sequence[str]
    digest: str

    def key(self, number: int) -> str:
        """A name of an adjective and a noun; numbers from 0 to `keys` − 1 give different ones."""
        adjective, noun = divmod(number, len(self.nouns))
        return f"{self.adjectives[adjective]}-{self.nouns[noun]}"

    @property
    def keys(self) -> int:
        """How many names there are."""
        return len(self.nouns) * len(self.adjectives)


def names() -> Names:
    """The word lists of the package `wonderwords`, those RULER uses; read as files, with no private name of it.

    Raises:
        ImportError: it is missing; says how to install it.
    """
    try:
        folder = resources.files("wonderwords") / "assets"
    except ImportError as error:
        raise ImportError("word lists need the package wonderwords: pip install 'gape[ruler]'") from error
    data = [(folder / f"{kind}list.txt").read_bytes() for kind in ("noun", "adjective", "verb")]
    # A word with spaces in it would not be one entry of a list.
    nouns, adjectives, verbs = (
        sorted({word for line in part.decode().splitlines() if (word := line.strip()).isalpha()}) for part in data
    )
    return Names(nouns, adjectives, verbs, sha256(b"\n".join(data)))


class Ingredients:
    """Everything that samples are made of, read when a task first needs it.

    Args:
        text: a file for the tasks that hide needles in prose; repeated sentences where None.
        questions: files by what they are: "squad" and "hotpotqa".
    """

    def __init__(self, text: Path | None = None, questions: Mapping[str, Path] | None = None) -> None:
        self._text, self._files = text, dict(questions or {})
        self._questions: dict[str, Questions] = {}

    @cached_property
    def names(self) -> Names:
        """The word lists."""
        return names()

    @cached_property
    def words(self) -> list[str]:
        """All words, each once."""
        return sorted({*self.names.nouns, *self.names.adjectives, *self.names.verbs})

    @cached_property
    def noise(self) -> Text:
        """Repeated sentences."""
        return noise()

    @cached_property
    def text(self) -> Text:
        """Prose."""
        return self.noise if self._text is None else read_text(self._text)

    def questions(self, kind: str) -> Questions:
        """Questions of a kind.

        Raises:
            ValueError: no file of them was given, or it is not what it should be.
        """
        if kind not in self._files:
            raise ValueError(f"{kind}: got no file, expected one of that format for tasks that ask questions")
        if kind not in self._questions:
            self._questions[kind] = read_questions(self._files[kind], kind)
        return self._questions[kind]

    def identity(self, task: Task) -> dict[str, Any]:
        """Names and hashes of what a task is made of, for a manifest."""
        settings = task.settings
        found: dict[str, Any] = {}
        if task.family in ("needles", "common"):
            found["wonderwords"] = self.names.digest
        if task.family in ("needles", "variables"):
            text = self.text if settings.get("haystack") == "text" else self.noise
            found["haystack"] = {"name": text.name, "sha256": text.digest}
        if task.family == "questions":
            asked = self.questions(settings["questions"])
            found["questions"] = {"name": asked.name, "sha256": asked.digest, "questions": len(asked.items)}
        return found
