"""Benchmarks of pipeline parallelism against the alternatives, and checks of its predictions."""
