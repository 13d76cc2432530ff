"""Kernels in Triton; imported only when asked for."""
