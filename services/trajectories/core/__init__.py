"""The pure part: outcome, advantages, admission."""
