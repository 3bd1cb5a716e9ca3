"""Compiles kernels for CPUs (TVM) and GPUs (TVM, NVRTC), and caches what was compiled."""

#: Values that are worked on at a time: one register of AVX-512, two of AVX2, four of NEON.
LANES = 16
