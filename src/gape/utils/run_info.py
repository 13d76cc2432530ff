"""The machine, versions and code of a run: enough to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gape

_PACKAGE = Path(gape.__file__).parent
_RECORDED = ("torch", "numpy", "safetensors", "triton")


def manifest(
    device: torch.device, *, seed: int, data: Any = None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `manifest.json` holds: versions, machine, code, a source's fingerprint, and `more` as it is."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"gape": gape.__version__, "python": platform.python_version(), **_versions()},
        "machine": machine(device),
        "code": {"commit": commit(), "sha256": code_hash()},
        "seed": seed,
        "data": data,
        **(more or {}),
    }


def stamp(device: torch.device) -> dict[str, str]:
    """What a measured row says about its origin: device, torch, triton and the short commit."""
    head = commit() or "unknown"
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _versions().get("triton", "none"),
        "commit": head[:12] + "+" * head.endswith("+changes"),
    }


def device_name(device: torch.device) -> str:
    """The name of a device, as in measured rows."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def machine(device: torch.device) -> dict[str, Any]:
    """System, device and threads."""
    on_gpu = device.type == "cuda"
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "device": device.type,
        "name": device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"cuda": torch.version.cuda} if on_gpu else {}),
    }


def commit() -> str | None:
    """The commit gape's own files are of, with "+changes" where they or the benchmark scripts differ.

    Outside a checkout it is what GAPE_COMMIT says, for files that were copied without their history, or None.
    """
    # An environment may lie inside somebody else's checkout: the file itself must be tracked.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return os.environ.get("GAPE_COMMIT")
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":(top)benchmarks/*.py")
    return f"{head}+changes" if head and changed else head


def code_hash() -> str:
    """A SHA-256 over gape's Python files, which says what ran where there is no checkout."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _RECORDED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
