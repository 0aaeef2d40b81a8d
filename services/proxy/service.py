"""The proxy as a service: takes up the run from LOG and RECORDS, then serves harnesses and follows LOG.

Several proxies (`proxy.count`) share the load by execution, and any of them can take an execution over:

- whose execution it is says a pure function of its id (`schemas.ids.proxies_for`): harnesses get that proxy's address.
  One that dies is started again where it listened; it rebuilds the trees of its own executions from RECORDS;
- every proxy follows LOG and serves any request. Before it places one it reads what others stored of that execution; a
  harness has an answer only after its record is stored, so whatever a request continues lies there. A harness, or a
  balancer before the proxies, may send every request to another proxy;
- whoever stores expects the last sequence of the attempt that it has read (`services.proxy.records`): records stay one
  sequence, numbered without a gap. Of a request that two proxies answer at once the first record counts; the other
  proxy hands out that one;
- at `execution.finished` all proxies stop their calls. The execution's own proxy seals it: `Closed` in RECORDS, after
  which nobody can store, then `execution.sealed`, which is write-once. Where no seal comes the next proxies in the
  execution's order try, each in its turn (`services.proxy.desk`). What they find is the same, so is what they say.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from schemas.envelope import Event
from schemas.errors import ConfigError, EnvironmentMissing
from schemas.events import ExecutionSealed
from schemas.ids import proxy_ids
from services.mesh.chat import load_tokenizer, make_renderer
from services.mesh.http import Client, HttpClient
from services.mesh.service import Context, announce
from services.proxy.desk import Desk
from services.proxy.encoder import Encoder, PromptEncoder
from services.proxy.endpoints import Endpoints
from services.proxy.engine import Engines
from services.proxy.executions import Shared
from services.proxy.routes import Routes

ABOUT = ("execution", "route", "cell")
"""What the proxy follows in LOG."""
CLOSE_S = 3.0
"""How long a proxy that ends waits for answers that are being stored."""
DESK = web.AppKey("desk", Desk)
"""What is served now, for those who look inside."""


async def serve(context: Context, *, encoder: PromptEncoder | None = None, client: Client | None = None) -> None:
    """Runs until it is cancelled; then calls in flight are aborted, and harnesses ask again."""
    if encoder is None:
        tokenizer = load_tokenizer(context.path(context.config.policy.path))
        encoder = Encoder(tokenizer, make_renderer(tokenizer))
    try:
        await _serve(context, encoder, client or HttpClient())
    except ExceptionGroup as failures:
        # The first failure ended the others; it is what a person has to read.
        raise failures.exceptions[0] from failures


async def _serve(context: Context, encoder: PromptEncoder, client: Client) -> None:
    config = context.config
    names = proxy_ids(config.proxy.count)
    if context.instance not in names:
        raise ConfigError(
            f"the run has no proxy called {context.instance!r}",
            where=f"proxy.count = {config.proxy.count}",
            remedy=f"start {', '.join(names)}",
        )
    history, end = await context.history(about=(*ABOUT, "service"))

    async def say_sealed(finished: Event, sealed: ExecutionSealed) -> int:
        return await context.say(
            "execution.sealed",
            finished.entity,
            sealed,
            id=f"{finished.id}.sealed.{sealed.attempt}",
            causation=finished.seq,
        )

    async with contextlib.aclosing(client) as cells, asyncio.TaskGroup() as tasks:
        shared = Shared(
            run=context.run,
            config=config,
            bus=context.bus,
            clock=context.clock,
            encoder=encoder,
            engines=Engines(cells),
            routes=Routes(),
            instance=context.instance,
            incarnation=str(end) if config.proxy.count == 1 else f"{context.instance}/{end}",
        )
        desk = Desk(shared, say_sealed)
        endpoints = Endpoints(
            desk=desk,
            secret=context.secret,
            ping_s=config.proxy.ping_s,
            model=config.harness.model,
            clock=context.clock,
        )
        endpoints.add_routes(context.health)
        context.health.app[DESK] = desk
        context.health.gauge("gyre_proxy_calls_in_flight", "Model calls in flight", desk.flights)
        context.health.gauge("gyre_proxy_executions", "Executions that may call", lambda: len(desk.open))
        context.health.gauge("gyre_proxy_answers", "Answers handed out", lambda: endpoints.answers)
        try:
            for finished in await desk.rebuild(history):
                tasks.create_task(desk.seal(finished))
            await _announce(context, history)
            context.health.ready = lambda: ""
            async for event in context.events(end, about=ABOUT):
                _follow(desk, event, tasks)
        finally:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await desk.close()
            except TimeoutError:
                # An answer that can't be stored now: stored late or never, the next life sees it in RECORDS.
                context.log.warning("calls in flight are left behind", calls=desk.flights())


def _follow(desk: Desk, event: Event, tasks: asyncio.TaskGroup) -> None:
    if desk.is_late(event):
        return
    stopped = desk.apply(event)
    if stopped is not None:
        execution, why = stopped
        tasks.create_task(execution.stop(why))
    if event.kind == "execution.finished":
        tasks.create_task(desk.seal(event))


async def _announce(context: Context, history: list[Event]) -> None:
    """Listen where an earlier life listened, if nothing else is configured: running harnesses know that address."""
    config = context.config.proxy
    if config.port:
        await announce(context, port=config.port + proxy_ids(config.count).index(context.instance))
        return
    for event in reversed(history):
        if event.kind == "service.joined" and event.entity == context.instance:
            try:
                await announce(context, port=int(event.data.url.rpartition(":")[2]))
            except EnvironmentMissing as error:
                context.log.warning("another address than before", what=str(error))
                break
            return
    await announce(context)
