"""Why: whether a codec pays depends on the machine and its links, so anybody can measure it on theirs.

`hybridpar bench codecs` times the codecs alone on one core, `hybridpar bench sync` whole steps on all workers.
"""
