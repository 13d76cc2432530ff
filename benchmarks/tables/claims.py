"""The paper's claims but for its theorems: what it says, our figure, whether it holds, and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tables import evidence, evidence_inside
from tables.evidence import NOT_MEASURED, Evidence
from tables.language import GATE, LANDMARK
from tables.markdown import table


class Claim(NamedTuple):
    """A claim in our words, with the paper's figure where it has one; what was measured; why; and the page."""

    claim: str
    measure: Callable[[], Evidence]
    why: str
    page: str


def _unmeasured() -> Evidence:
    return NOT_MEASURED


NEEDLES, SPREAD, RULER = "needle.md#accuracy", "needle.md#entropy", "ruler.md"
REACH, ROUTING = "language-models.md#entropy-and-reach", "language-models.md#gates-in-training"

CENTRAL = [
    Claim("Far text is suppressed, so rotations extrapolate: loss at 32 times the training length is below that of "
          "RoPE and p-RoPE",
          evidence.perplexity,
          "RoPE and p-RoPE rise sharply, GAPE a little; ALiBi, FoX and GAPE with a floor do not. So it does "
          "not take these gates.",
          "language-models.md#perplexity"),
    Claim("Important far text is kept: a passage 8,192 tokens back is worth more than with ALiBi, and no less than "
          "with p-RoPE",
          evidence.planted,
          "Less suppression keeps more, so p-RoPE is ahead. A model that copied would gain nearly the whole loss; none "
          "of this size and budget does.",
          "language-models.md#memory-of-far-text"),
    Claim("Both at once in language: far facts are answered at 8 times the training length at 0.8 or more of their "
          "rate at 1×, where ALiBi and FoX fall below 0.2 (our test; the paper measures no such facts)",
          evidence.recall, "The recipe is `lm/recall`.", "recall.md"),
]  # fmt: skip

NEEDLE = [
    Claim("NoPE+GAPE is near perfect (here: 0.95 or more) at every place and length, to 4×",
          lambda: evidence.found("nope+gape", 4, last=True, first=True, middle=True),
          "Without rotations nothing tells the middle needle from its neighbours. The paper shows first "
          "and last.",
          NEEDLES),
    Claim("ALiBi solves the close needle and fails the far one",
          lambda: evidence.found("alibi", 4, last=True, first=False), "A fixed decay.", NEEDLES),
    Claim("RoPE and p-RoPE lose accuracy beyond the training length",
          lambda: evidence.fades(("rope", "last", 16), ("p-rope", "last", 16), ("rope", "first", 4),
                                 ("p-rope", "first", 4)),
          "Slowly on the close needle; at once, to chance, on the far one.", NEEDLES),
    Claim("GAPE improves them on the close needle",
          lambda: evidence.gains(("rope+gape", "rope", "last", 4), ("p-rope+gape", "p-rope", "last", 4),
                                 ("rope+gape", "rope", "last", 16), ("p-rope+gape", "p-rope", "last", 16)),
          "Every mean is above zero; with three seeds only p-RoPE at 16× is separable from it.", NEEDLES),
    Claim("GAPE improves them on the far needle",
          lambda: evidence.gains(("rope+gape", "rope", "first", 4), ("p-rope+gape", "p-rope", "first", 4)),
          "Chance or near it from 2× on, with gates and without. Positions that jump in training cure it in small "
          "models, both ways.", NEEDLES),
    Claim("FoX degrades with length on the close needle",
          lambda: evidence.fades(("fox", "last", 4)), "It does not, up to 16×.", NEEDLES),
    Claim("FoX is at chance on the far needle", lambda: evidence.found("fox", 4, first=False),
          "At every length, the training length too.", NEEDLES),
    Claim("NoPE+GAPE retrieves better than FoX, close and far",
          lambda: evidence.gains(("nope+gape", "fox", "last", 4), ("nope+gape", "fox", "first", 4)),
          "Both find the close needle. The far one is found by NoPE without gates, too.", NEEDLES),
    Claim("Gates add to YaRN, close and far",
          lambda: evidence.gains(("yarn+gape", "yarn", "last", 4), ("yarn+gape", "yarn", "first", 4)),
          "The far needle is at chance with both.", NEEDLES),
    Claim("The query gate is large for a close target and near zero for a far one (here: ten times as large)",
          evidence.query_gate, "In every gated scheme, mean over seeds, first layer.", NEEDLES),
    Claim("Landmarks are sparse peaks at the needles",
          evidence.landmark_peaks, "Only with a price on landmarks (`lambda_l1`), which is 0 in the paper's table.",
          "needle.md#what-makes-landmarks-sparse"),
    Claim("Far needle: GAPE lowers the mean entropy of attention, most for NoPE and p-RoPE",
          lambda: evidence.needle_entropy("first", 4, ("nope", "rope", "p-rope")),
          "Lower in the first layer, higher in the second; three seeds separate neither.", SPREAD),
    Claim("Far needle: NoPE+GAPE lowers the entropy of the second layer (by 0.29 at 4×)",
          lambda: evidence.needle_entropy("first", 4, ("nope",), 1), "Seeds differ by far more.", SPREAD),
    Claim("Close needle: GAPE lowers the entropy of the first layer for NoPE (by 0.21) and p-RoPE (by 0.14 at 4×)",
          lambda: evidence.needle_entropy("last", 4, ("nope", "p-rope"), 0),
          "The mean rises for NoPE; p-RoPE does not change.", SPREAD),
    Claim("ALiBi's entropy falls with length", evidence.alibi_entropy, "It rises a little with either needle.", SPREAD),
]  # fmt: skip

LANGUAGE = [
    Claim("Attention on RULER's prompts has lower entropy than RoPE's and p-RoPE's in every layer",
          evidence_inside.lower_entropy,
          "Beyond the training length only: on books at 1,024 tokens it is not lower. ALiBi's and FoX's is "
          "lower still.",
          REACH),
    Claim("The larger the gate, the lower the entropy", evidence_inside.gate_and_entropy,
          "Layer 0 apart, which has the largest gates and middling entropy.", REACH),
    Claim("Heads specialise: some masks strong, others weak (here: ten times)", evidence_inside.masks_differ,
          "Mean over a batch of 1,024 tokens at the end of training.", ROUTING),
    Claim("GAPE amplifies specialisation: entropies of a layer's heads deviate more than p-RoPE's",
          evidence_inside.specialisation, "A little at the training length, much beyond it.", REACH),
    Claim("Masks rise in all layers, most in layer 1", evidence_inside.masks_rise,
          "They rise in all; layer 0 leads and layer 1 has the least.", ROUTING),
    Claim("Landmarks collapse in layer 1 (here: below 0.1) and stay high in heads of layers 2 and 5 (above 0.5)",
          evidence_inside.landmarks_by_layer, "All fall from 0.5; the layers differ, but not in this way.", ROUTING),
    Claim("Amplitudes stay bounded (here: below 2)", evidence_inside.amplitudes, "They start at 1.", ROUTING),
    Claim("Norms of queries and keys spike at a narrow band of RoPE and p-RoPE (here: twice the mean)",
          evidence_inside.norms, "No spike in either; all three profiles are alike.", ROUTING),
    Claim("Attention maps of the last layer are smooth in RoPE and p-RoPE and varied in GAPE", _unmeasured,
          "To the eye heads of all differ as much; no figure was defined.", ROUTING),
]  # fmt: skip

BENCHMARK = [
    Claim("44M: GAPE has the lowest NLL in all eight columns (0.15 to 2.04 below RoPE, 0.19 to 1.39 below p-RoPE)",
          evidence_inside.ruler_losses,
          "Lower on `vt`, against RoPE also on `niah_multikey_1`; higher on `cwe`. At this size the NLL says how the "
          "wording suits a model more than what it remembers.", RULER),
    Claim("The gap to RoPE widens from 4k to 8k", evidence_inside.ruler_widening,
          "On `vt`. On `cwe` it widens against GAPE. In the paper's own 44M rows it widens on `cwe` alone.", RULER),
    Claim("GAPE retrieves better (`niah_multikey_1`)", evidence_inside.ruler_answers,
          "No 44M model answers at all. The paper reports no answers, only NLL.", RULER),
    Claim("GPT-2 124M fine-tuned with GAPE: lowest NLL in six of eight columns", _unmeasured,
          "Not run. SmolLM2-135M with gates is another setting: [smollm2](smollm2.md).", RULER),
    Claim("Without the query gate NLL rises, by 0.63% to 4.70%, but falls on `cwe`, by 2.07% to 3.10%",
          lambda: evidence_inside.ruler_ablation(GATE), "It rises on `cwe`, too.", "ruler.md#ablations"),
    Claim("Without the landmark NLL rises in six of eight columns, by 0.61% to 5.49%",
          lambda: evidence_inside.ruler_ablation(LANDMARK),
          "Elsewhere not separable. Nothing here shows that learned landmarks keep what a fixed one would lose.",
          "ruler.md#ablations"),
]  # fmt: skip

COST = [
    Claim("Two extra coordinates give the bias exactly (here: at most twice plain attention's error)",
          evidence_inside.exactness,
          "True in real arithmetic. In bfloat16 two large terms cancel; six coordinates (`split`) keep the error of "
          "plain attention.", "precision.md"),
    Claim("Gates cost next to nothing (here: at most 5% of the time)", evidence_inside.speed,
          "The needle model is 64 wide, so gates are a larger part of it. Training beyond 2,048 tokens takes another "
          "kernel, which is slower than cuDNN without a bias.", "speed.md#a-layer-with-gates-beside-rope"),
    Claim("The cache is no larger than RoPE's", evidence_inside.cache_bytes,
          "Coordinates that only carry the bias are not cached; a landmark is.", "forgetting.md"),
]  # fmt: skip


SECTIONS = {
    "both at once": CENTRAL, "needle task": NEEDLE, "inside language models": LANGUAGE, "RULER": BENCHMARK,
    "precision and cost": COST,
}  # fmt: skip
VERDICTS = ("held", "partly", "not held", "not measured")


@cache
def _measured(claim: Claim) -> Evidence:
    return claim.measure()


def claims(section: str) -> str:
    """A row for each claim of a section."""
    lines = []
    for claim in SECTIONS[section]:
        own = _measured(claim)
        page = f"[{claim.page.split('.')[0]}]({claim.page})"
        lines.append([claim.claim, own.figure, own.verdict, claim.why, page])
    return table(["the paper says", "here, with 95% interval", "held?", "why", "evidence"], lines, "---")


def counts() -> str:
    """How many claims of each section hold."""
    lines = []
    for section, own in SECTIONS.items():
        words = [_measured(claim).verdict.partition(" (")[0] for claim in own]
        link = f"[{section}](#{section.lower().replace(' ', '-')})"
        lines.append([link, *(str(words.count(word)) for word in VERDICTS)])
    return table(["claims", *VERDICTS], lines)
