"""The scripted engine is an engine as the proxy knows one, and the mover finds what a proxy does wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.mesh.chat import ChatTokenizer
from tests.harnesses.script import Rule, Seen, call, say, think, turn
from tests.harnesses.stage import Mover, Stage, staged
from tests.proxy.bodies import body_of, result_of

LONG = "An answer that several engines give, a part each."


def rules() -> list[Rule]:
    return [
        Rule(
            "look",
            lambda seen: seen.news == "task",
            turn(think("Hm."), say("I look."), call("bash", a=1), call("bash")),
        ),
        Rule("end", lambda seen: "first\n" in seen.news, turn(say(LONG))),
    ]


async def ask(stage: Stage, body: dict[str, Any]) -> dict[str, Any]:
    """As a harness asks: again, when the proxy is gone or says that it stops."""
    while True:
        try:
            async with stage.world.post(body) as response:
                answer: dict[str, Any] = await response.json()
                if response.status == 200:
                    return answer
                assert response.status == 503, answer
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)


async def converse(stage: Stage) -> str:
    first = await ask(stage, body_of("task"))
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [result_of(calls[1], "second"), result_of(calls[0], "first")]
    last = await ask(stage, body_of("task", first["content"], results))
    text: str = last["content"][0]["text"]
    return text


async def test_turns_are_played_and_recorded(policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        assert await converse(stage) == LONG
        records = await stage.check()
        assert [record.parent for record in records] == [None, records[0].call]
        assert [play.rule for play in stage.script.plays] == ["look", "end"]
        seen = stage.script.plays[1].seen
        assert (seen.answers, seen.system.startswith("You are."), "first" in seen.news) == (1, True, True)


@pytest.mark.parametrize("seed", range(6))
async def test_moves_at_any_point_change_nothing(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int
) -> None:
    async with staged(policy, tokenizer, tmp_path, rules()) as stage, Mover(stage, seed=seed, often=0.8).moving():
        assert await converse(stage) == LONG
        await stage.check()
        assert stage.moves


@pytest.mark.parametrize("seed", range(3))
async def test_a_proxy_that_dies_is_followed_by_one_that_knows(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path, seed: int
) -> None:
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        async with Mover(stage, seed=seed, often=0.9, restarts=2).moving():
            assert await converse(stage) == LONG
        await stage.check()
        assert stage.moves["restart"] >= 1


async def test_a_prompt_without_a_rule_is_seen(policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    async with staged(policy, tokenizer, tmp_path, rules()) as stage:
        await stage.world.ask(body_of("another task"))
        with pytest.raises(AssertionError, match="another task"):
            await stage.check()


class Caller:
    """Calls an engine directly."""

    def __init__(self, stage: Stage, session: aiohttp.ClientSession) -> None:
        self._url, self._session = stage.engines[0].url, session

    async def generate(self, rid: str, ids: list[int], *, epoch: int = 1, **more: Any) -> tuple[int, Any]:
        body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 60}, "return_logprob": True, **more}
        async with self._session.post(
            f"{self._url}/generate", json=body, headers={"x-gyre-epoch": str(epoch)}
        ) as answer:
            return answer.status, await answer.json()

    async def abort(self, rid: str) -> None:
        async with self._session.post(f"{self._url}/abort_request", json={"rid": rid}) as answer:
            assert answer.status == 200


async def test_it_refuses_aborts_and_resumes_as_a_cell_does(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    told = [Rule("only", lambda seen: True, turn(say(LONG)))]
    async with staged(policy, tokenizer, tmp_path, told) as stage, aiohttp.ClientSession() as session:
        (engine, *_), caller = stage.engines, Caller(stage, session)
        prompt = tokenizer.encode("anything")
        engine.min_epoch = 3
        assert (await caller.generate("a1", prompt, epoch=2))[0] == 409
        assert (await caller.generate("a1", prompt, epoch=3, n=2))[0] == 400
        engine.hold = lambda play, start: 5 if start == 0 else None
        asked = asyncio.create_task(caller.generate("a1", prompt, epoch=3))
        await engine.held.get()
        assert "Duplicate" in (await caller.generate("a1", prompt, epoch=3))[1]["error"]["message"]
        await caller.abort("b")
        await caller.abort("a")  # a prefix
        _, part = await asked
        (play,) = stage.script.plays
        assert part["meta_info"]["finish_reason"]["type"] == "abort" and part["output_ids"] == play.ids[:5]
        _, rest = await caller.generate("a2", prompt + part["output_ids"], epoch=3)
        assert part["output_ids"] + rest["output_ids"] == play.ids
        assert rest["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokenizer.eos_token_id}
        pairs = part["meta_info"]["output_token_logprobs"] + rest["meta_info"]["output_token_logprobs"]
        assert [pair[0] for pair in pairs] == play.logprobs and len(set(play.logprobs)) == len(play.ids)


def test_a_prompt_is_read_as_its_messages() -> None:
    seen = Seen(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nu2<|im_end|>\n<|im_start|>user\nu3<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert (seen.system, seen.news, seen.answers, len(seen.messages)) == ("S", "u2\nu3", 1, 5)
