"""ToolCommand: asks a command for the results of tool calls."""

from __future__ import annotations

import asyncio
import json
import shlex

from ...core.errors import ForetokenError, InvalidRequest
from ..runtime.process_group import end_group, start_group
from .forms import Call, canonical


class ToolCommand:
    """A command that gets a call as JSON on its standard input and prints the result.

    The input is one line: ``{"id": ..., "name": ..., "arguments": {...}}``. ``seconds``: time limit
    of a call.
    """

    def __init__(self, command: str, seconds: float) -> None:
        """Split the command. Raises `InvalidRequest` for open quotes or an empty command."""
        self._seconds = seconds
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidRequest(f"--tools {command}: {error}", param="tools") from None
        if not self._words:
            raise InvalidRequest("--tools needs a command", param="tools")

    async def ask(self, call: Call) -> str:
        """Return the result of a call.

        Raises `ForetokenError` if the command fails, or if it or a process that has its output runs
        longer than the limit. All processes of its group are killed then.
        """
        text = canonical(call.arguments)
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = text
        line = json.dumps({"id": call.id, "name": call.name, "arguments": arguments})
        name = self._words[0]
        try:
            process = await start_group(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise ForetokenError(f"--tools: {name}: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._seconds):
                output, _ = await process.communicate(line.encode() + b"\n")
        except TimeoutError:
            await end_group(process)
            raise ForetokenError(
                f"--tools: {name} did not end within {self._seconds:g} s (--tool-seconds) for "
                f"{call.text}"
            ) from None
        except BaseException:  # the replay was interrupted
            await end_group(process)
            raise
        if process.returncode:
            message = f"--tools: {name} exited with status {process.returncode} for {call.text}"
            raise ForetokenError(message)
        return output.decode("utf-8", "replace").removesuffix("\n")
