"""What is counted while a simulated run goes on, in memory that grows with groups and steps, not with the log."""

from __future__ import annotations

import msgspec

from replay.simulator.scenario import Scenario
from schemas import events as e
from schemas.envelope import Event
from schemas.ids import group_of

US_PER_H = 3.6e9


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one simulated run."""

    scenario: str
    seed: int
    hours: float
    """From the start to the publication of the last weights."""
    steps: int
    events: int
    step_hours: list[float]
    """When each step was made."""
    burst_hours: list[float]
    """When each burst's weights were published."""
    staleness: list[float]
    """Mean staleness of the groups of each step."""
    ages: list[int]
    """Versions since their dispatch, together, of the groups that each publication finds: before the first, then each."""
    executed_h: float
    """Hours that the executions of the consumed groups ran, together."""
    running_h: float
    """Hours that slots were held by running executions, those of groups that were not consumed included."""
    trained_node_h: float
    """Node-hours of micro-steps."""
    training_node_h: float
    """Node-hours in the training role, transitions included."""
    transitions: int
    excluded: int
    """Executions without an outcome for training, surplus left out."""
    surplus: int
    """Executions that were given up because their group had N valid ones."""
    discarded: int
    """Groups."""
    routes_moved: int


class Account:
    """Fed with every event of a run, in order."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._start_us = self._end_us = 0
        self._started: dict[str, int] = {}
        self._executed: dict[str, int] = {}
        """Group to the microseconds that its executions ran."""
        self._consumed_us = self._ran_us = self._training_us = 0
        self._trained_s = 0.0
        self._since: dict[str, int] = {}
        """Cell to when it left for training."""
        self._steps: list[float] = []
        self._bursts: list[float] = []
        self._staleness: dict[str, list[int]] = {}
        self._held: dict[str, int] = {}
        """Group that is dispatched and not consumed to the version at its dispatch."""
        self._ages = [0]
        self._excluded = self._surplus = self._discarded = self._moved = self._transitions = 0
        self._handlers = {
            "run.started": self._run_started,
            "execution.started": self._execution_started,
            "execution.finished": self._execution_finished,
            "execution.settled": self._execution_settled,
            "group.dispatched": self._group_dispatched,
            "group.consumed": self._group_consumed,
            "group.discarded": self._group_discarded,
            "route.moved": self._route_moved,
            "cell.role-transition": self._role_transition,
            "micro-step.done": self._micro_step_done,
            "batch.stepped": self._batch_stepped,
            "burst.ended": self._burst_ended,
        }

    def see(self, event: Event) -> None:
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)
        self._end_us = event.time_us

    def outcome(self, seed: int, events: int) -> Outcome:
        for since in self._since.values():
            self._training_us += self._end_us - since
        for since in self._started.values():
            self._ran_us += self._end_us - since
        nodes = self._scenario.world.cell_nodes
        return Outcome(
            scenario=self._scenario.name,
            seed=seed,
            hours=self._hours(self._end_us),
            steps=len(self._steps),
            events=events,
            step_hours=self._steps,
            burst_hours=self._bursts,
            staleness=[sum(each) / len(each) for each in self._staleness.values()],
            ages=self._ages,
            executed_h=self._consumed_us / US_PER_H,
            running_h=self._ran_us / US_PER_H,
            trained_node_h=self._trained_s / 3600 * nodes,
            training_node_h=self._training_us / US_PER_H * nodes,
            transitions=self._transitions,
            excluded=self._excluded,
            surplus=self._surplus,
            discarded=self._discarded,
            routes_moved=self._moved,
        )

    def _hours(self, time_us: int) -> float:
        return (time_us - self._start_us) / US_PER_H

    def _run_started(self, event: Event) -> None:
        self._start_us = event.time_us

    def _execution_started(self, event: Event) -> None:
        self._started[event.entity] = event.time_us

    def _execution_finished(self, event: Event) -> None:
        since = self._started.pop(event.entity, None)
        if since is not None:
            group, took = group_of(event.entity), event.time_us - since
            self._ran_us += took
            # What is cancelled takes slots, and would not have been needed.
            if event.data.reason != "surplus":
                self._executed[group] = self._executed.get(group, 0) + took

    def _execution_settled(self, event: Event) -> None:
        data: e.ExecutionSettled = event.data
        surplus = data.reason == "surplus"
        self._surplus += surplus
        self._excluded += data.outcome == "excluded" and not surplus

    def _group_dispatched(self, event: Event) -> None:
        data: e.GroupDispatched = event.data
        self._held[event.entity] = data.version

    def _group_consumed(self, event: Event) -> None:
        data: e.GroupConsumed = event.data
        self._held.pop(event.entity, None)
        self._staleness.setdefault(data.batch, []).append(data.staleness)
        self._consumed_us += self._executed.pop(event.entity, 0)

    def _group_discarded(self, event: Event) -> None:
        self._discarded += 1
        self._executed.pop(event.entity, None)
        self._held.pop(event.entity, None)

    def _route_moved(self, event: Event) -> None:
        self._moved += 1

    def _role_transition(self, event: Event) -> None:
        data: e.CellRoleTransition = event.data
        if (data.target, data.phase) == ("train", "decided"):
            self._since[event.entity] = event.time_us
            self._transitions += 1
        elif (data.target, data.phase) == ("rollout", "completed"):
            self._training_us += event.time_us - self._since.pop(event.entity, event.time_us)
            self._transitions += 1

    def _micro_step_done(self, event: Event) -> None:
        data: e.MicroStepDone = event.data
        self._trained_s += data.seconds

    def _batch_stepped(self, event: Event) -> None:
        self._steps.append(self._hours(event.time_us))

    def _burst_ended(self, event: Event) -> None:
        data: e.BurstEnded = event.data
        self._bursts.append(self._hours(event.time_us))
        self._ages.append(sum(data.version - version for version in self._held.values()))
