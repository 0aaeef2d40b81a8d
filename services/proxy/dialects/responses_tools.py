"""Tools of the Responses API as the policy sees them, all of them functions, and the way back.

A function is itself; a function in a namespace has the namespace before its name; a custom tool, whose calls are free
text, is a function with one string. Tools that a vendor's servers run are left out: nobody here runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.proxy.conversation import Call
from services.proxy.dialects.wire import compact, field
from services.proxy.refusal import Refused

TEXT = "input"
"""The only argument of a custom tool."""


class Origin(msgspec.Struct, frozen=True):
    """What a tool is called on the wire."""

    name: str
    namespace: str = ""
    custom: bool = False


def shown_name(name: str, namespace: Any) -> str:
    """A tool's name as the policy sees it, whatever other tools there are."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Origin]]:
    """Tools for the policy, and where each comes from. Raises Refused for a tool without a name."""
    known: list[dict[str, Any]] = []
    origins: dict[str, Origin] = {}
    for index, tool in enumerate(tools):
        _read(tool, "", "", f"tools.{index}", known, origins)
    return known, origins


def _read(
    tool: Mapping[str, Any],
    namespace: str,
    about: str,
    where: str,
    known: list[dict[str, Any]],
    origins: dict[str, Origin],
) -> None:
    kind = tool.get("type", "function")
    if kind == "namespace" and not namespace:
        name = field(tool, "name", str, where)
        inner = field(tool, "tools", list, where)
        for index, each in enumerate(inner):
            place = f"{where}.tools.{index}"
            if not isinstance(each, dict):
                raise Refused(400, f"{place}: expected an object")
            _read(each, name, _text(tool), place, known, origins)
    elif kind in ("function", "custom"):
        name = field(tool, "name", str, where)
        shown = shown_name(name, namespace)
        if shown in origins:
            return
        origins[shown] = Origin(name, namespace, kind == "custom")
        described = "\n\n".join(part for part in (about, _text(tool)) if part)
        schema = _free_text(tool) if kind == "custom" else tool.get("parameters") or {}
        known.append({"name": shown, "description": described, "input_schema": schema})


def _text(tool: Mapping[str, Any]) -> str:
    said = tool.get("description")
    return said if isinstance(said, str) else ""


def _free_text(tool: Mapping[str, Any]) -> dict[str, Any]:
    form = tool.get("format")
    about = "The text of the call, as it is."
    if isinstance(form, dict) and form.get("definition"):
        about = (
            f"The text of the call, as it is, in this grammar ({form.get('syntax', 'unnamed')}):\n{form['definition']}"
        )
    argument = {"type": "string", "description": about}
    return {"type": "object", "properties": {TEXT: argument}, "required": [TEXT]}


def call_item(call: Call, origins: Mapping[str, Origin], item_id: str) -> dict[str, Any]:
    """A call of the policy as an item of the answer; one of no known tool keeps its name, and the client says so."""
    origin = origins.get(call.name, Origin(call.name))
    if origin.custom:
        text = call.input.get(TEXT)
        said = text if isinstance(text, str) else compact(call.input)
        own = {"type": "custom_tool_call", "call_id": call.id, "name": origin.name, "input": said}
    else:
        own = {"type": "function_call", "call_id": call.id, "name": origin.name, "arguments": compact(call.input)}
    if origin.namespace:
        own["namespace"] = origin.namespace
    return {"id": item_id, **own, "status": "completed"}
