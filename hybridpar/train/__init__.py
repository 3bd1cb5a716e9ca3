"""The trainer, the training step, checkpoints."""
