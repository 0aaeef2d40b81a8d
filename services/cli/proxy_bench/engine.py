"""The engine of the benchmark, in a process of its own: it answers at once, always the same tokens.

`/generate` is what the proxy asks; `/v1/messages` gives a harness the same answer without a proxy. Both read the whole body
and look into neither: to make objects of 75,000 ids takes an interpreter as long as all that a proxy does for the call,
and to make tokens of a harness's texts takes longer still. What engines make of a prompt is no part of what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import msgspec
from aiohttp import web

from services.cli.proxy_bench.talk import answer_text
from services.mesh.chat import load_tokenizer
from services.mesh.processes import end_with_parent

_EVENTS = (
    '{"type":"message_start","message":{"id":"msg_@","type":"message","role":"assistant","model":"policy","content":[],'
    '"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}',
    '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"toolu_@","name":"tool_1","input":{}}}',
    '{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":ARGUMENTS}}',
    '{"type":"content_block_stop","index":0}',
    '{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":1}}',
    '{"type":"message_stop"}',
)


class Engine:
    def __init__(self, policy: str) -> None:
        tokenizer = load_tokenizer(policy)
        ids = [*tokenizer.encode(answer_text()), tokenizer.eos_token_id]
        self._answer = msgspec.json.encode(
            {
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": "stop"},
                    "completion_tokens": len(ids),
                    "weight_version": "1",
                    "output_token_logprobs": [[-0.25, token, None] for token in ids],
                },
            }
        )
        arguments = msgspec.json.decode(answer_text().split("\n")[1])["arguments"]
        events = [
            line.replace("ARGUMENTS", msgspec.json.encode(msgspec.json.encode(arguments).decode()).decode())
            for line in _EVENTS
        ]
        kinds = [msgspec.json.decode(line)["type"] for line in events]
        self._stream = "".join(f"event: {kind}\ndata: {line}\n\n" for kind, line in zip(kinds, events, strict=True))
        self._count = itertools.count()

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=self._answer, content_type="application/json")

    async def messages(self, request: web.Request) -> web.Response:
        await request.read()
        body = self._stream.replace("_@", f"_{next(self._count)}").encode()
        return web.Response(body=body, content_type="text/event-stream")


async def _main(policy: str) -> None:
    engine = Engine(policy)
    app = web.Application(client_max_size=256 << 20)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/v1/messages", engine.messages)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}\n")  # type: ignore[union-attr]
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(_main(sys.argv[1]))
