"""What LOG says about the batch in hand, folded for one training cell. Pure.

A micro-step is free from `enqueued` (or `released`) until `claimed`; a claim answers the event at `free[id].seq`, which
is what the claim's expected last sequence names. What a cell had claimed when its process started again, or when it was
put out of the prefix, is lost: it counts as done no more and is free once it is released, by the cell's new process or,
for one that is out, by the core. A batch is settled when its join window is closed and every micro-step of its closed
stream is done. `turn` is the one thing that this cell has to do next.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas import events as e
from schemas.envelope import Event
from schemas.ids import cell_id
from schemas.streams import micro_step_blob
from schemas.units import Outcome

Turn = Literal["", "acquire", "release", "give-back", "claim", "reduce", "update", "expose", "reissue", "renew"]
CORE = cell_id(0)
_IN_BASELINE: tuple[Outcome, ...] = ("valid", "placeholder")


class Free(msgspec.Struct, frozen=True):
    """A micro-step that may be claimed, and the event that made it so."""

    seq: int
    id: str
    blob: str


class Spent(msgspec.Struct, frozen=True):
    """Rewards of a group that a batch claimed, until that batch can't be undone any more."""

    version: int
    """v_t of the batch."""
    rewards: list[float]


class Exposure(msgspec.Struct, frozen=True):
    """Weights of the core that can be pulled, and the event that said so."""

    seq: int
    data: e.WeightsExposed


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a settled batch meet to add up their gradients. Equal in all of them, but for `rank`."""

    rendezvous: str
    """`host:port` of the core's store."""
    key: str
    """Members, their epochs and their processes: another one whenever any of them is."""
    batch: str
    rank: int
    """0 is the core."""
    size: int


class OpenBatch(msgspec.Struct, kw_only=True):
    id: str
    data: e.BatchOpened
    closed: int = -1
    """Number of its micro-steps, known once the stream is closed."""
    free: dict[str, Free] = {}
    claimed: dict[str, str] = {}
    """Micro-step to the cell that holds it."""
    done: dict[str, e.MicroStepDone] = {}
    lost: set[str] = set()
    """Claimed by a process that is gone, and not released yet."""
    join: e.BatchJoinClosed | None = None
    rewards: list[float] = []
    """Of the executions in a baseline of the groups claimed for it."""

    @property
    def settled(self) -> bool:
        """Every gradient of it is in a member, so the update can be made."""
        return self.join is not None and self.closed == len(self.done)


class BatchView(msgspec.Struct, kw_only=True):
    cell: str
    shared: bool = False
    """Whether cells but the core may train."""
    epoch: int = 0
    role: Literal["rollout", "entering", "arrived", "train", "out", "leaving"] = "rollout"
    """`arrived` from its training memory until the transition is complete; `out` from a loss until it is sent back."""
    recalled: bool = False
    """Its burst ended: it waits to be sent back, and takes no part in the next one."""
    given_up: bool = False
    """This process was taken for lost: another one has to take its place."""
    epochs: dict[str, int] = {}
    """Of every cell."""
    trains: set[str] = set()
    """Cells whose claims count: in the training role and not put out."""
    cause: tuple[str, int] = ("", 0)
    """The event that the next change of role answers."""
    batch: OpenBatch | None = None
    stepped: int = 0
    """Version after the last step in LOG."""
    final: bool = False
    """That step was the last of its burst."""
    exposed: int = 0
    """Version exposed for publication last: engines that start again need it, until another is."""
    gone: bool = False
    """It is older than the core's weights, and the process that exposed it ended: the core exposes it anew."""
    exposure: Exposure | None = None
    """The newest of the core's process that runs now."""
    due: Literal["", "join", "publish"] = ""
    """What the core has to expose its weights for."""
    processes: dict[str, int] = {}
    """Cell to the sequence at which its newest trainer process joined."""
    checkpoints: dict[int, e.CheckpointSaved] = {}
    """Version to its newest checkpoint."""
    steps: dict[int, int] = {}
    """Version to the sequence of the step that made it."""
    rewards: dict[str, list[float]] = {}
    """Of groups that are ready and not yet claimed."""
    spent: dict[str, Spent] = {}
    over: bool = False

    @property
    def meeting(self) -> Meeting | None:
        """None while this cell has nobody to add its gradient to or get gradients from."""
        batch, exposure = self.batch, self.exposure
        if batch is None or batch.join is None or not batch.settled or exposure is None:
            return None
        members = batch.join.members
        if len(members) == 1 or self.cell not in members:
            return None
        parts = zip(members, batch.join.epochs, (self.processes.get(cell, 0) for cell in members), strict=True)
        return Meeting(
            rendezvous=exposure.data.rendezvous,
            key="/".join(f"{cell}.{epoch}.{process}" for cell, epoch, process in parts),
            batch=batch.id,
            rank=members.index(self.cell),
            size=len(members),
        )

    @property
    def holds_memory(self) -> bool:
        """Whether the cell is to have its training memory."""
        return self.role in ("arrived", "train")

    @property
    def overtaken(self) -> bool:
        """The training cells are ahead of the published version, and no publication is on its way."""
        return 0 < self.exposed < self.stepped and not self.final

    @property
    def astray(self) -> list[str]:
        """Lost micro-steps that this cell has to release."""
        batch = self.batch
        if batch is None:
            return []
        held = [(name, batch.claimed[name]) for name in sorted(batch.lost)]
        return [n for n, by in held if by == self.cell or (self.cell == CORE and by not in self.trains)]

    @property
    def joinable(self) -> bool:
        """The weights of the batch that is open, or will be next, can be pulled."""
        return self.exposure is not None and self.exposure.data.version == self.stepped

    def turn(self, *, version: int, reduced: Meeting | None, reissuable: bool = True) -> Turn:
        """`version`: of the weights in this cell; `reduced`: where it last gave its gradient; `reissuable`: whether it
        has the published weights beside its own.

        Numbered by urgency: 1. change of role, 2. publication and the join window, 3. what nobody holds any more,
        4. new weights, 5. the update, 6. work.
        """
        core = self.cell == CORE
        if self.over:
            return ""
        if self.role == "entering":
            return "acquire" if core or self.joinable else ""
        if core and self.gone and reissuable:
            return "reissue"
        if core and (self.due == "publish" or (self.due == "join" and self.holds_memory)):
            return "expose"
        if self.role == "leaving":
            return "release"
        batch = self.batch
        if self.astray and self.role != "out":
            return "give-back"
        if self.role != "train":
            return ""
        if not core and version != self.stepped:
            return "renew" if not self.recalled and (batch is not None or not self.final) else ""
        if batch is None:
            return ""
        if batch.settled:
            if core:
                return "update"
            return "reduce" if self.meeting not in (None, reduced) else ""
        # A gradient of somebody who is no member would be lost.
        member = batch.join is None or self.cell in batch.join.members
        return "claim" if batch.free and member and not self.recalled else ""

    def fold(self, event: Event) -> None:
        """Apply one event of LOG."""
        data = event.data
        if isinstance(data, e.CellRoleTransition):
            self._membership(event, data)
            if event.entity == self.cell:
                self._transition(event, data)
        elif isinstance(data, e.CellLost):
            if (
                event.entity == self.cell
                and data.service == "trainer"
                and data.process == self.processes.get(self.cell)
            ):
                self.given_up = True
        elif isinstance(data, e.BatchOpened):
            # One of another version was decided before the core went back: nothing comes of it.
            if data.version == self.stepped:
                self.batch = OpenBatch(id=event.entity, data=data)
        elif isinstance(data, e.GroupReady):
            self.rewards[event.entity] = [each.reward for each in data.rewards if each.outcome in _IN_BASELINE]
        elif isinstance(data, e.CheckpointSaved):
            self.checkpoints[data.version] = data
        elif isinstance(data, e.CheckpointRestored):
            self._restored(data.version)
        elif isinstance(data, e.WeightsExposed):
            self._exposed(event, data)
        elif isinstance(data, e.ServiceJoined) and event.owner == "trainer":
            self._started(event.entity.removeprefix("trainer-"), event.seq)
        elif isinstance(data, e.BurstEnded):
            self.recalled = self.role == "train" and self.cell != CORE and self.cell not in data.stays
        elif isinstance(data, e.RunFinished):
            self.over = True
        elif self.batch is not None:
            self._batch(self.batch, event)

    def _transition(self, event: Event, data: e.CellRoleTransition) -> None:
        if data.phase == "decided":
            self.epoch, self.recalled = data.epoch, False
            if data.target == "rollout":
                self.role, self.cause = "leaving", (event.id, event.seq)
        elif data.epoch != self.epoch or self.role == "out":
            return
        elif data.phase == "failed":
            self.role = "out"
        elif data.phase == "released" and event.owner == "rollout":
            self.role, self.cause = "entering", (event.id, event.seq)
        elif data.phase == "acquired" and event.owner == "trainer":
            self.role = "arrived"
            self._owe("join")
        elif data.phase == "completed" and data.target == "train":
            self.role = "train"
        elif data.phase == "released" and event.owner == "trainer":
            self.role = "rollout"

    def _membership(self, event: Event, data: e.CellRoleTransition) -> None:
        """Whose claims count. Only the scheduler says so."""
        cell = event.entity
        if data.phase == "decided":
            self.epochs[cell] = data.epoch
            self.trains.discard(cell)
            self._lose(cell)
        elif data.epoch != self.epochs.get(cell):
            return
        elif data.phase == "completed" and data.target == "train":
            self.trains.add(cell)
        elif data.phase == "failed":
            self.trains.discard(cell)
            self._lose(cell)
            batch = self.batch
            if batch is not None and batch.join is not None and cell in batch.join.members:
                batch.join = None

    def _lose(self, cell: str) -> None:
        """What the cell holds of the open batch is gone."""
        if self.batch is not None:
            mine = {name for name, holder in self.batch.claimed.items() if holder == cell}
            self.batch.lost |= mine
            for name in mine:
                self.batch.done.pop(name, None)

    def _restored(self, version: int) -> None:
        """Batches that made later versions count no more, nor does the one that is open."""
        if version >= self.stepped:
            return
        for group, spent in list(self.spent.items()):
            if spent.version >= version:
                self.rewards[group] = spent.rewards
                del self.spent[group]
        for kept in (self.checkpoints, self.steps):
            for later in [each for each in kept if each > version]:
                del kept[later]
        self.stepped, self.batch, self.final = version, None, 0 < version == self.exposed
        self.due, self.gone = "", self.overtaken
        if self.final:
            self.due = "publish"
        else:
            self._owe("join")

    def _exposed(self, event: Event, data: e.WeightsExposed) -> None:
        if event.causation < self.processes.get(CORE, 0):
            # Of a process that is gone, heard late.
            return
        if self.exposure is None or data.version >= self.exposure.data.version:
            self.exposure = Exposure(event.seq, data)
        if data.purpose == "publish":
            self.exposed = max(self.exposed, data.version)
            self.gone = False
            self.spent = {group: each for group, each in self.spent.items() if each.version >= data.version}
        if data.version == self.stepped and data.purpose == self.due:
            self.due = ""

    def _started(self, cell: str, seq: int) -> None:
        """A trainer's process: what the one before it held is gone."""
        self.processes[cell] = seq
        if cell == self.cell:
            self.given_up = False
        if cell == CORE:
            self.exposure = None
            self.gone = self.overtaken
            if self.final:
                self.due = "publish"
            else:
                self._owe("join")
        self._lose(cell)

    def _owe(self, purpose: Literal["join"]) -> None:
        if self.shared and self.due != "publish":
            self.due = purpose

    def _batch(self, batch: OpenBatch, event: Event) -> None:
        data, name = event.data, event.entity
        if isinstance(data, e.MicroStepEnqueued) and data.batch == batch.id:
            batch.free[name] = Free(event.seq, event.id, data.blob)
        elif isinstance(data, e.MicroStepClaimed) and data.batch == batch.id:
            batch.free.pop(name, None)
            batch.claimed[name] = data.cell
            # A cell that had not heard yet that it was put out, or a process that is gone and was heard late.
            if data.cell not in self.trains or data.process not in (0, self.processes.get(data.cell)):
                batch.lost.add(name)
        elif isinstance(data, e.MicroStepDone) and data.batch == batch.id:
            if name not in batch.lost and batch.claimed.get(name) == data.cell:
                batch.done[name] = data
        elif isinstance(data, e.MicroStepReleased) and data.batch == batch.id:
            batch.claimed.pop(name, None)
            batch.done.pop(name, None)
            batch.lost.discard(name)
            batch.free[name] = Free(event.seq, event.id, micro_step_blob(name))
        elif isinstance(data, e.GroupClaimed) and data.batch == batch.id:
            rewards = self.rewards.pop(name, [])
            batch.rewards += rewards
            self.spent[name] = Spent(batch.data.version, rewards)
        elif isinstance(data, e.BatchStreamClosed) and name == batch.id:
            batch.closed = data.micro_steps
        elif isinstance(data, e.BatchJoinClosed) and name == batch.id:
            batch.join = data
        elif isinstance(data, e.BatchStepped) and name == batch.id:
            self.stepped, self.final, self.batch = data.version, batch.data.final, None
            self.steps[data.version] = event.seq
            if self.final:
                self.due = "publish"
            else:
                self._owe("join")
