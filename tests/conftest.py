"""Settings that must stand before torch is imported."""

import os

# Some virtual CPUs advertise bfloat16 instructions and then die on them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import torch

# Without a GPU Triton kernels run in its interpreter, which must be asked for before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
