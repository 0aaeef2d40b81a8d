"""Every error that a person may meet: it says what was wrong, where, and what to do.

Foreign exceptions are mapped to these at the boundary where they arise; nothing else of ours is raised across modules.
"""

from __future__ import annotations


class GyreError(Exception):
    """Base of all errors of ours. `str(error)` is what a person reads; `remedy` is the sentence that says what to do."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what, where, remedy)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  -> {self.remedy}" if self.remedy else text


class ConfigError(GyreError):
    """The configuration file or an override is wrong."""

    exit_code = 2


class EnvironmentMissing(GyreError):
    """Something that this machine must have is absent: a system library, a binary, a free port."""

    exit_code = 3


class TaskError(GyreError):
    """A task folder cannot be used."""

    exit_code = 2


class BusError(GyreError):
    """The event bus refused or lost something."""


class BlobDamaged(BusError):
    """What the object store holds under a name is not what was written there."""


class Conflict(BusError):
    """An expected-sequence publish lost: somebody else published first. Nothing was stored."""


class Fenced(BusError):
    """Another instance of this decider is publishing: this one must stop, and let it."""

    exit_code = 4


class LogBroken(BusError):
    """The log as read is not what was written: a gap, a reordering or an undecodable event."""


class SnapshotUnreadable(GyreError):
    """Bytes are no snapshot of this decider's state, as another version of it may have written them."""


class DeciderError(GyreError):
    """A decider broke its contract: what it decides for one input does not end."""


class TransportError(GyreError):
    """Weights could not be exposed or pulled."""


class EngineError(GyreError):
    """A rollout engine refused or failed a call."""


class TrainerError(GyreError):
    """A training cell cannot do what was asked of it."""
