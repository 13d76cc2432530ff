"""Kernels as a compiler launches them: Inductor passes Python's floats in double precision."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Compiled for a GPU that need not be there, in a process of its own: here kernels are interpreted.
SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gape.ops.triton import attention_bwd, attention_fwd, decode_kernels, tiles

FLOATS = ("scale", "content_scale", "log2e", "eps", "rate_unit", "unit", "stretch")
HALVES = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "grad_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
WHOLE = ("qp_ptr", "kp_ptr", "qd_ptr", "kd_ptr")
OTHERS = {"mask_ptr": "*i1", "ticket_ptr": "*i32", "earliest_ptr": "*i32"}
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_D": 16, "BLOCK_V": 16}
FLAGS = ("CAUSAL", "HAS_POSITIONS", "HAS_DOCUMENTS", "HAS_MASK", "PARTIAL_D", "PARTIAL_V", "SKIP", "RAGGED")


def kind(name):
    if name.endswith("_ptr"):
        return "*fp16" if name in HALVES else "*i64" if name in WHOLE else OTHERS.get(name, "*fp32")
    return "fp64" if name in FLOATS else "i32"


def compiled(kernel, told):
    told = {name: value for name, value in told.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in told else kind(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in told.items()}
    compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))


for kernel in (attention_fwd._fwd_kernel, attention_bwd._bwd_dq_kernel, attention_bwd._bwd_dkv_kernel):
    for skips in (False, True):
        compiled(kernel, dict.fromkeys(FLAGS, False) | {"CAUSAL": True, "SKIP": skips} | BLOCKS)
for kernel in (tiles._query_norms_kernel, tiles._key_bounds_kernel):
    compiled(kernel, {"BLOCK": 64} | BLOCKS)
for merge in (False, True):
    compiled(decode_kernels._decode_kernel, dict.fromkeys(FLAGS, False) | {"MERGE": merge, "PARTS": 16} | BLOCKS)
compiled(decode_kernels._combine_kernel, {"PARTS": 16} | BLOCKS)
"""


def test_kernels_take_double_precision_scalars() -> None:
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, "-c", SCRIPT], env=ours, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
