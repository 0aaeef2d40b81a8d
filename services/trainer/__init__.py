"""Trainer: the cells that turn micro-steps into policy updates, on Megatron-Core."""
