"""The actions of a training step as data: schedules, the checker, the simulator. Needs no torch."""
