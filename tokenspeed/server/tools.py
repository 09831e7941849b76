"""The tools of a chat request: checked, in the form that templates and parsers read, and what may be chosen of them."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed.server.errors import ApiError
from tokenspeed.server.schema_check import schema_problem

MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 << 10
"""The longest declaration of one tool, as JSON."""
MAX_TOOLS_BYTES = 512 << 10
"""The longest of all tools together."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def offered_tools(tools: Sequence[Any] | None, choice: Any, *, tool_format: str) -> list[dict[str, Any]]:
    """Returns the tools that the model is shown, as templates read them; none where none may be called.

    Args:
        tools, choice: ``tools`` and ``tool_choice`` of the request.
        tool_format: the served model's, "" where none is configured.

    Raises:
        ApiError: 400, naming what is wrong with a declaration or the choice, or that the model has no format.
    """
    checked = _checked(tools or [])
    chosen, name = chosen_tool(choice)
    _check_choice(checked, chosen, name)
    if not checked or chosen == "none":
        return []
    if not tool_format:
        raise ApiError(
            400,
            "tools cannot be offered: nothing says how this model writes tool calls. Start the server with "
            "--tool-format NAME, or set formats.tools in the recipe (docs/recipes.md lists the names); or send "
            'tool_choice: "none"',
            code="no_tool_format",
            param="tools",
        )
    return checked


def chosen_tool(choice: Any) -> tuple[str, str]:
    """Returns "auto", "none", "required" or "named", and the name of the one function that must be called."""
    if choice is None:
        return "auto", ""
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice, ""
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise _wrong(
            "tool_choice", 'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return "named", named["name"]


def _check_choice(tools: list[dict[str, Any]], chosen: str, name: str) -> None:
    """Raises ApiError where something must be called that is not there."""
    if chosen == "required" and not tools:
        raise _wrong("tool_choice", 'is "required" and there are no tools; send tools, or another tool_choice')
    names = [tool["function"]["name"] for tool in tools]
    if chosen == "named" and name not in names:
        known = f"the tools are {', '.join(names)}" if names else "there are no tools"
        raise _wrong("tool_choice", f"names the function {name!r}, which is not among the tools: {known}")


def _checked(tools: Sequence[Any]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"has {len(tools)} tools; at most {MAX_TOOLS} are taken")
    result: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    total = 0
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        size = len(msgspec.json.encode(tool))
        total += size
        if size > MAX_TOOL_BYTES:
            raise _wrong(where, f"has {size} bytes; at most {MAX_TOOL_BYTES} are taken")
        result.append(_tool(tool, where))
        name = result[-1]["function"]["name"]
        if name in places:
            raise _wrong(f"{where}.function.name", f"is {name!r} again, the name of tools[{places[name]}]")
        places[name] = at
    if total > MAX_TOOLS_BYTES:
        raise _wrong("tools", f"has {total} bytes; at most {MAX_TOOLS_BYTES} are taken")
    return result


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """The declaration without its nulls and without ``strict``, which is not the model's to read."""
    if not isinstance(tool, dict) or "type" not in tool:
        raise _wrong(where, 'must be {"type": "function", "function": {...}}')
    if tool["type"] != "function":
        raise ApiError(
            400,
            f"{where}.type is {tool['type']!r}; this server knows function tools only",
            code="unsupported_field",
            param=f"{where}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", "is missing, or is no object")
    for name in (*(set(tool) - {"type", "function"}), *(set(function) - set(_FUNCTION_FIELDS))):
        inner = f"{where}.{name}" if name in tool else f"{where}.function.{name}"
        raise ApiError(400, f"{inner} is not a field of a tool", code="unknown_field", param=inner)
    _check_function(function, f"{where}.function")
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    shown.setdefault("parameters", {"type": "object", "properties": {}})  # what leaving it out means; templates read it
    return {"type": "function", "function": shown}


def _check_function(function: dict[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.name", f"is {name!r}; a name is 1 to 64 letters, digits, dashes and underscores")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{where}.description", "must be text")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong(f"{where}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.parameters", 'must be the schema of an object ({"type": "object", "properties": {...}})')
    problem = schema_problem(parameters, f"{where}.parameters")
    if problem is not None:
        raise _wrong(*problem)


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", code="invalid_value", param=where)
