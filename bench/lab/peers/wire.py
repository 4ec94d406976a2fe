"""Messages between driver and engines. Standard library alone: all environments read it.

A worker is started with ``--job job.json``. It loads the model and writes one line of JSON,
`Ready`. Then it answers every `Call` with one line, `Answer`: the calls of the job, or, if the
job has none, one from each line of its standard input until that ends. What engines print goes
to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

Tokens = list[list[int]]
Numbers = list[list[float]]
Generate = Callable[["Call"], Tokens | Numbers]
"""Computes a call: greedy, the end token ignored. Returns only what is new, or what is asked."""


YES, NO = 1, 0
IMAGE_BEGIN, IMAGE_TOKEN, IMAGE_END = (49189, 49152), 49190, (49189,)
"""Token ids around and in a picture of SmolVLM, of which one tile takes `NUM_VECTORS`."""
NUM_VECTORS = 64


def with_image(prompt: list[int]) -> list[int]:
    """The prompt with the tokens of a picture before it."""
    return [*IMAGE_BEGIN, *[IMAGE_TOKEN] * NUM_VECTORS, *IMAGE_END, *prompt]


@dataclass(frozen=True, slots=True)
class Call:
    """Continue all ``prompts`` by ``num_new`` tokens each. Their first ``num_shared`` are equal.

    ``task``: "embed" asks for the unit vector of each prompt in place of tokens, "score" for the
    logit of token `YES` less that of `NO` behind it. ``adapters``: that of each prompt; none at
    all: the model as it is. ``image``: the file of a picture that stands before each prompt.
    """

    prompts: Tokens
    num_new: int
    num_shared: int = 0
    task: str = ""
    adapters: list[int] = field(default_factory=list)
    image: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A model in one form. ``checkpoint`` holds ``target``, ``draft`` and what was converted.

    ``depth``: draft tokens a step, 0 for none. ``max_len``: tokens of the longest request,
    ``kv_tokens``: of all that run together. ``mode``: which of its ways an engine shall go.
    """

    checkpoint: str
    dtype: str  # bf16, int8, int4
    threads: int
    depth: int = 0
    max_len: int = 2112
    kv_tokens: int = 20480
    mode: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def target(self) -> Path:
        """The model, as transformers saves it."""
        return Path(self.checkpoint, "target")

    @property
    def draft(self) -> Path:
        """The draft model, as transformers saves it."""
        return Path(self.checkpoint, "draft")


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded, or cannot be."""

    load_seconds: float
    versions: dict[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call. ``seconds``: wall time of the whole call, until the last token."""

    seconds: float
    tokens: Tokens
    error: str = ""
    numbers: Numbers = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """New tokens of all prompts together."""
        return sum(map(len, self.tokens))


class UnsupportedError(Exception):
    """The engine has no such form or way."""


def read_job(text: str) -> Job:
    """A job from JSON; an unknown field raises `TypeError`."""
    fields = json.loads(text)
    calls = [Call(**call) for call in fields.pop("calls", ())]
    return Job(**fields, calls=calls)


def write(value: Call | Job | Ready | Answer) -> str:
    """One line of JSON."""
    return json.dumps(asdict(value))


def serve(
    load: Callable[[Job], Generate], packages: Sequence[str], argv: Sequence[str] | None = None
) -> None:
    """The whole life of a worker. ``packages``: those whose versions a reader wants to know."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="file of a Job as JSON")
    job = read_job(parser.parse_args(argv).job.read_text(encoding="utf-8"))
    out = _own_stdout()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    versions = {name: version(name) for name in packages}
    began = time.perf_counter()
    try:
        generate = load(job)
    except UnsupportedError as error:
        print(write(Ready(0.0, versions, f"cannot: {error}")), file=out, flush=True)
        return
    print(write(Ready(time.perf_counter() - began, versions)), file=out, flush=True)
    for call in job.calls or _calls(sys.stdin):
        print(write(_answer(generate, call)), file=out, flush=True)


def _own_stdout() -> TextIO:
    """Keep standard output to ourselves: engines print, and C libraries too."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _calls(lines: TextIO) -> Iterator[Call]:
    return (Call(**json.loads(line)) for line in lines)


def _answer(generate: Generate, call: Call) -> Answer:
    began = time.perf_counter()
    try:
        found = generate(call)
    except UnsupportedError as error:
        return Answer(0.0, [], f"cannot: {error}")
    seconds = time.perf_counter() - began
    if call.task:
        return Answer(seconds, [], numbers=[list(map(float, each)) for each in found])
    return Answer(seconds, [list(map(int, each)) for each in found])
