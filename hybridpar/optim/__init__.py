"""Why: optimizers, learning rates and recipes."""
