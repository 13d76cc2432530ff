"""Which implementation runs: the portable rules, a measured table, and the way from rows to the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gape.bench import dispatch as from_rows
from gape.bench.rows import load
from gape.ops import dispatch
from gape.ops.api import _problem, available_implementations
from gape.ops.problem import Problem
from tests.ops.cases import random_case

GPU = "NVIDIA H200"


def problem(
    dtype: torch.dtype = torch.bfloat16, *, learns: bool = False, n_q: int = 8, n_k: int = 8, **seen: object
) -> Problem:
    case = random_case(n_q=n_q, n_k=n_k, batch=1, heads=1, kv_heads=1, dim=4, value_dim=4)
    tensors = {n: x.to(dtype) if n in "qkv" else x.requires_grad_(learns) for n, x in case.tensors.items()}
    return _problem(*tensors.values(), 32, None, False, **seen)


def rule(**options: object) -> dispatch.Rule:
    usual = {"device": GPU, "dtype": "bfloat16", "gradient": False, "eps": False, "dim_at_most": 64}
    return dispatch.Rule(**(usual | {"length_at_least": 4, "impl": "flex", "reason": "measured"} | options))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (problem(), "split"),
        (problem(torch.float16), "split"),
        (problem(torch.float32), "rank2"),
        (problem(torch.float64, learns=True), "rank2"),
        (problem(learns=True), "split"),
        (problem(learns=True, n_q=2049, n_k=2049), "anchored"),
    ],
)
def test_the_portable_choice(given: Problem, name: str) -> None:
    assert dispatch.choose(given)[0] == name


def test_few_queries_on_a_gpu_go_to_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any length: there is another one at every token, and cuDNN would plan for each."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    given = [problem(), problem(torch.float16, n_q=1), problem(n_q=17, n_k=17), problem(learns=True)]
    assert [dispatch.portable(each)[0] for each in given] == ["decode", "decode", "split", "split"]
    assert "copies" in dispatch.REMARKS["split"](given[0])
    assert dispatch.portable(problem(torch.float32))[0] != "decode"
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert dispatch.portable(problem())[0] == "split"


def test_explicit_positions_on_a_gpu_are_taken_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be far apart, and reading them would wait for the device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    where = {"n_q": 17, "n_k": 17, "q_positions": torch.arange(17), "k_positions": torch.arange(17)}
    given = [problem(torch.float32, **where), problem(**where), problem(torch.float16, learns=True, **where)]
    assert [dispatch.portable(each)[0] for each in given] == ["triton"] * 3
    assert dispatch.portable(problem(torch.float64, **where))[0] == "rank2"
    monkeypatch.setattr(dispatch, "significand_bits", lambda x: 11)
    assert dispatch.portable(given[0])[0] == "split"


def test_a_measured_rule_speaks_for_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device_of", lambda problem: GPU)
    monkeypatch.setattr(dispatch, "RULES", (rule(),))
    assert dispatch.choose(problem()) == ("flex", "measured")
    others = [problem(torch.float16), problem(learns=True), problem(n_q=3, n_k=3)]
    assert [dispatch.choose(other)[0] for other in others] == ["split"] * 3
    assert dispatch.choose(problem(), eps=1e-3)[0] == "split"
    changes = ({"dim_at_most": 3}, {"device": "another"}, {"queries_at_most": 7}, {"queries_at_least": 9})
    for change in changes:
        monkeypatch.setattr(dispatch, "RULES", (rule(**change),))
        assert dispatch.choose(problem())[0] == "split", change


def test_what_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device_of", lambda problem: GPU)
    monkeypatch.setattr(dispatch, "RULES", (rule(gradient=True), rule(gradient=True, impl="reference")))
    assert dispatch.choose(problem(learns=True))[0] == "reference"


def test_every_other_implementation_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told = dispatch.why_not(problem(learns=True))
    assert set(told) == set(dispatch.CANNOT) - {"split"}
    assert set(available_implementations()) <= set(dispatch.CANNOT)
    assert "backward" in told["flex"]
    assert "CUDA" in told["triton"] or "installed" in told["triton"]
    assert "rounding" in told["rank2"]


def test_the_choice_can_be_compiled() -> None:
    def chosen(*tensors: torch.Tensor) -> torch.Tensor:
        given = _problem(*tensors, 32, None, False)
        return given.gate * (2 if dispatch.choose(given)[0] == "split" else 3)

    case = problem()
    tensors = (case.q, case.k, case.v, case.gate, case.landmark, case.amplitude)
    assert torch.equal(torch.compile(chosen, backend="eager", fullgraph=True)(*tensors), 2 * case.gate)


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    rules = (rule(), rule(impl="triton", gradient=True, length_at_least=16384, queries_at_most=16))
    path = tmp_path / "table.toml"
    path.write_text(dispatch.written(rules), encoding="utf-8")
    assert dispatch.load(path) == rules
    path.write_text(dispatch.written(rules).replace("dim_at_most", "dim"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^dim: .*table.toml"):
        dispatch.load(path)
    path.write_text(dispatch.written(rules).replace("16384", '"many"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^length_at_least: .*int in .*table.toml"):
        dispatch.load(path)
    with pytest.raises(ValueError, match=r"^GAPE_DISPATCH: .*nowhere.toml"):
        dispatch.load(tmp_path / "nowhere.toml")
    path.write_text(dispatch.written([rule(impl="magic")]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^impl: .*magic"):
        dispatch.load(path)


def test_the_library_has_a_table() -> None:
    assert dispatch.load(dispatch.TABLE) == dispatch.RULES
    assert dispatch.TABLE.read_text(encoding="utf-8") == dispatch.written(dispatch.RULES)


def row(impl: str, ms: float, length: int = 4096, **options: object) -> dict[str, str]:
    usual = {"device": GPU, "dtype": "bfloat16", "direction": "forward", "eps": "0", "dim": "64", "gates": "log-normal"}
    figures = {"impl": impl, "ms": str(ms), "length": str(length), "error": "0.002", "dgate": "", "queries": "1"}
    return usual | figures | {name: str(value) for name, value in options.items()}


def test_the_fastest_exact_row_becomes_a_rule() -> None:
    rows = [row("split", 2.0), row("triton", 1.5), row("rank2", 0.5, error=0.1), row("sdpa-cudnn", 0.9, error=0.0021)]
    rows += [row("split", 9.0, 16384), row("triton", 5.0, 16384), row("split", 4.0, 65536), row("triton", 5.0, 65536)]
    rows += [row("triton", 1.0, direction="both", dgate=0.1), row("split", 3.0, direction="both", dgate=0.001)]
    rows += [row("triton", 0.1, gates="contracting")]
    found = [(r.gradient, r.length_at_least, r.impl) for r in from_rows.rules(rows)]
    assert found == [(False, 65536, "split"), (False, 4096, "triton"), (True, 4096, "split")]
    assert "1.5 ms at 4,096 keys, split 2" in from_rows.rules(rows)[1].reason


def test_newer_rows_replace_older_ones_and_decoding_comes_first() -> None:
    rows = [row("split", 2.0), row("triton", 1.5), row("triton", 2.5)]
    decoded = [row("decode", 0.1, 65536), row("split", 0.2, 65536)]
    found = [(r.queries_at_most, r.queries_at_least, r.impl) for r in from_rows.rules(rows, decoded)]
    assert found == [(16, 0, "decode"), (0, 4096, "split")]


def test_times_of_one_commit_are_compared() -> None:
    """A kernel that was timed again without the portable choice is not set beside that one's older time."""
    together = [row("sdpa-cudnn", 1.0, commit="a"), row("split", 2.0, commit="a"), row("triton", 1.9, commit="a")]
    assert [found.impl for found in from_rows.rules([*together, row("triton", 2.1, commit="b")])] == ["triton"]
    again = [row("split", 2.0, commit="b"), row("triton", 2.1, commit="b")]
    assert [found.impl for found in from_rows.rules([*together, *again])] == ["split"]


def test_only_rows_of_the_same_sizes_are_compared() -> None:
    rows = [row("triton", 1.0, kv_heads=2), row("split", 2.0, kv_heads=4), row("triton", 3.0, kv_heads=4)]
    assert [r.impl for r in from_rows.rules(rows)] == ["split"]
    assert not from_rows.rules([], [row("decode", 0.1, queries=64), row("split", 0.2, queries=64)])


def test_without_plain_attention_the_most_exact_is_the_measure() -> None:
    assert [r.impl for r in from_rows.rules([row("rank2", 0.5, error=0.1), row("split", 2.0)])] == ["split"]


def test_equally_fast_ones_are_told_apart_by_memory() -> None:
    rows = [row("split", 1.0, peak_mib=600), row("triton", 1.005, peak_mib=100), row("flex", 1.5, peak_mib=50)]
    assert [r.impl for r in from_rows.rules(rows)] == ["triton"]


def test_rows_without_errors_have_those_of_the_precision_table() -> None:
    def told(quantity: str, keys: int, strength: int, plain: str, split: str, triton: str) -> dict[str, str]:
        kind = {"device": GPU, "dtype": "bfloat16", "quantity": quantity, "keys": str(keys), "strength": str(strength)}
        return kind | {"plain": plain, "rank2": "0.1", "split": split, "anchored": split, "triton": triton}

    rows = [
        row(impl, ms, n, direction="both", error="")
        for n in (4096, 16384)
        for impl, ms in (("split", 1), ("triton", 2))
    ]
    assert not from_rows.rules(rows)
    precision = [told("output", 4096, 10, "0.002", "0.003", "0.002"), told("dgate", 4096, 10, "", "0.001", "0.002")]
    assert [r.impl for r in from_rows.rules(rows, (), precision)] == ["split"]
    precision += [told("dgate", 8192, 1, "", "0.01", "0.002"), told("dgate", 8192, 10, "", "0.03", "0.002")]
    precision += [told("dgate", 4096, 100, "", "0.9", "0.9")]
    assert [(r.length_at_least, r.impl) for r in from_rows.rules(rows, (), precision)] == [
        (16384, "triton"),
        (4096, "split"),
    ]


def test_training_beyond_the_anchors_takes_the_kernel_where_it_was_measured() -> None:
    far = problem(learns=True, n_q=2049, n_k=2049)
    assert next(r for r in dispatch.RULES if r.fits(far, 0.0, GPU)).impl == "triton"


def test_the_library_table_is_that_of_its_rows() -> None:
    data = Path(__file__).parents[2] / "benchmarks" / "data"
    found = from_rows.rules(*(load(data / f"{name}.csv") for name in ("attention", "decode", "precision")))
    assert tuple(found) == dispatch.RULES
