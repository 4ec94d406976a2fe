"""The workloads of ``bench serve`` and ``bench offline``: requests and their order.

Everything follows from the seed. Lengths are in tokens: one number, or a range ``LOW:HIGH``.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .corpus import TextCorpus
from .figures import Record
from .generator import Ask, Job, Piece, Session

SHORTEST = 8  # Minimum length in tokens of a prompt that was cut to fit.
ROOM = 16  # Tokens that a template or a tokenizer may add.


@dataclass(frozen=True, slots=True)
class Lengths:
    """One length or a range, both ends included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Draw a length uniformly."""
        return rng.randint(self.low, self.high)

    def draw_log(self, rng: random.Random) -> int:
        """Draw a length log-uniformly: many short ones, a few long ones."""
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def lengths(text: str) -> Lengths:
    """Parse a length such as ``64`` or ``16:64``; for argparse."""
    low, _, high = text.partition(":")
    try:
        found = Lengths(int(low), int(high or low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a length such as 64 or 16:64") from None
    if not 1 <= found.low <= found.high:
        raise argparse.ArgumentTypeError(f"'{text}' must be LOW:HIGH with 1 <= LOW <= HIGH")
    return found


def positive(text: str) -> int:
    """Parse a whole number from 1; for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1")
    return int(text)


def natural(text: str) -> int:
    """Parse a whole number from 0; for argparse."""
    return 0 if text == "0" else positive(text)


def above_zero(text: str) -> float:
    """Parse a number above 0, which may be inf; for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:  # This also rejects nan.
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


@dataclass(slots=True)
class Scene:
    """Inputs of all workloads; ``max_len`` is the maximum length of a request in tokens."""

    args: argparse.Namespace
    corpus: TextCorpus
    max_len: int | None
    seed: int = 0
    num_cut: int = 0  # Number of prompts that were cut to fit.
    num_ended: int = 0  # Number of agents that ended because their context was full.
    notes: list[str] = field(default_factory=list)

    def rng(self, name: str) -> random.Random:
        """Return a random generator for one purpose, independent of the others."""
        return random.Random(f"{self.seed}/{name}")

    def fits(self, prompt_len: int, output_len: int) -> bool:
        """Whether a request fits into the context."""
        return self.max_len is None or prompt_len + output_len + ROOM <= self.max_len

    def fitted(self, prompt_len: int, output_len: int) -> int:
        """Return the length of a prompt, cut to fit if necessary."""
        if self.fits(prompt_len, output_len):
            return prompt_len
        assert self.max_len is not None
        self.num_cut += 1
        return max(SHORTEST, self.max_len - output_len - ROOM)

    def remarks(self) -> list[str]:
        """Return notes for the report: every way in which the load differs from its options."""
        found = list(self.notes)
        if self.num_cut:
            found.append(f"{self.num_cut} prompts were cut to fit {self.max_len} tokens")
        if self.num_ended:
            found.append(
                f"{self.num_ended} agents ended early because the context of {self.max_len} "
                "tokens was full"
            )
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load; its defaults apply if no flag sets another value."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    sessions: Callable[[Scene], Sequence[Session]]
    own_figures: Callable[[Sequence[Record], argparse.Namespace], dict[str, object]] = lambda *_: {}
    concurrency: int = 8
    request_rate: float | None = None  # Sessions started per second, in an open loop.
    has_schedule: bool = False  # Whether sessions have arrival times of their own.
    # Whether the workload controls its own loop; then rate and concurrency cannot be set.
    has_loop: bool = False
    temperature: float = 0.0


def single(name: str, prompt: Sequence[Piece], output_len: int, at: float | None = None) -> Session:
    """Return a session of one request."""

    async def run(ask: Ask) -> None:
        await ask(Job(name=name, prompt=prompt, output_len=output_len))

    return Session(run, at=at)


# -- shared prefix ------------------------------------------------------------------------------


def _shared_prefix_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=positive, default=32, help="number of requests")
    add("--groups", type=positive, default=4, help="number of groups, each with its own prefix")
    add("--prefix-len", type=lengths, default=Lengths(512, 512), help="length of a group's prefix")
    add(
        "--suffix-len", type=lengths, default=Lengths(32, 32), help="length of the rest of a prompt"
    )
    add("--output-len", type=lengths, default=Lengths(16, 48), help="length of an answer")


def shared_prefix(scene: Scene) -> list[Session]:
    """Return requests of a few groups; each group shares a system prompt."""
    args, rng = scene.args, scene.rng("shared-prefix")
    prefixes = []
    for group in range(args.groups):
        room = args.suffix_len.high + args.output_len.high
        length = scene.fitted(args.prefix_len.draw(rng), room)
        prefixes.append(Piece("system", scene.corpus.cut(("prefix", group), length)))
    found = []
    for index in range(args.requests):
        suffix = scene.corpus.cut(("suffix", index), args.suffix_len.draw(rng))
        prompt = (rng.choice(prefixes), Piece("user", suffix))
        found.append(single("shared-prefix", prompt, args.output_len.draw(rng)))
    return found


# -- mixed --------------------------------------------------------------------------------------


def _mixed_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=positive, default=48, help="number of requests")
    add(
        "--input-len",
        type=lengths,
        default=Lengths(16, 1024),
        help="length of a prompt, log-uniform",
    )
    add("--output-len", type=lengths, default=Lengths(16, 64), help="length of an answer")


def mixed(scene: Scene) -> list[Session]:
    """Return prompts without a common prefix, many short and a few long."""
    args, rng = scene.args, scene.rng("mixed")
    found = []
    for index in range(args.requests):
        output_len = args.output_len.draw(rng)
        length = scene.fitted(args.input_len.draw_log(rng), output_len)
        prompt = (Piece("user", scene.corpus.cut(("mixed", index), length)),)
        found.append(single("mixed", prompt, output_len))
    return found


SHARED_PREFIX = Workload(
    "shared-prefix",
    "groups of requests that share a system prompt",
    _shared_prefix_flags,
    shared_prefix,
)
MIXED = Workload(
    "mixed",
    "prompts of mixed lengths that arrive at random (open loop)",
    _mixed_flags,
    mixed,
    request_rate=4.0,
)
