"""Benchmarks of the planner: predictions against measured steps, and its choice against the other plans.

`predicted` compares predictions with measured steps, `regret` the chosen plan against the others, `closing` what the
command says at its end, and `target` a whole training against DDP.
"""
