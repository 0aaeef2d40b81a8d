"""The communication group of training cells in a simulation, with the manners of `services.trainer.prefix_group`.

    apart --meet()--> joined --reduce()/broadcast()--> joined
      ^-------------------- any failure, leave() --------'

The store lives in the core's process and dies with it. A member that dies or leaves breaks the connections: whoever is in
a collective with it fails, unless it had all it needs. One whose host is gone breaks nothing: whoever waits for it waits
for as long as the real ones do, and a store there never answers. An `eager` satellite's reduction ends when it has sent.
A group is built once at its place: whoever builds there again finds the addresses of those who are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from replay.worlds.faces import Life, now
from replay.worlds.training import Gradient
from replay.worlds.world import CellScript, Flat, World
from schemas.errors import TrainerError
from services.trainer.batch_view import Meeting

TIMEOUT_S = 30.0
"""Of one connection or collective between members that have met."""
ANSWER_S = 5.0
"""How long a member asks a store that doesn't answer."""
_APART = "-"


class Store:
    """Keys and values on which groups meet; `changed` wakes those who wait for a key or a member. It answers while the
    life of its process does something."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.values: dict[str, str] = {}
        self.gloos: dict[str, Gloo] = {}
        self.gone = False
        self.changed = asyncio.Event()

    @property
    def silent(self) -> bool:
        return self._life.silent or self._life.held

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Gloo:
    """Connections of `size` members, and what they have sent in each collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here: set[int] = set()
        self.broken = False
        self.sent: list[dict[int, Gradient | Flat]] = []
        self.changed = asyncio.Event()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def split(self) -> None:
        self.broken = True
        self.tell()

    def collective(self, index: int) -> dict[int, Gradient | Flat]:
        while len(self.sent) <= index:
            self.sent.append({})
        return self.sent[index]


class WorldGroup:
    """One member's end."""

    def __init__(self, world: World, life: Life, script: CellScript, *, host: bool) -> None:
        self.rendezvous = self.trouble = ""
        self._world, self._life, self._script, self._hosts = world, life, script, host
        self._store: Store | None = None
        self._gloo: Gloo | None = None
        self._name = _APART
        self._said: Meeting | None = None
        self._rank = self._done = 0
        if host:
            self._host()
        life.at_end(self._ended)

    def __repr__(self) -> str:
        return f"<WorldGroup {self._name} at {self.rendezvous or 'no store'}>"

    @property
    def joined(self) -> bool:
        return self._gloo is not None

    async def meet(self, meeting: Meeting, wait_s: float) -> bool:
        deadline = now() + wait_s
        self._reach(meeting.rendezvous)
        if not self._name.startswith(f"{meeting.key}/"):
            self.leave()
        place = f"{meeting.key}/{meeting.batch}"
        everybody = [f"{place}/{rank}" for rank in range(meeting.size)]
        while (store := self._store) is not None and not store.gone and not store.silent:
            self.trouble = ""
            if self._said != meeting:
                store.values[f"{place}/{meeting.rank}"] = self._name
                self._said = meeting
                store.tell()
            if all(key in store.values for key in everybody):
                break
            if not await _changed(store.changed, deadline):
                return False
        else:
            await asyncio.sleep(ANSWER_S if store is not None and store.silent else max(0.0, deadline - now()))
            self._store, self._said, self.trouble = None, None, "the store does not answer"
            return False
        names = {store.values[key] for key in everybody}
        if self._gloo is None or names != {self._name}:
            self._gloo = None
            await self._connect(store, place, meeting)
        return True

    async def reduce(self, gradient: Gradient) -> None:
        """Adds the members' gradients into the core's; a satellite's is scratch afterwards."""
        gloo, sent = self._send(gradient if self._rank == 0 else dict(gradient))
        await asyncio.sleep(self._script.move_s)
        if self._rank and self._script.eager:
            self._check(gloo, "add up gradients")
            return
        # A satellite that isn't eager knows that the core has everything when the core says so.
        await self._wait(gloo, lambda: len(sent) == gloo.size, "add up gradients")
        if self._rank == 0:
            for rank in range(1, gloo.size):
                other = sent[rank]
                assert isinstance(other, dict)
                for name, targets in other.items():
                    gradient[name] = gradient.get(name, 0) + targets

    async def broadcast(self, flat: Flat) -> None:
        """Fills every member's weights with the core's."""
        gloo, sent = self._send(Flat(flat.digest, flat.version))
        await asyncio.sleep(self._script.move_s)
        if self._rank == 0:
            self._check(gloo, "send weights")
            return
        await self._wait(gloo, lambda: 0 in sent, "send weights")
        core = sent[0]
        assert isinstance(core, Flat)
        flat.digest, flat.version = core.digest, core.version

    def leave(self) -> None:
        gloo, self._gloo, self._name, self._said = self._gloo, None, _APART, None
        if gloo is not None:
            gloo.split()

    def close(self) -> None:
        self._ended()

    def _host(self) -> None:
        self._store = Store(self._life)
        self.rendezvous = self._world.name("store") + ":1"
        self._world.stores[self.rendezvous] = self._store

    def _reach(self, rendezvous: str) -> None:
        if self._store is None or self.rendezvous != rendezvous:
            if self._hosts:
                raise TrainerError(f"the members are to meet at {rendezvous}", where=repr(self))
            if self.rendezvous != rendezvous:
                self.leave()
            self._store = self._world.stores.get(rendezvous)
            self.rendezvous = rendezvous

    async def _connect(self, store: Store, place: str, meeting: Meeting) -> None:
        gloo = store.gloos.setdefault(place, Gloo(meeting.size))
        if meeting.rank in gloo.here or gloo.broken:
            await asyncio.sleep(TIMEOUT_S)
            raise self._failed("meet", f"nobody answers at {place}, where a group was before")
        gloo.here.add(meeting.rank)
        gloo.tell()
        self._gloo, self._name, self._rank, self._done = gloo, place, meeting.rank, 0
        await self._wait(gloo, lambda: len(gloo.here) == gloo.size, "meet")

    def _send(self, value: Gradient | Flat) -> tuple[Gloo, dict[int, Gradient | Flat]]:
        gloo = self._gloo
        if gloo is None:
            raise TrainerError("this cell is in no group", where="prefix group", remedy="meet() first")
        self._check(gloo, "send")
        sent = gloo.collective(self._done)
        self._done += 1
        sent[self._rank] = value
        gloo.tell()
        return gloo, sent

    async def _wait(self, gloo: Gloo, true: Callable[[], bool], doing: str) -> None:
        deadline = now() + TIMEOUT_S
        while not true():
            self._check(gloo, doing)
            if not await _changed(gloo.changed, deadline):
                raise self._failed(doing, "time-out")

    def _check(self, gloo: Gloo, doing: str) -> None:
        if gloo.broken:
            raise self._failed(doing, "connection closed by peer")

    def _failed(self, doing: str, why: str) -> TrainerError:
        where = repr(self)
        self.leave()
        if not self._hosts:
            self._store = None
        return TrainerError(f"the members could not {doing}: {why}", where=where)

    def _ended(self) -> None:
        store, self._store = self._store, None
        silent = self._life.silent
        if silent:
            # Nobody closes its connections: the others find out when they wait for it.
            self._gloo = None
        self.leave()
        if self._hosts and store is not None:
            store.gone = not silent
            if not silent:
                self._world.stores.pop(self.rendezvous, None)
            store.tell()


async def _changed(event: asyncio.Event, deadline: float) -> bool:
    """Whether it was set in time."""
    left = deadline - now()
    if left <= 0:
        return False
    try:
        async with asyncio.timeout(left):
            await event.wait()
    except TimeoutError:
        return False
    return True
