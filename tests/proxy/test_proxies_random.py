"""Any order of calls at several proxies, deaths, retries and seals leaves one sequence of records and one seal of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import streams
from schemas.errors import GyreError
from schemas.events import CellJoined, ExecutionPlaced, ExecutionSealed
from schemas.ids import call_id
from schemas.records import CallRecord, Closed, Delivery, VersionSpan
from services.mesh.chat import ChatTokenizer
from services.mesh.clock import SystemClock
from services.mesh.memory_broker import MemoryBroker
from services.mesh.memory_bus import MemoryBus
from services.mesh.tree_codec import decode_record, digest_records
from services.proxy.conversation import Text, decode_blocks
from services.proxy.dialects import anthropic
from services.proxy.encoder import Encoder
from services.proxy.engine import Sampled
from services.proxy.executions import Execution, Shared
from services.proxy.refusal import Refused
from services.proxy.routes import Route, Routes
from services.proxy.tree import Node
from tests.proxy.bodies import body_of
from tests.proxy.test_moves_random import event, turns
from tests.proxy.world import EXECUTION, RUN, configured

PROXIES = 3


class Pauses:
    """How many turns of the loop each wait takes: what interleaves the proxies."""

    def __init__(self, drawn: list[int]) -> None:
        self._next: Iterator[int] = itertools.cycle(drawn)

    async def one(self) -> None:
        await turns(next(self._next))


class Bus(MemoryBus):
    """Takes a while to publish, before it and after it, and to look."""

    pauses: Pauses

    async def publish(self, *args: Any, **more: Any) -> int:
        await self.pauses.one()
        seq = await super().publish(*args, **more)
        await self.pauses.one()
        return seq

    async def last_for(self, *args: Any) -> Any:
        await self.pauses.one()
        found = await super().last_for(*args)
        await self.pauses.one()
        return found


class Engines:
    """Says something else each time it is asked, so that a call which is made twice shows."""

    def __init__(self, tokenizer: ChatTokenizer, pauses: Pauses) -> None:
        self._tokenizer, self._pauses = tokenizer, pauses
        self._numbers = itertools.count()
        self.rids: set[str] = set()

    async def generate(self, route: Route, *, rid: str, stop_ids: list[int], **_: Any) -> Sampled:
        assert rid not in self.rids, "two proxies draw from one stream of random numbers"
        self.rids.add(rid)
        ids = [*self._tokenizer.encode(f"answer {next(self._numbers)}"), stop_ids[0]]
        await self._pauses.one()
        span = VersionSpan(version=1, start=0, end=len(ids))
        return Sampled(ids=ids, logprobs=[-0.5] * len(ids), versions=[span], finish="stop")

    async def abort(self, route: Route, rid: str) -> None:
        pass


class Mesh:
    """The proxies of one execution, and the harness that asks whichever it likes."""

    def __init__(self, config: Any, encoder: Encoder, tokenizer: ChatTokenizer, pauses: Pauses) -> None:
        self._config, self._encoder, self._pauses = config, encoder, pauses
        self._broker = MemoryBroker(SystemClock())
        self.engines = Engines(tokenizer, pauses)
        self._lives = itertools.count()
        self.history: list[str] = []
        """What was said on the longest path that the harness knows."""
        self.given: dict[str, set[str]] = {}
        """Of each request that was answered, the calls whose answer was handed out."""
        self.asks: list[asyncio.Task[None]] = []
        self.seals: list[asyncio.Task[ExecutionSealed]] = []
        self.bus = MemoryBus(self._broker, RUN, name="test")
        self._routes = Routes()
        joined = CellJoined(index=0, capacity=8, url="http://x", engine="scripted", version=1, capabilities=[])
        self._routes.apply(event("cell.joined", "cell-0", joined))
        self._routes.apply(event("execution.placed", EXECUTION, ExecutionPlaced(cell="cell-0", epoch=1, attempt=0)))
        self.proxies = [self._proxy(index) for index in range(PROXIES)]

    def _proxy(self, index: int) -> tuple[Bus, Execution]:
        life = next(self._lives)
        bus = Bus(self._broker, RUN, name=f"proxy-{index} {life}")
        bus.pauses = self._pauses
        shared = Shared(
            run=RUN,
            config=self._config,
            bus=bus,
            clock=SystemClock(),
            encoder=self._encoder,
            engines=self.engines,  # type: ignore[arg-type]
            routes=self._routes,
            instance=f"proxy-{index}",
            incarnation=f"proxy-{index}/{life}",
        )
        return bus, Execution(shared, EXECUTION, 0, 1.0)

    def ask(self, index: int, text: str) -> None:
        """A question after all that was answered so far; the same one again is a retry, or the same request twice."""
        self.asks.append(asyncio.create_task(self._ask(self.proxies[index][1], [*self.history, text])))

    async def _ask(self, execution: Execution, said: list[str]) -> None:
        request = anthropic.parse(msgspec.json.encode(body_of(*said)), {})
        try:
            await execution.refresh()
            node = await execution.answered(request)
            if node is None:
                flight = execution.join(request)
                flight.attach()
                try:
                    await flight.wait()
                    node = await execution.taken(flight.node) if flight.node else None
                finally:
                    flight.detach()
        except GyreError:
            return  # killed, or over: a harness would ask again
        if node is None:
            return
        self.given.setdefault(request.digest, set()).add(node.call)
        if said[:-1] == self.history:
            self.history = [*said, _text(node)]

    async def kill(self, index: int) -> None:
        """The process is gone with all that it knew; what it had sent may be stored."""
        bus, execution = self.proxies[index]
        self.proxies[index] = self._proxy(index)
        await bus.close()
        await execution.stop(Refused(529, "gone"))

    def seal(self, index: int) -> None:
        self.seals.append(asyncio.create_task(self.proxies[index][1].seal()))


def _text(node: Node) -> str:
    (block,) = decode_blocks(node.answer)
    assert isinstance(block, Text)
    return block.text


async def play(mesh: Mesh, acts: list[tuple[str, int, int]]) -> None:
    await mesh.bus.open_run()
    for act, index, count in acts:
        match act:
            case "ask":
                mesh.ask(index, f"question {count}")
            case "wait":
                await asyncio.wait(mesh.asks) if mesh.asks else None
            case "turns":
                await turns(count)
            case "kill":
                await mesh.kill(index)
            case "seal":
                mesh.seal(index)
    for index in range(PROXIES):
        mesh.seal(index)
    await asyncio.gather(*mesh.asks)
    sealed = await asyncio.gather(*mesh.seals, return_exceptions=True)
    assert not any(isinstance(seal, BaseException) for seal in sealed[-PROXIES:]), "those that live seal"
    said = {seal for seal in sealed if isinstance(seal, ExecutionSealed)}
    assert len(said) == 1, f"those that lived to say it said {said}"
    await check(mesh, said.pop())


async def check(mesh: Mesh, sealed: ExecutionSealed) -> None:
    end = await mesh.bus.last_seq(streams.records_stream(RUN))
    *stored, last = [each async for each in mesh.bus.read_range(streams.records_stream(RUN), 0, end)]
    assert isinstance(decode_record(last.data), Closed), "nothing is stored after the fence"
    assert (sealed.records, sealed.digest) == (len(stored), digest_records(each.data for each in stored))
    entries = [decode_record(each.data) for each in stored]
    calls = [entry for entry in entries if isinstance(entry, CallRecord)]
    assert [record.call for record in calls] == [call_id(EXECUTION, 0, index) for index in range(len(calls))]
    assert len({record.request for record in calls}) == len(calls), "one record a request"
    known: set[str | None] = {None}
    delivered: list[str] = []
    for entry in entries:
        if isinstance(entry, CallRecord):
            assert entry.parent in known
            known.add(entry.call)
        if isinstance(entry, Delivery) or (isinstance(entry, CallRecord) and entry.delivered):
            delivered.append(entry.call)
    assert len(delivered) == len(set(delivered)), "delivered once"
    recorded = {record.request: {record.call} for record in calls}
    for request, answers in mesh.given.items():
        assert recorded.get(request) == answers, "every answer is its request's only record"
    assert {call for answers in mesh.given.values() for call in answers} <= set(delivered)


ACTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, PROXIES - 1), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
    st.tuples(st.just("turns"), st.just(0), st.integers(0, 30)),
    st.tuples(st.just("kill"), st.integers(0, PROXIES - 1), st.just(0)),
)


@given(
    acts=st.lists(ACTS, min_size=1, max_size=16),
    last=st.lists(st.one_of(ACTS, st.tuples(st.just("seal"), st.integers(0, PROXIES - 1), st.just(0))), max_size=4),
    pauses=st.lists(st.integers(0, 6), min_size=1, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_one_sequence_of_records_and_one_seal(
    policy: Path,
    encoder: Encoder,
    tokenizer: ChatTokenizer,
    acts: list[tuple[str, int, int]],
    last: list[tuple[str, int, int]],
    pauses: list[int],
) -> None:
    async def run() -> None:
        mesh = Mesh(configured(policy, count=PROXIES), encoder, tokenizer, Pauses(pauses))
        async with asyncio.timeout(20):
            await play(mesh, [*acts, *last])

    asyncio.run(run())
