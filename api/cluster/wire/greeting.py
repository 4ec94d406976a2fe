"""The greeting of a replica: its model as a `Hello`, and the front's model from a `Hello`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ...._version import __version__
from ...build.built import Built, ModelFacts
from ...runtime.serving_engine import ServingEngine
from .messages import VERSION, Hello, body_form, body_of

EngineT = TypeVar("EngineT", bound=ServingEngine)


def hello_of(built: Built[ServingEngine], *, tokenizer: str, pid: int) -> Hello:
    """Return the greeting of a replica; ``tokenizer`` is the hash of its tokenizer."""
    engine = built.engine
    return Hello(
        version=VERSION,
        release=__version__,
        pid=pid,
        tokenizer=tokenizer,
        settings=body_form(dict(built.settings)),
        max_running=engine.limits.max_running,
        max_queued=engine.limits.max_queued,
        page_size=engine.page_size,
        num_pages=engine.num_pages,
        **_facts(built),
    )


def built_of(hello: Hello, engine: EngineT, path: Path) -> Built[EngineT]:
    """Return the model for a front's API; its tokenizer and template are at ``path``.

    Raises `WireError`.
    """
    return Built(engine=engine, path=path, settings=body_of(hello.settings), **_facts(hello))


def _facts(owner: ModelFacts) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in ModelFacts.__struct_fields__}
