"""Shared tools of the benchmarks: shaped links, processes, paired timing, statistics and tables.

`network` makes shaped links out of network namespaces, with delay, jitter and loss by means of `relay`. `launch` runs a
benchmark's command and starts one process per rank, of which `rank` is the first and the last. `task` is what they
train, and the loops by hand. `paired` times methods against each other while `load` watches the machine, and `stats`
turns rounds into ratios and verdicts. `rows` and `checks` are the rows of tables, and `records` keeps the files.
`folds` trains emulated workers on folds of the digits. `python -m benchmarks.rig` checks the rig itself.
"""
