"""Heads that retrieve: what their scores are, floors that spare them, and the commands that find and use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers

import gape.hf
from gape.hf import heads
from tests.cli.test_commands import gape_exits
from tests.hf.tiny import opened, tiny, tokens

#: Of twenty tokens; the first part of the source lies beyond a window of eight, the second inside.
SOURCE, ANSWER = [3, 4, 13, 14], range(16, 20)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "phi3", "qwen3_moe"])
def test_scores_are_the_attention_of_a_whole_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_PIECE", 6)
    model, ids = tiny(family, "eager"), tokens(1, 20)
    _, n_heads, n_kv_heads = heads.sizes(model)
    with torch.no_grad():
        whole = torch.cat(model(ids, output_attentions=True).attentions)
    # Queries 15 to 18 predict tokens 16 to 19.
    wanted = whole[:, :, 15:19, SOURCE].sum(-1).mean(-1).view(-1, n_kv_heads, n_heads // n_kv_heads).amax(-1)
    actual = heads.scores(model, ids, SOURCE, ANSWER)
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=0)


def copying() -> Any:
    """A Llama in which query head 3 of the second layer, one of key head 1, looks at tokens 5; others see all alike."""
    model = tiny("llama", "eager")
    first, second = model.model.layers
    with torch.no_grad():
        for layer in (first, second):
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        model.model.embed_tokens.weight[5, 1] = 1.0
        # The slowest pair of a head's dimensions, which hardly turns.
        second.self_attn.q_proj.weight[3 * 8 + 3, 0] = 5.0
        second.self_attn.k_proj.weight.zero_()[1 * 8 + 3, 1] = 5.0
    return model


def test_the_head_that_copies_scores_highest() -> None:
    ids = torch.tensor([[7, 5, 5, 8, 9, 8, 7, 8, 5, 5]])
    actual = heads.scores(copying(), ids, [1, 2], [8, 9])
    assert actual[1, 1] > 0.6
    # All tokens alike: two of eight, and two of nine.
    rest = [actual[0, 0], actual[0, 1], actual[1, 0]]
    torch.testing.assert_close(torch.stack(rest), torch.full((3,), (2 / 8 + 2 / 9) / 2))


def test_floors_spare_the_best_heads() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.2, 0.3]])
    assert heads.floors(scores, 2, 32, 2) == [[32.0, 32.0, 0.0, 0.0], [0.0, 0.0, 32.0, 32.0], [32.0] * 4]
    assert heads.floors(scores, 0, 1.5, 1) == [[1.5, 1.5]] * 3
    assert heads.floors(scores, 6, 1.5, 1) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"free": 7}, "free: got int 7, expected a whole number from 0 to 6"),
        ({"free": -1}, "free"),
        ({"floor": 0.0}, "floor"),
        ({"groups": 0}, "groups"),
        ({"scores": torch.full((3, 2), float("nan"))}, "scores"),
    ],
)
def test_floors_that_cannot_be_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        heads.floors(**{"scores": torch.zeros(3, 2), "free": 1, "floor": 4.0, "groups": 2} | changed)


def test_scores_that_cannot_be_are_refused() -> None:
    model, ids = tiny("llama", "eager"), tokens(1, 20)
    for source, answer, said in (([16], ANSWER, "source"), ([], ANSWER, "source"), (SOURCE, [15, 16], "answer")):
        with pytest.raises(ValueError, match=f"^{said}"):
            heads.scores(model, ids, source, answer)
    with pytest.raises(ValueError, match=r"^ids"):
        heads.scores(model, tokens(2, 20), SOURCE, ANSWER)
    with pytest.raises(ValueError, match=r"^model: got str 'sdpa', expected attn_implementation='eager'"):
        heads.scores(tiny("llama", "sdpa"), ids, SOURCE, ANSWER)
    with pytest.raises(ValueError, match=r"^model: got one with gates"):
        heads.scores(opened(tiny("llama", "eager")), ids, SOURCE, ANSWER)


#: All key heads of a tiny Llama, and what a trial needs beside them.
ALL = [(1, 1), (0, 0), (0, 1), (1, 0)]
TRIAL: dict[str, Any] = {"floor": 32.0, "context_length": 16, "gates": {"learn_landmark": False}}


def test_the_cheapest_head_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {(0, 0): 4.0, (0, 1): 0.25, (1, 0): 0.5, (1, 1): 0.5}
    model, heard = tiny("llama"), list[Any]()

    def loss(gated: Any, samples: Any) -> float:
        floored = [
            (layer, head)
            for layer, block in enumerate(gated.model.layers)
            for head in range(2)
            # The query heads of a key head have one floor.
            if list(block.self_attn.gape.gate_floor)[2 * head : 2 * head + 2] == [32.0, 32.0]
        ]
        return 1.0 + sum(prices[head] for head in floored)

    monkeypatch.setattr(heads, "_loss", loss)
    actual = heads.pruned(model, [], ALL, 1, **TRIAL, report=lambda head, cost: heard.append((head, cost)))
    # Of the two that cost the same, the last.
    assert actual.removed == [(0, 1), (1, 0), (1, 1)]
    assert (actual.heads, actual.losses) == ([(0, 0)], [1.0, 1.25, 1.75, 2.25])
    assert actual.floors == [[0.0, 0.0, 32.0, 32.0], [32.0] * 4]
    assert heard == list(zip([None, *actual.removed], actual.losses, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_pruning_measures_answers_and_leaves_the_model_alone(family: str) -> None:
    model, samples = tiny(family), [(tokens(1, 20), ANSWER), (tokens(1, 17, seed=1), range(15, 17))]
    before, kind, numbers = {k: v.clone() for k, v in model.state_dict().items()}, type(model), torch.get_rng_state()
    actual = heads.pruned(model, samples, ALL, 2, **TRIAL)
    assert type(model) is kind
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(0)
    gape.hf.inject(model, context_length=16, start="paper", gates={**TRIAL["gates"], "gate_floor": actual.floors})
    with torch.no_grad():
        own = [
            torch.nn.functional.cross_entropy(model(ids).logits[0, answer[0] - 1 : -1], ids[0, answer[0] :])
            for ids, answer in samples
        ]
    assert actual.losses[-1] == pytest.approx(float(sum(own)) / 2, abs=1e-5)
    assert len(set(actual.losses)) == 3


def test_a_trial_that_fails_leaves_no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> float:
        raise RuntimeError("out of memory")

    model = tiny("llama")
    monkeypatch.setattr(heads, "_loss", fails)
    with pytest.raises(RuntimeError):
        heads.pruned(model, [], ALL, 2, **TRIAL)
    assert heads.sizes(model) == (2, 4, 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"heads": [(0, 0), (0, 0)]}, "heads"),
        ({"heads": [(0, 2)]}, "heads"),
        ({"free": 5}, "free: got int 5, expected a whole number from 0 to 4"),
        ({"gates": {"gate_floor": 4}}, "gates"),
        ({"samples": []}, "samples"),
    ],
)
def test_pruning_that_cannot_be_is_refused(changed: dict[str, Any], said: str) -> None:
    samples = [(tokens(1, 20), ANSWER)]
    with pytest.raises(ValueError, match=f"^{said}"):
        heads.pruned(tiny("llama"), **{"samples": samples, "heads": ALL, "free": 2, **TRIAL} | changed)


def needles(path: Path, length: int, count: int, number: str = "4071") -> None:
    """Samples as `gape ruler generate` writes them; every second lacks its answer."""
    rows = [
        {
            "task": "niah_single_1", "input": f"Rain. The number is {number if place % 2 == 0 else 'lost'}. Rain.",
            "answer_prefix": "\nThe number is", "outputs": [number], "max_seq_length": length,
        }
        for place in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama whose tokenizer knows bytes, and samples of two lengths, in the working directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("llama")
    tiny("llama", vocab_size=256).save_pretrained("llama")
    Path("data").mkdir()
    needles(Path("data/niah_single_1_512.jsonl"), 512, 6)
    needles(Path("data/niah_single_1_1024.jsonl"), 1024, 3, "938")
    return tmp_path


HEADS = ("hf", "heads", "llama", "--data", "data", "--free", "1", "--floor", "32", "--device", "cpu")
INJECT = ("hf", "inject", "llama", "--context-length", "16", "--out", "gated")


def test_from_needles_to_a_model_with_these_floors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits(*HEADS, "--out", "floors/floors1.json", "--samples", "3") == 0
    output = capsys.readouterr()
    assert "1 of 4 key heads are free and keep 25.0 % of the keys" in output.out
    # As many of each file: the two of 1,024 that have their answer, and one of 512.
    places = ((1024, 1), (512, 1), (1024, 3), (512, 3))
    assert [place for place in places if "{}.jsonl {},".format(*place) in output.err] == list(places[:3])
    assert "2 left out: their answer does not stand in the text" in output.err
    made = json.loads(Path("floors/floors1.json").read_text())
    best = int(torch.tensor(made["score"]).argmax())
    assert made["gate_floor"] == heads.floors(torch.tensor(made["score"]), 1, 32.0, 2)
    assert made["gate_floor"][best // 2][2 * (best % 2)] == 0.0
    assert {key: made[key] for key in ("free", "floor", "model", "data", "samples")} == {
        "free": 1, "floor": 32.0, "model": "llama", "data": "data", "samples": 3,
    }  # fmt: skip
    assert gape_exits(*INJECT, "--floors", "floors/floors1.json") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("gated")
    assert [list(layer.self_attn.gape.gate_floor) for layer in model.model.layers] == made["gate_floor"]


def test_the_tokens_of_the_answer_are_found(here: Path) -> None:
    from gape.experiments import retrieval_heads
    from gape.experiments.open_reader import transformers_reader
    from gape.tasks.ruler import sources
    from gape.utils.progress import Progress

    reader, (samples, _) = transformers_reader("llama"), sources.read(["data"])
    one, other = retrieval_heads.locate(reader, samples, 2, Progress())
    for actual, number in ((one, "938"), (other, "4071")):
        assert reader.decode(actual.ids[actual.source].tolist()) == number
        assert reader.decode(actual.ids[list(actual.answer)].tolist()) == f" {number}"


def test_a_file_of_floors_is_written_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits(*HEADS, "--out", "floors.json", "--samples", "1") == 0
    written = Path("floors.json").read_bytes()
    capsys.readouterr()
    assert gape_exits(*HEADS, "--out", "floors.json", "--samples", "1") == 2
    assert "out: got str 'floors.json', expected a name that is free" in capsys.readouterr().err
    assert Path("floors.json").read_bytes() == written


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--free", "5"), "free: got int 5, expected a whole number from 0 to 4"),
        (("--floor", "0"), "floor"),
        (("--samples", "0"), "samples"),
        (("--data", "nowhere"), "data: got 'nowhere'"),
        (("--data", "data/niah_single_1_512.jsonl", "--out", "data"), "out: got str 'data'"),
        (("--data", "lost.jsonl"), "data: none of its samples can be used"),
        (("--data", "long.jsonl"), "they are longer than the model can read"),
    ],
)
def test_heads_that_cannot_be_found_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], changed: tuple[str, ...], said: str
) -> None:
    needles(Path("lost.jsonl"), 512, 2)
    Path("lost.jsonl").write_text(Path("lost.jsonl").read_text().splitlines()[1])
    needles(Path("long.jsonl"), 512, 1, "9" * 100)
    assert gape_exits(*HEADS, "--out", "floors.json", *changed) == 2
    assert said in capsys.readouterr().err
    assert not Path("floors.json").exists()


def test_a_model_that_is_not_there_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("hf", "heads", "./nowhere", *HEADS[3:], "--out", "floors.json") == 2
    assert "model: got str './nowhere', expected a directory that is there" in capsys.readouterr().err


def test_heads_of_a_model_with_gates_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gape.hf.inject(tiny("llama", vocab_size=256), context_length=16).save_pretrained("gated")
    assert gape_exits("hf", "heads", "gated", *HEADS[3:], "--out", "floors.json") == 2
    assert "model: got str 'gated', expected one without gates" in capsys.readouterr().err
    assert not Path("floors.json").exists()


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (None, (), "floors: floors.json cannot be read"),
        ("no JSON", (), "floors: floors.json cannot be read"),
        ('{"gate_floor": 4}', (), "floors: got int 4"),
        ('{"gate_floor": [[4, "x"]]}', (), "gate_floor"),
        ('{"gate_floor": [[4, 4, 4, 4]]}', (), "gate_floor"),
        ('{"gate_floor": [[4], [0]]}', ("--gate", "gate_floor=4"), "floors: got str 'floors.json', expected none"),
        ('{"gate_floor": [[4], [0]]}', ("--position", "yarn"), "since yarn has no gates"),
    ],
)
def test_floors_that_inject_cannot_take_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], text: str | None, more: tuple[str, ...], said: str
) -> None:
    if text is not None:
        Path("floors.json").write_text(text)
    assert gape_exits(*INJECT, "--floors", "floors.json", *more) == 2
    assert said in capsys.readouterr().err
    assert not Path("gated").exists()
