"""Training windows of which some are recall texts and some have positions that skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np

from gape.data.corpus import Corpus
from gape.data.recall_texts import Ids, RecallWriter, Request
from gape.data.tokenizer import Tokenizer, load_tokenizer
from gape.data.windows import Batch, WindowSource, moved
from gape.utils.files import sha256
from gape.utils.random import key
from gape.utils.validation import finite, invalid_argument, positive_number, whole


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """How many training windows are recall texts, and what these are like.

    Attributes:
        share: of the windows, from 0 to 1, that become recall texts.
        weight: of an answer's tokens in the loss; all others have weight 1.
        facts: put into a text at most; each text draws its own number, and how many of them are asked for.
        least: facts put into a text at least, where they fit.
        repeated: share of the recall texts whose filler is one short passage over and over.
        skip_to: positions of a window reach up to here by one jump (PoSE, arXiv 2309.10400); 0 skips none.
        skip_share: of all windows, from 0 to 1, whose positions jump where `skip_to` is set.
        tokenizer: the corpus's, as :func:`gape.data.load_tokenizer` takes it; a corpus of bytes needs none.

    Raises:
        ValueError: a value out of range.
    """

    share: float = 0.0
    weight: float = 4.0
    facts: int = 8
    least: int = 1
    repeated: float = 0.25
    skip_to: int = 0
    skip_share: float = 0.5
    tokenizer: str = ""

    def __post_init__(self) -> None:
        for name in ("share", "repeated", "skip_share"):
            fraction(name, getattr(self, name))
        positive_number("weight", self.weight)
        Request(facts=self.facts, least=self.least)
        whole("skip_to", self.skip_to, 0)

    @property
    def active(self) -> bool:
        """Whether any window is other than text of the corpus at its own positions."""
        return self.share > 0 or (self.skip_to > 0 and self.skip_share > 0)


def fraction(name: str, x: Any) -> float:
    """A number from 0 to 1, as a float."""
    expected = "a number from 0 to 1"
    if not 0 <= finite(name, x, expected) <= 1:
        raise invalid_argument(name, x, expected)
    return float(x)


class RecallSource:
    """Windows of a corpus, a share of which are recall texts: a `gape.train.Source`.

    Window number n is what :class:`WindowSource` gives, or a text made of it: both, the text and the jump of its
    positions are functions of the seed and n alone.

    Args:
        windows: the source of text.
        tokenizer: the corpus's.
        config: shares and weights.
        kept: other texts, as ids; windows filled with these take `kept_share` of all. They serve to keep abilities.
        kept_share: from 0 to 1 − `config.share`.

    Raises:
        ValueError: another tokenizer than the corpus's, windows too short for a fact and its question, or positions
            that are to reach less far than a window.
    """

    def __init__(
        self,
        windows: WindowSource,
        tokenizer: Tokenizer,
        config: RecallConfig,
        *,
        kept: Sequence[Sequence[int]] = (),
        kept_share: float = 0.0,
    ) -> None:
        self.batch_size, self.length = windows.batch_size, windows.length
        self.inner, self.config, self.kept = windows, config, [np.asarray(text, dtype=np.int64) for text in kept]
        self.kept_share = fraction("kept_share", kept_share)
        if self.kept_share and not any(map(len, self.kept)):
            raise invalid_argument("kept", len(self.kept), "at least one text that is not empty")
        if self.kept_share + config.share > 1:
            raise invalid_argument("kept_share", kept_share, f"at most {1 - config.share:g}, what recall texts leave")
        if tokenizer.vocab_size < windows.corpus.vocab_size:
            known = windows.corpus.vocab_size
            raise invalid_argument("tokenizer", tokenizer.vocab_size, f"one of at least the corpus's {known} ids")
        self._writer, self._digest = RecallWriter(tokenizer), tokenizer.identity()["sha256"]
        if config.share and windows.length < (least := self._writer.shortest()):
            raise invalid_argument("length", windows.length, f"at least {least} tokens, for a fact and its question")
        if 0 < config.skip_to < windows.length:
            raise invalid_argument("skip_to", config.skip_to, f"0, or at least the {windows.length} tokens of a window")
        self._request = Request(facts=config.facts, least=config.least, repeated=config.repeated)

    def batch(self, step: int, micro: int, rows: slice | None = None) -> Batch:
        """As :meth:`WindowSource.batch`; with weights, float32 (B, N), and int64 positions (B, N) if some may skip."""
        numbers = self.inner.numbers(step, micro, rows)
        tokens, config = self.inner.tokens(numbers), self.config
        weights = np.ones((len(tokens), self.inner.length), dtype=np.float32)
        for row, number in enumerate(numbers.tolist()):
            # A stream of its own for each decision: one does not move the others.
            rng = Random(key("recall", self.inner.seed, number))
            drawn = rng.random()
            if drawn < config.share:
                text = self._writer.write(tokens[row], rng, self._request)
                if text is not None:
                    tokens[row] = text.ids
                    for answer in text.answers:
                        # Targets are the tokens behind; the one after a value says that it is over.
                        weights[row, answer.start - 1 : answer.stop] = config.weight
            elif drawn < config.share + self.kept_share:
                tokens[row] = self._filled(rng)
        moved_tokens = moved(tokens, self.inner.device)
        positions = self._positions(numbers.tolist())
        return Batch(
            moved_tokens[:, :-1].contiguous(),
            moved_tokens[:, 1:].contiguous(),
            positions=None if positions is None else moved(positions, self.inner.device),
            weights=moved(weights, self.inner.device) if config.share else None,
        )

    def _positions(self, numbers: Sequence[int]) -> Ids | None:
        """Positions (B, N) of windows, a share of which jump once at a random place; None where none may."""
        length, config = self.inner.length, self.config
        if not (config.skip_to and config.skip_share):
            return None
        positions = np.tile(np.arange(length), (len(numbers), 1))
        for row, number in zip(positions, numbers, strict=True):
            rng = Random(key("skip", self.inner.seed, number))
            if rng.random() < config.skip_share:
                place, jump = rng.randrange(1, length), rng.randrange(config.skip_to - length + 1)
                row[place:] += jump
        return positions

    def _filled(self, rng: Random) -> Ids:
        """A window of kept texts, one after the other, the last cut."""
        parts: list[Ids] = []
        while sum(map(len, parts)) <= self.inner.length:
            parts.append(rng.choice(self.kept))
        return np.concatenate(parts)[: self.inner.length + 1]

    def epochs(self, step: int) -> float:
        """As :meth:`WindowSource.epochs`."""
        return self.inner.epochs(step)

    def fingerprint(self) -> dict[str, Any]:
        """The windows', and everything that makes other texts of them; where the tokenizer lies does not."""
        settings = {name: value for name, value in asdict(self.config).items() if name != "tokenizer"}
        settings |= {"tokenizer": self._digest}
        if self.kept_share:
            digest = sha256(b"".join(text.tobytes() + b"\n" for text in self.kept))
            settings |= {"kept": digest, "kept_share": self.kept_share}
        return self.inner.fingerprint() | {"recall": settings}


def recall_source(windows: WindowSource, config: RecallConfig) -> WindowSource | RecallSource:
    """The source of a config, as :class:`RecallSource`; the windows themselves where it changes nothing."""
    if not config.active:
        return windows
    return RecallSource(windows, corpus_tokenizer(windows.corpus, config.tokenizer), config)


def corpus_tokenizer(corpus: Corpus, spec: str) -> Tokenizer:
    """The tokenizer of a corpus, which knows its own only by a hash.

    `spec` is as for :func:`gape.data.load_tokenizer`; "" does for bytes. A ValueError refuses any but the corpus's.
    """
    recorded = corpus.tokenizer
    if not spec and recorded.get("kind") != "bytes":
        raise invalid_argument("tokenizer", spec, f"that of the corpus, {recorded.get('name')}: a folder or a name")
    tokenizer = load_tokenizer(spec or "bytes")
    if tokenizer.identity()["sha256"] != recorded.get("sha256"):
        raise invalid_argument("tokenizer", spec, f"that of the corpus, {recorded.get('name')}")
    return tokenizer
