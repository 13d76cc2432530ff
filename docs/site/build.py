"""Build the documentation site: stage the pages of zensical.toml, build them, check links and requests of the result.

python docs/site/build.py

Pages are staged under the paths that they have in the repository, so a link works there and on the site. Pages under
api/ are written here, one for each module that the navigation names.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from check import problems

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
STAGE, SITE = ROOT / CONFIG["docs_dir"], ROOT / CONFIG["site_dir"]
#: A view of a page of a book; benchmarks/book_page.py made it.
BOOK = ROOT / "docs/site/book.gz"
#: Pages that search leaves out: old names, and sections so long that they match most questions.
UNSEARCHED = {"CHANGELOG.md"}
#: The explorer on the front page, above its first section.
EXPLORER = """
`gape explore` on a needle model: select a token, move eps. <a href="explore/needle.html">Open it alone</a>.

<iframe class="explorer" src="explore/needle.html" title="Explorer of a needle text" loading="lazy"></iframe>

The same on a page of *Three Men in a Boat*, read by a small model at twice its training length.
<a href="explore/book.html">Open it alone</a>.

<iframe class="explorer" src="explore/book.html" title="Explorer of a page of a book" loading="lazy"></iframe>
"""


def pages(nav: Any) -> Iterator[str]:
    """The paths of a navigation's pages, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def stage_page(page: str) -> None:
    """Copy a page, and the files that it shows or links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r'(?:\]\(|src=")([^)\s#"]+)', text):
        source = (ROOT / page).parent / link
        if ":" not in link and source.suffix != ".md" and source.is_file():
            copy(source.resolve())
    front_matter = "---\nsearch:\n  exclude: true\n---\n" if page in UNSEARCHED else ""
    target = STAGE / page
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(front_matter + text, encoding="utf-8")


def copy(source: Path) -> None:
    """Copy a file of the repository to the same path of the stage."""
    target = STAGE / source.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def api_page(module: griffe.Module, documented: dict[str, str]) -> str:
    """The text of a module's page of the API reference.

    Args:
        module: the module; its public names are those of `__all__`, or all that it defines.
        documented: page by the path of a definition. A name that stands on another page is linked from this one.
    """
    defined = [name for name, member in module.members.items() if not member.is_alias]
    own, elsewhere = [], []
    for name in map(str, module.exports or defined):
        if name.startswith("_") or module[name].is_module:
            continue
        home = documented.setdefault(module[name].canonical_path, module.path)
        if home == module.path:
            own.append(name)
        else:
            elsewhere.append(f"[`{name}`]({home}.md#{home}.{name})")
    also = f"\n\nAlso here: {', '.join(elsewhere)}." if elsewhere else ""
    options = "".join(f"\n        - {name}" for name in own)
    return f"::: {module.path}\n    options:\n      heading_level: 1\n      members:{options}{also}\n"


def stage() -> None:
    """Write everything that the site is built from."""
    shutil.rmtree(STAGE, ignore_errors=True)
    package = griffe.load("gape", search_paths=[ROOT / "src"], resolve_aliases=True)
    documented: dict[str, str] = {}
    for page in pages(CONFIG["nav"]):
        if page.startswith("api/"):
            module = package[Path(page).stem.removeprefix("gape.")] if page != "api/gape.md" else package
            (STAGE / "api").mkdir(exist_ok=True)
            (STAGE / page).write_text(api_page(module, documented), encoding="utf-8")
        else:
            stage_page(page)
    for path in [*CONFIG["extra_css"], *CONFIG["extra"]["polyfills"]]:
        copy(ROOT / path)
    if "explore" in package.members:
        stage_explorer()


def stage_explorer() -> None:
    """Export the explorer of the package's needle model and of a page of a book, and show both on the front page."""
    from gape.explore.export import page  # noqa: PLC0415
    from gape.explore.view import View  # noqa: PLC0415

    target = STAGE / "explore/needle.html"
    target.parent.mkdir()
    subprocess.run([sys.executable, "-m", "gape", "explore", "--export", str(target)], check=True)
    target.with_name("book.html").write_text(page(View.load(BOOK)), encoding="utf-8")
    front = STAGE / "README.md"
    text = front.read_text(encoding="utf-8")
    front.write_text(text.replace("\n## ", f"{EXPLORER}\n## ", 1), encoding="utf-8")


def build() -> list[str]:
    """Build the site from the stage, and print what the builder says.

    Returns:
        A line if it warned or failed.
    """
    command = [sys.executable, "-m", "zensical", "build", "--clean"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(done.stdout, end="")
    # Warnings of griffe, about docstrings, are not among the builder's issues.
    silent = done.returncode == 0 and "No issues found" in done.stdout and "griffe:" not in done.stdout
    return [] if silent else ["the build gave warnings or failed: see above"]


def main() -> None:
    """Stage, build, check; exit with 1 if anything is wrong."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    found = build() + problems(SITE)
    if found:
        sys.exit("\n".join(found))
    print(f"{SITE.relative_to(ROOT)}/index.html: no warning, no dead link, nothing loaded from another host")


if __name__ == "__main__":
    main()
