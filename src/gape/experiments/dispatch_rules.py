"""From measured rows to the table of `impl="auto"`: the fastest implementation that is exact, per kind of call.

Exact means: the output's error is at most twice that of plain attention in the same dtype at the same length, and the
gates' gradients are within 2%. A row without errors has those of `precision.csv` on its device. Of rows that
were measured again the newest count, but those beside the newest of a portable implementation, at the same commit, come
before others: times of two days differ by more than what is decided here. At each length only rows of the batch and
heads that were measured last are compared. Times within 3% of the best are as good, and the least memory decides.
Lengths at which no portable implementation was measured beside the others make no rule. One that failed has the time
"inf" and no error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby

from gape.ops.dispatch import Rule
from gape.ops.implementations import IMPLEMENTATIONS
from gape.ops.limits import DECODE_QUERIES

#: What was measured of one call, by column of a CSV file.
Row = dict[str, str]

#: Rows of plain attention, whose error is the measure; the first that is there.
PLAIN = ("sdpa-cudnn", "sdpa-flash", "sdpa", "flex-causal")

#: How far a gate's gradient may be off.
GATE_ERROR = 0.02

#: The gates' gradients.
GATE_GRADIENTS = ("dgate", "dlandmark", "damplitude")

#: Strongest gates, as Γg, whose errors count where a row has none of its own.
STRENGTH = 10

#: How much longer than the fastest still counts as equally fast: repeated runs differ by up to 2.5%.
TIE = 1.03

#: The gates whose rows count where nothing is skipped, and where tiles may be.
GATES = {False: "log-normal", True: "trained"}

#: What rows must share to be compared, besides length and kind.
SIZES = ("batch", "heads", "kv_heads", "queries")

#: Implementations that are the portable choice, which others are compared with; `anchored` is an older name.
PORTABLE = ("split", "anchored", "rank2")


def rules(
    attention: Iterable[Row], decode: Iterable[Row] = (), precision: Iterable[Row] = (), *, here: bool = False
) -> list[Rule]:
    """The table for rows of attention, decode and precision; rules for few queries come first.

    Their reasons say where was measured: on which device, or `here`, on this machine.
    """
    few = [_as_attention(row) for row in decode if int(row["queries"]) <= DECODE_QUERIES]
    measured = [row for row in precision if float(row["strength"]) <= STRENGTH]
    many = [row if row["error"] else row | _errors(row, measured) for row in attention if _counts(row)]
    return _rules(few, DECODE_QUERIES, here) + _rules(many, 0, here)


def _errors(row: Row, precision: Iterable[Row]) -> Row:
    """The errors of a row's implementation in rows of precision, the largest over strengths of the gates.

    They are those at the longest sequence that is no longer than the row's.
    """
    name = "plain" if row["impl"] in PLAIN else row["impl"]
    columns = {"error": name}
    if row["direction"] == "both":
        columns |= dict.fromkeys(GATE_GRADIENTS, name)
    alike = [other for other in precision if (other["device"], other["dtype"]) == (row["device"], row["dtype"])]
    errors = {}
    for quantity, column in columns.items():
        stored = "output" if quantity == "error" else quantity
        by_length: dict[int, list[str]] = {}
        for other in alike:
            if other["quantity"] == stored and other.get(column) and int(other["keys"]) <= int(row["length"]):
                by_length.setdefault(int(other["keys"]), []).append(other[column])
        if by_length:
            errors[quantity] = max(by_length[max(by_length)], key=float)
    return errors


def _counts(row: Row) -> bool:
    return row["gates"] == GATES[float(row["eps"]) > 0]


def _as_attention(row: Row) -> Row:
    return row | {"direction": "forward", "eps": "0"}


def _rules(rows: list[Row], queries_at_most: int, here: bool) -> list[Rule]:
    rules: list[Rule] = []
    for kind, members in groupby(sorted(rows, key=_kind), key=_kind):
        at_length = _by_length(list(members))
        winners = {length: _winner(candidates) for length, candidates in sorted(at_length.items())}
        device, dtype, gradient, eps, dim = kind
        place = "here" if here else f"on {device}"
        rising = [
            Rule(
                device=device, dtype=dtype, gradient=gradient, eps=eps, dim_at_most=dim, length_at_least=length,
                impl=winner, reason=_reason(place, winner, length, at_length[length]), queries_at_most=queries_at_most,
                queries_at_least=0 if queries_at_most else length,
            )
            for length, winner in winners.items()
            if winner is not None
        ]  # fmt: skip
        # A winner that goes on winning needs one line; the longest lengths come first.
        changes = [rule for n, rule in enumerate(rising) if n == 0 or rule.impl != rising[n - 1].impl]
        rules += reversed(changes)
    return rules


def _kind(row: Row) -> tuple[str, str, bool, bool, int]:
    return row["device"], row["dtype"], row["direction"] == "both", float(row["eps"]) > 0, int(row["dim"])


def _by_length(rows: list[Row]) -> dict[int, dict[str, Row]]:
    """Rows by length and implementation, of the newest one's sizes.

    Later ones come in place of earlier ones, and those of the newest portable one's commit in place of all.
    """
    newest = {int(row["length"]): _sizes(row) for row in rows}
    rows = [row for row in rows if _sizes(row) == newest[int(row["length"])]]
    beside = {int(row["length"]): row.get("commit") for row in rows if row["impl"] in PORTABLE}
    by_length: dict[int, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row.get("commit") == beside.get(int(row["length"]))):
        by_length.setdefault(int(row["length"]), {})[row["impl"]] = row
    return by_length


def _sizes(row: Row) -> tuple[str | None, ...]:
    return tuple(row.get(name) for name in SIZES)


def _winner(candidates: Mapping[str, Row]) -> str | None:
    """The fastest exact implementation; without a row of plain attention the most exact one is the measure."""
    if not any(name in candidates for name in PORTABLE):
        return None
    errors = {name: float(row["error"]) for name, row in candidates.items() if row["error"]}
    plain = next((errors[name] for name in PLAIN if name in errors), min(errors.values(), default=0.0))
    exact = [row for name, row in candidates.items() if name in IMPLEMENTATIONS and _exact(row, plain)]
    best = min((float(row["ms"]) for row in exact), default=0.0)
    as_good = [row for row in exact if float(row["ms"]) <= TIE * best]
    return min(as_good, key=lambda row: float(row.get("peak_mib") or 0))["impl"] if as_good else None


def _exact(row: Row, plain: float) -> bool:
    if not row["error"] or float(row["error"]) > 2 * plain:
        return False
    return all(float(row.get(name) or 0) <= GATE_ERROR for name in GATE_GRADIENTS)


def _reason(place: str, winner: str, length: int, candidates: Mapping[str, Row]) -> str:
    """What was measured, in words."""
    text = f"measured {place}: {float(candidates[winner]['ms']):.3g} ms at {length:,} keys"
    others = [name for name in PORTABLE if name in candidates and name != winner]
    if not others:
        return text
    ms = float(candidates[others[0]]["ms"])
    return f"{text}, {others[0]} {f'{ms:.3g}' if math.isfinite(ms) else 'failed'}"
