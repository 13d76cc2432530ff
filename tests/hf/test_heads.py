"""Heads that retrieve: their scores, and floors by head from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers

from gape.hf import heads
from gape.hf.heads import head_scores
from tests.cli.test_commands import gape_exits
from tests.hf.tiny import opened, tiny, tokens

#: Of twenty tokens; the first part of the source lies beyond a window of eight, the second inside.
SOURCE, ANSWER = [3, 4, 13, 14], 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "phi3", "qwen3_moe"])
def test_scores_are_the_attention_of_a_whole_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_PIECE", 6)
    model, ids = tiny(family, "eager"), tokens(1, 20)
    _, n_heads, n_kv_heads = heads.sizes(model)
    with torch.no_grad():
        whole = torch.cat(model(ids, output_attentions=True).attentions)
    # Queries 15 to 18 predict tokens 16 to 19.
    wanted = whole[:, :, 15:19, SOURCE].sum(-1).mean(-1).view(-1, n_kv_heads, n_heads // n_kv_heads).amax(-1)
    actual = head_scores(tiny(family), [(ids[0], SOURCE, ANSWER)])
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
    ids = torch.tensor([7, 5, 5, 8, 9, 8, 7, 8, 5, 5])
    actual = head_scores(copying(), [(ids, [1, 2], 2)])
    assert actual[1, 1] > 0.6
    # All tokens alike: two of eight, and two of nine.
    rest = [actual[0, 0], actual[0, 1], actual[1, 0]]
    torch.testing.assert_close(torch.stack(rest), torch.full((3,), (2 / 8 + 2 / 9) / 2))


def test_scores_of_several_texts_are_their_mean_and_the_model_is_as_before() -> None:
    model, texts = tiny("llama"), [(tokens(1, 20, seed)[0], SOURCE, ANSWER) for seed in (0, 1)]
    each = [head_scores(model, [text]) for text in texts]
    torch.testing.assert_close(head_scores(model, texts), torch.stack(each).mean(0))
    assert model.config._attn_implementation == "sdpa"


def test_scores_that_cannot_be_are_refused() -> None:
    model, ids = tiny("llama"), tokens(1, 20)[0]
    wrong = (([16], 4, "source"), ([], 4, "source"), (SOURCE, 0, "answer"), (SOURCE, 20, "answer"))
    for source, answer, argument in wrong:
        with pytest.raises(ValueError, match=f"^{argument}"):
            head_scores(model, [(ids, source, answer)])
    with pytest.raises(ValueError, match=r"^model: got one with gates"):
        head_scores(opened(tiny("llama")), [(ids, SOURCE, ANSWER)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama in the working directory."""
    monkeypatch.chdir(tmp_path)
    tiny("llama", vocab_size=256).save_pretrained("llama")
    return tmp_path


INJECT = ("hf", "inject", "llama", "--context-length", "16", "--out", "gated")


def test_floors_of_a_file_are_put_in(here: Path) -> None:
    floors = [[4.0, 4.0, 0.0, 0.0], [8.0, 8.0, 4.0, 4.0]]
    Path("floors.json").write_text(json.dumps({"gate_floor": floors}))
    assert gape_exits(*INJECT, "--floors", "floors.json") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("gated")
    assert [list(layer.self_attn.gape.gate_floor) for layer in model.model.layers] == floors


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
