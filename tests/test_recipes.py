"""Recipes: what ships is explained key by key, what is wrong is named, what is given on the command line wins."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gape.experiments import recipe
from gape.experiments.run import LanguageRun, NeedleRun, Run
from gape.utils import recipe_files

SMALL = """
description = "small"
[task]
length = 32
n_needles = 2
[model]
n_layer = 1
n_head = 2
n_embd = 16
[train]
max_steps = 4
"""


def write(tmp_path: Path, text: str = SMALL) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", recipe_files.available())
def test_what_ships_is_whole_and_explained(name: str) -> None:
    """Every key has a comment on the line above it."""
    assert recipe.load(name).runs
    lines = recipe_files.available()[name].read_text(encoding="utf-8").splitlines()
    inside = False
    for number, line in enumerate(lines):
        opens, closes = line.count("["), line.count("]")
        if not inside and "=" in line and not line.startswith(("#", "description")):
            above = lines[number - 1]
            # Settings of one variant are explained together, above its name.
            explained = above.startswith("#") or (line.startswith('"') and above.partition(" = ")[1])
            assert explained, f"{name}, line {number + 1}: {line}"
        inside = inside or (not line.startswith("#") and opens > closes)
        inside = inside and closes <= opens


def test_the_papers_setting_is_the_papers() -> None:
    run = recipe.load("niah/paper").runs[0]
    model = run.model
    assert (model.n_layer, model.n_head, model.n_embd, model.dropout, model.vocab_size) == (2, 2, 64, 0.0, 27)
    assert (run.task.length, run.task.needles, run.batch_size, model.context_length) == (2048, 32, 64, 2048)
    train = run.train
    assert (train.max_steps, train.learning_rate, train.min_learning_rate) == (5000, 3e-4, 3e-5)
    assert (train.weight_decay, train.validate_every, train.stop_after_perfect) == (0.1, 100, 3)
    assert run.evaluation.validation_samples == 1000
    assert len(recipe.load("niah/paper").runs) == 10 * 3 * 3


def test_a_recipe_without_a_sweep_is_one_run(tmp_path: Path) -> None:
    (run,) = recipe.load(write(tmp_path)).runs
    assert run.name == "small"
    assert run.train.seed == run.seed == 0


def test_a_sweep_multiplies_out_and_names_its_runs(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + '[sweep]\n"model.position" = ["rope", "rope+gape"]\nseed = [0, 1]\n')
    runs = recipe.load(path).runs
    assert [run.name for run in runs] == ["rope_seed0", "rope_seed1", "rope+gape_seed0", "rope+gape_seed1"]
    assert [(run.model.position, run.train.seed) for run in runs][2] == ("rope+gape", 0)


def test_each_variant_runs_through_the_sweep(tmp_path: Path) -> None:
    text = (
        '[sweep]\nseed = [0, 1]\n[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n"model.options.gate_floor" = 4.0\n'
    )
    runs = recipe.load(write(tmp_path, SMALL + text)).runs
    assert [(run.name, run.variant, run.model.options) for run in runs] == [
        ("a_seed0", "a", {}), ("a_seed1", "a", {}),
        ("b_seed0", "b", {"gate_floor": 4.0}), ("b_seed1", "b", {"gate_floor": 4.0}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.max_steps=7", "train", "max_steps", 7),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("task.target=first", "task", "target", "first"),
        ('model.position="nope"', "model", "position", "nope"),
        ("evaluation.factors=[1, 3]", "evaluation", "factors", (1, 3)),
        ("model.options.fraction=0.5", "model", "options", {"fraction": 0.5}),
    ],
)
def test_overrides_win(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    (run,) = recipe.load(write(tmp_path), [override]).runs
    assert getattr(getattr(run, section), key) == value
    assert type(getattr(getattr(run, section), key)) is type(value)


def test_an_override_wins_over_variants(tmp_path: Path) -> None:
    text = '[[variants]]\nname = "a"\n"train.max_steps" = 9\n'
    (run,) = recipe.load(write(tmp_path, SMALL + text), ["train.max_steps=2"]).runs
    assert run.train.max_steps == 2


@pytest.mark.parametrize(("override", "seeds"), [("seed=5", [5]), ("seed=[5, 6]", [5, 6]), ("sweep.seed=[7]", [7])])
def test_an_override_of_a_swept_key_replaces_its_list(tmp_path: Path, override: str, seeds: list[int]) -> None:
    path = write(tmp_path, SMALL + "[sweep]\nseed = [0, 1]\n")
    assert [run.seed for run in recipe.load(path, [override]).runs] == seeds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_step=7", r"train\.max_step: unknown key, did you mean train\.max_steps\?"),
        ("modle.n_layer=7", r"modle: unknown key, did you mean model\?"),
        ("train.max_steps=many", r"train\.max_steps: got str 'many', expected a whole number"),
        ("train.max_steps=true", r"train\.max_steps: got bool True"),
        ("seed=true", r"^seed: got bool True, expected a whole number"),
        ("train.max_steps=0", r"train\.max_steps: got int 0"),
        ("model.bias=1", r"model\.bias: got int 1, expected true or false"),
        ("model.position=rop", r"model\.position: .* did you mean rope"),
        ("model.options.gate_flor=4", r"model\.options: gate_flor"),
        ("model.vocab_size=5", r"model\.vocab_size: cannot be set here"),
        ("task.n_needles=40", r"task\.n_needles: got int 40"),
        ("evaluation.factors=[]", r"evaluation\.factors"),
        ("evaluation.factors=[1.5]", r"evaluation\.factors\[0\]: got float 1\.5"),
        ("analysis.factors=[2]", r"analysis\.factors"),
        ("task=5", r"task: got int 5"),
        ("max_steps", r"override: got str 'max_steps', expected key=value"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load(write(tmp_path), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[task", "not a TOML file"),
        ("[sweep]\nseed = 1\n", r"sweep\.seed: got int 1, expected a list"),
        ("[sweep]\nseed = [1, 1]\n", "sweep: .* expected values that differ"),
        ("[variants]\nname = 'a'\n", r"variants: .* \[\[variants\]\]"),
        ("[[variants]]\nseed = 1\n", r"variants\.name"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load(write(tmp_path, SMALL + text))


@pytest.mark.parametrize(
    "text",
    [
        f"kind = []\n{SMALL}",
        f"deep = {'[' * 2000}{']' * 2000}\n{SMALL}",
        f"{SMALL}[{'.'.join('a' * 2000)}]\nb = 1\n",
        f"{SMALL}[sweep]\n" + "".join(f'"model.options.o{i}" = {list(range(100))}\n' for i in range(9)),
    ],
)
def test_a_file_that_cannot_be_a_recipe_is_named(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a sweep is multiplied out nevertheless, its first run ends it.
    monkeypatch.setattr(NeedleRun, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"small\.toml"):
        recipe.load(write(tmp_path, text))


@pytest.mark.parametrize("name", ["..", ".", ".lock", "x" * 300])
def test_a_run_has_a_name_for_a_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name: got"):
        recipe.load(write(tmp_path, f'{SMALL}[[variants]]\nname = "{name}"\n'))


def test_a_recipe_has_a_name_for_a_directory(tmp_path: Path) -> None:
    """Its runs go to runs/NAME where nothing else is said."""
    path = write(tmp_path, f"{SMALL}[sweep]\nseed = [0]\n").rename(tmp_path / "...toml")
    with pytest.raises(ValueError, match="recipe: got"):
        recipe.load(path)


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.n_layer: got nothing, expected a whole number"):
        recipe.load(write(tmp_path, SMALL.replace("n_layer = 1\n", "")))


def test_an_unknown_recipe_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"niah/demo.* did you mean niah/paper\?"):
        recipe.load("niah/papr")


def test_a_run_is_stored_and_read_back() -> None:
    for run in recipe.load("niah/paper").runs[:4]:
        assert Run.from_dict(run.to_dict()) == run


def test_the_scheme_switched_to_keeps_the_rest(tmp_path: Path) -> None:
    text = '[evaluation.switch]\n"rope+gape" = "yarn+gape"\n[evaluation.switch_options]\nfactor = 2.0\n'
    overrides = ["model.position=rope+gape", "model.options.gate_floor=1.0"]
    (run,) = recipe.load(write(tmp_path, SMALL + text), overrides).runs
    assert run.switched is not None
    assert (run.switched.position, run.switched.options) == ("yarn+gape", {"gate_floor": 1.0, "factor": 2.0})


def test_nothing_in_a_recipe_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for value in (f"__import__('pathlib').Path({str(mark)!r}).touch()", "$(touch x)"):
        with pytest.raises(ValueError, match="target"):
            recipe.load(write(tmp_path), [f"task.target={value}"])
    assert not mark.exists()
    assert tomllib.loads(SMALL)


def test_the_papers_language_model_is_the_papers() -> None:
    paper = recipe.load("lm/paper")
    run = paper.runs[-1]
    assert isinstance(run, LanguageRun)
    model, train = run.model, run.train
    assert (model.n_layer, model.n_head, model.n_embd, model.vocab_size, model.context_length) == (
        6,
        8,
        512,
        50257,
        1024,
    )
    assert (run.batch_size, train.accumulation, train.max_steps, train.warmup_steps) == (64, 8, 3000, 300)
    assert (train.learning_rate, train.min_learning_rate, train.betas) == (1e-3, 1e-4, (0.9, 0.95))
    assert (train.clip, train.weight_decay, train.lambda_l1) == (1.0, 0.1, 0.0)
    assert [run.model.position for run in paper.runs] == ["rope", "p-rope", "p-rope+gape"]
    assert model.options == {
        "theta": 10000.0, "fraction": 0.75, "init_gate_bias": -3.0, "init_landmark_bias": 0.0, "init_amplitude": 0.5413,
    }  # fmt: skip


def test_the_recipe_that_forgets_is_the_run_that_was_measured() -> None:
    assert recipe.load("lm/floor4").runs == recipe.load("lm/books").only(["p-rope+gape_floor4_seed0"]).runs


@pytest.mark.parametrize("name", ["lm/paper", "lm/books", "lm/floor4", "lm/ablations", "lm/toy"])
def test_a_run_of_a_language_model_is_stored_and_read_back(name: str) -> None:
    for run in recipe.load(name, ["data=somewhere"]).runs:
        assert Run.from_dict(run.to_dict()) == run
        assert run.to_dict()["kind"] == "lm"


def test_runs_are_picked_by_name() -> None:
    books = recipe.load("lm/books")
    assert [run.name for run in books.only(["p-rope*", "fox_*"]).runs] == [
        "p-rope_seed0", "p-rope+gape_seed0", "p-rope+gape_floor4_seed0", "fox_seed0",
    ]  # fmt: skip
    assert books.only([]) == books
    with pytest.raises(ValueError, match="only: got str 'yarn'"):
        books.only(["yarn"])


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kind: got str 'lmm', expected one of .*did you mean lm\?"):
        recipe.load(write(tmp_path, f'kind = "lmm"\n{SMALL}'))


def extending(tmp_path: Path, text: str, name: str = "other.toml", base: str = "small.toml") -> Path:
    path = tmp_path / name
    path.write_text(f'extends = "{base}"\n{text}', encoding="utf-8")
    return path


def test_a_recipe_takes_what_it_does_not_say_from_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path, SMALL + '[model.options]\nfraction = 0.5\n[sweep]\nseed = [0, 1]\n[[variants]]\nname = "a"\n')
    between = extending(tmp_path, "[train]\nlearning_rate = 0.5\n", "between.toml")
    (run,) = recipe.load(
        extending(
            tmp_path,
            "variants = []\n[train]\nmax_steps = 9\n[model]\noptions = {}\n[sweep]\nseed = [3]\n",
            base=between.name,
        )
    ).runs
    assert (run.name, run.train.max_steps, run.train.learning_rate, run.seed) == ("seed3", 9, 0.5, 3)
    assert (run.model.n_embd, run.model.options) == (16, {})


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("lm/bokks", r"extends: got 'lm/bokks', expected a TOML file or one of .*did you mean lm/books\?"),
        ("other.toml", "extends: got other → other, expected a recipe that does not lead back to itself"),
        ("between.toml", "extends: got other → between → other"),
    ],
)
def test_a_recipe_that_cannot_be_extended_is_named(tmp_path: Path, base: str, message: str) -> None:
    extending(tmp_path, "", "between.toml", base="other.toml")
    with pytest.raises(ValueError, match=message):
        recipe.load(extending(tmp_path, "", base=base))
