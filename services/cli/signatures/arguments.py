"""What several commands take, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
