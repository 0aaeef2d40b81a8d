"""What the quickstart's agent says: its prompts, its tools, and the order of its requests.

No I/O and nothing but the standard library. `conversation` is a generator that yields requests and takes answers, so
that the same code runs over HTTP (agent.py) and in memory, where demonstrations for the starting policy are made. The
texts are short because a tiny model's context counts.

By the seed (`Plan`) one execution in four first asks a helper: a sub-agent with its own system prompt, tools and
context, whose answer the main agent finds in its first message. One in four compacts its history after the first tool
result: the same history with one more text block asks for a summary, and the next context is instruction + summary +
the last tool call and its result, kept verbatim. One in four asks without streaming.
"""

import os
import zlib

MAIN_SYSTEM = "You are a coding agent."
HELPER_SYSTEM = "You are a helper."
HELPER_TASK = "Read in.txt. Say its line."
HELPER_SAID = "The helper says:\n"
COMPACT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Write a <summary> of one line."
CONTINUED = "This session is being continued from a previous conversation that ran out of context."
MAIN_TURNS = 4
HELPER_TURNS = 2
MAX_TOKENS = 64


def tool(name, description, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "input_schema": schema}


BASH = tool("bash", "Run.", "command")
WRITE_FILE = tool("write_file", "Write.", "path", "content")
MAIN_TOOLS = [BASH, WRITE_FILE]
HELPER_TOOLS = [BASH]


class Plan:
    """What this execution does besides working: a pure function of the seed."""

    def __init__(self, seed):
        mixed = zlib.crc32(seed.encode())
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        self.helper = mixed & 3 == 0
        self.compaction = (mixed >> 2) & 3 == 0
        self.stream = (mixed >> 4) & 3 != 0


def text_of(answer):
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def opening(instruction, helper_said=None, summary=None):
    """The first user message of a main context."""
    parts = [instruction.strip()]
    if helper_said is not None:
        parts.append(HELPER_SAID + helper_said.strip())
    if summary is not None:
        parts.append(CONTINUED + "\n" + summary.strip())
    return "\n".join(parts)


def request(system, tools, messages, agent_id=None):
    """One model call: the body without `model` and `stream`, and the sub-agent's id (None for the main agent)."""
    blocks = [{"type": "text", "text": system}]
    return {"max_tokens": MAX_TOKENS, "system": blocks, "tools": tools, "messages": list(messages)}, agent_id


def dialogue(system, tools, first, turns, run_tool, tally, agent_id=None, compacted=None):
    """Ask until an answer comes without a tool call or `turns` are spent; returns the last answer's text.

    `compacted(summary)` gives the first user message after a compaction, which happens once, after the first tool
    result; None means never.
    """
    messages = [{"role": "user", "content": first}]
    for _ in range(turns):
        answer = yield request(system, tools, messages, agent_id)
        if agent_id is None:
            tally["turns"] += 1
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        if not calls:
            break
        messages.append({"role": "assistant", "content": answer["content"]})
        messages.append({"role": "user", "content": [run_tool(call, tools) for call in calls]})
        if compacted is not None:
            asked = {"role": "user", "content": [*messages[-1]["content"], {"type": "text", "text": COMPACT}]}
            summary = yield request(system, tools, [*messages[:-1], asked], agent_id)
            tally["compactions"] += 1
            messages = [{"role": "user", "content": compacted(text_of(summary))}, *messages[-2:]]
            compacted = None
    return text_of(answer)


def conversation(instruction, plan, run_tool, tally):
    """All requests of one execution, in order. `tally` counts turns, subagents and compactions."""
    said = compacted = None
    if plan.helper:
        tally["subagents"] += 1
        name = "a" + os.urandom(8).hex()
        said = yield from dialogue(HELPER_SYSTEM, HELPER_TOOLS, HELPER_TASK, HELPER_TURNS, run_tool, tally, name)
    if plan.compaction:

        def compacted(summary):
            return opening(instruction, said, summary)

    first = opening(instruction, said)
    yield from dialogue(MAIN_SYSTEM, MAIN_TOOLS, first, MAIN_TURNS, run_tool, tally, compacted=compacted)
