"""What README and docs/forgetting.md say of forgetting is what the stored rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gape.report.results import read_lines
from tests.report.test_language_results import page, table

ROWS = read_lines(Path(__file__).parents[2] / "results" / "forgetting" / "forgetting.jsonl")
EPS, LENGTHS = (1e-3, 1e-2), (65536, 131072)
PAIRS = [("dense", 0.0), *(("forgetting", eps) for eps in EPS)]


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
    attention, share = (
        cells[1].split(" / ")[1] for cells in (prefill("attention", "cudnn"), decoded(32, "bytes", ".3f"))
    )
    speed = f"{lasting(131072, 1e-2, 32):.2f}"
    assert f"attention in prefill {attention} times as fast as dense cuDNN" in told
    assert f"with {share} of the cache's bytes at {speed} times the tokens per second (batch 32," in told
    changes = [float(x.strip("−+%")) for how in ("skipping", "forgetting") for x in perplexity(how)[1].split(" / ")]
    assert max(changes) < 0.02


def test_what_the_docs_say_of_it() -> None:
    told = " ".join(page("docs/forgetting.md").split("## What it is worth")[1].split("## ")[0].split())
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
    assert f"{min(lost):.2f} to {max(lost):.2f} lower in each cell" in told
    gains = [each["launched_ms"] / each["ms"] for each in ROWS if each["kind"] == "decode"]
    assert f"{min(gains):.1f} to {max(gains):.0f} times as fast as the same step" in told
    alone = [row("decode", how, n, eps, batch=1)["ms"] for n in LENGTHS for how, eps in PAIRS]
    assert f"at batch 1 a token takes {min(alone):.1f} to {max(alone):.1f} ms" in told
    first = [row("tiles", "skipping", 65536, eps)["tiles"][0] for eps in EPS]
    assert f"looks at {' and '.join(f'{sum(heads) / len(heads):.2f}' for heads in first)} of its tiles" in told
    dense = row("prefill", "dense", 65536, what="attention", impl="cudnn")["layers"][1:]
    others = [row("prefill", "skipping", 65536, eps, what="attention")["layers"][1:] for eps in EPS]
    speeds = " and ".join(f"{sum(dense) / sum(each):.2f}" for each in others)
    assert f"The other five layers together are {speeds} times as fast" in told
