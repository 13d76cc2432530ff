"""Every figure by name: what it shows, where the paper has it, the data behind it and how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gape.report import diagrams, figures, inside, inside_figures, series
from gape.report.charts import Curves, Maps
from gape.report.results import Results
from gape.report.series import Data
from gape.report.style import house_style, save
from gape.utils import files
from gape.utils.validation import suggestion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The recipe whose results figures of language models show.
LANGUAGE = "lm/books"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure, by the name that `gape reproduce` calls it, and its caption.

    Attributes:
        paper: the label of the paper's figure that it answers; None for one of our own.
        draw: makes the figure from its data.
        measure, derive: makes the data, from results, or of a figure of the theory from nothing.
        recipe: the recipe whose results it shows.
        every_variant: whether it shows all variants of a recipe; others show one, and say which.
        command: of a figure of language models: what of `gape` leaves its rows in a run's directory.
        chart: how the page draws its numbers; None shows the picture.
    """

    name: str
    paper: str | None
    caption: str
    draw: Callable[[Data], Figure]
    measure: Callable[[Results], Data] | None = None
    derive: Callable[[], Data] | None = None
    recipe: str = "niah/paper"
    every_variant: bool = False
    command: str = ""
    chart: Curves | Maps | None = None

    @property
    def how(self) -> str:
        """The commands that make its results."""
        if self.recipe.startswith("hf/"):
            return "the commands of docs/results/smollm2.md"
        of = self.recipe.partition("/")[0]
        train = f"gape {of} train {self.recipe}" + (" data=DIR" if of == "lm" else "")
        measure = f", gape {self.command} runs/{self.recipe}/* --data DIR" if self.command else ""
        return f"{train}{measure} and gape report runs/{self.recipe} --out results/{self.recipe}"

    def data(self, results: Results | None) -> Data:
        """The numbers of the figure; NoData where it needs results that are not there."""
        if self.derive is not None:
            return self.derive()
        if self.measure is None or results is None:
            raise series.NoData(f"{self.name}: got no results, expected those of the recipe {self.recipe}")
        variant = "" if self.every_variant else series.main_variant(results)
        return self.measure(results) | ({"variant": variant} if variant else {})


_ACCURACY = Curves(y="Accuracy", share=True, chance=figures.CHANCE)
_PERPLEXITY = Curves(y="Perplexity", log="xy")

#: A figure of language models.
_language = partial(Entry, recipe=LANGUAGE, every_variant=True)

_NEEDLE = (
    Entry(
        name="accuracy", paper="fig:GAPE_accuracy_analysis", measure=series.accuracy, draw=figures.draw_accuracy,
        chart=_ACCURACY,
        caption="Accuracy by context length for needles close to the query and far from it, each base with and without "
        "gates, ALiBi beside them. Means and deviations over seeds.",
    ),
    Entry(
        name="gates-entropy", paper="fig:GAPE_gate_analysis", measure=inside.gates_entropy,
        draw=inside_figures.draw_gates_entropy,
        caption="Left: the landmark gate along a sequence (layer 2, head 1), the landmark that the theory asks of the "
        "needle in question, and the query's effective context. Right: attention entropy, means over layers, heads and "
        "queries, deviations over samples and seeds.",
    ),
    Entry(
        name="entropy-change", paper="app:niah_entropy", measure=inside.entropy_change,
        draw=inside_figures.draw_entropy_change,
        caption="Change of the mean attention entropy that gates bring, by needle, layer and length, on the same "
        "samples and seeds; below zero is sharper.",
    ),
    Entry(
        name="query-gate", paper="fig:niah_gi_close_far", measure=inside.query_gate,
        draw=inside_figures.draw_query_gate,
        caption="Query gate at the final query token, by layer (L) and head (H). Means and deviations over samples and "
        "seeds.",
    ),
    Entry(
        name="fox", paper="fig:fox_comparison_niah", measure=series.fox, draw=figures.draw_accuracy, chart=_ACCURACY,
        caption="FoX beside NoPE with and without gates and ALiBi.",
    ),
    Entry(
        name="yarn", paper="fig:yarn_comparison_niah", measure=series.yarn, draw=figures.draw_accuracy, chart=_ACCURACY,
        caption="YaRN with factor 4, fixed in training and switched on for evaluation only, with and without gates.",
    ),
    Entry(
        name="logit-gap", paper="fig:theorem3_desmos", derive=diagrams.logit_gap, draw=diagrams.draw_logit_gap,
        caption="Theorem 3: (a) the least logit gap between a query's own key and an unprotected one; (b) the least "
        "query gate that makes it positive.",
    ),
    Entry(
        name="retrieval", paper="fig:prop3_desmos", derive=diagrams.retrieval, draw=diagrams.draw_retrieval,
        caption="Proposition 3 and Corollary 2: (a) what the score of a needle must overcome; (b) the landmark it "
        "needs beyond the length at which scores alone fail.",
    ),
    Entry(
        name="mask", paper="fig:gated_adaptive_pe", derive=diagrams.mask_toy, draw=diagrams.draw_mask_toy,
        caption="The mask M of a toy sequence with two landmarks under a weak and a strong query gate, and what the "
        "last query takes off each key.",
    ),
    Entry(
        name="overview", paper=None, measure=series.overview, draw=figures.draw_accuracy, chart=_ACCURACY,
        caption="Accuracy by context length for every scheme. Means and deviations over seeds.",
    ),
    Entry(
        name="variants", paper=None, measure=series.variants, draw=figures.draw_accuracy, chart=_ACCURACY,
        recipe="niah/landmarks", every_variant=True,
        caption="Accuracy by context length for every variant. Means and deviations over seeds.",
    ),
    Entry(
        name="landmark-kinds", paper=None, measure=inside.landmark_kinds, draw=inside_figures.draw_landmark_kinds,
        recipe="niah/landmarks", every_variant=True,
        caption="Mean landmarks by kind of token. Sparse peaks on needles would be high digits and low fillers.",
    ),
)  # fmt: skip
_LANGUAGE = (
    _language(
        name="lm-perplexity", paper="fig:ood_ppl_by_context_length", command="lm perplexity",
        caption="Perplexity of held-out documents by context length. Bands are 95% intervals over documents, or "
        "deviations over seeds. A line breaks where fewer documents fill the context.",
        measure=series.own_perplexity, draw=figures.draw_perplexity, chart=_PERPLEXITY,
    ),
    _language(
        name="lm-entropy", paper="fig:GAPE_final_layer_analysis", command="analyze entropy",
        caption="Left: attention entropy by layer, means over heads and queries, deviations over samples. Middle: mean "
        "query gate against mean entropy of every head. Right: mean mask of the last layer's heads over training.",
        measure=inside.entropy, draw=inside_figures.draw_entropy,
    ),
    _language(
        name="lm-masks", paper="fig:GAPE_layer5_mask", command="analyze masks",
        caption="The mask M of one layer's heads on one passage, means over cells of queries and keys.",
        measure=inside.masks, draw=inside_figures.draw_masks,
        chart=Maps(of_key="masks", what="mean of M in a cell", logarithmic=False),
    ),
    _language(
        name="lm-spectrum", paper="fig:qk_norms_by_channel_app", command="analyze spectrum",
        caption="Mean norm of queries and keys by rotary pair, fastest first, over layers and heads. Bars are "
        "deviations over samples.",
        measure=inside.spectrum, draw=inside_figures.draw_spectrum,
        chart=Curves(x="Share of rotary pairs that are faster", y="Mean norm", log=""),
    ),
    _language(
        name="lm-routing", paper="fig:GAPE_routing_dynamics",
        caption="Mean mask M, landmark, query gate and amplitude over training on fixed held-out windows, by layer and "
        "head.",
        measure=inside.routing, draw=inside_figures.draw_routing,
    ),
    _language(
        name="lm-maps", paper="fig:attention_maps_layer5_app", command="analyze maps",
        caption="Attention of one layer's heads on the same passage, a row per scheme.",
        measure=inside.maps, draw=inside_figures.draw_maps,
        chart=Maps(of_key="weights", what="attention on a cell's keys", logarithmic=True),
    ),
    _language(
        name="lm-far-back", paper=None, command="analyze far-back",
        caption="Loss on tokens whose answer lies far back, by how far, and the gain: how much lower it is than "
        "without the far text, on the same tokens. Bands are 95% intervals over documents, or deviations over seeds.",
        measure=series.far_back, draw=figures.draw_far_back,
        chart=Curves(x="Answer this many tokens back", y="Nats per token"),
    ),
    _language(
        name="lm-recall", paper=None, recipe="lm/recall",
        caption="Facts of held-out texts that are answered, by context and by where the fact stands. Bands are 95% "
        "intervals over seeds.",
        measure=series.recall, draw=figures.draw_recall, chart=Curves(y="Facts answered", share=True),
    ),
    _language(
        name="hf-perplexity", paper=None, command="hf perplexity",
        caption="Perplexity of held-out documents by context length, of a model of transformers fine-tuned alike with "
        "and without gates. Bands are 95% intervals over documents.",
        measure=series.hf_perplexity, draw=figures.draw_perplexity, chart=_PERPLEXITY,
        recipe="hf/smollm2",
    ),
)  # fmt: skip

FIGURES = {entry.name: entry for entry in _NEEDLE + _LANGUAGE}


def figure(name: str) -> Entry:
    """The figure of that name; a ValueError says which there are."""
    if name not in FIGURES:
        raise ValueError(f"figure: got {name!r}, expected one of {', '.join(FIGURES)}{suggestion(name, FIGURES)}")
    return FIGURES[name]


def write(entry: Entry, results: Results | None, directory: Path) -> list[Path]:
    """Draw a figure, always in the same bytes: the paths of NAME.json with its numbers, NAME.png and NAME.pdf.

    NoData where the results have nothing for it; an ImportError says how to install Matplotlib.
    """
    data = entry.data(results)
    with house_style():
        shown = _escape(data)
        drawing = entry.draw(shown)
        if data.get("variant"):
            title = " · ".join(filter(None, (drawing.get_suptitle(), f"variant {shown['variant']}")))
            drawing.suptitle(title, fontsize=10)
        drawn = save(drawing, directory, entry.name)
    numbers = directory / f"{entry.name}.json"
    files.replace(numbers, (json.dumps(data, ensure_ascii=False) + "\n").encode())
    return [numbers, *drawn]


def _escape(value: Any) -> Any:
    """Data whose names Matplotlib shows as they are, in place of taking what stands between two $ for a formula."""
    if isinstance(value, str):
        return value.replace("$", r"\$")
    if isinstance(value, dict):
        return {_escape(key): _escape(inner) for key, inner in value.items()}
    return [_escape(inner) for inner in value] if isinstance(value, list) else value
