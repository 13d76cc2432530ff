"""The benchmark of `model.generate` with a tiny model on a CPU, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

import common
import gape.hf
import generate
from gape.data import PrepareConfig, prepare
from tables.generate import generation
from tests.benchmarks.test_scripts import run, stored

CONFIG = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 100.0,
}  # fmt: skip
#: One of the four key heads has no floor.
FLOORS = {"gate_floor": [[200.0] * 4, [0.0, 0.0, 200.0, 200.0]]}
TINY = [
    "generate", "--trust", "--device", "cpu", "--dtype", "float32", "--new-tokens", "2", "--repeats", "1",
    "--floors", "floors.json",
]  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "CONFIG", CONFIG)
    Path("floors.json").write_text(json.dumps(FLOORS), encoding="utf-8")


@pytest.mark.slow
def test_each_cache_gives_a_row_at_once_and_in_chunks() -> None:
    caches = [name for name in generate.Settings.CACHES if name != "gated-full" or hasattr(gape.hf, "FullCache")]
    sizes = ["--prompts", "8,24", "--batches", "1,2", "--most-tokens", "24", "--chunk", "16"]
    assert run(*TINY, *sizes, "--cache", ",".join(caches)) == 0
    rows = stored("generate")
    cases = [(row["prompt"], row["batch"], row["chunk"], row["cache"]) for row in rows]
    assert cases == [(*size, cache) for size in (("8", "1", ""), ("8", "2", ""), ("24", "1", ""), ("24", "1", "16"))
                     for cache in caches]  # fmt: skip
    for row in rows:
        assert not row["failed"]
        assert float(row["prefill_s"]) > 0
        assert bool(row["ms_per_token"]) == (not row["chunk"])
        assert (row["eps"], row["bounds"]) == (("0.01", "weights") if row["cache"] == "forgetting" else ("", ""))
    # Keys and values of 2 layers, 2 key heads of 8 coordinates, 4 bytes each.
    plain = [int(row["cache_bytes"]) for row in rows if row["cache"] == "ungated"]
    assert plain == [tokens * 2 * 2 * 2 * 8 * 4 for tokens in (8, 16, 24, 24)]


def test_a_case_that_fails_is_a_row_with_the_reason_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: object) -> None:
        raise MemoryError("too large\nfor this")

    monkeypatch.setattr(gape.hf, "FullCache", full, raising=False)
    assert run(*TINY, "--prompts", "8", "--batches", "1", "--cache", "gated-full,forgetting") == 0
    failed, measured = stored("generate")
    assert failed["failed"] == "MemoryError: too large"
    assert not failed["prefill_s"]
    assert measured["prefill_s"]
    assert not measured["failed"]


def test_models_in_directories_read_text_of_a_corpus() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained("plain")
    gape.hf.inject(model, context_length=32, start="paper", gates={"gate_floor": 4.0})
    model.save_pretrained("gated")
    Path("text.jsonl").write_text(json.dumps({"text": "It rained. " * 20}) + "\n", encoding="utf-8")
    prepare(PrepareConfig(inputs=("text.jsonl",), tokenizer="bytes"), Path("words"))
    sizes = ["--prompts", "20", "--batches", "2", "--cache", "ungated,forgetting"]
    assert run(*TINY, *sizes, "--model", "gated", "--base", "plain", "--corpus", "words") == 0
    assert [(row["model"], row["text"], row["failed"]) for row in stored("generate")] == [("gated", "words", "")] * 2


def test_keys_are_centred_where_coordinates_do_not_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "CENTER_TEXTS", (2, 16))
    Path("text.jsonl").write_text(json.dumps({"text": "It rained. " * 20}) + "\n", encoding="utf-8")
    prepare(PrepareConfig(inputs=("text.jsonl",), tokenizer="bytes"), Path("words"))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained("plain")
    for position, code in (("nope+gape", 0), ("rope+gape", 2)):
        gape.hf.inject(model, context_length=32, position=position, start="paper", gates={"gate_floor": 4.0})
        model.save_pretrained("gated")
        gape.hf.remove(model)
        options = ["--model", "gated", "--base", "plain", "--corpus", "words", "--center"]
        assert run(*TINY, "--prompts", "20", "--batches", "1", "--cache", "forgetting", *options) == code
    assert [row["model"] for row in stored("generate")] == ["gated-centered"]
    assert "do not turn; gated has none" in " ".join(capsys.readouterr().err.split())


def test_no_case_begins_behind_the_time_limit() -> None:
    assert run(*TINY, "--prompts", "8", "--time-limit", "1e-9") == 1
    assert not common.DATA.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "magic"], "cache: got str 'magic'"),
        (["--model", "gated"], "base: got NoneType None"),
        (["--prompts", "0"], "prompts: got int 0"),
        (["--eps", "1"], "eps: got float 1.0"),
        (["--center"], "center: got bool True"),
    ],
)
def test_mistakes_end_with_two(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_table_divides_by_the_model_without_gates_and_names_failures() -> None:
    assert generation(Path()) == "No rows yet.\n"
    usual = dict.fromkeys(generate.FIELDS, "") | {"device": "GPU", "model": "m", "prompt": "1024", "batch": "2"}
    for figures in (
        {"cache": "ungated", "prefill_s": "2", "ms_per_token": "10", "cache_bytes": str(2**30), "commit": "a"},
        {"cache": "forgetting", "eps": "0.01", "prefill_s": "9", "commit": "a"},
        {"cache": "forgetting", "eps": "0.01", "prefill_s": "1", "ms_per_token": "5", "cache_bytes": str(2**29)},
        {"cache": "static", "failed": "OutOfMemoryError: too much"},
    ):
        common.append(common.DATA / "generate.csv", generate.FIELDS, usual | figures)
    text = generation(Path())
    assert "| 1,024 | 2 | ungated | 2 | 200 | 1 | – |" in text
    assert "| 1,024 | 2 | forgetting, eps 0.01 | 1 (0.50×) | 400 (2.00×) | 0.5 (0.50×) | – |" in text
    assert "- static, 2 × 1,024 tokens: OutOfMemoryError: too much" in text
