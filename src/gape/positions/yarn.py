"""YaRN: interpolation by wavelength and a sharper softmax (Peng et al., arXiv 2309.00071)."""

from __future__ import annotations

import math

from gape.positions.rotary import Rotary, Spectrum, spectrum
from gape.utils.validation import above, invalid_argument, positive_number


class YaRN(Rotary):
    """Keeps pairs that turn often within the training length, interpolates those that hardly turn."""

    @staticmethod
    def frequencies(
        head_dim: int,
        context_length: float | None = None,
        *,
        theta: float = 10000.0,
        factor: float = 4.0,
        fast_rotations: float = 32.0,
        slow_rotations: float = 1.0,
        truncate: bool = True,
    ) -> Spectrum:
        """RoPE's spectrum, divided by `factor` along a ramp over the pairs; scale 0.1 · ln(factor) + 1.

        The ramp runs from the pair that makes `fast_rotations` turns in `context_length` tokens (kept) to the
        one that makes `slow_rotations` (divided), both rounded outwards to whole pairs if `truncate`.

        Raises:
            ValueError: context_length is None, or an option is not positive, or theta is not greater than 1,
                or fast_rotations does not exceed slow_rotations.
        """
        if context_length is None:
            raise invalid_argument("context_length", None, "the training length, which yarn needs")
        above("theta", theta, 1.0)
        positive_number("factor", factor)
        above("fast_rotations", fast_rotations, positive_number("slow_rotations", slow_rotations))
        turns_of_first = positive_number("context_length", context_length) / (2 * math.pi)

        def pair_turning(rotations: float) -> float:
            return head_dim * math.log(turns_of_first / rotations) / (2 * math.log(theta))

        first, last = pair_turning(fast_rotations), pair_turning(slow_rotations)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # A ramp of no width would divide by zero; 0.001 of a pair is a step in all but name.
        width = last - first or 0.001
        kept = [1 - min(max((pair - first) / width, 0.0), 1.0) for pair in range(head_dim // 2)]
        turned = spectrum(head_dim, theta)
        scaled = [f * keep + f / factor * (1 - keep) for f, keep in zip(turned, kept, strict=True)]
        return scaled, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
