"""Arbitrary interleavings, chosen one by one: finishes, losses, surplus, repetitions, drains, restored versions, measurements, in every
strategy. What holds after each is in `Watch`; in the end the same log gives the same bytes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas import events as e
from schemas.config import Config
from services.mesh.decider import Driver
from services.scheduler.core.state import State
from services.scheduler.decider import Scheduler
from tests.scheduler.watch import Watch, check_index
from tests.scheduler.world import RUN, World, small_config


def config_of(strategy: str, streaming: bool, pool: int, capacity: int, every: int, oversample: int) -> Config:
    trainable = 3 - (strategy == "async" and not pool)
    serving = (3 - trainable * (strategy == "async")) * capacity + 5 * pool
    return small_config(
        steps=4,
        cells__trainable=trainable,
        scheduler__oversample=oversample if oversample + 4 <= serving else 0,
        cells__capacity=capacity,
        cells__pool=pool,
        cells__pool_capacity=5,
        scheduler__strategy=strategy,
        scheduler__streaming=streaming,
        eval__path="held-out",
        eval__every=every,
        eval__executions=3,
    )


class Interleaved(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(["elastic", "colocate", "async"]),
        streaming=st.booleans(),
        pool=st.integers(0, 1),
        capacity=st.sampled_from([4, 8, 20]),
        every=st.sampled_from([0, 2]),
        oversample=st.sampled_from([0, 1, 3]),
        seed=st.integers(0, 1000),
    )
    def begin(
        self, strategy: str, streaming: bool, pool: int, capacity: int, every: int, oversample: int, seed: int
    ) -> None:
        config = config_of(strategy, streaming, pool, capacity, every, oversample)
        self.world = World(config, seed=seed, fail_groups=0.1, late=0.5)
        Watch(self.world)
        self.world.start()

    @property
    def running(self) -> bool:
        return hasattr(self, "world") and not self.world.finished

    @rule(steps=st.integers(1, 60))
    def somebody_speaks(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.step():
                return

    @precondition(lambda self: self.running)
    @rule()
    def an_attempt_is_lost(self) -> None:
        self.world.lose, before = 1.0, self.world.lose
        self.world.step()
        self.world.lose = before

    @precondition(lambda self: self.running and self.world.state.cells)
    @rule(data=st.data())
    def a_cell_is_lost(self, data: st.DataObject) -> None:
        self.world._lose_cell(data.draw(st.sampled_from(sorted(self.world.state.cells))))

    @precondition(lambda self: self.running and self.world.state.version)
    @rule(data=st.data())
    def the_core_starts_again(self, data: st.DataObject) -> None:
        self.world._restore(data.draw(st.integers(self.world.exposed, self.world.state.version)))

    @precondition(lambda self: self.running and self.world.log)
    @rule(back=st.integers(1, 40))
    def a_fact_is_read_again(self, back: int) -> None:
        past = self.world.log[-min(back, len(self.world.log))]
        if past.owner == "harness":
            self.world.say(past.owner, past.kind, past.entity, past.data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def an_operator_has_a_wish(self, data: st.DataObject) -> None:
        cells = sorted(self.world.state.cells)
        kind = data.draw(st.sampled_from(["pause", "resume", *(["drain", "add"] if cells else [])]))
        if kind == "pause":
            self.world.say("operator", "run.paused", RUN, e.RunPaused(by="test"))
        elif kind == "resume":
            self.world.say("operator", "run.resumed", RUN, e.RunResumed(by="test"))
        elif kind == "drain":
            self.world.say("operator", "cell.withdrawn", data.draw(st.sampled_from(cells)), e.CellWithdrawn(by="test"))
        else:
            self.world.say(
                "operator", "cell.reinstated", data.draw(st.sampled_from(cells)), e.CellReinstated(by="test")
            )

    @invariant()
    def the_index_is_true(self) -> None:
        if hasattr(self, "world"):
            check_index(self.world.state)

    def teardown(self) -> None:
        """Whatever happened, the run comes to its end, and its log says the same again."""
        if not hasattr(self, "world"):
            return
        for _ in range(5_000):
            if not self.world.step():
                break
        assert self.world.finished, f"stuck: {self.world.state!r}"
        again: Driver[State] = Driver(Scheduler())
        for event in self.world.log:
            assert again.feed(event) == self.world.per_input[event.seq]
        assert again.snapshot() == self.world.driver.snapshot()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
