"""Runs of the real deciders in a modelled world, on a virtual clock: `gyre simulate`."""
