"""Log files, replay, checks, and the simulators. What users' own tests need is here: `read`, `Replayer`."""

from __future__ import annotations

from replay.logfile import Log, read
from replay.replayer import Replayer, ReplayResult, load_deciders
from replay.steps import Step

__all__ = ["Log", "ReplayResult", "Replayer", "Step", "load_deciders", "read"]
