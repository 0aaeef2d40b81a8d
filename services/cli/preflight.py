"""Everything that can be known to be wrong before the first process starts."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

from schemas.config import Config
from schemas.errors import ConfigError
from schemas.units import TaskRef
from services.cli import checks
from services.cli.places import Places
from services.mesh.nats_bus import connect
from services.mesh.tasks import list_tasks, task_refs


def environment(config: Config, places: Places) -> None:
    """Machine and ports. Raises EnvironmentMissing with everything that is missing."""
    findings = [
        checks.python(),
        checks.bash(),
        *(checks.package(name) for name in ("torch", "megatron.core", "renderers", "tokenizers", "safetensors")),
        checks.store(places),
        checks.disk(places),
        *checks.ports(config),
    ]
    if not config.bus.url:
        findings.append(checks.nats_server())
    if config.rollout.transport == "mooncake":
        findings += checks.libraries(required=True)
        # With a library missing, importing tells nothing more.
        if all(finding.ok for finding in findings):
            findings.append(checks.mooncake(required=True))
    checks.require(findings)


async def event_bus(url: str) -> None:
    """Whether somebody else's event bus answers. Raises EnvironmentMissing; making a policy would have been in vain."""
    bus = await connect(url, "preflight", name="gyre/preflight")
    await bus.close()


def inputs(config: Config, places: Places) -> tuple[list[TaskRef], list[TaskRef]]:
    """Policy and tasks as they lie there now; returns the training tasks and the held-out ones.

    Raises TaskError, EnvironmentMissing, or ConfigError where a task is in both sets."""
    checks.require([checks.policy_folder(_path(config.policy.path, places))])
    tasks = task_refs(list_tasks(_path(config.tasks.path, places)))
    return tasks, _held_out(config, places, tasks)


def _held_out(config: Config, places: Places, tasks: list[TaskRef]) -> list[TaskRef]:
    if not config.eval.every:
        return []
    folder = _path(config.eval.path, places)
    held_out = task_refs(list_tasks(folder, key="eval.path"))
    trained = {task.digest: task.name for task in tasks}
    shared = [f"{task.name} is {trained[task.digest]}" for task in held_out if task.digest in trained]
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(held_out)} held-out tasks are training tasks: {', '.join(shared[:3])}",
            where=f"eval.path = {folder}",
            remedy="hold out tasks that are not in tasks.path",
        )
    return held_out


def code_identity() -> str:
    """Package version and, in a checkout, the commit; `+` after it where files differ from the commit."""
    version = importlib.metadata.version("qwengyre")
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return version
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = "+" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return f"{version} {commit}{changed}" if commit else version


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _path(name: str, places: Places) -> Path:
    path = Path(name)
    return path if path.is_absolute() else places.cache / path
