"""State of the scheduler, and what can be read off it. `changes.evolve` is the only code that changes it.

Ledger: d, p, f count executions over the whole run; `a` of them are placed and not yet started. Held-out ones are outside.
Execution: queued -> placed -> running -> finished; one whose attempt is lost is placed again and stays what it is.
Group: dispatched -> ready -> claimed, then gone; ready again when its batch is undone.
Cell: serving (rollout) -> leaving -> training -> returning -> serving; one cell moves at a time. A loss puts it out of
whichever but serving; from there it returns.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.config import Config
from schemas.ids import cell_id, cell_index
from schemas.units import Check, TaskRef
from services.scheduler.core import equations as eq
from services.scheduler.core.index import Index


class Execution(msgspec.Struct, kw_only=True):
    group: str
    measurement: str = ""
    """Of a held-out execution, which has no group and no place in the ledger."""
    status: Literal["queued", "placed", "running", "finished"] = "queued"
    cell: str = ""
    attempt: int = 0
    lost: bool = False
    """The attempt is gone with its host. The execution keeps its slot and its place in the ledger until the next."""


class Measurement(msgspec.Struct, kw_only=True):
    """The held-out measurement that is open."""

    id: str
    version: int
    steps: int
    """Since the measurement before."""
    queue: list[str] = []
    """Its executions that have no slot yet."""
    open: list[str] = []
    """Its executions that are not settled."""
    slots: int = 0
    """Its executions that are placed and not finished."""
    unfinished: int = 0
    outcomes: dict[str, int] = {}
    rewards: list[float] = []
    """Of those that are not excluded."""
    late: int = 0
    """Executions that ended after an engine had a newer version."""


class Group(msgspec.Struct, kw_only=True):
    version: int
    status: Literal["dispatched", "ready", "claimed"] = "dispatched"


class Cell(msgspec.Struct, kw_only=True):
    index: int
    pool: bool = False
    """An engine of the separate pool: it always serves."""
    capacity: int = 0
    """C_e; of a pool engine, its own."""
    place: Literal["serving", "leaving", "training", "returning", "out"] = "serving"
    arrived: bool = False
    """The move's last phase was reported; the scheduler has yet to complete it."""
    epoch: int = 0
    version: int = 0
    holds: set[str] = set()
    """Executions placed here and not finished."""
    withdrawn: bool = False
    """An operator wants it empty: it takes nothing, and what it has moves away as room appears."""
    reserved: bool = False
    """Kept for training by a fixed split: it serves nobody, in whatever role."""
    lost: Literal["", "rollout", "trainer"] = ""
    """Which of its processes is gone, until another one joins."""

    @property
    def load(self) -> int:
        return len(self.holds)

    @property
    def absent(self) -> bool:
        """Whether it serves nobody although it has the rollout role."""
        return self.withdrawn or self.reserved or self.lost == "rollout"


class Burst(msgspec.Struct, kw_only=True):
    id: str
    index: int
    steps: int
    first_step: int
    done: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    step: int
    version: int
    final: bool
    groups: list[str] = []
    """Claimed and not yet consumed."""
    claimed: int = 0
    micro_steps: int = -1
    """How many there are, known once the stream is closed."""
    claims: dict[str, str] = {}
    """Micro-step to the cell that claimed it last."""
    gradients: dict[str, set[str]] = {}
    """Cell to the micro-steps whose gradient it holds."""
    done: int = 0
    """How many these are."""
    join_closed: bool = False
    joined: list[str] = []
    """The members that its join window closed with."""
    stepped: bool = False


class Trained(msgspec.Struct, kw_only=True):
    """A batch that was stepped and can still be undone: its version isn't exposed for publication yet."""

    version: int
    """v_t, immediately before the step."""
    groups: dict[str, Group] = {}
    """Consumed by it."""


class State(msgspec.Struct, kw_only=True):
    run: str = ""
    config: Config | None = None
    seed: int = 0
    tasks: list[TaskRef] = []
    held_out: list[TaskRef] = []
    flags: set[str] = set()
    """Decision flags of the run."""
    finished: bool = False
    paused: bool = False
    d: int = 0
    p: int = 0
    f: int = 0
    a: int = 0
    line: list[str] = []
    """Executions in the order of their dispatch; those before `line_from` have left it."""
    line_from: int = 0
    executions: dict[str, Execution] = {}
    """Those that are not finished, and held-out ones that are not settled."""
    groups: dict[str, Group] = {}
    cells: dict[str, Cell] = {}
    measurement: Measurement | None = None
    measured: int = -1
    """Version measured last; -1 before the first measurement."""
    next_group: int = 0
    owed: int = 0
    """Discarded groups that no dispatch has replaced yet."""
    burst: Burst | None = None
    bursts: int = 0
    batch: Batch | None = None
    batches: int = 0
    trained: list[Trained] = []
    """In the order of their steps."""
    processes: dict[str, int] = {}
    """Instance of a cell's service to the sequence at which its newest process joined."""
    added: int = 0
    """Cells that an operator added to those of the configuration."""
    version: int = 0
    """v_t: version in the training cells."""
    published: int = 0
    """Version that every serving engine had at the last publication."""
    publishing: int = -1
    """Version exposed for publication and not yet served everywhere; -1 when there is none."""
    recall: list[str] = []
    """Training cells of the burst that ended, still to be sent back to rollout; highest index last."""
    recall_reason: list[Check] = []
    """Why, as it stood when the burst ended: the checks of (3), or what the strategy says."""
    timers: int = 0
    supply_timer: str = ""
    """Armed timer of the supply check; empty when the check does not hold or held for tau."""
    supply_due_us: int = 0
    supply_held: bool = False
    held: tuple[str, str] = ("", "")
    """The cell that was said last to be held back from training, and the first check that failed then."""

    index: Index = msgspec.field(default_factory=Index)

    @property
    def queue(self) -> list[str]:
        """Executions that have no slot yet, in order."""
        return self.line[self.line_from :]

    def __repr__(self) -> str:
        cells = " ".join(f"{name}:{cell.place}/{cell.load}" for name, cell in ordered(self))
        return (
            f"<Scheduler d={self.d} p={self.p} f={self.f} a={self.a} w={self.d - self.f} | v{self.version} | {cells}>"
        )

    @property
    def rules(self) -> Config:
        """The configuration; there is one from `run.started` on."""
        assert self.config is not None
        return self.config


def cell_count(state: State) -> int:
    """K: the cells that belong to the run now."""
    return state.rules.cells.count + state.added


def ordered(state: State) -> list[tuple[str, Cell]]:
    """Cells by index, the core first; then the pool's engines. For whoever tells: no rule asks for all of them."""
    return sorted(state.cells.items(), key=lambda each: (each[1].pool, each[1].index))


def moving(state: State) -> list[tuple[str, Cell]]:
    return [(name, state.cells[name]) for name in sorted(state.index.moving, key=cell_index)]


def training(state: State) -> list[str]:
    """A prefix, the core first."""
    return [cell_id(index) for index in range(state.index.prefix)]


def served_capacity(state: State) -> int:
    """C_R by equation (1); cells that have not joined serve nobody."""
    K = cell_count(state)
    return eq.capacity(C_s=state.index.C_s, K=K, k=K - state.index.able, C_e=state.rules.cells.capacity)


def least_loaded(state: State) -> tuple[int, str] | None:
    """Load and name of the engine that the next execution goes to (ties: the pool, then lowest index); None when none has room.

    Its policy version is current."""
    if not state.index.free:
        return None
    load, _, name = state.index.free[0]
    return load, name


def members(state: State) -> list[str]:
    """Cells that train the batch in hand or the next one: a prefix, the core first."""
    return [name for name in training(state) if name not in state.recall]


def supply(state: State) -> int:
    """Ready and unclaimed groups, capped by what the batch still needs."""
    need = state.rules.scheduler.B - (state.batch.claimed if state.batch else 0)
    return min(state.index.ready, need)


def supplied(state: State) -> bool:
    """Whether the supply check holds."""
    s = state.rules.scheduler
    return supply(state) >= s.rho_min * s.B


def supply_check(state: State) -> Check:
    s = state.rules.scheduler
    need = s.B - (state.batch.claimed if state.batch else 0)
    return eq.supply(ready=state.index.ready, need=need, rho_min=s.rho_min, B=s.B)


def prefix_to_train(state: State) -> list[str]:
    """Cells that may join the growing prefix, core first, up to the first that is not serving or may not train."""
    found = []
    for index in range(state.index.prefix, state.rules.cells.trainers(state.added)):
        name = cell_id(index)
        if not _may_train(state, name):
            break
        found.append(name)
    return found


def next_to_train(state: State) -> str | None:
    """The next cell of the growing prefix, core first; None when it is not serving or no more may train."""
    name = cell_id(state.index.prefix)
    able = state.index.prefix < state.rules.cells.trainers(state.added) and _may_train(state, name)
    return name if able else None


def _may_train(state: State, name: str) -> bool:
    cell = state.cells.get(name)
    return cell is not None and cell.place == "serving" and not cell.withdrawn and not cell.lost


def groups_of_burst(state: State) -> int:
    """Groups that are ready, and those that the open batch has of them already."""
    batch = state.batch
    return state.index.ready + (batch.claimed if batch is not None and not batch.stepped else 0)
