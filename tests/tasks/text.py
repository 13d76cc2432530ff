"""A corpus of bytes with documents of known lengths, and models small enough to read it in no time."""

from __future__ import annotations

from pathlib import Path

import torch

from gape.data import Corpus
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from tests.data.books import make, write_lines

VOCAB = 257
#: Tokens of the held-out documents, the end of text among them.
LENGTHS = (40, 97, 130, 200)


def passage(length: int, seed: int) -> str:
    """So many letters that a model can learn something of: few different ones, in runs."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(5, (length,), generator=generator).cumsum(0) % 7
    return "".join("abc def"[i] for i in letters.tolist())


def corpus(
    directory: Path, *, lengths: tuple[int, ...] = LENGTHS, train: int = 12, train_length: int = 300, **settings: object
) -> Corpus:
    """Training documents of 300 tokens and held-out ones of `lengths`."""
    directory.mkdir(parents=True, exist_ok=True)
    read = [{"id": f"train-{i}", "text": passage(train_length - 1, i)} for i in range(train)]
    heldout_rows = [{"id": f"held-{i}", "text": passage(n - 1, 100 + i)} for i, n in enumerate(lengths)]
    heldout = write_lines(directory / "held.jsonl", heldout_rows)
    training = write_lines(directory / "train.jsonl", read)
    return make(directory / "corpus", training, heldout=(str(heldout),), **settings)


def gpt(position: str = "p-rope+gape", dtype: torch.dtype = torch.float64, **options: object) -> GPT:
    """Two layers with weights that are not small, so that contexts matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16}
    model = GPT(GPTConfig(position=position, **sizes, **options)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
