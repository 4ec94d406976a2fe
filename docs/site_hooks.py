"""Hooks of mkdocs: pages are on the site what they are on a forge.

Headings have the anchors that forges give them. A link to a file of the repository outside of docs
is a link to the forge where ``repo_url`` names it, and the text alone otherwise.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]\[]*)\]\((\.\./)+([^)\s#]+)(#[^)]*)?\)")


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading, as forges make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", separator)


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs is not installed beside the tests
    """Give headings these anchors."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ANN401
    """Rewrite links that leave docs."""
    del files
    depth = page.file.src_uri.count("/") + 1

    def rewritten(found: re.Match[str]) -> str:
        text, _, path, anchor = found.groups()
        if found[0].count("../") < depth:
            return found[0]  # within docs
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"

    return OUTSIDE.sub(rewritten, markdown)
