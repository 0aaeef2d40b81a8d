"""The prefix group over real sockets, its members in threads: sums, broadcasts, members that are late, gone or new."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import TrainerError
from services.trainer import meeting_store
from services.trainer.batch_view import Meeting
from services.trainer.prefix_group import PrefixGroup


class Members:
    def __init__(self, size: int, timeout_s: float = 5.0) -> None:
        self.groups = [PrefixGroup(host=rank == 0, timeout_s=timeout_s) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)

    def meeting(self, batch: str, rank: int, key: str = "k") -> Meeting:
        return Meeting(rendezvous=self.groups[0].rendezvous, key=key, batch=batch, rank=rank, size=len(self.groups))

    def each(self, act: Callable[[PrefixGroup, int], Any]) -> list[Any]:
        """The act of every member, at the same time; an error is a result."""

        def one(rank: int) -> Any:
            try:
                return act(self.groups[rank], rank)
            except TrainerError as error:
                return error

        return list(self.threads.map(one, range(len(self.groups))))

    def meet(self, batch: str, key: str = "k") -> None:
        assert self.each(lambda group, rank: group.meet(self.meeting(batch, rank, key), 5.0)) == [True] * len(
            self.groups
        )

    def sum(self) -> Sequence[float]:
        """What the core has after every member gave 10 to the power of its rank, in both of two buffers."""
        buffers = [[torch.full((64,), 10.0**rank), torch.full((3,), 10.0**rank)] for rank in range(len(self.groups))]
        assert self.each(lambda group, rank: group.reduce(buffers[rank])) == [None] * len(self.groups)
        return [float(value) for buffer in buffers[0] for value in buffer.unique()]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.threads.shutdown()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members(3)
    yield members
    members.close()


def test_the_core_gets_the_sum_and_sends_weights(members: Members) -> None:
    members.meet("b-000001")
    assert members.sum() == [111.0, 111.0]
    arrays = [np.full(8, float(rank), np.float32) for rank in range(3)]
    members.each(lambda group, rank: group.broadcast(arrays[rank]))
    assert [set(array) for array in arrays] == [{0.0}] * 3


def test_a_group_is_kept_while_everybody_has_it(members: Members) -> None:
    members.meet("b-000001")
    first = repr(members.groups[0])
    members.meet("b-000002")
    assert repr(members.groups[0]) == first
    assert members.sum() == [111.0, 111.0]
    members.groups[2].leave()
    members.meet("b-000003")
    assert [repr(group) != first for group in members.groups] == [True] * 3
    assert members.sum() == [111.0, 111.0]
    members.meet("b-000003", key="another process")
    assert "another process" in repr(members.groups[1])
    assert members.sum() == [111.0, 111.0]


def test_whoever_waits_for_a_member_can_give_up(members: Members) -> None:
    missing = members.meeting("b-000001", 1)
    assert not members.groups[1].meet(missing, 0.01)
    assert not members.groups[0].meet(members.meeting("b-000001", 0), 0.01)
    assert not members.groups[1].joined
    members.meet("b-000001", key="with the others")
    assert members.sum() == [111.0, 111.0]


def test_a_member_that_leaves_in_a_reduction_ends_it_for_all(members: Members) -> None:
    members.meet("b-000001")

    def act(group: PrefixGroup, rank: int) -> None:
        group.leave() if rank == 2 else group.reduce([torch.ones(64)])

    results = members.each(act)
    # A satellite has given its part as soon as it is sent.
    assert isinstance(results[0], TrainerError)
    assert not members.groups[0].joined
    with pytest.raises(TrainerError, match="in no group"):
        members.groups[0].reduce([torch.ones(64)])


def test_a_core_that_is_gone_ends_collectives_and_is_waited_for() -> None:
    pair = Members(2, timeout_s=1.0)
    pair.meet("b-000001")
    pair.groups[0].close()
    with pytest.raises(TrainerError, match="could not"):
        pair.groups[1].broadcast(np.zeros(8, np.float32))
    for _ in range(2):
        assert not pair.groups[1].meet(pair.meeting("b-000002", 1), 0.01)
        assert pair.groups[1].trouble
    pair.close()


CORE = """
import sys, torch
from services.trainer import meeting_store
from services.trainer.batch_view import Meeting
from services.trainer.prefix_group import PrefixGroup

group = PrefixGroup(host=True)
for batch in ("b-000001", "b-000002"):
    print(group.rendezvous, flush=True)
    meeting = Meeting(rendezvous=group.rendezvous, key="k", batch=batch, rank=0, size=2)
    while not group.meet(meeting, 0.2):
        pass
    sums = torch.ones(8)
    group.reduce([sums])
    print(float(sums[0]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def core() -> Iterator[subprocess.Popen[str]]:
    """In a process of its own, which sums twice."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", CORE], **pipes)  # type: ignore[call-overload]
    yield process
    process.kill()
    process.communicate()


def test_nobody_waits_in_the_store_of_a_core_that_stands_still(
    core: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knew it and whoever comes new go on after a while; when the core goes on, the group is the one before."""
    assert core.stdout is not None
    rendezvous = core.stdout.readline().strip()
    group, new = PrefixGroup(host=False), PrefixGroup(host=False)

    def meeting(batch: str) -> Meeting:
        return Meeting(rendezvous=rendezvous, key="k", batch=batch, rank=1, size=2)

    while not group.meet(meeting("b-000001"), 0.2):
        pass
    group.reduce([torch.full((8,), 2.0)])
    assert core.stdout.readline().strip() == "3.0"
    first = repr(group)
    core.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(meeting_store, "ANSWER_S", 0.2)
        for each in (group, new, group):
            assert not each.meet(meeting("b-000002"), 0.01)
            assert "did not answer" in each.trouble
    core.send_signal(signal.SIGCONT)
    while not group.meet(meeting("b-000002"), 0.2):
        pass
    group.reduce([torch.full((8,), 4.0)])
    assert [core.stdout.readline().strip() for _ in range(2)] == [rendezvous, "5.0"]
    assert (repr(group), group.trouble) == (first, "")
    for each in (group, new):
        each.close()


ENDS_IN_A_CALL = """
import socket, sys, time
from services.mesh.processes import end
from services.trainer import meeting_store

class GoesDownSlowly:
    def __del__(self):
        time.sleep(30)

slow = GoesDownSlowly()
silent = socket.create_server(("127.0.0.1", 0))
meeting_store.ANSWER_S = 0.5
try:
    meeting_store.MeetingStore(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
except meeting_store.StoreSilent:
    print("silent", flush=True)
    sys.exit(end(int(sys.argv[1])))
"""


@pytest.mark.parametrize("code", [0, 4])
def test_a_call_that_returns_while_the_process_ends_does_not_abort_it(code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_IN_A_CALL, str(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, "silent\n"), ended.stderr
