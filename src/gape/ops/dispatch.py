"""The measured table of `impl="auto"`: for which calls which implementation was the fastest that is exact.

The table is `dispatch.toml` beside this file; `benchmarks/dispatch.py` writes it from measured rows. A rule holds for
the device it was measured on, by name, and for lengths from the shortest measured on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from gape.ops.inputs import Problem
from gape.utils.validation import invalid_argument

#: The table that comes with the library.
TABLE = Path(__file__).with_name("dispatch.toml")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the table.

    Attributes:
        device: the GPU's name.
        dtype: of q, k and v.
        gradient: whether a gradient is asked for.
        eps: whether tiles may be skipped.
        dim_at_most: largest head dim; the first rule that fits counts, so smaller ones come first.
        length_at_least: fewest keys; for one dim the longer ones come first.
        queries_at_most: most queries, 0 for no limit.
        queries_at_least: fewest queries: those of the shortest sequence that was measured.
        impl: the implementation.
        reason: what was measured.
    """

    device: str
    dtype: str
    gradient: bool
    eps: bool
    dim_at_most: int
    length_at_least: int
    impl: str
    reason: str
    queries_at_most: int = 0
    queries_at_least: int = 0

    def fits(self, problem: Problem, eps: float, device: str) -> bool:
        """Whether the rule holds for a call on `device`."""
        width = max(problem.q.size(-1), problem.v.size(-1))
        queries = problem.visibility.n_q
        meant = queries >= self.queries_at_least and (not self.queries_at_most or queries <= self.queries_at_most)
        kind = (device, str(problem.q.dtype).removeprefix("torch."), problem.learns, eps > 0)
        same = kind == (self.device, self.dtype, self.gradient, self.eps)
        return same and meant and width <= self.dim_at_most and problem.visibility.n_k >= self.length_at_least


def load(path: Path, names: Collection[str]) -> tuple[Rule, ...]:
    """The rules of a table.

    Args:
        path: the file.
        names: implementations that a rule may have.

    Raises:
        ValueError: no table, a key that a rule does not have, one that is missing or of another type, or an
            implementation that is not known.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("rule", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"GAPE_DISPATCH: cannot read {path}, expected a table of rules: {error}") from error
    types = get_type_hints(Rule)
    needed = {field.name for field in fields(Rule) if field.default is MISSING}
    for entry in entries:
        wrong = sorted((set(entry) - set(types)) | (needed - set(entry)))
        if wrong:
            raise ValueError(f"{wrong[0]}: unknown or missing in a rule of {path}, expected {sorted(types)}")
        for name, value in entry.items():
            if type(value) is not types[name]:
                raise invalid_argument(name, value, f"{types[name].__name__} in {path}")
        if entry["impl"] not in names:
            raise invalid_argument("impl", entry["impl"], f"one of {sorted(names)} in {path}")
    return tuple(Rule(**entry) for entry in entries)
