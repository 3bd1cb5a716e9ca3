"""Why: the trainer, its engines, checkpoints."""
