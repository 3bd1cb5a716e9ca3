"""Runs the actions of a training step, from the first micro-batch to the optimizer."""
