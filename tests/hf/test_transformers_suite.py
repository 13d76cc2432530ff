"""Common tests of transformers, its model and generation mixins, run against our classes.

They are not in its package. TRANSFORMERS_SOURCE names a git repository of it that has the tag of the installed version:

    TRANSFORMERS_SOURCE=~/src/transformers/.git python -m pytest tests/hf/test_transformers_suite.py
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

SOURCE = os.environ.get("TRANSFORMERS_SOURCE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SOURCE is None, reason="TRANSFORMERS_SOURCE names no repository of transformers"),
    pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its mixins were laid out otherwise"),
]


def test_our_classes_pass_the_common_tests_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("parameterized")
    command = ["git", f"--git-dir={SOURCE}", "archive", f"v{transformers.__version__}", "tests", "utils", "conftest.py"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tmp_path, filter="data")
    home = tmp_path / "tests" / "models" / "gape"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    shutil.copyfile(Path(__file__).with_name("transformers_suite.py"), home / "test_modeling_gape.py")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(home.relative_to(tmp_path))]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
