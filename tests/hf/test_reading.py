"""Folders of models that somebody else wrote: whatever is in them, a model or one line comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from gape.experiments.open_model import load_transformers
from gape.hf.families import TRANSFORMERS_4
from gape.hf.reading import refuse_sizes
from tests.hf.tiny import opened, tiny

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
OTHERS = ("rms_norm_eps", "rope_parameters", "hidden_act", "model_type", "dtype")
CHECKED_SINCE_5 = pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 takes any value here")
WRONG = (-1, 10**12, 10**30, "many", [], [1], {}, 1.5, float("nan"), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    opened(tiny("llama")).save_pretrained(place)
    return place


@pytest.mark.parametrize("key", [*SIZES, *OTHERS])
def test_a_config_that_makes_no_sense_is_one_line(folder: Path, tmp_path: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    said: list[str] = []
    refused: list[object] = []
    for value in WRONG:
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        try:
            load_transformers(str(tmp_path))
        except ValueError as error:
            said.append(str(error))
            refused.append(value)
    # Transformers 4 takes any value under this key; elsewhere most of them are refused, negative sizes always.
    unchecked = TRANSFORMERS_4 and key == "rms_norm_eps"
    assert (len(said) == 0) if unchecked else (len(said) >= 6)
    assert key not in SIZES or -1 in refused
    assert all(str(tmp_path) in words and "\n" not in words for words in said)


@pytest.mark.parametrize("change", [
    pytest.param({"rms_norm_eps": 0}, marks=CHECKED_SINCE_5), {"num_hidden_layers": 10**12},
    {"vocab_size": 19_000}, {"gape": {"context_length": 16, "layers": [10**9]}}, {"gape": None},
    pytest.param({"rope_parameters": {"rope_type": "yarn", "factor": "8"}}, marks=CHECKED_SINCE_5),
])  # fmt: skip
def test_a_config_that_its_weights_cannot_fill_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=tmp_path.name):
        load_transformers(str(tmp_path))


def test_negative_numbers_that_are_no_sizes_are_read(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"label2id": {"head": -100}, "task_specific_params": {"x": {"size": 10**12}}, "window_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_transformers(str(tmp_path))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_sizes(tmp_path)


def test_a_file_is_refused_without_a_word_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gape.hf.reading.read_model", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="model"):
        load_transformers("cut.toml")


@pytest.mark.parametrize(
    "content", [b"3", b"[" * 100_000, b'{"model_type": ' + b"9" * 5000 + b"}"], ids=["number", "deep", "long"]
)
def test_a_config_that_is_no_object_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_transformers(str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"junk", (2**40).to_bytes(8, "little") + b"{}"], ids=["empty", "junk", "long"]
)
def test_weights_that_are_no_safetensors_are_refused_by_their_name(
    folder: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_transformers(str(tmp_path))


def test_a_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["something.else"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_transformers(str(tmp_path))
