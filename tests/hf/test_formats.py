"""Models in other formats, from tiny files written here: what is read computes what the format means."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import gape.hf
from gape.hf.families import TRANSFORMERS_4
from tests.cli.test_commands import gape_exits
from tests.hf.tiny import tiny, tokens

SIZES = (16, 24, 2, 4, 2, 300, 32)
#: Pieces after the special ones and the bytes, better ones first; more fill the vocabulary.
PIECES = [" t", "he", " the", "in", "cat", " ", *"abcdefghijklmnopqrstuvwxyz.", "at", "ca"]


def llama2c(path: Path, vocabulary: int = 300) -> dict[str, np.ndarray]:
    """Write a model.bin of random weights; the weights by name."""
    width, hidden, layers, heads, kv_heads, _, length = SIZES
    keys, words = width // heads * kv_heads, abs(vocabulary)
    shapes = {
        "embedding": (words, width), "norm": (layers, width), "q": (layers, width, width), "k": (layers, keys, width),
        "v": (layers, keys, width), "o": (layers, width, width), "mlp_norm": (layers, width),
        "w1": (layers, hidden, width), "w2": (layers, width, hidden), "w3": (layers, hidden, width),
        "last": (width,), "cos": (length, width // heads // 2), "sin": (length, width // heads // 2),
    } | ({} if vocabulary > 0 else {"head": (words, width)})  # fmt: skip
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=shape).astype("<f4") for name, shape in shapes.items()}
    header = struct.pack("<7i", *SIZES[:5], vocabulary, length)
    path.write_bytes(header + b"".join(weight.tobytes() for weight in weights.values()))
    return weights


def forward(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """llama2.c's run.c in a few lines: logits (tokens, words)."""
    width, _, layers, heads, kv_heads, _, _ = SIZES
    head = width // heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def rotate(x):
        # (tokens, heads, head): neighbours turn together.
        angle = np.arange(len(x))[:, None] / 10000 ** (np.arange(0, head, 2) / head)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = w["embedding"].astype(np.float64)[ids]
    for layer in range(layers):
        y = norm(x, w["norm"][layer])
        q, k, v = ((y @ w[part][layer].T).reshape(len(ids), -1, head) for part in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(part, heads // kv_heads, 1) for part in (k, v))
        logits = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(head)
        logits += np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("hij,jhd->ihd", weight / weight.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(ids), -1) @ w["o"][layer].T
        y = norm(x, w["mlp_norm"][layer])
        up, gate = y @ w["w3"][layer].T, y @ w["w1"][layer].T
        x = x + (up * gate / (1 + np.exp(-gate))) @ w["w2"][layer].T
    return norm(x, w["last"]) @ w.get("head", w["embedding"]).T


def tokenizer_bin(path: Path) -> dict[str, float]:
    """Write a tokenizer.bin of PIECES; scores by piece."""
    names = ["<unk>", "\n<s>\n", "\n</s>\n", *(chr(byte) for byte in range(256)), *PIECES]
    names += [f"filler{number}" for number in range(SIZES[5] - len(names))]
    scores = {name: -float(number) for number, name in enumerate(names)}
    parts = [struct.pack("<fi", scores[name], len(name.encode())) + name.encode() for name in names]
    path.write_bytes(struct.pack("<i", max(map(len, names))) + b"".join(parts))
    return {name: -float(number) for number, name in enumerate(PIECES)}


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """llama2.c's encoding of known letters: of all neighbours the pair with the best piece, again and again."""
    parts = list(f" {text}")
    while True:
        pairs = [(scores.get(a + b, -np.inf), -at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
        best, place = max(pairs, default=(-np.inf, 0))
        if best == -np.inf:
            return parts
        parts[-place : -place + 2] = [parts[-place] + parts[-place + 1]]


@pytest.mark.parametrize("vocabulary", [300, -300])
def test_a_model_of_llama2c_computes_what_run_c_does(tmp_path: Path, vocabulary: int) -> None:
    weights = llama2c(tmp_path / "model.bin", vocabulary)
    model, tokenizer = gape.hf.read_llama2c(tmp_path / "model.bin")
    assert tokenizer is None
    ids = [1, 17, 260, 299, 42, 5, 5]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
        np.testing.assert_allclose(logits, forward(weights, ids), atol=1e-3, rtol=1e-4)
        gape.hf.inject(model, context_length=32)
        np.testing.assert_allclose(model(torch.tensor([ids])).logits[0].double().numpy(), logits, atol=1e-4)


def test_a_tokenizer_of_llama2c_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    llama2c(tmp_path / "model.bin")
    scores = tokenizer_bin(tmp_path / "tokenizer.bin")
    _, tokenizer = gape.hf.read_llama2c(tmp_path / "model.bin", tmp_path / "tokenizer.bin")
    for text in ("the cat in the hat.", "cathe  tin", "he"):
        ids = tokenizer(text)["input_ids"]
        assert [tokenizer.convert_ids_to_tokens(i).replace("▁", " ") for i in ids] == ["<s>", *merged(text, scores)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    snow = tokenizer("☃\n")["input_ids"]
    assert [i - 3 for i in snow[2:]] == list("☃\n".encode())
    assert tokenizer.decode(snow, skip_special_tokens=True) == "☃\n"
    assert len(tokenizer) == 300


def test_import_reads_weights_and_tokenizer_from_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama2c(tmp_path / "model.bin")
    tokenizer_bin(tmp_path / "tokenizer.bin")
    both = tmp_path / "llama2.data"
    both.write_bytes((tmp_path / "model.bin").read_bytes() + (tmp_path / "tokenizer.bin").read_bytes())
    assert gape_exits("hf", "import", str(both), "--out", str(tmp_path / "out")) == 0
    assert "context 32" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("the cat", return_tensors="pt", return_token_type_ids=False)
    longest = ids["input_ids"].size(1) + 3
    assert model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0).size(1) <= longest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "seven numbers"),
        (b"no model at all, but long enough", "no sizes"),
        (struct.pack("<7i", *SIZES) + b"\0" * 99, "bytes by its sizes"),
        # Sizes whose product is 0 in 64 bits.
        (struct.pack("<7i", 2**17, 2**30, 2**30, 2, 2, 2**30, 2**30) + b"\0" * 99, "bytes by its sizes"),
        (b"GGUF and nothing more", "transformers 5" if TRANSFORMERS_4 else "GGUF and nothing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str) -> None:
    (tmp_path / said.replace(" ", "-")).write_bytes(content)
    assert gape_exits("hf", "import", str(tmp_path / said.replace(" ", "-")), "--out", str(tmp_path / "out")) == 2
    assert said.replace(" ", "-") in capsys.readouterr().err.replace(" ", "-")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:8] + b"\xff" * 4 + data[12:]])
def test_a_tokenizer_that_was_cut_short_or_changed_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    llama2c(tmp_path / "model.bin")
    tokenizer_bin(tmp_path / "tokenizer.bin")
    (tmp_path / "changed.bin").write_bytes(change((tmp_path / "tokenizer.bin").read_bytes()))
    with pytest.raises(ValueError, match=r"tokenizer: got .*changed.bin"):
        gape.hf.read_llama2c(tmp_path / "model.bin", tmp_path / "changed.bin")


def gguf_file(path: Path, model: torch.nn.Module) -> None:
    """Write a tiny Llama as llama.cpp's converter does."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(97 + n) for n in range(26)]
    writer.add_token_list(["<|endoftext|>", *(letter * 2 for letter in letters), *letters])
    writer.add_token_types([3] + [1] * (config.vocab_size - 1))
    writer.add_token_merges([f"{letter} {letter}" for letter in letters])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up",
    }  # fmt: skip
    for name, own in model.state_dict().items():
        tensor = own.numpy()
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        bare = (inner if layer.isdigit() else name).removesuffix(".weight")
        known = (f"blk.{layer}." if layer.isdigit() else "") + names[bare]
        if known.endswith(("attn_q", "attn_k")):
            # llama.cpp rotates neighbours.
            heads = tensor.shape[0] // config.head_dim
            tensor = tensor.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{known}.weight", np.ascontiguousarray(tensor))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()


@pytest.mark.skipif(TRANSFORMERS_4, reason="GGUF files are read with transformers 5")
def test_a_gguf_file_gives_the_model_that_was_written_and_takes_gates(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, ids = tiny("llama", vocab_size=53), tokens() % 53
    gguf_file(tmp_path / "model.gguf", model)
    assert gape_exits("hf", "import", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out")) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(read(ids).logits, expected, atol=1e-5, rtol=1e-4)
        gape.hf.inject(read, context_length=64)
        torch.testing.assert_close(read(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([1, 27, 28]) == "aaab"


def put(data: bytes, behind: bytes, skip: int, new: bytes) -> bytes:
    """Other bytes, so many behind a text in a file."""
    at = data.index(behind) + len(behind) + skip
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.skipif(TRANSFORMERS_4, reason="GGUF files are read with transformers 5")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:600], "it ends"),
        (lambda data: data[:-4000], "it ends"),
        # Counts of texts, of numbers, of layers and of a layer's width without anything behind them.
        (lambda data: put(data, b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**60)), "it ends"),
        (lambda data: put(data, b"tokenizer.ggml.token_type", 8, struct.pack("<Q", 2**60)), "it ends"),
        (lambda data: put(data, b"llama.block_count", 4, struct.pack("<I", 2**30)), "layers in"),
        (lambda data: put(data, b"llama.feed_forward_length", 4, struct.pack("<I", 2**30)), "numbers, it has"),
        (lambda data: data.replace(b"blk.1.ffn_up", b"blk.1.ffn_xp"), "up_proj.weight is missing"),
        (lambda data: data.replace(b"blk.1.ffn_norm", b"rope_factors_w"), "rotary frequencies"),
        # 9 is Q8_1, which nobody stores weights in.
        (lambda data: put(data, b"blk.0.ffn_up.weight", 20, struct.pack("<I", 9)), "Q8_1"),
    ],
)
def test_a_gguf_file_that_was_damaged_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], said: str) -> None:
    pytest.importorskip("gguf")
    gguf_file(tmp_path / "whole.gguf", tiny("llama", vocab_size=53))
    (tmp_path / "model.gguf").write_bytes(change((tmp_path / "whole.gguf").read_bytes()))
    with pytest.raises(ValueError, match=rf"model.gguf cannot be read: .*({said})"):
        gape.hf.read_gguf(tmp_path / "model.gguf")
