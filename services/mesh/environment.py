"""Secrets stay out of LOG: a configured value names an environment variable, and the service that needs it fills it in.

    [harness.env]
    API_KEY = "{env:MY_KEY}"

The configuration lies in `run.started`, and a log can be shared; so only the name does.
"""

from __future__ import annotations

import os
import re

from schemas.errors import ConfigError

_PLACE = re.compile(r"\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def fill(text: str, *, key: str) -> str:
    """`text` with every `{env:NAME}` replaced. Raises ConfigError naming the configuration key and the variable."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise ConfigError(f"the environment variable {name} is not set", where=key, remedy=f"export {name} first")
        return os.environ[name]

    return _PLACE.sub(value, text)
