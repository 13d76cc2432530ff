"""What models make of prompts: a plain computation's numbers, whatever the batch and the chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gape.data import load_tokenizer
from gape.experiments.open_model import transformers_reader
from gape.tasks.ruler import evaluation
from gape.tasks.ruler.readers import GPTReader, Ids, TransformersReader
from gape.tasks.ruler.sources import Sample
from tests.tasks import text
from tests.tasks.ruler import small


def rows(*lengths: int, vocabulary: int = 256, seed: int = 0) -> list[Ids]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, vocabulary, size=length) for length in lengths]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return small.random_gpt2(tmp_path_factory.mktemp("gpt2"))


def ours(position: str = "p-rope+gape", chunk: int = 16384) -> GPTReader:
    tokenizer = load_tokenizer("bytes")
    # Models of random weights are fond of it.
    tokenizer.end_of_text = None
    return GPTReader(text.gpt(position), tokenizer, chunk=chunk)


PROMPTS, ANSWERS = rows(40, 61, 23), rows(5, 2, 9, seed=1)


@pytest.mark.parametrize(("position", "chunk"), [("p-rope+gape", 16), ("alibi", 16384), ("fox", 16)])
def test_losses_are_those_of_a_plain_forward_pass(position: str, chunk: int) -> None:
    reader = ours(position, chunk)
    actual = reader.losses(PROMPTS, ANSWERS)
    for prompt, answer, losses in zip(PROMPTS, ANSWERS, actual, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, answer]))[None]
        logs = reader.model(ids).logits[0].log_softmax(-1).detach()
        plain = [-float(logs[len(prompt) + n - 1, token]) for n, token in enumerate(answer)]
        assert losses == pytest.approx(plain, abs=1e-8)


@pytest.mark.parametrize(("position", "chunk"), [("p-rope+gape", 16), ("alibi", 16384), ("fox", 16)])
def test_answers_do_not_depend_on_companions(position: str, chunk: int) -> None:
    """Nor on chunks: each is what the model generates by itself."""
    reader = ours(position, chunk)
    for prompt, actual in zip(PROMPTS, reader.complete(PROMPTS, 7), strict=True):
        alone = reader.model.generate(torch.from_numpy(prompt)[None], 7, temperature=0)
        assert actual == alone[0, len(prompt) :].tolist()


def test_an_end_of_text_ends_an_answer() -> None:
    reader = ours()
    (first, *_) = reader.complete(PROMPTS[:1], 4)[0]
    reader.tokenizer.end_of_text = first
    assert reader.complete(PROMPTS[:1], 4) == [[]]


def plain(model: torch.nn.Module, prompt: Ids, answer: Ids) -> float:
    """NLL of an answer as anyone computes it with `transformers`."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    labels = ids.clone()
    labels[0, : len(prompt)] = -100
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels)
    return float(out.loss)


@pytest.mark.parametrize("chunk", [16384, 16])
def test_a_model_of_transformers_has_its_own_loss(gpt2: Path, chunk: int) -> None:
    reader = transformers_reader(str(gpt2), chunk=chunk)
    for prompt, answer, losses in zip(PROMPTS, ANSWERS, reader.losses(PROMPTS, ANSWERS), strict=True):
        assert losses.mean() == pytest.approx(plain(reader.model, prompt, answer), abs=1e-4)


def test_a_model_of_transformers_generates_by_itself_what_it_does_in_company(gpt2: Path) -> None:
    reader = transformers_reader(str(gpt2))
    for prompt, actual in zip(PROMPTS, reader.complete(PROMPTS, 6), strict=True):
        ids = torch.from_numpy(prompt)[None]
        alone = reader.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected = alone[0, len(prompt) :].tolist()
        assert actual == expected[: [*expected, 0].index(0)]


def test_answers_are_greedy_whatever_a_model_comes_with(gpt2: Path, tmp_path: Path) -> None:
    reader = transformers_reader(str(gpt2))
    reader.model.generation_config.repetition_penalty = 5.0
    reader.model.save_pretrained(tmp_path)
    reader.tokenizer.save_pretrained(tmp_path)
    alone, other = (transformers_reader(str(path)).complete(PROMPTS[:1], 12) for path in (gpt2, tmp_path))
    assert other == alone


def test_another_chat_is_another_tokenizer(gpt2: Path) -> None:
    """Prompts that models share are shared by its hash."""
    reader = transformers_reader(str(gpt2))
    before = reader.identity()["tokenizer"]["sha256"]
    assert transformers_reader(str(gpt2)).identity()["tokenizer"]["sha256"] == before
    reader.tokenizer.chat_template = "{{ messages[0].content }}"
    assert reader.identity()["tokenizer"]["sha256"] != before


def test_what_transformers_cannot_load_is_named(tmp_path: Path, gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer: that of .* cannot be loaded, are all its files there"):
        transformers_reader(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((gpt2 / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((gpt2 / "tokenizer_config.json").read_bytes())
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model: got .*, expected a run or a model of transformers"):
        transformers_reader(str(tmp_path))


def sample(**fields: object) -> Sample:
    values = {"task": "vt", "length": 256, "input": "The text. Q?", "prefix": " It is: ", "outputs": ("AB", "CD"),
              "budget": 20, "source": "s", "number": 1}  # fmt: skip
    return Sample(**values | fields)  # type: ignore[arg-type]


def test_white_space_before_an_answer_is_the_answers() -> None:
    reader = ours()
    (item,) = evaluation.prepare(reader, [sample()])
    assert reader.decode(item.prompt.tolist()) == "The text. Q? It is:"
    assert reader.decode(item.answer.tolist()) == " AB CD"


def test_an_answer_has_the_tokens_it_has_behind_its_prompt(gpt2: Path) -> None:
    reader = transformers_reader(str(gpt2))
    (item,) = evaluation.prepare(reader, [sample()])
    whole = reader.encode("The text. Q? It is: AB CD")
    assert [*item.prompt, *item.answer] == whole


def test_a_chat_template_is_the_models_own(gpt2: Path) -> None:
    reader = transformers_reader(str(gpt2))
    with pytest.raises(ValueError, match="template: got 'chat'"):
        evaluation.prepare(reader, [sample()], template="chat")
    reader.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<bot>"
    assert evaluation.render(reader, sample(), "chat") == "<user>The text. Q?</><bot>It is:"
    # The end of a chat template is the model's, also where it is a line break and no prefix follows.
    reader.tokenizer.chat_template += "{{ '\\n' }}"
    (item,) = evaluation.prepare(reader, [sample(prefix="")], template="chat")
    assert reader.decode(item.prompt.tolist()) == "<user>The text. Q?</><bot>\n"
    assert reader.decode(item.answer.tolist()) == "AB CD"
    with pytest.raises(ValueError, match="this model knows no chat"):
        evaluation.prepare(ours(), [sample()], template="chat")


def test_samples_that_are_too_long_are_an_error() -> None:
    reader, samples = ours(), [sample(), sample(input="x" * 60, number=2)]
    with pytest.raises(ValueError, match=r"1 of 2 samples are longer than the 60 tokens .* needs 87 with its answer"):
        evaluation.prepare(reader, samples, max_length=60)
    assert len(evaluation.prepare(reader, samples, max_length=87)) == 2
    with pytest.raises(ValueError, match="template: got str 'bsae'"):
        evaluation.prepare(reader, samples, template="bsae")


def test_a_limit_comes_from_the_model(gpt2: Path) -> None:
    reader = transformers_reader(str(gpt2))
    assert isinstance(reader, TransformersReader)
    assert reader.limit == 512
    assert ours().limit is None
