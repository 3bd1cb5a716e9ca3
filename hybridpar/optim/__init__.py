"""Optimizers, learning rates and recipes."""
