"""Settings that must stand before torch is imported."""

import os

# Some virtual CPUs advertise bfloat16 instructions and then die on them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
