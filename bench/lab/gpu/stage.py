"""Stage: one part of the check, run in its own process, and its results so far.

Every result is written at once, so that a stage that fails or runs out of time keeps it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
from transformers import PretrainedConfig

from ....core.config import EngineConfig
from ....core.model.decoder import Decoder
from ....core.model.loader import load_decoder
from ...common.report import Row, write_json
from ...common.roofline import Limits
from ...common.shapes import shape, write_config
from .gauge import Gauge

T = TypeVar("T")
SMALL, QWEN, LLAMA, TINY = "qwen3-0.6b", "qwen3-8b", "llama-8b", "tiny"
EXPERTS, STATES = "qwen3-moe-1b", "qwen35-0.8b"
SHAPES: dict[str, Callable[..., PretrainedConfig]] = {
    SMALL: partial(shape, "qwen3-0.6b", max_position_embeddings=40960),
    QWEN: partial(shape, "qwen3-8b"),
    LLAMA: partial(shape, "llama-3-8b"),
    EXPERTS: partial(shape, "qwen3-moe-1b"),
    STATES: partial(shape, "qwen3.5-0.8b"),
    TINY: partial(shape, "qwen3-tiny"),
}
"""The measured models by name, with random weights; rehearsals use `TINY`."""

PACKAGE = __name__.partition(".")[0]
Tables = dict[str, list[dict[str, object]]]


class Result(msgspec.Struct, kw_only=True):
    """Results of one stage, as they are kept in JSON."""

    stage: str
    title: str
    command: str
    machine: dict[str, object]
    card: dict[str, object]
    versions: dict[str, str]
    # Whether the stage was rehearsed: tiny shapes, no GPU, meaningless figures.
    simulated: bool = False
    status: str = "running"  # One of running, ok, failed, out of time and not run.
    seconds: float = 0.0
    limits: Limits | None = None  # Limits for the roofline, measured in the same run.
    tables: Tables = {}
    notes: list[str] = []
    errors: list[str] = []


def read_result(path: Path) -> Result:
    """Read a stage's result. Raises msgspec's errors for other files."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder and device of the stages: a GPU to measure, or this processor to rehearse."""

    work: Path  # Folder for checkpoints and results, shared by the stages.
    rehearses: bool

    @property
    def device(self) -> str:
        """Device of the models."""
        return "cpu" if self.rehearses else "cuda"

    @property
    def dtype(self) -> str:
        """Dtype of the weights; Triton's interpreter multiplies bfloat16 incorrectly."""
        return "float32" if self.rehearses else "bfloat16"

    @property
    def backend(self) -> str:
        """Backend by name: without its kernels a stage fails instead of timing another backend."""
        return "torch" if self.rehearses else "triton"

    def shape(self, name: str, **changes: object) -> Path:
        """Write the config of a model and return its folder; a rehearsal has only the tiny one."""
        parts = (name, *(f"{key}-{value}" for key, value in changes.items()))
        if self.rehearses:
            return write_config(self.work / TINY, SHAPES[TINY](eos_token_id=2))
        return write_config(self.work / "-".join(parts), SHAPES[name](eos_token_id=2, **changes))

    def decoder(self, folder: Path, **options: Any) -> Decoder:  # noqa: ANN401 - load_decoder's
        """Load a decoder with random weights on this device, by default with its backend."""
        given: dict[str, Any] = {"dtype": self.dtype, "backend": self.backend}
        given["load_format"] = "random"
        return load_decoder(folder, device=self.device, **given | options)

    def config(self, **options: Any) -> EngineConfig:  # noqa: ANN401 - EngineConfig's
        """Return an engine's options for the device."""
        given: dict[str, Any] = {"dtype": self.dtype, "backend": self.backend}
        given["device"] = self.device
        # All planted prompts belong to one tenant, which may fill the cache.
        given["cache_quota"] = 1.0
        if self.rehearses:
            given["threads"] = 1
        return EngineConfig(**given | options)

    def result(self, stage: str) -> Path:
        """Return the path of a stage's JSON."""
        return self.work / f"gpu-{stage}.json"


class Stage:
    """Inputs of a stage, and methods that keep its results."""

    def __init__(self, place: Place, result: Result, seconds: float) -> None:
        self.place, self.result = place, result
        self._until = time.monotonic() + seconds
        self._began = time.monotonic()

    @cached_property
    def gauge(self) -> Gauge:
        """Gauge of the device."""
        return Gauge(self.place.device)

    @property
    def rehearses(self) -> bool:
        """Whether the stage only rehearses and measures nothing."""
        return self.place.rehearses

    @property
    def seconds_left(self) -> float:
        """Seconds until the stage is ended."""
        return self._until - time.monotonic()

    def few(self, *cases: T) -> tuple[T, ...]:
        """Return all cases to measure, or only the first one to rehearse."""
        return cases[:1] if self.rehearses else cases

    # -- results --------------------------------------------------------------------------------

    def add(self, table: str, row: Row) -> None:
        """Add a row to a table."""
        self.result.tables.setdefault(table, []).append(dict(row))
        print(table, *(f"{key}={value}" for key, value in row.items()), sep="; ", flush=True)
        self.save()

    def note(self, text: str) -> None:
        """Add a sentence below the tables."""
        self.result.notes.append(text)
        self.save()

    def wrong(self, text: str) -> None:
        """Add an error, which makes the stage fail."""
        self.result.errors.append(text)
        self.save()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep logged warnings and errors in the result: a failed graph capture is only logged."""
        logger, listener = logging.getLogger(PACKAGE), _Listener(self.result)
        logger.addHandler(listener)
        try:
            yield
        finally:
            logger.removeHandler(listener)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; a failure in it is reported, and the stage continues."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.wrong(f"{name}: {type(error).__name__}: {first_line(error)}")
        finally:
            self.gauge.release()

    def try_each(self, parts: Mapping[str, Callable[[], Coroutine[Any, Any, None] | None]]) -> None:
        """Run parts one after another while there is time, each on its own event loop."""
        for name, run in parts.items():
            if self.seconds_left < 0:
                self.note(f"There was no time left for {name}.")
                continue
            with self.part(name):
                work = run()
                if work is not None:
                    asyncio.run(work)

    def save(self) -> None:
        """Write the current results."""
        self.result.seconds = time.monotonic() - self._began
        write_json(self.place.result(self.result.stage), msgspec.to_builtins(self.result))


class _Listener(logging.StreamHandler[TextIO]):
    """Prints log records and keeps errors as errors and warnings as notes, each text once.

    The records may come from the model thread, so only `Stage.save` writes them to the file.
    """

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._result = result

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        is_error, text = record.levelno >= logging.ERROR, f"logged: {record.getMessage()}"
        known = self._result.errors if is_error else self._result.notes
        if text not in known:
            known.append(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]
