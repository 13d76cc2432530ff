"""Which digits a model names: a needle may be found, and its digit still be taken for another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.report.results import Results, scheme_order, unpack_hits
from gape.report.style import TARGETS, label
from gape.report.tables import Table

#: From this accuracy on a run has nothing to explain.
SOLVED = 0.95
#: A digit is named "always" or "never" within this much.
SURE = 0.05


def digit_accuracies(row: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """How often the answer is right where it is 0 … 9, ten numbers, from a row of results (:data:`ROW_KEYS`)."""
    asked = _asked(row["length"], row["needles"], row["target"], row["eval_seed"], row["samples"])
    right = np.array(unpack_hits(row["hits"], row["samples"]), dtype=np.float64)
    return np.array([right[asked == digit].mean() if (asked == digit).any() else np.nan for digit in range(10)])


def digit_table(results: Results) -> Table | None:
    """Runs that do not solve the task at the length they were trained at, and the digits they name; None if all do."""
    unsolved = [
        row
        for row in results.rows
        if row["factor"] == 1 and row["evaluated"] == row["position"] and row["accuracy"] < SOLVED
    ]
    if not unsolved:
        return None
    rows = []
    for row in sorted(unsolved, key=lambda row: (row["target"], scheme_order(row["position"]), row["seed"])):
        named = digit_accuracies(row)
        always, never = (named >= 1 - SURE).sum(), (named <= SURE).sum()
        name = " · ".join(filter(None, (row["variant"], label(row["position"]), TARGETS[row["target"]].lower())))
        # Of few samples none may ask for some digit.
        sometimes = np.isfinite(named).sum() - always - never
        cells = (f"{row['accuracy']:.2f}", str(always), str(never), str(sometimes))
        rows.append((name, str(row["seed"]), *cells))
    header = ("Scheme", "seed", "accuracy", "digits always named", "never", "sometimes")
    return Table(title="Below 0.95 at the training length, by digit", header=header, rows=tuple(rows))


@lru_cache(maxsize=16)
def _asked(length: int, needles: int, target: str, seed: int, samples: int) -> npt.NDArray[np.int64]:
    """The digit that each test sample asks for, (samples,)."""
    from gape.tasks import niah  # noqa: PLC0415

    config = niah.NIAHConfig(length=length, n_needles=needles, target=target)
    drawn = niah.sample(config, samples, seed=seed, split="test")
    asked: npt.NDArray[np.int64] = (drawn.targets[:, -1] - niah.DIGIT_0).numpy()
    return asked
