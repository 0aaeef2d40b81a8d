"""Launches executions: one process group, one workspace and one token each; reports how they end."""
