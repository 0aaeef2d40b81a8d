"""The communication group of the cells that train one batch: their gradients to the core, its weights to them.

    apart --meet()--> joined --reduce()/broadcast()--> joined
      ^-------------------- any failure, leave() --------'

Each cell is a torch world of its own; between cells there is one raw gloo group over a store that the core's process
hosts. Invariants:

- nobody enters a collective before every member has said that it will: whoever waits for a member waits in `meet`,
  which holds no connection and can be given up at any time;
- a group is built once and kept while every member still has it; a group that is built again meets under a name that
  was never used on this store;
- a collective that fails leaves the group, so that the others fail at once; the tensors' content is undefined then.

All calls block and are made in one thread.
"""

from __future__ import annotations

import datetime
import socket
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

TIMEOUT_S = 30.0
"""Of one connection or collective between members that have met: longer than a reduction takes."""
CONNECT = datetime.timedelta(seconds=5)
_APART = "-"
_POLL_S = 0.005


class PrefixGroup:
    """One member's end.

    Example: `while not group.meet(meeting, 0.2): ...`, then `group.reduce(staging)` in every member; the core's
    `staging` holds the sum.
    """

    def __init__(self, *, host: bool, timeout_s: float = TIMEOUT_S) -> None:
        """`host` is true in the core, whose process lends the store."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.rendezvous = ""
        """`host:port` of the store that this end uses; empty before the first `meet` of a satellite."""
        self._store: TCPStore | None = None
        self._gloo: Any = None
        self._name = _APART
        """Under which the group was built."""
        self._said: Meeting | None = None
        self._hosts = host
        if host:
            self._host()

    def __repr__(self) -> str:
        return f"<PrefixGroup {self._name} at {self.rendezvous or 'no store'}>"

    @property
    def joined(self) -> bool:
        """Whether there is a group to reduce and broadcast in."""
        return self._gloo is not None

    def meet(self, meeting: Meeting, wait_s: float) -> bool:
        """Waits up to `wait_s` for the other members; True once they are all here and the group is joined.

        Raises TrainerError where the store or a member is gone; the group is left then.
        """
        try:
            return self._meet(meeting, wait_s)
        except RuntimeError as error:
            raise self._failed("meet", error) from error

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
        self._store = None

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise TrainerError("this cell is in no group", where="prefix group", remedy="meet() first")
        return self._gloo

    def _host(self) -> None:
        # Left to itself the store listens on every interface.
        listener = socket.socket()
        here = own_host()
        listener.bind((here, 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            here,
            port,
            None,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.rendezvous = f"{here}:{port}"

    def _meet(self, meeting: Meeting, wait_s: float) -> bool:
        store = self._reach(meeting.rendezvous)
        if not self._name.startswith(f"{meeting.key}/"):
            self.leave()
        place = f"{meeting.key}/{meeting.batch}"
        if self._said != meeting:
            store.set(f"{place}/{meeting.rank}", self._name)
            self._said = meeting
        everybody = [f"{place}/{rank}" for rank in range(meeting.size)]
        deadline = time.monotonic() + wait_s
        while not store.check(everybody):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        names = {name.decode() for name in store.multi_get(everybody)}
        if self._gloo is None or names != {self._name}:
            # Somebody has left since: the others leave too, and all build anew.
            self._gloo = None
            self._gloo = ProcessGroupGloo(PrefixStore(place, store), meeting.rank, meeting.size, self._options())
            self._name = place
        return True

    def _options(self) -> Any:
        """Connections between members go where everything else of ours goes; by itself gloo takes the machine's name."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=own_host())]
        return options

    def _reach(self, rendezvous: str) -> TCPStore:
        if self._store is None or self.rendezvous != rendezvous:
            self.leave()
            host, _, port = rendezvous.rpartition(":")
            # A core that is there answers at once.
            timeout = min(self._timeout, CONNECT)
            self._store = TCPStore(host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
            self._store.set_timeout(self._timeout)
            self.rendezvous = rendezvous
        return self._store

    def _failed(self, doing: str, error: RuntimeError) -> TrainerError:
        where = repr(self)
        self.leave()
        if not self._hosts:
            self._store = None
        return TrainerError(
            f"the members could not {doing}: {str(error).splitlines()[0]}",
            where=where,
            remedy="they meet again once the member that is gone has started again",
        )
