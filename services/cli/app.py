"""The command `gyre`: where its commands are put together, and its exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from cyclopts import App

from schemas.errors import GyreError
from services.cli.signatures import measuring, recorded, running, serving

app = App(
    name="gyre",
    help="Elastic reinforcement learning for agents whose executions last hours.",
    help_format="plaintext",
    version_flags=["--version"],
    result_action="return_value",
)
cell = App(name="cell", help="Take a cell out of service, back in, or add one.")

COMMANDS: tuple[Callable[..., int], ...] = (
    *(running.run, running.up, running.down, running.status),
    *(recorded.events, recorded.export, recorded.replay, recorded.check, recorded.timeline),
    *(running.doctor, running.pause, running.resume),
    *(measuring.bench, measuring.fault, measuring.simulate),
    *(serving.schema, serving.service, recorded.tensorboard),
)
for command in COMMANDS:
    app.command(command)
app.command(serving.open_, name="open")
app.command(cell)
cell.command(running.drain)
cell.command(running.add)


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
        code = _unread()
    except SystemExit as error:
        # Rich ends the process with 1 then, which says something else here.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        code = _unread()
    sys.exit(code if isinstance(code, int) else 0)


def _unread() -> int:
    """The reader of our output has gone; what it wanted it has."""
    sys.stderr.close()
    return 0
