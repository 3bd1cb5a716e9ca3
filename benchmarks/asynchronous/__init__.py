"""Benchmarks of asynchronous and partly synchronous gradient exchange: late gradients and parameter servers."""
