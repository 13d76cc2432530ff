"""The measured tables of `impl="auto"`: for which calls which implementation was the fastest that is exact.

`dispatch.toml` beside this file comes with the library; `benchmarks/dispatch.py` writes it from measured rows. What
`gape doctor --tune` measured on this machine is in the user's cache and counts first. A rule holds for the device it
was measured on, by name, and for lengths from the shortest measured on.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch

import gape
from gape.ops.inputs import Problem
from gape.utils.validation import invalid_argument

#: The table that comes with the library.
TABLE = Path(__file__).with_name("dispatch.toml")

#: The variable that names a table, which then counts alone.
VARIABLE = "GAPE_DISPATCH"


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


class Tables(NamedTuple):
    """The rules in use.

    Attributes:
        here: measured on this machine; they count first.
        packaged: those that come with the library, or of the table that GAPE_DISPATCH names.
    """

    here: tuple[Rule, ...]
    packaged: tuple[Rule, ...]


def read(names: Collection[str]) -> Tables:
    """The rules in use; a table of this machine that is damaged is left out with a warning.

    Args:
        names: implementations that a rule may have.

    Raises:
        ValueError: as :func:`load`, for the table that GAPE_DISPATCH names.
    """
    if VARIABLE in os.environ:
        try:
            return Tables((), load(Path(os.environ[VARIABLE]), names))
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from error
    here: list[Rule] = []
    folder = _folder()
    for path in [] if folder is None else sorted(folder.glob("*.toml")):
        try:
            rules = load(path, names)
            if not rules:
                raise ValueError(f"{path} has no rules")
        except ValueError as error:
            advice = "gape goes on without it; delete it, or let `gape doctor --tune` write it again"
            warnings.warn(f"{error}; {advice}", stacklevel=2)
        else:
            here += rules
    return Tables(tuple(here), load(TABLE, names))


def local_table(device: str) -> Path:
    """Where the rules that were measured on this machine's GPU of that name are, or would be.

    Raises:
        ValueError: the user has no home.
    """
    folder = _folder()
    if folder is None:
        raise ValueError("XDG_CACHE_HOME: got nothing, expected a folder for the table of a user without a home")
    return folder / f"{_plain(device)}.toml"


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _folder() -> Path | None:
    """Of the tables that were measured on this machine with the versions of now; None without a home.

    Kernels of other versions are other kernels.
    """
    versions = {"gape": gape.__version__, "torch": torch.__version__, "triton": "none"}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    name = "-".join(f"{package}-{_plain(number)}" for package, number in versions.items())
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "gape" / "dispatch" / name
    try:
        return Path.home() / ".cache" / "gape" / "dispatch" / name
    except RuntimeError:
        return None


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
    # ValueErrors are of TOML and of UTF-8.
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}, expected a table of rules: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise invalid_argument("rule", entries, f"tables [[rule]] in {path}")
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


def to_toml(rules: Iterable[Rule], writer: str) -> str:
    """A table as its file has it; `writer` is what made it."""
    lines = [
        f'# Which implementation impl="auto" runs, as measured; written by {writer}.',
        "# The first rule that fits counts. Where none does, the portable choice of implementations.py runs.",
    ]
    for rule in rules:
        lines += ["", "[[rule]]"]
        lines += [f"{field.name} = {_toml(getattr(rule, field.name))}" for field in fields(Rule)]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # A basic string of TOML is a string of JSON.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
