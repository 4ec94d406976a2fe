"""Hooks of mkdocs: pages are on the site what they are on a forge, with a reference beside them.

Headings have the anchors that forges give them. A link to a file of the repository outside of docs
is a link to the forge where ``repo_url`` names it, and else the text alone. Flags and the fields of
HTTP bodies come from the package in build/docs, which needs no torch for them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OUTSIDE = re.compile(r"\[([^\]\[]*)\]\((\.\./)+([^)\s#]+)(#[^)]*)?\)")
HELP = "<!-- help of each command -->"
COLUMNS = "100"


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as forges make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", separator)


def help_of_commands() -> str:
    """A heading and all flags of each command, as `--help-all` prints them."""
    from foretoken.api.cli.commands import _parser

    os.environ["COLUMNS"] = COLUMNS
    (commands,) = [each.choices for each in _parser()._actions if each.dest == "command"]
    return "\n\n".join(
        f"## foretoken {name}\n\n```text\n{command.format_help(shows_all=True)}```"
        for name, command in commands.items()
    )


def openapi() -> bytes:
    """`/openapi.json` of a server that has an admin key; it needs no engine."""
    import msgspec

    from foretoken.api.server.app import routes
    from foretoken.api.server.routes.openapi import describe
    from foretoken.api.serving.serving_context import Service
    from foretoken.api.serving.settings import Settings

    engine: Any = SimpleNamespace(causes={})
    return msgspec.json.encode(describe(routes(Service(engine, Settings(admin_keys=("any",))))))


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs is not installed beside the tests
    """Give headings these anchors, and find the package."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    sys.path.insert(0, str(Path(config.config_file_path).parent / "build/docs"))
    return config


def on_files(files: Any, *, config: Any) -> Any:  # noqa: ANN401
    """Add the document that http.md shows."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "openapi.json", content=openapi()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ANN401
    """Write the flags, and rewrite links that leave docs."""
    del files
    depth = page.file.src_uri.count("/") + 1
    if HELP in markdown:
        markdown = markdown.replace(HELP, help_of_commands())

    def rewritten(found: re.Match[str]) -> str:
        text, _, path, anchor = found.groups()
        if found[0].count("../") < depth:
            return found[0]  # within docs
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"

    return OUTSIDE.sub(rewritten, markdown)
