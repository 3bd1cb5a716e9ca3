"""Benchmarks of the generated CPU kernels: times per shape against torch's fastest, and the limit set by memory."""
