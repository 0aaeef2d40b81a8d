"""The state of one attempt of an execution: its tree, its calls in flight, its records, and its end.

    open ──requests──> calls ──> records          seal: revoke, abort what is generated, wait for what is stored

Invariants
- records of an attempt are stored one after the other, numbered without a gap, parents before children, whichever
  proxies store them; one record a request: who stored it first is right, and what another had sampled is dropped;
- after `seal` returned nothing is added, by nobody: its count, last sequence and digest are those of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog

from schemas.config import Config
from schemas.errors import BusError, Conflict
from schemas.events import ExecutionSealed
from schemas.ids import call_id
from schemas.records import CallRecord, Closed, Delivery, GivenUp, RecordEntry
from services.mesh.bus import Bus
from services.mesh.clock import MICROSECONDS, Clock
from services.proxy.calls import Flight, Prompt
from services.proxy.conversation import Message, Request, decode_blocks, encode_blocks, link
from services.proxy.encoder import PromptEncoder, cut_at
from services.proxy.engine import Engines, Sampled
from services.proxy.memory import Memory
from services.proxy.records import Ledger
from services.proxy.refusal import Refused, prompt_too_long
from services.proxy.routes import Routes
from services.proxy.suspects import KillsEngines, Suspicion, Turns
from services.proxy.tree import Node, Tree, answer_key

STORE_TRIES = 4
"""Publishes of one record whose outcome stays unknown, each of the bus's full deadline, before the call is given up."""

log = structlog.get_logger(service="proxy")


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What all executions of this proxy use."""

    run: str
    config: Config
    bus: Bus
    clock: Clock
    encoder: PromptEncoder
    engines: Engines
    routes: Routes
    turns: Turns = msgspec.field(default_factory=Turns)
    instance: str = "proxy"
    """Which of the proxies this is."""
    incarnation: str
    """Differs between two lives of the proxy, and between two proxies: the end of the log when it started."""

    @property
    def several(self) -> bool:
        """Whether other proxies may write too."""
        return self.config.proxy.count > 1


class Execution:
    def __init__(
        self, shared: Shared, execution: str, attempt: int, temperature: float, *, began_us: int | None = None
    ) -> None:
        self._shared = shared
        self.began_us = shared.clock.now_us() if began_us is None else began_us
        """When its budget began: at its first start, whatever attempt that was; until LOG shows one, at its placement."""
        self._temperature = temperature
        self.execution, self.attempt = execution, attempt
        self.tree = Tree()
        self.memory = Memory()
        self.flights: dict[str, Flight] = {}
        self._all: set[Flight] = set()
        """Flights that have not ended; `flights` no longer holds those that were stopped."""
        self._ledger = Ledger(
            bus=shared.bus, run=shared.run, execution=execution, attempt=attempt, writer=shared.incarnation
        )
        self._lock = asyncio.Lock()
        self._deliveries: set[asyncio.Task[None]] = set()
        self._started = 0
        self.over: Refused | None = None
        self._given_up: dict[str, KillsEngines] = {}
        """Requests that take engines with them, by their digests."""
        self._closed: Refused | None = None
        """What is told once RECORDS says that nothing follows."""

    def __repr__(self) -> str:
        state = "over" if self.over else "open"
        return f"<Execution {self.execution}.{self.attempt} [{state}, {self.tree!r}, {len(self._all)} in flight]>"

    async def load(self) -> None:
        """Take up what RECORDS holds of this attempt: a proxy that starts again knows every turn."""
        async with self._lock:
            # What an earlier life had sent when it ended may arrive late.
            self._ledger.doubtful = True
            self._take(await self._ledger.catch_up())

    async def refresh(self) -> None:
        """Before a request is placed: take up what other proxies stored. Its harness has their answers, so they lie there."""
        if self._shared.several:
            await self.load()

    def count(self, request: Request) -> int:
        """Tokens of the rendered prompt."""
        place = self.tree.place(request.conversation)
        before = place.parent.tokens if place.parent else 0
        return before + len(self._shared.encoder.new_ids(request.conversation, place))

    async def answered(self, request: Request) -> Node | None:
        """The recorded answer to this very request; delivered from now on."""
        node = self.tree.by_request.get(request.digest)
        return None if node is None else await self.taken(node)

    async def taken(self, node: Node) -> Node:
        """A client has come for this answer, be it while it was being stored for nobody: delivered from now on."""
        if not node.delivered:
            # The one who asks may leave at any time; whether an entry was stored must not depend on it.
            task = asyncio.create_task(self._deliver(node))
            self._deliveries.add(task)
            task.add_done_callback(self._delivered)
            await asyncio.shield(task)
        return node

    def stop_sequence(self, request: Request, node: Node) -> str | None:
        """Which of the request's stop sequences ended its recorded answer."""
        stop = self._shared.encoder.stopped(node.output_ids.tolist(), request.stop) if request.stop else None
        return stop.text if stop else None

    def join(self, request: Request) -> Flight:
        """The call in flight for this request, started if there is none. Raises Refused: too long, or given up."""
        self._check_open()
        flight = self.flights.get(request.digest)
        if flight is None:
            shared = self._shared
            prompt = self._prompt(request)
            self._started += 1
            flight = Flight(
                execution=self.execution,
                attempt=self.attempt,
                request=request,
                prompt=prompt,
                rid_seed=f"{shared.run}/{self.execution}/{self.attempt}/{shared.incarnation}/{self._started}",
                stop_ids=shared.encoder.stop_ids,
                stopped=shared.encoder.stopped,
                grace_s=shared.config.proxy.grace_s,
                left_s=self._left_s,
                engines=shared.engines,
                routes=shared.routes,
                suspicion=Suspicion(
                    shared.turns,
                    most=shared.config.proxy.most_losses,
                    prompt_tokens=prompt.tokens,
                    prompt=lambda: prompt.encoded_ids([]),
                ),
                store=self._store,
                give_up=self._give_up,
                ended=self._ended,
            )
            self.flights[request.digest] = flight
            self._all.add(flight)
        return flight

    async def stop(self, why: Refused) -> None:
        """No request is served from now on; returns when nothing is in flight."""
        self.over = self.over or why
        for flight in list(self._all):
            flight.stop(why)
        while self._all:
            flight = next(iter(self._all))
            await flight.wait()
            self._all.discard(flight)

    async def seal(self) -> ExecutionSealed:
        """Stop, and say what RECORDS holds."""
        await self.stop(Refused(401, f"execution {self.execution} is over"))
        async with self._lock:
            return await self._ledger.sealed(fenced=self._shared.several or self._ledger.doubtful)

    def _left_s(self) -> float:
        """Seconds left of the execution's budget, after which the harness service ends it."""
        age_us = self._shared.clock.now_us() - self.began_us
        return self._shared.config.harness.overall_timeout_s - age_us / MICROSECONDS

    def _check_open(self) -> None:
        if self.over:
            raise self.over

    def _prompt(self, request: Request) -> Prompt:
        if given_up := self._given_up.get(request.digest):
            raise given_up
        config = self._shared.config
        place = self.tree.place(request.conversation)
        new_ids = self._shared.encoder.new_ids(request.conversation, place)
        before = place.parent.tokens if place.parent else 0
        room = config.rollout.context_length - before - len(new_ids)
        if room < 1:
            raise prompt_too_long(before + len(new_ids), config.rollout.context_length)
        wanted = config.proxy.max_new_tokens if request.max_tokens is None else request.max_tokens
        return Prompt(
            place=place,
            new_ids=new_ids,
            max_new_tokens=min(wanted, config.proxy.max_new_tokens, room),
            temperature=self._temperature,
        )

    def _ended(self, flight: Flight) -> None:
        if self.flights.get(flight.request.digest) is flight:
            del self.flights[flight.request.digest]
        if flight.node is not None or flight.refused is not None:
            self._all.discard(flight)

    async def _deliver(self, node: Node) -> None:
        async with self._lock:
            await self._take_delivery(node)

    async def _take_delivery(self, node: Node) -> None:
        """The lock is held."""
        while not node.delivered:
            self._check_open()
            try:
                await self._ledger.append(Delivery(call=node.call, execution=self.execution, attempt=self.attempt))
            except Conflict:
                self._take(await self._ledger.catch_up())
                continue
            self.tree.deliver(node.call)

    def _delivered(self, task: asyncio.Task[None]) -> None:
        self._deliveries.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.info("delivery refused", execution=self.execution, what=str(error))

    async def _store(self, flight: Flight, sampled: Sampled) -> Node:
        unknown = 0
        async with self._lock:
            while True:
                # What others stored may have been read since the call began, for this record or for another request.
                if (known := self.tree.by_request.get(flight.request.digest)) is not None:
                    return known
                if self._closed is not None:
                    raise self._closed
                record, answer = self._record(flight, sampled)
                try:
                    await self._ledger.append(record)
                except Conflict:
                    # Stored by another proxy, or by one that is gone, after we had read: take its records in, then
                    # number anew.
                    self._take(await self._ledger.catch_up())
                    continue
                except BusError as error:
                    unknown += 1
                    if unknown == STORE_TRIES:
                        raise
                    log.warning("record not stored yet", call=record.call, what=str(error))
                    continue
                return self.tree.add(record, answer)

    async def _give_up(self, flight: Flight, why: KillsEngines) -> Node | None:
        """Record that nobody asks an engine for this again. The answer, where another proxy has stored one."""
        digest = flight.request.digest
        entry = GivenUp(
            execution=self.execution,
            attempt=self.attempt,
            request=digest,
            prompt_tokens=flight.prompt.tokens,
            cells=why.cells,
        )
        log.error("call given up", execution=self.execution, what=str(why), prompt_tokens=flight.prompt.tokens)
        async with self._lock:
            while digest not in self.tree.by_request and digest not in self._given_up and self._closed is None:
                try:
                    await self._ledger.append(entry)
                except Conflict:
                    self._take(await self._ledger.catch_up())
                    continue
                except BusError as error:
                    log.warning("not recorded as given up", execution=self.execution, what=str(error))
                self._given_up[digest] = why
            return self.tree.by_request.get(digest)

    def _record(self, flight: Flight, sampled: Sampled) -> tuple[CallRecord, Message]:
        request, prompt = flight.request, flight.prompt
        index = self.tree.next_index
        call = call_id(self.execution, self.attempt, index)
        encoder = self._shared.encoder
        blocks = encoder.parse(sampled.ids, prompt.new_ids, call=call, calls_allowed=request.calls_allowed)
        if request.stop and (stop := encoder.stopped(sampled.ids, request.stop)):
            blocks = cut_at(blocks, stop.text)
        answer = Message(role="assistant", blocks=blocks)
        assert sampled.finish != "abort" and len(sampled.ids) == len(sampled.logprobs)
        return CallRecord(
            call=call,
            execution=self.execution,
            attempt=self.attempt,
            index=index,
            parent=prompt.place.parent.call if prompt.place.parent else None,
            input_ids=prompt.new_ids,
            output_ids=sampled.ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            temperature=prompt.temperature,
            asked=request.asked,
            finish=sampled.finish,
            cell=flight.cell,
            role=request.conversation.role,
            agent=request.conversation.agent,
            request=request.digest,
            prefix=link(prompt.place.chain, answer_key(call, answer)).hex(),
            answer=encode_blocks(blocks),
            delivered=flight.clients > 0,
        ), answer

    def _take(self, entries: Sequence[RecordEntry]) -> None:
        if entries:
            self.tree.forget_places()
        for entry in entries:
            match entry:
                case CallRecord():
                    self.tree.add(entry, Message(role="assistant", blocks=decode_blocks(entry.answer)))
                case Delivery():
                    self.tree.deliver(entry.call)
                case GivenUp():
                    self._given_up[entry.request] = KillsEngines.read(entry)
                case Closed():
                    self._closed = Refused(401, f"execution {self.execution} is over")
                    self.over = self.over or self._closed
