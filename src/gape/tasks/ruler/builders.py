"""RULER's tasks in our own words: each builder draws a sample and fills it with as much filler as fits.

A builder takes a task, random numbers, `room_for` (which makes a :class:`Room` from the answer's text) and the
ingredients. It raises :class:`TooShortError` where nothing fits.
"""

from __future__ import annotations

import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.tasks import Task

if TYPE_CHECKING:
    from gape.data import Tokenizer

#: Measurements of one search at most; interpolation needs three, halving after that ends long before.
_MOST = 48
_INTERPOLATED = 6


class TooShortError(Exception):
    """A prompt without any filler is longer than its room."""


class Room:
    """The tokens that a prompt may have, as a tokenizer counts them; of these `slack` may stay unused.

    `answer` has the tokens of the answer, for the error.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, answer: int, slack: int) -> None:
        self.tokenizer, self.room, self.answer, self.slack = tokenizer, room, answer, slack

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text))

    def fill(self, render: Callable[[int], str], most: int, *, least: int = 0) -> int:
        """How many units of filler, from `least` to `most`, fill a prompt's room but for `slack` tokens or one unit.

        `render` gives the prompt with so many units; more units are more tokens, on the whole. A TooShortError where
        that with the fewest does not fit.
        """
        low, low_tokens = least, self.count(render(least))
        if low_tokens > self.room:
            raise TooShortError(f"{low_tokens:,} tokens of prompt and {self.answer:,} of answer")
        high, rate = most + 1, 0.0
        # A small step first: it is cheap to measure and says what a unit costs.
        guess = least + max(1, min((most - least) // 16, 64))
        for turn in range(_MOST):
            if high - low <= 1 or self.room - low_tokens <= self.slack:
                break
            guess = min(max(guess, low + 1), high - 1)
            tokens = self.count(render(guess))
            rate = max((tokens - low_tokens) / (guess - low), rate / 8, 1e-3)
            if tokens <= self.room:
                low, low_tokens = guess, tokens
            else:
                high = guess
            left = self.room - self.slack / 2 - low_tokens
            guess = low + int(left / rate) if turn < _INTERPOLATED else (low + high) // 2
        return low


RoomFor = Callable[[str], Room]


class Draft(NamedTuple):
    """A sample: the prompt, how its answer begins, the references, and settings of its difficulty."""

    input: str
    prefix: str
    outputs: list[str]
    settings: Mapping[str, Any]


#: Tokens that a line or an entry has at least, for a bound on how many are drawn.
_LEAST_LINE, _LEAST_ENTRY = 6, 2
_KINDS = {"numbers": "number", "uuids": "code"}


def needles(task: Task, rng: Random, room_for: RoomFor, ingredients: Ingredients) -> Draft:
    """Values of names hidden in noise, in prose, or among values of other names."""
    settings, kind = task.settings, _KINDS[task.settings["values"]]
    keys = _draw(settings["keys"], rng, ingredients, settings["needles"])
    values = [_draw(settings["values"], rng, ingredients, settings["each"]) for _ in keys]
    chosen = rng.sample(range(len(keys)), settings["queries"])
    outputs = [value for number in chosen for value in values[number]]
    lines = [f"The secret {kind} of {key} is {value}." for key, own in zip(keys, values, strict=True) for value in own]
    depths = [rng.random() for _ in lines]
    *some_names, last = (keys[number] for number in chosen)
    names = f"{', '.join(some_names)} and {last}" if some_names else last
    some, each = ("A", "") if len(outputs) == 1 else ("Some", "s")
    head = f"{some} secret {kind}{each} can be found in the following text. Remember what it says.\n\n"
    are = "is" if len(outputs) == 1 else "are all"
    tail = f"\n\nWhat {are} the secret {kind}{each} of {names} that the text gave?"
    prefix = f"\nThe secret {kind}{each} of {names} {'is' if len(outputs) == 1 else 'are'}"
    room = room_for(task.join(outputs))
    if settings["haystack"] == "needle":
        context = _among_needles(task, rng, room, ingredients, lines, depths, (head, tail + prefix))
    else:
        text = ingredients.noise if settings["haystack"] == "noise" else ingredients.text
        start = text.start(rng)
        count = room.fill(lambda n: head + text.hide(start, n, lines, depths) + tail + prefix, most=room.room)
        context = text.hide(start, count, lines, depths)
    return Draft(head + context + tail, prefix, outputs, {})


def _among_needles(
    task: Task,
    rng: Random,
    room: Room,
    ingredients: Ingredients,
    lines: Sequence[str],
    depths: Sequence[float],
    around: tuple[str, str],
) -> str:
    """Whole lines about other names, and some words of noise behind them where no further line fits."""
    most = room.room // _LEAST_LINE
    keys = _draw(task.settings["keys"], rng, ingredients, most)
    values = _draw(task.settings["values"], rng, ingredients, most)
    kind = _KINDS[task.settings["values"]]
    starts = ((f"The secret {kind} of {key} is ", value) for key, value in zip(keys, values, strict=True))
    # A key of the question has no second value.
    others = [f"{about}{value}." for about, value in starts if not any(line.startswith(about) for line in lines)]

    def context(count: int, words: int) -> str:
        placed = others[:count]
        for depth, line in sorted(zip(depths, lines, strict=True), reverse=True):
            placed.insert(round(depth * count), line)
        return "\n".join(placed + [" ".join(ingredients.noise.passage(0, words))] * (words > 0))

    head, tail = around
    count = room.fill(lambda n: head + context(n, 0) + tail, most=len(others))
    words = room.fill(lambda n: head + context(count, n) + tail, most=room.room)
    return context(count, words)


def _draw(kind: str, rng: Random, ingredients: Ingredients, count: int) -> list[str]:
    """Some keys or values of a kind: uuids, numbers, or words."""
    if kind == "uuids":
        return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]
    if kind == "numbers":
        return [str(number) for number in rng.sample(range(10**6, 10**7), count)]
    names = ingredients.names
    return [names.key(number) for number in rng.sample(range(names.keys), count)]


def _first_fitting(tiers: Sequence[Any], make: Callable[[Any], Draft]) -> Draft:
    """What the first tier with room gives; the last one's error where none has."""
    for tier in tiers[:-1]:
        with suppress(TooShortError):
            return make(tier)
    return make(tiers[-1])


def variables(task: Task, rng: Random, room_for: RoomFor, ingredients: Ingredients) -> Draft:
    """A value handed from variable to variable, hidden in noise; an example comes first where there is room."""
    text, hops = ingredients.noise, task.settings["hops"]
    chain, example_chain = _chain(rng, hops), _chain(rng, hops)
    depths, start = sorted(rng.random() for _ in range(hops + 1)), text.start(rng)
    room = room_for(task.join(chain.names))

    def draft(example: bool) -> Draft:
        before = ""
        if example:
            shown = "".join(_tracking_prompt(example_chain, " ".join(example_chain.lines)))
            before = f"{shown} {task.join(example_chain.names)}\n\n"

        def prompt(words: int) -> tuple[str, str]:
            body, prefix = _tracking_prompt(chain, text.hide(start, words, chain.lines, depths))
            return before + body, prefix

        count = room.fill(lambda n: "".join(prompt(n)), most=room.room)
        return Draft(*prompt(count), chain.names, {"hops": hops, "example": example})

    return _first_fitting((True, False), draft)


class _Chain(NamedTuple):
    value: str
    names: list[str]
    lines: list[str]


def _chain(rng: Random, hops: int) -> _Chain:
    letters = string.ascii_uppercase
    numbers = rng.sample(range(len(letters) ** 5), hops + 1)
    names = ["".join(letters[number // 26**place % 26] for place in range(5)) for number in numbers]
    value = str(rng.randrange(10**4, 10**5))
    lines = [f"Variable {names[0]} gets {value}."]
    lines += [f"Variable {new} gets what {old} has." for old, new in pairwise(names)]
    return _Chain(value, names, lines)


def _tracking_prompt(chain: _Chain, context: str) -> tuple[str, str]:
    body = f"Keep track of the variables in the following text.\n\n{context}\n\n"
    body += f"Question: Which variables have the value {chain.value} in the end?"
    return body, f"\nAnswer: The {len(chain.names)} variables with the value {chain.value} are"


class _Tier(NamedTuple):
    """How often common and other words come, in the list and in the example before it (0: no example)."""

    common: int
    other: int
    shown: int


#: From RULER's numbers down to what fits into a few hundred tokens.
_TIERS = (_Tier(30, 3, 10), _Tier(6, 1, 3), _Tier(6, 1, 0), _Tier(3, 1, 0), _Tier(2, 1, 0))
#: Other words that are in a list at least.
_LEAST_OTHER = 5


def common(task: Task, rng: Random, room_for: RoomFor, ingredients: Ingredients) -> Draft:
    """A numbered list in which a few words come often; an example comes first where there is room."""
    words, n_answers, order = ingredients.words, task.settings["words"], rng.getrandbits(64)
    drawn = rng.sample(words, min(len(words), 2 * n_answers + room_for("").room // _LEAST_ENTRY))
    often, shown, others = drawn[:n_answers], drawn[n_answers : 2 * n_answers], drawn[2 * n_answers :]
    room, prefix = room_for(task.join(often)), _OFTEN.format(n_answers)

    def draft(tier: _Tier) -> Draft:
        before = ""
        if tier.shown:
            before = _word_list(shown * tier.shown + others[-30:], order + 1) + prefix + f" {task.join(shown)}\n\n"

        def prompt(count: int) -> str:
            # Past the last of the other words they begin anew, and stay rarer than the common ones.
            entries = [others[place // tier.other % len(others)] for place in range(count)]
            return before + _word_list(often * tier.common + entries, order)

        most = len(others) * (tier.common - 1)
        count = room.fill(lambda n: prompt(n) + prefix, most=most, least=_LEAST_OTHER)
        settings = {"common": tier.common, "other": tier.other, "example": bool(tier.shown)}
        return Draft(prompt(count), prefix, often, settings)

    return _first_fitting(_TIERS, draft)


_OFTEN = "\nAnswer: The {} words that come most often are"


def _word_list(entries: Sequence[str], order: int) -> str:
    mixed = list(entries)
    Random(order).shuffle(mixed)
    listed = " ".join(f"{place}. {word}" for place, word in enumerate(mixed, 1))
    head = "In the following list some words come more often than others.\n\n"
    return f"{head}{listed}\n\nQuestion: Which words come most often?"


_BLANK = "---"


def frequent(task: Task, rng: Random, room_for: RoomFor, ingredients: Ingredients) -> Draft:
    """Made-up words, each rank rarer by a power law; the most frequent rank is a blank."""
    n_answers, exponent = task.settings["words"], task.settings["exponent"]
    letters = string.ascii_lowercase
    room = room_for("")
    size = max(n_answers + 2, room.room // 50)
    drawn = ["".join(rng.choice(letters) for _ in range(6)) for _ in range(2 * size)]
    coded, order = list(dict.fromkeys(drawn))[:size], rng.getrandbits(64)
    outputs = coded[:n_answers]
    room = room_for(task.join(outputs))
    shares = [(rank + 1) ** -exponent for rank in range(size + 1)]
    total = sum(shares)
    head = (
        f"The following text is made of code words. Ignore {_BLANK} and count how often each of the others comes.\n\n"
    )
    tail = f"\n\nQuestion: Which {n_answers} code words come most often?"
    prefix = f"\nAnswer: The {n_answers} code words that come most often are"

    def context(count: int, blanks: int = 0) -> str:
        times = [int(count * share / total) for share in shares]
        times[0] += blanks
        # The answers occur at least once, in strictly falling numbers, and more often than any other word.
        for rank in range(n_answers, 0, -1):
            times[rank] = max(times[rank], times[rank + 1] + 1)
        mixed = [word for word, n in zip([_BLANK, *coded], times, strict=True) for _ in range(n)]
        Random(order).shuffle(mixed)
        return " ".join(mixed)

    count = room.fill(lambda n: head + context(n) + tail + prefix, most=room.room)
    # Several words may want to come once more at the same count; blanks fill what that leaves.
    blanks = room.fill(lambda n: head + context(count, n) + tail + prefix, most=room.room)
    return Draft(head + context(count, blanks) + tail, prefix, outputs, {"vocabulary": size})


def questions(task: Task, rng: Random, room_for: RoomFor, ingredients: Ingredients) -> Draft:
    """A question whose documents stand among others, the last of which may break off."""
    source = ingredients.questions(task.settings["questions"])
    question = rng.choice(source.items)
    room = room_for(task.join(question.answers))
    others = [number for number in range(len(source.documents)) if number not in question.gold]
    others = rng.sample(others, min(len(others), room.room // 16 + 8))
    split = [source.documents[number].split(" ") for number in others]
    ends = list(accumulate((len(words) for words in split), initial=0))
    gold = [(rng.random(), source.documents[number]) for number in question.gold]
    places = [rng.random() for _ in others]
    head = "Answer the question from the documents below, in as few words as you can.\n\n"
    tail = f"\n\nQuestion: {question.question}"
    prefix = "\nAnswer:"

    def context(count: int) -> str:
        whole = bisect_right(ends, count) - 1
        texts = [(place, " ".join(words)) for place, words in zip(places[:whole], split[:whole], strict=True)]
        if count > ends[whole]:
            texts.append((places[whole], " ".join(split[whole][: count - ends[whole]])))
        ordered = [text for _, text in sorted([*gold, *texts])]
        return "\n\n".join(f"Document {number}: {text}" for number, text in enumerate(ordered, 1))

    count = room.fill(lambda n: head + context(n) + tail + prefix, most=ends[-1])
    return Draft(head + context(count) + tail, prefix, list(question.answers), {})


BUILDERS: dict[str, Callable[[Task, Random, RoomFor, Ingredients], Draft]] = {
    "needles": needles,
    "variables": variables,
    "common": common,
    "frequent": frequent,
    "questions": questions,
}
