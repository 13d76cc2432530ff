"""RULER's tables: from stored rows alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from gape.report import catalogue, ruler
from gape.report.page import report
from gape.report.results import Results, gather, store

MEANS = {"rope": 10.2, "p-rope": 9.9, "p-rope+gape": 9.3}
SUBSETS = [(task, length) for task in ("vt", "cwe") for length in (4096, 8192)]


def row(position: str, task: str, length: int, mean: float, **more: Any) -> dict[str, Any]:
    draw = Random(f"{task}{length}")
    own = Random(f"{position}{task}{length}{more.get('seed')}{more.get('variant')}")
    values = [round(mean + draw.gauss(0, 0.5) + own.gauss(0, 0.1), 5) for _ in range(20)]
    run = "_".join(filter(None, (position, more.get("variant", ""), str(more.get("seed", 0)))))
    return {
        "run": run, "variant": "", "position": position, "seed": 0, "train_length": 1024, "step": 5, "key": "k",
        "model": "GPT-6x512", "task": task, "length": length, "data": ["s"], "samples": 20,
        "plan": f"{task}{length}", "nll": sum(values) / 20, "sample_nll": values,
    } | more  # fmt: skip


def rows(means: dict[str, float] = MEANS, **more: Any) -> list[dict[str, Any]]:
    return [row(position, *subset, mean, **more) for position, mean in means.items() for subset in SUBSETS]


def results(records: list[dict[str, Any]]) -> Results:
    return Results(runs=({"run": "rope_0"},), measured={"ruler": tuple(records)})


def test_the_papers_layout() -> None:
    table = ruler.ranking(ruler.methods(rows()))
    assert table.header == ("Model", "Method", "cwe_4k", "cwe_8k", "vt_4k", "vt_8k")
    assert [cells[:2] for cells in table.rows] == [
        ("GPT-6x512", "RoPE"),
        ("GPT-6x512", "p-RoPE"),
        ("GPT-6x512", "p-RoPE+GAPE"),
    ]
    assert table.strong == {(2, column) for column in range(2, 6)}
    assert table.second == {(1, column) for column in range(2, 6)}
    best = table.rows[2][2]
    assert f"**{best}**" in table.markdown()
    assert f"<u>{table.rows[1][2]}</u>" in table.markdown()
    assert f"{best} *" in table.text()
    assert f"<strong>{best}</strong>" in table.html()
    tex = table.latex()
    assert r"\textbf{" + best.replace("±", r"$\pm$") + "}" in tex
    assert r"cwe\_4k" in tex
    assert "|" not in tex


def test_best_and_second_are_found_within_each_model() -> None:
    records = rows() + rows({"gpt2-rope": 5.0, "gpt2-gape": 4.0}, model="gpt2-12x768")
    table = ruler.ranking(ruler.methods(records))
    assert {r for r, c in table.strong if c == 2} == {2, 3}


def test_nothing_is_best_on_other_samples() -> None:
    records = [one | {"plan": "other"} if one["position"] == "rope" and one["task"] == "vt" else one for one in rows()]
    table = ruler.ranking(ruler.methods(records))
    assert {c for _, c in table.strong | table.second} == {2, 3}


def test_one_sample_separates_nothing() -> None:
    records = [one | {"samples": 1, "sample_nll": one["sample_nll"][:1]} for one in rows()]
    (table,) = ruler.difference_tables(ruler.methods(records))
    assert {cells[-1] for cells in table.rows} == {"one sample"}
    assert not ruler.ablation(ruler.methods(records)).strong


def test_matches_are_ranked_the_other_way_up() -> None:
    records = [
        one | {"match": 0.5, "sample_match": [float(n < hits) for n in range(20)]}
        for one, hits in zip(rows({"rope": 1.0, "alibi": 1.0}), [4] * 4 + [9] * 4, strict=True)
    ]
    _, table, *_ = ruler.tables(results(records))
    assert table.rows[1][2].startswith("45.0 ±")
    assert {r for r, _ in table.strong} == {1}


def test_equal_ones_do_not_stand_out() -> None:
    assert not ruler.ranking(ruler.methods([one | {"sample_nll": [1.0] * 20} for one in rows()])).strong


def test_differences_are_of_the_same_samples() -> None:
    records = rows()
    (table,) = ruler.difference_tables(ruler.methods(records))
    assert {cells[1] for cells in table.rows} == {"p-RoPE+GAPE − RoPE", "p-RoPE+GAPE − p-RoPE"}
    assert {cells[-1] for cells in table.rows} == {"better"}
    others = [one | {"plan": "other"} if one["position"] == "rope" else one for one in records]
    (table,) = ruler.difference_tables(ruler.methods(others))
    assert {cells[1] for cells in table.rows} == {"p-RoPE+GAPE − p-RoPE"}


def test_chance_is_called_so() -> None:
    (table,) = ruler.difference_tables(ruler.methods(rows({"p-rope": 9.3, "p-rope+gape": 9.3})))
    assert "not separable" in {cells[-1] for cells in table.rows}


def test_runs_of_one_seed_are_not_averaged() -> None:
    records = rows({"rope": 10.0})
    with pytest.raises(ValueError, match="both seed 0"):
        ruler.methods(records + [one | {"run": "other"} for one in records])


def test_seeds_are_averaged_sample_by_sample() -> None:
    records = rows({"rope": 10.0}) + rows({"rope": 12.0}, seed=1)
    (method,) = ruler.methods(records)
    one, two = (r["sample_nll"] for r in records if (r["task"], r["length"]) == ("vt", 4096))
    means = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
    assert method.values(("vt", 4096), "nll") == pytest.approx(means)
    with pytest.raises(ValueError, match="different samples"):
        ruler.methods(rows({"rope": 10.0}) + rows({"rope": 12.0}, seed=1, plan="other"))


def test_precisions_are_not_mixed() -> None:
    records = rows({"rope": 10.0}, precision="float32")
    assert len(ruler.methods(records + rows({"rope": 10.0}, precision="bfloat16", model="other"))) == 2
    with pytest.raises(ValueError, match="bfloat16, float32"):
        ruler.methods(records + rows({"rope": 10.1}, precision="bfloat16"))


def test_the_ablation_is_in_percent_of_the_full_model() -> None:
    records = rows({"p-rope+gape": 10.0}) + rows({"p-rope+gape": 10.5}, variant="gate-fixed")
    table = ruler.ablation(ruler.methods(records))
    assert [cells[:2] for cells in table.rows] == [("GPT-6x512", "p-RoPE+GAPE (gate-fixed)")]
    full, other = ruler.methods(records)
    values = [m.values(("vt", 8192), "nll").mean() for m in (full, other)]
    assert table.rows[0][-1] == f"{100 * (values[1] - values[0]) / values[0]:+.2f}%"
    assert (0, 5) in table.strong
    with pytest.raises(ValueError, match=r"p-rope\+gape"):
        ruler.ablation(ruler.methods(rows({"rope": 1.0})))


def test_an_ablation_comes_with_its_intervals() -> None:
    records = rows({"p-rope+gape": 10.0, "rope": 10.2}) + rows({"p-rope+gape": 10.5}, variant="gate-fixed")
    _, table = ruler.ablation_tables(results(records))
    assert {cells[1] for cells in table.rows} == {"p-RoPE+GAPE (gate-fixed) − p-RoPE+GAPE", "RoPE − p-RoPE+GAPE"}
    assert {cells[-1] for cells in table.rows} == {"worse"}
    _, other = ruler.ablation_tables(results(records), ("p-rope+gape", "gate-fixed"))
    assert {cells[1].split(" − ")[1] for cells in other.rows} == {"p-RoPE+GAPE (gate-fixed)"}


def test_reports_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FIGURES", {})
    store(results(rows()), tmp_path / "stored")
    gathered = gather([tmp_path / "stored"])
    page = report(gathered, tmp_path).read_text(encoding="utf-8")
    assert all(table.html() in page for table in ruler.tables(results(rows())))
