"""Benchmarks of gradient compression: step time, loss, bytes sent and codec throughput.

Compression pays only where it is faster than what a user has already, at no worse a loss.

`main` starts the tables: `links` times a step of every method on shaped links, `losses` trains a hundred steps with
each, `wire` counts bytes, `throughput` times the codecs alone. `methods` and `peers` are what is compared, `promises`
what was promised of it.
"""
