"""Signatures of the commands that run a mesh and steer it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from services.cli.signatures.arguments import STATE, Flag, Json, Overrides, Run, State


def run(
    file: Path,
    /,
    *,
    overrides: Overrides = None,
    state: State = STATE,
    json: Json = False,
    dry_run: Annotated[bool, Flag] = False,
    no_progress: Annotated[bool, Flag] = False,
    chaos: Annotated[int | None, Parameter(name="--chaos")] = None,
    new: Annotated[bool, Flag] = False,
) -> int:
    """Start the mesh, train, and show progress until the run is over. A run that was stopped goes on.

    Parameters
    ----------
    file
        The configuration, TOML.
    dry_run
        Print what would run, and start nothing.
    no_progress
        Show only the summary.
    chaos
        Kill every process once meanwhile, at moments drawn from this seed, to see that the run survives it.
    new
        Begin another run, even if the newest is not finished; that one is over then.
    """
    from services.cli.run_command import dry, train

    if dry_run:
        return dry(file, overrides or [], state=state, json=json, chaos=chaos)
    return train(file, overrides or [], state=state, json=json, quiet=no_progress, chaos=chaos, new=new)


def up(
    file: Path,
    /,
    *,
    overrides: Overrides = None,
    state: State = STATE,
    json: Json = False,
    new: Annotated[bool, Flag] = False,
) -> int:
    """Start the mesh in the background. A run that was stopped goes on.

    Parameters
    ----------
    file
        The configuration, TOML.
    new
        Begin another run, even if the newest is not finished; that one is over then.
    """
    from services.cli.mesh_commands import up_command

    return up_command(file, overrides or [], state=state, json=json, new=new)


def down(*, state: State = STATE, json: Json = False) -> int:
    """End what runs in the background, cleanly. Its run can go on later."""
    from services.cli.mesh_commands import down_command

    return down_command(state=state, json=json)


def status(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Show services, their health, and how far the run is."""
    from services.cli.mesh_commands import status_command

    return status_command(run, state=state, json=json)


def pause(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Place no more executions and let no cell join training; what runs goes on."""
    from services.cli.operator_commands import pause_command

    return pause_command(run, state=state, json=json)


def resume(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Go on with a run that was paused."""
    from services.cli.operator_commands import resume_command

    return resume_command(run, state=state, json=json)


def drain(name: str, /, *, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Empty a cell: it takes nothing new, and what it has moves away as others have room.

    Parameters
    ----------
    name
        The cell, for example cell-2; never the core.
    """
    from services.cli.operator_commands import drain_command

    return drain_command(name, run, state=state, json=json)


def add(name: str | None = None, /, *, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Add one more cell to the run, or let one that was drained serve again.

    Parameters
    ----------
    name
        The cell that was drained; left out, the next one after those that the run has.
    """
    from services.cli.operator_commands import add_command

    return add_command(name, run, state=state, json=json)


def doctor(file: Path | None = None, /, *, state: State = STATE, json: Json = False) -> int:
    """Check what this machine must have. Exit code 3 when something required is missing.

    Parameters
    ----------
    file
        A configuration whose ports, transport, policy and tasks are to be checked too.
    """
    from services.cli.doctor_command import doctor_command

    return doctor_command(file, state=state, json=json)
