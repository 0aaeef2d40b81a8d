"""What this machine must have. Each check says what it found and, where something is missing, what to do.

`gyre doctor` shows them all; a run asks for those that it needs before it starts anything.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from schemas.config import Config
from schemas.errors import EnvironmentMissing, GyreError
from services.cli.places import Places

MEMORY_GB = 8.0
DISK_GB = 2.0
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Shared libraries that Mooncake loads, and the apt packages that bring them."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's answer."""

    name: str
    ok: bool
    required: bool
    """Whether a run is impossible without it."""
    detail: str
    remedy: str = ""


def doctor(places: Places, config: Config | None = None) -> list[Finding]:
    """Every check, in the order in which things are needed."""
    mooncake_needed = config is not None and config.rollout.transport == "mooncake"
    port = config.bus.port if config else 0
    return [
        python(),
        bash(),
        nats_server(),
        torch(),
        *(package(name) for name in ("megatron.core", "renderers", "tokenizers", "safetensors", "sqlalchemy")),
        *libraries(required=mooncake_needed),
        mooncake(required=mooncake_needed),
        store(places),
        free_port(port),
        disk(places),
        memory(),
        *([policy(config, places), tasks(config, places), held_out(config, places)] if config else []),
    ]


def require(findings: list[Finding]) -> None:
    """Raises EnvironmentMissing with everything that is required and absent."""
    missing = [finding for finding in findings if finding.required and not finding.ok]
    if missing:
        raise EnvironmentMissing(
            "; ".join(f"{finding.name}: {finding.detail}" for finding in missing),
            where="this machine",
            remedy="\n     ".join(dict.fromkeys(finding.remedy for finding in missing)),
        )


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        name="python",
        ok=sys.version_info[:2] == (3, 11),
        required=True,
        detail=version,
        remedy="install Python 3.11; its packages are pinned for that version",
    )


def bash() -> Finding:
    """Tests run under it, and the tools of agents do."""
    found = shutil.which("bash")
    return Finding(
        name="bash",
        ok=found is not None,
        required=True,
        detail=found or "not on the PATH",
        remedy="install bash, or put its folder on the PATH: tests of tasks run under it",
    )


def nats_server() -> Finding:
    from services.mesh.server import nats_server_binary

    try:
        binary = nats_server_binary()
    except GyreError as error:
        return Finding(name="nats-server", ok=False, required=True, detail=error.what, remedy=error.remedy)
    return Finding(name="nats-server", ok=True, required=True, detail=str(binary))


def torch() -> Finding:
    try:
        import torch as library
    except (ImportError, OSError) as error:
        remedy = "make setup, or pip install torch==2.13.0 before the other packages"
        return Finding(name="torch", ok=False, required=True, detail=f"cannot be loaded: {error}", remedy=remedy)
    accelerator = "with an accelerator" if library.cuda.is_available() else "on the CPU"
    return Finding(name="torch", ok=True, required=True, detail=f"{library.__version__}, {accelerator}")


def package(name: str) -> Finding:
    try:
        there = find_spec(name) is not None
    except ModuleNotFoundError:
        there = False
    return Finding(
        name=name,
        ok=there,
        required=True,
        detail="installed" if there else "not installed",
        remedy="" if there else "make setup, or pip install -e .[cpu]",
    )


def libraries(*, required: bool, load: Callable[[str], object] = ctypes.CDLL) -> list[Finding]:
    """`load` opens a shared library by name and raises OSError where it is absent."""
    found = []
    for library, apt in LIBRARIES.items():
        try:
            load(library)
            found.append(Finding(name=library, ok=True, required=required, detail="there"))
        except OSError:
            found.append(
                Finding(
                    name=library,
                    ok=False,
                    required=required,
                    detail="the system library is missing",
                    remedy=f"apt-get install {apt}, or set rollout.transport to shared-memory",
                )
            )
    return found


def mooncake(*, required: bool) -> Finding:
    try:
        from mooncake.engine import TransferEngine  # noqa: F401
    except (ImportError, OSError) as error:
        return Finding(
            name="mooncake",
            ok=False,
            required=required,
            detail=f"the Transfer Engine cannot be loaded: {error}; weights go through shared memory",
            remedy="apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4, pip install mooncake-transfer-engine-non-cuda; "
            "or set rollout.transport to shared-memory",
        )
    return Finding(name="mooncake", ok=True, required=required, detail="the Transfer Engine loads")


def store(places: Places) -> Finding:
    """Whether the state folder could be written, and what a run makes in it: JetStream's store, runs, the cache."""
    for wanted in (places.root, places.nats, places.runs, places.cache, places.cache / ".made"):
        folder = wanted
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")
                os.fsync(probe.fileno())
        except OSError as error:
            return Finding(
                name="store",
                ok=False,
                required=True,
                detail=f"{folder} cannot be written: {error.strerror}",
                remedy="choose a folder that you may write to with --state DIR",
            )
    return Finding(name="store", ok=True, required=True, detail=f"{places.root} can be written")


def free_port(port: int, name: str = "bus.port") -> Finding:
    """Whether somebody could listen on 127.0.0.1:`port`; 0 asks for any."""
    from services.mesh.server import check_port

    try:
        check_port(port)
    except GyreError:
        return Finding(
            name=name,
            ok=False,
            required=True,
            detail=f"port {port} on 127.0.0.1 is in use",
            remedy=f"stop the program that listens there, or choose another {name} (0 takes a free one)",
        )
    return Finding(name=name, ok=True, required=True, detail=f"port {port} is free" if port else "free ports are there")


def disk(places: Places) -> Finding:
    folder = places.root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    return Finding(
        name="disk",
        ok=free >= DISK_GB,
        required=True,
        detail=f"{free:.1f} GB free in {folder}",
        remedy=f"free at least {DISK_GB:g} GB, or choose another folder with --state DIR",
    )


def memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    return Finding(
        name="memory",
        ok=free >= MEMORY_GB / 2,
        required=False,
        detail=f"{free:.1f} GB available; the quickstart uses up to {MEMORY_GB:g}",
        remedy="close other programs, or lower cells.count",
    )


def ports(config: Config) -> list[Finding]:
    """The ports that the configuration names."""
    named = {"bus.port": config.bus.port, "proxy.port": config.proxy.port}
    return [free_port(port, name) for name, port in named.items() if port]


def measurements(config: Config) -> str:
    """What is measured when, in words."""
    each = config.eval
    if not each.every:
        return "off"
    at = "" if each.temperature is None else f" at temperature {each.temperature:g}"
    return f"at the start, every {each.every} steps and at the end, {each.executions} executions{at}"


def held_out(config: Config, places: Places) -> Finding:
    """What a run measures on; tasks that a [[prepare]] makes may be still to come."""
    if not config.eval.every:
        return Finding(name="held-out", ok=True, required=False, detail="eval.every = 0: nothing is measured")
    folder = Path(config.eval.path)
    folder = folder if folder.is_absolute() else places.cache / folder
    made = any(each.makes == config.eval.path for each in config.prepare)
    there = folder.is_dir()
    state = str(folder) if there else f"{folder} is made when a run begins" if made else f"{folder} is not there"
    return Finding(
        name="held-out",
        ok=there or made,
        required=True,
        detail=f"{measurements(config)}; {state}",
        remedy="set eval.path to a folder of tasks, add a [[prepare]] that makes it, or set eval.every to 0",
    )


def policy(config: Config, places: Places) -> Finding:
    """The starting policy; one that a [[prepare]] makes may be still to come."""
    folder = places.cache / config.policy.path
    if not folder.exists() and any(each.makes == config.policy.path for each in config.prepare):
        return Finding(name="policy", ok=True, required=True, detail=f"{folder} is made when a run begins, once")
    return policy_folder(folder)


def tasks(config: Config, places: Places) -> Finding:
    """Whether there are tasks, or a [[prepare]] that makes them; `gyre run` reads each of them."""
    folder = places.cache / config.tasks.path
    made = any(each.makes == config.tasks.path for each in config.prepare)
    there = folder.is_dir()
    state = str(folder) if there else f"{folder} is made when a run begins" if made else f"{folder} is not there"
    remedy = "set tasks.path to a folder of tasks, or add a [[prepare]] that makes it"
    return Finding(name="tasks", ok=there or made, required=True, detail=state, remedy=remedy)


def policy_folder(folder: Path) -> Finding:
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    missing = [name for name in wanted if not (folder / name).is_file()]
    return Finding(
        name="policy",
        ok=not missing,
        required=True,
        detail=f"{folder} has no {', '.join(missing)}" if missing else str(folder),
        remedy="set policy.path to a complete policy folder, or add a [[prepare]] that makes it" if missing else "",
    )
