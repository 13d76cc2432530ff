"""Models in GGUF files, the format of llama.cpp, as transformers reads them, freed from the format.

Weights that the file keeps in few bits become plain numbers; what rounding took is gone. What the file says of itself
is compared with its size before anything of that size is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gape.hf.gguf_header import MAGIC, Header, read_header
from gape.hf.version import OLD
from gape.utils.validation import invalid_argument


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
