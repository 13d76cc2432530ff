"""Make the page of a book that the front page of the documentation shows: python benchmarks/book_page.py BOOKS PAGE.

BOOKS has a book a line ({"id": …, "text": …}), PAGE is text of a book that is not among them. A small model with gates
learns on windows of 128 tokens, with a tokenizer of its own, and reads the page at twice that length. The view goes to
docs/site/book.gz. Minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gape.experiments.exploring import explored
from gape.utils import files

OUT = Path(__file__).parents[1] / "docs" / "site" / "book.gz"
VOCABULARY, LENGTH, STEPS = 2048, 128, 800
#: Characters of the books that the tokenizer is made from, and that the model reads, about.
MOST = 12_000_000
SETTINGS = [
    f"model.vocab_size={VOCABULARY}", "model.n_layer=4", "model.n_head=4", "model.n_embd=128",
    "model.position='p-rope+gape'", "model.options.gate_floor=8.0", f"task.length={LENGTH}", "batch_size=16",
    "train.accumulation=1", f"train.max_steps={STEPS}", "train.warmup_steps=100", "train.learning_rate=2e-3",
    "train.validate_every=250", "train.checkpoint_every=500", "evaluation.contexts=[128,256]", "evaluation.align=0",
    "analysis.routing_every=0",
]  # fmt: skip


def tokenizer(text: str, folder: Path) -> None:
    """Write a byte-level BPE of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(text.split("\n\n"), trainer)
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))


def command(*arguments: object) -> None:
    """Run a command of gape."""
    subprocess.run([sys.executable, "-m", "gape", *map(str, arguments)], check=True)


def main(
    books: Annotated[Path, typer.Argument(help="Books, one a line, also compressed.")],
    page: Annotated[Path, typer.Argument(help="The text to show.")],
    title: Annotated[str, typer.Option(help="Of the view.")] = "A page of a book",
) -> None:
    """Train the model and write the view."""
    with tempfile.TemporaryDirectory() as name:
        folder, texts, size = Path(name), [], 0
        with files.open_decompressed(books) as lines:
            for line in lines:
                texts.append(json.loads(line)["text"])
                size += len(texts[-1])
                if size > MOST:
                    break
        # The last one is held out, to see when the model has learned.
        for kind, part in (("train", texts[:-1]), ("heldout", texts[-1:])):
            rows = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(part)]
            (folder / f"{kind}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        tokenizer("\n\n".join(texts)[:MOST], folder / "vocabulary")
        command(
            "data", "prepare", folder / "train.jsonl", "--heldout", folder / "heldout.jsonl", "--tokenizer",
            folder / "vocabulary", "--out", folder / "corpus",
        )  # fmt: skip
        command("lm", "train", "lm/toy", f"data={folder / 'corpus'}", *SETTINGS, "--out", folder / "runs")
        (run,) = {path.parent for path in (folder / "runs").rglob("summary.json")}
        exploration = explored(run, text=page, tokenizer=str(folder / "vocabulary"), tokens=2 * LENGTH, device="cpu")
    view = exploration.view
    view.header |= {"title": title, "model": view.header["model"] | {"name": title}}
    view.save(OUT)
    print(f"{OUT.name}: {files.size(OUT.stat().st_size)}")


if __name__ == "__main__":
    typer.run(main)
