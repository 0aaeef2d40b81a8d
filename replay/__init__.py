"""Recorded runs: log files, the replayer, the checker."""
