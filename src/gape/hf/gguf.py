"""Models in GGUF files, the format of llama.cpp, as transformers reads them, freed from the format.

Weights that the file keeps in few bits become plain numbers; what rounding took is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gape.hf.version import OLD
from gape.ops.checks import refuse

MAGIC = b"GGUF"


def read_gguf(path: str | Path) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a GGUF file.

    Returns:
        The model in float32 and its tokenizer.

    Raises:
        ValueError: another format, an architecture that transformers does not read, or transformers 4, which makes
            another tokenizer of the file than the model was trained with.
        ImportError: the package gguf is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    file = Path(path)
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise refuse("path", str(path), "a GGUF file")
    if OLD:
        raise ValueError("path: GGUF files are read with transformers 5: pip install 'transformers>=5'")
    try:
        import gguf  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'gape[gguf]'") from error
    told = {"gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **told)
    # What a damaged file leads to has no class of its own.
    except Exception as error:
        raise ValueError(f"path: {path} cannot be read: {error}") from error
    # It counts as quantised and could not be saved, though its weights are plain numbers by now.
    for name in ("hf_quantizer", "quantization_method"):
        delattr(model, name)
    model.is_quantized = False
    del model.config.quantization_config
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, **told)
