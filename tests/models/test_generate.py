"""Generation: the cache, the padding and the draws change nothing that they should not."""

from __future__ import annotations

import pytest
import torch

import gape
from gape.models.generate import evaluating
from tests.models.tiny import VOCAB, interrupt, model, tokens
from tests.wrong import each_wrong

#: One of each way to keep keys; all schemes stand in `test_decode.py`.
KINDS = ("rope", "p-rope+gape", "alibi", "fox", "swan")


@torch.no_grad()
def greedy(gpt: gape.GPT, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Without a cache: every token from a whole pass."""
    for _ in range(new):
        ids = torch.cat([ids, gpt(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("position", KINDS)
def test_greedy_with_a_cache_equals_without(position: str) -> None:
    gpt, ids = model(position), tokens(2, 5)
    assert (gpt.generate(ids, 15, temperature=0) == greedy(gpt, ids, 15)).all()


@pytest.mark.parametrize("position", KINDS)
def test_left_padded_prompts_equal_singles(position: str) -> None:
    gpt, prompts = model(position), [tokens(1, n, seed=n) for n in (12, 1, 7)]
    ids = torch.cat([torch.nn.functional.pad(p, (12 - p.size(1), 0), value=-1) for p in prompts])
    padded = gpt.generate(ids, 8, temperature=0, attention_mask=(ids >= 0).long())
    for row, prompt in zip(padded, prompts, strict=True):
        assert (row[12 - prompt.size(1) :] == gpt.generate(prompt, 8, temperature=0)[0]).all()
    assert (gpt.generate(ids, 8, temperature=0, pad_id=-1) == padded).all()


def test_only_leading_pads_are_padding() -> None:
    """A prompt may hold the id that pads."""
    gpt = model()
    padded = gpt.generate(torch.tensor([[3, 3, 5, 3, 6]]), 8, temperature=0, pad_id=3)
    assert (padded[:, 2:] == gpt.generate(torch.tensor([[5, 3, 6]]), 8, temperature=0)).all()


def test_a_seed_makes_a_call_its_own() -> None:
    gpt, ids = model(), tokens(3, 4)
    torch.manual_seed(1)
    first, state = gpt.generate(ids, 30, seed=7), torch.get_rng_state()
    torch.manual_seed(1)
    assert (torch.get_rng_state() == state).all()
    torch.manual_seed(2)
    assert (gpt.generate(ids, 30, seed=7) == first).all()
    assert (gpt.generate(ids, 30, seed=8) != first).any()
    assert (gpt.generate(ids, 30) != gpt.generate(ids, 30)).any()


def drawn(logits: list[float], monkeypatch: pytest.MonkeyPatch, **options: object) -> list[float]:
    """Shares of the tokens that are drawn from these logits."""
    gpt = model("rope", vocab_size=len(logits), n_layer=1, n_head=1, n_kv_head=1, n_embd=4)
    given = torch.tensor(logits)
    monkeypatch.setattr(gpt, "logits", lambda x: given.expand(*x.shape[:2], -1))
    ids = gpt.generate(torch.zeros(20000, 1, dtype=torch.long), 1, seed=0, **options)[:, 1]
    return (ids.bincount(minlength=len(logits)) / len(ids)).tolist()


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.7246, 0.1812, 0.0652, 0.029]),
        ({"temperature": 1e-39}, [1, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 4}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.74}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5556, 0.2778, 0.1667, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.15, 0.1]),
    ],
)
def test_tokens_come_with_their_probability(
    options: dict[str, float], shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()
    assert drawn(logits, monkeypatch, **options) == pytest.approx(shares, abs=0.015)


def test_of_equal_logits_no_more_than_k_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(drawn([0.0] * 4, monkeypatch, top_k=1)) == [0, 0, 0, 1]


def test_rows_end_at_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 after two tokens, row 1 after three; the call with the last of them."""
    gpt, step = model(), iter([[1, 1], [9, 2], [3, 9], [4, 4]])

    def logits(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(step)), VOCAB).double()[:, None]

    monkeypatch.setattr(gpt, "logits", logits)
    out = gpt.generate(tokens(2, 1), 4, temperature=0, eos_id=9, pad_id=-1)
    assert out[:, 1:].tolist() == [[1, 9, -1], [1, 2, 9]]


def test_modes_come_back_after_an_interrupt() -> None:
    gpt, ids = model(dropout=0.5).train(), tokens(1, 5)
    gpt.layers[0].eval()
    modes = [module.training for module in gpt.modules()]
    stop = gpt.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpt.generate(ids, 5)
    stop.remove()
    assert [module.training for module in gpt.modules()] == modes
    assert (gpt.generate(ids, 5, temperature=0) == greedy(gpt.eval(), ids, 5)).all()


def test_a_model_is_in_eval_mode_until_the_last_of_overlapping_contexts_ends() -> None:
    gpt = model().train()
    first, second = evaluating(gpt), evaluating(gpt)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in gpt.modules())
    second.__exit__(None, None, None)
    assert all(module.training for module in gpt.modules())


def test_nothing_to_add_is_the_prompt() -> None:
    ids = tokens(2, 5)
    assert model().generate(ids, 0) is ids


@each_wrong(
    ids=([[1]], torch.tensor([1]), torch.tensor([[VOCAB]]), torch.tensor([[-1]]), torch.zeros(1, 0).long()),
    max_new_tokens=(-1, 1.0),
    temperature=(-0.1, float("nan"), "hot"),
    top_k=(0, VOCAB + 1),
    top_p=(0.0, 1.1),
    seed=(-1, 2**70),
    eos_id=(VOCAB,),
    pad_id=(1.0,),
    attention_mask=(torch.ones(1, 5), *(torch.tensor([mask]) for mask in ([0] * 4, [0, 1, 0, 1], [1, 1, 1, 0]))),
)
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    given = {"ids": tokens(1, 4), "max_new_tokens": 1} | {argument: value}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        model().generate(**given)


def test_a_row_of_pads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^ids: got a row of pads"):
        model().generate(torch.tensor([[1, 2], [0, 0]]), 1, pad_id=0)
