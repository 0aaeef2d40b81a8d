"""What the scheduler decides, one generator for each rule. Each looks at the state as the rule before left it.

Order of `standing`, the rules that are looked at after every event:
1. put a lost cell out of its transition or the prefix, which shrinks to below it;
2. complete a role transition whose last phase was reported;
3. consume the groups of a batch that was stepped;
4. end the burst once every serving engine has its weights: who stays (3), then the next burst's dispatch;
5. close the held-out measurement that is settled, open the one that is due;
6. end the run after the last burst, once its version is measured;
7. send back the next cell of a burst that ended, the highest index first, or one that was put out;
8. open the next batch when the core trains and none is open;
9. close the join window when everything is trained and nobody is on the way;
10. replace discarded groups without which the burst cannot finish;
11. empty cells that an operator withdrew or whose engine is lost, as far as others have room;
12. place lost executions again;
13. place executions (start rule), held-out ones first;
14. watch the supply and let the next cell, or all of them, join training (2).
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.units import CellRole, Check, TaskRef, check
from services.scheduler.core import equations as eq
from services.scheduler.core import measurements
from services.scheduler.core.state import (
    Cell,
    State,
    cell_count,
    least_loaded,
    members,
    moving,
    served_capacity,
    supplied,
    supply_check,
    training,
)
from services.scheduler.core.strategies import strategy_of

Decisions = Iterator[Decision]
_CORE = ids.cell_id(0)


def begin(state: State) -> Decisions:
    """The first burst and the initial dispatch of (phi + mu) B groups."""
    s = state.rules.scheduler
    yield from _open_burst(state)
    yield from _dispatch(state, eq.initial_dispatch(phi=s.phi, mu=s.mu, B=s.B), "initial")


def standing(state: State, now_us: int) -> Decisions:
    """Rules that have nothing to look at are passed over: most events concern one or two."""
    index = state.index
    if index.troubled:
        yield from put_out(state)
    if index.moving:
        yield from complete_transition(state)
    if state.batch is not None and state.batch.stepped:
        yield from consume(state)
    if state.publishing >= 0:
        yield from end_burst(state)
    if state.measurement is not None:
        yield from measurements.close(state)
    if state.rules.eval.every:
        yield from measurements.open_due(state)
    yield from finish(state)
    if state.finished:
        return
    if state.recall or index.out:
        yield from send_back(state)
    if state.batch is None:
        yield from open_batch(state)
    if state.batch is not None and state.batch.micro_steps >= 0:
        yield from close_join(state)
    if state.owed:
        yield from refill(state)
    if index.emptying:
        yield from evacuate(state)
    if index.lost:
        yield from place_again(state)
    if state.measurement is not None:
        yield from measurements.place(state)
    yield from place(state)
    if not _still_held(state):
        yield from join_training(state, now_us)


def put_out(state: State) -> Decisions:
    """Nobody waits for a cell that is gone: its transition fails, and the prefix shrinks to below it. Those above it
    leave too, the highest first; what all of them trained of the open batch is trained again by those who stay."""
    troubled = [state.cells[name] for name in state.index.troubled]
    lost = [
        cell.index
        for cell in troubled
        if cell.place == "leaving" or (cell.place == "training" and cell.lost == "trainer")
    ]
    for name, cell in reversed(moving(state)):
        if cell.lost or (lost and cell.place == "leaving" and cell.index > min(lost)):
            yield _failed(name, cell, lost=min([*lost, cell.index]))
    if lost:
        for name in reversed(training(state)[min(lost) :]):
            yield _failed(name, state.cells[name], lost=min(lost))


def complete_transition(state: State) -> Decisions:
    """Into training in the order of their indices, so that whoever trains is a prefix also where several are on the way."""
    for name in sorted(state.index.returned, key=ids.cell_index):
        yield _transition(name, state.cells[name], "completed", to="rollout", reason=[])
    while state.index.leaving:
        name = ids.cell_id(state.index.prefix)
        cell = state.cells.get(name)
        if cell is None or cell.place != "leaving" or not cell.arrived:
            return
        yield _transition(name, cell, "completed", to="train", reason=[])


def consume(state: State) -> Decisions:
    batch = state.batch
    if batch is None or not batch.stepped:
        return
    for name in sorted(batch.groups):
        dispatched = state.groups[name].version
        yield Decision(
            kind="group.consumed",
            entity=name,
            data=e.GroupConsumed(
                batch=batch.id,
                version_dispatched=dispatched,
                version_trained=batch.version,
                staleness=batch.version - dispatched,
            ),
        )


def end_burst(state: State) -> Decisions:
    """Once the burst's last weights are served by every rollout engine. Who stays is the strategy's word; the others
    return before the next burst's dispatch is counted, and all do after the last burst, but for a fixed split.

    A paused run ends no burst: what follows would be dispatched, or the run would be over."""
    burst = state.burst
    if state.paused or burst is None or burst.done < burst.steps or state.batch is not None or state.publishing < 0:
        return
    if any(int(version) < state.publishing for version in state.index.versions):
        return
    s = state.rules.scheduler
    last = burst.first_step + burst.steps > state.rules.steps
    stays, reason = strategy_of(state).staying(state)
    if last and ids.cell_id(0) in stays and not strategy_of(state).split:
        stays = []
    yield Decision(
        kind="burst.ended",
        entity=burst.id,
        data=e.BurstEnded(
            version=state.publishing, core_stays=ids.cell_id(0) in stays, reason=reason, stays=stays
        ),
    )
    if last:
        return
    yield from _open_burst(state)
    yield from _dispatch(state, s.mu * s.B, "boundary")
    yield from _dispatch(state, state.owed, "replacement")


def finish(state: State) -> Decisions:
    """No burst is open once one was: the last has ended. What is still measured is waited for."""
    if state.burst is not None or not state.bursts or state.measurement is not None:
        return
    yield Decision(
        kind="run.finished", entity=state.run, data=e.RunFinished(steps=state.rules.steps, reason="steps_done")
    )


def send_back(state: State) -> Decisions:
    """The cells of a burst that ended return one at a time, or together; the core last, so that the others stay a
    prefix. So does one that was put out, once its process is there."""
    together = strategy_of(state).together
    if state.index.leaving or (state.index.moving and not together):
        return
    while state.recall and together:
        name = state.recall[-1]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=state.recall_reason)
    if state.index.moving:
        return
    if state.recall:
        name = state.recall[-1]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=state.recall_reason)
        return
    out = [name for name in state.index.out if not state.cells[name].lost]
    if out:
        name = max(out, key=ids.cell_index)
        reason = [check("above the prefix", state.cells[name].index, ">=", state.index.prefix)]
        yield _transition(name, state.cells[name], "decided", to="rollout", reason=reason)


def open_batch(state: State) -> Decisions:
    burst = state.burst
    if burst is None or burst.done == burst.steps or state.batch is not None or not state.index.prefix:
        return
    if _CORE in state.recall:
        return
    index = state.batches + 1
    yield Decision(
        kind="batch.opened",
        entity=ids.batch_id(index),
        data=e.BatchOpened(
            step=burst.first_step + burst.done,
            version=state.version,
            burst=burst.id,
            final=burst.done + 1 == burst.steps,
            groups=state.rules.scheduler.B,
            members=members(state),
        ),
    )


def close_join(state: State) -> Decisions:
    """The update follows: the stream is closed, every micro-step is done, and no cell is on its way into training."""
    batch = state.batch
    if batch is None or batch.join_closed or batch.micro_steps < 0 or batch.done < batch.micro_steps:
        return
    if state.index.leaving:
        return
    joined = members(state)
    yield Decision(
        kind="batch.join-closed",
        entity=batch.id,
        data=e.BatchJoinClosed(members=joined, epochs=[state.cells[name].epoch for name in joined]),
    )


def refill(state: State) -> Decisions:
    """Discarded groups come back with the next publication, except those that the burst cannot do without."""
    burst = state.burst
    if burst is None or state.owed == 0:
        return
    wanted = (burst.steps - burst.done) * state.rules.scheduler.B
    yield from _dispatch(state, min(state.owed, wanted - len(state.groups)), "refill")


def evacuate(state: State) -> Decisions:
    for name in sorted(state.index.emptying, key=lambda name: (ids.in_pool(name), ids.cell_index(name))):
        if state.cells[name].holds:
            yield from _move_routes(state, name)


def place_again(state: State) -> Decisions:
    """The next attempt of an execution whose attempt was lost takes its slot; no counter moves. One that has its slot
    on a cell which serves nobody is moved first (11). After the last burst too: the last measurement waits for its slots."""
    if state.paused:
        return
    for name in sorted(state.index.lost):
        execution = state.executions[name]
        cell = state.cells[execution.cell]
        if cell.place != "serving" or cell.absent:
            continue
        yield Decision(
            kind="execution.placed",
            entity=name,
            data=e.ExecutionPlaced(
                cell=execution.cell,
                epoch=cell.epoch,
                attempt=execution.attempt + 1,
                reason=[check("its slot is held", cell.load, "<=", cell.capacity)],
            ),
        )


def place(state: State) -> Decisions:
    """The start rule, on the least loaded engine whose policy version is current. After the last burst nothing more."""
    while state.line_from < len(state.line) and state.index.free and not state.paused and state.burst is not None:
        C_R, held_out = served_capacity(state), measurements.slots(state)
        if eq.startable(d=state.d, p=state.p, f=state.f, a=state.a, C_R=C_R, e=held_out) == 0:
            return
        engine = least_loaded(state)
        if engine is None:
            return
        load, name = engine
        yield Decision(
            kind="execution.placed",
            entity=state.line[state.line_from],
            data=e.ExecutionPlaced(
                cell=name,
                epoch=state.cells[name].epoch,
                attempt=0,
                reason=[
                    check("capacity (1)", state.p - state.f + state.a + held_out, "<", C_R),
                    check("engine has room", load, "<", state.cells[name].capacity),
                ],
            ),
        )


def join_training(state: State, now_us: int) -> Decisions:
    """The strategy says who is next and what must hold; where the supply counts, it has held for tau. One cell at a time
    joins, or all that the strategy names. What keeps it back is said whenever it is something else than before."""
    burst, strategy = state.burst, strategy_of(state)
    if state.paused or state.index.moving or state.recall or burst is None or burst.done == burst.steps:
        return
    names = strategy.joining(state)
    if not names:
        return
    supply = supply_check(state)
    if strategy.supplied and supply.holds and not state.supply_held and not state.supply_timer:
        yield Decision(
            kind="timer.set",
            entity=ids.timer_id("supply", state.timers + 1),
            data=e.TimerSet(purpose="supply", due_us=now_us + round(state.rules.scheduler.tau_s * 1e6)),
        )
    reason = strategy.gate(state, names)
    if strategy.supplied and supply.holds and not state.supply_held:
        tau_s = state.rules.scheduler.tau_s
        since_us = state.supply_due_us - round(tau_s * 1e6)
        lasting = eq.supplied_for(since_us=since_us, now_us=now_us, tau_s=tau_s)
        # Whatever the clock says, it lasted when its timer has fired.
        reason.insert(2, msgspec.structs.replace(lasting, holds=False))
    failing = next((each.rule for each in reason if not each.holds), None)
    if failing is not None:
        if (names[0], failing) != state.held:
            yield Decision(kind="cell.held", entity=names[0], data=e.CellHeld(reason=reason))
        return
    for name in names:
        yield _transition(name, state.cells[name], "decided", to="train", reason=reason)
    for name in names:
        yield from _move_routes(state, name)


def _move_routes(state: State, source: str) -> Decisions:
    """Destinations: the separate pool, then cells in reverse index order, so that whoever is expected to serve longest
    takes what it has room for. In the pool the engine with the fewest executions, then the lowest index.

    After equation (2) there is room for all of them; where a cell is withdrawn, the rest waits for room.
    """
    pool = [(cell.load, cell.index, name) for name, cell in _pool(state) if cell.load < cell.capacity]
    heapq.heapify(pool)
    index = cell_count(state) - 1
    for execution in sorted(state.cells[source].holds):
        if pool:
            load, place, target = pool[0]
            if load + 1 < state.cells[target].capacity:
                heapq.heapreplace(pool, (load + 1, place, target))
            else:
                heapq.heappop(pool)
        else:
            while index >= 0 and not _has_room(state, ids.cell_id(index)):
                index -= 1
            if index < 0:
                return
            target = ids.cell_id(index)
        yield Decision(
            kind="route.moved",
            entity=execution,
            data=e.RouteMoved(source=source, target=target, epoch=state.cells[target].epoch, kv="recomputed"),
        )


def _pool(state: State) -> list[tuple[str, Cell]]:
    """Engines of the pool that may take executions."""
    names = [ids.pool_id(index) for index in range(state.rules.cells.pool)]
    return [(name, state.cells[name]) for name in names if name in state.cells and not state.cells[name].absent]


def _has_room(state: State, name: str) -> bool:
    cell = state.cells.get(name)
    return cell is not None and cell.place == "serving" and not cell.absent and cell.load < cell.capacity


def _still_held(state: State) -> bool:
    """Whether the next cell is held back by what was said before, so that nothing new can be decided about it."""
    name, rule = state.held
    if not name or name != ids.cell_id(state.index.prefix):
        return False
    supplied_now = supplied(state)
    if supplied_now and not state.supply_held and not state.supply_timer:
        return False
    if rule == eq.WATERLEVEL:
        able = cell_count(state) - state.index.prefix
        everybody = state.index.able == able and strategy_of(state).together
        leaving = state.rules.cells.trainers(state.added) - state.index.prefix if everybody else 1
        return state.d - state.f > served_capacity(state) - leaving * state.rules.cells.capacity
    return False


def _transition(
    name: str, cell: Cell, phase: Literal["decided", "completed"], *, to: CellRole, reason: list[Check]
) -> Decision:
    return Decision(
        kind="cell.role-transition",
        entity=name,
        data=e.CellRoleTransition(
            phase=phase,
            source="rollout" if to == "train" else "train",
            target=to,
            epoch=cell.epoch + 1 if phase == "decided" else cell.epoch,
            reason=reason,
        ),
    )


def _failed(name: str, cell: Cell, *, lost: int) -> Decision:
    source: CellRole = "rollout" if cell.place == "leaving" else "train"
    return Decision(
        kind="cell.role-transition",
        entity=name,
        data=e.CellRoleTransition(
            phase="failed",
            source=source,
            target="train" if source == "rollout" else "rollout",
            epoch=cell.epoch,
            reason=[check("at or above the lost cell", cell.index, ">=", lost)],
        ),
    )


def _open_burst(state: State) -> Decisions:
    index = state.bursts + 1
    mu = state.rules.scheduler.mu
    yield Decision(
        kind="burst.opened",
        entity=ids.burst_id(index),
        data=e.BurstOpened(index=index, steps=mu, first_step=(index - 1) * mu + 1, version=state.published),
    )


def _dispatch(state: State, groups: int, reason: e.DispatchReason) -> Decisions:
    assert state.burst is not None
    for _ in range(groups):
        index = state.next_group
        group = ids.group_id(index)
        task = task_of(state, index)
        executions = [ids.execution_id(index, member) for member in range(state.rules.scheduler.N)]
        yield Decision(
            kind="group.dispatched",
            entity=group,
            data=e.GroupDispatched(
                task=task.name,
                task_digest=task.digest,
                reason=reason,
                burst=state.burst.id,
                version=state.published,
                executions=executions,
            ),
        )
        for member, execution in enumerate(executions):
            yield Decision(
                kind="execution.dispatched",
                entity=execution,
                data=e.ExecutionDispatched(group=group, member=member, task=task.name),
            )


def task_of(state: State, index: int) -> TaskRef:
    """The task of the group with this index: every pass over the tasks is a new order drawn from the run's seed."""
    lap, position = divmod(index, len(state.tasks))
    return state.tasks[_lap(state.seed, lap, len(state.tasks))[position]]


@functools.lru_cache(maxsize=8)
def _lap(seed: int, lap: int, count: int) -> list[int]:
    return random.Random(f"{seed}:tasks:{lap}").sample(range(count), count)
