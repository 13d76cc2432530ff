"""Draw every table of README.md and docs/ again, from the rows in results/ and benchmarks/data.

A page has `<!-- table: NAME -->`, the table, and `<!-- end -->`; `TABLES` says what draws it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import common
from tables import claims, eviction, extend, forgetting, generate, language, needle, readme, smollm2, speed

#: What draws a table, by its name in a page.
TABLES: dict[str, Callable[[], str]] = {
    "schemes": readme.schemes,
    "claims": claims.counts,
    "claims-central": lambda: claims.claims("both at once"),
    "claims-needle": lambda: claims.claims("needle task"),
    "claims-language": lambda: claims.claims("inside language models"),
    "claims-ruler": lambda: claims.claims("RULER"),
    "claims-cost": lambda: claims.claims("precision and cost"),
    "readme-cost": readme.training_cost,
    "readme-generate": readme.generation_cost,
    "needle-last": lambda: needle.accuracy("last"),
    "needle-first": lambda: needle.accuracy("first"),
    "needle-middle": lambda: needle.accuracy("middle"),
    "needle-gains-last": lambda: needle.gains("last"),
    "needle-gains-first": lambda: needle.gains("first"),
    "needle-gates": needle.query_gates,
    "needle-landmarks": needle.landmarks,
    "needle-far-first": lambda: needle.far_small("first"),
    "needle-far-last": lambda: needle.far_small("last"),
    "needle-precision-last": lambda: needle.precision("nope+gape", "last"),
    "needle-precision-first": lambda: needle.precision("nope+gape", "first"),
    "needle-tied": needle.tied,
    "needle-step": needle.step_time,
    "lm-perplexity": lambda: language.perplexity(32768),
    "lm-perplexity-long": lambda: language.perplexity(131072),
    "lm-seeds": language.seeds,
    "lm-perplexity-gaps": language.perplexity_gaps,
    "lm-planted": language.planted,
    "lm-planted-gaps": language.planted_gaps,
    "lm-repeated": language.repeated,
    "lm-reach": language.reach,
    "lm-throughput": language.throughput,
    "ruler": language.ruler,
    "ruler-gaps": language.ruler_gaps,
    "ruler-ablation": language.ruler_ablation,
    "ablation": language.ablation,
    "ablation-gaps": language.ablation_gaps,
    "ablation-planted": lambda: language.planted(language.ABLATIONS, language.ABLATED),
    "ablation-planted-gaps": lambda: language.planted_gaps(language.ABLATIONS),
    "ablation-repeated": lambda: language.repeated(language.ABLATIONS, language.ABLATED),
    "ablation-reach": language.ablation_reach,
    "smollm2-retrofit": smollm2.retrofit,
    "smollm2-floors": lambda: smollm2.floors(smollm2.FIRST),
    "smollm2-floors-again": lambda: smollm2.floors(smollm2.SECOND),
    "smollm2-nats": lambda: smollm2.nats(smollm2.FIRST),
    "smollm2-nats-again": lambda: smollm2.nats(smollm2.SECOND),
    "smollm2-free-heads": smollm2.free_heads,
    "smollm2-far-needles": smollm2.far_needles,
    "smollm2-landmarks": smollm2.learned_landmarks,
    "smollm2-gains": smollm2.gains,
    "smollm2-decode": smollm2.decode_times,
    "smollm2-changes": lambda: smollm2.changes(smollm2.SECOND),
    "smollm2-changes-before": lambda: smollm2.changes(smollm2.FIRST),
    "smollm2-needles": lambda: smollm2.needle_changes(smollm2.SECOND),
    "smollm2-needles-before": lambda: smollm2.needle_changes(smollm2.FIRST),
    "forgetting-gains": forgetting.gains,
    "forgetting-details": forgetting.details,
    "forgetting-decode": forgetting.decode_times,
    "forgetting-tiles": forgetting.without_floor,
    "forgetting-floors": forgetting.floors,
    "forgetting-needles": lambda: forgetting.needles(8192),
    "forgetting-needles-short": lambda: forgetting.needles(2048),
    "generate": generate.generation,
    "extend-defaults": extend.defaults,
    "extend-centered": extend.centered,
    "extend-needles": extend.needles,
    "extend-differences": extend.differences,
    "extend-perplexity": extend.perplexity,
    "extend-cost": extend.cost,
    "extend-eviction": eviction.eviction,
    "speed-layer": speed.layer_cost,
    "speed-skipping": speed.skipping,
    "speed": speed.benchmarks,
    "speed-kernels": speed.kernels,
    "precision-summary": speed.rank2_beside_split,
    "precision-gates": speed.gate_errors,
    "precision": speed.precision,
}

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def rendered(text: str) -> str:
    """A page with its tables drawn again.

    Raises:
        ValueError: the page names a table that does not exist.
    """

    def draw(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table: got {name!r}, expected one of {sorted(TABLES)}")
        return f"{begin}\n{TABLES[name]()}\n{end}"

    return _MARKED.sub(draw, text)


def pages(root: Path = Path()) -> list[Path]:
    """Every page that may have tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; leave with 1 if a page would change.")] = False,
) -> None:
    """Draw the tables of README.md and docs/ from the stored rows; prints the pages that change."""
    if not Path("docs").is_dir():
        raise ValueError("there is no docs/ here, expected the root of a clone")
    changed = False
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            changed = True
            typer.echo(page)
            if not check:
                page.write_text(after, encoding="utf-8")
    if check and changed:
        raise typer.Exit(1)


if __name__ == "__main__":
    common.script(main)
