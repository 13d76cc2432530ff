"""The package as a whole: importing is cheap and silent, public names are documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gape


def test_import_is_quick_and_silent() -> None:
    # Time of the process: a busy machine does not count.
    script = "import torch, time; t = time.process_time(); import gape; print(time.process_time() - t)"
    # Warnings of torch's own import are not ours: errors are switched on after it.
    script = script.replace("import torch, time;", "import torch, time, warnings; warnings.simplefilter('error');")
    script = script.replace("import gape;", "import gape; gape.gated_attention; gape.GAPEAttention;")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(said.stdout) < 0.5
    assert said.stderr == ""


def test_public_names_exist_and_are_documented() -> None:
    for name in gape.__all__:
        assert getattr(gape, name) is not None
        assert name == "__version__" or getattr(gape, name).__doc__, name
    assert set(gape.__all__) <= set(dir(gape))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gape.no_such_name


def test_no_parameter_is_named_after_letters_that_loaders_rename() -> None:
    sizes = {"n_embd": 64, "n_heads": 4, "context_length": 16}
    for position in gape.positions.available():
        names = [name for name, _ in gape.GAPEAttention(**sizes, position=position).named_parameters()]
        assert not [name for name in names if "gamma" in name or "beta" in name]
