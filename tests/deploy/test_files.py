"""What deploy/ says, against the code that it starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config_file import load
from services.cli.app import app
from services.cli.plan import service_specs
from services.mesh.server import nats_server_binary

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = DEPLOY / "systemd"
BESIDES = {"nats", "start", "tensorboard"}
"""Containers that are no services of the plan."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(filled((DEPLOY / "compose" / "compose.yaml").read_text()))
    return found


def filled(text: str) -> str:
    """Variables replaced by their defaults, as compose does it."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def planned() -> list[str]:
    config = load(ROOT / "examples" / "quickstart.toml")
    return [spec.name for spec in service_specs(config, run="r-1", url="", state=Path("state"), here=Path())]


def test_several_proxies_are_several_processes() -> None:
    config = load(ROOT / "examples" / "quickstart.toml", ["proxy.count=3"])
    specs = service_specs(config, run="r-1", url="", state=Path("state"), here=Path())
    named = {spec.name: spec.command[-2:] for spec in specs if spec.name.startswith("proxy")}
    assert named == {f"proxy-{index}": ["--cell", str(index)] for index in range(3)}
    assert {spec.name for spec in specs} - set(named) == set(planned()) - {"proxy"}


def environment() -> dict[str, str]:
    lines = (UNITS / "gyre.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_compose_runs_the_services_of_the_quickstart(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {*planned(), *BESIDES}


def test_every_container_tells_the_name_by_which_others_reach_it(compose: dict[str, Any]) -> None:
    for name in planned():
        service = compose["services"][name]
        assert service["command"] == ["gyre", "service", name]
        assert service["hostname"] == service["environment"]["GYRE_HOST"] == name
        assert service["environment"]["GYRE_NATS"] == "nats://nats:4222"
        assert service["healthcheck"]["test"] == "ready"
        assert service["restart"] == "unless-stopped"
        assert service["init"] is True
        assert service["depends_on"] == {"nats": {"condition": "service_healthy"}}


def test_all_share_one_image_one_configuration_and_one_state(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {service["image"] for service in services.values()} == {"localhost/qwengyre:latest"}
    shared = {tuple(service["volumes"]) for name, service in services.items() if name != "nats"}
    assert shared == {("state:/var/lib/gyre", "../../examples:/etc/gyre:ro")}
    assert (DEPLOY / "compose" / "../../examples" / "quickstart.toml").is_file()


def test_nothing_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:4222:4222"]
    assert not any("network_mode" in service for service in compose["services"].values())


def test_commands_of_containers_and_units_parse(compose: dict[str, Any]) -> None:
    commands = [service["command"] for service in compose["services"].values()]
    lines = re.findall(
        r"^ExecStart=(.*)$", "\n".join(path.read_text() for path in UNITS.glob("*.service")), re.MULTILINE
    )
    commands += [line.replace("%i", "rollout-cell-0") for line in lines]
    parsed = 0
    for command in commands:
        words = shlex.split(command) if isinstance(command, str) else command
        if Path(words[0]).name == "gyre":
            # What the environment gives them is given here.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GYRE_NATS", "nats://nats:4222")
                app.parse_args(words[1:], exit_on_error=False, print_error=False)
            parsed += 1
    assert parsed == len(planned()) + 2 + 3


def test_units_start_the_services_of_the_quickstart() -> None:
    wanted = re.findall(r"^Wants=(.*)$", (UNITS / "gyre.target").read_text(), re.MULTILINE)
    units = {unit for line in wanted for unit in line.split()}
    assert {unit[5:-8] for unit in units if unit.startswith("gyre@")} == set(planned())
    assert {unit for unit in units if unit.startswith("gyre-")} == {path.name for path in UNITS.glob("gyre-*.service")}
    for folder in UNITS.glob("*.d"):
        assert folder.name.removesuffix(".d") in units


def test_every_variable_that_is_set_is_read(compose: dict[str, Any]) -> None:
    texts = [path.read_text() for path in (ROOT / "services").rglob("*.py")]
    texts += [
        (DEPLOY / "nats" / "nats-server.conf").read_text(),
        *(path.read_text() for path in UNITS.glob("*.service")),
    ]
    texts.append((DEPLOY / "container" / "ready").read_text())
    known = set(re.findall(r"GYRE_[A-Z_]+", "".join(texts)))
    used = {name for service in compose["services"].values() for name in service["environment"]}
    used |= {name for name in environment() if name.startswith("GYRE_")}
    assert used <= known


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (apt-get install systemd)"
)
def test_units_verify(tmp_path: Path) -> None:
    shutil.copytree(UNITS, tmp_path, dirs_exist_ok=True)
    here = Path(sys.executable).parent
    for path in tmp_path.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/qwengyre/bin", str(here)))
    names = ["gyre.target", *(path.name for path in UNITS.glob("gyre-*.service"))]
    names += [f"gyre@{name}.service" for name in planned()]
    for name in names:
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to("gyre@.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", *(f"./{name}" for name in names)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "unit", [*sorted(UNITS.glob("gyre-*.service")), UNITS / "gyre@.service"], ids=lambda path: path.name
)
def test_every_unit_runs_with_little(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for setting in (
        "User=gyre",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "PrivateTmp=yes",
    ):
        assert setting in lines, f"{unit.name} lacks {setting}"


def test_nats_server_accepts_its_configuration(tmp_path: Path) -> None:
    variables = {name: value for name, value in environment().items() if name.startswith("GYRE_NATS")}
    done = subprocess.run(
        [nats_server_binary(), "-t", "-c", DEPLOY / "nats" / "nats-server.conf"],
        env={**os.environ, **variables, "GYRE_NATS_STORE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_the_image_is_built_from_nothing_private() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    code = {"schemas", "services", "replay", "examples", "deploy"}
    assert set(allowed) == {"pyproject.toml", "constraints.txt", *code, "state", "state/image"}
