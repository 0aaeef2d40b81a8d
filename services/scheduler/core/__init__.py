"""Pure parts of the scheduler: its state, the paper's equations, and the rules."""
