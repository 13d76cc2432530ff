"""Samples of RULER's tasks at an exact length for any tokenizer, in our wording or in that of `lm-eval`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from gape.tasks.ruler.builders import BUILDERS, Draft, Room, TooShortError
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.tasks import task
from gape.utils.random import key
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from gape.data import Tokenizer


#: Generators of that package are made for this length and more; below it some never end.
LM_EVAL_SHORTEST = 4096
_NAMES = {"vt": "ruler_vt", "cwe": "ruler_cwe", "fwe": "ruler_fwe", "qa_1": "ruler_qa_squad", "qa_2": "ruler_qa_hotpot"}
LM_EVAL = "lm-eval"


def lm_eval_samples(name: str, length: int, tokenizer: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of a task as `lm-eval` makes them, in our fields. It makes 500 of them and may want the network.

    The length is at least 4,096; `tokenizer` is a folder or a name that `transformers` can load. A ValueError where
    what that package needs cannot be had, an ImportError where it is missing.
    """
    own = task(name)
    if length < LM_EVAL_SHORTEST:
        expected = f"at least {LM_EVAL_SHORTEST} for the wording of lm-eval; our own has shorter ones"
        raise invalid_argument("length", length, expected)
    try:
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("RULER's own wording needs lm-eval: pip install 'gape[eval]'") from error
    called = _NAMES.get(own.name, own.name)
    # It draws from the global random generators.
    before, beside = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        manager = TaskManager(metadata={"tokenizer": tokenizer, "max_seq_lengths": [length]})
        dataset = manager.load([called])["tasks"][called].dataset["test"]
    # Missing data, resources of nltk or a tokenizer raise errors of many kinds.
    except Exception as error:
        raise ValueError(f"{own.name}: lm-eval cannot make it: {type(error).__name__}: {error}") from error
    finally:
        random.setstate(before)
        np.random.set_state(beside)  # noqa: NPY002
    rows = [dict(row) for row in dataset.select(range(min(count, len(dataset))))]
    return [
        {
            "task": own.name, "index": number, "input": row["input"], "answer_prefix": f" {row['gen_prefix']}",
            "outputs": list(row["outputs"]), "length": row["length"], "max_seq_length": length, "budget": own.budget,
            "wording": LM_EVAL,
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip


#: Changes with the wording, so that samples of another one can be distinguished.
WORDING = "gape-1"
#: The shortest length of a sample.
SHORTEST = 256
#: Draws of one sample at most, where names or documents happen to be too long for it.
TRIES = 64
#: Below this length a tenth may stay unused, from it on a fiftieth.
_LONG = 1024


@dataclass(frozen=True)
class Generator:
    """Makes samples of one task; each is a function of the seed and its number.

    `length` counts the tokens of the prompt and of what is kept free for the answer, for the tokenizer of the
    model that is to read them.

    Raises:
        ValueError: an unknown task, or a length below 256.
    """

    name: str
    length: int
    tokenizer: Tokenizer
    ingredients: Ingredients
    seed: int = 0

    def __post_init__(self) -> None:
        task(self.name)
        whole("length", self.length, SHORTEST)
        whole("seed", self.seed, 0)
        if not self.tokenizer.encode("The quick brown fox"):
            raise ValueError("tokenizer: got one that makes no tokens of a text, expected its files to be whole")

    @property
    def least(self) -> int:
        """Tokens that a sample has at the least: 98% of the length, 90% below 1,024."""
        share = 98 if self.length >= _LONG else 90
        return -(-self.length * share // 100)

    def samples(self, count: int) -> Iterator[dict[str, Any]]:
        """The first `count` samples, as :meth:`sample` gives them."""
        return self._in_threads(range(whole("count", count)))

    def _in_threads(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        # Nearly all of the time is the tokenizer's, which counts one text in one thread.
        pool = ThreadPoolExecutor()
        try:
            yield from pool.map(self.sample, numbers)
        finally:
            pool.shutdown(cancel_futures=True)

    def sample(self, number: int) -> dict[str, Any]:
        """A sample in RULER's fields: task, index, input, answer_prefix, outputs, length, max_seq_length.

        And ours: `budget`, the tokens kept free for the answer, which `length` counts; `settings` and `wording`.
        Refused where the task does not fit into the length.
        """
        own, needed = task(self.name), ""
        for attempt in range(TRIES):
            # The length is no part of it: as far as the draws allow the question is the same at every length.
            rng = Random(key("ruler", WORDING, self.name, self.seed, number, attempt))
            try:
                return self._to_record(BUILDERS[own.family](own, rng, self._room_for, self.ingredients), number)
            except TooShortError as error:
                needed = str(error)
        raise invalid_argument("length", self.length, f"a longer one: {self.name} does not fit, it has {needed}")

    def _room_for(self, answer: str) -> Room:
        tokens = len(self.tokenizer.encode(f" {answer}"))
        room = self.length - self.tokenizer.before - task(self.name).budget_at(self.length, tokens)
        return Room(self.tokenizer, room, tokens, slack=self.length // 200)

    def _to_record(self, draft: Draft, number: int) -> dict[str, Any]:
        own = task(self.name)
        budget = own.budget_at(self.length, len(self.tokenizer.encode(f" {own.join(draft.outputs)}")))
        length = self.tokenizer.before + len(self.tokenizer.encode(draft.input + draft.prefix)) + budget
        if not self.least <= length <= self.length:
            expected = f"at most about {length:,} for {own.name}: there is no more text to fill it with"
            raise invalid_argument("length", self.length, expected)
        return {
            "task": own.name, "index": number, "input": draft.input, "answer_prefix": draft.prefix,
            "outputs": draft.outputs, "length": length, "max_seq_length": self.length, "budget": budget,
            "settings": dict(draft.settings), "wording": WORDING,
        }  # fmt: skip
