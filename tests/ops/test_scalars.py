"""Kernels as a compiler launches them: Inductor passes Python's floats in double precision."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Compiled for a GPU that need not be there, as far as Triton's own form, where types are settled; in a process of its
# own: here kernels are interpreted. For kernels of the prologue it prints how many lines have a double in them.
SCRIPT = """
import sys
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from gape.ops.triton import attention_bwd, attention_fwd, decode, prologue_kernels, tiles

FLOATS = ("scale", "content_scale", "log2e", "eps", "rate_unit", "unit", "stretch", "factor", "q_stretch", "k_stretch")
HALVES = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "grad_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
WHOLE = ("qp_ptr", "kp_ptr", "qd_ptr", "kd_ptr")
OTHERS = {"mask_ptr": "*i1", "ticket_ptr": "*i32", "earliest_ptr": "*i32", "which_ptr": "*i32"}
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_D": 16, "BLOCK_V": 16, "REST_D": 0, "REST_V": 0, "COPIES": 2}
FLAGS = ("CAUSAL", "HAS_POSITIONS", "HAS_DOCUMENTS", "HAS_MASK", "PARTIAL_D", "PARTIAL_V", "SKIP", "RAGGED", "AGAIN")
PROLOGUE = {"ROTATED": True, "GATED": True, "LOW": 13, "EDGE": 16, "COLUMNS": 16, "Q_HEADS": 2, "K_HEADS": 2, "T": 16}
PROLOGUE |= {"PARTS": 1, "HALF": 16, "EVEN": True, "ANCHORS": 2, "LIMIT": 1.0, "BITS": 8, "BOUNDED": True}
PROLOGUE |= {"BY_HEAD": True}
target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)
options = backend.parse_options({})


def kind(name):
    if name.endswith("_ptr"):
        return "*fp16" if name in HALVES else "*i64" if name in WHOLE else OTHERS.get(name, "*fp32")
    return "fp64" if name in FLOATS else "i32"


def compiled(kernel, told):
    told = {name: value for name, value in told.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in told else kind(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in told.items()}
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, places)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, implementation, backend.get_module_map(), context)
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


PARTS = {"REST_D": 16, "REST_V": 16, "BLOCK_D": 64, "BLOCK_V": 64}
POSITIONS = {"HAS_POSITIONS": True, "HAS_DOCUMENTS": True, "HAS_MASK": True, "COPIES": 0}
for kernel in (attention_fwd._fwd_kernel, attention_bwd._bwd_dq_kernel, attention_bwd._bwd_dkv_kernel):
    for constants in ({"SKIP": True}, {"SKIP": True, "AGAIN": True}, PARTS, POSITIONS):
        compiled(kernel, dict.fromkeys(FLAGS, False) | {"CAUSAL": True} | BLOCKS | constants)
for kernel in (tiles._query_norms_kernel, tiles._key_bounds_kernel):
    compiled(kernel, {"BLOCK": 64} | BLOCKS)
compiled(tiles._exposures_kernel, {"BLOCK": 64} | BLOCKS)
compiled(decode._decode_kernel, dict.fromkeys(FLAGS, False) | {"MERGE": True, "PARTS": 16} | BLOCKS)
compiled(decode._combine_kernel, {"PARTS": 16} | BLOCKS)
for name in ("_prologue_fwd_kernel", "_prologue_bwd_kernel", "_prologue_bounded_kernel"):
    text = compiled(getattr(prologue_kernels, name), PROLOGUE)
    print(sum("f64" in line for line in text.splitlines() if "tt.func" not in line))
"""


def test_kernels_take_double_precision_scalars() -> None:
    """Also that nothing but the cast sees the double, in kernels of the prologue."""
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", "1", "3"]
