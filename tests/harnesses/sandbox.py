"""A harness in a network of its own, where nothing exists but the proxy on 127.0.0.1.

Run as a program inside the new network (`unshare -rn`), it brings the loopback up, listens, hands the socket to the one
who started it, and becomes the harness. A socket stays in the network it was made in, so the proxy serves there although
it lives outside. Where such a network is not to be had, the harness gets the proxy's own address, and a proxy that
answers nobody for everything else.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
NOWHERE = "http://127.0.0.1:9"
ISOLATED = {name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")} | {
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


@cache
def networks() -> bool:
    """Whether a program may be given a network of its own here."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True, timeout=20).returncode == 0
    return False


class Sandbox:
    """A program that was started; `listener` is the socket where it looks for the proxy, None where it sees ours."""

    def __init__(self, process: asyncio.subprocess.Process, listener: socket.socket | None) -> None:
        self.process, self._listener = process, listener

    async def serve(self, runner: web.AppRunner) -> None:
        """This application answers there from now on, until its runner is cleaned up."""
        from aiohttp import web

        if self._listener is not None:
            await web.SockSite(runner, self._listener.dup()).start()


@contextlib.asynccontextmanager
async def started(
    command: list[str], *, url: str, env: Mapping[str, str], cwd: Path, output: Path
) -> AsyncIterator[Sandbox]:
    """The program, with standard output and error in `output` and `.err` beside it; its whole group is ended at the end.
    It looks for the proxy at `url`, and waits as long as none serves there."""
    ours, theirs = socket.socketpair()
    apart = networks()
    port = url.rpartition(":")[2]
    prefix = ["unshare", "-rn", sys.executable, "-S", "-E", __file__, str(theirs.fileno()), port] if apart else []
    listener = None
    with ours, theirs, output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *command,
            env={**ISOLATED, **env},
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        try:
            if apart:
                theirs.close()
                _, (fd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
                listener = socket.socket(fileno=fd)
                ours.send(b".")
            yield Sandbox(process, listener)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if listener:
                listener.close()


def _enter(handle: int, port: int, command: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    with socket.create_server(("127.0.0.1", port)) as server, socket.socket(fileno=handle) as parent:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [server.fileno()]))]
        parent.sendmsg([b"."], rights)
        if not parent.recv(1):
            sys.exit("nobody serves the socket")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _enter(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
