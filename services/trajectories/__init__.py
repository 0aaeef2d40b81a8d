"""Trajectories: one tree an execution, its outcome, its advantage, and the rows that admission draws from it."""
