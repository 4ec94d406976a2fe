"""`agents_server.py` whose model always calls the agent's tool, in tokens that no tokenizer makes.

``calling_server.py LOG [flags]``: each character of an answer is a token, so a text that comes
back is other tokens. Nothing is computed; cache, conversations and HTTP are the real ones.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from foretoken.api.build import engine_builder as builder
from foretoken.api.cli.commands import main
from support import agents_server
from support.scripted_server import Tokens

CALLS = {"exec_command": "cmd", "Bash": "command", "read_part": "name"}  # tools, and what they take
_numbers = itertools.count()


def wanted_answer(prompt: str) -> str:
    """A call of the tool that the prompt has, each time with another argument."""
    name, field = next((tool, field) for tool, field in CALLS.items() if tool in prompt)
    call = {"name": name, "arguments": {field: f"part {next(_numbers)}"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class Characters(Tokens):
    """Encodes each character on its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        whole = self.encode
        parts = re.compile(r"</?tool_call>|.", re.DOTALL)
        self.encode = lambda text: [i for part in parts.findall(text) for i in whole(part)]


if __name__ == "__main__":
    agents_server.wanted_answer = wanted_answer
    agents_server.Tokens = Characters  # type: ignore[misc]
    builder.build = partial(agents_server.build, sys.argv[1])  # type: ignore[assignment]
    sys.exit(main(["serve", "builtin", *sys.argv[2:]]))
