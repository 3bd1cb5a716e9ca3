"""Why: builds kernels with TVM and CUDA, and keeps what was built."""
