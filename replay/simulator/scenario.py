"""A scenario: a run's configuration, and the world that it runs in. TOML, decoded strictly.

```toml
base = "nl2repobench-122b.toml"   # optional: another scenario, whose keys hold where this one says nothing
title = "one line for people"
[run]     # the configuration of a run, `schemas.config`
[world]   # the modelled world, `World` below
[origin]  # given, assumed, fitted: every key of the world is in exactly one of the three lists
[paper]   # what the paper reports of it, for tables
```

`given` is printed in the paper, `fitted` was chosen so that the simulation meets something printed there, `assumed` is
neither. What a scenario says of the world is therefore never taken for a measurement.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from schemas.config import Config
from schemas.config_checks import validate
from schemas.config_file import from_tree
from schemas.errors import ConfigError

FOLDER = Path(__file__).parent.parent / "scenarios"
"""The scenarios that are shipped."""
ABLATION = ("A0", "A1", "A2", "A3", "C0", "C1", "C2", "C3", "E0", "E1", "E2")
"""Rows of the paper's scheduling ablation."""


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is modelled. Hours (`_h`) where people think in hours, seconds (`_s`) elsewhere."""

    cell_nodes: float
    """Nodes of one elastic cell."""
    pool_nodes: float = 0.0
    """Nodes of one engine of the separate rollout pool."""
    duration_scale: float = 1.0
    """Factor on every duration below, the ceilings excepted."""
    median_h: float
    """m: median duration of an execution, from its start to its end."""
    group_sigma: float
    """s_g: spread of a group's own factor; its executions share it."""
    execution_sigma: float
    """s_e: spread of an execution's own factor. Duration: min(ceiling, m exp(s_g z_group + s_e z_execution))."""
    ceiling_h: float
    """Overall time-out: the execution ends here without a reward."""
    harness_h: float
    """Executions that last longer than this count as harness time-outs; they are scored."""
    load_effect: float = 0.0
    """beta: engines run at rate 1 / (1 - beta + beta load), load = running executions over slots that serve."""
    evaluate_s: float
    """Time to score a preserved workspace; it holds no slot."""
    work_node_h: float
    """W: work of one training step in node-hours; n nodes need W / n hours for it."""
    shared_work: float = 1.0
    """Factor on W where the cells that train also serve (every strategy but `async`): what giving memory up and taking
    it back costs a step."""
    step_s: float
    """One optimizer step: reduction, update, checkpoint, broadcast."""
    whole_batch_s: float = 0.0
    """Added to every step of a run that does not stream."""
    publish_s: float
    """From the end of a burst until every engine serves its weights."""
    to_train_s: float
    """A cell's way from rollout to training."""
    to_rollout_s: float
    """A cell's way back."""
    pull_s: float
    """A satellite's pull of the core's weights, on its way to training."""
    execution_tokens: int = 1000
    """Tokens of an execution's one admitted row; with `run.packer.T` it sets how coarse micro-steps are."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where each number of the world comes from."""

    given: list[str] = []
    assumed: list[str] = []
    fitted: list[str] = []


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the paper reports."""

    hours: float = 0.0
    """Hours for all steps; 0 where it reports none."""
    note: str = ""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    run: Config
    world: World
    origin: Origin
    paper: Paper = Paper()

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def nodes(self) -> float:
        """Nodes of all cells and of the pool."""
        cells = self.run.cells
        return cells.count * self.world.cell_nodes + cells.pool * self.world.pool_nodes

    @property
    def slots(self) -> int:
        """Executions that all engines together serve, when none of them trains."""
        cells = self.run.cells
        return cells.count * cells.capacity + cells.C_s

    def origin_of(self, key: str) -> str:
        return next(name for name in ("given", "assumed", "fitted") if key in getattr(self.origin, name))


def load(name: str | Path, overrides: list[str] | None = None) -> Scenario:
    """A scenario file, or the name of one that is shipped. Overrides are `run.a.b=value` and `world.key=value`, in TOML.

    Raises ConfigError that names file, key and remedy.
    """
    path = find(name)
    tree = _tree(path)
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r} has no '='", remedy="write --set world.key=value")
        _put(tree, key.strip().split("."), _value(text))
    return from_mapping(tree, where=str(path))


def find(name: str | Path) -> Path:
    """The file of this path; else the shipped scenario of this name."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = {each.stem: each for each in sorted(FOLDER.rglob("*.toml"))}
    if str(name) in shipped:
        return shipped[str(name)]
    near = difflib.get_close_matches(str(name), shipped, 1)
    remedy = f"did you mean {near[0]}?" if near else f"give a file, or one of {', '.join(shipped)}"
    raise ConfigError("no such scenario", where=str(name), remedy=remedy)


def from_mapping(tree: dict[str, Any], *, where: str) -> Scenario:
    """Decodes and checks. Raises ConfigError."""
    tree = dict(tree)
    if "run" not in tree:
        raise ConfigError("there is no section [run]", where=where, remedy="write the run's configuration there")
    world, run = tree.get("world", {}), tree.pop("run")
    for key in world:
        if key not in World.__struct_fields__:
            near = difflib.get_close_matches(key, World.__struct_fields__, 1)
            raise ConfigError(
                f"unknown key 'world.{key}'",
                where=where,
                remedy=f"did you mean 'world.{near[0]}'?" if near else f"known: {', '.join(World.__struct_fields__)}",
            )
    run.setdefault("harness", {"command": ["simulated"], **_timeouts(world)})
    config = from_tree(run, where=where)
    try:
        scenario = msgspec.convert({**tree, "run": msgspec.to_builtins(config)}, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=where, remedy="replay/simulator/scenario.py documents every key") from None
    _check(scenario, where)
    return scenario


def changed(
    scenario: Scenario,
    *,
    name: str = "",
    steps: int = 0,
    cells: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    world: dict[str, float] | None = None,
) -> Scenario:
    """The scenario with other values in its sections. Raises ConfigError when they do not go together."""
    replace = msgspec.structs.replace
    run = scenario.run
    run = replace(
        run,
        name=name or run.name,
        steps=steps or run.steps,
        cells=replace(run.cells, **cells or {}),
        scheduler=replace(run.scheduler, **scheduler or {}),
    )
    validate(run, where=run.name)
    found = replace(scenario, run=run, world=replace(scenario.world, **world or {}))
    _check(found, run.name)
    return found


def _check(scenario: Scenario, where: str) -> None:
    world, origin = scenario.world, scenario.origin
    said = [*origin.given, *origin.assumed, *origin.fitted]
    for key in World.__struct_fields__:
        if said.count(key) != 1:
            raise ConfigError(
                f"world.{key} is in {said.count(key)} lists of [origin]",
                where=where,
                remedy="name it in exactly one of given, assumed and fitted",
            )
    unknown = sorted(set(said) - set(World.__struct_fields__))
    if unknown:
        raise ConfigError(f"[origin] names {', '.join(unknown)}", where=where, remedy="name keys of [world] only")
    positive = (
        "cell_nodes",
        "duration_scale",
        "median_h",
        "ceiling_h",
        "harness_h",
        "work_node_h",
        "shared_work",
        "execution_tokens",
    )
    for key in World.__struct_fields__:
        value = getattr(world, key)
        if not (value > 0 if key in positive else value >= 0):
            raise ConfigError(f"world.{key} = {value}", where=where, remedy="it must be above 0")
    if world.load_effect >= 1:
        raise ConfigError(f"world.load_effect = {world.load_effect}", where=where, remedy="it is a share below 1")
    if scenario.run.eval.every:
        raise ConfigError(
            "run.eval.every is set", where=where, remedy="held-out measurements are not simulated: leave it 0"
        )


def _timeouts(world: dict[str, Any]) -> dict[str, float]:
    """The time-outs that the run's log states are the world's."""
    harness, overall = world.get("harness_h", 1.0), world.get("ceiling_h", 1.0)
    return {"timeout_s": 3600.0 * min(harness, overall), "overall_timeout_s": 3600.0 * overall}


def _tree(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path), remedy="correct the line named") from None
    base = tree.pop("base", None)
    if base is None:
        return tree
    other = (path.parent / base).resolve()
    if other in seen:
        raise ConfigError(f"base = {base!r} leads back to itself", where=str(path), remedy="name another scenario")
    return _merged(_tree(other, (*seen, path.resolve())), tree)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    tree = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(tree.get(key), dict)
        tree[key] = _merged(tree[key], value) if both else value
    return tree


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
