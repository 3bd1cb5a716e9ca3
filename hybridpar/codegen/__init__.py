"""Compiles kernels for CPUs (TVM) and GPUs (TVM, NVRTC), and caches what was compiled."""
