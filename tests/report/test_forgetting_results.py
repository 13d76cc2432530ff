"""What README and docs/forgetting.md say of forgetting is what the stored rows say."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest

from gape.experiments import recipe
from gape.report.results import Record, read_rows
from gape.report.series import TARGET_ORDER
from gape.report.style import label
from tests.report.test_language_results import ROOT, books, cells, page, table

RESULTS = ROOT / "results" / "forgetting"
RUN = "p-rope+gape_floor4_seed0"
STORED = read_rows(RESULTS / "forgetting.jsonl")
ROWS = [each for each in STORED if each["run"] == RUN]
EPS, LENGTHS = (1e-3, 1e-2), (65536, 131072)
PAIRS = [("dense", 0.0), *(("forgetting", eps) for eps in EPS)]
FLOORS, SCHEMES = (0, 4, 8), ("nope+gape", "p-rope+gape")
NEEDLES = [(floor, scheme, target) for floor in FLOORS for scheme in SCHEMES for target in TARGET_ORDER]


def part(title: str) -> str:
    """What docs/forgetting.md says under a heading, as one line."""
    return " ".join(page("docs/forgetting.md").split(f"\n## {title}\n")[1].split("\n## ")[0].split())


def row(kind: str, how: str, length: int, eps: float = 0.0, **told: Any) -> dict[str, Any]:
    """The one row of a kind."""
    asked = {"kind": kind, "how": how, "length": length, "eps": eps, **told}
    (found,) = [each for each in ROWS if asked.items() <= each.items()]
    return found


def pairs(figure: Any, form: str) -> list[str]:
    """A figure of a length and an eps, in the cells of the table."""
    return [" / ".join(format(figure(n, eps), form) for eps in EPS).replace("-", "−") for n in LENGTHS]


def prefill(what: str, impl: str) -> list[str]:
    def speed(n: int, eps: float) -> float:
        own = row("prefill", "skipping", n, eps, what=what)
        ratio: float = row("prefill", "dense", n, what=what, impl=impl)["ms"] / own["ms"]
        return ratio

    return pairs(speed, ".2f")


def lasting(n: int, eps: float, batch: int) -> float:
    """Speed beside the full cache with the share of looks and recordings."""
    ratio: float = (
        row("decode", "dense", n, batch=batch)["ms"] / row("decode", "forgetting", n, eps, batch=batch)["lasting_ms"]
    )
    return ratio


def decoded(batch: int, field: str, form: str) -> list[str]:
    def share(n: int, eps: float) -> float:
        own = row("decode", "forgetting", n, eps, batch=batch)[field]
        ratio: float = own / row("decode", "dense", n, batch=batch)[field]
        return ratio

    return pairs(share, form)


def perplexity(how: str) -> list[str]:
    def change(n: int, eps: float) -> float:
        ratio: float = row("perplexity", how, n, eps)["perplexity"] / row("perplexity", "dense", n)["perplexity"]
        return ratio - 1

    return pairs(change, "+.3%")


def needle(run: tuple[int, str, str], how: str, length: int, eps: float = 0.0, kind: str = "needle") -> Record | None:
    """The row of a needle run, None where there is no such cache."""
    floor, scheme, target = run
    asked = {
        "variant": f"floor{floor}", "position": scheme, "target": target, "kind": kind, "how": how,
        "length": length, "eps": eps,
    }  # fmt: skip
    found = [each for each in STORED if asked.items() <= each.items()]
    assert len(found) == (how != "forgetting" or floor > 0)
    return found[0] if found else None


def test_the_table_of_the_docs() -> None:
    speed = "decoding, times the full cache's tokens per second: batch 32"
    assert table(page("docs/forgetting.md"), "| floor 4, eps 1e-3 / 1e-2 |") == {
        "tiles looked at": pairs(lambda n, eps: row("tiles", "skipping", n, eps)["mean"], ".3f"),
        "prefill, attention: times the speed of dense cuDNN": prefill("attention", "cudnn"),
        "prefill, whole model: times its own speed": prefill("model", "auto"),
        "cache, share of the full one's bytes (batch 32)": decoded(32, "bytes", ".3f"),
        speed: decoded(32, "tokens_per_second", ".2f"),
        "batch 8": decoded(8, "tokens_per_second", ".2f"),
        "batch 1": decoded(1, "tokens_per_second", ".2f"),
        "change of perplexity, skipping": perplexity("skipping"),
        "change of perplexity, forgetting": perplexity("forgetting"),
    }


def test_what_the_readme_picks() -> None:
    told = " ".join(page("README.md").split("## What forgetting is worth")[1].split("## ")[0].split())
    attention = [cell.split(" / ")[1] for cell in prefill("attention", "cudnn")]
    share = decoded(32, "bytes", ".3f")[1].split(" / ")[1]
    speed = decoded(32, "tokens_per_second", ".2f")[1].split(" / ")[1]
    assert f"attention in prefill {attention[1]} times as fast as dense cuDNN ({attention[0]} at 65,536)" in told
    assert f"with {share} of the cache's bytes at {speed} times the tokens per second (batch 32, between" in told
    changes = [float(x.strip("−+%")) for how in ("skipping", "forgetting") for x in perplexity(how)[1].split(" / ")]
    assert max(changes) < 0.02


def test_what_the_docs_say_of_decoding() -> None:
    told = part("What it is worth")
    forgetting = [each for each in ROWS if each["kind"] == "decode" and each["how"] == "forgetting"]
    kept = [head for each in forgetting for layer in each["kept"] for head in layer]
    assert f"It holds {round(min(kept), -2):,} to {round(max(kept), -2):,} keys a head" in told
    assert not any(each["looked"] for each in forgetting)
    lost = [
        row("decode", "dense", n, batch=batch)["ms"] / row("decode", "forgetting", n, eps, batch=batch)["ms"]
        - lasting(n, eps, batch)
        for n in LENGTHS
        for eps in EPS
        for batch in (32, 8, 1)
    ]
    assert f"would cost {min(lost):.2f} to {max(lost):.2f} in each cell" in told
    best = decoded(32, "tokens_per_second", ".2f")[1].split(" / ")[1]
    assert f"{lasting(131072, 1e-2, 32):.2f} in place of {best}" in told
    gains = [each["launched_ms"] / each["ms"] for each in ROWS if each["kind"] == "decode"]
    assert f"{min(gains):.1f} to {max(gains):.0f} times as fast as the same step" in told
    full, few = ([row("decode", how, n, eps, batch=1)["ms"] for n in LENGTHS for how, eps in found]
                 for found in (PAIRS[:1], PAIRS[1:]))  # fmt: skip
    assert f"{min(full):.2f} and {max(full):.2f} ms with the full cache, {min(few):.2f} to {max(few):.2f} ms" in told


def test_what_the_docs_say_of_prefill() -> None:
    told = part("What it is worth")
    first = [row("tiles", "skipping", 65536, eps)["tiles"][0] for eps in EPS]
    assert f"looks at {' and '.join(f'{sum(heads) / len(heads):.2f}' for heads in first)} of its tiles" in told
    dense = row("prefill", "dense", 65536, what="attention", impl="cudnn")["layers"]
    own = [row("prefill", "skipping", 65536, eps, what="attention")["layers"] for eps in EPS]
    speeds = " and ".join(f"{dense[0] / each[0]:.2f}" for each in own)
    assert f"it is {speeds} times as fast as cuDNN" in told
    speeds = " and ".join(f"{sum(dense[1:]) / sum(each[1:]):.2f}" for each in own)
    assert f"The other five layers together are {speeds} times as fast" in told
    everything = row("prefill", "dense", 65536, what="attention", impl="triton")["ms"]
    assert f"looks at all of them it takes {everything / sum(dense):.2f} times as long as cuDNN" in told


def test_retrieval_by_floor() -> None:
    found = {
        (each["variant"], each["position"], each["target"], each["factor"]): each["accuracy"]
        for each in read_rows(RESULTS / "results.jsonl")
    }
    expected = {
        f"{floor}, {label(scheme)}": [
            " / ".join(f"{found[f'floor{floor}', scheme, target, factor]:.3f}" for factor in (1, 2, 4))
            for target in TARGET_ORDER
        ]
        for floor in FLOORS
        for scheme in SCHEMES
    }
    assert len(found) == len(NEEDLES) * 3
    assert table(page("docs/forgetting.md"), "| floor, at 2,048 / 4,096 / 8,192 tokens |") == expected


def test_needles_at_four_times_the_length() -> None:
    def line(run: tuple[int, str, str]) -> list[str]:
        found = [needle(run, how, 8192, 1e-2 if how != "dense" else 0.0) for how in ("dense", "skipping", "forgetting")]
        tiles = [needle(run, "skipping", 8192, eps, "tiles") for eps in EPS]
        accuracies = ["–" if each is None else f"{each['accuracy']:.3f}" for each in found]
        return [*accuracies, " / ".join(f"{each['mean']:.3f}" for each in tiles if each)]

    told = table(page("docs/forgetting.md"), "| 8,192 tokens |")
    assert told == {f"floor {run[0]}, {label(run[1])}, {run[2]}": line(run) for run in NEEDLES}


@pytest.mark.parametrize(("length", "most"), [(2048, 0.007), (8192, 0.002)])
def test_no_way_of_reading_changes_what_is_found(length: int, most: float) -> None:
    changes = []
    for run in NEEDLES:
        dense = needle(run, "dense", length)
        assert dense is not None
        for how in ("skipping", "forgetting"):
            found = [each for eps in EPS if (each := needle(run, how, length, eps)) is not None]
            changes += [abs(each["accuracy"] - dense["accuracy"]) for each in found]
            assert len({each["hits"] for each in found}) <= 1
    assert round(max(changes), 3) == most <= 0.02
    assert f"{most} at {length:,} tokens" in part("Needles")
    told = page("README.md").split("## What forgetting is worth")[1]
    assert length == 2048 or f"change no accuracy by more than {most} at four times the training length" in told


def test_what_the_docs_say_of_needles() -> None:
    told = part("Needles")
    assert all(each["mean"] == 1 for each in STORED if each["kind"] == "tiles" and each["length"] == 2048)
    floored = {run: each["accuracy"] for run in NEEDLES if run[0] and (each := needle(run, "dense", 8192))}
    guessed = [accuracy for accuracy in floored.values() if accuracy < 0.5]
    assert f"In the other {len(guessed)} of {len(floored)} runs with a floor" in told
    assert f"accuracy is that of a guess ({min(guessed):.2f} to {max(guessed):.2f})" in told
    ages: dict[int, list[float]] = {}
    for run in read_rows(RESULTS / "analysis.jsonl"):
        floor = int(run["variant"].removeprefix("floor"))
        largest = max(gamma for sample in run["gates"]["amplitude"] for layer in sample for gamma in layer)
        if floor:
            rate = largest * floor / 2048
            ages.setdefault(floor, []).append(log(2 / (1e-2 * (1 - exp(-rate)))) / rate)
    assert f"younger than {min(ages[4]):,.0f} tokens under floor 4 and {min(ages[8]):,.0f} under floor 8" in told
    assert min(ages[4]) > 8192 / 2


def test_how_little_needles_let_skip() -> None:
    told = part("Needles")
    looked = {(run, eps): each["mean"] for run in NEEDLES for eps in EPS
              if (each := needle(run, "skipping", 8192, eps, "tiles"))}  # fmt: skip
    four, eight = ([mean for (run, _), mean in looked.items() if run[0] == floor] for floor in (4, 8))
    assert f"Floor 4 looks at {min(four):.3f} or more of the tiles" in told
    assert f"floor 8 at {min(eight):.3f} to {max(eight):.3f}" in told
    found = [1 - mean for (run, _), mean in looked.items() if run[2] == "last"]
    assert f"up to {max(found):.2f} of the tiles left away" in told


def test_what_other_runs_say_of_the_first_needle() -> None:
    told = part("Needles")
    paper = [each for each in read_rows(ROOT / "results/niah/paper/results.jsonl")
             if each["position"] == each["evaluated"] and each["target"] == "first"]  # fmt: skip
    far = sorted(e["accuracy"] for e in paper if e["position"] == "nope+gape" and e["factor"] == 4)
    assert f"{far[0]:.3f}, {far[1]:.3f} and {far[2]:.3f} at 8,192 tokens" in told
    near = [each["accuracy"] for each in paper if each["position"] == "p-rope+gape" and each["factor"] == 1]
    assert min(near) >= 0.999
    (again,) = [
        each["accuracy"] for each in read_rows(ROOT / "results/niah/landmarks/results.jsonl")
        if (each["variant"], each["position"], each["target"], each["factor"]) == ("floor", "p-rope+gape", "first", 1)
    ]  # fmt: skip
    assert f"another run of the same settings in `results/niah/landmarks` {again:.3f}" in told


def test_the_recipe_is_the_run_that_was_measured() -> None:
    (measured,) = [each for each in read_rows(RESULTS / "runs.jsonl") if each["run"] == RUN]
    (trained,) = recipe.load("lm/floor4").runs
    settings, own = measured["settings"], trained.to_dict()
    assert [settings[name] for name in ("model", "task", "batch_size", "seed")] == [
        own[name] for name in ("model", "task", "batch_size", "seed")
    ]
    differing = {name for name, value in own["train"].items() if settings["train"][name] != value}
    assert differing == {"compile", "validate_every", "checkpoint_every", "progress"}


def test_the_evidence_of_the_recipe() -> None:
    told = part("The recipe")
    ppl = {(each["run"], each["context"]): each["perplexity"] for each in books("perplexity") if each["align"] == 32768}
    contexts = (1024, 4096, 32768)
    for run in (RUN, "p-rope+gape_seed0"):
        assert " / ".join(f"{ppl[run, context]:.1f}" for context in contexts) in told
    assert all(ppl[RUN, at] == min(value for (_, context), value in ppl.items() if context == at) for at in contexts)
    free, own = (
        [each["mean"] for n in LENGTHS for each in STORED
         if {"run": run, "kind": "tiles", "length": n, "eps": 1e-2}.items() <= each.items()]
        for run in ("p-rope+gape_seed0", RUN)
    )  # fmt: skip
    assert f"looks at {free[0]:.3f} of its tiles at 65,536 tokens and {free[1]:.3f} at 131,072" in told
    assert f"floor 4 looks at {own[0]:.3f} and {own[1]:.3f}" in told
    matches = page("results/ruler/44m/tables.md").split("string match")[1].split("\n\n")[1].splitlines()[2:]
    assert len(matches) > 1
    assert all(float(cell.split(" ± ")[0]) < 1 for line in matches for cell in cells(line)[2:])
    attention, model, share = (
        found[1].split(" / ")[1]
        for found in (prefill("attention", "cudnn"), prefill("model", "auto"), decoded(32, "bytes", ".3f"))
    )
    assert f"{attention} times as fast as dense cuDNN, the model {model} times as fast as itself, {share} of" in told
    speed = decoded(32, "tokens_per_second", ".2f")[1].split(" / ")[1]
    assert f"{speed} times the tokens per second at batch 32 between looks" in told
