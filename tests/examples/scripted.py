"""A Messages endpoint on the loopback that answers from a script and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Block = dict[str, Any]


class Asked(NamedTuple):
    """One request as it came over the wire."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


class Link:
    """What a scripted act may do to one request's connection."""

    def __init__(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        self.handler, self.asked = handler, asked

    def send(self, status: int, body: bytes, **headers: str) -> None:
        head = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.handler.wfile.write("\r\n".join([*head, "", ""]).encode() + body)

    def chunks(self, parts: list[bytes], *, end: bool = True) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.handler.wfile.write(head)
        for part in parts:
            self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if end:
            self.handler.wfile.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with a TCP reset."""
        link = self.handler.connection
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()


Act = Callable[[Link], None]


def text(words: str) -> Block:
    return {"type": "text", "text": words}


def call(name: str, number: int, **arguments: Any) -> Block:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


def events(blocks: list[Block]) -> list[dict[str, Any]]:
    """The events of a streamed answer, each block's content in two deltas."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    out: list[dict[str, Any]] = [{"type": "message_start", "message": message}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty, whole, kind, key = {**block, "text": ""}, block["text"], "text_delta", "text"
        else:
            empty, whole = {**block, "input": {}}, json.dumps(block["input"])
            kind, key = "input_json_delta", "partial_json"
        out.append({"type": "content_block_start", "index": index, "content_block": empty})
        deltas = ({"type": kind, key: part} for part in (whole[:5], whole[5:]))
        out += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        out.append({"type": "content_block_stop", "index": index})
    reason = "tool_use" if blocks and blocks[-1]["type"] == "tool_use" else "end_turn"
    out.append({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {}})
    out.append({"type": "message_stop"})
    return out


def wire(stream: list[dict[str, Any]]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in stream)


def say(*blocks: Block) -> Act:
    """An answer, streamed or not as asked; the stream is cut into chunks that end anywhere."""

    def act(link: Link) -> None:
        if link.asked.body.get("stream"):
            data = wire(events(list(blocks)))
            link.chunks([data[at : at + 37] for at in range(0, len(data), 37)])
        else:
            message = {**events(list(blocks))[0]["message"], "content": list(blocks), "stop_reason": "end_turn"}
            link.send(200, json.dumps(message).encode(), content_type="application/json")

    return act


def fail(status: int, words: str = "no", **headers: str) -> Act:
    body = json.dumps({"type": "error", "error": {"type": "e", "message": words}}).encode()
    return lambda link: link.send(status, body, content_type="application/json", **headers)


class Endpoint:
    """`with Endpoint(acts) as endpoint`: the n-th request meets the n-th act; the last act repeats."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.asked: list[Asked] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, raw)
                outer.asked.append(asked)
                self.close_connection = True
                outer.acts[min(len(outer.asked), len(outer.acts)) - 1](Link(self, asked))

            def log_message(self, *_: Any) -> None:
                pass

            def finish(self) -> None:
                try:
                    super().finish()
                except OSError:
                    pass  # reset on purpose

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Endpoint:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
