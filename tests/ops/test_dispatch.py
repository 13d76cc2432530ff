"""Which implementation runs: the portable rules and a measured table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gape
from gape.ops import dispatch, implementations, limits
from gape.ops.api import _problem, available_implementations
from gape.ops.inputs import Problem
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
    return dispatch.Rule(**(usual | {"length_at_least": 4, "impl": "reference", "reason": "measured"} | options))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (problem(), "split"),
        (problem(torch.float16), "split"),
        (problem(torch.float32), "rank2"),
        (problem(torch.float64, learns=True), "rank2"),
        (problem(learns=True), "split"),
        (problem(learns=True, n_q=2049, n_k=2049), "split"),
    ],
)
def test_the_portable_choice(given: Problem, name: str) -> None:
    assert implementations.choose(given)[0] == name


def test_few_queries_on_a_gpu_go_to_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any length: there is another one at every token, and cuDNN would plan for each."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    given = [problem(), problem(torch.float16, n_q=1), problem(n_q=17, n_k=17), problem(learns=True)]
    assert [implementations.portable(each)[0] for each in given] == ["decode", "decode", "split", "split"]
    assert "copies" in implementations.IMPLEMENTATIONS["split"].remark(given[0])
    assert implementations.portable(problem(torch.float32))[0] != "decode"
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    assert implementations.portable(problem())[0] == "split"


def test_explicit_positions_on_a_gpu_are_taken_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be far apart, and reading them would wait for the device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    where = {"n_q": 17, "n_k": 17, "q_positions": torch.arange(17), "k_positions": torch.arange(17)}
    given = [problem(torch.float32, **where), problem(**where), problem(torch.float16, learns=True, **where)]
    assert [implementations.portable(each)[0] for each in given] == ["triton"] * 3
    assert implementations.portable(problem(torch.float64, **where))[0] == "rank2"
    monkeypatch.setattr(implementations, "significand_bits", lambda x: 11)
    assert implementations.portable(given[0])[0] == "split"


def test_a_measured_rule_speaks_for_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "device_of", lambda problem: GPU)
    monkeypatch.setattr(implementations, "RULES", (rule(),))
    assert implementations.choose(problem()) == ("reference", "measured")
    others = [problem(torch.float16), problem(learns=True), problem(n_q=3, n_k=3)]
    assert [implementations.choose(other)[0] for other in others] == ["split"] * 3
    assert implementations.choose(problem(), eps=1e-3)[0] == "split"
    changes = ({"dim_at_most": 3}, {"device": "another"}, {"queries_at_most": 7}, {"queries_at_least": 9})
    for change in changes:
        monkeypatch.setattr(implementations, "RULES", (rule(**change),))
        assert implementations.choose(problem())[0] == "split", change


def test_what_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "device_of", lambda problem: GPU)
    monkeypatch.setattr(implementations, "RULES", (rule(gradient=True, impl="decode"), rule(gradient=True)))
    assert implementations.choose(problem(learns=True))[0] == "reference"


def test_every_other_implementation_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told = implementations.others(problem(learns=True))
    assert set(told) == set(implementations.IMPLEMENTATIONS) - {"split"}
    assert set(available_implementations()) == set(implementations.IMPLEMENTATIONS)
    assert "backward" in told["decode"]
    assert "CUDA" in told["triton"] or "installed" in told["triton"]
    assert "rounding" in told["rank2"]


def test_the_choice_can_be_compiled() -> None:
    def chosen(*tensors: torch.Tensor) -> torch.Tensor:
        given = _problem(*tensors, 32, None, False)
        return given.gate * (2 if implementations.choose(given)[0] == "split" else 3)

    case = problem()
    tensors = (case.q, case.k, case.v, case.gate, case.landmark, case.amplitude)
    assert torch.equal(torch.compile(chosen, backend="eager", fullgraph=True)(*tensors), 2 * case.gate)


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    table = (rule(), rule(impl="triton", gradient=True, length_at_least=16384, queries_at_most=16))
    path = tmp_path / "table.toml"
    path.write_text(dispatch.to_toml(table, "a test"), encoding="utf-8")
    assert dispatch.load(path, implementations.IMPLEMENTATIONS) == table
    path.write_text(dispatch.to_toml(table, "a test").replace("dim_at_most", "dim"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^dim: .*table.toml"):
        dispatch.load(path, implementations.IMPLEMENTATIONS)
    path.write_text(dispatch.to_toml(table, "a test").replace("16384", '"many"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^length_at_least: .*int in .*table.toml"):
        dispatch.load(path, implementations.IMPLEMENTATIONS)
    with pytest.raises(ValueError, match=r"nowhere.toml"):
        dispatch.load(tmp_path / "nowhere.toml", implementations.IMPLEMENTATIONS)
    path.write_text(dispatch.to_toml([rule(impl="magic")], "a test"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^impl: .*magic"):
        dispatch.load(path, implementations.IMPLEMENTATIONS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the tables that were measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    folder = dispatch.local_table(GPU).parent
    folder.mkdir(parents=True)
    return folder


@pytest.mark.usefixtures("cache")
def test_rules_of_this_machine_count_before_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, impl in ((GPU, "rank2"), ("GeForce 1", "reference")):
        text = dispatch.to_toml([rule(device=gpu, impl=impl)], "a test")
        dispatch.local_table(gpu).write_text(text, encoding="utf-8")
    tables = dispatch.read(implementations.IMPLEMENTATIONS)
    monkeypatch.setattr(implementations, "RULES", (*tables.here, *tables.packaged))
    chosen = {}
    for gpu in (GPU, "GeForce 1", "GeForce 2"):
        monkeypatch.setattr(implementations, "device_of", lambda problem, gpu=gpu: gpu)
        chosen[gpu] = implementations.choose(problem())[0]
    assert chosen == {GPU: "rank2", "GeForce 1": "reference", "GeForce 2": "split"}


@pytest.mark.usefixtures("cache")
def test_rules_of_the_library_count_where_another_gpu_was_measured() -> None:
    dispatch.local_table("GeForce 1").write_text(dispatch.to_toml([rule(device="GeForce 1")], "a test"))
    packaged = dispatch.load(dispatch.TABLE, implementations.IMPLEMENTATIONS)
    assert packaged
    assert dispatch.read(implementations.IMPLEMENTATIONS).packaged == packaged


@pytest.mark.parametrize("content", [b"", b"[[rule", b"\xff", b"rule = 3", b"rule = [3]", b"[[rule]]\ndevice = 1"])
def test_a_damaged_table_is_named_and_left_out(content: bytes, cache: Path) -> None:
    dispatch.local_table("GeForce 1").write_bytes(content)
    dispatch.local_table(GPU).write_text(dispatch.to_toml([rule()], "a test"), encoding="utf-8")
    with pytest.warns(UserWarning, match=re.escape(str(cache / "geforce-1.toml"))):
        tables = dispatch.read(implementations.IMPLEMENTATIONS)
    assert tables.here == (rule(),)


@pytest.mark.usefixtures("cache")
def test_rules_of_another_version_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.local_table(GPU).write_text(dispatch.to_toml([rule()], "a test"), encoding="utf-8")
    assert dispatch.read(implementations.IMPLEMENTATIONS).here == (rule(),)
    monkeypatch.setattr(gape, "__version__", "99.0")
    assert dispatch.read(implementations.IMPLEMENTATIONS).here == ()


def test_a_user_without_a_home_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert dispatch.read(implementations.IMPLEMENTATIONS).here == ()
    with pytest.raises(ValueError, match=r"^XDG_CACHE_HOME:"):
        dispatch.local_table(GPU)


def test_a_table_that_is_named_and_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(ValueError, match=r"^GAPE_DISPATCH: .*nowhere.toml"):
        dispatch.read(implementations.IMPLEMENTATIONS)


def test_a_table_that_is_named_counts_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.local_table(GPU).write_text(dispatch.to_toml([rule()], "a test"), encoding="utf-8")
    other = cache / "other.toml"
    other.write_text(dispatch.to_toml([rule(impl="rank2")], "a test"), encoding="utf-8")
    monkeypatch.setenv("GAPE_DISPATCH", str(other))
    assert dispatch.read(implementations.IMPLEMENTATIONS) == ((), (rule(impl="rank2"),))


def test_training_beyond_the_anchors_takes_the_kernel_where_it_was_measured() -> None:
    far = problem(learns=True, n_q=2049, n_k=2049)
    table = dispatch.load(dispatch.TABLE, implementations.IMPLEMENTATIONS)
    assert next(r for r in table if r.fits(far, 0.0, GPU)).impl == "triton"
