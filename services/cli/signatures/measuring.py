"""Signatures of the commands that measure, simulate and break things on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from services.cli.signatures.arguments import STATE, Flag, Json, Overrides, State


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
