"""What a configuration must fulfil beyond its types: the bounds of every number, and rules over several keys."""

from __future__ import annotations

import re
import sys
from urllib.parse import urlsplit

from schemas.config import Config
from schemas.errors import ConfigError


def validate(config: Config, *, where: str) -> None:
    """Bounds of every number, then rules over one key or several. Raises ConfigError that names keys and values."""
    s, cells = config.scheduler, config.cells

    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(what, where=where, remedy=remedy)

    for key, (low, high) in BOUNDS.items():
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
BOUNDS: dict[str, tuple[float, float]] = {
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
    "proxy.most_losses": (2, 2**31 - 1),
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


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
