"""Measures the outer loop: accuracy by H, workers and codec, and what the command makes of it."""
