"""Measures the outer loop: accuracy by H, workers and codec, steps on slow links, and time to an accuracy."""
