"""Why: everything that happens between the first micro-batch of a step and the optimizer lives in this package."""
