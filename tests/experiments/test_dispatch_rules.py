"""The way from measured rows to the table of impl="auto"."""

from __future__ import annotations

from gape.experiments.dispatch_rules import rules
from tests.ops.test_dispatch import GPU


def row(impl: str, ms: float, length: int = 4096, **options: object) -> dict[str, str]:
    usual = {"device": GPU, "dtype": "bfloat16", "direction": "forward", "eps": "0", "dim": "64", "gates": "log-normal"}
    figures = {"impl": impl, "ms": str(ms), "length": str(length), "error": "0.002", "dgate": "", "queries": "1"}
    return usual | figures | {name: str(value) for name, value in options.items()}


def test_the_fastest_exact_row_becomes_a_rule() -> None:
    rows = [row("split", 2.0), row("triton", 1.5), row("rank2", 0.5, error=0.1), row("sdpa-cudnn", 0.9, error=0.0021)]
    rows += [row("split", 9.0, 16384), row("triton", 5.0, 16384), row("split", 4.0, 65536), row("triton", 5.0, 65536)]
    rows += [row("triton", 1.0, direction="both", dgate=0.1), row("split", 3.0, direction="both", dgate=0.001)]
    rows += [row("triton", 0.1, gates="contracting")]
    results = [(r.gradient, r.length_at_least, r.impl) for r in rules(rows)]
    assert results == [(False, 65536, "split"), (False, 4096, "triton"), (True, 4096, "split")]
    assert "1.5 ms at 4,096 keys, split 2" in rules(rows)[1].reason


def test_newer_rows_replace_older_ones_and_decoding_comes_first() -> None:
    rows = [row("split", 2.0), row("triton", 1.5), row("triton", 2.5)]
    decoded = [row("decode", 0.1, 65536), row("split", 0.2, 65536)]
    results = [(r.queries_at_most, r.queries_at_least, r.impl) for r in rules(rows, decoded)]
    assert results == [(16, 0, "decode"), (0, 4096, "split")]


def test_times_of_one_commit_are_compared() -> None:
    """A kernel that was timed again without the portable choice is not set beside that one's older time."""
    together = [row("sdpa-cudnn", 1.0, commit="a"), row("split", 2.0, commit="a"), row("triton", 1.9, commit="a")]
    assert [rule.impl for rule in rules([*together, row("triton", 2.1, commit="b")])] == ["triton"]
    again = [row("split", 2.0, commit="b"), row("triton", 2.1, commit="b")]
    assert [rule.impl for rule in rules([*together, *again])] == ["split"]


def test_only_rows_of_the_same_sizes_are_compared() -> None:
    rows = [row("triton", 1.0, kv_heads=2), row("split", 2.0, kv_heads=4), row("triton", 3.0, kv_heads=4)]
    assert [r.impl for r in rules(rows)] == ["split"]
    assert not rules([], [row("decode", 0.1, queries=64), row("split", 0.2, queries=64)])


def test_without_plain_attention_the_most_exact_is_the_measure() -> None:
    assert [r.impl for r in rules([row("rank2", 0.5, error=0.1), row("split", 2.0)])] == ["split"]


def test_what_failed_loses_to_what_ran() -> None:
    failed = row("split", float("inf"), error="")
    assert [r.impl for r in rules([failed, row("triton", 9.0)])] == ["triton"]
    assert not rules([failed, row("triton", float("inf"), error="")])


def test_equally_fast_ones_are_ranked_by_memory() -> None:
    rows = [row("split", 1.0, peak_mib=600), row("triton", 1.005, peak_mib=100), row("reference", 1.5, peak_mib=50)]
    assert [r.impl for r in rules(rows)] == ["triton"]


def test_rows_without_errors_have_those_of_the_precision_table() -> None:
    def precision_row(quantity: str, keys: int, strength: int, plain: str, split: str, triton: str) -> dict[str, str]:
        kind = {"device": GPU, "dtype": "bfloat16", "quantity": quantity, "keys": str(keys), "strength": str(strength)}
        return kind | {"plain": plain, "rank2": "0.1", "split": split, "triton": triton}

    rows = [
        row(impl, ms, n, direction="both", error="")
        for n in (4096, 16384)
        for impl, ms in (("split", 1), ("triton", 2))
    ]
    assert not rules(rows)
    precision = [
        precision_row("output", 4096, 10, "0.002", "0.003", "0.002"),
        precision_row("dgate", 4096, 10, "", "0.001", "0.002"),
    ]
    assert [r.impl for r in rules(rows, (), precision)] == ["split"]
    precision += [
        precision_row("dgate", 8192, 1, "", "0.01", "0.002"),
        precision_row("dgate", 8192, 10, "", "0.03", "0.002"),
    ]
    precision += [precision_row("dgate", 4096, 100, "", "0.9", "0.9")]
    assert [(r.length_at_least, r.impl) for r in rules(rows, (), precision)] == [
        (16384, "triton"),
        (4096, "split"),
    ]
