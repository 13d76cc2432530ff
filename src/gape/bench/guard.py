"""No figures from code whose tests fail: a benchmark runs the tests of what it measures first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: The tests a benchmark asks, by its name; quick ones.
TESTS = {
    "attention": (
        "tests/ops/test_agreement.py", "tests/ops/test_triton.py", "tests/ops/test_skipping.py",
        "tests/ops/test_flex.py",
    ),
    "decode": ("tests/ops/test_decode.py", "tests/ops/test_decode_lone.py"),
    "prologue": ("tests/ops/test_prologue.py",),
    "precision": ("tests/ops/test_agreement.py", "tests/ops/test_precision.py"),
}  # fmt: skip


class RedTestsError(RuntimeError):
    """Tests of what is to be measured fail, so nothing is measured."""


def vouch(benchmark: str, *, trust: bool = False, root: Path = Path()) -> str:
    """Run the tests of a benchmark; what rows say about them: "passed", or "trusted" where they were not asked.

    Args:
        benchmark: a name of TESTS.
        trust: do not ask.
        root: the clone that has the tests.

    Raises:
        ValueError: the tests are not here.
        RedTestsError: they fail.
    """
    if trust:
        return "trusted"
    files = [root / path for path in TESTS[benchmark]]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"trust: there is no {missing[0]} to ask; run this in a clone, or pass --trust")
    code, told = _pytest(files, root)
    if code != 0:
        raise RedTestsError(f"nothing was measured: tests of {benchmark} fail (--trust goes on regardless)\n{told}")
    return "passed"


def _pytest(files: Sequence[Path], root: Path) -> tuple[int, str]:
    """Exit code and last lines of the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    paths = [str(path.relative_to(root)) for path in files]
    done = subprocess.run(
        [*command, *paths], cwd=root, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "100"}
    )
    # Without pytest, stdout is empty and stderr says so.
    return done.returncode, "\n".join((done.stdout or done.stderr).splitlines()[-15:])
