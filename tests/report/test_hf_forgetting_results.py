"""What README and docs/forgetting.md say of a model of transformers is what the stored rows say."""

from __future__ import annotations

from math import expm1
from typing import Any

import numpy as np

from gape.report.results import Record
from gape.tasks.perplexity_rows import difference
from tests.report.test_hf_results import (
    CONTEXTS,
    EVERY,
    FOURTEEN,
    FREE,
    PRUNED,
    SCORED,
    TIMED,
    TWELVE,
    free_heads,
    needles,
    one,
    part,
    perplexity,
    rows,
)
from tests.report.test_language_results import page, signed, table

LENGTHS = (65536, 131072)
RUNS = (FOURTEEN, SCORED["12"])
SECTION = ("docs/forgetting.md", "\n## A model of transformers\n", "\n## ")
FORGETTING = {"forget_eps": 0.01, "bounds": "queries"}


def tried(run: str, kind: str, how: str, eps: float = 0.01, name: str = TIMED, /, **about: Any) -> Record:
    return one("forgetting", name, run=run, kind=kind, how=how, eps=eps, **about)


def share(form: str, field: str, name: str, own: Record, other: Record) -> str:
    """A field of one row over that of another; a dash where either was not measured."""
    if not (rows("forgetting", name, **own) and rows("forgetting", name, **other)):
        return "–"
    return format(one("forgetting", name, **own)[field] / one("forgetting", name, **other)[field], form)


def speed(run: str, what: str, length: int, eps: float = 0.01, name: str = TIMED) -> str:
    """Of prefill that skips, as times that of dense attention, or of the dense model."""
    own = {"kind": "prefill", "run": run, "what": what, "length": length, "how": "skipping", "eps": eps}
    impl = {"attention": "cudnn", "model": "auto"}[what]
    return share(".2f", "ms", name, own | {"how": "dense", "eps": 0.0, "impl": impl}, own)


def both(run: str, what: str, eps: float = 0.01, name: str = TIMED) -> str:
    return " / ".join(speed(run, what, length, eps, name) for length in LENGTHS)


def held(run: str, eps: float = 0.01, name: str = TIMED, batch: int = 8) -> str:
    """Bytes of a forgetting cache at 131,072 tokens as a share of the full one's."""
    own = {"kind": "decode", "run": run, "length": 131072, "batch": batch, "how": "forgetting", "eps": eps}
    return share(".3f", "bytes", name, own, own | {"how": "dense", "eps": 0.0})


def faster(run: str, field: str, batch: int, eps: float = 0.01) -> str:
    """The full cache's time of a token over that of the forgetting one."""
    own = {"kind": "decode", "run": run, "length": 131072, "batch": batch, "how": "forgetting", "eps": eps}
    return share(".2f", field, TIMED, own | {"how": "dense", "eps": 0.0}, own)


def test_what_a_model_of_transformers_gains() -> None:
    looked = [[f"{tried(run, 'tiles', 'skipping', length=n)['mean']:.3f}" for n in LENGTHS] for run in RUNS]
    counted = "decoding there, times the full cache's speed, all tokens counted: batch 24"
    assert table(page("docs/forgetting.md"), "| gains |") == {
        "tiles looked at, 65,536 / 131,072 tokens": [" / ".join(pair) for pair in looked],
        "prefill, attention: times the speed of dense cuDNN": [both(run, "attention") for run in RUNS],
        "prefill, whole model: times its own speed": [both(run, "model") for run in RUNS],
        "cache at 131,072, share of the full one's bytes (batch 8)": [held(run) for run in RUNS],
        counted: [faster(run, "mean_ms", 24) for run in RUNS],
        "batch 8": [faster(run, "mean_ms", 8) for run in RUNS],
        "batch 1, without a look": [faster(run, "mean_ms", 1) for run in RUNS],
        "median tokens alone: batch 24": [faster(run, "ms", 24) for run in RUNS],
        "median tokens, batch 8": [faster(run, "ms", 8) for run in RUNS],
        "median tokens, batch 1": [faster(run, "ms", 1) for run in RUNS],
    }
    finer = f"gain as much in attention ({both(FOURTEEN, 'attention', 1e-3)}) and in bytes ({held(FOURTEEN, 1e-3)})"
    assert finer in part(*SECTION)


def test_what_the_readme_picks() -> None:
    text = part("README.md", "In a model that is there already:", "\n\n")
    for run in (FOURTEEN, "yarn_factor16"):
        assert "{}, {} and {}".format(*(perplexity(run, n, TIMED) for n in CONTEXTS if n != 4096)) in text
    far = [one("perplexity", run=run, context=65536)["nll"] for run in ("yarn", SCORED["12"])]
    assert f"in another training it was {far[0] - far[1]:.2f} nats per token above 12 free heads" in text
    assert f"attention in prefill is {speed(FOURTEEN, 'attention', 131072)} times as fast as dense cuDNN" in text
    assert f"holds {held(FOURTEEN)} of its full one's bytes" in text
    counted = [faster(FOURTEEN, "mean_ms", 8, eps) for eps in (1e-2, 1e-3)]
    assert "decodes {} times as fast at batch 8, all tokens counted ({} with eps 1e-3)".format(*counted) in text
    found = changes(TIMED)
    near, far = (
        max((found[FOURTEEN, n, how, 0.01][0] for how in ("skipping", "forgetting")), key=abs) for n in LENGTHS
    )
    control = found[FOURTEEN, 65536, "skipping", 1e-30][0]
    assert signed(f"changes by {far:+.3%} there and by {near:+.3%} at 65,536 tokens") in text
    assert signed(f"leaving away nothing that counts, changes it by {control:+.3%}") in text
    forgetting, dense = (needles(FOURTEEN, 4096, TIMED, **way)["match"] for way in (FORGETTING, {}))
    assert f"{forgetting:.3f} are found in place of {dense:.3f}" in text


def test_what_free_heads_take() -> None:
    chosen = free_heads(FOURTEEN, TIMED)
    looked = np.array(tried(FOURTEEN, "tiles", "skipping", length=131072)["tiles"])
    kept = np.array(tried(FOURTEEN, "decode", "forgetting", batch=8)["kept"])
    opened, closed = (looked[np.repeat(which, 3, axis=1)].mean() for which in (chosen, ~chosen))
    assert f"({opened:.3f} of them at 131,072 tokens, the 14)" in part(*SECTION)
    assert set(kept[chosen]) == {133136}
    least, most = (round(int(end), -2) for end in (kept[~chosen].min(), kept[~chosen].max()))
    assert f"the others look at {closed:.2f} and keep {least:,} to {most:,} keys of 133,136" in part(*SECTION)
    other = tried(TWELVE, "tiles", "skipping", 0.01, "smollm2", length=131072)["mean"]
    assert f"look at {other:.3f} of the tiles" in part(*SECTION)


def test_times_of_decoding() -> None:
    text = part(*SECTION)
    own = {batch: tried(FOURTEEN, "decode", "forgetting", batch=batch) for batch in (1, 8, 24)}
    full = {batch: tried(FOURTEEN, "decode", "dense", 0.0, batch=batch) for batch in (1, 8, 24)}
    assert [(row["tokens"], row["looked"]) for row in own.values()] == [(1040, 0), (2064, 1), (2064, 1)]
    assert (
        f"behind the prompt a look took {own[8]['forget_ms']:.0f} ms, and recording {own[8]['record_ms']:.0f} ms"
        in text
    )
    assert f"as one in about {round(own[8]['every'], -2):,} does" in text
    assert f"the mean token takes {own[1]['mean_ms'] - own[1]['ms']:.2f} ms more than the median one" in text
    assert (
        f"{full[1]['ms']:.1f} ms with the full cache and {own[1]['ms']:.1f} ms with {held(FOURTEEN, batch=1)}" in text
    )
    assert f"At batch 24 it takes {full[24]['ms']:.1f} and {own[24]['ms']:.1f} ms" in text
    other = tried(SCORED["12"], "decode", "dense", 0.0, batch=8)
    assert f"took {full[8]['ms']:.1f} ms at batch 8 in one run and {other['ms']:.1f} ms in the other" in text
    finer = [faster(run, "mean_ms", 8, 1e-3) for run in RUNS]
    assert "is {} times as fast with 14 heads and {} times with 12".format(*finer) in text


def test_a_look_that_was_not_among_the_tokens() -> None:
    own, full = (tried(FOURTEEN, "decode", *way, batch=1) for way in (("forgetting",), ("dense", 0.0)))
    look = own["forget_ms"] + own["launched_ms"] - own["ms"] + own["record_ms"]
    with_look = full["mean_ms"] / (own["mean_ms"] + look / own["every"])
    assert f"{with_look:.2f} is left of the {faster(FOURTEEN, 'mean_ms', 1)}" in part(*SECTION)


def test_what_a_cache_without_the_bias_would_hold() -> None:
    own, full = (tried(FOURTEEN, "decode", *way, batch=8) for way in (("forgetting",), ("dense", 0.0)))
    heads = free_heads(FOURTEEN, TIMED).size
    each = full["batch"] * heads * (full["length"] + full["tokens"]) * 2
    assert full["bytes"] == each * (80 + 64)
    assert f"the 14 hold {own['bytes'] / (each * (64 + 64)):.3f}" in part(*SECTION)


def test_weights_were_rounded_to_decode() -> None:
    rounded = {row["kind"] for row in rows("forgetting", TIMED) if row["precision"] == "bfloat16-weights"}
    autocast = {row["kind"] for row in rows("forgetting", TIMED) if row["precision"] == "bfloat16"}
    assert (rounded, autocast) == ({"decode"}, {"tiles", "prefill", "perplexity"})
    assert "with weights rounded to bfloat16, prefill and perplexity under bfloat16 autocast" in part(*SECTION)


def changes(name: str) -> dict[tuple[Any, ...], list[float]]:
    """What each way of reading adds to perplexity, as a share, and the interval of that over books."""
    stored = read(name)
    return {key: added(row, stored[*key[:2], "dense", 0.0]) for key, row in stored.items() if key[2] != "dense"}


def read(name: str) -> dict[tuple[Any, ...], Record]:
    keys = ("run", "length", "how", "eps")
    return {tuple(row[key] for key in keys): row for row in rows("forgetting", name, kind="perplexity")}


def added(row: Record, base: Record) -> list[float]:
    ends = difference(row, base)
    assert ends.low is not None
    assert ends.high is not None
    return [row["perplexity"] / base["perplexity"] - 1, expm1(ends.low), expm1(ends.high)]


def separable(change: list[float]) -> bool:
    return change[1] > 0 or change[2] < 0


def costs(runs: list[str], name: str) -> list[list[str]]:
    found, columns = changes(name), []
    for run in runs:
        dense, forgetting, skipping = (needles(run, 4096, name, **way) for way in ({}, FORGETTING, {"skip_eps": 0.01}))
        column = [f"{dense['match']:.3f} / {forgetting['match']:.3f}"]
        for length in reversed(LENGTHS):
            moved = (f"{found[run, length, how, 0.01][0]:+.3%}" for how in ("skipping", "forgetting"))
            dense_at = tried(run, "perplexity", "dense", 0.0, name, length=length)["perplexity"]
            column = [f"{dense_at:.3f}", signed(" / ".join(moved)), *column]
        columns.append([*column, " / ".join(f"{row['nll']:.4f}" for row in (dense, skipping, forgetting))])
    return [list(row) for row in zip(*columns, strict=True)]


def test_what_forgetting_costs() -> None:
    told = page("docs/forgetting.md")
    assert list(table(told, "| costs |").values()) == costs(list(RUNS), TIMED)
    assert list(table(told, "| costs before |").values()) == costs(FREE, "smollm2")
    books = [tried(FOURTEEN, "perplexity", "dense", 0.0, length=length)["documents"] for length in LENGTHS]
    assert "in {} books at 65,536 tokens and {} at 131,072".format(*books) in part(*SECTION)


def test_which_changes_are_separable() -> None:
    text, found = part(*SECTION), changes(TIMED)
    apart = {key: change for key, change in found.items() if separable(change)}
    assert f"Of all {len(found)} changes, other eps among them, four are separable" in text
    assert len(apart) == 4
    assert all(key[1:3] == (65536, "skipping") and change[2] < 0 for key, change in apart.items())
    assert sum(key[0] == FOURTEEN for key in apart) == 3
    assert signed(f"the kernel changes perplexity by {found[FOURTEEN, 65536, 'skipping', 1e-30][0]:+.3%} there") in text
    assert signed(f"moves it by {found[FOURTEEN, 65536, 'forgetting', 1e-30][0]:+.3%}") in text
    assert signed(f"is of the 12 ({found[SCORED['12'], 65536, 'skipping', 1e-3][0]:+.3%}, ") in text
    assert (SCORED["12"], 65536, "skipping", 1e-30) not in found


def test_a_control_that_leaves_nothing_to_be_seen_away() -> None:
    text, stored = part(*SECTION), read(TIMED)
    ways = [(length, how) for length in LENGTHS for how in ("skipping", "forgetting")]
    beside = [added(stored[FOURTEEN, *way, eps], stored[FOURTEEN, *way, 1e-30]) for way in ways for eps in (1e-2, 1e-3)]
    assert not any(map(separable, beside))
    largest = max((change[0] for change in beside), key=abs)
    assert signed(f"the largest is {largest:+.3%}, of forgetting at 65,536 tokens") in text
    finer, control = ([stored[FOURTEEN, n, "skipping", eps]["window_nll"] for n in LENGTHS] for eps in (1e-3, 1e-30))
    assert finer == control
    assert f"each of the {sum(map(len, finer))} windows is the same" in text


def test_models_that_were_trained_before() -> None:
    text, found = part(*SECTION), changes("smollm2")
    attention, bytes_ = (
        [figure(run) for run in PRUNED.values()]
        for figure in (lambda run: both(run, "attention", name="smollm2"), lambda run: held(run, name="smollm2"))
    )
    assert "is {} and {} times as fast".format(*attention) in text
    assert "caches hold {} and {} of the bytes".format(*bytes_) in text
    assert f"attention is {speed(EVERY, 'attention', 131072, name='smollm2')} times as fast at 131,072" in text
    apart = {key: change for key, change in found.items() if separable(change)}
    assert f"Of these {len(found)} changes two are separable" in text
    assert apart.keys() == {(TWELVE, 65536, "forgetting", eps) for eps in (1e-2, 1e-3)}
    coarse, fine = ("{:+.3%} ({:+.3%} … {:+.3%})".format(*change) for change in apart.values())
    assert f"{coarse} with eps 1e-2, and {fine} with 1e-3" in text


def test_needles_that_a_cache_loses() -> None:
    lost_and_won = []
    for run, name, eps in [
        *((run, TIMED, eps) for run in RUNS for eps in (1e-2, 1e-3)),
        (SCORED["12"], "smollm2", 1e-2),
    ]:
        way = FORGETTING | {"forget_eps": eps}
        pairs = list(zip(*(needles(run, 4096, name, **each)["sample_match"] for each in ({}, way)), strict=True))
        lost_and_won.append((sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)))
        assert needles(run, 1024, name)["match"] == needles(run, 1024, name, **way)["match"] == 1
    assert lost_and_won == [(0, 1), (0, 1), (2, 1), (2, 1), (5, 0)]
    text = part(*SECTION)
    assert "loses none and wins one with 14 heads, and loses two and wins one with 12, with eps 1e-3 too" in text
    assert "five needles are lost and none is won" in text
