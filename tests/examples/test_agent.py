"""The quickstart's agent as a real process against a scripted endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.rollout.policy.quickstart import load_quickstart
from tests.examples.scripted import Act, Endpoint, call, events, fail, say, text, wire

AGENT = Path(__file__).parents[2] / "examples" / "quickstart" / "agent.py"
TALK = load_quickstart().conversation
RESULT_CHARS = 200
DONE = say(text("Done."))


def seed(*, helper: bool = False, compaction: bool = False, stream: bool = True) -> str:
    """A seed whose plan is just that."""
    plans = ((str(number), TALK.Plan(str(number))) for number in range(1000))
    wanted = (helper, compaction, stream)
    return next(name for name, plan in plans if (plan.helper, plan.compaction, plan.stream) == wanted)


class Ran(NamedTuple):
    code: int
    report: dict[str, int]
    stderr: str


def run(endpoint: Endpoint, folder: Path, plan: str, instruction: str = "Do it.", **environ: str) -> Ran:
    """Run the agent in `folder` to its end."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / "in.txt").write_text("ada,lime,5\n")
    (folder / "instruction.md").write_text(instruction + "\n")
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(AGENT), str(folder / "instruction.md"), str(folder / "report.json")],
        check=False,
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": "secret",
            "ANTHROPIC_MODEL": "policy",
            "GYRE_AGENT_SEED": plan,
            **environ,
        },
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return Ran(done.returncode, json.loads((folder / "report.json").read_text()), done.stderr)


def results(asked: Any) -> list[Any]:
    return [block["content"] for block in asked.body["messages"][-1]["content"] if block["type"] == "tool_result"]


@pytest.mark.parametrize("stream", [True, False])
def test_tools_are_real_and_their_results_come_back(tmp_path: Path, stream: bool) -> None:
    both = say(text("Now."), call("bash", 1, command="cat in.txt; echo no >&2"), call("bash", 2, command="exit 3"))
    write = say(call("write_file", 3, path="sub/out.txt", content="a\nb"))
    with Endpoint(both, write, DONE) as endpoint:
        ran = run(endpoint, tmp_path, seed(stream=stream))
    assert ran == (0, ran.report, "")
    assert ran.report == {
        "calls": 3,
        "reconnects": 0,
        "harness_errors": 0,
        "turns": 3,
        "subagents": 0,
        "compactions": 0,
    }
    first, second, third = endpoint.asked
    assert first.path == "/v1/messages?beta=true" and first.headers["authorization"] == "Bearer secret"
    assert first.body["messages"] == [{"role": "user", "content": "Do it."}]
    assert first.body.get("stream", False) is stream
    assert results(second) == ["ada,lime,5\nno", "(no output)"]
    assert [block.get("is_error") for block in second.body["messages"][2]["content"]] == [None, True]
    assert second.body["messages"][1]["content"][0] == text("Now.")
    assert results(third) == ["ok"] and (tmp_path / "work" / "sub" / "out.txt").read_text() == "a\nb"


def test_wrong_calls_are_answered_not_fatal(tmp_path: Path) -> None:
    wrong = [
        call("nothing", 1),
        call("bash", 2, command=7),
        call("write_file", 3, path="../x", content=""),
        call("write_file", 4, path=".", content=""),
        call("bash", 5, command="printf %300s x; echo $ANTHROPIC_AUTH_TOKEN"),
    ]
    with Endpoint(say(*wrong), DONE) as endpoint:
        ran = run(endpoint, tmp_path, seed())
    assert (ran.code, ran.report["harness_errors"]) == (0, 0)
    assert results(endpoint.asked[1]) == [
        "no such tool: nothing",
        "missing: command",
        "outside the workspace: ../x",
        "outside the workspace: .",
        " " * RESULT_CHARS,
    ]
    assert not (tmp_path / "x").exists()


def cut(after: int) -> Act:
    """Reset the connection when so many events of a streamed answer were sent."""

    def act(link: Any) -> None:
        link.chunks(
            [wire([event]) for event in events([text("Hello"), call("bash", 1, command="true")])[:after]], end=False
        )
        link.reset()

    return act


def test_identical_repetition_after_trouble(tmp_path: Path) -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
    acts: list[Act] = [
        lambda link: link.reset(),
        fail(500),
        fail(529),
        fail(429, retry_after="0"),
        cut(4),
        lambda link: link.chunks([wire(events([text("x")])[:2]), wire([overloaded])]),
        lambda link: link.chunks([wire(events([text("x")])[:3])]),
        DONE,
    ]
    with Endpoint(*acts) as endpoint:
        ran = run(endpoint, tmp_path, seed())
    assert (ran.code, ran.report["reconnects"], ran.report["calls"], ran.report["harness_errors"]) == (0, 7, 1, 0)
    assert len({asked.raw for asked in endpoint.asked}) == 1
    assert len({tuple(asked.headers.items()) for asked in endpoint.asked}) == 1


def broken_order(link: Any) -> None:
    stream = events([text("x"), text("y")])
    link.chunks([wire([event for event in stream if event["type"] != "content_block_stop"])])


def twice(link: Any) -> None:
    say(call("bash", 1, command="true"), call("bash", 1, command="true"))(link)


@pytest.mark.parametrize(
    "act",
    [
        fail(400),
        fail(401),
        fail(404),
        cut(6),
        broken_order,
        twice,
        lambda link: link.chunks([b"data: {nonsense\n\n"]),
        lambda link: link.send(200, b"{}", content_type="application/json"),
    ],
    ids=["400", "401", "404", "lost-after-block", "order", "same-id", "json", "not-streamed"],
)
def test_what_a_correct_endpoint_never_does_is_an_error(tmp_path: Path, act: Act) -> None:
    with Endpoint(act) as endpoint:
        ran = run(endpoint, tmp_path, seed())
    assert (ran.code, ran.report["harness_errors"], ran.report["calls"]) == (1, 1, 0)
    assert len(endpoint.asked) == 1 and ran.stderr.startswith("agent: Broken")


def test_a_full_context_ends_the_execution_without_error(tmp_path: Path) -> None:
    full = fail(400, "prompt is too long: 9 tokens > 8 maximum")
    with Endpoint(say(call("bash", 1, command="true")), full) as endpoint:
        ran = run(endpoint, tmp_path, seed())
    assert (ran.code, ran.report["harness_errors"], ran.report["turns"]) == (0, 0, 1)


def test_patience_ends(tmp_path: Path) -> None:
    with Endpoint(fail(503)) as endpoint:
        ran = run(endpoint, tmp_path, seed(), GYRE_AGENT_PATIENCE="0.2")
    assert (ran.code, ran.report["harness_errors"]) == (1, 1) and "no answer in 0.2 s" in ran.stderr


def test_turns_are_bounded(tmp_path: Path) -> None:
    acts = [say(call("bash", number, command="true")) for number in range(TALK.MAIN_TURNS)]
    with Endpoint(*acts) as endpoint:
        ran = run(endpoint, tmp_path, seed())
    assert (ran.code, ran.report["turns"], len(endpoint.asked)) == (0, TALK.MAIN_TURNS, TALK.MAIN_TURNS)


def test_helper_has_a_context_of_its_own(tmp_path: Path) -> None:
    read = say(call("bash", 1, command="cat in.txt"))
    with Endpoint(read, say(text("ada,lime,5")), DONE) as endpoint:
        ran = run(endpoint, tmp_path, seed(helper=True))
    assert (ran.code, ran.report["subagents"], ran.report["turns"], ran.report["calls"]) == (0, 1, 1, 3)
    ids = [asked.headers.get("x-claude-code-agent-id") for asked in endpoint.asked]
    assert ids[0] == ids[1] and ids[2] is None and ids[0][0] == "a" and len(ids[0]) == 17
    assert len({asked.headers["x-claude-code-session-id"] for asked in endpoint.asked}) == 1
    helper, main = endpoint.asked[0].body, endpoint.asked[2].body
    assert helper["system"] != main["system"] and len(helper["tools"]) < len(main["tools"])
    assert main["messages"] == [{"role": "user", "content": "Do it.\nThe helper says:\nada,lime,5"}]


def test_compaction_keeps_the_last_call_verbatim(tmp_path: Path) -> None:
    read = say(text("Look:"), call("bash", 1, command="cat in.txt"))
    with Endpoint(read, say(text("All seen.")), DONE) as endpoint:
        ran = run(endpoint, tmp_path, seed(compaction=True))
    assert (ran.code, ran.report["compactions"], ran.report["turns"], ran.report["calls"]) == (0, 1, 2, 3)
    first, compact, after = (asked.body for asked in endpoint.asked)
    for key in ("system", "tools", "max_tokens", "model"):
        assert first[key] == compact[key] == after[key]
    *history, last = compact["messages"]
    assert history[:1] == first["messages"] and last["content"][-1] == text(TALK.COMPACT)
    opening, *kept = after["messages"]
    assert opening["content"] == f"Do it.\n{TALK.CONTINUED}\nAll seen."
    assert kept == [history[1], {"role": "user", "content": last["content"][:-1]}]


def test_plans_are_spread() -> None:
    plans = [TALK.Plan(f"e-{group:06d}.{number:02d}") for group in range(100) for number in range(8)]
    for share in (
        sum(plan.helper for plan in plans),
        sum(plan.compaction for plan in plans),
        sum(not plan.stream for plan in plans),
    ):
        assert 0.2 < share / len(plans) < 0.3
    assert any(plan.helper and plan.compaction and not plan.stream for plan in plans)
