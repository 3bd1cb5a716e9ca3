"""Why: what oneDNN and torch leave on the table around a depthwise convolution is taken by kernels of our own."""
