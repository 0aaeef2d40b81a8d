"""`gyre` in this process: its exit code, and what it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.cli.app import app, main


def gyre(*words: object) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def read_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    return found


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """What a person reads of an error: a sentence and a remedy, never a traceback."""
    text = capsys.readouterr().err
    assert text.startswith("gyre: ") and "\n  -> " in text and "Traceback" not in text, text
    return text


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command prints that ends with this code and raises nothing."""
    capsys.readouterr()
    assert app([str(each) for each in words]) == code
    return capsys.readouterr().out
