"""Signatures of the commands by which others start our services, and read our vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from services.cli.signatures.arguments import STATE, Flag, Json, Nats, Overrides, State


def schema(*, json: Json = False, markdown: Annotated[bool, Flag] = False) -> int:
    """Print the table of event kinds; with --json, the JSON schema of their data.

    Parameters
    ----------
    markdown
        Print the page docs/events.md.
    """
    from services.cli.schema_command import schema_command

    return schema_command(json=json, markdown=markdown)


def open_(
    file: Path, /, *, nats: Nats = "", overrides: Overrides = None, state: State = STATE, json: Json = False
) -> int:
    """Open a run for services that others start, as compose and systemd do; while one is open, say which.

    Parameters
    ----------
    file
        The configuration, TOML.
    nats
        URL of the event bus; bus.url of the configuration when left out.
    """
    from services.cli.open_command import open_command

    return open_command(file, overrides or [], nats=nats, state=state, json=json)


def service(
    name: str,
    /,
    *,
    run: Annotated[str | None, Parameter(name="--run", env_var="GYRE_RUN")] = None,
    nats: Nats,
    state: State = STATE,
    here: Annotated[Path, Parameter(env_var="GYRE_HERE")] = Path(),
    cell: str = "",
    host: Annotated[str, Parameter(env_var="GYRE_HOST")] = "127.0.0.1",
    port: Annotated[int, Parameter(env_var="GYRE_PORT")] = 0,
) -> int:
    """Run one service of a run in this process.

    Parameters
    ----------
    name
        scheduler, proxy, harness, rollout, evaluator, trajectories, packer or trainer; or with its cell, rollout-cell-0.
    run
        The run that it serves; left out, the one that `gyre open` opened, as soon as there is one.
    here
        Folder of the configuration file.
    cell
        Its cell, for rollout and trainer.
    host
        Where it listens, and the name by which the other services reach it.
    port
        Port of its HTTP server; 0 takes a free one.
    """
    from services.cli.service_command import service_command

    return service_command(name, run=run, nats=nats, state=state, here=here, cell=cell, host=host, port=port)
