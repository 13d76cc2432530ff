"""Small ingredients, tokenizers, samples and models for RULER's tests."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from gape.data import Tokenizer, load_tokenizer
from gape.tasks.ruler.ingredients import Ingredients

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru")


def sentences(count: int, seed: int) -> str:
    """Sentences of made-up words."""
    rng = Random(seed)

    def word() -> str:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(1, 4)))

    return " ".join(" ".join(word() for _ in range(rng.randrange(4, 12))).capitalize() + "." for _ in range(count))


def ingredients(folder: Path, documents: int = 700) -> Ingredients:
    """A haystack and questions, enough of them to fill 32,768 tokens."""
    (folder / "text.txt").write_text(sentences(300, 0), encoding="utf-8")
    paragraphs = [f"{sentences(8, number)} The prize of {number} went to Ruler{number}." for number in range(documents)]
    squad = [
        {"context": text, "qas": [{"question": f"Who got prize {n}?", "answers": [{"text": f"Ruler{n}"}]}]}
        for n, text in enumerate(paragraphs)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": squad}]}), encoding="utf-8")
    hotpotqa = [
        {
            "question": f"Did {n} and {n + 1} both get it?", "answer": "yes",
            "context": [[f"Title {m}", [paragraphs[m]]] for m in range(n, n + 4)],
            "supporting_facts": [[f"Title {n}", 0], [f"Title {n + 1}", 0]],
        }
        for n in range(0, documents - 4, 4)
    ]  # fmt: skip
    (folder / "hotpotqa.json").write_text(json.dumps(hotpotqa), encoding="utf-8")
    return Ingredients(folder / "text.txt", {name: folder / f"{name}.json" for name in ("squad", "hotpotqa")})


def small_bpe(folder: Path) -> Tokenizer:
    """A byte-level BPE of 500 tokens, trained here, in the form of GPT-2's files and of `transformers`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(
        [sentences(50, seed) + " The secret number of a name is 1234567." for seed in range(9)], trainer
    )
    folder.mkdir(parents=True, exist_ok=True)
    inner.model.save(str(folder))
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def write_samples(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def record(number: int = 0, task: str = "vt", length: int = 256, **more: Any) -> dict[str, Any]:
    """A sample as RULER writes it, of another length for every number."""
    return {
        "index": number, "input": f"Names: {sentences(2 + number, number)} Which?", "outputs": [f"N{number}A", "BB"],
        "length": 200, "max_seq_length": length, "answer_prefix": " They are", "task": task, "budget": 6,
    } | more  # fmt: skip


def random_gpt2(folder: Path, positions: int = 512) -> Path:
    """A folder with a GPT-2 of random weights and the small tokenizer, as a user has one."""
    import transformers

    small_bpe(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=500, n_positions=positions, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
