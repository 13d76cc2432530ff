"""Models of other formats as `transformers` has them: GGUF files of llama.cpp, and model.bin of llama2.c."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.hf.version import OLD
from gape.utils.validation import invalid_argument

MAGIC = b"GGUF"
#: Types of single values by their numbers, as struct writes them; 8 are strings, 9 arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: The least that an element of each type takes: lengths of strings are eight bytes.
_LEAST = {_STRING: 8, **{kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()}}


@dataclass(frozen=True)
class Header:
    """Settings by name (of arrays their length) and elements of the tensors by name."""

    settings: dict[str, Any]
    tensors: dict[str, int]

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(self.tensors.values())

    def refuse_rotation(self) -> None:
        """Refuse rotations that transformers does not read from such files: the model would be another one.

        Raises:
            ValueError: names what is not read.
        """
        kind = self.settings.get(f"{self.settings.get('general.architecture')}.rope.scaling.type", "none")
        if kind != "none":
            raise ValueError(f"its rotation is scaled ({kind}), which transformers does not read from GGUF files")
        for name in self.tensors:
            if name.startswith("rope_"):
                raise ValueError(f"{name} holds rotary frequencies, which transformers does not read from GGUF files")


def read_header(path: Path) -> Header:
    """The header of a GGUF file of version 2 or 3.

    Raises:
        ValueError: the file ends before what it announces, or has values of an unknown kind.
    """
    with path.open("rb") as file:
        source = _Source(file, path.stat().st_size)
        source.take(len(MAGIC))
        version = source.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3")
        tensors, fields = source.number("Q"), source.number("Q")
        settings = {}
        for _ in range(fields):
            name = source.text()
            settings[name] = source.value(source.number("I"))
        found = dict(source.tensor() for _ in range(tensors))
    return Header(settings, found)


class _Source:
    """A file of a known size, read from the front."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def left(self) -> int:
        return self._size - self._file.tell()

    def take(self, count: int) -> bytes:
        if count > self.left():
            raise ValueError(f"it ends after {self._size:,} bytes, where {count:,} more than it has were announced")
        return self._file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A setting: a number, a text, or the length of an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_known(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner != _STRING:
            self.take(count * struct.calcsize(f"<{_known(inner)}"))
            return count
        if count * _LEAST[inner] > self.left():
            raise ValueError(f"it ends before the {count:,} texts that it announces")
        for _ in range(count):
            self.text()
        return count

    def tensor(self) -> tuple[str, int]:
        """The name of a tensor and its elements, for which the file has to be long enough."""
        name, shape = self.text(), [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = self.number("I"), self.number("Q")
        elements = math.prod(shape)
        # Every type takes more than a bit for an element.
        if offset + elements // 8 > self._size:
            raise ValueError(f"{name}: {elements:,} elements of type {kind} from byte {offset:,} on do not fit into it")
        return name, elements


def _known(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a setting of kind {kind}, which is none of GGUF's")
    return _SCALARS[kind]


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
    if OLD:
        raise ValueError("path: GGUF files are read with transformers 5: pip install 'transformers>=5'")
    try:
        import gguf  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'gape[gguf]'") from error
    try:
        model, tokenizer = _read(file, read_header(file))
    # What a damaged file leads to has no class of its own.
    except Exception as error:
        raise ValueError(f"path: {path} cannot be read: {error}") from error
    # It counts as quantised and could not be saved, though its weights are plain numbers by now.
    for name in ("hf_quantizer", "quantization_method"):
        delattr(model, name)
    model.is_quantized = False
    del model.config.quantization_config
    return model.eval(), tokenizer


def _read(file: Path, header: Header) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    header.refuse_rotation()
    told: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(file.parent, **told)
    if config.num_hidden_layers > len(header.tensors):
        raise ValueError(f"got {config.num_hidden_layers} layers in {len(header.tensors)} tensors")
    with torch.device("meta"):
        sizes = AutoModelForCausalLM.from_config(config)
    if sizes.num_parameters() > header.elements:
        raise ValueError(f"its settings ask for {sizes.num_parameters():,} numbers, it has {header.elements:,}")
    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, output_loading_info=True, **told
    )
    if info["missing_keys"]:
        raise ValueError(f"{sorted(info['missing_keys'])[0]} is missing")
    return model, AutoTokenizer.from_pretrained(file.parent, **told)


_HEADER = struct.Struct("<7i")
#: The first ids of every tokenizer, which tokenizer.bin writes in other words; llama2.c knows the bytes by number too.
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIXED = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
#: Bytes that no piece exceeds.
_LONGEST = 4096


class Sizes(NamedTuple):
    """What the seven numbers say; a negative vocabulary has an output layer of its own."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int

    @property
    def shared(self) -> bool:
        """Whether the embedding is the output layer."""
        return self.vocabulary > 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in their order."""
        head, words = self.width // self.heads, abs(self.vocabulary)
        own, keys, inner = (self.layers, self.width, self.width), head * self.kv_heads, (self.layers, self.hidden)
        shapes = {
            "embedding": (words, self.width), "norm": (self.layers, self.width), "q": own,
            "k": (self.layers, keys, self.width), "v": (self.layers, keys, self.width), "o": own,
            "mlp_norm": (self.layers, self.width), "gate": (*inner, self.width),
            "down": (self.layers, self.width, self.hidden), "up": (*inner, self.width), "last_norm": (self.width,),
            # Two tables of cosines and sines, which nobody needs.
            "angles": (2, self.length, head // 2),
        }  # fmt: skip
        return shapes if self.shared else {**shapes, "head": (words, self.width)}


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
    tensors, end = _tensors(data, sizes)
    model = LlamaForCausalLM(_config(sizes))
    model.load_state_dict(_named(tensors, sizes))
    rest = data[end:] if tokenizer is None else Path(tokenizer).read_bytes()
    if not rest:
        return model.eval(), None
    return model.eval(), _tokenizer(_pieces(rest, abs(sizes.vocabulary), tokenizer or path), sizes.length)


def _sizes(data: bytes, path: str | Path) -> Sizes:
    if len(data) < _HEADER.size:
        raise invalid_argument("path", str(path), "model.bin of llama2.c, which begins with seven numbers")
    sizes = Sizes(*_HEADER.unpack_from(data))
    sound = all(value > 0 for value in (*sizes[:5], sizes.length)) and sizes.vocabulary != 0
    # Coordinates of a head turn in pairs.
    whole = sound and sizes.width % (2 * sizes.heads) == 0 and sizes.heads % sizes.kv_heads == 0
    if not whole:
        raise invalid_argument(
            "path", str(path), "model.bin of llama2.c (version 0, float32); its first numbers are no sizes"
        )
    needed = _HEADER.size + 4 * sum(math.prod(shape) for shape in sizes.shapes().values())
    if len(data) < needed:
        raise invalid_argument(
            "path", f"{path} of {len(data):,} bytes", f"model.bin of llama2.c, {needed:,} bytes by its sizes"
        )
    return sizes


def _tensors(data: bytes, sizes: Sizes) -> tuple[dict[str, Tensor], int]:
    """The tensors by name, and where they end."""
    at, found = _HEADER.size, {}
    for name, shape in sizes.shapes().items():
        count = math.prod(shape)
        found[name] = torch.from_numpy(np.frombuffer(data, "<f4", count, at).astype(np.float32)).view(shape)
        at += 4 * count
    return found, at


def _named(tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """The tensors under the names of a `LlamaForCausalLM`."""
    head = sizes.width // sizes.heads
    named = {
        "model.embed_tokens.weight": tensors["embedding"], "model.norm.weight": tensors["last_norm"],
        "lm_head.weight": tensors["embedding" if sizes.shared else "head"],
    }  # fmt: skip
    plain = {
        "norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj", "up": "mlp.up_proj",
    }  # fmt: skip
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        named |= {f"{prefix}.{name}.weight": tensors[part][layer] for part, name in plain.items()}
        for part in ("q", "k"):
            # llama2.c rotates neighbours, transformers a coordinate and the one half a head further.
            turned = tensors[part][layer].view(-1, head // 2, 2, sizes.width).transpose(1, 2)
            named[f"{prefix}.self_attn.{part}_proj.weight"] = turned.reshape(-1, sizes.width)
    return named


def _config(sizes: Sizes) -> Any:
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig(
        vocab_size=abs(sizes.vocabulary), hidden_size=sizes.width, intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.length, rms_norm_eps=1e-5, tie_word_embeddings=sizes.shared, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def _pieces(data: bytes, count: int, path: str | Path) -> list[tuple[str, float]]:
    """What each id of tokenizer.bin stands for, with ▁ for a space, and its score."""
    if count < len(_FIXED):
        raise invalid_argument("path", f"{count} pieces", f"at least {len(_FIXED)}: special ones and bytes come first")
    at, found = 4, []
    try:
        longest = struct.unpack_from("<i", data)[0]
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, at)
            (text,) = struct.unpack_from(f"{_length(size, longest)}s", data, at + 8)
            found.append((text.decode().replace(" ", "▁"), float(score)))
            at += 8 + size
    except (struct.error, ValueError) as error:
        raise invalid_argument(
            "tokenizer", str(path), f"tokenizer.bin of llama2.c with {count:,} pieces ({error})"
        ) from error
    return [*((name, 0.0) for name in _FIXED), *found[len(_FIXED) :]]


def _length(size: int, longest: int) -> int:
    """The length of a piece in bytes, from 0 to that of the longest, with which tokenizer.bin begins."""
    # Pieces are cut in all possible ways later: one as long as a book would never be done with.
    if not 0 <= size <= min(longest, _LONGEST):
        raise ValueError(f"a piece of {size} bytes where the longest has {longest}, and none more than {_LONGEST}")
    return size


def _tokenizer(pieces: Sequence[tuple[str, float]], length: int) -> Any:
    """The byte-pair tokenizer of those pieces, as transformers makes it of a Llama's."""
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
    found = []
    for piece, _ in sorted(pieces[len(_FIXED) :], key=lambda scored: -scored[1]):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [half for half in halves if half[0] in vocabulary and half[1] in vocabulary]
        found += sorted(known, key=lambda half: (vocabulary[half[0]], vocabulary[half[1]]))
    return found
