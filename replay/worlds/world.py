"""What the worlds of one run share over all lives of its processes: disks, exposed weights, running engines, the journal of
calls and of optimizer steps; and the scripts, drawn from the seed.

A script belongs to an entity and is drawn from `{seed}:{kind}:{entity}` alone: who comes first changes nothing in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

from replay.worlds.disk import Disk
from replay.worlds.faces import Life, Network

if TYPE_CHECKING:
    from replay.worlds.engine import WorldEngine
    from replay.worlds.group import Store
    from replay.worlds.processes import Machine

CHECKPOINTS = "checkpoints"
"""The disk of the training cells' checkpoints: storage that outlives any host, else no run would outlive its core's."""

Ending = Literal["completed", "failed", "hangs"]
Result = Literal["score", "crash", "hang", "garbage"]


class EngineScript(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an engine's work."""

    start_s: float = 0.0
    prefill_s: float = 0.001
    token_s: float = 0.001
    memory_s: float = 0.001
    pull_s: float = 0.001


class AgentScript(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt's harness process does."""

    calls: int = 2
    think_s: tuple[float, ...] = (0.001,)
    """Before each call, in turn."""
    branch: int = -1
    """Before this call it drops its last turn and goes another way."""
    sub_agent: int = -1
    """Before this call a sub-agent of its own asks once."""
    leave: int = -1
    """It leaves this call before the answer, and asks again."""
    leave_s: float = 0.0
    twin: int = -1
    """It asks this call twice at once."""
    again: int = -1
    """It asks this call once more when it has its answer."""
    ending: Ending = "completed"
    stubborn: bool = False
    """SIGTERM doesn't end it."""
    late: bool = False
    """One more request after its end."""
    silent: bool = False
    """No report is left."""
    unstartable: bool = False
    """Its workspace can't be made: a total failure."""
    unpackable: bool = False
    """Its workspace can't be preserved."""


class ScoreScript(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluation's tests do."""

    seconds: float = 0.001
    result: Result = "score"
    score: float = 0.5
    garbage: str = "nan"


class CellScript(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a training cell's work."""

    micro_step_s: float = 0.001
    step_s: float = 0.001
    memory_s: float = 0.001
    save_s: float = 0.001
    move_s: float = 0.001
    """An exposure, a pull, a collective."""
    eager: bool = False
    """A satellite's reduction ends when it has sent, not when the core has all."""


class Scripts(msgspec.Struct, frozen=True, kw_only=True):
    """How scripts are drawn. `pace` multiplies all seconds; the rates are probabilities."""

    pace: float = 1.0
    failed: float = 0.06
    hangs: float = 0.04
    odd: float = 0.08
    """Each oddity of an agent: a branch, a sub-agent, a call left, asked twice, asked again."""
    unstartable: float = 0.01
    tests_fail: float = 0.05


class Asked(msgspec.Struct, kw_only=True):
    """One request of a harness process to the proxy, retries included: an entry of the call journal."""

    execution: str
    attempt: int
    outcome: Literal["", "answered", "refused", "left", "gone"] = ""
    """`gone`: its process ended first."""
    status: int = 0
    message: str = ""
    """Id of the answer: `msg_` and 24 digits of the request's digest in RECORDS."""
    answer: str = ""
    """Digest of the whole answer."""
    records: int = 0
    """Last sequence of RECORDS when it arrived."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a cell took and answered: an entry of the engines' journal."""

    cell: str
    epoch: int
    """That the call carried."""
    log: int
    """Last sequence of LOG when it was made."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step that a core made, whether or not LOG ever heard of it."""

    cell: str
    version: int
    """After it."""
    gradient: dict[str, int]
    """Micro-step to the targets that were added up for it."""
    base: str
    """Digest of the weights before it."""
    digest: str
    """Of the weights after it: also the digest of their checkpoint."""


class Flat:
    """Weights on their way: a version and the digest of all that was ever trained into them."""

    __slots__ = ("digest", "version")

    def __init__(self, digest: str, version: int) -> None:
        self.digest, self.version = digest, version


class Exposed(msgspec.Struct, frozen=True, kw_only=True):
    flat: Flat
    version: int


class World:
    """`life` makes the life of a process that isn't a service: an agent, tests."""

    def __init__(
        self, seed: int | str, *, network: Network, life: Callable[[str], Life], scripts: Scripts | None = None
    ) -> None:
        from replay.worlds.processes import Machine

        self.seed, self.network, self.life = seed, network, life
        self.scripts = scripts or Scripts()
        self.disks: dict[str, Disk] = defaultdict(Disk)
        """By host; "" is the host of everything that has none of its own."""
        self.engines: dict[str, WorldEngine] = {}
        """By cell: those that run now."""
        self.exposures: dict[str, Exposed] = {}
        self.stores: dict[str, Store] = {}
        self.asked: list[Asked] = []
        self.served: list[Served] = []
        self.steps: list[Step] = []
        self.violations: list[str] = []
        """What no world may ever see: said in words, with what it was seen on."""
        self.machine: Machine = Machine(self.violations)
        self.next_tests: deque[Result] = deque()
        """Fault: results of the evaluations that begin next."""
        self.next_requests: deque[Literal["twice", "leave"]] = deque()
        """Fault: what agents do with the requests that they make next."""
        self.next_ends: deque[Literal["late"]] = deque()
        """Fault: agents that end next ask once more after their end."""
        self.records_end: Callable[[], int] = lambda: 0
        self.log_end: Callable[[], int] = lambda: 0
        """Last sequence of RECORDS, and of LOG, now."""
        self.balance: Callable[[str], str] = str
        """Which proxy a request goes to that is meant for the one at this address."""
        self._names = 0
        self._agents: dict[tuple[str, int], AgentScript] = {}

    def __repr__(self) -> str:
        return f"<World {self.seed} [{len(self.engines)} engines, {len(self.asked)} requests, {len(self.steps)} steps]>"

    def name(self, kind: str) -> str:
        """A name that nothing else of this run has."""
        self._names += 1
        return f"{kind}-{self._names}"

    def expose(self, flat: Flat, version: int, life: Life) -> str:
        """Weights that can be pulled until they are withdrawn or the life is over."""
        name = self.name("weights")
        self.exposures[name] = Exposed(flat=Flat(flat.digest, flat.version), version=version)
        life.at_end(lambda: self.withdraw(name))
        return name

    def withdraw(self, name: str) -> None:
        self.exposures.pop(name, None)

    def pulled(self, name: str, version: int) -> Flat | None:
        """The weights exposed under the name; None where there are none any more."""
        found = self.exposures.get(name)
        if found is None:
            return None
        if found.version != version or found.flat.version != version:
            self.violations.append(f"{name} holds version {found.flat.version}, said was {version}")
        return found.flat

    def engine_script(self, cell: str, life: int) -> EngineScript:
        draw, pace = self._random("engine", f"{cell}.{life}"), self.scripts.pace
        return EngineScript(
            start_s=pace * draw.uniform(1, 60),
            prefill_s=pace * draw.uniform(0.05, 2),
            token_s=pace * draw.choice((0.05, 0.5, 4.0)),
            memory_s=pace * draw.uniform(0.1, 10),
            pull_s=pace * draw.uniform(0.1, 20),
        )

    def agent_script(self, execution: str, attempt: int) -> AgentScript:
        script = self._agents.get((execution, attempt))
        if script is None:
            script = self._agents[execution, attempt] = self._draw_agent(execution, attempt)
        return script

    def _draw_agent(self, execution: str, attempt: int) -> AgentScript:
        draw, rates, pace = self._random("agent", f"{execution}.{attempt}"), self.scripts, self.scripts.pace
        # Most are short, and some are as long as it takes to go astray.
        calls = draw.choice((1, 1, 1, 1, 2, 2, 4))

        def odd(first: int = 0) -> int:
            happens, at = draw.random() < rates.odd, draw.random()
            return first + int(at * (calls - first)) if happens and calls > first else -1

        end = draw.random()
        return AgentScript(
            calls=calls,
            think_s=tuple(pace * draw.choice((0.5, 20, 300, 1200)) * draw.uniform(0.5, 2) for _ in range(calls)),
            branch=odd(1),
            sub_agent=odd(),
            leave=odd(),
            leave_s=pace * draw.uniform(0, 5),
            twin=odd(),
            again=odd(),
            ending="failed" if end < rates.failed else "hangs" if end < rates.failed + rates.hangs else "completed",
            stubborn=draw.random() < 0.1,
            late=draw.random() < rates.odd,
            silent=draw.random() < rates.odd,
            unstartable=draw.random() < rates.unstartable,
            unpackable=draw.random() < rates.unstartable,
        )

    def score_script(self, evaluation: str) -> ScoreScript:
        """`evaluation` with its try: `v-000001.00-0.1`."""
        draw, pace = self._random("tests", evaluation), self.scripts.pace
        fails, bad = draw.random() < self.scripts.tests_fail, draw.choice(("crash", "hang", "garbage"))
        seconds, garbage = pace * draw.uniform(0.5, 60), draw.choice(("nan", "1.5", "-1", "good", ""))
        result: Result = bad if fails else "score"  # type: ignore[assignment]  # mypy widens the tuple's choice
        # The score is the workspace's own, whichever try finds it.
        score = self._random("score", evaluation.rpartition(".")[0]).choice((0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0))
        return ScoreScript(
            seconds=seconds,
            result=self.next_tests.popleft() if self.next_tests else result,
            score=score,
            garbage=garbage,
        )

    def cell_script(self, cell: str, life: int) -> CellScript:
        draw, pace = self._random("cell", f"{cell}.{life}"), self.scripts.pace
        return CellScript(
            micro_step_s=pace * draw.uniform(0.5, 60),
            step_s=pace * draw.uniform(0.5, 20),
            memory_s=pace * draw.uniform(0.1, 10),
            save_s=pace * draw.uniform(0.1, 30),
            move_s=pace * draw.uniform(0.05, 5),
            eager=draw.random() < 0.5,
        )

    def _random(self, kind: str, entity: str) -> Random:
        return Random(f"{self.seed}:{kind}:{entity}")
