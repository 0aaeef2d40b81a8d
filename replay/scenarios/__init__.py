"""Scenario files that are shipped; `replay.simulator.scenario` reads them."""
