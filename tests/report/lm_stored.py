"""Made-up results of language models in the form that runs leave behind."""

from __future__ import annotations

import random
from typing import Any

from gape.report.results import Results

SCHEMES = ("rope", "p-rope", "p-rope+gape", "p-rope+gape_floor4", "alibi", "fox")
CONTEXTS, DISTANCES = (512, 1024, 4096, 32768), (512, 2048, 8192)


def identity(variant: str, seed: int = 0) -> dict[str, Any]:
    return {
        "run": f"{variant}_seed{seed}", "variant": variant, "position": variant.partition("_")[0], "seed": seed,
        "train_length": 1024, "step": 500,
    }  # fmt: skip


def stored(schemes: tuple[str, ...] = SCHEMES, seeds: int = 1, layers: int = 2, heads: int = 4) -> Results:
    """Results of a small sweep: schemes with gates, ALiBi and FoX read on, the others do not."""
    measured: dict[str, list[dict[str, Any]]] = {}

    def add(file: str, who: dict[str, Any], **row: Any) -> None:
        measured.setdefault(file, []).append(who | row)

    for seed in range(seeds):
        for variant in schemes:
            who, draw = identity(variant, seed), random.Random(f"{variant}{seed}")
            _perplexities(add, who, draw)
            _far_back(add, who, draw)
            _recall(add, who, draw)
            _looks(add, who, draw, layers, heads)
    runs = tuple(
        {"run": identity(variant, seed)["run"], "settings": {"seed": seed, "model": {"n_layer": layers}}}
        for seed in range(seeds)
        for variant in schemes
    )
    return Results(runs=runs, measured={kind: tuple(rows) for kind, rows in measured.items()})


def reads_on(position: str) -> bool:
    return "gape" in position or position in ("alibi", "fox")


def _perplexities(add: Any, who: dict[str, Any], draw: random.Random) -> None:
    for context in CONTEXTS:
        query = {"protocol": "last-k", "context": context, "last": 512, "align": 0, "corpus": "c", "split": "heldout"}
        grown = 0.0 if reads_on(who["position"]) else 0.3 * max(0, CONTEXTS.index(context) - 1)
        windows = [4.2 + grown + draw.gauss(0, 0.05) for _ in range(12)]
        nll = sum(windows) / 12
        for stratum in ("8192", "32768"):
            add("perplexity", who, **query, stratum=stratum, plan=f"{context}{stratum}", documents=4, windows=12,
                tokens=6144, nll=nll, perplexity=2.718**nll, std=0.05, low=nll - 0.03, high=nll + 0.03,
                window_nll=windows, window_document=[0, 1, 2, 3] * 3, window_tokens=512)  # fmt: skip


def _far_back(add: Any, who: dict[str, Any], draw: random.Random) -> None:
    for kind in ("ngram", "names", "planted"):
        for distance in DISTANCES:
            worth = 0.0 if who["position"] == "alibi" else 1.0
            tokens = [20, 30, 40]
            control = [t * (3 + draw.gauss(0, 0.05)) for t in tokens]
            nll = [c - worth * t for c, t in zip(control, tokens, strict=True)]
            mean, gain = sum(nll) / 90, (sum(control) - sum(nll)) / 90
            add("far_back", who, kind=kind, distance=distance, context=32768, tokens=90, documents=3, nll=mean,
                std=0.1, low=mean - 0.1, high=mean + 0.1, control=mean + gain, gain=gain, gain_low=gain - 0.1,
                gain_high=gain + 0.1, document=["a", "b", "c"], document_tokens=tokens, document_nll=nll,
                document_control=control, key="k", asked={"ngram": 4})  # fmt: skip


def _recall(add: Any, who: dict[str, Any], draw: random.Random) -> None:
    for length in CONTEXTS:
        for what in ("far", "middle", "near", "several"):
            add("recall", who, what=what, length=length, match=draw.random())
        add("recall", who, what="generate", length=length, tokens_per_second=100.0, cache_bytes=2**20 * length)


def _looks(add: Any, who: dict[str, Any], draw: random.Random, layers: int, heads: int) -> None:
    gated = "gape" in who["position"]

    def cells(low: float, high: float, samples: int = 3) -> list[list[list[float]]]:
        return [[[draw.uniform(low, high) for _ in range(heads)] for _ in range(layers)] for _ in range(samples)]

    sets = []
    for data, length in (("books", 1024), ("books", 4096), ("ruler.jsonl", None)):
        sets.append(
            {
                "asked": {"data": data, "length": length}, "passages": ["a", "b", "c"], "tokens": [1024] * 3,
                "shares": [0.5, 0.1, 0.01], "given_up": 0.01, "entropy": cells(2, 4), "distance": cells(10, 50),
                "sink": cells(0, 0.3), "used": [[[[20, 100, 400]] * heads] * layers] * 3,
                "effective": cells(500, 5000) if gated or who["position"] == "alibi" else None,
                "amplitude": cells(1, 1.2, 1)[0] if gated else None,
                **{name: cells(0.1, 0.9) if gated else None for name in ("gate", "landmark", "mask", "correlation")},
            }
        )  # fmt: skip
    add("entropy", who, sets=sets)
    if who["position"].startswith(("rope", "p-rope")):
        pairs = 29 if gated else 32
        norms = {"mean": [[[draw.uniform(0.5, 2) for _ in range(pairs)]] * heads] * layers}
        norms["std"] = [[[0.1] * pairs] * heads] * layers
        spectra = {"inv_freq": [2.0**-k for k in range(pairs)], "queries": norms, "keys": norms}
        add("spectrum", who, sets=[{"asked": {"data": "books", "length": 1024}} | spectra])
    place = {"asked": {"data": "books", "length": 1024}, "passage": "a@0", "layer": layers - 1, "length": 1024}
    add("maps", who, sets=[place | {"weights": [[[1.0, 0.0], [0.4, 0.6]]] * heads}])
    if gated:
        add("masks", who, sets=[place | {"masks": [[[0.1, None], [0.4, 0.2]]] * heads, "mean": [0.2] * heads}])
        for step in (0, 250, 500):
            for layer in range(layers):
                for head in range(heads):
                    values = {name: draw.uniform(0, 1) for name in ("mean_mask", "landmark", "gate", "amplitude")}
                    add("routing", who | {"step": step}, layer=layer, head=head, **values)
