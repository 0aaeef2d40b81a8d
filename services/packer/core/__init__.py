"""The pure part: what goes into which micro-step, and when."""
