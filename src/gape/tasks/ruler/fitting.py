"""Prompts of a wanted number of tokens: how much filler goes in, found in a few measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gape.data import Tokenizer

#: Measurements of one search at most; interpolation needs three, halving after that ends long before.
_MOST = 48
_INTERPOLATED = 6


class TooShortError(Exception):
    """A prompt without any filler is longer than its room.

    Attributes:
        prompt: tokens of the shortest prompt.
        answer: tokens of the answer.
    """

    def __init__(self, prompt: int, answer: int) -> None:
        super().__init__(f"{prompt} tokens of prompt and {answer} of answer")
        self.prompt, self.answer = prompt, answer


class Room:
    """The tokens that a prompt may have.

    Args:
        tokenizer: counts them.
        room: how many.
        answer: tokens of the answer, for the error.
        slack: so many may stay unused; fewer where a search gets there.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, answer: int, slack: int) -> None:
        self.tokenizer, self.room, self.answer, self.slack = tokenizer, room, answer, slack

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text))

    def fill(self, render: Callable[[int], str], most: int, *, least: int = 0) -> int:
        """How many units of filler make a prompt fill the room.

        Args:
            render: the prompt with so many units; more units are more tokens, on the whole.
            most: units there are.
            least: units that must be in it.

        Returns:
            A number from `least` to `most` whose prompt fits, with less than `slack` tokens or one unit to spare.

        Raises:
            TooShortError: the prompt with the fewest units does not fit.
        """
        low, low_tokens = least, self.count(render(least))
        if low_tokens > self.room:
            raise TooShortError(low_tokens, self.answer)
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
