"""RequestRecorder: records a server's requests for `foretoken replay`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..._version import __version__
from ...core.interface.request import Delta, Request
from ...draft.training.traffic import Recorder
from .records import RecordedRequest, engine_facts, kernels_of, record_of


class RequestRecorder(Recorder[RecordedRequest]):
    """Records everything that determines the tokens of each answer, including the prompt."""

    option = "record_requests"

    def name(self, model: str, settings: Mapping[str, Any], *, exact: bool) -> None:
        """Set the model's path, the engine's settings, and whether it is exact, for all records."""
        self._facts = {
            "model": model,
            "options": engine_facts(settings),
            "kernels": kernels_of(settings),
            "exact": exact,
            "foretoken": __version__,
        }

    def kept(self, request: Request, delta: Delta) -> RecordedRequest:
        """Return the record of a request that has ended."""
        return record_of(
            request,
            finish_reason=str(delta.finish_reason),
            stop_reason=delta.stop_reason,
            **self._facts,
        )

    def line(self, kept: RecordedRequest, namespace: str) -> bytes:  # noqa: ARG002 - names the file
        """Return a record as one line of JSON."""
        return msgspec.json.encode(kept) + b"\n"
