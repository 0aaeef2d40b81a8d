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

from collections.abc import Iterator

from schemas import events as e
from schemas import ids
from schemas.envelope import Decision
from schemas.units import check
from services.scheduler.core import equations as eq
from services.scheduler.core import measurements
from services.scheduler.core.dispatch import dispatch, end_burst, open_burst, refill
from services.scheduler.core.placement import evacuate, place, place_again
from services.scheduler.core.reasons import told
from services.scheduler.core.state import State, members
from services.scheduler.core.transitions import complete_transition, join_training, put_out, send_back, still_held

Decisions = Iterator[Decision]
_CORE = ids.cell_id(0)


def begin(state: State) -> Decisions:
    """The first burst and the initial dispatch of (phi + mu) B groups."""
    s = state.rules.scheduler
    yield from open_burst(state)
    yield from dispatch(state, eq.initial_dispatch(phi=s.phi, mu=s.mu, B=s.B), "initial")


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
    if not still_held(state):
        yield from join_training(state, now_us)


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
                reason=told(state, check("step made", state.version, ">", batch.version)),
            ),
        )


def finish(state: State) -> Decisions:
    """No burst is open once one was: the last has ended. What is still measured is waited for."""
    if state.burst is not None or not state.bursts or state.measurement is not None:
        return
    steps = state.rules.steps
    made = check("steps of the run", state.published, ">=", steps)
    yield Decision(
        kind="run.finished",
        entity=state.run,
        data=e.RunFinished(steps=steps, reason="steps_done", checks=told(state, made)),
    )


def open_batch(state: State) -> Decisions:
    burst = state.burst
    if burst is None or burst.done == burst.steps or state.batch is not None or not state.index.prefix:
        return
    if _CORE in state.recall:
        return
    index, joined = state.batches + 1, members(state)
    yield Decision(
        kind="batch.opened",
        entity=ids.batch_id(index),
        data=e.BatchOpened(
            step=burst.first_step + burst.done,
            version=state.version,
            burst=burst.id,
            final=burst.done + 1 == burst.steps,
            groups=state.rules.scheduler.B,
            members=joined,
            reason=told(
                state,
                check("steps of the burst", burst.done, "<", burst.steps),
                check("cells that train", len(joined), ">=", 1),
            ),
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
        data=e.BatchJoinClosed(
            members=joined,
            epochs=[state.cells[name].epoch for name in joined],
            reason=told(
                state,
                check("micro-steps done", batch.done, ">=", batch.micro_steps),
                check("cells on their way to training", state.index.leaving, "==", 0),
            ),
        ),
    )
