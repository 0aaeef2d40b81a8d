"""The quickstart's agent: a small harness that knows only an Anthropic Messages endpoint and its working directory.

    python -S -E agent.py INSTRUCTION_FILE [REPORT_FILE]

Environment: ANTHROPIC_BASE_URL (http only), ANTHROPIC_AUTH_TOKEN, ANTHROPIC_MODEL; optional GYRE_AGENT_SEED (else the
working directory decides what this execution does) and GYRE_AGENT_PATIENCE (seconds for which one request is repeated,
default 300). What it says is in conversation.py.

An identical request is repeated after a lost connection, 408, 429 and 5xx (`reconnects`). Whatever else a correct
endpoint would not do (another refusal, a malformed body, events out of order, a connection lost after a finished
block) counts in `harness_errors` and ends the run with exit code 1.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

from conversation import Plan, conversation

BASH_SECONDS = 10
RESULT_CHARS = 200


class Lost(Exception):
    """The request may be repeated as it is; `after` is the number of seconds that the server asked to wait, or None."""

    def __init__(self, why, after=None):
        super().__init__(why)
        self.after = after


class Broken(Exception):
    """The endpoint did something that no repetition makes right."""


class Overflow(Exception):
    """The context is full: the execution ends here, which is nobody's error."""


# --- tools


def run_tool(call, tools):
    """Execute one tool_use block in the working directory; returns its tool_result block."""
    known = {entry["name"]: entry["input_schema"]["required"] for entry in tools}
    arguments = call["input"]
    if call["name"] not in known:
        text, failed = "no such tool: " + call["name"], True
    elif missing := [name for name in known[call["name"]] if not isinstance(arguments.get(name), str)]:
        text, failed = "missing: " + ", ".join(missing), True
    elif call["name"] == "bash":
        text, failed = bash(arguments["command"])
    else:
        text, failed = write_file(arguments["path"], arguments["content"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": text[:RESULT_CHARS]}
    if failed:
        result["is_error"] = True
    return result


def bash(command):
    """Run in a process group of its own, killed whole after BASH_SECONDS; stdout and stderr come back together."""
    if "\0" in command:
        return "bad command: NUL byte", True
    hidden = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    shell = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in hidden},
    )
    try:
        output, _ = shell.communicate(timeout=BASH_SECONDS)
        text, failed = output.decode("utf-8", "replace").rstrip("\n"), shell.returncode != 0
    except subprocess.TimeoutExpired:
        text, failed = f"timed out after {BASH_SECONDS} s", True
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
    return text or "(no output)", failed


def write_file(path, content):
    root = os.path.realpath(os.getcwd())
    target = os.path.realpath(os.path.join(root, path)) if "\0" not in path else root
    if not target.startswith(root + os.sep):
        return "outside the workspace: " + path, True
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(content)
    except OSError as error:
        return str(error.strerror), True
    return "ok", False


# --- the wire


class Assembler:
    """Puts the events of one streamed answer together; refuses any order that the protocol doesn't allow."""

    def __init__(self):
        self.message = None
        self.open = None
        self.partial = ""
        self.finished = 0
        self.done = False

    def feed(self, event):
        kind = event["type"]
        if kind == "ping":
            return
        if kind == "error":
            raise (Broken if self.finished else Lost)("stream error: " + json.dumps(event["error"])[:200])
        if kind == "message_start" and self.message is None:
            self.message = event["message"]
        elif self.message is None or self.done:
            raise Broken(f"event {kind} outside of a message")
        elif kind == "content_block_start" and self.open is None and event["index"] == len(self.message["content"]):
            self.open, self.partial = event["content_block"], ""
            self.message["content"].append(self.open)
        elif kind == "content_block_delta" and self.is_open(event):
            self.delta(event["delta"])
        elif kind == "content_block_stop" and self.is_open(event):
            if self.open["type"] == "tool_use":
                self.open["input"] = json.loads(self.partial or "{}")
            self.open = None
            self.finished += 1
        elif kind == "message_delta" and self.open is None:
            self.message.update(event["delta"])
        elif kind == "message_stop" and self.open is None and self.message.get("stop_reason"):
            self.done = True
        else:
            raise Broken(f"event {kind} out of order")

    def is_open(self, event):
        return self.open is not None and event["index"] == len(self.message["content"]) - 1

    def delta(self, delta):
        expected = {"text": "text_delta", "tool_use": "input_json_delta", "thinking": "thinking_delta"}
        kind = self.open["type"]
        if kind == "thinking" and delta["type"] == "signature_delta":
            self.open["signature"] = delta["signature"]
        elif expected.get(kind) != delta["type"]:
            raise Broken(f"{delta['type']} in a {kind} block")
        elif kind == "tool_use":
            self.partial += delta["partial_json"]
        else:
            self.open[kind] += delta[kind]


def checked(message):
    """The answer, if every block has the fields of its type and no tool call id appears twice; else Broken."""
    if message.get("type") != "message" or message.get("role") != "assistant" or not message.get("stop_reason"):
        raise Broken("not an assistant message")
    ids = set()
    for block in message["content"]:
        if block["type"] == "tool_use":
            if not isinstance(block["input"], dict) or not block["name"] or not block["id"] or block["id"] in ids:
                raise Broken("bad tool_use block")
            ids.add(block["id"])
        elif block["type"] == "text" and not isinstance(block["text"], str):
            raise Broken("bad text block")
    return message


def body_lines(stream, headers):
    """The body's lines, as they arrive: chunked, counted, or until the connection closes."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        left = int(headers["content-length"]) if "content-length" in headers else None
        while left is None or left > 0:
            line = stream.readline() if left is None else stream.readline(left)
            if not line:
                if left:
                    raise Lost("connection closed inside the body")
                return
            left = None if left is None else left - len(line)
            yield line
        return
    pending = b""
    while True:
        size = stream.readline()
        if not size.endswith(b"\n"):
            raise Lost("connection closed between chunks")
        length = int(size.split(b";")[0], 16)
        chunk = stream.read(length)
        if len(chunk) < length:
            raise Lost("connection closed inside a chunk")
        stream.readline()
        if length == 0:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if pending:
        yield pending


def streamed(stream, headers):
    answer, data = Assembler(), []
    try:
        for line in body_lines(stream, headers):
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line and data:
                answer.feed(json.loads(b"\n".join(data)))
                data = []
    except (OSError, Lost) as error:
        if answer.finished and not answer.done:
            raise Broken("connection lost after a finished block") from error
        if not answer.done:
            raise
    if not answer.done:
        raise (Broken if answer.finished else Lost)("the stream ended before message_stop")
    return answer.message


def refusal(status, headers, body):
    """The exception that an HTTP status other than 200 stands for."""
    text = body.decode("utf-8", "replace")[:300]
    if status in (408, 429) or status >= 500:
        after = headers.get("retry-after", "")
        return Lost(f"HTTP {status}: {text}", float(after) if after.isdigit() else None)
    if status in (400, 413) and ("prompt is too long" in text or "exceed context limit" in text):
        return Overflow(text)
    return Broken(f"HTTP {status}: {text}")


class Endpoint:
    """POST /v1/messages over plain sockets, one connection a request."""

    def __init__(self, environ, stream, tally):
        url = environ["ANTHROPIC_BASE_URL"]
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        host, _, port = authority.partition(":")
        if scheme != "http" or not host:
            raise Broken(f"ANTHROPIC_BASE_URL must be http://HOST[:PORT][/PATH], not {url!r}")
        self.address = host, int(port or 80)
        self.target = ("/" + path).rstrip("/") + "/v1/messages?beta=true"
        self.model, self.stream, self.tally = environ.get("ANTHROPIC_MODEL", "policy"), stream, tally
        self.patience = float(environ.get("GYRE_AGENT_PATIENCE", "300"))
        raw = os.urandom(16).hex()
        self.session = "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
        self.headers = [
            f"host: {authority}",
            "authorization: Bearer " + environ["ANTHROPIC_AUTH_TOKEN"],
            "anthropic-version: 2023-06-01",
            "content-type: application/json",
            "accept: application/json",
            "connection: close",
            "x-claude-code-session-id: " + self.session,
        ]

    def ask(self, body, agent_id):
        """The answer to one request, repeated byte for byte until it comes or patience ends."""
        body = {"model": self.model, **body, "metadata": {"user_id": json.dumps({"session_id": self.session})}}
        if self.stream:
            body["stream"] = True
        content = json.dumps(body).encode()
        own = [f"x-claude-code-agent-id: {agent_id}"] if agent_id else []
        lines = [f"POST {self.target} HTTP/1.1", *self.headers, *own, f"content-length: {len(content)}", "", ""]
        packet = "\r\n".join(lines).encode() + content
        give_up, wait = time.monotonic() + self.patience, 0.1
        while True:
            try:
                answer = checked(self.exchange(packet))
                self.tally["calls"] += 1
                return answer
            except (OSError, Lost) as error:
                pause = getattr(error, "after", None)
                pause = wait if pause is None else pause
                if time.monotonic() + pause > give_up:
                    raise Broken(f"no answer in {self.patience:g} s, last: {error}") from error
                self.tally["reconnects"] += 1
                time.sleep(pause)
                wait = min(wait * 2, 2.0)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Broken(f"malformed answer: {error!r}") from error

    def exchange(self, packet):
        with socket.create_connection(self.address, timeout=600) as link, link.makefile("rb") as stream:
            link.sendall(packet)
            status = stream.readline().split(None, 2)
            if len(status) < 2:
                raise Lost("connection closed before the answer")
            headers = {}
            while line := stream.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            if int(status[1]) != 200:
                raise refusal(int(status[1]), headers, b"".join(body_lines(stream, headers)))
            if headers.get("content-type", "").startswith("text/event-stream") != self.stream:
                raise Broken(f"asked with stream={self.stream}, got {headers.get('content-type')}")
            return streamed(stream, headers) if self.stream else json.loads(b"".join(body_lines(stream, headers)))


def drive(requests, endpoint):
    """Run a conversation over an endpoint to its end."""
    try:
        body, agent_id = next(requests)
        while True:
            body, agent_id = requests.send(endpoint.ask(body, agent_id))
    except StopIteration:
        return


def stop(signum, frame):
    raise SystemExit(128 + signum)


def main(arguments, environ):
    tally = dict.fromkeys(("calls", "reconnects", "harness_errors", "turns", "subagents", "compactions"), 0)
    signal.signal(signal.SIGTERM, stop)
    try:
        with open(arguments[0], encoding="utf-8") as file:
            instruction = file.read()
        plan = Plan(environ.get("GYRE_AGENT_SEED") or os.getcwd())
        drive(conversation(instruction, plan, run_tool, tally), Endpoint(environ, plan.stream, tally))
    except Overflow as error:
        print(f"context full: {error}", file=sys.stderr)
    except (Broken, KeyError, OSError) as error:
        tally["harness_errors"] += 1
        print(f"agent: {error!r}", file=sys.stderr)
        return 1
    finally:
        if len(arguments) > 1:
            with open(arguments[1] + ".part", "w", encoding="utf-8") as file:
                json.dump(tally, file)
            os.replace(arguments[1] + ".part", arguments[1])
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: agent.py INSTRUCTION_FILE [REPORT_FILE]")
    sys.exit(main(sys.argv[1:], os.environ))
