"""The quickstart in containers, for real: brought up with podman-compose, trained for two steps, looked at, taken down.

`make containers` makes what this needs: podman, a base image, the image of the code as it is now.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.checker import check
from replay.logfile import read_events
from schemas.config_file import load
from services.cli.plan import service_specs

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
IMAGE = "localhost/qwengyre:latest"
USER = 10001
FINISH_S = 300
SHORT = "--set steps=2 --set scheduler.N=4 --set scheduler.B=2"

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(600)]


def missing() -> str:
    """What keeps this machine from running containers of this code; empty when nothing does."""
    for program in ("podman", "podman-compose"):
        if shutil.which(program) is None:
            return f"{program} is not installed: make containers"
    if os.geteuid() != 0:
        return "only root may give containers a network: sudo make containers"
    inspected = subprocess.run(
        ["podman", "image", "inspect", IMAGE, "--format", '{{index .Labels "qwengyre.code"}}'],
        capture_output=True,
        text=True,
        check=False,
    )
    if inspected.returncode:
        return f"there is no image {IMAGE}: make containers"
    code = subprocess.run([ROOT / "deploy/container/code.sh"], capture_output=True, text=True, check=True).stdout
    return "" if inspected.stdout.strip() == code.strip() else "the image is of other code: make containers"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder for the containers, with the policy that an earlier run here made."""
    folder = tmp_path_factory.mktemp("state")
    made = ROOT / "state" / "cache" / ".made"
    for policy in made.glob("policy-*/"):
        shutil.copytree(policy, folder / "cache" / ".made" / policy.name)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    # Above it lie folders for root alone.
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


class Containers:
    """The project's containers, by the names of their services."""

    def __init__(self, podman: Callable[..., str], project: str) -> None:
        self._podman, self._project = podman, project

    def __call__(self, service: str, *words: str, timeout: float = 60) -> str:
        """What a command in a running one prints."""
        return self._podman("podman", "exec", f"{self._project}_{service}_1", *words, timeout=timeout)

    def run_again(self, service: str, *, timeout: float) -> str:
        """What one that has ended prints when it is started once more, until it ends."""
        return self._podman("podman", "start", "--attach", f"{self._project}_{service}_1", timeout=timeout)


@pytest.fixture(scope="module")
def mesh(state: Path) -> Iterator[Containers]:
    """Brings the containers up."""
    if why := missing():
        pytest.skip(why)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    project = f"gyre-{secrets.token_hex(3)}"
    environment = {
        **os.environ,
        "GYRE_VOLUME": str(state),
        "GYRE_OPEN_ARGS": SHORT,
        "GYRE_NATS_PORT": str(port),
        "CONTAINERS_CONF": os.environ.get("CONTAINERS_CONF", str(Path(__file__).with_name("containers.conf"))),
    }

    def podman(*words: str, timeout: float = 60) -> str:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    compose = ("podman-compose", "-p", project, "-f", str(COMPOSE))
    try:
        podman(*compose, "up", "-d", timeout=200)
        yield Containers(podman, project)
    finally:
        for name in subprocess.run(
            ["podman", "ps", "-a", "--filter", f"name={project}", "--format", "{{.Names}} {{.Status}}"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines():
            logs = subprocess.run(
                ["podman", "logs", "--tail", "15", name.split()[0]],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            print(f"== {name}\n{logs.stdout}{logs.stderr}")  # noqa: T201  shown when the test fails
        subprocess.run([*compose, "down", "-v", "-t", "10"], env=environment, capture_output=True, check=False)
        # podman-compose leaves its network.
        network = ["podman", "network", "rm", "-f", f"{project}_default"]
        subprocess.run(network, env=environment, capture_output=True, check=False)


def test_the_quickstart_trains_in_containers(mesh: Containers, state: Path) -> None:
    def events(kind: str, *words: str, timeout: float = 60) -> list[dict[str, Any]]:
        lines = mesh("packer", "gyre", "events", "--kind", kind, "--json", *words, timeout=timeout).splitlines()
        return [json.loads(line) for line in lines]

    # The run is opened by a container of its own: until then there is none to follow.
    mesh(
        "packer", "bash", "-c", "until ls /var/lib/gyre/runs/*/mesh.json >/dev/null 2>&1; do sleep 1; done", timeout=200
    )
    [finished] = events("run.finished", "--follow", timeout=FINISH_S)
    assert finished["data"] == {"steps": 2, "reason": "steps_done"}
    assert [event["data"]["step"] for event in events("batch.stepped")] == [1, 2]
    ended = events("execution.finished")
    assert sum(event["data"]["counters"]["harness_errors"] for event in ended) == 0
    assert {event["data"]["reason"] for event in ended} <= {"completed", "cancelled"}

    # Each service is a container of its own and is reached by its name.
    config = load(ROOT / "examples" / "quickstart.toml")
    names = [spec.name for spec in service_specs(config, run="r-1", url="", state=state, here=ROOT)]
    urls = {event["entity"]: event["data"]["url"] for event in events("service.joined")}
    assert urls == {name: f"http://{name}:8000" for name in names}
    for name in names:
        mesh(name, "ready")
    assert {event["data"]["transport"] for event in events("weights.published")} == {"mooncake"}

    # Its log passes the checker, and its curves lie beside it.
    mesh("packer", "gyre", "export", "-o", "/var/lib/gyre/run.gyre")
    report = check(read_events(state / "run.gyre"))
    assert report.ok, report.violations
    [curves] = (state / "tensorboard").glob("r-*/events.out.tfevents.*")
    assert curves.stat().st_size > 0

    # The run is over: opening again begins the next. Not from inside a service, which leaves for it at once.
    said = mesh.run_again("start", timeout=120).splitlines()[-1].split()
    assert said[0] == "run"
    assert said[1] != finished["entity"]
    assert said[2:] == ["is", "open"]
