"""SGLang's environment is made once for its pins, and its stand-ins compute nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harnesses.install import NotInstalled
from tests.sglang import install as installer
from tests.sglang.server import STUBS


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What an installation in an empty folder would run; the first one makes the folder."""
    (tmp_path / "pins").write_text("torch==1.0\nsglang==0.1\n")
    monkeypatch.setattr(installer, "ROOT", tmp_path)
    monkeypatch.setattr(installer, "FOLDER", tmp_path / "venv")
    monkeypatch.setattr(installer, "PINS", tmp_path / "pins")
    asked: list[list[str]] = []

    def run(command: list[str], timeout_s: float) -> None:
        asked.append(command)
        if command[-1] == "torch==2.0":
            raise NotInstalled("no network")
        (tmp_path / "venv").mkdir(exist_ok=True)

    monkeypatch.setattr(installer, "run", run)
    return asked


def test_once_and_again_when_the_pins_change(commands: list[list[str]], tmp_path: Path) -> None:
    assert not installer.installed()
    for _ in range(2):
        installer.install()
    assert installer.installed() and len(commands) == 3
    assert commands[1][-1] == "torch==1.0" and "--no-deps" not in commands[1] and "--no-deps" in commands[2]
    (tmp_path / "pins").write_text("torch==2.0\n")
    assert not installer.installed()
    with pytest.raises(NotInstalled, match="no network"):
        installer.install()
    assert not installer.installed()


def test_every_package_is_pinned() -> None:
    pins = installer.PINS.read_text().split()
    assert all(pin.count("==") == 1 for pin in pins)
    assert {"torch==2.13.0", "sglang==0.5.23"} <= set(pins)


def test_a_stand_in_is_imported_and_never_called() -> None:
    program = """
import sgl_kernel, torchvision.transforms.functional as functional
from sgl_kernel.quantization.deep import kernel
from importlib.metadata import version
assert version("torchvision") == "0.28.0" and not hasattr(sgl_kernel, "__version__")
assert kernel.attribute != kernel and len({kernel, functional.resize}) == 2
try:
    kernel(1)
except NotImplementedError as error:
    assert "sgl_kernel.quantization.deep.kernel needs a GPU" in str(error)
else:
    raise SystemExit("it was called")
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(STUBS)})
