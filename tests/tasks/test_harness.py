"""Our models in lm-eval: the model type is known there, and its numbers are those of a plain computation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gape.tasks.lm_eval import register
from tests.cli.test_commands import gape_exits
from tests.tasks import text

lm_eval = pytest.importorskip("lm_eval")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{input}}}}"
doc_to_target: {target}
metric_list: [{{metric: {metric}, aggregation: {how}, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of gape lm train on bytes."""
    folder = tmp_path_factory.mktemp("run")
    corpus = text.corpus(folder / "books").directory
    small = ["train.max_steps=1", "train.validate_every=0", "train.checkpoint_every=1", "train.warmup_steps=0",
             "train.progress=off", "task.length=16", "model.n_layer=1", "model.n_embd=16", "batch_size=2",
             "evaluation.contexts=[]", "evaluation.last=16", "analysis.routing_every=0"]  # fmt: skip
    out = ["--only", "p-rope+gape", "--out", folder / "runs"]
    assert gape_exits("lm", "train", "lm/toy", f"data={corpus}", *small, *out) == 0
    return folder / "runs/p-rope+gape"


@pytest.fixture(scope="module")
def model(home: Path) -> Any:
    register()
    # A second time is harmless.
    register()
    from lm_eval.api.registry import get_model

    return get_model("gape").create_from_arg_string(f"run={home}", {"batch_size": 2, "device": "cpu"})


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


def likelihood(model: Any, context: list[int], more: list[int]) -> float:
    logs = model.model(torch.tensor([context + more])).logits[0].double().log_softmax(-1).detach()
    return float(sum(logs[len(context) + n - 1, token] for n, token in enumerate(more)))


def test_likelihoods_of_continuations(model: Any) -> None:
    pairs = [("abc def", " abc"), ("a", "bcd"), ("", "abc"), ("abc ", "d")]
    actual = model.loglikelihood(requests(*pairs))
    encoded = [("abc def", " abc"), ("a", "bcd"), (None, "abc"), ("abc", " d")]
    for (value, _), (context, more) in zip(actual, encoded, strict=True):
        before = [256] if context is None else list(context.encode())
        assert value == pytest.approx(likelihood(model, before, list(more.encode())), abs=1e-4)
    (greedy,) = model.generate_until(requests(("abc", {"until": [], "max_gen_toks": 1})))
    if greedy:
        assert model.loglikelihood(requests(("abc", greedy)))[0][1]


def test_whole_texts_are_read_window_by_window(model: Any) -> None:
    """Each token once, behind the end of a text, in windows of the training length."""
    assert model.max_length == 16
    (actual,) = model.loglikelihood_rolling(requests(("abc def" * 3,)))
    ids = [256, *("abc def" * 3).encode()]
    first, second = likelihood(model, ids[:1], ids[1:17]), likelihood(model, ids[5:17], ids[17:])
    assert actual == pytest.approx(first + second, abs=1e-4)


def test_text_stops_where_a_task_says(model: Any) -> None:
    (whole,) = model.generate_until(requests(("abc def", {"until": [], "max_gen_toks": 6})))
    if whole:
        (cut,) = model.generate_until(requests(("abc def", {"until": [whole[0]], "max_gen_toks": 6})))
        assert cut == ""
    with pytest.raises(ValueError, match="do_sample: got True"):
        model.generate_until(requests(("a", {"do_sample": True, "temperature": 0.7})))


def test_tasks_run_unchanged(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    from lm_eval.tasks import TaskManager

    register()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input": "abc de", "outputs": letter}) + "\n" for letter in "fgh"))
    kinds = {
        "toy_generate": ("generate_until", "'{{outputs}}'", "exact_match", "mean"),
        "toy_rolling": ("loglikelihood_rolling", "'{{input}}'", "byte_perplexity", "weighted_perplexity"),
    }
    for name, (kind, target, metric, how) in kinds.items():
        samples = TASK.format(name=name, data=data, kind=kind, target=target, metric=metric, how=how)
        (tmp_path / f"{name}.yaml").write_text(samples)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    actual = lm_eval.simple_evaluate(
        model="gape", model_args=f"run={home},max_gen_toks=3", tasks=list(kinds), task_manager=manager, device="cpu",
        bootstrap_iters=0,
    )  # fmt: skip
    perplexity = actual["results"]["toy_rolling"]["byte_perplexity,none"]
    assert 200 < perplexity < 300
    assert actual["results"]["toy_generate"]["exact_match,none"] == 0


def test_arguments_are_checked(home: Path) -> None:
    register()
    from lm_eval.api.registry import get_model

    with pytest.raises(ValueError, match="run: got NoneType None"):
        get_model("gape")()
    with pytest.raises(ValueError, match="dtype: got str 'int8', expected float32 or bfloat16"):
        get_model("gape")(run=str(home), dtype="int8")


@pytest.mark.slow
def test_rulers_own_wording_from_lm_eval(tmp_path: Path) -> None:
    from gape.tasks.ruler import generator
    from gape.tasks.ruler.sources import sample
    from tests.tasks.ruler import small

    folder = small.random_gpt2(tmp_path)
    samples = generator.samples("fwe", 4096, str(folder), 2, seed=0)
    assert len(samples) == 2
    actual = sample(samples[0], place="here", source="s", number=1)
    assert (actual.task, actual.length, actual.budget) == ("fwe", 4096, 50)
    assert actual.prefix.startswith(" Answer:")
    assert all(output in actual.input for output in actual.outputs)
    with pytest.raises(ValueError, match="length: got int 1024, expected at least 4096 for the wording of lm-eval"):
        generator.samples("fwe", 1024, str(folder), 2)
    with pytest.raises(ValueError, match="cwe: lm-eval cannot make it"):
        generator.samples("cwe", 4096, "nowhere/at-all", 2)
