"""`gyre bench proxy` with small sizes: real processes, every figure that it names."""

from __future__ import annotations

import msgspec
import pytest

from services.cli.bench_proxy import TARGETS, Size, proxy_bench

TINY = Size(
    context=8_000,
    clients=1,
    turns=2,
    rounds=1,
    short_turns=2,
    requests=5,
    tokens=3_000,
    executions=2,
    thinking_turns=1,
    think_s=0.01,
)


def test_every_figure_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert proxy_bench(size=TINY, json=True) in (0, 1)
    said = msgspec.json.decode(capsys.readouterr().out)
    figures = said["figures"]
    assert {target.name for target in TARGETS} <= set(figures)
    assert figures["rate_ratio_75k"] > 0 and figures["cpu_ms_75k"] > 0 and figures["timeouts_500"] == 0
    assert said["rows"][-1]["context_tokens"] > said["rows"][0]["context_tokens"]
