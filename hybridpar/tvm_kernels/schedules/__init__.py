"""Sources of kernels: each file writes the functions of one schedule, in the process that compiles."""
