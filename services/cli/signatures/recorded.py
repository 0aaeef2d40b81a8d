"""Signatures of the commands that read a run, or its exported log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from services.cli.signatures.arguments import STATE, Flag, Json, Run, State


def events(
    *,
    run: Run = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=())] = False,
    kind: Annotated[list[str] | None, Flag] = None,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Print the events of a run, one a line: sequence, seconds, kind, what it is about, who says it, its data, cut.

    Parameters
    ----------
    follow
        Go on until the run is over.
    kind
        Only events of this kind; a pattern such as cell.* will do, and it may be given again.
    """
    from services.cli.log_commands import events_command

    return events_command(run, follow=follow, kinds=kind or [], state=state, json=json)


def export(
    run: str | None = None,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Write a run's whole log to one file.

    Parameters
    ----------
    run
        Run id; the newest when left out.
    output
        The file to write; RUN.gyre when left out.
    """
    from services.cli.log_commands import export_command

    return export_command(run, output, state=state, json=json)


def replay(
    *paths: Path,
    follow: Annotated[str, Parameter(name=["--follow", "-f"])] = "",
    decider: Annotated[list[str] | None, Flag] = None,
    at: str = "",
    until: str = "",
    step: Annotated[bool, Flag] = False,
    why: str = "",
    diff: Annotated[bool, Flag] = False,
    changes: Annotated[list[str] | None, Parameter(name="--with", negative=())] = None,
    sweep: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Decide again from recorded runs and compare every decision. Exit code 1 when one differs, 2 for an unusable file.

    With one of --at, --until, --step, --why it debugs one recorded run instead: where it stood, and why; with --diff it
    compares two. With --with it asks what had happened under other parameters.

    Parameters
    ----------
    paths
        What `gyre export` wrote; a folder stands for all logs in it.
    follow
        Instead of a file: a run that goes on, decided again beside it until it is over.
    decider
        Only this decider; may be given again.
    at
        Show the scheduler's state after this event (1234), or at this time (1h30m, 2026-01-02T03:04:05Z).
    until
        Show the state where this begins to hold, for example 'w <= 12'; an unknown name lists them all.
    step
        Go decision by decision, from --at on and to --until; a key goes on, s shows the state, q ends.
    why
        Tell why a cell (cell-2) was in its role at the end or --at, and what held it back; or the life of an execution
        (e-000012.03), a group (g-000012), a batch (b-000003), a micro-step (m-000003.007).
    diff
        Compare two logs: configuration, the first decision that parts, when each step was made, idle cells, figures.
    changes
        A parameter that is another one, rho_min=0.3 or strategy=colocate: from where decisions part, the recorded world goes
        on under the new ones. May be given again.
    sweep
        The same over a range of one parameter, rho_min=0.1:0.9:0.1 or strategy=elastic,colocate; --with changes others.
    output
        With --with: write the log that comes out to this file. With --sweep: the picture, .svg.
    """
    from services.cli.replay_command import refuse_both, replay_command

    if changes or sweep:
        from services.cli.what_if_command import refuse_others, sweep_command, what_if_command

        refuse_others(at=at, until=until, step=step, why=why, diff=diff, follow=follow, decider=decider)
        if sweep:
            return sweep_command(paths, changes or [], sweep, output=output, json=json)
        return what_if_command(paths, changes or [], output=output, json=json)
    if at or until or step or why or diff:
        from services.cli.debug_command import debug_command, refuse_deciding

        refuse_deciding(follow, decider or [])
        if diff:
            from services.cli.diff_command import diff_command

            return diff_command(paths, alone=not (at or until or step or why), json=json)
        return debug_command(paths, at=at, until=until, step=step, why=why, json=json)
    refuse_both(paths, follow)
    if follow:
        from services.cli.replay_follow import follow_command

        return follow_command(follow, decider or [], state=state, json=json)
    return replay_command(paths, decider or [], json=json)


def check(file: Path, /, *, invariant: Annotated[list[str] | None, Flag] = None, json: Json = False) -> int:
    """Check the invariants of an exported log. Exit code 1 when one is violated.

    Parameters
    ----------
    file
        What `gyre export` wrote.
    invariant
        Only this invariant; may be given again.
    """
    from services.cli.log_commands import check_command

    return check_command(file, invariant or [], json=json)


def timeline(
    file: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    title: str = "",
    json: Json = False,
) -> int:
    """Draw an exported log: roles of cells, waterlevel and capacity, ready groups, micro-steps, publications.

    Parameters
    ----------
    file
        What `gyre export` or `gyre simulate -o` wrote.
    output
        The file to write: .svg is a picture, .html a page to look around in, .json what both are drawn from.
    title
        What stands above it; the run's name when left out.
    """
    from services.cli.timeline_command import timeline_command

    return timeline_command(file, output, title=title, json=json)


def tensorboard(
    run: str | None = None,
    *,
    logdir: Path,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=())] = False,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Write a run's curves from its log, for TensorBoard. Written anew each time: nothing is doubled.

    Parameters
    ----------
    run
        Run id; the newest when left out.
    logdir
        Folder of TensorBoard; the run's curves go to a folder of its own in it.
    follow
        Wait for a run, and go on until it is over.
    """
    from services.cli.tensorboard_command import tensorboard_command

    return tensorboard_command(run, logdir=logdir, follow=follow, state=state, json=json)
