"""A model that cannot be built leaves no process behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build import engine_builder
from foretoken.core.config import EngineConfig
from foretoken.core.model.loader import load_decoder


class Ranks:
    """Notes how it was ended."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []

    def end(self, **options: Any) -> None:
        self.ends.append(options)


def test_ranks_end_at_once_where_building_fails_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks()

    def load(path: Path, *_: Any) -> tuple[Any, Ranks]:
        return load_decoder(path, load_format="random"), ranks

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for the pool")

    monkeypatch.setattr(engine_builder, "load_target", load)
    with monkeypatch.context() as broken:
        broken.setattr(engine_builder, "make_pools", fail)
        with pytest.raises(MemoryError):
            engine_builder.build("builtin", EngineConfig(speculation="off"))
    assert ranks.ends == [{"at_once": True}]
    engine_builder.build("builtin", EngineConfig(speculation="off", kv_tokens=512))
    assert len(ranks.ends) == 1, "those of a model that was built go on"
