"""Needle in a haystack as the paper's appendix gives it: KEY = digit, hidden among fillers, with a final query ?.

The 27 tokens: fillers 0 … 13, KEY 14, = 15, ? 16, the digits 17 … 26. A sequence of L tokens has the query at its
end; the L − 1 places before it are cut into n nearly equal chunks, each with one needle (three tokens) at a place
drawn uniformly inside it. The answer is the digit of the first, the last or the middle needle.

Data are a function of (split, seed, step, micro) and the same on every device; the splits never share a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.data.windows import Batch
from gape.models.loss import IGNORED
from gape.utils.random import below32, words32
from gape.utils.validation import invalid_argument, whole

N_FILLERS = 14
KEY, EQUALS, QUERY, DIGIT_0 = 14, 15, 16, 17
N_DIGITS = 10
VOCAB_SIZE = DIGIT_0 + N_DIGITS
NEEDLE = 3

TARGETS = ("first", "last", "middle")
SPLITS = ("train", "validation", "test")
#: Tokens of one evaluation batch, whatever its length: the memory of 64 sequences of 2,048.
EVAL_TOKENS = 2**17


@dataclass(frozen=True, kw_only=True)
class NIAHConfig:
    """The settings of a haystack.

    Args:
        length: L, tokens of a sequence, the query included.
        n_needles: needles in it; None means max(1, L // 64), the paper's rule.
        target: the needle whose digit is the answer, "first", "last" or "middle" (needle n // 2, counted from 0).
        shortest: training batches have lengths drawn from L, L / 2, L / 4, … down to this; 0 has L alone.
        random_to: training positions are drawn from 0 … random_to − 1, in order (arXiv 2305.16843); 0 counts them.
        skip_to: training positions jump once, to below this at most (arXiv 2309.10400); 0 skips none.

    Raises:
        ValueError: a `shortest` above L, positions that reach less far than L or of both kinds, an unknown
            target, or chunks too short for a needle of three tokens.
    """

    length: int
    n_needles: int | None = None
    target: str = "last"
    shortest: int = 0
    random_to: int = 0
    skip_to: int = 0

    def __post_init__(self) -> None:
        whole("length", self.length, NEEDLE + 1)
        if whole("shortest", self.shortest, 0) > self.length:
            raise invalid_argument("shortest", self.shortest, f"at most the length {self.length}, or 0")
        for name in ("random_to", "skip_to"):
            if 0 < whole(name, getattr(self, name), 0) < self.length:
                raise invalid_argument(name, getattr(self, name), f"0, or at least the length {self.length}")
        if self.random_to and self.skip_to:
            raise invalid_argument("skip_to", self.skip_to, "0 beside random_to")
        if self.n_needles is not None:
            whole("n_needles", self.n_needles)
        if self.target not in TARGETS:
            raise invalid_argument("target", self.target, f"one of {', '.join(TARGETS)}")
        if (self.length - 1) // self.needles < NEEDLE:
            most = (self.length - 1) // NEEDLE
            expected = f"at most {most} needles of 3 tokens in length {self.length}"
            raise invalid_argument("n_needles", self.needles, expected)
        for length in self.lengths[1:]:
            self.at(length)

    @property
    def needles(self) -> int:
        """n, the number of needles."""
        return max(1, self.length // 64) if self.n_needles is None else self.n_needles

    @property
    def lengths(self) -> list[int]:
        """Those of training batches, the longest first."""
        halvings = (self.length // self.shortest).bit_length() - 1 if self.shortest else 0
        return [self.length >> k for k in range(halvings + 1)]

    @property
    def target_index(self) -> int:
        """The needle whose digit is the answer, counted from 0."""
        return {"first": 0, "last": self.needles - 1, "middle": self.needles // 2}[self.target]

    def at(self, length: int) -> NIAHConfig:
        """The same haystack at another length: as many needles per token, or by the paper's rule; positions count."""
        n = None if self.n_needles is None else max(1, self.n_needles * length // self.length)
        return replace(self, length=length, n_needles=n, shortest=0, random_to=0, skip_to=0)


class Haystack(NamedTuple):
    """B sequences: ids, int64 (B, L); targets, int64 (B, L), −100 but for the digit's token at the last place.

    `needles`, int64 (B, n), are the positions of each KEY; its digit is two further on.
    """

    ids: Tensor
    targets: Tensor
    needles: Tensor


def sample(
    config: NIAHConfig,
    batch: int,
    *,
    seed: int = 0,
    step: int = 0,
    micro: int = 0,
    first: int = 0,
    split: str = "train",
    device: torch.device | str = "cpu",
) -> Haystack:
    """Draw `batch` sequences, a function of the arguments that is the same on every device.

    `first` is where in the series of (split, seed, step, micro) to begin. The series of the splits "train",
    "validation" and "test" are independent.

    Raises:
        ValueError: batch below 1, an unknown split, or a series longer than 2³² words.
    """
    whole("batch", batch)
    if split not in SPLITS:
        raise invalid_argument("split", split, f"one of {', '.join(SPLITS)}")
    length, n = config.length, config.needles
    row = length + 2 * n
    drawn = words32(f"niah/{split}/{seed}/{step}/{micro}", batch * row, start=first * row, device=device)
    drawn = drawn.view(batch, row)
    ids = below32(drawn[:, :length], N_FILLERS)
    bounds = torch.arange(n + 1, device=device) * (length - 1) // n
    needles = bounds[:-1] + below32(drawn[:, length : length + n], bounds.diff() - (NEEDLE - 1))
    digits = below32(drawn[:, length + n :], N_DIGITS) + DIGIT_0
    ids.scatter_(1, needles, KEY).scatter_(1, needles + 1, EQUALS).scatter_(1, needles + 2, digits)
    ids[:, -1] = QUERY
    targets = torch.full_like(ids, IGNORED)
    targets[:, -1] = digits[:, config.target_index]
    return Haystack(ids, targets, needles)


@dataclass(frozen=True, kw_only=True)
class NIAHSource:
    """Training batches for a trainer: a pure function of (seed, step, micro). Targets are the last token's, (B, 1)."""

    config: NIAHConfig
    batch_size: int = 64
    seed: int = 0
    device: torch.device | str = "cpu"

    def batch(self, step: int, micro: int) -> Batch:
        """The micro-batch `micro` of step `step`."""
        c, name = self.config, f"niah/batch/{self.seed}/{step}/{micro}"
        length = c.lengths[int(below32(words32(name, 1), len(c.lengths)))]
        config = c if length == c.length else c.at(length)
        drawn = sample(config, self.batch_size, seed=self.seed, step=step, micro=micro, device=self.device)
        return Batch(drawn.ids, drawn.targets[:, -1:], positions=self._positions(name, length))

    def _positions(self, name: str, length: int) -> Tensor | None:
        """Positions (B, length) that are drawn or jump; None where they are counted."""
        b, reach = self.batch_size, self.config.random_to
        if reach:
            drawn = words32(f"{name}/random", b * reach, device=self.device).view(b, reach)
            return drawn.argsort(stable=True)[:, :length].sort().values
        if not self.config.skip_to:
            return None
        place, jump = words32(f"{name}/skip", 2 * b, device=self.device).view(2, b, 1)
        index = torch.arange(length, device=self.device).expand(b, length)
        return index + (index > below32(place, length - 1)) * below32(jump, self.config.skip_to - length + 1)

    def fingerprint(self) -> str:
        """What the data are, in words: equal for two sources exactly if they give the same batches."""
        c = self.config
        needles = "/".join(str(c.at(length).needles) for length in c.lengths)
        text = f"niah length={c.length} needles={needles} target={c.target} batch={self.batch_size} seed={self.seed}"
        changes = {name: getattr(c, name) for name in ("shortest", "random_to", "skip_to")}
        return " ".join([text, *(f"{name}={value}" for name, value in changes.items() if value)])


@torch.no_grad()
def hits(
    model: Callable[..., Any],
    config: NIAHConfig,
    *,
    samples: int = 1000,
    batch: int | None = None,
    seed: int = 0,
    split: str = "test",
    device: torch.device | str = "cpu",
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Which samples the model answers, judged by the largest of the ten digits' logits at the query.

    Args:
        model: as :class:`gape.GPT` takes ids (B, L) and `logits_to_keep=1`, in eval mode.
        batch: sequences at a time; None means as many as make 2¹⁷ tokens. It does not change the samples.
        check: called before every batch; may raise to stop.

    Returns:
        bool (samples,) on the CPU; wrong where a logit is NaN.

    Raises:
        ValueError: samples or batch below 1, or more samples than there are.
    """
    most = 2**32 // (config.length + 2 * config.needles)
    if whole("samples", samples) > most:
        raise invalid_argument("samples", samples, f"at most {most:,} at length {config.length:,}")
    batch = max(1, EVAL_TOKENS // config.length) if batch is None else whole("batch", batch)
    correct = []
    for first in range(0, samples, batch):
        check()
        size = min(batch, samples - first)
        drawn = sample(config, size, seed=seed, first=first, split=split, device=device)
        logits = model(drawn.ids, logits_to_keep=1).logits[:, -1, DIGIT_0 : DIGIT_0 + N_DIGITS]
        answered = logits.argmax(-1) + DIGIT_0 == drawn.targets[:, -1]
        correct.append(answered & ~logits.isnan().any(-1))
    return torch.cat(correct).cpu()


def accuracy(model: Callable[..., Any], config: NIAHConfig, **options: Any) -> float:
    """The share of samples answered, from 0 to 1 (chance is 0.1); options and errors are those of :func:`hits`."""
    return float(hits(model, config, **options).double().mean())
