"""A tool of the real harness brings a picture: it is refused in words after which the harness tells the policy and goes on."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses import claude_code, codex, opencode, qwen_code
from tests.harnesses.checks import keeps, shape
from tests.harnesses.conftest import Program
from tests.harnesses.script import Rule, call, say, turn
from tests.harnesses.stage import staged

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]  # an installation may be waited for

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DONE = "I have seen nothing."


def rules(look: str, bash: Callable[[str], str], told: str, after: str) -> list[Rule]:
    """The policy looks at a picture, is told that it cannot, and works on for two turns."""
    return [
        Rule("look", lambda seen: "BEGIN the task." in seen.news, turn(say("I look."), look)),
        Rule("work", lambda seen: told in seen.news, turn(say("Then not."), bash("echo WORK-1"))),
        Rule("more", lambda seen: after in seen.prompt and "WORK-1" in seen.news, turn(bash("echo WORK-2"))),
        Rule("end", lambda seen: after in seen.prompt and "WORK-2" in seen.news, turn(say(DONE))),
    ]


async def test_claude_code_goes_on(program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """In the words that it keeps, from the turn after next on, it says less."""
    path, picture = program("claude-code"), tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    told = "Image removed: the API could not process this image (not shown: the policy reads text only)"
    script = rules(call("Read", file_path=str(picture)), claude_code.bash, told, "(media removed")
    async with staged(policy, tokenizer, tmp_path, script) as stage:
        report = await claude_code.run_claude(stage, path)
        by_name = stage.by_name(await stage.check())
    assert report["result"] == DONE
    assert shape(by_name) == ["main: look > more > end", "main: look > work"]
    keeps(by_name["more"].input_ids, by_name["work"].output_ids)


REFUSED = "not shown: the policy reads text only"


async def test_claude_code_before_ends(
    program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    path, picture = program("claude-code-js"), tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    look, *_ = rules(call("Read", file_path=str(picture)), claude_code.bash, "", "")
    async with staged(policy, tokenizer, tmp_path, [look]) as stage:
        with pytest.raises(AssertionError, match=REFUSED):
            await claude_code.run_claude(stage, path)
        assert len(await stage.check()) == 1


async def test_codex_ends(program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path, picture = program("codex"), tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    look, *_ = rules(call("view_image", path=str(picture)), codex.shell, "", "")
    async with staged(policy, tokenizer, tmp_path, [look]) as stage:
        with pytest.raises(AssertionError, match=REFUSED):
            await codex.run_codex(stage, path)
        assert len(await stage.check()) == 1


async def test_codex_knows(program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """A refusal would end its turn; told what the policy reads, it refuses by itself."""
    path, picture = program("codex"), tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    told = "you do not support image inputs"
    script = rules(call("view_image", path=str(picture)), codex.shell, told, told)
    async with staged(policy, tokenizer, tmp_path, script) as stage:
        assert await codex.run_codex(stage, path, catalog=[codex.TEXT_ONLY]) == DONE
        by_name = stage.by_name(await stage.check())
    assert shape(by_name) == ["main: look > work > more > end"]


async def test_opencode_shows_none(program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path, picture = program("opencode"), tmp_path / "picture.png"
    picture.write_bytes(PICTURE)
    told = "this model does not support image input"
    title = Rule("title", lambda seen: "title generator" in seen.system, turn(say("A title")))
    script = [title, *rules(call("read", filePath=str(picture)), opencode.bash, told, told)]
    async with staged(policy, tokenizer, tmp_path, script) as stage:
        assert await opencode.run_opencode(stage, path) == DONE
        by_name = stage.by_name(await stage.check())
    assert shape(by_name) == ["main: look > work > more > end", "sub-agent: title"]


async def test_qwen_code_shows_none(program: Program, policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path, picture = program("qwen-code"), tmp_path / "work" / "picture.png"
    told = "This model does not support image input"
    script = rules(call("read_file", file_path=str(picture)), qwen_code.bash, told, told)
    async with staged(policy, tokenizer, tmp_path, script) as stage:
        picture.write_bytes(PICTURE)
        said = await qwen_code.run_qwen(stage, path)
        by_name = stage.by_name(await stage.check())
    assert said == DONE
    assert shape(by_name) == ["main: look > work > more > end"]
