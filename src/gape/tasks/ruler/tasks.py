"""RULER's thirteen tasks: what each is, how long an answer may be, and RULER's string match."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Below this length budgets shrink with it; RULER has no samples so short.
_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of RULER's tasks, by its name.

    Attributes:
        family: which builder makes it: needles, variables, common, frequent or questions; `settings` are those of it.
        budget: tokens that RULER lets a model answer with.
        match: "all": the share of references in the answer; "part": 1 where one of them is in it.
        findable: whether every answer stands word for word in its prompt; HotpotQA has answers of yes and no.
        join: references as the one text whose likelihood is measured.
    """

    name: str
    family: str
    budget: int
    match: str = "all"
    findable: bool = True
    join: Callable[[Sequence[str]], str] = field(default=", ".join)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def budget_at(self, length: int, answer_tokens: int) -> int:
        """Tokens kept free for the answer at a length: RULER's, an eighth of short lengths, never too few."""
        return max(answer_tokens, min(self.budget, length // _SHARE))


def _numbered(outputs: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(outputs, 1))


def _first(outputs: Sequence[str]) -> str:
    return outputs[0]


def _needles(
    name: str, haystack: str, *, keys: str = "words", values: str = "numbers", needles: int = 1, each: int = 1,
    queries: int = 1,
) -> Task:  # fmt: skip
    """`needles` keys with `each` values, of which `queries` are in the question."""
    settings = {
        "haystack": haystack, "keys": keys, "values": values, "needles": needles, "each": each, "queries": queries,
    }  # fmt: skip
    return Task(name=name, family="needles", budget=128, settings=settings)


_ALL = (
    _needles("niah_single_1", "noise"),
    _needles("niah_single_2", "text"),
    _needles("niah_single_3", "text", values="uuids"),
    _needles("niah_multikey_1", "text", needles=4),
    _needles("niah_multikey_2", "needle"),
    _needles("niah_multikey_3", "needle", keys="uuids", values="uuids"),
    _needles("niah_multivalue", "text", each=4),
    _needles("niah_multiquery", "text", needles=4, queries=4),
    Task(name="vt", family="variables", budget=30, join=" ".join, settings={"hops": 4}),
    Task(name="cwe", family="common", budget=120, join=_numbered, settings={"words": 10}),
    Task(name="fwe", family="frequent", budget=50, settings={"words": 3, "exponent": 2.0}),
    Task(name="qa_1", family="questions", budget=32, match="part", join=_first, settings={"questions": "squad"}),
    Task(
        name="qa_2", family="questions", budget=32, match="part", findable=False, join=_first,
        settings={"questions": "hotpotqa"},
    ),
)  # fmt: skip

TASKS = {task.name: task for task in _ALL}
#: What other harnesses call them.
_ALIASES = {
    "ruler_vt": "vt", "ruler_cwe": "cwe", "ruler_fwe": "fwe", "ruler_qa_squad": "qa_1", "ruler_qa_hotpot": "qa_2",
    "qa_squad": "qa_1", "qa_hotpot": "qa_2", "variable_tracking": "vt", "common_words_extraction": "cwe",
    "freq_words_extraction": "fwe",
}  # fmt: skip
#: Everything a task may be called.
CALLED = (*TASKS, *_ALIASES)


def task(name: str) -> Task:
    """The task of that name; a ValueError says which there are."""
    own = TASKS.get(_ALIASES.get(name, name))
    if own is None:
        raise ValueError(f"task: got {name!r}, expected one of {', '.join(TASKS)}")
    return own


_CONTROL = re.compile(r"[\x00-\x1f]")


def clean_output(output: str) -> str:
    """A generated answer as it is compared: stripped, with line breaks for control characters."""
    return _CONTROL.sub("\n", output.strip()).strip()


def score(output: str, references: Sequence[str], match: str) -> float:
    """The score of a raw answer from 0 to 1, whatever its case; `match` is "all" or "part", as a task says."""
    text = clean_output(output).lower()
    matches = [reference.lower() in text for reference in references]
    return float(any(matches)) if match == "part" else sum(matches) / len(matches)
