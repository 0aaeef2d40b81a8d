"""The communication group of the cells that train one batch: their gradients to the core, its weights to them.

    apart --meet()--> joined --reduce()/broadcast()--> joined
      ^-------------------- any failure, leave() --------'

Each cell is a torch world of its own; between cells there is one raw gloo group over a store that the core's process
hosts. Invariants:

- nobody enters a collective before every member has said that it will: whoever waits for a member, or for a core whose
  store does not answer, waits in `meet`, which returns after a while, keeps what this end has and can be given up at any
  time;
- a group is built once and kept while every member still has it; a group that is built again meets under a name that
  was never used on this store;
- a collective that fails leaves the group, so that the others fail at once; the tensors' content is undefined then.

All calls block and are made in one thread.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from schemas.errors import TrainerError
from services.mesh.host import own_host
from services.trainer.batch_view import Meeting
from services.trainer.meeting_store import MeetingStore

TIMEOUT_S = 30.0
"""Of one connection or collective between members that have met: longer than a reduction takes."""
_APART = "-"


class PrefixGroup:
    """One member's end.

    Example: `while not group.meet(meeting, 0.2): ...`, then `group.reduce(staging)` in every member; the core's
    `staging` holds the sum.
    """

    def __init__(self, *, host: bool, timeout_s: float = TIMEOUT_S) -> None:
        """`host` is true in the core, whose process lends the store."""
        self._timeout_s = timeout_s
        self.rendezvous = ""
        """`host:port` of the store that this end uses; empty before the first `meet` of a satellite."""
        self.trouble = ""
        """Why the core's store could not be asked at the last `meet`."""
        self._store: MeetingStore | None = None
        self._gloo: Any = None
        self._name = _APART
        """Under which the group was built."""
        self._said: Meeting | None = None
        self._hosts = host
        if host:
            self._store = MeetingStore(timeout_s=timeout_s)
            self.rendezvous = self._store.rendezvous

    def __repr__(self) -> str:
        return f"<PrefixGroup {self._name} at {self.rendezvous or 'no store'}>"

    @property
    def joined(self) -> bool:
        """Whether there is a group to reduce and broadcast in."""
        return self._gloo is not None

    def meet(self, meeting: Meeting, wait_s: float) -> bool:
        """Waits up to `wait_s` for the other members; True once they are all here and the group is joined. False also
        where the store does not answer: whether its core is gone, LOG will say.

        Raises TrainerError where a member is gone while the group is built; the group is left then.
        """
        began = time.monotonic()
        try:
            names = self._together(meeting, wait_s)
        except RuntimeError as error:
            self._part_from_store(error)
            time.sleep(max(0.0, began + wait_s - time.monotonic()))
            return False
        if names is None:
            return False
        if self._gloo is None or names != {self._name}:
            # Somebody has left since: the others leave too, and all build anew.
            self._gloo = None
            try:
                self._build(meeting)
            except RuntimeError as error:
                raise self._failed("meet", error) from error
        return True

    def reduce(self, tensors: Sequence[Tensor]) -> None:
        """Adds the members' tensors (CPU, contiguous) into the core's, one collective each; a satellite's are scratch
        afterwards. Raises TrainerError where a member fails."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        try:
            for tensor in tensors:
                self._group.reduce([tensor], options).wait()
        except RuntimeError as error:
            raise self._failed("add up gradients", error) from error

    def broadcast(self, flat: np.ndarray) -> None:
        """Fills every member's array (contiguous) with the core's. Raises TrainerError where a member fails."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([torch.from_numpy(flat)], options).wait()
        except RuntimeError as error:
            raise self._failed("send weights", error) from error

    def leave(self) -> None:
        """Closes the group's connections; what the others have in progress fails."""
        self._gloo, self._name, self._said = None, _APART, None

    def close(self) -> None:
        """Leaves, and ends the store that this end hosts."""
        self.leave()
        self._drop_store()

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise TrainerError("this cell is in no group", where="prefix group", remedy="meet() first")
        return self._gloo

    def _together(self, meeting: Meeting, wait_s: float) -> set[str] | None:
        """Names of the groups that the members have, once all of them have said so; None after `wait_s`."""
        store = self._reach(meeting.rendezvous)
        if not self._name.startswith(f"{meeting.key}/"):
            self.leave()
        place = _place(meeting)
        if self._said != meeting:
            store.say(f"{place}/{meeting.rank}", self._name)
            self._said = meeting
        names = store.all_said([f"{place}/{rank}" for rank in range(meeting.size)], wait_s)
        self.trouble = ""
        return None if names is None else set(names)

    def _build(self, meeting: Meeting) -> None:
        assert self._store is not None
        place = _place(meeting)

        def build(store: TCPStore) -> Any:
            return ProcessGroupGloo(PrefixStore(place, store), meeting.rank, meeting.size, self._options())

        self._gloo = self._store.build(build)
        self._name = place

    def _options(self) -> Any:
        """Connections between members go where everything else of ours goes; by itself gloo takes the machine's name."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=self._timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=own_host())]
        return options

    def _reach(self, rendezvous: str) -> MeetingStore:
        if self._store is None or self.rendezvous != rendezvous:
            if self._hosts:
                raise TrainerError(
                    f"the members are to meet at {rendezvous}",
                    where=repr(self),
                    remedy="its supervisor starts this process again, and it exposes its weights anew, with its own store",
                )
            if self.rendezvous != rendezvous:
                self.leave()
            self._drop_store()
            self._store = MeetingStore(rendezvous, timeout_s=self._timeout_s)
            self.rendezvous = rendezvous
        return self._store

    def _part_from_store(self, error: RuntimeError) -> None:
        """The group is kept: where the core lives, its store has what this end said, and is told again."""
        self.trouble = str(error).splitlines()[0]
        self._said = None
        if not self._hosts:
            self._drop_store()

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _failed(self, doing: str, error: RuntimeError) -> TrainerError:
        where = repr(self)
        self.leave()
        if not self._hosts:
            self._drop_store()
        return TrainerError(
            f"the members could not {doing}: {str(error).splitlines()[0]}",
            where=where,
            remedy="they meet again once the member that is gone has started again",
        )


def _place(meeting: Meeting) -> str:
    return f"{meeting.key}/{meeting.batch}"
