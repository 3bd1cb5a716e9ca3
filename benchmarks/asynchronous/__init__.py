"""Benchmarks of parameter servers, with and without a barrier."""
