"""`gyre bench proxy`: what a model call costs in one proxy process, beside the same client at the same engine directly.

The client and the engine are scripted and answer at once; the proxy, its event bus and its records are real. Rates are
taken in turn in one run, so their ratio means something on a noisy machine; processor time is the proxy's own.

- `rate_ratio_75k`: requests a second through the proxy over those to the engine, conversations of 75,000 tokens;
- `added_ms_p50`: median latency at concurrency 1 with prompts of 500 tokens, less that of the engine alone;
- `execution_mb`: resident memory that one execution of many requests adds; the table is taken while it grows;
- `added_ms_p99_500`: of 500 executions at once that think between turns, in the same sense as above.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from services.cli.figures import Target, machine
from services.cli.output import say, say_json, table
from services.cli.proxy_bench.stage import Asked, Stage
from services.cli.proxy_bench.talk import Talk

TARGETS = (
    Target(name="rate_ratio_75k", op=">=", bound=0.4),
    Target(name="added_ms_p50", op="<", bound=10.0),
    Target(name="execution_mb", op="<", bound=64.0),
    Target(name="timeouts_500", op="==", bound=0),
)
GROWTH = 500


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; the defaults are what the figures' names say."""

    context: int = 75_000
    """Tokens of a conversation whose rate is taken."""
    clients: int = 2
    turns: int = 40
    """Of each client in each of the rounds."""
    rounds: int = 5
    short_turns: int = 200
    requests: int = 2_000
    """Of the long execution."""
    tokens: int = 700_000
    """Which it has reached with its last request."""
    executions: int = 500
    thinking_turns: int = 4
    think_s: float = 20.0
    """Mean time between turns of those."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of the long execution."""

    context_tokens: int
    new_tokens: int
    cpu_ms: float
    latency_ms_p50: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    proxied_per_s: float
    direct_per_s: float
    cpu_ms: float

    @property
    def ratio(self) -> float:
        return self.proxied_per_s / self.direct_per_s


def proxy_bench(*, size: Size | None = None, json: bool) -> int:
    """0 when every bound is kept."""
    return asyncio.run(_bench(size or Size(), json=json))


async def _bench(size: Size, *, json: bool) -> int:
    with TemporaryDirectory(prefix="gyre-bench-") as folder:
        async with Stage(Path(folder)) as stage:
            # First, in a process whose memory nobody has used before.
            rows, resident = await one_long(stage, size)
            rates = await long_rates(stage, size)
            added = await added_latency(stage, size)
            late = await many_thinking(stage, size)
    rate = statistics.median(each.ratio for each in rates)
    figures = {
        "rate_ratio_75k": round(rate, 3),
        "cpu_ms_75k": round(statistics.median(each.cpu_ms for each in rates), 2),
        "added_ms_p50": round(added, 2),
        "execution_mb": round(resident, 1),
        "added_ms_p99_500": round(late[0], 1),
        "timeouts_500": late[1],
    }
    missed = [target.name for target in TARGETS if not target.holds(figures[target.name])]
    bounds = {target.name: str(target) for target in TARGETS}
    if json:
        say_json(
            {
                "name": "proxy",
                "figures": figures,
                "targets": bounds,
                "rows": rows,
                "rates": rates,
                "ok": not missed,
                "machine": machine(),
            }
        )
        return 1 if missed else 0
    lines = [("context tokens", "new tokens", "proxy CPU ms a call", "latency ms, median")]
    lines += [(f"{r.context_tokens:,}", str(r.new_tokens), f"{r.cpu_ms:.1f}", f"{r.latency_ms_p50:.1f}") for r in rows]
    for line in table(lines):
        say(f"  {line}")
    for each in rates:
        say(
            f"{size.context} tokens: {each.proxied_per_s:.0f} requests/s through the proxy, {each.direct_per_s:.0f} "
            f"without it, {each.cpu_ms:.1f} ms of its processor a call"
        )
    for name, value in figures.items():
        bound = f" ({bounds[name]}{': MISSED' if name in missed else ''})" if name in bounds else ""
        say(f"{name} {value:g}{bound}")
    return 1 if missed else 0


async def long_rates(stage: Stage, size: Size) -> list[Rates]:
    """Rates with long conversations, proxy and engine in turn."""
    talks = [Talk(index, tokens=2_000, growth=GROWTH) for index in range(size.clients)]
    tokens = [await stage.execution() for _ in talks]

    async def grow(talk: Talk, token: str) -> None:
        while (await stage.ask(talk, token, url=stage.proxy)).input_tokens < size.context:
            pass

    await asyncio.gather(*(grow(talk, token) for talk, token in zip(talks, tokens, strict=True)))
    found = []
    for _ in range(size.rounds):
        # Both sides send bodies of the same sizes: what the engine is sent directly goes no further.
        direct = [talk.copy() for talk in talks]
        cpu = stage.cpu_s()
        proxied = await _rate(stage, talks, tokens, stage.proxy, size.turns)
        cpu_ms = (stage.cpu_s() - cpu) / (size.turns * len(talks)) * 1000
        straight = await _rate(stage, direct, tokens, stage.engine, size.turns)
        found.append(Rates(proxied_per_s=proxied, direct_per_s=straight, cpu_ms=cpu_ms))
    return found


async def _rate(stage: Stage, talks: Sequence[Talk], tokens: Sequence[str], url: str, turns: int) -> float:
    async def run(talk: Talk, token: str) -> list[Asked]:
        return [await stage.ask(talk, token, url=url) for _ in range(turns)]

    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(run(talk, token) for talk, token in zip(talks, tokens, strict=True)))
    return turns * len(talks) / (asyncio.get_running_loop().time() - began)


async def added_latency(stage: Stage, size: Size) -> float:
    """Milliseconds that the proxy adds to a call with a prompt of some 500 tokens, nothing else being asked."""
    through, straight = [], []
    for index in range(size.short_turns):
        talk = Talk(1000 + index, tokens=450, growth=GROWTH, tools=False)
        token = await stage.execution()
        twin = talk.copy()
        through.append((await stage.ask(talk, token, url=stage.proxy)).seconds)
        straight.append((await stage.ask(twin, token, url=stage.engine)).seconds)
    return (statistics.median(through) - statistics.median(straight)) * 1000


async def one_long(stage: Stage, size: Size) -> tuple[list[Row], float]:
    """One execution that grows to its last request: cost of its turns by length, and the memory that it adds (MB)."""
    talk = Talk(1, tokens=500, growth=max(120, size.tokens // size.requests), tools=False)
    token = await stage.execution()
    before = stage.resident_mb()
    rows: list[Row] = []
    marks = [size.tokens * share // 700 for share in (1, 3, 10, 30, 75, 200, 450, 700)]
    asked: list[Asked] = []
    cpu, first = stage.cpu_s(), 0
    for index in range(size.requests):
        asked.append(await stage.ask(talk, token, url=stage.proxy))
        recent = asked[first:]
        last = index == size.requests - 1
        if last or (len(rows) < len(marks) - 1 and asked[-1].input_tokens >= marks[len(rows)]):
            # A stretch is the last hundred calls before the mark, at the most.
            rows.append(
                Row(
                    context_tokens=asked[-1].input_tokens,
                    new_tokens=round((recent[-1].input_tokens - recent[0].input_tokens) / max(1, len(recent) - 1)),
                    cpu_ms=(stage.cpu_s() - cpu) / len(recent) * 1000,
                    latency_ms_p50=statistics.median(each.seconds for each in recent) * 1000,
                )
            )
        if len(asked) - first >= 100 or (len(rows) and asked[-1].input_tokens == rows[-1].context_tokens):
            cpu, first = stage.cpu_s(), len(asked)
    return rows, stage.resident_mb() - before


async def many_thinking(stage: Stage, size: Size) -> tuple[float, int]:
    """The 99th percentile of the latency that the proxy adds (ms), and how many calls timed out, of many executions."""
    draw = random.Random(0)
    waits = [[draw.expovariate(1 / size.think_s) for _ in range(size.thinking_turns)] for _ in range(size.executions)]

    async def run(index: int, url: str) -> list[float]:
        talk = Talk(10_000 + index, tokens=2_000, growth=GROWTH)
        token = await stage.execution()
        found = []
        for wait in waits[index]:
            await asyncio.sleep(wait)
            found.append((await stage.ask(talk, token, url=url)).seconds)
        return found

    async def all_of(url: str) -> tuple[list[float], int]:
        results = await asyncio.gather(*(run(index, url) for index in range(size.executions)), return_exceptions=True)
        late = 0
        for each in results:
            if isinstance(each, TimeoutError):
                late += 1
            elif isinstance(each, BaseException):
                raise each
        return [seconds for each in results if isinstance(each, list) for seconds in each], late

    through, late = await all_of(stage.proxy)
    straight, _ = await all_of(stage.engine)
    return (_p99(through) - _p99(straight)) * 1000, late


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
