"""Documents as YAML that people read: keys in their order, texts of several lines as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Repeats an object that is there twice, where YAML would refer to the first one."""

    def ignore_aliases(self, _data: object) -> bool:
        """Whether an object is repeated: every one."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """The documents of one file."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000
    )
