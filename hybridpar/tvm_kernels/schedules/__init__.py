"""Why: each schedule is compiled by a process of its own, from a file that says how its loops are tiled."""
