"""Why: a depthwise convolution is limited by memory and by registers, and both are tuned here per shape."""
