"""Recall texts: a passage with facts put in, and questions about them at its end, at an exact number of tokens.

They teach a model to look back. Forms, names and values are other than RULER's, so that its tasks stay a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gape.data.tokenizer import Tokenizer
from gape.utils.validation import invalid_argument, whole

Ids = npt.NDArray[np.int64]

_FIRST = (
    "Agnes Albert Beatrice Bernard Cecilia Clara Conrad Cyril Daphne Dorothea Edgar Edith Elias Esther Felix Flora "
    "Gideon Greta Harold Helena Hugo Ingrid Irene Isaac Jerome Judith Karl Leonora Lionel Lucinda Magnus Marian "
    "Matilda Miriam Nathan Nora Oscar Ottilie Percy Philippa Quentin Ralph Rosalind Rupert Sabina Silas Sybil Theodor "
    "Tobias Ursula Verena Viktor Walter Wanda Winifred Xavier Yvonne Zelda"
)
_LAST = (
    "Abernathy Ashdown Barlow Beckett Birchall Blythe Caldwell Carmody Denholm Drummond Eastwood Ellery Fairfax "
    "Fenwick Galloway Garrick Hadley Hargreave Ingram Jessop Kendrick Kirkwood Langley Lockhart Merrick Milburn "
    "Norwood Oakley Pemberton Prescott Quimby Radley Rutherford Sheridan Sinclair Tennant Thorne Underhill Vaughan "
    "Wetherby Whitlock Winslow Wycliffe Yardley"
)
_TOWNS = (
    "Alder Ash Bram Brock Cold Dun East Fern Glen Hather Holm Kings Lang Marl Nether North Oak Pen Raven Sand Shel "
    "Stan Thorn Wal West Whit Win Wolver"
)
_TOWN_ENDS = (
    "bridge brook bury combe cote dale don field ford gate ham hurst ley mere minster port stead stoke thorpe ton "
    "wick wood worth"
)
_LOOKS = (
    "beige cobalt coppery crimson ebony granite indigo lacquered mahogany maroon oaken pewter russet scarlet tartan "
    "turquoise varnished velvety wicker"
)
_THINGS = (
    "candelabrum carafe cutlass decanter gramophone hatstand inkwell lectern opal sextant spinet tankard tapestry "
    "telescope thimble tricorn washstand weathervane wheelbarrow"
)

#: Kinds of names: two lists, and what stands between a word of each.
NAMES: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    kind: (first.split(), second.split(), between)
    for kind, first, second, between in (
        ("person", _FIRST, _LAST, " "), ("town", _TOWNS, _TOWN_ENDS, ""), ("thing", _LOOKS, _THINGS, " ")
    )
}  # fmt: skip
#: One name in so many is only used where texts are held out.
_HELD_OUT = 8


class Form(NamedTuple):
    """One way to say a fact and to ask for it; {0} is a name, {1} a value, and {0} several names where all are asked.

    `names` and `values` are kinds of both, `lead` is how an answer begins, and plurals are for several names at once.
    """

    names: str
    values: str
    fact: str
    question: str
    lead: str
    questions: str
    leads: str


FORMS = (
    Form("person", "digits", "{0} rents locker {1}.", "Which locker does {0} rent?", "{0} rents locker",
         "Which lockers do {0} rent?", "{0} rent lockers"),
    Form("person", "digits", "In the register {0} is entered under {1}.", "Under what is {0} entered in the register?",
         "{0} is entered under", "Under what are {0} entered in the register?", "{0} are entered under"),
    Form("person", "letters", "The badge worn by {0} reads {1}.", "What does the badge worn by {0} read?",
         "The badge worn by {0} reads", "What do the badges worn by {0} read?", "The badges worn by {0} read"),
    Form("person", "word", "{0} signs every letter as {1}.", "How does {0} sign every letter?", "{0} signs as",
         "How do {0} sign every letter?", "{0} sign as"),
    Form("town", "digits", "{0} counted {1} inhabitants at the last census.", "How many inhabitants has {0}?",
         "At the last census {0} counted", "How many inhabitants have {0}?", "At the last census {0} counted"),
    Form("town", "word", "The river that runs through {0} is called {1}.", "Which river runs through {0}?",
         "The river through {0} is called", "Which rivers run through {0}?", "The rivers through {0} are called"),
    Form("town", "time", "Every evening the ferry leaves {0} at {1}.", "When does the ferry leave {0}?",
         "The ferry leaves {0} at", "When do the ferries leave {0}?", "The ferries leave {0} at"),
    Form("thing", "digits", "At the auction the {0} went for {1} crowns.", "For how many crowns did the {0} go?",
         "The {0} went for", "For how many crowns did the {0} go?", "The {0} went for"),
    Form("thing", "letters", "Engraved on the {0} is {1}.", "What is engraved on the {0}?", "Engraved on the {0} is",
         "What is engraved on the {0}?", "Engraved on the {0} are"),
    Form("thing", "hex", "The {0} carries serial {1}.", "Which serial does the {0} carry?", "The {0} carries serial",
         "Which serials do the {0} carry?", "The {0} carry serials"),
    Form("thing", "word", "Whoever borrows the {0} must ask {1} first.", "Who must be asked for the {0}?",
         "To borrow the {0} one must ask", "Who must be asked for the {0}?", "To borrow the {0} one must ask"),
)  # fmt: skip
#: How a question and the beginning of its answer stand behind a text.
_LAYOUTS = ("\n\n{question} {lead}", "\n\n{lead}", "\n\n{question}\n{lead}")

_CONSONANTS, _VOWELS, _CAPITALS = "bdfgklmnprstvz", "aeiou", "ABCDEFGHJKLMNPRSTUVWXYZ"
_VALUES: dict[str, Callable[[Random], str]] = {
    "digits": lambda rng: str(rng.randrange(10 ** (places := rng.randrange(3, 9)), 10 ** (places + 1))),
    "letters": lambda rng: f"{_drawn(rng, _CAPITALS, 2)}-{rng.randrange(100, 100_000)}",
    "hex": lambda rng: "-".join(_drawn(rng, "0123456789abcdef", 4) for _ in range(rng.randrange(2, 6))),
    "word": lambda rng: "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3)).capitalize(),
    "time": lambda rng: f"{rng.randrange(24)}:{rng.randrange(60):02}",
}
#: Facts of a text at most, and names that one question asks for at most.
MOST_FACTS, _TOGETHER = 128, 4
#: Tokens of a passage that is repeated as filler, from the first to below the second.
_PASSAGE = (12, 64)
_SENTENCE_ENDS = (".", "!", "?", "\n", '."', "!'", '?"', ".”", "?”", "!”")


class RecallText(NamedTuple):
    """A text of an exact length: int64 ids (N,), and the tokens of each answer and of the same value in its fact.

    Answers are in the order of the questions; a comma, an "and" or a full stop follows each.
    """

    ids: Ids
    answers: list[range]
    sources: list[range]


class _Fact(NamedTuple):
    ids: list[int]
    name: str
    value: str
    #: Where the value's tokens begin and end.
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one text is to be like.

    Attributes:
        facts: how many are put in at most; each text draws its own number, small ones more often.
        least: how many are put in at least.
        depths: between which parts of the text, from 0 to 1, facts stand.
        repeated: share of texts whose filler is one short passage over and over.
        exact: whether a text has all of `facts` and asks for each of them, in place of drawn numbers.
    """

    facts: int = 8
    least: int = 1
    depths: tuple[float, float] = (0.0, 1.0)
    repeated: float = 0.25
    exact: bool = False

    def __post_init__(self) -> None:
        if whole("facts", self.facts) > MOST_FACTS:
            raise invalid_argument("facts", self.facts, f"a whole number from 1 to {MOST_FACTS}")
        if whole("least", self.least) > self.facts:
            raise invalid_argument("least", self.least, f"a whole number from 1 to facts = {self.facts}")

    def draw_count(self, rng: Random) -> int:
        """How many facts a text has: the logarithm of the number is spread evenly."""
        return self.facts if self.exact else int(self.least * ((self.facts + 1) / self.least) ** rng.random())

    def draw_asked(self, rng: Random, facts: int) -> int:
        """How many of a text's facts are asked for."""
        return facts if self.exact else 1 + rng.randrange(facts)


DEFAULT = Request()


class RecallWriter:
    """Makes recall texts of passages, with a tokenizer's ids; if `heldout` with names that no other writer uses."""

    def __init__(self, tokenizer: Tokenizer, *, heldout: bool = False) -> None:
        self.tokenizer, self.heldout = tokenizer, heldout
        if not tokenizer.encode("a b"):
            raise ValueError("tokenizer: got one that makes no tokens of a text, expected its files to be whole")
        texts = (tokenizer.decode([number]) for number in range(tokenizer.vocab_size))
        self._ends = np.array([text.endswith(_SENTENCE_ENDS) for text in texts])

    def write(self, passage: Ids, rng: Random, request: Request = DEFAULT) -> RecallText | None:
        """A text as long as a passage, int64 (N,): its beginning with facts between sentences, questions at the end.

        Everything is drawn from `rng`. None where not even one fact leaves half of the passage.
        """
        form, layout = rng.choice(FORMS), rng.choice(_LAYOUTS)
        count = request.draw_count(rng)
        together, repeats = rng.random() < 0.5, rng.random() < request.repeated
        names = self._names(rng, form.names, count)
        facts = [self._fact(form, name, _VALUES[form.values](rng)) for name in names]
        while facts:
            numbers = rng.sample(range(len(facts)), request.draw_asked(rng, len(facts)))
            targets = [facts[number] for number in numbers]
            at_once = together and len(targets) <= _TOGETHER
            tail, answers = self._questions(form, layout, [targets] if at_once else [[fact] for fact in targets])
            room = len(passage) - len(tail) - sum(len(fact.ids) for fact in facts)
            if 2 * room >= len(passage):
                body = self._repeated(passage, room, rng) if repeats else passage[:room]
                return self._assembled(body, facts, numbers, tail, answers, rng, request.depths)
            facts = facts[: len(facts) // 2]
        return None

    def shortest(self) -> int:
        """A number of tokens that nearly every text with one fact fits into: the longest name of each kind is tried."""
        longest, values = 0, {"digits": "123456789", "letters": "WX-98765", "hex": "-".join(["0f1e"] * 5)}
        for form in FORMS:
            first, second, between = NAMES[form.names]
            name = max(first, key=len) + between + max(second, key=len)
            fact = self._fact(form, name, values.get(form.values, "Zuvofa"))
            for layout in _LAYOUTS:
                longest = max(longest, len(fact.ids) + len(self._questions(form, layout, [[fact]])[0]))
        # Half of a text is its passage.
        return 2 * longest

    def _names(self, rng: Random, kind: str, count: int) -> list[str]:
        """Different names of a kind; fewer than `count` where there are no more."""
        first, second, between = NAMES[kind]
        every = len(first) * len(second)
        held_out = len(range(0, every, _HELD_OUT))
        names: dict[str, None] = {}
        while len(names) < min(count, held_out if self.heldout else every - held_out):
            number = rng.randrange(every)
            if (number % _HELD_OUT == 0) == self.heldout:
                names[first[number // len(second)] + between + second[number % len(second)]] = None
        return list(names)

    def _fact(self, form: Form, name: str, value: str) -> _Fact:
        before, _, after = form.fact.partition("{1}")
        # As behind the end of a sentence, where tokenizers begin words in another way than at the start of a text.
        text = f" {before.format(name)}".rstrip()
        head, middle = self._continued(".", text), self._continued(text, f" {value}")
        ids = [*head, *middle, *self._continued(f"{text} {value}", after)]
        return _Fact(ids, name, value, len(head), len(head) + len(middle))

    def _questions(self, form: Form, layout: str, groups: Sequence[Sequence[_Fact]]) -> tuple[list[int], list[range]]:
        """One question after the other, each for a group of facts: ids, and the tokens of each answer in them."""
        ids: list[int] = []
        answers = []
        for facts in groups:
            names = " and ".join(filter(None, (", ".join(fact.name for fact in facts[:-1]), facts[-1].name)))
            question, lead = (form.question, form.lead) if len(facts) == 1 else (form.questions, form.leads)
            text = layout.format(question=question.format(names), lead=lead.format(names))
            ids += self._continued(".", text)
            for number, fact in enumerate(facts):
                if number:
                    joint = " and" if number == len(facts) - 1 else ","
                    ids += self._continued(facts[number - 1].value, joint)
                begin = len(ids)
                ids += self._continued(text, f" {fact.value}")
                answers.append(range(begin, len(ids)))
            ids += self._continued(facts[-1].value, ".")
        return ids, answers

    def _repeated(self, passage: Ids, room: int, rng: Random) -> Ids:
        """So many tokens that repeat a short piece of a passage."""
        length = min(rng.randrange(*_PASSAGE), room)
        begin = rng.randrange(len(passage) - length + 1)
        return np.resize(passage[begin : begin + length], room)

    def _assembled(
        self,
        body: Ids,
        facts: Sequence[_Fact],
        targets: Sequence[int],
        tail: list[int],
        answers: Sequence[range],
        rng: Random,
        depths: tuple[float, float],
    ) -> RecallText:
        """Facts between the sentences of a body, and a tail behind it."""
        low, high = depths
        wanted = [round((low + (high - low) * rng.random()) * len(body)) for _ in facts]
        places = self._boundaries(body, wanted)
        parts: list[Sequence[int] | Ids] = []
        before = at = 0
        sources: dict[int, range] = {}
        for place, number in sorted(zip(places, range(len(facts)), strict=True)):
            fact = facts[number]
            at += place - before
            sources[number] = range(at + fact.begin, at + fact.end)
            parts += [body[before:place], fact.ids]
            before, at = place, at + len(fact.ids)
        parts += [body[before:], tail]
        ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        start = len(ids) - len(tail)
        placed = [range(start + answer.start, start + answer.stop) for answer in answers]
        return RecallText(ids, placed, [sources[number] for number in targets])

    def _boundaries(self, body: Ids, places: Sequence[int]) -> list[int]:
        """The last end of a sentence at or before each place; the place itself where there is none."""
        ends = np.flatnonzero(self._ends[body]) + 1
        last = np.searchsorted(ends, np.asarray(places), side="right") - 1
        return [int(ends[at]) if at >= 0 else place for at, place in zip(last.tolist(), places, strict=True)]

    def _continued(self, before: str, text: str) -> list[int]:
        """The ids of a text as it stands behind another one."""
        head, both = self.tokenizer.encode(before), self.tokenizer.encode(before + text)
        if len(both) > len(head) and both[: len(head)] == head:
            return both[len(head) :]
        return self.tokenizer.encode(text)


def _drawn(rng: Random, letters: str, count: int) -> str:
    return "".join(rng.choice(letters) for _ in range(count))
