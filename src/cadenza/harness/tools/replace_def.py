"""replace_def: writes a function or class anew, byte-exact everywhere else."""

from __future__ import annotations

from typing import Any

from cadenza.harness.definitions import DefinitionRefused, replace_definition
from cadenza.harness.tools.base import ToolError, ToolResult, positional, short_path
from cadenza.tokens import Call


class ReplaceDef:
    """``replace_def PATH\\nDEFINITION`` replaces the function or class that the definition names.

    The file is not touched unless the text parses as one definition, so an edit never leaves a file that does not
    parse. Answers ``ok``, because the model has just written the text itself.
    """

    name = "replace_def"
    usage = "replace_def PATH, then the whole def or class from the next line on"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        (path,) = positional(call, 1, 1)
        if not call.body:
            raise ToolError("invalid_arguments", "")
        path = short_path(path)
        before = await sandbox.read(path)
        try:
            after = replace_definition(before, call.body)
        except DefinitionRefused as error:
            raise ToolError("not_found" if error.missing else "invalid_arguments", str(error)) from None
        if after == before:
            return ToolResult("error: unchanged", "no_effect")
        await sandbox.write(path, after)
        return ToolResult("ok", edited=path)
