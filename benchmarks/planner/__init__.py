"""Benchmarks of the planner: predictions against measured steps, and its choice against the other plans.

`predicted` compares predictions with measured steps, `regret` the chosen plan against the others, `emulated` more
workers than there are cores, `search_time` the seconds of a search, and `to_target` a whole training against DDP.
"""
