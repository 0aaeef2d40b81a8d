"""The configuration of a run: one TOML file, decoded strictly, with every key documented here and nowhere else.

Symbols are the paper's: `N` executions a group, `B` groups a training step, `mu` steps a burst, `phi` extra dispatch in
units of `B`. `load` reads a file and applies `--set a.b=c` overrides; `validate` checks what types cannot say. An unknown
key is a ConfigError that names the nearest known one.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from schemas.errors import ConfigError
from schemas.ids import in_pool


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused. (msgspec does not inherit `kw_only`, so each class says it.)"""


class Cells(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 3
    """K: elastic cells; `cell-0` is the core."""
    capacity: int = 16
    """C_e: executions that one cell serves in the rollout role (equation 1)."""
    trainable: int = 1
    """How many cells, from the core on, may take the training role. With `async` they have it for the whole run."""

    pool: int = 0
    """Engines of a separate pool that only serves, `pool-0` and so on; they never change their role."""
    pool_capacity: int = 16
    """Executions that one of them serves: C_s = pool * pool_capacity."""

    @property
    def C_s(self) -> int:
        """Executions that the separate pool serves (equation 1)."""
        return self.pool * self.pool_capacity

    def capacity_of(self, name: str) -> int:
        """Executions that the cell or pool engine of this name serves."""
        return self.pool_capacity if in_pool(name) else self.capacity

    def trainers(self, added: int) -> int:
        """How many may train once `added` more cells belong to the run: where all may, those too."""
        return self.trainable + (added if self.trainable == self.count else 0)


class Scheduler(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strategy: Literal["elastic", "colocate", "async"] = "elastic"
    """Who trains when. `elastic`, the paper's: one cell after the other as outstanding work fits without it. `colocate`:
    all cells together, once what is outstanding fits without them. `async`: the first `cells.trainable` cells train for
    the whole run, the others serve."""
    N: int = 16
    """Executions a group that count: its baseline, and the divisor of the loss."""
    oversample: int = 0
    """Executions that a group is given beside its N. It closes when N of them are valid, and the others are cancelled; so a
    few that fail, or last long, hold no group up. They take slots like all others until then."""
    B: int = 32
    """Groups a training step."""
    mu: int = 3
    """Training steps a burst; weights are published after the last."""
    phi: float = 0.5
    """Extra dispatch in units of B; `phi * B` must be an integer."""
    rho_min: float = 0.125
    """Least share of B that must be ready and unclaimed before a cell may join training."""
    tau_s: float = 60.0
    """Seconds for which the supply check must hold without a break."""
    streaming: bool = True
    """Whether a batch is trained while its groups get ready. Off: a burst's first micro-step waits until all of its
    `mu * B` groups are ready."""

    @property
    def group_size(self) -> int:
        """Executions that are dispatched for a group: what d, w and (3) count."""
        return self.N + self.oversample


class Policy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "policy"
    """Folder with `config.json`, `model.safetensors` and `tokenizer.json`; relative to the cache folder, or absolute."""


class Tasks(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "tasks"
    """Folder of task folders in Harbor's format; relative to the cache folder, or absolute."""


class Eval(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""
    """Folder of held-out tasks in Harbor's format, like `tasks.path`; none of them may be a training task."""
    every: int = 0
    """Training steps between two measurements, looked at when weights are published. The starting and the last version
    are measured too. 0: nothing is measured."""
    executions: int = 16
    """Executions of one measurement: the held-out tasks in a seeded order, the same each time, repeated if fewer."""
    temperature: float | None = None
    """Sampling temperature of their calls, 0 for the most likely token; left out, `proxy.temperature`."""


class Prepare(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    makes: str
    """File or folder under the cache folder that the command makes; when it is there already the command is not run."""
    command: list[str]
    """`{python}`, `{out}` and `{here}` (folder of the configuration file) are filled in."""


class Harness(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: list[str]
    """Program of the harness; `{python}`, `{here}`, `{instruction}` (a file) and `{report}` (a file) are filled in."""
    env: dict[str, str] = {}
    """Added to the small clean environment of the harness. `{env:NAME}` stands for a variable of the harness service's
    own environment: write secrets so, since the configuration goes into the log."""
    model: str = "policy"
    """Model name that the harness is told."""
    timeout_s: float = 600.0
    """Harness time-out: the execution is stopped and what it left is scored."""
    overall_timeout_s: float = 900.0
    """Budget of the whole execution, evaluation included. A model call for which no engine is ready waits as long as it
    lasts."""


class Proxy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 1
    """Proxy processes. One is called `proxy`; several are `proxy-0` and so on, each with executions of its own, and each
    serves and seals those of the others too."""
    port: int = 0
    """0 takes a free port. Of several proxies the n-th takes the n-th port from here on."""
    temperature: float = 1.0
    """Sampling temperature of every call (but see `eval.temperature`); what the harness asks for is recorded and
    overridden."""
    max_new_tokens: int = 4096
    """Upper bound on the answer's length; a harness may ask for less."""
    ping_s: float = 10.0
    """Seconds between keep-alive pings while an answer is being made; at most 15."""
    grace_s: float = 30.0
    """Seconds for which generation goes on after its client left."""


class Rollout(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapter: Literal["reference"] = "reference"
    """Which engine serves a cell in the rollout role."""
    dtype: Literal["float32", "float64"] = "float32"
    context_length: int = 32768
    """Most tokens of prompt and answer together."""
    kv_tokens: int = 65536
    """Size of the KV cache in tokens."""
    threads: int = 1
    drain_s: float = 5.0
    """Seconds that a cell which leaves for training waits for its calls to move; then it aborts them itself."""
    lost_s: float = 120.0
    """Seconds for which a cell's rollout process may be unreachable; then its executions move to other cells."""
    transport: Literal["auto", "mooncake", "shared-memory"] = "auto"
    """How weights travel; `auto` prefers the Mooncake Transfer Engine and says which it took."""


class Evaluator(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int = 2
    """Evaluations that one evaluator runs at a time."""
    timeout_s: float = 120.0
    """Bound of one evaluation; past it the evaluation failed and may be retried."""


class Trajectories(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    J_max: int = 5
    """Most trajectories that one execution may contribute (section 'Trajectory sampling')."""
    database: str = ""
    """SQLAlchemy URL; empty means SQLite in the run's folder. A password is written `{env:NAME}`."""
    advantage: Literal["mean_std", "mean"] = "mean_std"
    """Group-relative advantage: (r - mean) / (std + 1e-4), or r - mean."""


class Packer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    T: int = 16384
    """Most tokens of a micro-step; an execution that is longer alone gets a micro-step of its own."""
    reorder_groups: int = 2
    """Groups that may be open for packing at a time."""
    ahead: int = 2
    """Micro-steps kept enqueued and unclaimed; the packer pulls the next group when fewer are."""


class Trainer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    ratio_cap: float = 5.0
    """Cap of the token importance ratio, without gradient."""
    clip_low: float = 0.995
    clip_high: float = 1.005
    """Interval of the execution-level sequence ratio s_i (equation 5)."""
    loss_cap: float = 100.0
    threads: int = 1
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept. The version published last is kept beside them: no run goes back behind it."""
    lost_s: float = 60.0
    """Seconds for which a satellite's trainer may be unreachable; then its batch goes on without it."""


class Bus(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = ""
    """A running NATS server; empty starts one in the state folder."""
    port: int = 0
    """Port of the server that we start; 0 takes a free port."""


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    seed: int = 0
    steps: int = 20
    """Training steps; a multiple of `mu`."""
    cells: Cells = Cells()
    scheduler: Scheduler = Scheduler()
    policy: Policy = Policy()
    tasks: Tasks = Tasks()
    eval: Eval = Eval()
    prepare: list[Prepare] = []
    harness: Harness
    proxy: Proxy = Proxy()
    rollout: Rollout = Rollout()
    evaluator: Evaluator = Evaluator()
    trajectories: Trajectories = Trajectories()
    packer: Packer = Packer()
    trainer: Trainer = Trainer()
    bus: Bus = Bus()


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Decode `path`, apply overrides of the form `a.b=value` (value in TOML, else a string), validate.

    Raises ConfigError with the file, the key and the remedy.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="give the path of a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path), remedy="correct the line named") from None
    for override in overrides or []:
        _apply(tree, override)
    return from_tree(tree, where=str(path))


def from_tree(tree: dict[str, Any], *, where: str) -> Config:
    _refuse_unknown(tree, Config, where, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=where, remedy=_correct(str(error))) from None
    validate(config, where=where)
    return config


def validate(config: Config, *, where: str) -> None:
    """Checks over several keys; raises ConfigError naming the keys and the values."""
    s, cells = config.scheduler, config.cells

    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(what, where=where, remedy=remedy)

    for key, (low, high) in _BOUNDS.items():
        section, _, field = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, field)
        # Written so that a NaN is outside of everything.
        if value is not None and not low <= value <= high:
            refuse(f"{key} = {value} is not in {_number(low)}..{_number(high)}", f"set {key} to a value between them")
    if s.N < 2:
        refuse(f"scheduler.N = {s.N}, but a group-relative advantage needs at least 2", "set scheduler.N to 2 or more")
    slots = cells.C_s + (cells.count - (cells.trainable if s.strategy == "async" else 0)) * cells.capacity
    if s.oversample and s.group_size > slots:
        refuse(
            f"scheduler.N + scheduler.oversample = {s.group_size} executions a group, but only {slots} can be served at a time",
            "what waits until others have ended replaces nobody: lower scheduler.oversample, or raise cells.capacity",
        )
    if abs(s.phi * s.B - round(s.phi * s.B)) > 1e-9:
        refuse(
            f"scheduler.phi * scheduler.B = {s.phi} * {s.B} is not a whole number of groups",
            "choose phi so that phi * B is an integer",
        )
    if config.steps % s.mu:
        refuse(f"steps = {config.steps} is not a multiple of scheduler.mu = {s.mu}", "train whole bursts")
    if not 0 < s.rho_min <= 1:
        refuse(f"scheduler.rho_min = {s.rho_min} is not in (0, 1]", "it is a share of B")
    if cells.count < 2 and not cells.pool and s.strategy != "colocate":
        refuse("cells.count = 1: nobody would serve executions while the core trains", "set cells.count to 2 or more, or cells.pool")
    if not 1 <= cells.trainable <= cells.count:
        refuse(f"cells.trainable = {cells.trainable} is not in 1..{cells.count}", "at least the core trains")
    if s.strategy == "async" and cells.trainable == cells.count and not cells.pool:
        refuse(
            f"cells.trainable = cells.count = {cells.count}: with scheduler.strategy = async nobody would ever serve",
            "set cells.trainable below cells.count, or cells.pool",
        )
    if config.eval.every and not config.eval.path:
        refuse(f"eval.every = {config.eval.every}, but eval.path names no tasks", "set eval.path, or eval.every to 0")
    if config.eval.every and config.eval.path == config.tasks.path:
        refuse(f"eval.path = tasks.path = {config.tasks.path!r}", "measure on tasks that are not trained on")
    if config.proxy.temperature <= 0:
        refuse(f"proxy.temperature = {config.proxy.temperature}", "behaviour probabilities need a temperature above 0")
    if config.proxy.port and config.proxy.port + config.proxy.count - 1 > _PORT[1]:
        refuse(
            f"proxy.port = {config.proxy.port} with proxy.count = {config.proxy.count} goes past {_PORT[1]}",
            "every proxy has a port of its own: lower proxy.port",
        )
    if not 0 < config.proxy.ping_s <= 15:
        refuse(f"proxy.ping_s = {config.proxy.ping_s}", "harnesses give up on silence: choose at most 15")
    if not config.harness.command or not config.harness.command[0]:
        refuse("harness.command is empty", "name the program of the harness")
    if not config.name:
        refuse("name is empty", "give the run's configuration a name")
    if config.rollout.kv_tokens < config.rollout.context_length:
        refuse(
            f"rollout.kv_tokens = {config.rollout.kv_tokens} is below "
            f"rollout.context_length = {config.rollout.context_length}",
            "one answer of full length must fit into the KV cache",
        )
    if config.bus.url and not config.bus.url.startswith(("nats://", "tls://", "ws://", "wss://")):
        refuse(f"bus.url = {config.bus.url!r} is no address", "write nats://HOST:PORT, or leave it empty")
    # The configuration is in the log, and a log can be shared.
    if urlsplit(config.bus.url).password:
        refuse("bus.url holds a password, which would go into the log", "name the server without credentials")
    if "{env:" not in (urlsplit(config.trajectories.database).password or "{env:"):
        refuse("trajectories.database holds a password, which would go into the log", "write {env:NAME} in its place")
    for name, value in config.harness.env.items():
        if _SECRET.search(name) and value and "{env:" not in value:
            refuse(
                f"harness.env.{name} looks like a secret, which would go into the log",
                f"write {{env:{name}}} in its place, and give {name} to the harness service",
            )
    if not all(0 <= beta < 1 for beta in config.trainer.betas):
        refuse(f"trainer.betas = {list(config.trainer.betas)} are not in [0, 1)", "they are decay rates of averages")
    if config.harness.overall_timeout_s < config.harness.timeout_s:
        refuse("harness.overall_timeout_s is below harness.timeout_s", "the overall budget includes the harness's")
    if not config.trainer.clip_low <= 1 <= config.trainer.clip_high:
        refuse("trainer.clip_low <= 1 <= trainer.clip_high does not hold", "the interval is around a ratio of 1")


_SECRET = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of variables that hold secrets."""
_COUNT = (1, 2**31 - 1)
_PORT = (0, 2**16 - 1)
_NOT_NEGATIVE = (0.0, sys.float_info.max)
_PERIOD = (1e-3, 1e9)
"""Seconds that must pass; the upper end keeps sums in microseconds whole."""
_BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "steps": _COUNT,
    "cells.count": _COUNT,
    "cells.capacity": _COUNT,
    "cells.pool": (0, 2**31 - 1),
    "cells.pool_capacity": _COUNT,
    "scheduler.N": _COUNT,
    "scheduler.oversample": (0, 2**31 - 1),
    "scheduler.B": _COUNT,
    "scheduler.mu": _COUNT,
    "scheduler.phi": (0, 2**31 - 1),
    "scheduler.tau_s": (0, 1e9),
    "eval.every": (0, 2**31 - 1),
    "eval.executions": _COUNT,
    "eval.temperature": (0, 1e6),
    "harness.timeout_s": _PERIOD,
    "harness.overall_timeout_s": _PERIOD,
    "proxy.count": (1, 1024),
    "proxy.port": _PORT,
    "proxy.temperature": (0, 1e6),
    "proxy.max_new_tokens": _COUNT,
    "proxy.grace_s": (0, 1e9),
    "rollout.context_length": _COUNT,
    "rollout.kv_tokens": _COUNT,
    "rollout.threads": _COUNT,
    "rollout.drain_s": (0, 1e9),
    "rollout.lost_s": _PERIOD,
    "evaluator.workers": _COUNT,
    "evaluator.timeout_s": _PERIOD,
    "trajectories.J_max": _COUNT,
    "packer.T": _COUNT,
    "packer.reorder_groups": _COUNT,
    "packer.ahead": _COUNT,
    "trainer.lr": _NOT_NEGATIVE,
    "trainer.weight_decay": _NOT_NEGATIVE,
    "trainer.grad_clip": _NOT_NEGATIVE,
    "trainer.ratio_cap": _NOT_NEGATIVE,
    "trainer.loss_cap": _NOT_NEGATIVE,
    "trainer.clip_low": _NOT_NEGATIVE,
    "trainer.clip_high": _NOT_NEGATIVE,
    "trainer.threads": _COUNT,
    "trainer.keep_checkpoints": _COUNT,
    "trainer.lost_s": _PERIOD,
    "bus.port": _PORT,
}
"""Least and greatest value of every number."""


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} has no '='", remedy="write --set section.key=value")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {key}: {part!r} is a value, not a section", remedy="check the key's path")
    tree[last] = value


_hints = functools.cache(typing.get_type_hints)
"""Fields of a section and their types."""


def _refuse_unknown(tree: dict[str, Any], kind: type, where: str, prefix: str) -> None:
    hints = _hints(kind)
    for key, value in tree.items():
        if key not in hints:
            alike = [known for known in hints if known.lower() == key.lower()]
            near = alike or difflib.get_close_matches(key, hints, 1) or _elsewhere(key)
            remedy = f"did you mean {prefix + near[0] if near[0] in hints else near[0]!r}?" if near else f"known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {prefix + key!r}", where=where, remedy=remedy)
        for inner in _structs(hints[key]):
            rows = value if isinstance(value, list) else [value]
            for row in rows:
                if isinstance(row, dict):
                    _refuse_unknown(row, inner, where, f"{prefix}{key}.")


def _correct(error: str) -> str:
    """What to do about a value of the wrong type; where only some words are allowed, which."""
    allowed: Any = Config
    for part in error.rpartition("`$.")[2].rstrip("`").split("."):
        kind = next(iter(_structs(allowed)), None)
        allowed = _hints(kind).get(part) if kind else None
    if typing.get_origin(allowed) is typing.Literal:
        return f"choose from {', '.join(map(str, typing.get_args(allowed)))}"
    return "correct the value; schemas/config.py documents every key"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _structs(hint: Any) -> list[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, Section):
        return [hint]
    return [inner for arg in typing.get_args(hint) for inner in _structs(arg)]


def _elsewhere(key: str) -> list[str]:
    """A key that is known in another section, written with its section."""
    for section, hint in _hints(Config).items():
        for inner in _structs(hint):
            if key in _hints(inner):
                return [f"{section}.{key}"]
    return []
