"""Benchmarks and checks of `hybridpar.partition`, with their results."""
