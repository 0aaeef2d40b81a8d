"""Secrets are named in the configuration and filled in by who needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.config_file import from_tree
from schemas.errors import ConfigError
from services.mesh.environment import fill


def test_only_its_own_places_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_ONE", "s3cret")
    assert fill("a {env:SECRET_ONE} {x} {env:}", key="k") == "a s3cret {x} {env:}"


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECRET_ONE", raising=False)
    with pytest.raises(ConfigError, match=r"harness\.env\.KEY: the environment variable SECRET_ONE is not set"):
        fill("{env:SECRET_ONE}", key="harness.env.KEY")


@pytest.mark.parametrize(
    ("section", "key", "url"),
    [("bus", "url", "nats://user:pw@host:4222"), ("trajectories", "database", "postgresql://user:pw@host/db")],
)
def test_a_password_in_the_configuration_is_refused(section: str, key: str, url: str, tmp_path: Path) -> None:
    tree = {"name": "t", "steps": 3, "harness": {"command": ["true"]}, section: {key: url}}
    with pytest.raises(ConfigError, match=f"{section}.{key} holds a password"):
        from_tree(tree, where="test")
    tree[section] = {key: url.replace("pw", "{env:PW}") if section == "trajectories" else "nats://host:4222"}
    from_tree(tree, where="test")
