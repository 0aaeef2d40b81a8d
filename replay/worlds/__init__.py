"""The worlds of a simulated run: what stands behind the arguments that production passes to its services.

Engines, harness processes, tests, training cells, encoder and disks follow scripts. A script is drawn from the run's seed
and the id of what it belongs to, so nothing in it depends on who comes first.
"""
