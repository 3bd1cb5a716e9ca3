"""Why: a planner is believed when its predictions have been held against clocks, and its choices against all others.

`predicted` holds predictions against measured steps, `regret` the chosen plan against the others, `emulated` more
workers than there are cores, `search_time` the seconds of a search, and `to_target` a whole training against DDP.
"""
