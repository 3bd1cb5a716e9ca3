"""Why: one module per command of `hybridpar` that needs more than an argument parser."""
