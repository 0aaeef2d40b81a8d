"""The life of one model call, from its place in the tree to its stored record.

    generating ──answer──> storing ──stored──> done (node)        clients may come and go all the while
      │  ├ no engine has it (not placed, cell lost or not up yet): wait, as long as the execution's budget lasts
      │  ├ route moved: abort at the source, go on at the target from what was sampled
      │  ├ 409, its cell changes its role: wait for the route to change, go on; in the same budget
      │  ├ engine lost with the call in hand, `proxy.most_losses` times in a row: recorded and refused (`suspects`)
      │  ├ engine lost or busy: again under a new rid from what is known, with pauses that grow; in the same budget
      │  ├ engine failed: likewise, a bounded number of times in a row
      │  └ aborted by the engine: go on from what was sampled
      └──stopped (seal, grace over): abort by exact rid ──> done (refused)

Invariants
- a client sees an answer only when its record is stored; the same request in flight twice is one call;
- what an engine sampled is kept: a resumed answer is the concatenation of its parts, with a version for each span;
- every part is asked for under a rid of its own, from which engines draw: no stream of random numbers is used twice;
- an engine that is gone says nothing of the call, so its client isn't told: it comes back, or the scheduler moves the
  execution, or the budget ends. What an engine says of itself, again and again, goes to the client, and that one engine
  after the other went away with the call in hand;
- `alive` is false only from the loss of an engine until it answers or holds a call again, or LOG names another, or none: a
  call that waits for an engine is a queue, and its client is told so by pings; an engine that doesn't answer is silence;
- once storing has begun a call ends with its record, whoever wants it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from schemas.errors import EngineError, GyreError
from services.proxy.conversation import Request
from services.proxy.encoder import Stop
from services.proxy.engine import CallCut, EngineBusy, EngineFailed, EngineLost, Engines, Sampled, StaleEpoch
from services.proxy.refusal import Refused
from services.proxy.routes import Route, Routes
from services.proxy.suspects import KillsEngines, Suspicion
from services.proxy.tree import Node, Place, encode_ids

FAILED_TRIES = 6
"""Answers in a row, without a token, that say the engine failed; then the harness is told to come back."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
LONGEST_WAIT_S = 5.0
"""Between two looks for an engine that is gone. One that LOG sees joining is looked for at once."""
HOLDS_S = 6.0
"""A lost engine lives again when it has held a call so long: what is nowhere fails to connect sooner."""
LEAVE_S = 10.0
"""Seconds that a source has to give up a call that moves; then the call starts at the target from what is known."""

log = structlog.get_logger(service="proxy")


class Prompt:
    """What an engine is asked: the whole prompt, the node's own part of it, and the bounds of the answer."""

    def __init__(self, *, place: Place, new_ids: list[int], max_new_tokens: int, temperature: float) -> None:
        self.place, self.new_ids = place, new_ids
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.tokens = (place.parent.tokens if place.parent else 0) + len(new_ids)
        """Of the whole prompt."""

    def encoded_ids(self, sampled: list[int]) -> list[bytes]:
        """The whole prompt and what was sampled after it, as an engine is sent it: parts of `encode_ids`."""
        parts = self.place.parent.encoded_ids() if self.place.parent else []
        return [*parts, *(encode_ids(ids) for ids in (self.new_ids, sampled) if ids)]


class Flight:
    """One call in flight. `done` is set exactly once, and then either `node` or `refused` says how it ended."""

    def __init__(
        self,
        *,
        execution: str,
        attempt: int,
        request: Request,
        prompt: Prompt,
        rid_seed: str,
        stop_ids: list[int],
        stopped: Callable[[list[int], Sequence[str]], Stop | None],
        grace_s: float,
        left_s: Callable[[], float],
        engines: Engines,
        routes: Routes,
        suspicion: Suspicion,
        store: Callable[[Flight, Sampled], Awaitable[Node]],
        give_up: Callable[[Flight, KillsEngines], Awaitable[Node | None]],
        ended: Callable[[Flight], None],
    ) -> None:
        self.execution, self.attempt, self.request, self.prompt = execution, attempt, request, prompt
        self._rid_seed, self._stop_ids, self._stopped, self._grace_s = rid_seed, stop_ids, stopped, grace_s
        self._engines, self._routes, self._suspicion = engines, routes, suspicion
        self._store, self._give_up, self._ended = store, give_up, ended
        self._left_s = left_s
        """Seconds that are left of the execution's budget."""
        self.done = asyncio.Event()
        self.node: Node | None = None
        self.refused: Refused | None = None
        self.clients = 0
        self.alive = True
        """False while an engine that was lost neither answers or holds this call again nor is replaced: no pings go out then."""
        self.cell = ""
        """Engine that answers, or answered."""
        self._tries = 0
        self._storing = False
        self._why: Refused | None = None
        self._at_engine: tuple[Route, str] | None = None
        self._lost: Route | None = None
        """Where an engine was lost last."""
        self._grace: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run(), name=f"call {execution} {request.digest[:8]}")
        self._task.add_done_callback(self._finish)

    def __repr__(self) -> str:
        state = "done" if self.done.is_set() else "storing" if self._storing else "generating"
        return (
            f"<Flight {self.execution} {self.request.digest[:8]} [{state}, {self.clients} clients, try {self._tries}]>"
        )

    def attach(self) -> None:
        """A client waits for the answer."""
        self.clients += 1
        if self._grace:
            self._grace.cancel()
            self._grace = None

    def detach(self) -> None:
        """A client left, or has its answer. After the last one generation goes on for the grace time."""
        self.clients -= 1
        if self.clients == 0 and not self.done.is_set():
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._grace_s, self.stop, Refused(529, "the client had left; ask again"))

    def stop(self, why: Refused) -> None:
        """Ends the generation unless the answer is being stored already; `wait` for the end."""
        if not self._storing and not self.done.is_set() and self._why is None:
            self._why = why
            self._ended(self)
            self._task.cancel()

    async def wait(self) -> None:
        """Until nothing of this call is in flight any more."""
        await self.done.wait()

    async def _run(self) -> None:
        try:
            sampled = await self._generate()
            self._storing = True
            self.node = await self._store(self, sampled)
        except asyncio.CancelledError:
            if self._why is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self.refused = self._why
            await self._abort()
        except KillsEngines as error:
            self._storing = True
            self.node = await self._give_up(self, error)
            self.refused = None if self.node else error
        except Refused as error:
            self.refused = error
        except EngineLost as error:
            # The harness asks again; who is lost, and since when, was logged where it was seen.
            log.info("call given back", execution=self.execution, what=str(error))
            self.refused = Refused(529, f"the call failed: {error.what}")
        except GyreError as error:
            log.error("call failed", execution=self.execution, what=str(error))
            self.refused = Refused(500, f"the call failed: {error.what}")
        except Exception:
            log.exception("call crashed", execution=self.execution)
            self.refused = Refused(500, "the call failed inside the proxy; its log says why")

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Also for a task that was cancelled before its first step."""
        self._suspicion.end()
        if self._grace:
            self._grace.cancel()
        if self.node is None and self.refused is None:
            self.refused = self._why or Refused(529, "the proxy is stopping; ask again")
        self._ended(self)
        self.done.set()

    async def _generate(self) -> Sampled:
        sampled = Sampled()
        lost = failed = 0
        while True:
            route = await self._route()
            # Before it is asked: who is gone may have joined again by the time that the loss is seen.
            joins, failure = self._routes.joins(route.cell), None
            if self._suspicion.suspect and not await self._turn(route):
                continue
            try:
                part = await self._ask(route, sampled)
            except StaleEpoch:
                self.alive = True
                # The cell may also be behind us in the log, so the same route is tried again after a while.
                if self._left_s() <= 0:
                    raise self._unserved() from None
                await self._routes.wait_for_change(self.execution, route, joins, FIRST_PAUSE_S * 5)
                continue
            except EngineLost as error:
                self.alive, self._lost = isinstance(error, EngineBusy), route
                failure = error
            else:
                self.alive = True
                if part.ids:
                    self._suspicion.lived()
                sampled.extend(part)
                if self._complete(sampled):
                    return sampled
                if not part.ids:
                    failure = EngineLost("the engine aborts the call again and again", where=route.cell)
            # What happens to a call at a cell that it leaves says nothing about the next one.
            if self._routes.of(self.execution) != route:
                lost = failed = 0
                continue
            lost = lost + 1 if failure else 0
            failed = failed + 1 if isinstance(failure, EngineFailed) else 0
            if failure:
                log.info("call lost", execution=self.execution, what=str(failure), lost=lost)
                if failed == FAILED_TRIES:
                    raise failure
            if (left_s := self._left_s()) <= 0:
                raise self._unserved()
            pause = min(FIRST_PAUSE_S * 2.0 ** min(max(0, lost - 1), 16), LONGEST_WAIT_S, left_s)
            await self._routes.wait_for_change(self.execution, route, joins, pause)

    def _complete(self, sampled: Sampled) -> bool:
        """Whether nothing is left to sample; an abort that came after the last token has changed nothing."""
        if self.request.stop and (stop := self._stopped(sampled.ids, self.request.stop)):
            # Found here whatever the engine says: it sees no sequence that began before the call came to it.
            sampled.stop_after(stop.tokens)
            return True
        if sampled.finish == "stop" and (not sampled.ids or sampled.ids[-1] not in self._stop_ids):
            raise EngineError("stopped without a stop token", where=self.cell, remedy="the stop token must be returned")
        if sampled.finish == "abort":
            if sampled.ids and sampled.ids[-1] in self._stop_ids:
                sampled.finish = "stop"
            elif len(sampled.ids) >= self.prompt.max_new_tokens:
                sampled.finish = "length"
        return sampled.finish != "abort"

    async def _route(self) -> Route:
        route = self._routes.ready(self.execution, self.attempt)
        if route is None:
            # Who was lost is known to LOG, or nobody was: from here on the call waits its turn.
            self.alive = True
            try:
                async with asyncio.timeout(max(0.0, self._left_s())):
                    route = await self._routes.wait_for_route(self.execution, self.attempt)
            except TimeoutError:
                raise self._unserved() from None
        if route.attempt != self.attempt:
            raise Refused(401, f"attempt {self.attempt} of {self.execution} is over")
        return route

    async def _turn(self, route: Route) -> bool:
        """Whether this suspect's turn at its cell has come; False where it has to go elsewhere meanwhile."""
        turn = asyncio.create_task(self._suspicion.turn(route.cell))
        # It waits for other calls, not for an engine.
        self.alive = True
        try:
            with self._routes.moves(self.execution, route) as moved:
                waits = (turn, moved)
                await asyncio.wait(waits, timeout=max(0.0, self._left_s()), return_when=asyncio.FIRST_COMPLETED)
                if not turn.done() and not moved.done():
                    raise self._unserved()
        finally:
            turn.cancel()
            await asyncio.wait({turn})
        return not turn.cancelled()

    def _unserved(self) -> EngineLost:
        return EngineLost(f"no engine served {self.execution} while its budget lasted")

    async def _ask(self, route: Route, sampled: Sampled) -> Sampled:
        """What the engine of `route` adds to `sampled`; if the route moves meanwhile, what it had added by then."""
        self._tries += 1
        # Of one length, because SGLang aborts by prefix; a new one each time, because it refuses a live one twice.
        rid = hashlib.blake2b(f"{self._rid_seed}/{self._tries}".encode(), digest_size=16).hexdigest()
        self.cell, self._at_engine = route.cell, (route, rid)
        self.alive = self.alive or route != self._lost
        holds = asyncio.get_running_loop().call_later(HOLDS_S, self._hold)
        turn_s = self._suspicion.begin()
        answer = asyncio.create_task(
            self._engines.generate(
                route,
                rid=rid,
                input_ids=self.prompt.encoded_ids(sampled.ids),
                temperature=self.prompt.temperature,
                max_new_tokens=self.prompt.max_new_tokens - len(sampled.ids),
                stop_ids=self._stop_ids,
                stops=self.request.stop,
                turn_s=turn_s,
            )
        )
        try:
            with self._routes.moves(self.execution, route) as moved:
                await asyncio.wait((answer, moved), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    log.info("call moves", execution=self.execution, source=route.cell, target=moved.result().cell)
                    await self._leave(route, rid, answer)
                leaves = moved.done()
            try:
                part = answer.result()
            except CallCut:
                # Who leaves a cell may see it end: nobody is to blame for that.
                if not leaves and self._suspicion.lost(route.cell):
                    raise KillsEngines(self._suspicion.cells) from None
                raise
        finally:
            self._suspicion.end()
            holds.cancel()
            # What nobody waits for any more is over before this call goes on, and its error is seen.
            answer.cancel()
            if not answer.done():
                await asyncio.wait({answer})
            if not answer.cancelled():
                answer.exception()
        self._at_engine = None
        return part

    def _hold(self) -> None:
        self.alive = True

    async def _leave(self, route: Route, rid: str, answer: asyncio.Task[Sampled]) -> None:
        """Abort at the source until the answer is there. Raises EngineLost where the source doesn't let go."""
        pause = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(LEAVE_S):
                # Again and again: an abort that overtakes its call finds nothing.
                while not answer.done():
                    await self._abort()
                    await asyncio.wait({answer}, timeout=pause)
                    pause = min(pause * 2, LONGEST_PAUSE_S)
        except TimeoutError:
            if not answer.done():
                raise EngineLost(f"rid {rid} was not let go within {LEAVE_S:g} s", where=route.cell) from None

    async def _abort(self) -> None:
        if self._at_engine is None:
            return
        route, rid = self._at_engine
        try:
            await self._engines.abort(route, rid)
        except EngineLost as error:
            # An engine that is gone generates nothing.
            log.info("abort unanswered", execution=self.execution, what=str(error))
