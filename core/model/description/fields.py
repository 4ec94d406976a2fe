"""Fields: typed reading of a checkpoint's JSON; every unexpected value is a ModelLoadError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ModelLoadError` if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} does not contain a JSON object")
    return found


class UnsupportedConfig(ModelLoadError):  # noqa: N818 - as in `errors`
    """Error for the config of a model that this engine's own decoder does not support."""


class Fields:
    """A JSON object read field by field; null counts as absent, as it does in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer field. Without ``default`` the field is required."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "must be an integer")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """Return an integer field that is at least 1. Without ``default`` it is required."""
        value = self.integer(name, default)
        if value < 1:
            raise self.error(name, f"must be at least 1, not {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a numeric field. Without ``default`` the field is required."""
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(name, "must be a number")
        return float(value)

    def above_zero(self, name: str, default: float | None = None) -> float:
        """Return a numeric field that is greater than 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.error(name, f"must be greater than 0, not {value}")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a numeric field, or None if it is absent."""
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string field. Without ``default`` the field is required."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def object(self, name: str) -> Fields:
        """Return a nested object; an absent one is empty."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(value, f"{self.where}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a field with an integer or a list of integers as a tuple; empty if absent."""
        value = self._get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            raise self.error(name, "must be an integer or a list of integers")
        return tuple(items)

    def error(self, name: str, problem: str) -> ModelLoadError:
        """Return the error to raise about a field."""
        return ModelLoadError(f"{self.where}: {name} {problem}")

    def unsupported(self, name: str, problem: str) -> UnsupportedConfig:
        """Return the error for a valid field value that this engine's decoder does not support."""
        return UnsupportedConfig(f"{self.where}: {name} {problem}")

    def _get(self, name: str, default: Any) -> Any:  # noqa: ANN401 - JSON is anything
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
