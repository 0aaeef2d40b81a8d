"""The whole mesh in one process under a virtual clock, with faults drawn from a seed, and what must hold all the same."""
