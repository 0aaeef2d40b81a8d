"""Faults as values: what strikes a simulated run, and when.

Each fault is pinned to something that can be counted in the run itself: the n-th event of a kind, so many virtual seconds
later, so many steps of a life later. So a plan means the same in every repetition, and leaving a fault out of it leaves
the others where they were. A plan is JSON and stands for a run: with the same code it gives the same log, byte by byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from schemas.errors import ConfigError


class Pin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A moment of a run."""

    kind: str = ""
    """Kind of event; empty counts from the beginning of the run."""
    nth: int = 1
    """Which event of the kind, from 1."""
    after_s: float = 0.0
    """Virtual seconds later."""

    def __str__(self) -> str:
        later = f" + {self.after_s:g} s" if self.after_s else ""
        return (f"{self.kind} #{self.nth}" if self.kind else "start") + later


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="fault"):
    """Base of all faults."""

    pin: Pin

    @property
    def name(self) -> str:
        return str(type(self).__struct_config__.tag)

    def __str__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "pin"}
        said = " ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in fields.items()
        )
        return f"{self.name} {said} at {self.pin}"


class Crash(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="crash"):
    """kill -9 of a service before one of its steps, so at any of its awaits; it starts again after `down_s`."""

    service: str
    steps: int = 0
    """Steps of the service after the pin; while it is down, of its next life."""
    down_s: float = 1.0


class Stop(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="stop"):
    """SIGTERM of a service before one of its steps: it ends in order and says that it left; it starts again after `down_s`."""

    service: str
    steps: int = 0
    """As of a crash."""
    down_s: float = 1.0


class Hung(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="hung"):
    """A process lives, keeps its connections and does nothing, for `seconds`, as under SIGSTOP or in an endless call. Then
    it goes on as if nothing had been, or somebody kills it and it starts again."""

    service: str
    steps: int = 0
    """As of a crash."""
    seconds: float = 600.0
    killed: bool = False


class HostLost(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="host-lost"):
    """Everything on a host dies, and what was on its disk is gone. `host` is a cell, or `harness`."""

    host: str
    down_s: float = 60.0


class DamagedCheckpoint(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="damaged-checkpoint"):
    """The core dies, and a checkpoint is garbled, gone, or swapped for another of its version when it starts again.
    Somebody puts a copy back after `seconds`, where nothing newer lies there by then."""

    behind: int = 0
    """0: the newest; 1: the one before, and so on."""
    how: Literal["garbled", "gone", "swapped"] = "garbled"
    seconds: float = 600.0
    down_s: float = 1.0


class DamagedSnapshot(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="damaged-snapshot"):
    """A service that decides dies, and its snapshot is garbled, gone, one that it cannot read, or an old one when it starts
    again."""

    service: str
    how: Literal["garbled", "gone", "unreadable", "old"] = "garbled"
    seconds: float = 600.0
    """Of an old one: how long after it was copied the service dies."""
    down_s: float = 1.0


class HostDiskFull(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="host-disk-full"):
    """Nothing can be written where checkpoints lie, or on the host of the harness, for `seconds`."""

    where: Literal["checkpoints", "harness"]
    seconds: float = 60.0


class Doubt(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="doubt"):
    """Publishes of a service that get no answer: stored or not, or stored `late_s` later."""

    service: str
    nth: int = 1
    """Which publish after the pin, from 1."""
    times: int = 1
    """How many in a row."""
    fate: Literal["ack lost", "lost", "late"] = "ack lost"
    late_s: float = 1.0


class LastWords(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="last-words"):
    """A service dies as soon as it has sent a publish, which is stored `late_s` later: mostly in the life of the next."""

    service: str
    nth: int = 1
    """As of a doubt."""
    late_s: float = 1.0
    down_s: float = 1.0


class Delivery(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="delivery"):
    """A message on its way to a service is doubled or lost."""

    service: str
    nth: int = 1
    times: int = 1
    fate: Literal["twice", "lost"] = "twice"


class Disconnected(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="disconnected"):
    """One service has no connection to the event bus."""

    service: str
    seconds: float = 1.0


class SlowReader(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="slow-reader"):
    """What is stored reaches a service late."""

    service: str
    seconds: float = 60.0
    lag_s: float = 1.0


class ServerRestart(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="server-restart"):
    down_s: float = 1.0


class DiskFull(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="disk-full"):
    """The event bus can write no more, until somebody frees space and starts it again after `seconds`."""

    seconds: float = 10.0


class ClockJump(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="clock-jump"):
    """A machine's clock is set: of the event bus (`server`), which stamps what it stores, or of a service."""

    who: str
    by_s: float


class Request(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="request"):
    """A request on the network is slow, answered late, worked on twice, or cut before its answer."""

    path: Literal["/v1/messages", "/generate", "/abort_request"]
    nth: int = 1
    slow_s: float = 0.0
    late_s: float = 0.0
    twice: bool = False
    cut: bool = False


class EngineFault(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="engine"):
    """An engine ends, hangs, becomes slow, or aborts what it has in hand."""

    cell: str
    how: Literal["dies", "hangs", "slow", "aborts"]
    seconds: float = 30.0
    """How long it hangs or is slow."""
    factor: float = 10.0
    """How many times slower."""


class EvaluatorFault(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="evaluator"):
    """Test runs that begin after the pin crash, hang, or write nonsense."""

    how: Literal["crash", "hang", "garbage"]
    times: int = 1


class AgentFault(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="agent"):
    """The next request of any harness process is made twice at once, or left before its answer; or the next one that
    ends asks once more after its end."""

    how: Literal["twice", "leave", "late"]


class Paused(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="paused"):
    """An operator pauses the run, and resumes it `seconds` later."""

    seconds: float = 60.0


class Withdrawn(Fault, frozen=True, kw_only=True, omit_defaults=True, tag="withdrawn"):
    """An operator drains a cell, and adds it again `seconds` later. Never the core: that cannot be left out."""

    cell: str
    seconds: float = 600.0


AnyFault = (
    Crash
    | Stop
    | Hung
    | HostLost
    | DamagedCheckpoint
    | DamagedSnapshot
    | HostDiskFull
    | Doubt
    | LastWords
    | Delivery
    | Disconnected
    | SlowReader
    | ServerRestart
    | DiskFull
    | ClockJump
    | Request
    | EngineFault
    | EvaluatorFault
    | AgentFault
    | Paused
    | Withdrawn
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run: its world comes from the seed, what strikes it from the faults."""

    seed: int
    faults: list[AnyFault] = []
    snapshot_every: dict[str, int] = {}
    """Inputs between two snapshots of a service that decides; as in production where it isn't named."""
    note: str = ""
    """What the plan once showed, for plans that are kept."""

    def without(self, left_out: set[int]) -> Plan:
        """The plan without the faults at these places."""
        kept = [fault for place, fault in enumerate(self.faults) if place not in left_out]
        return msgspec.structs.replace(self, faults=kept)


_decoder = msgspec.json.Decoder(Plan, strict=True)


def encode(plan: Plan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def read(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError."""
    try:
        return _decoder.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="name a file that `gyre fault` wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"no plan: {error}", where=str(path), remedy="see docs/fault.md for what a plan holds"
        ) from None
