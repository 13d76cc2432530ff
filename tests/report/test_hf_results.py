"""What README and docs/hf.md say of SmolLM2 is what the stored rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gape.report.results import Record, read_rows
from gape.tasks.perplexity_rows import difference
from gape.utils.jsonl import read_object
from tests.report.test_language_results import ROOT, page, table

HF = ROOT / "results" / "hf"
SCORED = {"12": "yarn+gape_floors12", "18": "yarn+gape_floors18"}
PRUNED = {"12": "yarn+gape_floors12-pruned", "15": "yarn+gape_floors15-pruned"}
FREE = [*SCORED.values(), *PRUNED.values()]
TWELVE, EVERY = PRUNED["12"], "yarn+gape_floor200"
LEARNED, TIMED = "smollm2-landmarks", "smollm2-forgetting"
FOURTEEN = "yarn+gape_floors14"
CONTEXTS = (1024, 4096, 16384, 65536)


def rows(file: str, name: str = "smollm2", /, **about: Any) -> list[Record]:
    stored = read_rows(HF / name / f"{file}.jsonl")
    return [row for row in stored if all(row.get(key) == value for key, value in about.items())]


def one(file: str, name: str = "smollm2", /, **about: Any) -> Record:
    (row,) = rows(file, name, **about)
    return row


def perplexity(run: str, context: int, name: str = "smollm2") -> str:
    return f"{one('perplexity', name, run=run, context=context)['perplexity']:.2f}"


def needles(run: str, length: int, name: str = "smollm2", /, **way: Any) -> Record:
    """RULER's first task by a run, read in some way; densely without."""
    found = [row for row in rows("ruler", name, length=length, **way) if row["run"].split(",")[0] == run]
    (row,) = (row for row in found if way or not {"forget_eps", "skip_eps"} & row.keys())
    return row


def part(path: str, start: str, end: str) -> str:
    """What a page says from one place to the next, as one line."""
    return " ".join(page(path).split(start, 1)[1].split(end, 1)[0].split())


def free(floors: list[list[float]]) -> npt.NDArray[np.bool_]:
    """Which key heads have no floor, by layer; three query heads share one."""
    return ~np.array(floors, dtype=np.bool_)[:, ::3]


def free_heads(run: str, name: str = "smollm2") -> npt.NDArray[np.bool_]:
    (settings,) = (row["settings"] for row in rows("runs", name, run=run) if "settings" in row)
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


def test_the_same_on_other_books() -> None:
    runs = {"YaRN, factor 16": "yarn_factor16"}
    runs |= {f"YaRN+GAPE, {n} key heads free by scores": f"yarn+gape_floors{n}" for n in (12, 14)}
    expected = {label: [perplexity(run, context, TIMED) for context in CONTEXTS] for label, run in runs.items()}
    for label, run in runs.items():
        gated = "+gape" in run
        expected[label] += [f"{needles(run, n, TIMED)['match']:.3f}" if gated else "–" for n in (1024, 4096)]
    assert table(page("docs/hf.md"), "| on other books, perplexity at |") == expected
    text = part("docs/hf.md", "**The same on other books.**", "\n## ")
    pairs = [[one("perplexity", TIMED, run=run, context=n) for run in (FOURTEEN, "yarn_factor16")] for n in CONTEXTS]
    near, middle, far, farthest = (own["nll"] - alone["nll"] for own, alone in pairs)
    assert f"it is {-farthest:.2f} nats per token below YaRN of the same factor at 65,536 tokens" in text
    assert (
        f"and {-far:.2f} at 16,384, and {near:.2f} above it at 1,024; {middle:.2f} at 4,096 are not separable" in text
    )
    ends = difference(*pairs[1])
    assert ends.low < 0 < ends.high
    assert "in {windows} other windows, in {documents} of the same held-out books".format(**pairs[0][0]) in text
    found = [f"{needles(SCORED['12'], 4096, name)['match']:.3f}" for name in (TIMED, "smollm2")]
    assert "find {} of the needles after this training and {} after the other".format(*found) in text


def test_heads_by_scores_of_longer_texts() -> None:
    chosen = free(read_object(HF / TIMED / "floors" / "floors14.json")["gate_floor"])
    assert (chosen == free_heads(FOURTEEN, TIMED)).all()
    assert chosen.sum() == 14
    twelve = free_heads(SCORED["12"])
    assert (free_heads(SCORED["12"], TIMED) == twelve).all()
    # "those 12 and two more"
    assert chosen[twelve].all()


def test_landmarks_that_learn() -> None:
    text = page("docs/hf.md").split("**Landmarks that learn open**")[1].split("\n\n")[0]
    for run in ("rope+gape_floor32", "yarn+gape_floors12"):
        for context in (1024, 65536):
            assert perplexity(run, context, LEARNED) in text
    for run in SCORED.values():
        closed, learned = (one("perplexity", name, run=run, context=1024) for name in ("smollm2", LEARNED))
        assert f"the learned ones are {closed['nll'] - learned['nll']:.2f} nats lower" in text
