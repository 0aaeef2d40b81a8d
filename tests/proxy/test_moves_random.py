"""Any order of moves, aborts, losses and answers leaves one answer and one exact record. Time is virtual."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import streams
from schemas.envelope import Event
from schemas.events import CellJoined, ExecutionPlaced, RouteMoved
from schemas.records import CallRecord, VersionSpan
from schemas.units import Value
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.tree_codec import decode_record
from services.proxy.dialects import anthropic
from services.proxy.encoder import Encoder
from services.proxy.engine import EngineLost, Sampled, StaleEpoch
from services.proxy.executions import Execution, Shared
from services.proxy.routes import Route, Routes
from tests.proxy.bodies import body_of
from tests.proxy.world import EXECUTION, RUN, configured

CELLS = 3
HARMS = 5
"""Losses and aborts without a move that are drawn at most: six in a row are an error of their own."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer when nothing else is left to do."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everything waits for something that never happens")
        self._loop.jump(timeout)
        return super().select(0)


class Live:
    """One generation: `taken` tokens of the answer are there, those before `start` were sent by the caller."""

    def __init__(self, rid: str, start: int, cell: int) -> None:
        self.rid, self.start, self.taken, self.cell = rid, start, start, cell
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Engines:
    """Three cells that play one answer; with the face of `services.proxy.engine.Engines`."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.prompt: list[int] | None = None
        self.rids: set[str] = set()
        self.live: list[Live] = []
        self.parts: list[tuple[int, int, int]] = []
        """Cell, start and end of what reached the proxy."""
        self.deaf = [False] * CELLS
        self.closed = [False] * CELLS

    def logprob(self, at: int) -> float:
        return -0.25 - at / 64

    def at(self, cell: int) -> list[Live]:
        return [live for live in self.live if live.cell == cell and not live.end.done()]

    async def generate(
        self, route: Route, *, rid: str, input_ids: list[bytes], max_new_tokens: int, stop_ids: list[int], **_: Any
    ) -> Sampled:
        assert rid not in self.rids and len(rid) == 32
        self.rids.add(rid)
        asked: list[int] = msgspec.json.decode(b"[" + b",".join(input_ids) + b"]")
        if self.prompt is None:
            self.prompt = asked
        start = len(asked) - len(self.prompt)
        assert asked == self.prompt + self.answer[:start]
        assert max_new_tokens == len(self.answer) - start > 0
        assert not self.live, "two generations of one call"
        cell = int(route.cell[-1])
        await asyncio.sleep(0)
        if self.closed[cell]:
            raise StaleEpoch("closed")
        live = Live(rid, start, cell)
        self.live.append(live)
        try:
            finish: Any = await live.end
        finally:
            self.live.remove(live)
        await asyncio.sleep(0)
        if finish == "lost":
            raise EngineLost("lost")
        end = live.taken
        versions = [VersionSpan(version=cell, start=0, end=end - start)] if end > start else []
        self.parts.append((cell, start, end))
        return Sampled(
            ids=self.answer[start:end],
            logprobs=[self.logprob(at) for at in range(start, end)],
            versions=versions,
            finish=finish,
        )

    async def abort(self, route: Route, rid: str) -> None:
        assert rid in self.rids
        await asyncio.sleep(0)
        cell = int(route.cell[-1])
        if not self.deaf[cell]:
            for live in self.at(cell):
                if live.rid == rid:
                    live.end.set_result("abort")

    def tick(self, cell: int) -> None:
        for live in self.at(cell):
            live.taken = min(live.taken + 1, len(self.answer))

    def answered(self, cell: int, finish: str) -> None:
        for live in self.at(cell):
            if live.taken == len(self.answer):
                live.end.set_result(finish)

    def end(self, cell: int, how: str) -> None:
        for live in self.at(cell):
            live.end.set_result(how)


OPS = st.one_of(
    st.tuples(st.just("move"), st.integers(0, CELLS - 1)),
    st.tuples(st.just("tick"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.just(0)),
    st.tuples(st.sampled_from(["lost", "abort", "deaf", "closed"]), st.integers(0, CELLS - 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.05, 1.0, 20.0])),
    st.tuples(st.just("turn"), st.integers(1, 4)),
)


def event(kind: str, entity: str, data: Value) -> Event:
    return Event(
        seq=1, time_us=0, kind=kind, entity=entity, owner="scheduler", instance="", causation=0, id="", data=data
    )


@settings(max_examples=60, deadline=None)
@given(
    ops=st.lists(OPS, max_size=40),
    length=st.integers(1, 24),
    stops=st.booleans(),
    before=st.integers(0, 6),
)
def test_the_record_is_the_answer_whatever_happens(
    policy: Path, encoder: Encoder, ops: list[tuple[str, Any]], length: int, stops: bool, before: int
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play(policy, encoder, ops, length, stops, before))


async def play(
    policy: Path, encoder: Encoder, ops: list[tuple[str, Any]], length: int, stops: bool, before: int
) -> None:
    text = [index % 200 + 1 for index in range(length)]
    answer = [*text[:-1], encoder.stop_ids[0]] if stops else text
    finish = "stop" if stops else "length"
    engines, routes = Engines(answer), Routes()
    bus = MemoryBus(MemoryBroker(SystemClock()), RUN, name="random")
    await bus.open_run()
    shared = Shared(
        run=RUN,
        config=configured(policy, max_new_tokens=length),
        bus=bus,
        clock=SystemClock(),
        encoder=encoder,
        engines=engines,  # type: ignore[arg-type]
        routes=routes,
        incarnation="0",
    )
    for index in range(CELLS):
        joined = CellJoined(index=index, capacity=8, url="http://x", engine="scripted", version=0, capabilities=[])
        routes.apply(event("cell.joined", f"cell-{index}", joined))
    routes.apply(event("execution.placed", EXECUTION, ExecutionPlaced(cell="cell-0", epoch=1, attempt=0)))
    execution = Execution(shared, EXECUTION, 0, 1.0)
    flight = execution.join(anthropic.parse(msgspec.json.encode(body_of("hi")), {}))
    flight.attach()
    waiting = asyncio.create_task(flight.wait())
    await turns(before)
    epochs, harms = itertools.count(2), 0
    for op, value in ops:
        match op:
            case "move":
                data = RouteMoved(source="", target=f"cell-{value}", epoch=next(epochs), kv="recomputed")
                routes.apply(event("route.moved", EXECUTION, data))
            case "tick":
                for _ in range(value):
                    everywhere(engines.tick)
            case "answer":
                everywhere(lambda cell: engines.answered(cell, finish))
            case "lost" | "abort" if harms < HARMS:
                harms += 1
                engines.end(value, op)
            case "deaf":
                engines.deaf[value] = not engines.deaf[value]
            case "closed":
                engines.closed[value] = not engines.closed[value]
            case "wait":
                await asyncio.sleep(value)
            case "turn":
                await turns(value)
    engines.deaf = engines.closed = [False] * CELLS
    while not flight.done.is_set():
        everywhere(engines.tick)
        everywhere(lambda cell: engines.answered(cell, finish))
        await asyncio.sleep(0.05)
    await waiting
    assert flight.node is not None, flight.refused
    assert not engines.live
    await check(bus, engines, finish)
    flight.detach()
    await bus.close()


async def check(bus: MemoryBus, engines: Engines, finish: str) -> None:

    stream = streams.records_stream(RUN)
    (stored,) = [each async for each in bus.read_range(stream, 0, await bus.last_seq(stream))]
    record = decode_record(stored.data)
    assert isinstance(record, CallRecord)
    assert record.output_ids == engines.answer and record.finish == finish and record.delivered
    assert record.logprobs == [engines.logprob(at) for at in range(len(engines.answer))]
    by_token = [cell for cell, start, end in engines.parts for _ in range(start, end)]
    assert [span.version for span in record.versions for _ in range(span.start, span.end)] == by_token
    assert [start for _, start, _ in engines.parts] == [0, *(end for _, _, end in engines.parts[:-1])]
    assert all(one.version != two.version for one, two in itertools.pairwise(record.versions))


def everywhere(do: Callable[[int], None]) -> None:
    for cell in range(CELLS):
        do(cell)


async def turns(count: int) -> None:
    """Lets the loop run so many times."""
    for _ in range(count):
        await asyncio.sleep(0)
