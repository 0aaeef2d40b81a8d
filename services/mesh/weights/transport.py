"""Moving the flat weight buffer between processes: Mooncake Transfer Engine, or shared memory where that is absent.

One process exposes a snapshot and announces its `WeightAddress` (small, JSON); any other pulls it. Invariants:

- `expose` copies: the caller may write its own buffer on at once;
- a pull ends with exactly the bytes that were exposed, proven by their digest, or raises TransportError; after an
  error the content of the destination is undefined;
- every pull from a process that has died fails, whichever the transport;
- a transport says which kind it is and why (`kind`, `reason`).

All calls block (a transfer takes milliseconds to seconds): an event loop runs them in a thread. One transport is used
by one thread at a time.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import hashlib
import importlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from schemas.errors import ConfigError, EnvironmentMissing, TransportError
from services.mesh.host import is_loopback, own_host

Kind = Literal["mooncake", "shared-memory"]
Buffer = npt.NDArray[np.float32]

_LOG = structlog.get_logger()
_PREFIX = "gyre-weights-"
_INSTALL = (
    "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4, and pip install mooncake-transfer-engine-non-cuda; "
    "or choose the shared-memory transport"
)


class WeightAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one exposed snapshot can be pulled from."""

    kind: Kind
    version: int
    """Policy version of the snapshot."""
    peer: str
    """Mooncake: `host:port` of the exposing process. Shared memory: its process id, for messages only."""
    pointer: int = 0
    """Mooncake: address of the first byte in the exposing process."""
    name: str = ""
    """Shared memory: path of the file."""
    bytes: int
    digest: str
    """BLAKE2b (16 bytes, hex) of the snapshot."""


class Transport(abc.ABC):
    """One process's end. `reason` says why this kind is used."""

    kind: Kind
    reason: str

    @abc.abstractmethod
    def expose(self, buffer: Buffer, version: int) -> WeightAddress:
        """Copy `buffer` (1-D float32, contiguous) and make the copy available until `withdraw` or `close`."""

    @abc.abstractmethod
    def _fetch(self, address: WeightAddress, into: Buffer) -> None:
        """Fill `into` with the bytes at `address`; raise TransportError if they cannot be read."""

    @abc.abstractmethod
    def withdraw(self, address: WeightAddress) -> None:
        """End an exposure of this process. Raises TransportError if there is none of that address."""

    @abc.abstractmethod
    def close(self) -> None:
        """Withdraw everything and free what the transport holds. Closing twice does nothing."""

    def pull(self, address: WeightAddress, into: Buffer) -> None:
        """Fill `into` (1-D float32, contiguous, of the address's size) with the exposed snapshot.

        Raises TransportError if kind or size do not fit, the peer is gone, or the bytes are not those announced.
        """
        where = f"version {address.version} at {address.peer}"
        if address.kind != self.kind:
            raise TransportError(
                f"these weights are exposed over {address.kind}, this process opened {self.kind} ({self.reason})",
                where=where,
                remedy="open both ends with the same kind",
            )
        _check(into, where)
        if into.nbytes != address.bytes:
            raise TransportError(
                f"{address.bytes} bytes are exposed, the destination holds {into.nbytes}",
                where=where,
                remedy="expose weights of the same architecture as the destination's",
            )
        self._fetch(address, into)
        found = digest(into)
        if found != address.digest:
            raise TransportError(
                f"the bytes read have digest {found}, announced was {address.digest}",
                where=where,
                remedy="the snapshot was withdrawn or overwritten: pull the address of a current one",
            )

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MooncakeTransport(Transport):
    """Peer-to-peer over the Mooncake Transfer Engine, TCP.

    The reading side names an address in the exposing process and nothing checks it there. So the memory of a withdrawn
    snapshot is kept and used again by the next one of that size, never freed before `close`: a late reader gets other
    bytes and a digest error, not a crash of the exposing process. The library listens on all interfaces whatever `host`
    says; keep its ports inside the cluster's network.
    """

    kind: Kind = "mooncake"

    def __init__(self, *, host: str = "127.0.0.1", reason: str = "asked for") -> None:
        self.reason = reason
        self._engine: Any = _mooncake_engine(host)
        self._peer = f"{host}:{self._engine.get_rpc_port()}"
        self._exposed: dict[int, Buffer] = {}
        self._spare: list[Buffer] = []

    def expose(self, buffer: Buffer, version: int) -> WeightAddress:
        _check(buffer, f"version {version}")
        copy = next((spare for spare in self._spare if spare.nbytes == buffer.nbytes), None)
        if copy is None:
            copy = np.empty_like(buffer)
            self._register(copy)
        else:
            self._spare = [spare for spare in self._spare if spare is not copy]
        np.copyto(copy, buffer)
        self._exposed[copy.ctypes.data] = copy
        return WeightAddress(
            kind=self.kind,
            version=version,
            peer=self._peer,
            pointer=copy.ctypes.data,
            bytes=copy.nbytes,
            digest=digest(copy),
        )

    def _fetch(self, address: WeightAddress, into: Buffer) -> None:
        self._register(into)
        try:
            code = self._engine.transfer_sync_read(address.peer, into.ctypes.data, address.pointer, address.bytes)
        finally:
            self._engine.unregister_memory(into.ctypes.data)
        if code != 0:
            raise TransportError(
                f"the Mooncake Transfer Engine could not read the weights (code {code})",
                where=f"version {address.version} at {address.peer}",
                remedy="see whether the exposing process still lives and its port can be reached",
            )

    def withdraw(self, address: WeightAddress) -> None:
        buffer = self._exposed.pop(address.pointer, None)
        if buffer is None:
            raise _not_exposed(address)
        self._spare.append(buffer)

    def close(self) -> None:
        for buffer in (*self._exposed.values(), *self._spare):
            self._engine.unregister_memory(buffer.ctypes.data)
        self._exposed.clear()
        self._spare.clear()

    def _register(self, buffer: Buffer) -> None:
        code = self._engine.register_memory(buffer.ctypes.data, buffer.nbytes)
        if code != 0:
            raise TransportError(
                f"the Mooncake Transfer Engine refused to register {buffer.nbytes} bytes (code {code})",
                where=self._peer,
                remedy="raise the limit of locked memory (ulimit -l) or choose the shared-memory transport",
            )


class SharedMemoryTransport(Transport):
    """A file in shared memory for each snapshot; both processes are on one machine.

    The exposing process holds a file lock for as long as it lives. A reader that can take the lock knows that the owner
    is dead, removes the file and fails; opening a transport removes what dead owners left behind.
    """

    kind: Kind = "shared-memory"

    def __init__(self, *, folder: str | Path | None = None, reason: str = "asked for") -> None:
        self.reason = reason
        self._folder = Path(folder) if folder is not None else _shared_folder()
        self._exposed: dict[str, int] = {}
        for path in self._folder.glob(f"{_PREFIX}*"):
            _remove_if_orphan(path)

    def expose(self, buffer: Buffer, version: int) -> WeightAddress:
        _check(buffer, f"version {version}")
        path, handle = self._create()
        try:
            view = buffer.data.cast("B")
            while view:
                view = view[os.write(handle, view) :]
        except OSError as error:
            path.unlink()
            os.close(handle)
            raise TransportError(
                f"cannot write {buffer.nbytes} bytes: {error.strerror}",
                where=str(path),
                remedy=f"free space in {self._folder}, or give the container more shared memory",
            ) from error
        self._exposed[str(path)] = handle
        return WeightAddress(
            kind=self.kind,
            version=version,
            peer=str(os.getpid()),
            name=str(path),
            bytes=buffer.nbytes,
            digest=digest(buffer),
        )

    def _fetch(self, address: WeightAddress, into: Buffer) -> None:
        path = Path(address.name)
        where = f"version {address.version} of process {address.peer}"
        # A name that is none of ours never gets opened, whoever sent the address.
        if not path.name.startswith(_PREFIX):
            raise TransportError(f"{address.name!r} is no exposed snapshot", where=where, remedy="send a WeightAddress")
        if address.name not in self._exposed and _remove_if_orphan(path):
            raise TransportError("the exposing process has died", where=where, remedy="pull from a live process")
        try:
            with path.open("rb") as file:
                read = file.readinto(into.data.cast("B"))
        except OSError as error:
            raise TransportError(
                f"the snapshot cannot be read: {error.strerror}",
                where=where,
                remedy="it was withdrawn or its process has ended: pull the address of a current one",
            ) from error
        if read != address.bytes:
            raise TransportError(
                f"{read} of {address.bytes} bytes are there", where=where, remedy="pull the address of a current one"
            )

    def withdraw(self, address: WeightAddress) -> None:
        handle = self._exposed.pop(address.name, None)
        if handle is None:
            raise _not_exposed(address)
        Path(address.name).unlink(missing_ok=True)
        os.close(handle)

    def close(self) -> None:
        for name, handle in self._exposed.items():
            Path(name).unlink(missing_ok=True)
            os.close(handle)
        self._exposed.clear()

    def _create(self) -> tuple[Path, int]:
        while True:
            path = self._folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process that opened its transport in between took the file for an orphan: make a new one.
            if os.fstat(handle).st_nlink:
                return path, handle
            os.close(handle)


def open_transport(kind: str = "auto", *, host: str = "") -> Transport:
    """The transport of that kind; `auto` takes Mooncake where it works, else shared memory, and logs which and why.

    `host` is where others reach us, `own_host()` when empty. Raises EnvironmentMissing if Mooncake cannot run here and
    was asked for or has to reach another machine, ConfigError for an unknown kind.
    """
    host = host or own_host()
    opened: Transport
    match kind:
        case "mooncake":
            opened = MooncakeTransport(host=host)
        case "shared-memory":
            opened = SharedMemoryTransport()
        case "auto":
            try:
                opened = MooncakeTransport(host=host, reason="the Mooncake Transfer Engine works here")
            except EnvironmentMissing as error:
                if not is_loopback(host):
                    raise
                opened = SharedMemoryTransport(reason=error.what)
        case _:
            raise ConfigError(f"unknown transport {kind!r}", remedy="use auto, mooncake or shared-memory")
    _LOG.info("weights transport", transport=opened.kind, reason=opened.reason)
    return opened


def digest(buffer: Buffer) -> str:
    """BLAKE2b of the bytes, 16 bytes, hex."""
    return hashlib.blake2b(buffer.data.cast("B"), digest_size=16).hexdigest()


def _check(buffer: Buffer, where: str) -> None:
    if buffer.dtype != np.float32 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.size:
        raise TransportError(
            f"a buffer of dtype {buffer.dtype} and shape {buffer.shape} cannot be transferred",
            where=where,
            remedy="pass a contiguous 1-D float32 array",
        )


def _not_exposed(address: WeightAddress) -> TransportError:
    return TransportError(
        "this process exposes no such snapshot",
        where=f"version {address.version}",
        remedy="withdraw each address once, in the process that exposed it",
    )


def _mooncake_engine(host: str) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except (ImportError, OSError) as error:
        raise EnvironmentMissing(f"Mooncake cannot be loaded: {error}", remedy=_INSTALL) from error
    code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        raise EnvironmentMissing(f"Mooncake does not start over TCP on {host} (code {code})", remedy=_INSTALL)
    return engine


def _shared_folder() -> Path:
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def _remove_if_orphan(path: Path) -> bool:
    """Whether the file's owner is dead; the file is removed then."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        # Gone already, or of another user.
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
