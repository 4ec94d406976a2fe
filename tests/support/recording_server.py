"""`calling_server.py` whose answers depend on the prompt alone, so that they can be replayed.

``recording_server.py LOG [flags]``; `install` puts the same model into this process. A prompt with
`OTHER` in it gets other calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from foretoken.api.build import engine_builder as builder
from foretoken.api.cli.commands import main
from support import agents_server
from support.calling_server import CALLS, Characters

OTHER = "something else entirely"
LAST = 20  # number of the last answer with a call to a changed prompt
Put = Callable[[object, str, object], None]


def wanted_answer(prompt: str) -> str:
    """A call of the tool that the prompt has, with the number of the answer.

    A changed prompt gets other calls, and words at the end.
    """
    name, field = next((tool, field) for tool, field in CALLS.items() if tool in prompt)
    what = "chapter" if OTHER in prompt else "part"
    number = prompt.count(agents_server.ASSISTANT)
    if what == "chapter" and number > LAST:
        return "Done."
    call = {"name": name, "arguments": {field: f"{what} {number}"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def install(put: Put, log: Path) -> None:
    """Let models built from now on give these answers. ``put`` sets an attribute of a module."""
    put(agents_server, "wanted_answer", wanted_answer)
    put(agents_server, "Tokens", Characters)
    put(builder, "build", partial(agents_server.build, str(log)))


if __name__ == "__main__":
    install(setattr, Path(sys.argv[1]))
    sys.exit(main(["serve", "builtin", *sys.argv[2:]]))
