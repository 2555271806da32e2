"""The training loop, its engines, checkpoints and validation."""
