"""Scores preserved workspaces with their tasks' own tests."""
