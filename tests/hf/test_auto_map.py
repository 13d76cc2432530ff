"""Directories that load without gape.hf being imported first, and their cards."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import gape.hf
from gape.hf.card import write_card
from tests.hf.tiny import opened, ours, tiny, tokens

#: Loads every directory that is named, in a process that has not imported gape, and generates through a pipeline.
FRESH = """
import sys
import torch
from transformers import AutoModelForCausalLM, pipeline
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load(name + "/ids.pt", weights_only=True)).logits, name + "/logits.pt")
    model.save_pretrained(name + "/again")
writer = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
assert type(writer.model).__name__ == "GapeLlamaForCausalLM"
assert writer("a b", max_new_tokens=2)[0]["generated_text"]
"""


def words(directory):
    """Save a tokenizer of sixty words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{chr(97 + i): i + 1 for i in range(26)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)


@pytest.mark.slow
@pytest.mark.families
def test_a_fresh_process_loads_with_the_flag_and_without_an_import(tmp_path):
    models = {"llama": opened(tiny("llama")), "gpt": ours(position="p-rope+gape")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        torch.save(tokens(), tmp_path / name / "ids.pt")
    words(tmp_path / "llama")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "llama"), str(tmp_path / "gpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        with torch.no_grad():
            logits = torch.load(tmp_path / name / "logits.pt", weights_only=True)
            assert torch.equal(logits, model(tokens()).logits), name
        assert [file.name for file in (tmp_path / name / "again").glob("*.py")] == ["load_gape.py"]


def test_with_the_flag_a_model_of_an_unknown_type_loads(tmp_path, monkeypatch):
    model = opened(tiny("llama"))
    model.save_pretrained(tmp_path / "model")
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "gape_llama")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    loaded.save_pretrained(tmp_path / "again")
    # Nothing of this library was copied beside the file that imports it.
    assert [file.name for file in (tmp_path / "again").glob("*.py")] == ["load_gape.py"]


def test_what_looks_the_architecture_up_in_transformers_finds_a_class_that_loads(tmp_path):
    for name, model in (("llama", opened(tiny("llama"))), ("gpt", ours(position="p-rope+gape"))):
        model.save_pretrained(tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())["architectures"]
        assert written == [type(model).__name__]
        # As `transformers serve` does.
        config = AutoConfig.from_pretrained(tmp_path / name)
        loaded = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
        loaded.save_pretrained(tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["architectures"] == written


def test_without_the_flag_nothing_runs_and_the_message_says_what_to_pass(tmp_path, monkeypatch):
    opened(tiny("llama")).save_pretrained(tmp_path)
    (tmp_path / "load_gape.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    # With gape.hf imported its own classes are taken.
    AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "gape_llama")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert not (tmp_path / "ran").exists()


def test_where_gape_is_missing_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    opened(tiny("llama")).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "gape.hf.save_load", None)
    with pytest.raises(ImportError, match=r"pip install 'gape\[hf\]'"):
        runpy.run_path(str(tmp_path / "load_gape.py"))


def test_auto_map_is_no_part_of_a_model_without_gates(tmp_path):
    opened(tiny("llama")).save_pretrained(tmp_path / "gated")
    bare = gape.hf.remove(AutoModelForCausalLM.from_pretrained(tmp_path / "gated"))
    bare.save_pretrained(tmp_path / "bare")
    assert "auto_map" not in (tmp_path / "bare" / "config.json").read_text()
    assert not (tmp_path / "bare" / "load_gape.py").exists()


def fields(directory):
    return yaml.safe_load((directory / "README.md").read_text().split("---")[1])


def test_the_card_has_the_fields_of_the_hub(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: some/one\n---\n# Base\n")
    model = gape.hf.inject(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), context_length=16)
    model.config.gape["measured"] = {"perplexity at 16 tokens": 12.5}
    model.save_pretrained(tmp_path / "gated")
    # What is known of the base stays known when the directory it came from is another one.
    AutoModelForCausalLM.from_pretrained(tmp_path / "gated").save_pretrained(tmp_path / "again")
    for directory in ("gated", "again"):
        card = fields(tmp_path / directory)
        assert (card["base_model"], card["license"]) == ("some/one", "apache-2.0")
        assert (card["library_name"], card["pipeline_tag"]) == ("transformers", "text-generation")
        assert "| perplexity at 16 tokens | 12.5 |" in (tmp_path / directory / "README.md").read_text()


def test_the_card_of_a_model_of_unknown_origin_claims_none(tmp_path):
    opened(tiny("llama")).save_pretrained(tmp_path)
    assert "base_model" not in fields(tmp_path)
    assert fields(tmp_path)["license"] == "unknown"


def test_the_card_says_what_it_is_and_spares_other_peoples(tmp_path):
    opened(tiny("llama")).save_pretrained(tmp_path)
    assert "| T, the training length | 16 |" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("# mine\n")
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# mine\n"
    assert "checksum" in (tmp_path / "GAPE.md").read_text()


def test_a_family_whose_config_names_no_context_has_a_card_too(tmp_path, monkeypatch):
    model = opened(tiny("llama"))
    del model.config.max_position_embeddings
    # The default, in transformers 5.
    monkeypatch.delattr(LlamaConfig, "max_position_embeddings", raising=False)
    assert "| T, the training length | 16 |" in write_card(tmp_path, model).read_text()
