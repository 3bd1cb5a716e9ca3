"""Shared tools of the benchmarks: shaped links, processes, paired timing, statistics and tables.

`network` makes shaped links out of network namespaces, with delay, jitter and loss by means of `relay`, and `launch`
starts one process per rank on them. `rank` is what each of those processes does first and last, `paired` times methods
against each other inside them while `load` watches the machine, `stats` turns rounds into ratios and verdicts, `rows`
says what a row of a table holds, and `table` keeps the rows; `records` keeps tables of a benchmark's own columns.
`command` is how a benchmark runs, and measures in every rank. `python -m benchmarks.rig` checks the rig itself.
"""
