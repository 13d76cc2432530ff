"""What README, docs/hf.md and docs/forgetting.md say of SmolLM2 is what the stored rows say."""

from __future__ import annotations

from math import expm1
from typing import Any

import numpy as np
import numpy.typing as npt

from gape.report.results import Record, read_lines
from gape.tasks.measured import difference
from gape.train.log import read_object
from tests.report.test_language_results import ROOT, page, signed, table

HF = ROOT / "results" / "hf"
SCORED = {"12": "yarn+gape_floors12", "18": "yarn+gape_floors18"}
PRUNED = {"12": "yarn+gape_floors12-pruned", "15": "yarn+gape_floors15-pruned"}
FREE = [*SCORED.values(), *PRUNED.values()]
TWELVE, EVERY = PRUNED["12"], "yarn+gape_floor200"
LEARNED = "smollm2-landmarks"
CONTEXTS, LENGTHS = (1024, 4096, 16384, 65536), (65536, 131072)
SECTION = ("docs/forgetting.md", "\n## A model of transformers\n", "\n## ")
FORGETTING = {"forget_eps": 0.01, "bounds": "queries"}


def rows(file: str, name: str = "smollm2", /, **about: Any) -> list[Record]:
    stored = read_lines(HF / name / f"{file}.jsonl")
    return [row for row in stored if all(row.get(key) == value for key, value in about.items())]


def one(file: str, name: str = "smollm2", /, **about: Any) -> Record:
    (row,) = rows(file, name, **about)
    return row


def perplexity(run: str, context: int, name: str = "smollm2") -> str:
    return f"{one('perplexity', name, run=run, context=context)['perplexity']:.2f}"


def needles(run: str, length: int, **way: Any) -> Record:
    """RULER's first task by a run, read in some way; densely without."""
    found = [row for row in rows("ruler", length=length, **way) if row["run"].split(",")[0] == run]
    (row,) = (row for row in found if way or not {"forget_eps", "skip_eps"} & row.keys())
    return row


def part(path: str, start: str, end: str) -> str:
    """What a page says from one place to the next, as one line."""
    return " ".join(page(path).split(start, 1)[1].split(end, 1)[0].split())


def free(floors: list[list[float]]) -> npt.NDArray[np.bool_]:
    """Which key heads have no floor, by layer; three query heads share one."""
    return ~np.array(floors, dtype=np.bool_)[:, ::3]


def free_heads(run: str) -> npt.NDArray[np.bool_]:
    (settings,) = (row["settings"] for row in rows("runs", run=run) if "settings" in row)
    return free(settings["model"]["gates"]["gate_floor"])


def test_models_beyond_their_context() -> None:
    contexts = (1024, 8192, 16384, 32768, 65536)
    runs = {"RoPE": "rope", "RoPE+GAPE": "rope+gape", "RoPE+GAPE, gate floor 4": "rope+gape_floor4", "p-RoPE": "p-rope"}
    runs |= {"SmolLM2-135M as it comes": "smollm2", "YaRN, factor 8": "yarn"}
    expected = {label: [perplexity(run, context) for context in contexts] for label, run in runs.items()}
    assert table(page("docs/hf.md"), "| context | 1,024 | 8,192 |") == expected


def test_floors_on_top_of_yarn() -> None:
    runs = {"YaRN, factor 16": "yarn_factor16", "YaRN, factor 8": "yarn", "YaRN+GAPE, a floor in every head": EVERY}
    runs |= {f"YaRN+GAPE, {heads} key heads free by scores": run for heads, run in SCORED.items()}
    runs |= {f"YaRN+GAPE, {heads} key heads free by pruning": run for heads, run in PRUNED.items()}
    expected = {}
    for label, run in runs.items():
        found = [f"{needles(run, length)['match']:.3f}" if run in FREE else "–" for length in (1024, 4096)]
        expected[label] = [perplexity(run, context) for context in CONTEXTS] + found
    assert table(page("docs/hf.md"), "| perplexity at | 1,024 |") == expected
    assert [free_heads(run).sum() for run in FREE] == [12, 18, 12, 15]


def test_perplexity_with_floors_beside_that_of_yarn() -> None:
    text = part("docs/hf.md", "- **Perplexity no longer grows", "- **Needles**")
    far, near = ({row["run"]: row["perplexity"] for row in rows("perplexity", context=n)} for n in (65536, 1024))
    rise = {run: far[run] / near[run] - 1 for run in (EVERY, *FREE)}
    assert f"With 18 it rises by {rise.pop(SCORED['18']):.0%}." in text
    assert f"at most {max(rise.values()):.1%} above" in text
    sentences = {
        "yarn_factor16": "{3} nats per token below YaRN of the same factor at 65,536 and {2} at 16,384, "
        "and {0} above it at 1,024 and {1} at 4,096",
        "yarn": "{3} nats per token lower at 65,536 and {2} at 16,384, and {0} higher at 1,024 and 4,096",
    }
    for other, sentence in sentences.items():
        pairs = [[one("perplexity", run=run, context=n)["nll"] for run in (SCORED["12"], other)] for n in CONTEXTS]
        nats = [own - alone for own, alone in pairs]
        assert [each > 0 for each in nats] == [True, True, False, False]
        assert sentence.format(*(f"{abs(each):.2f}" for each in nats)) in text
    assert f"{nats[0]:.2f}" == f"{nats[1]:.2f}"


def test_how_heads_were_chosen() -> None:
    text = part("docs/hf.md", "- **Needles** are found", "- **Landmarks that learn open**")
    for length, counts in ((16384, [3, 3, 1, 1]), (32768, [1, 1, 1, 1])):
        assert [16 * needles(run, length)["match"] for run in FREE] == counts
    assert "3 of 16 at 16,384 with heads by scores and 1 of 16 with pruned ones, 1 of 16 at 32,768 with either" in text
    files = {run: read_object(HF / "smollm2" / "floors" / f"{run.split('_')[1]}.json") for run in FREE}
    assert all((free(file["gate_floor"]) == free_heads(run)).all() for run, file in files.items())
    loss = dict(zip(range(30, 11, -1), files[TWELVE]["loss"], strict=True))
    assert f"fell from {loss[30]:.3f} with 30 free heads to {loss[24]:.3f} with 24" in text
    assert f"rose to {loss[15]:.3f} with 15 and {loss[12]:.3f} with 12" in text
    assert min(loss, key=lambda free: loss[free]) == 24
    shared = free_heads(TWELVE) & free_heads(SCORED["12"])
    assert f"Of those 12, {shared.sum()} are among the 12 by scores" in text
    pruned, scored = ([needles(run, n)["nll"] for n in (1024, 4096)] for run in (TWELVE, SCORED["12"]))
    assert f"NLL of the answers {pruned[0]:.3f}, by scores {scored[0]:.3f}" in text
    assert f"at 4,096 ({pruned[1]:.3f} and {scored[1]:.3f})" in text


def test_what_the_readme_picks() -> None:
    text = part("README.md", "In a model that is there already:", "\n\n")
    for run in (SCORED["12"], "yarn"):
        assert "{}, {} and {}".format(*(perplexity(run, context) for context in (1024, 16384, 65536))) in text
    assert f"finds {needles(SCORED['12'], 4096)['match']:.3f} of" in text
    assert f"find only {needles(TWELVE, 4096)['match']:.3f} of" in text
    assert f"attention in prefill is {speed(TWELVE, 'attention', 131072)} times as fast as dense cuDNN" in text
    assert f"holds {decoded(TWELVE, 'bytes', '.3f')} of the bytes" in text


def test_landmarks_that_learn() -> None:
    text = page("docs/hf.md").split("**Landmarks that learn open**")[1].split("\n\n")[0]
    for run in ("rope+gape_floor32", "yarn+gape_floors12"):
        for context in (1024, 65536):
            assert perplexity(run, context, LEARNED) in text
    for run in SCORED.values():
        closed, learned = (one("perplexity", name, run=run, context=1024) for name in ("smollm2", LEARNED))
        assert f"the learned ones are {closed['nll'] - learned['nll']:.2f} nats lower" in text


def tried(run: str, kind: str, how: str, eps: float = 0.01, **about: Any) -> Record:
    return one("forgetting", run=run, kind=kind, how=how, eps=eps, **about)


def share(form: str, field: str, own: Record, other: Record) -> str:
    """A field of one row over that of another; a dash where either was not measured."""
    if not (rows("forgetting", **own) and rows("forgetting", **other)):
        return "–"
    return format(one("forgetting", **own)[field] / one("forgetting", **other)[field], form)


def speed(run: str, what: str, length: int, eps: float = 0.01) -> str:
    """Of prefill that skips, as times that of dense attention, or of the dense model."""
    own = {"kind": "prefill", "run": run, "what": what, "length": length, "how": "skipping", "eps": eps}
    impl = {"attention": "cudnn", "model": "auto"}[what]
    return share(".2f", "ms", own | {"how": "dense", "eps": 0.0, "impl": impl}, own)


def decoded(run: str, field: str, form: str, batch: int = 8, eps: float = 0.01) -> str:
    """A field of a forgetting cache at 131,072 tokens as a share of the full one's."""
    own = {"kind": "decode", "run": run, "length": 131072, "batch": batch, "how": "forgetting", "eps": eps}
    return share(form, field, own, own | {"how": "dense", "eps": 0.0})


def test_what_a_model_of_transformers_gains() -> None:
    runs = (*PRUNED.values(), EVERY)
    looked = [[f"{tried(run, 'tiles', 'skipping', length=n)['mean']:.3f}" for n in LENGTHS] for run in runs]
    attention, model = ([[speed(run, what, n) for n in LENGTHS] for run in runs] for what in ("attention", "model"))
    size, rate = ("bytes", ".3f"), ("tokens_per_second", ".2f")
    faster = "decoding there between looks, times the full cache's tokens per second: batch 8"
    assert table(page("docs/forgetting.md"), "| gains |") == {
        "tiles looked at, 65,536 / 131,072 tokens": [" / ".join(pair) for pair in looked],
        "prefill, attention: times the speed of dense cuDNN": [" / ".join(pair) for pair in attention],
        "prefill, whole model: times its own speed": [" / ".join(pair) for pair in model],
        "cache at 131,072, share of the full one's bytes (batch 8)": [decoded(run, *size) for run in runs],
        faster: [decoded(run, *rate) for run in runs],
        "batch 1": [decoded(run, *rate, batch=1) for run in runs],
    }
    finer = " / ".join(speed(TWELVE, "attention", length, 1e-3) for length in LENGTHS)
    held, faster = (decoded(TWELVE, *told, eps=1e-3) for told in (size, rate))
    assert f"{finer} in attention, {held} of the bytes, {faster} in decoding" in part(*SECTION)


def test_what_free_heads_take() -> None:
    chosen, looked = free_heads(TWELVE), np.array(tried(TWELVE, "tiles", "skipping", length=131072)["tiles"])
    kept = np.array(tried(TWELVE, "decode", "forgetting", batch=8)["kept"])
    opened, closed = (looked[np.repeat(which, 3, axis=1)].mean() for which in (chosen, ~chosen))
    assert f"({opened:.2f} of them at 131,072 tokens, the 12 pruned ones)" in part(*SECTION)
    assert set(kept[chosen]) == {131096}
    least, most = (round(int(end), -2) for end in (kept[~chosen].min(), kept[~chosen].max()))
    assert f"the others look at {closed:.2f} and keep {least:,} to {most:,} keys of 131,096" in part(*SECTION)


def test_times_of_decoding() -> None:
    text, held = part(*SECTION), decoded(TWELVE, "bytes", ".3f", batch=1)
    full = {batch: f"{tried(TWELVE, 'decode', 'dense', 0.0, batch=batch)['ms']:.1f} ms" for batch in (1, 8, 24)}
    few = {batch: f"{tried(TWELVE, 'decode', 'forgetting', batch=batch)['ms']:.1f} ms" for batch in (1, 8)}
    assert f"{full[1]} with the full cache and {few[1]} with {held} of its bytes" in text
    assert f"At batch 8 it takes {full[8].split()[0]} and {few[8]}" in text
    assert f"A full cache of batch 24 takes {full[24]}" in text
    other = f"{tried(PRUNED['15'], 'decode', 'dense', 0.0, batch=8)['ms']:.1f} ms"
    assert f"The same full cache took {full[8]} in one run and {other} in the other" in text


def changes() -> dict[tuple[Any, ...], list[float]]:
    """What each way of reading adds to perplexity, as a share, and the interval of that over books."""
    keys, found = ("run", "length", "how", "eps"), {}
    stored = {tuple(row[key] for key in keys): row for row in rows("forgetting", kind="perplexity")}
    for key in (key for key in stored if key[2] != "dense"):
        row, dense = stored[key], stored[*key[:2], "dense", 0.0]
        ends = difference(row, dense)
        assert ends.low is not None
        assert ends.high is not None
        found[key] = [row["perplexity"] / dense["perplexity"] - 1, expm1(ends.low), expm1(ends.high)]
    return found


def test_what_forgetting_costs() -> None:
    found, columns = changes(), []
    for run in FREE:
        dense, forgetting, skipping = (needles(run, 4096, **way) for way in ({}, FORGETTING, {"skip_eps": 0.01}))
        column = [f"{dense['match']:.3f} / {forgetting['match']:.3f}"]
        for length in reversed(LENGTHS):
            added = (f"{found[run, length, how, 0.01][0]:+.3%}" for how in ("skipping", "forgetting"))
            read = tried(run, "perplexity", "dense", 0.0, length=length)["perplexity"]
            column = [f"{read:.3f}", signed(" / ".join(added)), *column]
        columns.append([*column, " / ".join(f"{row['nll']:.4f}" for row in (dense, skipping, forgetting))])
    told = table(page("docs/forgetting.md"), "| costs |")
    assert list(told.values()) == [list(row) for row in zip(*columns, strict=True)]


def test_which_changes_are_separable() -> None:
    text, found = part(*SECTION), changes()
    apart = {key: change for key, change in found.items() if change[1] > 0 or change[2] < 0}
    assert f"Of all {len(found)} changes, those with eps 1e-3 among them, {len(found) - len(apart)} are not" in text
    assert apart.keys() == {(TWELVE, 65536, "forgetting", eps) for eps in (1e-2, 1e-3)}
    coarse, fine = ("{:+.3%} ({:+.3%} … {:+.3%})".format(*change) for change in apart.values())
    assert f"{coarse} with eps 1e-2, and {fine} with 1e-3" in text
    ways = (("dense", 0.0), ("forgetting", 1e-2), ("forgetting", 1e-3))
    dense, *others = (np.array(tried(TWELVE, "perplexity", *way, length=65536)["window_nll"]) for way in ways)
    assert f"(correlation {np.corrcoef(*(each - dense for each in others))[0, 1]:.2f})" in text
    books = [tried(TWELVE, "perplexity", "dense", 0.0, length=length)["documents"] for length in LENGTHS]
    assert "in {} books at 65,536 tokens and {} at 131,072".format(*books) in text


def test_needles_that_a_cache_loses() -> None:
    lost_and_won = []
    for run, way in [*((run, FORGETTING) for run in FREE), (TWELVE, FORGETTING | {"forget_eps": 0.001})]:
        pairs = list(zip(*(needles(run, 4096, **each)["sample_match"] for each in ({}, way)), strict=True))
        lost_and_won.append((sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)))
        assert needles(run, 1024)["match"] == needles(run, 1024, **way)["match"] == 1
    assert lost_and_won == [(5, 0), (0, 0), (0, 1), (1, 2), (0, 1)]
    text = part(*SECTION)
    assert "With 18 free heads by scores forgetting loses no needle of 128 at 4,096 tokens and wins none" in text
    assert "With 12 five are lost and none is won" in text
    assert "none is lost and one is won, with eps 1e-3 too; with 15 one is lost and two are won" in text
