"""ToolCommand: asks a command for the results of tool calls."""

from __future__ import annotations

import asyncio
import json
import shlex

from ...core.errors import ForetokenError, InvalidRequest
from .forms import Call, canonical


class ToolCommand:
    """A command that gets a call as JSON on its standard input and prints the result.

    The input is one line: ``{"id": ..., "name": ..., "arguments": {...}}``.
    """

    def __init__(self, command: str) -> None:
        """Split the command. Raises `InvalidRequest` for open quotes or an empty command."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidRequest(f"--tools {command}: {error}", param="tools") from None
        if not self._words:
            raise InvalidRequest("--tools needs a command", param="tools")

    async def ask(self, call: Call) -> str:
        """Return the result of a call. Raises `ForetokenError` if the command fails."""
        text = canonical(call.arguments)
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = text
        line = json.dumps({"id": call.id, "name": call.name, "arguments": arguments})
        name = self._words[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise ForetokenError(f"--tools: {name}: {error.strerror}") from None
        try:
            output, _ = await process.communicate(line.encode() + b"\n")
        finally:
            if process.returncode is None:  # the replay was interrupted
                process.kill()
        if process.returncode:
            message = f"--tools: {name} exited with status {process.returncode} for {call.text}"
            raise ForetokenError(message)
        return output.decode("utf-8", "replace").removesuffix("\n")
