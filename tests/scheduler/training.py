"""The training side of the scripted world: the packer claims groups, cells take micro-steps and are done with them, the core
makes its update, starts again, and goes back; cells are lost with what they hold."""

from __future__ import annotations

import random
from typing import Any

from schemas import events as e
from schemas.config import Config
from schemas.envelope import Decision
from schemas.units import GapStats
from services.scheduler.core.state import members
from tests import facts


class TrainingSide:
    """What `tests.scheduler.world.World` says of batches."""

    config: Config
    rng: random.Random
    state: Any
    pending: list[tuple[str, str, str, Any]]
    ready: list[str]

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        """Instance of a cell's service to the sequence at which it joined."""
        self.cells_lost: list[tuple[str, str]] = []
        """Cell, and where it stood."""
        self.batch: tuple[str, e.BatchOpened] | None = None
        self.claimed: list[str] = []
        self.claims: dict[str, str] = {}
        """Micro-step of the open batch to the cell that claimed it last."""
        self.held: dict[str, str] = {}
        """Micro-step of the open batch to the cell that holds its gradient, as it is and not as somebody says."""
        self.exposed = 0
        self.packed: dict[str, list[str]] = {}
        """Batch to the groups that were claimed for it."""
        self.undone: list[str] = []
        """Batches that a restored checkpoint took back."""
        self.final: set[str] = set()
        self.opened: dict[str, e.BatchOpened] = {}
        self.joined: list[tuple[str, list[str]]] = []
        """Batch and the members that its join window closed with."""

    def say(self, owner: str, kind: str, entity: str, data: Any) -> list[Decision]:
        raise NotImplementedError

    def _batch_opened(self, decision: Decision) -> None:
        data = decision.data
        self.batch, self.claimed, self.claims, self.held = (decision.entity, data), [], {}, {}
        self.opened[decision.entity] = data
        if data.final:
            self.final.add(decision.entity)

    def _join_closed(self, decision: Decision) -> None:
        data = decision.data
        self.pending = [each for each in self.pending if each[1] != "batch.stepped"]
        assert set(self.held) == set(self.claims), "everything is held by somebody"
        assert set(self.held.values()) <= set(data.members), "by a member"
        opened = self.opened[decision.entity]
        stepped = facts.stepped(opened.step, version=opened.version + 1, members=data.members)
        self.joined.append((decision.entity, data.members))
        self.summed = stepped
        self.pending.append(("trainer", "batch.stepped", decision.entity, stepped))

    def _lose_cell(self, name: str) -> None:
        """The process that has its turn is gone; what it was about to say may still come. Another one joins later."""
        cell = self.state.cells[name]
        service = (
            "rollout"
            if cell.place == "serving" or (cell.place == "returning" and self.rng.random() < 0.5)
            else "trainer"
        )
        if cell.lost or cell.place == "out" or (name == "cell-0" and service == "trainer"):
            return
        self.cells_lost.append((name, cell.place))
        if self.rng.random() < 0.5:
            self.pending = [
                each
                for each in self.pending
                if not (each[0] == service and name in (each[2], getattr(each[3], "cell", "")))
            ]
        for micro_step in [each for each, by in self.held.items() if by == name and service == "trainer"]:
            del self.held[micro_step]
        process = self.processes[f"{service}-{name}"]
        owner = "scheduler" if service == "rollout" else "trainer"
        self.say(owner, "cell.lost", name, e.CellLost(service=service, process=process, reason="test"))
        self.pending.append((service, "service.joined", f"{service}-{name}", e.ServiceJoined(url="", pid=0)))

    def _restore(self, version: int) -> None:
        """The core starts again: what it held is gone, and with an older version the batches that made later ones."""
        gone = ("batch.stepped",) if version == self.state.version else ("batch.stepped", "weights.exposed")
        self.pending = [each for each in self.pending if each[1] not in gone]
        self.say("trainer", "service.joined", "trainer-cell-0", e.ServiceJoined(url="", pid=0))
        restored = e.CheckpointRestored(version=version, log_sequence=0)
        if version == self.state.version:
            self.say("trainer", "checkpoint.restored", f"v{version}", restored)
            for name in [name for name, by in self.claims.items() if by == "cell-0"]:
                self._release(name)
            self._step_again()
            return
        undone = [name for name, opened in self.opened.items() if opened.version >= version and name not in self.undone]
        self.undone += undone
        for name in undone:
            self.ready += self.packed.pop(name, [])
        self.batch, self.claimed, self.claims, self.held = None, [], {}, {}
        self.say("trainer", "checkpoint.restored", f"v{version}", restored)

    @property
    def _open(self) -> bool:
        """Whether the batch waits for its step."""
        return self.batch is not None and self.state.batch is not None and self.batch[0] == self.state.batch.id

    def _trained(self, micro_step: str, data: e.MicroStepDone) -> None:
        """The cell has its gradient, unless it was put out or somebody else has it by now."""
        cell = self.state.cells[data.cell]
        if self.claims.get(micro_step) == data.cell and cell.place == "training" and not cell.lost:
            self.held[micro_step] = data.cell

    def _step_again(self) -> None:
        """Whoever started again after the join window closed has trained its part anew: the core makes its update."""
        batch = self.state.batch
        said = any(each[1] == "batch.stepped" for each in self.pending)
        if (
            batch is not None
            and batch.join_closed
            and not batch.stepped
            and not said
            and set(self.held) == set(self.claims)
        ):
            self.pending.append(("trainer", "batch.stepped", batch.id, self.summed))

    def _release(self, micro_step: str) -> None:
        if not self._open:
            return
        assert self.batch is not None
        self.held.pop(micro_step, None)
        self.claims.pop(micro_step, None)
        self.pending = [each for each in self.pending if (each[1], each[2]) != ("micro-step.done", micro_step)]
        released = e.MicroStepReleased(batch=self.batch[0], reason="test")
        self.say("trainer", "micro-step.released", micro_step, released)
        self._claim(micro_step)

    def _claim(self, micro_step: str) -> None:
        """Some cell of the prefix takes it, and will be done in time."""
        assert self.batch is not None
        name = self.batch[0]
        cell = self.rng.choice([each for each in members(self.state) if not self.state.cells[each].lost])
        self.claims[micro_step] = cell
        self.say("trainer", "micro-step.claimed", micro_step, e.MicroStepClaimed(batch=name, cell=cell, epoch=0))
        done = e.MicroStepDone(
            batch=name,
            cell=cell,
            loss=0.0,
            tokens=1,
            targets=1,
            executions=1,
            masked=0,
            gap=GapStats(),
            seconds=0.1,
        )
        self.pending.append(("trainer", "micro-step.done", micro_step, done))

    def _can_pack(self) -> bool:
        if self.batch is None or not self.ready or len(self.claimed) == self.batch[1].groups:
            return False
        s = self.config.scheduler
        whole = (s.mu - (self.batch[1].step - 1) % s.mu) * s.B
        return s.streaming or bool(self.claimed) or len(self.ready) >= whole

    def _pack(self) -> None:
        """The packer claims what is ready, one group at a time, when it likes."""
        if self.batch is not None and self._can_pack() and self.rng.random() < 0.3:
            name, data = self.batch
            self.ready.sort(key=lambda each: (self.state.groups[each].version, each))
            group = self.ready.pop(0)
            self.claimed.append(group)
            self.packed.setdefault(name, []).append(group)
            self.say("packer", "group.claimed", group, e.GroupClaimed(batch=name))
            index = len(self.claimed)
            micro_step = f"m-{name[2:]}.{index:03d}"
            self._claim(micro_step)
            if index == data.groups:
                closed = e.BatchStreamClosed(micro_steps=index, groups=list(self.claimed))
                self.pending.append(("packer", "batch.stream-closed", name, closed))
