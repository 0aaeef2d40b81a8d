"""The command `gyre`. Each command imports what it needs when it runs, so that help answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from schemas.errors import GyreError

app = App(
    name="gyre",
    help="Elastic reinforcement learning for agents whose executions last hours.",
    help_format="plaintext",
    version_flags=["--version"],
    result_action="return_value",
)

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object.")]
State = Annotated[
    Path,
    Parameter(name="--state", env_var="GYRE_STATE", help="Folder of caches, logs, checkpoints and the event store."),
]
Nats = Annotated[str, Parameter(name="--nats", env_var="GYRE_NATS", help="URL of the event bus.")]
Run = Annotated[str | None, Parameter(name="--run", help="Run id; the newest when left out.")]
Overrides = Annotated[
    list[str] | None, Parameter(name="--set", negative=(), help="Override a key of the configuration: a.b=value.")
]
Flag = Parameter(negative=())
STATE = Path("state")


@app.command
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


@app.command
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


@app.command
def down(*, state: State = STATE, json: Json = False) -> int:
    """End what runs in the background, cleanly. Its run can go on later."""
    from services.cli.mesh_commands import down_command

    return down_command(state=state, json=json)


@app.command
def status(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Show services, their health, and how far the run is."""
    from services.cli.mesh_commands import status_command

    return status_command(run, state=state, json=json)


@app.command
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


@app.command
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


@app.command
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


@app.command
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


@app.command
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


@app.command
def doctor(file: Path | None = None, /, *, state: State = STATE, json: Json = False) -> int:
    """Check what this machine must have. Exit code 3 when something required is missing.

    Parameters
    ----------
    file
        A configuration whose ports, transport, policy and tasks are to be checked too.
    """
    from services.cli.doctor_command import doctor_command

    return doctor_command(file, state=state, json=json)


@app.command
def pause(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Place no more executions and let no cell join training; what runs goes on."""
    from services.cli.operator_commands import pause_command

    return pause_command(run, state=state, json=json)


@app.command
def resume(*, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Go on with a run that was paused."""
    from services.cli.operator_commands import resume_command

    return resume_command(run, state=state, json=json)


cell = App(name="cell", help="Take a cell out of service, back in, or add one.")
app.command(cell)


@cell.command
def drain(name: str, /, *, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Empty a cell: it takes nothing new, and what it has moves away as others have room.

    Parameters
    ----------
    name
        The cell, for example cell-2; never the core.
    """
    from services.cli.operator_commands import drain_command

    return drain_command(name, run, state=state, json=json)


@cell.command
def add(name: str | None = None, /, *, run: Run = None, state: State = STATE, json: Json = False) -> int:
    """Add one more cell to the run, or let one that was drained serve again.

    Parameters
    ----------
    name
        The cell that was drained; left out, the next one after those that the run has.
    """
    from services.cli.operator_commands import add_command

    return add_command(name, run, state=state, json=json)


@app.command
def bench(
    name: str,
    /,
    *,
    file: Path = Path("examples/quickstart.toml"),
    seed: Annotated[list[int] | None, Flag] = None,
    seeds: int | None = None,
    planted: Annotated[list[str] | None, Flag] = None,
    jobs: int = 1,
    events: Annotated[list[int] | None, Flag] = None,
    log: Path = Path("tests/golden/quickstart-elastic.gyre"),
    folder: Path | None = None,
    scenario: Annotated[list[str] | None, Flag] = None,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Measure what the project promises, and prove the logs of the runs.

    Parameters
    ----------
    name
        quickstart: three seeds and a run that learns nothing. chaos: two seeds, every process killed once in each.
        fish: planted bugs, and how many seeds of the fault net find each. scheduler: events a second of its decider,
        with 10 cells and with 10,000. proxy: what a model call costs in it. replay: how fast and in how much memory logs
        are decided again. scenarios: every shipped scenario at full size, simulated and decided again. what-if: recorded
        runs asked about other parameters, beside fresh simulations.
    file
        The configuration that is run.
    seed
        A seed to run; may be given again. For scenarios and what-if the seed, 0 unless it is said.
    seeds
        How many seeds to run, from 0 on; for fish, within how many a planted bug must be found.
    planted
        For fish: the beginning of a planted bug's name; may be given again.
    jobs
        For fish: how many planted bugs are looked at together; 0 for one a processor.
    events
        For replay: length of a simulated log; may be given again.
    log
        For replay: the log of a real run, whose mix of events the deciders' bare rate is measured with. For what-if: one
        that unchanged parameters must give back.
    folder
        For replay: where simulated logs are kept, and found when they are there. For scenarios: where they are kept.
    scenario
        For scenarios and what-if: its name, or the path of a file; may be given again.
    """
    if name == "what-if":
        from services.cli.bench_what_if import what_if_bench

        return what_if_bench(scenario or [], log, seed=(seed or [0])[0], json=json)
    if name == "scenarios":
        from services.cli.bench_scenarios import scenarios_bench

        return scenarios_bench(scenario or [], seed=(seed or [0])[0], folder=folder, json=json)
    if name == "proxy":
        from services.cli.bench_proxy import proxy_bench

        return proxy_bench(json=json)
    if name == "replay":
        from services.cli.bench_replay import replay_bench

        return replay_bench(log, sizes=events or [], folder=folder, json=json)
    if name == "scheduler":
        from services.cli.bench_scheduler import scheduler_bench

        return scheduler_bench(json=json)
    if name == "fish":
        from services.cli.fish_command import fish_command

        return fish_command(seeds=seeds, named=planted or [], jobs=jobs, json=json)
    from services.cli.bench_command import bench_command

    return bench_command(name, file=file, seeds=seed, count=seeds, state=state, json=json)


@app.command
def fault(
    *,
    seed: Annotated[int | None, Flag] = None,
    seeds: Annotated[int | None, Flag] = None,
    first: int = 0,
    plan: Annotated[Path | None, Flag] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    jobs: int = 1,
    plans: Path = Path("state/fault"),
    json: Json = False,
) -> int:
    """Run the whole mesh under a virtual clock with faults from a seed, and check every invariant.

    Parameters
    ----------
    seed
        One run: print what struck it and what was violated.
    seeds
        Many runs, from the seed `first` on; each that violates something is made small.
    first
        First of many seeds.
    plan
        Run a plan that was written before.
    output
        Write the log of the one run to this file.
    jobs
        Processes that share the seeds; 0 takes one for each core.
    plans
        Folder for the plans of what fails.
    """
    from services.cli.fault_command import fault_command

    return fault_command(
        seed=seed, seeds=seeds, first=first, plan=plan, output=output, jobs=jobs, plans=plans, json=json
    )


@app.command
def simulate(
    file: str = "",
    /,
    *,
    seed: int = 0,
    overrides: Overrides = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    timeline: Annotated[Path | None, Flag] = None,
    parameters: Annotated[bool, Flag] = False,
    suite: str = "",
    fit: Annotated[bool, Flag] = False,
    only: str = "",
    seeds: int = 10,
    jobs: int = 0,
    surfaces: Path = Path("state/simulate/surfaces.json"),
    json: Json = False,
) -> int:
    """Play a scenario on a virtual clock: the real deciders in a modelled world, hours of a cluster in seconds.

    Parameters
    ----------
    file
        A scenario, TOML, or the name of one that is shipped: nl2repobench-122b, E0, ...
    seed
        Durations and scores are drawn from it.
    output
        Write the run's log to this file, for gyre check and gyre replay.
    timeline
        Draw roles of cells, batches and waterlevel over time to this file: .svg, .html or .json.
    parameters
        Print the numbers of the modelled world and where they come from, and play nothing.
    suite
        Many runs beside the paper's numbers: ablation, speedups, staleness, headroom.
    fit
        Fit the world's free numbers to the ablation, for the suite of that name. Takes hundreds of runs.
    only
        Of the suites speedups and headroom: scenarios whose names begin so.
    seeds
        Of a suite: how many seeds each scenario is played with.
    jobs
        Processes that share the runs of a suite; 0 takes one for each core.
    surfaces
        What --fit measured, for the suite ablation, which measures it itself where that is missing or past.
    """
    from services.cli.simulate_command import one_of, parameters_command, simulate_command
    from services.cli.simulate_suites import fit_command, suite_command

    chosen = one_of(**{"FILE": file, "--suite": suite, "--fit": fit})
    if chosen == "--fit":
        return fit_command(jobs=jobs, surfaces=surfaces, json=json)
    if chosen == "--suite":
        return suite_command(suite, only=only, seeds=seeds, jobs=jobs, surfaces=surfaces, json=json)
    if parameters:
        return parameters_command(file, overrides or [], json=json)
    return simulate_command(file, overrides or [], seed=seed, output=output, timeline=timeline, json=json)


@app.command
def schema(*, json: Json = False, markdown: Annotated[bool, Flag] = False) -> int:
    """Print the table of event kinds; with --json, the JSON schema of their data.

    Parameters
    ----------
    markdown
        Print the page docs/events.md.
    """
    from services.cli.schema_command import schema_command

    return schema_command(json=json, markdown=markdown)


@app.command(name="open")
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


@app.command
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


@app.command
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


def main(argv: list[str] | None = None) -> None:
    """Entry point. An error of ours is its sentence and its remedy on standard error, and its exit code."""
    try:
        code = app(argv)
    except GyreError as error:
        print(f"gyre: {error}", file=sys.stderr)  # noqa: T201
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone; what it wanted it has.
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
