"""`gape hf` at toy size: convert, inject, fine-tune, measure, remove, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

import gape.hf
from tests.cli.test_commands import gape_exits
from tests.hf.tiny import tiny
from tests.tasks import text

TRAIN = ["--length", "16", "--steps", "4", "--batch-size", "2", "--validate-every", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "llama"):
        tiny(family, vocab_size=257).save_pretrained(home / family)
    return home


@pytest.fixture
def models(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of two models without gates, in the working directory."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


#: In place of what GPT-2 learned.
POSITION = ("--position", "p-rope+gape", "--start", "paper", "--context-length", "128")


def test_from_gpt2_to_perplexity(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = text.corpus(models / "books").directory
    assert gape_exits("hf", "inject", "gpt2", *POSITION, "--out", "converted") == 0
    assert "parameters" in capsys.readouterr().out
    config = json.loads(Path("converted/config.json").read_text())
    assert (config["model_type"], config["gape"]["position"]) == ("gape_gpt2", "p-rope+gape")
    assert gape_exits("hf", "finetune", "converted", str(corpus), "--out", "run", *TRAIN) == 0
    assert capsys.readouterr().out.split() == ["run/model"]
    before, after = (load_file(f"{place}/model.safetensors") for place in ("converted", "run/model"))
    learned = [name for name in before if name.endswith(("strength", "c_attn.weight"))]
    assert all(bool((after[name] != before[name]).any()) for name in learned)
    command = ("hf", "perplexity", "run", "gpt2", "--data", str(corpus), "--contexts", "16,32", "--last", "16")
    assert gape_exits(*command, "--device", "cpu") == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in Path("run/perplexity.jsonl").read_text().splitlines()]
    assert [row["context"] for row in rows] == [16, 32]
    assert all(f"{row['perplexity']:.2f}" in shown for row in rows)
    assert (rows[0]["run"], rows[0]["base"], rows[0]["position"], rows[0]["step"]) == ("run", "gpt2", "p-rope+gape", 4)
    # What a death between the rows and its end would leave.
    Path("run/.scores-16.jsonl").touch()
    assert gape_exits(*command, "--device", "cpu") == 0
    assert len(Path("run/perplexity.jsonl").read_text().splitlines()) == 2
    assert not Path("run/.scores-16.jsonl").exists()
    _report_shows_them(capsys)


def _report_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert gape_exits("report", "run", "gpt2", "--out", "results/hf/smollm2") == 0
    drawn = {path.name for path in Path("results/hf/smollm2/figures").iterdir()}
    assert drawn == {f"hf-perplexity.{end}" for end in ("json", "pdf", "png")}
    runs = [json.loads(line) for line in Path("results/hf/smollm2/runs.jsonl").read_text().splitlines()]
    assert all("started" in record["manifest"] for record in runs)
    assert gape_exits("reproduce", "hf-perplexity") == 0
    table = Path("results/hf/smollm2/tables.md").read_text()
    assert "p-RoPE+GAPE − learned (not fine-tuned)" in table


def test_gates_learn_alone_where_only_they_should(models: Path) -> None:
    corpus = str(text.corpus(models / "books").directory)
    assert gape_exits("hf", "inject", "llama", "--context-length", "16", "--out", "gated") == 0
    assert gape_exits("hf", "finetune", "gated", corpus, "--out", "run", *TRAIN, "--learn", "gates") == 0
    base, tuned = load_file("llama/model.safetensors"), load_file("run/model/model.safetensors")
    assert all(torch.equal(tuned[name], base[name]) for name in base)
    assert all(bool(tuned[name].any()) for name in tuned if name.endswith("strength"))


def test_inject_and_remove_give_the_same_tensors_back(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("hf", "inject", "llama", "--context-length", "16", "--out", "gated", "--dry-run") == 0
    assert "parameters" in capsys.readouterr().out
    assert not Path("gated").exists()
    assert gape_exits("hf", "inject", "llama", "--context-length", "16", "--layers", "-1", "--out", "gated") == 0
    assert gape_exits("hf", "remove", "gated", "--out", "bare") == 0
    one, other = (load_file(f"{place}/model.safetensors") for place in ("llama", "bare"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads(Path("bare/config.json").read_text())["model_type"] == "llama"


def test_a_save_that_broke_off_is_no_model_and_is_done_again(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("hf", "inject", "llama", "--context-length", "16", "--out", "gated")
    Path("gated").mkdir()
    Path("gated/README.md").write_text("somebody else's")

    def killed(*files: Path) -> None:
        raise KeyboardInterrupt

    Path("llama/tokenizer.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", killed)
        assert gape_exits(*command) == 130
    assert not Path("gated/config.json").exists()
    assert gape_exits(*command) == 0
    assert {path.name for path in Path("gated").iterdir()} == {
        "GAPE.md", "README.md", "config.json", "generation_config.json", "load_gape.py", "model.safetensors",
        "tokenizer.json",
    }  # fmt: skip
    assert Path("gated/README.md").read_text() == "somebody else's"


def test_contexts_beyond_learned_positions_are_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = str(text.corpus(models / "books").directory)
    command = ("hf", "perplexity", "gpt2", "--data", corpus, "--contexts", "16,129", "--last", "16", "--device", "cpu")
    assert gape_exits(*command) == 2
    assert "learned positions" in capsys.readouterr().err
    assert not Path("gpt2/perplexity.jsonl").exists()


def test_a_gpt_of_ours_is_tuned_and_measured_like_any_other(models: Path) -> None:
    corpus = str(text.corpus(models / "books").directory)
    gape.hf.GapeForCausalLM.from_gpt(text.gpt().float()).save_pretrained("ours")
    more = ("--learn", "gates", "--gradient-checkpointing", "--attention", "gape_split")
    assert gape_exits("hf", "finetune", "ours", corpus, "--out", "run", *TRAIN, *more) == 0
    before, after = (load_file(f"{place}/model.safetensors") for place in ("ours", "run/model"))
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if ".gates." in name
    }
    command = (
        "hf", "perplexity", "run", "ours", "--data", corpus, "--contexts", "48", "--last", "16", "--device", "cpu"
    )  # fmt: skip
    assert gape_exits(*command) == 0
    (whole,) = [json.loads(line) for line in Path("ours/perplexity.jsonl").read_text().splitlines()]
    assert (whole["run"], whole["position"], whole["native"]) == ("ours", "p-rope+gape", 16)
    # Behind a cache it says the same.
    Path("ours/perplexity.jsonl").unlink()
    assert gape_exits(*command, "--chunk", "20") == 0
    (parts,) = [json.loads(line) for line in Path("ours/perplexity.jsonl").read_text().splitlines()]
    assert parts["nll"] == pytest.approx(whole["nll"], abs=1e-5)


def test_a_corpus_of_more_ids_is_refused_before_any_model_is_measured(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = str(text.corpus(models / "books").directory)
    tiny("llama").save_pretrained("small")
    command = ("--data", corpus, "--contexts", "16", "--last", "16", "--device", "cpu")
    assert gape_exits("hf", "perplexity", "llama", "small", *command) == 2
    assert "data: got str '257 ids', expected at most the model's 64" in capsys.readouterr().err
    assert not list(models.glob("*/*perplexity*")) + list(models.glob("*/.scores*"))


def test_another_config_with_the_same_weights_is_measured_anew(models: Path) -> None:
    command = ("hf", "perplexity", "llama", "--data", str(text.corpus(models / "books").directory))
    command += ("--contexts", "64", "--last", "16", "--device", "cpu")
    path = Path("llama/config.json")
    for base in (10000.0, 10000.0, 10.0):
        config = json.loads(path.read_text())
        config.get("rope_parameters", config)["rope_theta"] = base
        path.write_text(json.dumps(config))
        assert gape_exits(*command) == 0
    first, other = [json.loads(line) for line in Path("llama/perplexity.jsonl").read_text().splitlines()]
    assert first["weights"] != other["weights"]
    assert first["nll"] != other["nll"]


@pytest.fixture(scope="module")
def refused_files(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, texts and files that commands refuse; nothing is written there."""
    home = tmp_path_factory.mktemp("refused")
    shutil.copytree(saved, home, dirs_exist_ok=True)
    shutil.copytree(saved / "llama", home / "broken")
    (home / "broken/model.safetensors").write_bytes(b"cut short")
    (home / "text.txt").write_text("words " * 100)
    (home / "junk.gguf").write_bytes(b"junk" * 100)
    text.corpus(home / "books").directory.rename(home / "corpus")
    with_words(str(home / "worded"))
    tiny("llama", vocab_size=600).save_pretrained(home / "large")
    return home


def test_a_run_that_cannot_be_validated_says_so(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = str(text.corpus(models / "books").directory)
    assert gape_exits("hf", "finetune", "llama", corpus, "--out", "run", *TRAIN, "--length", "250", "--steps", "1") == 0
    assert "nothing is validated: length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inject", "llama", "--out", "o"), "context_length"),
        (("inject", "./nowhere", "--context-length", "16", "--out", "o"), "nowhere"),
        (("inject", "llama", "--context-length", "16", "--position", "alibi", "--out", "o"), "position"),
        (("inject", "llama", "--context-length", "16", "--layers", "7", "--out", "o"), "layers"),
        (("inject", "gpt2", "--context-length", "999", "--out", "o"), "rope+gape"),
        (("inject", "llama", "--context-length", "16", "--out", "gpt2"), "holds a model already"),
        (("remove", "llama", "--out", "o"), "inject"),
        (("inject", "llama", "--context-length", "16", "--gate", "gate_flor=4", "--out", "o"), "gate_flor"),
        (("inject", "llama", "--context-length", "16", "--option", "factor=8", "--out", "o"), "factor"),
        (("finetune", "llama", "./nowhere", "--out", "o"), "nowhere"),
        (("perplexity", "o", "--data", "corpus"), "corpus"),
        (("finetune", "llama", "./nowhere", "--out", "o", "--learn", "gates"), "learn"),
        (("finetune", "llama", "text.txt", "--out", "o", "--batch-size", "0"), "batch_size: got int 0"),
        (("finetune", "llama", "text.txt", "--out", "o", "--length", "0"), "length: got int 0"),
        (("finetune", "gpt2", "text.txt", "--out", "o", "--length", "129"), "learned positions"),
        (
            ("finetune", "worded", "text.txt", "--out", "o", "--length", "9999", "--device", "cpu"),
            "length: got int 9999",
        ),
        (("finetune", "worded", "text.txt", "--out", "o", "--resume", "nothing", "--device", "cpu"), "resume"),
        (("finetune", "worded", "corpus", "--out", "o", "--device", "cpu"), "data: "),
        (("finetune", "large", "corpus", "--out", "o", "--device", "cpu"), "data: "),
        (("perplexity", "worded", "--data", "corpus", "--contexts", "16", "--last", "16"), "data: "),
        (("perplexity", "large", "--data", "corpus", "--contexts", "16", "--last", "16"), "data: "),
        (("inject", "llama", "--context-length", "99999999999999999999", "--out", "o"), "context_length"),
        (("import", "junk.gguf", "--out", "o"), "GGUF"),
        (("inject", "llama", "--context-length", "16", "--seed", "-1", "--out", "o"), "seed: got int -1"),
        (("inject", "broken", "--context-length", "16", "--out", "o"), "model: 'broken' cannot be read"),
        (("inject", "llama", "--context-length", "16", "--gate", "gate_floor", "--out", "o"), "gate: got 'gate_floor'"),
        (("inject", "llama", "--context-length", "16", "--option", "=8", "--out", "o"), "option: got '=8'"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    refused_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(refused_files)
    before = sorted(refused_files.rglob("*"))
    assert gape_exits("hf", *arguments) == 2
    assert said in capsys.readouterr().err
    assert sorted(refused_files.rglob("*")) == before


def with_words(directory: str) -> Tokenizer:
    """A model with a tokenizer of pieces of words beside it."""
    tiny("llama", vocab_size=300).save_pretrained(directory)
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["words and more words " + "abc def" * 9], learner)
    tokenizer.save(f"{directory}/tokenizer.json")
    return tokenizer


def test_a_corpus_is_taken_that_has_the_models_tokenizer_be_it_in_another_file(models: Path) -> None:
    with_words("worded").save("other.json", pretty=False)
    Path("text.txt").write_text("abc def words " * 40)
    assert gape_exits("data", "prepare", "text.txt", "--tokenizer", "other.json", "--out", "corpus") == 0
    assert gape_exits("hf", "finetune", "worded", "corpus", "--out", "run", *TRAIN) == 0
    # Bytes are another tokenizer, also where the first document is short.
    Path("rows.jsonl").write_text('{"text": "A"}\n' + json.dumps({"text": "abc def words " * 40}) + "\n")
    assert gape_exits("data", "prepare", "rows.jsonl", "--tokenizer", "bytes", "--out", "bytes") == 0
    assert gape_exits("hf", "finetune", "worded", "bytes", "--out", "other", *TRAIN) == 2


def test_recall_texts_are_tuned_on(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_words("worded")
    Path("text.txt").write_text("abc def words. " * 2000)
    options = (
        "--length", "900", "--steps", "1", "--batch-size", "2", "--recall", "0.5", "--skip-to", "4096", "--device",
        "cpu",
    )  # fmt: skip
    assert gape_exits("hf", "inject", "worded", "--context-length", "16", "--out", "gated") == 0
    assert gape_exits("hf", "finetune", "gated", "text.txt", "--out", "run", *options, "--heldout-fraction", "0") == 0
    assert json.loads(Path("run/run.json").read_text())["recall"]["share"] == 0.5
    for more, words in (
        (("--length", "100"), "length: "),
        (("--context-parallel", "2"), "skip_to: "),
        (("--lora", "2", "--learn", "gates"), "learn: "),
    ):
        assert gape_exits("hf", "finetune", "gated", "text.txt", "--out", "other", *options, *more) == 2
        assert words in capsys.readouterr().err
        assert not Path("other").exists()


def test_the_card_names_the_loss_of_the_weights_that_were_saved(models: Path) -> None:
    corpus = str(text.corpus(models / "books").directory)

    def card_after(steps: int, start: str, out: str) -> str:
        options = (*TRAIN, "--steps", str(steps), "--validate-every", "2")
        assert gape_exits("hf", "finetune", start, corpus, "--out", out, *options) == 0
        return Path(f"{out}/model/README.md").read_text()

    assert gape_exits("hf", "inject", "llama", "--context-length", "16", "--out", "gated") == 0
    assert "held-out loss" in card_after(2, "gated", "validated")
    # The last validation was of other weights, and so was that of the model it began with.
    assert "held-out loss" not in card_after(3, "validated/model", "later")


def test_code_that_comes_with_a_model_never_runs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(Path("llama/config.json").read_text())
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    Path("llama/config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": code}))
    Path("llama/own.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert gape_exits("hf", "inject", "llama", "--context-length", "16", "--out", "o") == 2
    assert not Path("ran").exists()


def test_a_tokenizer_that_cannot_be_loaded_is_reported(tmp_path, monkeypatch, capsys):
    from gape.experiments import finetune

    def missing(name):
        raise OSError(f"no {name} here")

    monkeypatch.setattr(finetune.transformers.AutoTokenizer, "from_pretrained", missing)
    finetune.save(tiny("llama"), "somebody/something", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    assert "has no tokenizer: that of somebody/something cannot be loaded" in capsys.readouterr().err
