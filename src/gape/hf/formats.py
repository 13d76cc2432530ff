"""Models of other formats as `transformers` has them: GGUF files of llama.cpp, and model.bin of llama2.c."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.hf.families import TRANSFORMERS_4
from gape.utils.validation import invalid_argument

MAGIC = b"GGUF"
#: model.bin of llama2.c begins with these numbers.
_HEADER = struct.Struct("<7i")
#: The first ids of every tokenizer, which tokenizer.bin writes in other words; llama2.c knows the bytes by number too.
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIXED = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
_LAYERS = "model.layers."
#: The most bytes of a piece.
_LONGEST = 4096


def read_gguf(path: str | Path) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a GGUF file.

    Returns:
        The model in float32 and its tokenizer.

    Raises:
        ValueError: another format, a file that was cut short or that lacks tensors, an architecture, a rotation or a
            type of numbers that transformers does not read, or transformers 4, which makes another tokenizer of the
            file than the model was trained with.
        ImportError: the package gguf is missing.
    """
    file = Path(path)
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise invalid_argument("path", str(path), "a GGUF file")
    if TRANSFORMERS_4:
        raise ValueError("path: GGUF files are read with transformers 5: pip install 'transformers>=5'")
    try:
        import gguf  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'gape[gguf]'") from error
    try:
        model, tokenizer = _read_gguf(file)
    # The errors that a damaged file leads to have no class of their own.
    except Exception as error:
        raise ValueError(f"path: {path} cannot be read: {error}") from error
    # It counts as quantised and could not be saved, though its weights are plain numbers by now.
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
    model.is_quantized = False
    del model.config.quantization_config
    return model.eval(), tokenizer


def _read_gguf(file: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    elements = _gguf_elements(file)
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(file.parent, **options)
    if config.num_hidden_layers > len(elements):
        raise ValueError(f"got {config.num_hidden_layers} layers in {len(elements)} tensors")
    with torch.device("meta"):
        needed = AutoModelForCausalLM.from_config(config).num_parameters()
    if needed > sum(elements.values()):
        raise ValueError(f"its settings ask for {needed:,} numbers, it has {sum(elements.values()):,}")
    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, output_loading_info=True, **options
    )
    if info["missing_keys"]:
        raise ValueError(f"{sorted(info['missing_keys'])[0]} is missing")
    return model, AutoTokenizer.from_pretrained(file.parent, **options)


def _gguf_elements(file: Path) -> dict[str, int]:
    """How many numbers each tensor of a GGUF file has.

    A file is refused that ends before what it announces, or that has a rotation which transformers does not read from
    such files: the model would be another one.
    """
    from gguf import GGUFReader  # noqa: PLC0415

    class Reader(GGUFReader):
        # gguf's own reads nothing behind the end of a file, without an error: where an array announces more numbers
        # than there are, its list grows until memory ends.
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"it ends after {len(self.data):,} bytes, before values that it announces")
            return super()._get(offset, dtype, count, *more, **options)

    reader = Reader(file)
    for name, field in reader.fields.items():
        scaling = bytes(field.parts[field.data[0]]) if name.endswith(".rope.scaling.type") else b"none"
        if scaling != b"none":
            raise ValueError(f"its rotation is scaled ({scaling.decode()}), which transformers does not read from GGUF")
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):
            raise ValueError(f"{tensor.name} has rotary frequencies, which transformers does not read from GGUF files")
    return {tensor.name: tensor.n_elements for tensor in reader.tensors}


class Sizes(NamedTuple):
    """The seven numbers at the start of model.bin; a negative vocabulary has an output layer of its own."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int

    @property
    def shared(self) -> bool:
        """Whether the embedding is also the output layer."""
        return self.vocabulary > 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in their order, by their names in a `LlamaForCausalLM`; those of layers have one more axis."""
        head, words = self.width // self.heads, abs(self.vocabulary)
        keys = head * self.kv_heads
        layers = {
            "input_layernorm": (self.width,), "self_attn.q_proj": (self.width, self.width),
            "self_attn.k_proj": (keys, self.width), "self_attn.v_proj": (keys, self.width),
            "self_attn.o_proj": (self.width, self.width), "post_attention_layernorm": (self.width,),
            "mlp.gate_proj": (self.hidden, self.width), "mlp.down_proj": (self.width, self.hidden),
            "mlp.up_proj": (self.hidden, self.width),
        }  # fmt: skip
        return {
            "model.embed_tokens": (words, self.width),
            **{f"{_LAYERS}{name}": (self.layers, *shape) for name, shape in layers.items()},
            "model.norm": (self.width,),
            # Two tables of cosines and sines, which are not used.
            "angles": (2, self.length, head // 2),
            **({} if self.shared else {"lm_head": (words, self.width)}),
        }


def read_llama2c(path: str | Path, tokenizer: str | Path | None = None) -> tuple[Any, Any]:
    """A model of llama2.c as a Llama of transformers.

    Args:
        path: model.bin, or a file in which tokenizer.bin follows it.
        tokenizer: tokenizer.bin, where it is a file of its own.

    Returns:
        The model, a `LlamaForCausalLM` in float32, and its tokenizer, None where there is none.

    Raises:
        ValueError: a file of another format, or one that was cut short.
    """
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    data = Path(path).read_bytes()
    sizes = _sizes(data, path)
    state, end = _state(data, sizes)
    model = LlamaForCausalLM(_config(sizes))
    model.load_state_dict(state)
    rest = data[end:] if tokenizer is None else Path(tokenizer).read_bytes()
    if not rest:
        return model.eval(), None
    return model.eval(), _tokenizer(_pieces(rest, abs(sizes.vocabulary), tokenizer or path), sizes.length)


def _sizes(data: bytes, path: str | Path) -> Sizes:
    if len(data) < _HEADER.size:
        raise invalid_argument("path", str(path), "model.bin of llama2.c, which begins with seven numbers")
    sizes = Sizes(*_HEADER.unpack_from(data))
    positive = all(value > 0 for value in (*sizes[:5], sizes.length)) and sizes.vocabulary != 0
    # Coordinates of a head rotate in pairs.
    if not positive or sizes.width % (2 * sizes.heads) or sizes.heads % sizes.kv_heads:
        expected = "model.bin of llama2.c (version 0, float32); its first numbers are no sizes"
        raise invalid_argument("path", str(path), expected)
    needed = _HEADER.size + 4 * sum(math.prod(shape) for shape in sizes.shapes().values())
    if len(data) < needed:
        expected = f"model.bin of llama2.c, {needed:,} bytes by its sizes"
        raise invalid_argument("path", f"{path} of {len(data):,} bytes", expected)
    return sizes


def _state(data: bytes, sizes: Sizes) -> tuple[dict[str, Tensor], int]:
    """The state of a `LlamaForCausalLM`, and the byte behind the last tensor."""
    at, state = _HEADER.size, dict[str, Tensor]()
    for name, shape in sizes.shapes().items():
        count = math.prod(shape)
        tensor = torch.from_numpy(np.frombuffer(data, "<f4", count, at).astype(np.float32)).view(shape)
        at += 4 * count
        if name.endswith(("q_proj", "k_proj")):
            # llama2.c rotates neighbours, transformers a coordinate and the one half a head further.
            pairs = tensor.view(sizes.layers, -1, sizes.width // sizes.heads // 2, 2, sizes.width)
            tensor = pairs.transpose(2, 3).reshape(shape)
        if name.startswith(_LAYERS):
            rest = name.removeprefix(_LAYERS)
            state |= {f"{_LAYERS}{layer}.{rest}.weight": each for layer, each in enumerate(tensor)}
        else:
            state[f"{name}.weight"] = tensor
    del state["angles.weight"]
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state, at


def _config(sizes: Sizes) -> Any:
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig(
        vocab_size=abs(sizes.vocabulary), hidden_size=sizes.width, intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.length, rms_norm_eps=1e-5, tie_word_embeddings=sizes.shared, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def _pieces(data: bytes, count: int, path: str | Path) -> list[tuple[str, float]]:
    """The text of each id of tokenizer.bin, with ▁ for a space, and its score."""
    if count < len(_FIXED):
        raise invalid_argument("path", f"{count} pieces", f"at least {len(_FIXED)}: special ones and bytes come first")
    at, pieces = 4, []
    try:
        longest = struct.unpack_from("<i", data)[0]
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, at)
            (text,) = struct.unpack_from(f"{_length(size, longest)}s", data, at + 8)
            pieces.append((text.decode().replace(" ", "▁"), float(score)))
            at += 8 + size
    except (struct.error, ValueError) as error:
        expected = f"tokenizer.bin of llama2.c with {count:,} pieces ({error})"
        raise invalid_argument("tokenizer", str(path), expected) from error
    return [*((name, 0.0) for name in _FIXED), *pieces[len(_FIXED) :]]


def _length(size: int, longest: int) -> int:
    """The length of a piece in bytes, from 0 to that of the longest, with which tokenizer.bin begins."""
    # Every way to cut a piece in two is tried later, which takes too long for long ones.
    if not 0 <= size <= min(longest, _LONGEST):
        raise ValueError(f"a piece of {size} bytes where the longest has {longest}, and none more than {_LONGEST}")
    return size


def _tokenizer(pieces: Sequence[tuple[str, float]], length: int) -> Any:
    """A byte-pair tokenizer of pieces, as transformers makes it for Llama."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
    merges = _merges(pieces, vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    inner.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def _merges(pieces: Sequence[tuple[str, float]], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the pieces of the highest scores first."""
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(pieces[len(_FIXED) :], key=lambda scored: -scored[1]):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges
